"""Writes weights that others published under mmslab's key names."""

import argparse
from typing import Any, Optional, Sequence

from ..checkpoints import HEADS, RELEASES, convert
from ..errors import input_errors


class _List(argparse.Action):
    """Prints the table of names and ends the program, as --help does."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(nargs=0, **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> None:
        for name, release in RELEASES.items():
            print(f'{name:<42} {release.family:<10} {release.source}')
        parser.exit()


def main(argv: Optional[Sequence[str]] = None, prog: Optional[str] = None) -> None:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument('source', metavar='IN', help='checkpoint to read: a file, an address, or a name of --list')
    parser.add_argument('target', metavar='OUT', help='checkpoint to write')
    parser.add_argument('--list', action=_List, help='print the names of published weights, and end')
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
