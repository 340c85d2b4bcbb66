"""Evaluates a checkpoint."""

import argparse
import os
from typing import Optional, Sequence

from mmengine.config import DictAction

from ..apis import build_tester
from ..errors import input_errors


def parse_args(argv: Optional[Sequence[str]], prog: Optional[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument('config', help='config file, or a name as maskrcnn_slab_swin_t_1x or mmdet::...')
    parser.add_argument('checkpoint', help='checkpoint file')
    parser.add_argument('--work-dir', help='folder for logs and metrics (default: work_dirs/<config>)')
    parser.add_argument('--out', help='.pkl file for the predictions')
    parser.add_argument('--show', action='store_true', help='show predictions in a window')
    parser.add_argument('--show-dir', help='folder for images with predictions')
    parser.add_argument('--wait-time', type=float, default=2, help='seconds that a window stays')
    parser.add_argument(
        '--tta', action='store_true', help='merge the predictions for each image and its mirror image, or by tta_model'
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
        build_tester(
            args.config,
            args.checkpoint,
            work_dir=args.work_dir,
            out=args.out,
            show_dir=args.show_dir,
            show=args.show,
            wait_time=args.wait_time,
            options=args.cfg_options,
            launcher=args.launcher,
            trust_checkpoint=args.trust_checkpoint,
            tta=args.tta,
        ).test()
