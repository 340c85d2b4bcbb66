"""Trains a detector or classifier from a config."""

import argparse
import os
from typing import Optional, Sequence

from mmengine.config import DictAction

from ..apis import build_trainer
from ..errors import input_errors


def parse_args(argv: Optional[Sequence[str]], prog: Optional[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument('config', help='config file, or a name as maskrcnn_slab_swin_t_1x or mmdet::...')
    parser.add_argument('--work-dir', help='folder for logs and checkpoints (default: work_dirs/<config>)')
    parser.add_argument('--amp', action='store_true', help='mixed precision')
    parser.add_argument('--auto-scale-lr', action='store_true', help='scale the learning rate to the total batch size')
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        help='a checkpoint to resume from; without a value, the latest whole one in the work dir',
    )
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='config entries to replace, key=value')
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none')
    parser.add_argument('--trust-checkpoint', action='store_true', help='unpickle checkpoints that hold any object')
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0)
    args = parser.parse_args(argv)
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    return args


def main(argv: Optional[Sequence[str]] = None, prog: Optional[str] = None) -> None:
    args = parse_args(argv, prog)
    with input_errors():
        build_trainer(
            args.config,
            work_dir=args.work_dir,
            amp=args.amp,
            auto_scale_lr=args.auto_scale_lr,
            resume=args.resume,
            options=args.cfg_options,
            launcher=args.launcher,
            trust_checkpoint=args.trust_checkpoint,
        ).train()
