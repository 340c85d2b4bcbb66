"""Draws what a training has logged: the handover from LayerNorm to RepBN, layer by layer."""

import argparse
from pathlib import Path
from typing import Optional, Sequence

from rich.console import Console

from ..data.checks import check_writable
from ..errors import input_errors
from ..plots import draw_handover


def main(argv: Optional[Sequence[str]] = None, prog: Optional[str] = None) -> None:
    parser = argparse.ArgumentParser(prog=prog, description=__doc__)
    parser.add_argument('what', choices=['handover'], help='what HandoverMonitorHook has measured, as layers by time')
    parser.add_argument('work_dir', help='folder of a training')
    parser.add_argument('--out', metavar='PNG', help='the picture; by default handover.png in work_dir')
    args = parser.parse_args(argv)
    with input_errors():
        out = Path(args.out or Path(args.work_dir) / 'handover.png')
        if args.out and out.suffix.lower() != '.png':
            raise ValueError(f'--out must name a .png file, but got {args.out!r}.')
        if args.out and out.exists():
            raise FileExistsError(f'--out {args.out!r} exists. Choose another name.')
        check_writable(out.parent, '--out')
        draw_handover(args.work_dir, out)
        Console().print(str(out), highlight=False, soft_wrap=True)
