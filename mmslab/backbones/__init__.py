"""The backbones of the paper. They know nothing of detectors; build them by name from any mm* config."""

from .cswin import SLABCSWin
from .deit import SLABDeiT
from .pvt import SLABPVT
from .swin import SLABSwin

__all__ = ['SLABCSWin', 'SLABDeiT', 'SLABPVT', 'SLABSwin']
