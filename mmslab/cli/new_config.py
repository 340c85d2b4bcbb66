"""Writes a config for a data set in COCO's format: classes, sizes, anchors, batch and schedule from what it measures."""

import argparse
from typing import Optional, Sequence

from rich.console import Console

from ..errors import input_errors
from ..new_config import archs, new_config


def main(argv: Optional[Sequence[str]] = None, prog: Optional[str] = None) -> None:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument('--data', required=True, metavar='FOLDER', help='the data set')
    parser.add_argument('--arch', required=True, help=f'one of {", ".join(archs())}')
    parser.add_argument('--out', required=True, metavar='FILE', help='.py file to write')
    for split, name in (('train', 'training'), ('val', 'validation')):
        parser.add_argument(
            f'--{split}-ann', metavar='FILE', help=f'annotations of the {name} set, if not in a usual place'
        )
        parser.add_argument(f'--{split}-images', metavar='FOLDER', help='its images, if not in a usual place')
    parser.add_argument(
        '--hold-out',
        type=float,
        metavar='FRACTION',
        help='without a validation set: the part of the training images to validate on, chosen at random',
    )
    parser.add_argument('--from-scratch', action='store_true', help='without pre-trained weights')
    parser.add_argument('--force', action='store_true', help='replace FILE if it exists')
    args = parser.parse_args(argv)
    with input_errors():
        plan = new_config(
            args.data,
            args.arch,
            args.out,
            train_ann=args.train_ann,
            val_ann=args.val_ann,
            train_images=args.train_images,
            val_images=args.val_images,
            hold_out_fraction=args.hold_out,
            from_scratch=args.from_scratch,
            force=args.force,
        )
    train, val = (plan.figures[split] for split in ('train', 'val'))
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f'{len(train.sizes)} images to train on with {len(train.boxes)} instances of {len(plan.classes)} classes, '
        f'{"with masks" if plan.masks else "boxes alone"}; {len(val.sizes)} images to validate on'
    )
    console.print(
        f'{plan.epochs} epochs in batches of {plan.batch}, images within {plan.image_scale[0]}x{plan.image_scale[1]}'
    )
    console.print(args.out)
