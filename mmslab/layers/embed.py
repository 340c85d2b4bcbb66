"""Patch and position embedding, MLP and drop path: the parts of a vision transformer that the paper leaves as they are."""

from typing import List, Optional

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmcv.cnn.bricks.drop import DropPath
from torch import Tensor

from .attention import resize_positional_encoding
from .fold import CONV, LINEAR, fold_forward, foldable, folded_back, is_foldable, keep_affine
from .inference import conv_of_patches, cuts_patches, is_traced, use_channels_last
from .norm import build_norm
from .windows import Size, padded_size, symbolic

__all__ = ['MLP', 'ConvDownsample', 'DropPath', 'PatchEmbed', 'PositionEmbedding']


foldable()(DropPath)


@foldable(proj=CONV)
class ConvDownsample(nn.Module):
    """A strided convolution and a norm: a map ``(B, H, W, in_channels)`` to ``(B, H', W', out_channels)``.

    With ``kernel_size`` None the kernel is as large as the stride, and a map whose sides are no multiples of it is
    padded with zeros at the bottom and right, so that H' = ceil(H / stride). With a larger kernel the convolution
    pads itself, by ``padding`` on all sides.
    """

    deploy = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        stride: int,
        norm_cfg: Optional[dict],
        kernel_size: Optional[int] = None,
        padding: int = 0,
    ) -> None:
        super().__init__()
        self.stride = stride
        self.pads_to_stride = kernel_size is None
        self.proj = nn.Conv2d(in_channels, out_channels, kernel_size or stride, stride=stride, padding=padding)
        self.norm = nn.Identity() if norm_cfg is None else build_norm(norm_cfg, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        if self.deploy and self.pads_to_stride and not is_traced(x):
            return self.norm(conv_of_patches(self.proj, self.pad(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)))
        return self.embed(x.permute(0, 3, 1, 2))

    def pad(self, x: Tensor) -> Tensor:
        """Pads a map ``(B, C, H, W)`` to multiples of the stride."""
        s = self.stride
        H, W = x.shape[-2:]
        Hp, Wp = padded_size((H, W), (s, s))
        return F.pad(x, (0, Wp - W, 0, Hp - H)) if symbolic(H, W) or (Hp, Wp) != (H, W) else x

    def embed(self, x: Tensor) -> Tensor:
        """Takes the map as ``(B, in_channels, H, W)``."""
        return self.norm(self.proj(self.pad(x) if self.pads_to_stride else x).permute(0, 2, 3, 1))

    def switch_to_deploy(self) -> None:
        """The inference form: the norm becomes part of the convolution before it, in a subclass a scale and a shift."""
        if not is_foldable(self) or (self.pads_to_stride and not cuts_patches(self.proj)):
            keep_affine(self)
            return
        self.deploy = True
        self.norm = folded_back(self.proj, self.norm)
        use_channels_last(self.proj)


@foldable(proj=CONV, drop=nn.Dropout)
class PatchEmbed(ConvDownsample):
    """Cuts an image into patches and embeds each: ``(B, in_channels, H, W)`` to ``(B, H', W', embed_dims)``.

    An image whose sides are no multiples of ``patch_size`` is padded with zeros at the bottom and right, unless
    patches overlap (``kernel_size``, see :class:`ConvDownsample`).

    Raises:
        ValueError: If ``patch_size`` is no positive integer, an image is smaller than one patch, or not
            ``(B, in_channels, H, W)``.
    """

    def __init__(
        self,
        in_channels: int,
        embed_dims: int,
        patch_size: int,
        norm_cfg: Optional[dict],
        drop: float = 0.0,
        kernel_size: Optional[int] = None,
        padding: int = 0,
    ) -> None:
        if not isinstance(patch_size, int) or patch_size < 1:
            raise ValueError(f'patch_size must be a positive integer, but got {patch_size!r}.')
        if not isinstance(in_channels, int) or in_channels < 1:
            raise ValueError(f'in_channels must be a positive integer, but got {in_channels!r}.')
        super().__init__(in_channels, embed_dims, patch_size, norm_cfg, kernel_size, padding)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != self.proj.in_channels:
            raise ValueError(f'images must be (B, {self.proj.in_channels}, H, W), but got the shape {tuple(x.shape)}.')
        p = self.stride
        H, W = x.shape[-2:]
        if H < p or W < p:
            raise ValueError(
                f'an image of {H}x{W} pixels is smaller than one patch of {p}x{p}. Resize or pad it to at least {p}x{p}.'
            )
        return self.drop(self.embed(x))


@foldable(drop=nn.Dropout)
class PositionEmbedding(nn.Module):
    """Adds a learned embedding of the places of a map; resized on a map of another size than ``grid``.

    ``(B, H, W, C)`` to the same. With a class token, which has an embedding of its own, to ``(B, 1 + H * W, C)``,
    the token first; a distillation token comes second.

    Args:
        embed_dims (int): Channels C.
        grid (tuple[int, int]): Height and width of the map that the embedding is made for.
        with_cls_token (bool): Whether there is a class token. Defaults to False.
        drop (float): Dropout rate after the sum. Defaults to 0.
        mode (str): How it is resized, 'bicubic' (default) or 'bilinear'.
        with_dist_token (bool): Whether there is a distillation token. Defaults to False.
    """

    def __init__(
        self,
        embed_dims: int,
        grid: Size,
        with_cls_token: bool = False,
        drop: float = 0.0,
        mode: str = 'bicubic',
        with_dist_token: bool = False,
    ) -> None:
        super().__init__()
        self.grid = grid
        self.mode = mode
        self.weight = nn.Parameter(torch.zeros(1, with_cls_token + with_dist_token + grid[0] * grid[1], embed_dims))
        nn.init.trunc_normal_(self.weight, std=0.02)
        for name, wanted in (('cls_token', with_cls_token), ('dist_token', with_dist_token)):
            self.register_parameter(name, nn.Parameter(torch.zeros(1, 1, embed_dims)) if wanted else None)
            if wanted:
                nn.init.trunc_normal_(getattr(self, name), std=0.02)
        self.drop = nn.Dropout(drop)

    def tokens(self) -> List[Tensor]:
        """The tokens beside the map, in their order, each ``(1, 1, C)``."""
        return [token for token in (self.cls_token, self.dist_token) if token is not None]

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        tokens = self.tokens()
        of_tokens, of_map = self.weight.tensor_split([len(tokens)], dim=1)
        if symbolic(H, W) or (H, W) != self.grid:
            of_map = resize_positional_encoding(of_map, self.grid, (H, W), self.mode)
        if not tokens:
            return self.drop(x + of_map.view(1, H, W, C))
        beside = (torch.cat(tokens, dim=1) + of_tokens).expand(B, -1, -1)
        return self.drop(torch.cat([beside, x.reshape(B, H * W, C) + of_map], dim=1))


@foldable(fc1=LINEAR, act=nn.GELU, fc2=LINEAR, drop=nn.Dropout)
class MLP(nn.Module):
    """Two linear layers with a GELU in between: ``(..., embed_dims)`` to the same.

    ``ffn_norm_cfg`` adds a norm between them: the FFNBN of Yao et al. (2021).
    """

    def __init__(
        self, embed_dims: int, hidden_dims: int, drop: float = 0.0, ffn_norm_cfg: Optional[dict] = None
    ) -> None:
        super().__init__()
        if hidden_dims < 1:
            raise ValueError(f'mlp_ratio must leave the MLP at least one hidden dimension, but gives {hidden_dims}.')
        self.fc1 = nn.Linear(embed_dims, hidden_dims)
        self.norm = nn.Identity() if ffn_norm_cfg is None else build_norm(ffn_norm_cfg, hidden_dims, 'ffn_norm_cfg')
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_dims, embed_dims)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.norm(self.fc1(x))))))

    def switch_to_deploy(self) -> None:
        """The inference form: the norm becomes part of the linear layer before it, in a subclass a scale and a shift."""
        if is_foldable(self):
            self.norm = folded_back(self.fc1, self.norm)
        else:
            keep_affine(self)

    def absorb(self, scale: Tensor, shift: Tensor) -> None:
        """Takes over a norm before it: ``mlp(x)`` becomes what ``mlp(scale * x + shift)`` was."""
        fold_forward(scale, shift, self.fc1)
