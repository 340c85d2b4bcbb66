"""Draws the boxes and masks that a detector finds in an image or a folder of images."""

import argparse

from mmslab.apis import infer
from mmslab.errors import input_errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('images', help='an image or a folder of images')
    parser.add_argument('--config', required=True, help='config file')
    parser.add_argument('--checkpoint', required=True, help='checkpoint file')
    parser.add_argument('--out', required=True, help='folder for the drawn images')
    parser.add_argument('--score-thr', type=float, default=0.3, help='draw detections from this score on')
    parser.add_argument('--device', help="'cpu', 'cuda:0', ... (default: a GPU if there is one)")
    parser.add_argument('--force', action='store_true', help='replace images of the same name')
    parser.add_argument('--trust-checkpoint', action='store_true', help='unpickle a checkpoint that holds any object')
    args = parser.parse_args()
    with input_errors():
        written = infer(
            args.images,
            args.config,
            args.checkpoint,
            args.out,
            score_thr=args.score_thr,
            device=args.device,
            force=args.force,
            trust_checkpoint=args.trust_checkpoint,
        )
        print(f'{len(written)} images drawn into {args.out}')


if __name__ == '__main__':
    main()
