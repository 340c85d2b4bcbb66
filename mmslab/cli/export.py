"""Writes a trained model in its folded form as ONNX or torch.export's .pt2, for images of any size, checked."""

import argparse
from typing import Optional, Sequence

from mmengine.config import DictAction
from rich.console import Console

from ..deploy.compare import table
from ..deploy.export import PARTS, export
from ..errors import input_errors


def main(argv: Optional[Sequence[str]] = None, prog: Optional[str] = None) -> None:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument('config', help='config file, or a name as maskrcnn_slab_swin_t_1x')
    parser.add_argument('checkpoint', help='checkpoint file, trained until gamma is 0, or folded by mmslab deploy')
    parser.add_argument('--out', required=True, metavar='FILE', help='.onnx or .pt2 file to write')
    parser.add_argument(
        '--part',
        choices=PARTS,
        default='backbone',
        help='the backbone alone; or the model, a detector up to the scores and box deltas of its RPN or dense head',
    )
    parser.add_argument('--size', type=int, nargs=2, metavar=('H', 'W'), help='take images of this size alone')
    parser.add_argument('--force', action='store_true', help='replace FILE if it exists')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='config entries to replace, key=value')
    parser.add_argument('--trust-checkpoint', action='store_true', help='unpickle a checkpoint that holds any object')
    args = parser.parse_args(argv)
    with input_errors():
        differences = export(
            args.config,
            args.checkpoint,
            args.out,
            part=args.part,
            size=args.size and tuple(args.size),
            force=args.force,
            options=args.cfg_options,
            trust_checkpoint=args.trust_checkpoint,
        )
        console = Console()
        console.print(table(differences, 'graph'))
        console.print(args.out, highlight=False, soft_wrap=True)
