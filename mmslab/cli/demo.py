"""Trains, recalibrates, evaluates, draws, folds and times a small SLAB-Swin Mask R-CNN on shapes that it makes."""

import argparse
from typing import Optional, Sequence

from mmengine.config import DictAction

from ..demo import run_demo
from ..errors import input_errors


def main(argv: Optional[Sequence[str]] = None, prog: Optional[str] = None) -> None:
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument('--out', default='work_dirs/demo', help='folder for checkpoint, curves and drawn images')
    parser.add_argument('--data', default='data/shapes', help='folder for the data set')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='config entries to replace, key=value')
    args = parser.parse_args(argv)
    with input_errors():
        run_demo(args.out, args.data, options=args.cfg_options)
