"""The building blocks of the SLAB paper; torch, mmengine and mmcv.cnn are all they need."""

from .attention import FocusedLinearAttention, SimplifiedLinearAttention, SoftmaxAttention, SoftmaxWindowAttention
from .norm import PRepBN, RepBN, set_gamma

__all__ = [
    'FocusedLinearAttention',
    'PRepBN',
    'RepBN',
    'SimplifiedLinearAttention',
    'SoftmaxAttention',
    'SoftmaxWindowAttention',
    'set_gamma',
]
