"""How a command line tells a user's mistake from a defect."""

import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

_PACKAGE = Path(__file__).resolve().parent


@contextmanager
def input_errors() -> Iterator[None]:
    """Ends the program with one line for an error that this package raised on bad input; others keep their trace."""
    try:
        yield
    except (ValueError, OSError, ImportError, FloatingPointError) as e:
        root: BaseException = e
        while root.__context__ is not None and not _raised_here(root):
            root = root.__context__  # mmengine's registries raise an error anew
        if not _raised_here(root):
            raise
        sys.exit(f'error: {root}')


def reason(e: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    lines = str(e).strip().splitlines()
    return f'{type(e).__name__}: {lines[0]}' if lines else type(e).__name__


def _raised_here(e: BaseException) -> bool:
    trace = e.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return _PACKAGE in Path(trace.tb_frame.f_code.co_filename).resolve().parents
