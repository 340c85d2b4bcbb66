"""Makes a small data set of shapes: overlapping instances in COCO's format, or --classes, laid out as ImageNet is."""

from mmslab.cli.make_shapes import main

if __name__ == '__main__':
    main()
