"""Writes weights of the SLAB authors, Microsoft or OpenMMLab under mmslab's key names."""

import argparse
from typing import Optional, Sequence

from ..checkpoints import HEADS, convert
from ..errors import input_errors


def main(argv: Optional[Sequence[str]] = None, prog: Optional[str] = None) -> None:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument('source', metavar='IN', help='checkpoint to read')
    parser.add_argument('target', metavar='OUT', help='checkpoint to write')
    parser.add_argument('--force', action='store_true', help='replace OUT if it exists')
    parser.add_argument(
        '--head',
        choices=HEADS,
        default='keep',
        help='a classification head: keep its names, drop it, or '
        "write the whole as mmpretrain's ImageClassifier has it",
    )
    parser.add_argument('--trust-checkpoint', action='store_true', help='unpickle a checkpoint that holds any object')
    args = parser.parse_args(argv)
    with input_errors():
        convert(args.source, args.target, trust=args.trust_checkpoint, force=args.force, head=args.head)
