"""Trains, recalibrates, evaluates, draws, folds and times a small SLAB-Swin Mask R-CNN on shapes that it makes."""

from mmslab.cli.demo import main

if __name__ == '__main__':
    main()
