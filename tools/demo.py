"""Trains, recalibrates, evaluates, draws, folds and times a small SLAB-Swin Mask R-CNN on shapes that it makes."""

import argparse

from mmengine.config import DictAction

from mmslab.demo import run_demo
from mmslab.errors import input_errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--out', default='work_dirs/demo', help='folder for checkpoint, curves and drawn images')
    parser.add_argument('--data', default='data/shapes', help='folder for the data set')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='config entries to replace, key=value')
    args = parser.parse_args()
    with input_errors():
        run_demo(args.out, args.data, options=args.cfg_options)


if __name__ == '__main__':
    main()
