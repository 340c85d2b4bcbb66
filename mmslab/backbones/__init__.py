"""The backbones of the paper. They know nothing of detectors; build them by name from any mm* config."""

from .swin import SLABSwin

__all__ = ['SLABSwin']
