"""Says what is installed, whether it works, and what to do about what does not. Exits with 1 if something is wrong."""

import argparse
import sys
from typing import Optional, Sequence

from rich.console import Console
from rich.table import Table

from ..doctor import NOTE, OK, WRONG, examine, to_json

COLOURS = {OK: 'green', NOTE: 'yellow', WRONG: 'bold red'}


def main(argv: Optional[Sequence[str]] = None, prog: Optional[str] = None) -> None:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument('--json', action='store_true', help='print it as JSON')
    args = parser.parse_args(argv)
    findings = examine()
    if args.json:
        print(to_json(findings))
    else:
        console = Console()
        console = console if console.is_terminal else Console(width=160)
        table = Table()
        for column in ('', 'what', 'found'):
            table.add_column(column, overflow='fold')
        for f in findings:
            table.add_row(f'[{COLOURS[f.verdict]}]{f.verdict}', f.name, f.found.replace('[', r'\['))
        console.print(table)
        for f in findings:  # not in the table, so that a command can be copied
            if f.remedy:
                console.print(f'{f.verdict}: {f.name}: {f.remedy}', markup=False, highlight=False, soft_wrap=True)
    sys.exit(any(f.verdict == WRONG for f in findings))
