"""Folding norms into the layers around them, in any model."""

from .fold import Report, fold

__all__ = ['Report', 'fold']
