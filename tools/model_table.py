"""Prints every model of model-index.yml with its parameters and FLOPs, beside the paper's FLOPs."""

import argparse

from rich.console import Console
from rich.progress import track
from rich.table import Table

from mmslab.benchmark.complexity import rows
from mmslab.configs import INDEX
from mmslab.errors import input_errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument('--index', default=INDEX, help='file that lists the models')
    parser.add_argument(
        '--image', type=int, nargs=2, default=(800, 1333), help="height and width for detectors' backbones"
    )
    parser.add_argument(
        '--only', default='', help='only models whose config has this in its path, as imagenet/ or swin'
    )
    args = parser.parse_args()
    table = Table(
        title='parameters of the whole model; multiply-adds of classifiers at 224x224, of the backbones of detectors at --image'
    )
    for column in ('model', 'params (M)', 'GFLOPs', "paper's GFLOPs", 'off'):
        table.add_column(column, justify='left' if column == 'model' else 'right')
    marked = 0
    with input_errors():
        for row in track(rows(args.index, tuple(args.image), args.only), description='counting'):
            off = '' if row.off is None else f'{row.off:+.1%}' + (' !' if row.marked else '')
            paper = '' if row.paper_gflops is None else f'{row.paper_gflops:g}'
            table.add_row(row.name, f'{row.params:.1f}', f'{row.gflops:.2f}', paper, off)
            marked += row.marked
    console = Console()
    console.print(table)
    console.print(f"{marked} rows more than 5% off the paper's FLOPs{' (marked with !)' if marked else ''}")


if __name__ == '__main__':
    main()
