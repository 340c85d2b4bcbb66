"""Necks between these backbones and a detector, where mmdet ships none."""

from .simple_feature_pyramid import SimpleFeaturePyramid

__all__ = ['SimpleFeaturePyramid']
