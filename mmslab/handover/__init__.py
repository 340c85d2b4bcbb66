"""From LayerNorm to BatchNorm, in any model."""

from .convert import ConversionReport, convert_norms, register_norm

__all__ = ['ConversionReport', 'convert_norms', 'register_norm']
