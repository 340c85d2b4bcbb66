"""Converts and folds models of timm, transformers, mmpretrain and mmdet: how many norms, how exactly, how much faster.

It needs timm and, for some, transformers (pip install -r requirements/any-model.txt, in an environment of its own).
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mmslab.benchmark.any_model import ARCHITECTURES, table, write
from mmslab.errors import input_errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--only', default='', help='only models that have this in their name')
    parser.add_argument('--processes', type=int, default=5, help='fresh processes for each model')
    parser.add_argument('--rounds', type=int, default=7, help='timed rounds in each')
    parser.add_argument('--allocator', choices=('glibc', 'jemalloc'), help='what the processes allocate with')
    parser.add_argument('--csv', type=Path, help='file for the table, too')
    args = parser.parse_args()
    console = Console()
    with input_errors():
        names = [name for name in ARCHITECTURES if args.only in name]
        if not names:
            raise ValueError(f'--only {args.only!r} is in no name. Use a part of: {", ".join(ARCHITECTURES)}.')
        if args.csv and args.csv.exists():
            raise FileExistsError(f'--csv {str(args.csv)!r} exists. Choose another name.')
        rows = table(names, args.processes, args.rounds, args.allocator, lambda name: console.print(f'{name}...'))
        if args.csv:
            write(rows, args.csv)
    shown = Table(title='times are ratios, medians over the processes (lowest-highest)')
    for column in ('model', 'same outputs', 'folded', 'difference', 'time over converted', 'over the original'):
        shown.add_column(column)
    for r in rows:
        exact = 'to the bit' if r['same'] else 'no'
        counts = f'{r["folded"]} of {r["norms"]}'
        shown.add_row(r['model'], exact, counts, f'{r["difference"]:.0e}', r['over_converted'], r['over_original'])
    console.print(shown)


if __name__ == '__main__':
    main()
