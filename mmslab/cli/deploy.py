"""Folds the norms of a trained detector or classifier: writes its config and checkpoint in the inference form, checked."""

import argparse
from typing import Optional, Sequence

from mmengine.config import DictAction
from rich.console import Console

from ..deploy.compare import table
from ..deploy.convert import deploy
from ..errors import input_errors


def main(argv: Optional[Sequence[str]] = None, prog: Optional[str] = None) -> None:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument('config', help='config file, or a name as maskrcnn_slab_swin_t_1x')
    parser.add_argument('checkpoint', help='checkpoint file, trained until gamma is 0')
    parser.add_argument('--out', required=True, metavar='DIR', help='folder for the folded config and checkpoint')
    parser.add_argument('--force', action='store_true', help='replace an earlier folded config and checkpoint in DIR')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='config entries to replace, key=value')
    parser.add_argument('--trust-checkpoint', action='store_true', help='unpickle a checkpoint that holds any object')
    args = parser.parse_args(argv)
    with input_errors():
        done = deploy(
            args.config,
            args.checkpoint,
            args.out,
            force=args.force,
            options=args.cfg_options,
            trust_checkpoint=args.trust_checkpoint,
        )
        console = Console()
        console.print(table(done.differences))
        console.print(f'{done.config}\n{done.checkpoint}', highlight=False, soft_wrap=True)
