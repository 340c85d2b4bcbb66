"""Makes a small data set of shapes: overlapping instances in COCO's format, or --classes, laid out as ImageNet is."""

import argparse
from typing import Optional, Sequence

from ..data.shapes import LAYOUTS, MASKS, make_shape_classes, make_shapes
from ..errors import input_errors


def main(argv: Optional[Sequence[str]] = None, prog: Optional[str] = None) -> None:
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument('out', nargs='?', default='data/shapes', help='folder to write to')
    parser.add_argument('--classes', action='store_true', help='a classification set, one shape in an image')
    parser.add_argument('--num-train', type=int, default=2000, help='training images')
    parser.add_argument('--num-val', type=int, default=250, help='held-out images')
    parser.add_argument('--size', type=int, default=128, help='pixels along a side')
    parser.add_argument('--max-shapes', type=int, default=6, help='shapes in an image at the most (not with --classes)')
    parser.add_argument('--masks', choices=MASKS, default='mixed', help='how masks are written (not with --classes)')
    parser.add_argument(
        '--layout', choices=LAYOUTS, default='coco', help='annotations/, or beside the images (not with --classes)'
    )
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--force', action='store_true', help='write over a data set that is there')
    args = vars(parser.parse_args(argv))
    with input_errors():
        if args.pop('classes'):
            del args['max_shapes'], args['masks'], args['layout']
            counts = make_shape_classes(**args)
            print(f'{args["out"]}: {counts["train"]} images to train on, {counts["val"]} held out')
        else:
            counts = make_shapes(**args)
            print(f'{args["out"]}: {counts["train"]} instances to train on, {counts["val"]} held out')
