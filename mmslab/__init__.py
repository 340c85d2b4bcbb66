"""mmslab: the efficient backbones of the SLAB paper for OpenMMLab. Importing it registers all its names."""

from .version import __version__
from .versions import check_versions

check_versions()

from . import backbones, hooks, layers, necks, optim  # noqa: E402  (after the check: they import mmcv and mmengine)

__all__ = ['__version__', 'backbones', 'hooks', 'layers', 'necks', 'optim']
