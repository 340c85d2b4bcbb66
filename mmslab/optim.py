"""Layer-wise learning-rate decay for any model with a backbone that knows its depths."""

from typing import Any, List

import torch.nn as nn
from mmengine.optim import DefaultOptimWrapperConstructor
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS


@OPTIM_WRAPPER_CONSTRUCTORS.register_module()
class LayerDecayOptimWrapperConstructor(DefaultOptimWrapperConstructor):
    """Learning rates that fall from the head to the input by ``layer_decay_rate`` a layer (Clark et al. 2020; Bao et al. 2022).

    A parameter at depth d of n has ``lr * layer_decay_rate ** (n - 1 - d)``; what is not of a backbone, as neck and heads, has
    ``lr``. Depths are those of ``get_layer_depth(param_name, prefix)``, which all backbones here and many of mmpretrain's have.
    mmpretrain's ``LearningRateDecayOptimWrapperConstructor`` gives a classifier the same; it needs a model that knows the
    depths itself, which mmdet's detectors do not, and mmdet's own knows ConvNeXt alone.

    All else is mmengine's default constructor: ``custom_keys``, ``norm_decay_mult`` and the like stay, and an ``lr_mult``
    multiplies the layer's rate.

    Example:
        >>> optim_wrapper = dict(
        ...     constructor='LayerDecayOptimWrapperConstructor', paramwise_cfg=dict(layer_decay_rate=0.75))

    Raises:
        ValueError: If ``paramwise_cfg`` has no ``layer_decay_rate`` in (0, 1], the optimizer no ``lr``, or the model no
            backbone with ``get_layer_depth``.
    """

    def _validate_cfg(self) -> None:
        super()._validate_cfg()
        rate = self.paramwise_cfg.get('layer_decay_rate')
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate <= 1:
            raise ValueError(
                'LayerDecayOptimWrapperConstructor needs paramwise_cfg=dict(layer_decay_rate=...), a number in (0, 1] (1: no '
                f'decay), but got {rate!r}.'
            )
        if self.base_lr is None:
            raise ValueError(
                'LayerDecayOptimWrapperConstructor needs the optimizer to have an lr: optimizer=dict(lr=...).'
            )

    def add_params(self, params: List[dict], module: nn.Module, prefix: str = '', **kwargs: Any) -> None:
        """The groups of the default constructor, one for each parameter, with the learning rates of their layers."""
        super().add_params(params, module, prefix, **kwargs)
        if prefix:
            return
        found = {f'{name}.' if name else '': m for name, m in module.named_modules() if hasattr(m, 'get_layer_depth')}
        # a classifier of mmpretrain's has the method too, and hands it on to its backbone
        backbones = {a: m for a, m in found.items() if not any(b != a and b.startswith(a) for b in found)}
        if not backbones:
            raise ValueError(
                f'LayerDecayOptimWrapperConstructor: {type(module).__name__} has no backbone with get_layer_depth, which says '
                "how deep a layer is. mmslab's backbones have it, and mmpretrain's Swin, ViT, BEiT and ConvNeXt."
            )
        names = {parameter: name for name, parameter in module.named_parameters()}
        for group in params:
            name = names[group['params'][0]]
            for start, backbone in backbones.items():
                if name.startswith(start):
                    depth, number = backbone.get_layer_depth(name, start)
                    scale = self.paramwise_cfg['layer_decay_rate'] ** (number - 1 - depth)
                    group['lr'] = group.get('lr', self.base_lr) * scale
