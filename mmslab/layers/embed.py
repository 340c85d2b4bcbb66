"""Patch embedding, MLP and drop path: the parts of a vision transformer that the paper leaves as they are."""

from typing import Optional

import torch.nn as nn
import torch.nn.functional as F
from mmcv.cnn.bricks.drop import DropPath
from torch import Tensor

from .norm import build_norm

__all__ = ['MLP', 'DropPath', 'PatchEmbed']


class PatchEmbed(nn.Module):
    """Cuts an image into patches and embeds each: ``(B, in_channels, H, W)`` to ``(B, H', W', embed_dims)``.

    An image whose sides are no multiples of ``patch_size`` is padded with zeros at the bottom and right.

    Raises:
        ValueError: If an image is smaller than one patch, or not ``(B, in_channels, H, W)``.
    """

    def __init__(self, in_channels: int, embed_dims: int, patch_size: int, norm_cfg: Optional[dict]) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_channels, embed_dims, patch_size, stride=patch_size)
        self.norm = nn.Identity() if norm_cfg is None else build_norm(norm_cfg, embed_dims)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != self.proj.in_channels:
            raise ValueError(f'images must be (B, {self.proj.in_channels}, H, W), but got the shape {tuple(x.shape)}.')
        p = self.patch_size
        H, W = x.shape[-2:]
        if H < p or W < p:
            raise ValueError(
                f'an image of {H}x{W} pixels is smaller than one patch of {p}x{p}. Resize or pad it to at least {p}x{p}.'
            )
        if H % p or W % p:
            x = F.pad(x, (0, -W % p, 0, -H % p))
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class MLP(nn.Module):
    """Two linear layers with a GELU in between: ``(..., embed_dims)`` to the same.

    ``ffn_norm_cfg`` adds a norm between them: the FFNBN of Yao et al. (2021).
    """

    def __init__(
        self, embed_dims: int, hidden_dims: int, drop: float = 0.0, ffn_norm_cfg: Optional[dict] = None
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(embed_dims, hidden_dims)
        self.norm = nn.Identity() if ffn_norm_cfg is None else build_norm(ffn_norm_cfg, hidden_dims, 'ffn_norm_cfg')
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_dims, embed_dims)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.norm(self.fc1(x))))))
