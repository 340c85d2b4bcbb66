"""Writes a config for a data set in COCO's format: classes, sizes, anchors, batch and schedule from what it measures."""

from mmslab.cli.new_config import main

if __name__ == '__main__':
    main()
