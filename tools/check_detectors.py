"""Puts a small SLABSwin into every family of mmdet's detectors and folds it, as tools/deploy.py does. For releases."""

import argparse
import sys

from rich.console import Console

from mmslab.deploy.families import FAMILIES, check_families, families_table
from mmslab.errors import input_errors
from mmslab.versions import check_detection


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('families', nargs='*', metavar='FAMILY', help=f'default all: {", ".join(FAMILIES)}')
    args = parser.parse_args()
    console, checked = Console(), []
    with input_errors():
        check_detection()
        for each in check_families(args.families or list(FAMILIES)):
            console.print(f'{each.family}: {each.not_built or each.error or "folded"}', markup=False)
            checked.append(each)
    console.print(families_table(checked))
    sys.exit(any(each.error for each in checked))


if __name__ == '__main__':
    main()
