"""The simple feature pyramid of ViTDet: all levels from the last map of a plain vision transformer."""

from typing import Optional, Sequence, Tuple, Union

import torch.nn as nn
import torch.nn.functional as F
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import Tensor

from ..layers.norm import build_norm


class MapNorm(nn.Module):
    """A norm over the channels of a map ``(B, C, H, W)``."""

    def __init__(self, channels: int, norm_cfg: dict) -> None:
        super().__init__()
        self.norm = build_norm(norm_cfg, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@MODELS.register_module()
class SimpleFeaturePyramid(BaseModule):
    """Simple feature pyramid (ViTDet, Li et al. 2022, Sec. 3 and App. A.2).

    Each level scales the same map, by transposed convolutions or max pooling, and maps it to ``out_channels`` with a
    1x1 and a 3x3 convolution, a norm after each. Levels beyond ``scale_factors`` are every second pixel of the last.

    Args:
        in_channels (int): Of the map.
        out_channels (int): Of every level. Defaults to 256.
        scale_factors (Sequence[float]): One level each, out of 4, 2, 1 and 0.5, descending. The default gives strides
            4, 8, 16 and 32 from a map of stride 16.
        num_outs (int): Levels in all. Defaults to 5.
        norm_cfg (dict): Norms over the channels. Defaults to ``dict(type='LN', eps=1e-6)``.
        init_cfg (dict, optional): As in every ``BaseModule``.

    Shape:
        A map ``(B, in_channels, H, W)``, or a sequence with only that, to a tuple of ``num_outs`` maps
        ``(B, out_channels, H', W')``.

    Raises:
        ValueError: For other scale factors, fewer outputs than those, several input maps, or other channels.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int = 256,
        scale_factors: Sequence[float] = (4, 2, 1, 0.5),
        num_outs: int = 5,
        norm_cfg: dict = dict(type='LN', eps=1e-6),
        init_cfg: Optional[dict] = None,
    ) -> None:
        for name, value in (('in_channels', in_channels), ('out_channels', out_channels), ('num_outs', num_outs)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f'{name} must be a positive integer, but got {value!r}.')
        super().__init__(init_cfg)
        scales = list(scale_factors)
        if not scales or not set(scales) <= {4, 2, 1, 0.5} or sorted(set(scales), reverse=True) != scales:
            raise ValueError(f'scale_factors must be some of 4, 2, 1, 0.5, descending, but got {scale_factors!r}.')
        if num_outs < len(scales):
            raise ValueError(
                f'num_outs must be at least the {len(scales)} levels of scale_factors={tuple(scales)}, but got {num_outs}.'
            )
        self.in_channels = in_channels
        self.num_outs = num_outs
        self.levels = nn.ModuleList()
        for scale in scales:
            layers, channels = [], in_channels
            if scale == 4:
                layers += [self._double(channels), MapNorm(channels // 2, norm_cfg), nn.GELU()]
                channels //= 2
            if scale >= 2:
                layers += [self._double(channels)]
                channels //= 2
            if scale == 0.5:
                layers += [nn.MaxPool2d(2, ceil_mode=True)]
            layers += [nn.Conv2d(channels, out_channels, 1, bias=False), MapNorm(out_channels, norm_cfg)]
            layers += [nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False), MapNorm(out_channels, norm_cfg)]
            self.levels.append(nn.Sequential(*layers))

    @staticmethod
    def _double(channels: int) -> nn.Module:
        return nn.ConvTranspose2d(channels, channels // 2, 2, stride=2)

    def forward(self, inputs: Union[Tensor, Sequence[Tensor]]) -> Tuple[Tensor, ...]:
        maps = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        if len(maps) != 1 or maps[0].dim() != 4 or maps[0].shape[1] != self.in_channels:
            raise ValueError(
                f'inputs must be one map (B, {self.in_channels}, H, W), but got {[tuple(m.shape) for m in maps]}. Set '
                "in_channels to the backbone's embed_dims and its out_type to 'featmap'."
            )
        outs = [level(maps[0]).contiguous() for level in self.levels]
        while len(outs) < self.num_outs:
            outs.append(F.max_pool2d(outs[-1], 1, stride=2))
        return tuple(outs)
