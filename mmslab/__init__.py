"""mmslab: the efficient backbones of the SLAB paper for OpenMMLab. Importing it registers all its names."""

import sys
from pathlib import Path

from .version import __version__

__all__ = [
    '__version__',
    'backbones',
    'convert_norms',
    'find_config',
    'fold',
    'hooks',
    'layers',
    'necks',
    'optim',
    'set_gamma',
]


def _is_doctor() -> bool:
    """Whether this program is ``mmslab doctor``, ``python -m mmslab doctor``, or the process that it tries imports in."""
    # while a package is imported, -m has hidden its name in sys.argv; a spawned process has the longer one of its parent
    program = next(iter(sys.orig_argv[-len(sys.argv) :]), '')
    return program == 'mmslab.probe' or (Path(program).stem == 'mmslab' and sys.argv[1:2] == ['doctor'])


if not _is_doctor():  # which says what keeps the rest from being imported
    from .versions import check_versions

    check_versions()

    from . import backbones, hooks, layers, necks, optim
    from .configs import find_config, register_configs
    from .folding import fold
    from .handover import convert_norms
    from .layers import set_gamma

    register_configs()
