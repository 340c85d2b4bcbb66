"""Draws the boxes and masks that a detector finds in images or a video, and writes them as JSON."""

import argparse
import sys
from typing import Optional, Sequence

from ..errors import input_errors
from ..infer import PREDICTIONS, infer


def main(argv: Optional[Sequence[str]] = None, prog: Optional[str] = None) -> None:
    parser = argparse.ArgumentParser(
        prog=prog, description=__doc__, epilog='Exits with 1 if anything had to be skipped; it is listed at the end.'
    )
    parser.add_argument('images', help='an image, a folder of images with its subfolders, or a video')
    parser.add_argument(
        '--config', required=True, help='config file of a detector, or a name as maskrcnn_slab_swin_t_1x or mmdet::...'
    )
    parser.add_argument('--checkpoint', required=True, help='checkpoint file')
    parser.add_argument('--out', required=True, help=f'folder for the drawn images or video, and {PREDICTIONS}')
    parser.add_argument('--score-thr', type=float, default=0.3, help='draw and write detections from this score on')
    parser.add_argument('--device', help="'cpu', 'cuda:0', ... (default: a GPU if there is one)")
    parser.add_argument('--force', action='store_true', help='replace files of the same name')
    parser.add_argument('--trust-checkpoint', action='store_true', help='unpickle a checkpoint that holds any object')
    args = parser.parse_args(argv)
    with input_errors():
        done = infer(
            args.images,
            args.config,
            args.checkpoint,
            args.out,
            score_thr=args.score_thr,
            device=args.device,
            force=args.force,
            trust_checkpoint=args.trust_checkpoint,
        )
    print(f'{done.images} {done.unit} drawn into {args.out}')
    print(f'{done.detections} detections with a score of at least {args.score_thr:g} in {done.predictions}')
    for path, why in done.skipped.items():
        print(f'skipped: {str(path)!r} {why}', file=sys.stderr)
    sys.exit(1 if done.skipped else 0)
