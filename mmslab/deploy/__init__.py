"""From a trained model to the one that runs: folding of norms, and export."""

from .fold import fold, is_folded

__all__ = ['fold', 'is_folded']
