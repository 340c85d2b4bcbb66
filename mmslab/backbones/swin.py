"""SLABSwin: the Swin Transformer (Liu et al. 2021) with the norms and the attention of the SLAB paper."""

from typing import Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import Tensor

from ..layers.attention import check_heads, to_pair
from ..layers.embed import MLP, DropPath, PatchEmbed
from ..layers.fold import LINEAR, foldable, folded, is_foldable, keep_affine
from ..layers.inference import rows_in_piece
from ..layers.norm import build_norm
from ..layers.windows import Size, shifted_window_mask, symbolic, window_indices, window_partition, window_reverse
from .base import (
    SLABBackbone,
    Stage,
    TransformerBlock,
    build_attention,
    drop_path_rates,
    per_stage,
    resolve_arch,
)

ARCHS = {
    'tiny': dict(embed_dims=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24)),
    'small': dict(embed_dims=96, depths=(2, 2, 18, 2), num_heads=(3, 6, 12, 24)),
    'base': dict(embed_dims=128, depths=(2, 2, 18, 2), num_heads=(4, 8, 16, 32)),
}


@foldable(mlp=MLP, drop_path=(DropPath, nn.Identity))
class SwinBlock(TransformerBlock):
    """A block (Eq. 1) with its attention in windows.

    Maps ``(B, H, W, C)`` to the same. ``shifted`` blocks move the windows by half their size. The map is padded
    after its norm, with zeros, so padding takes part in the attention as the authors train it.
    """

    def __init__(self, attn: nn.Module, window_size: Size, shifted: bool, pad_small_map: bool, **kwargs) -> None:
        super().__init__(attn, **kwargs)
        self.window_size = window_size
        self.shifted = shifted
        self.pad_small_map = pad_small_map
        self.projects_map = False

    def window_of(self, hw: Size) -> Tuple[Size, Size]:
        """The window and the shift for a map of size ``hw``.

        Without ``pad_small_map`` a map that fits into one window shrinks the window to itself and is not
        shifted, as in the pre-training at 224 pixels.
        """
        h, w = self.window_size
        if not self.pad_small_map and hw[0] <= h and hw[1] <= w:
            return hw, (0, 0)
        return (h, w), ((h // 2, w // 2) if self.shifted else (0, 0))

    def attention(self, x: Tensor) -> Tensor:
        hw = (x.shape[1], x.shape[2])
        window, shift = self.window_of(hw)
        mask = None
        if any(shift) and getattr(self.attn, 'uses_mask', False):
            mask = shifted_window_mask(hw, window, shift, x.device)
        if self.projects_map:
            qkv = window_partition(self.attn.qkv(x), window, shift, self.qkv_of_padding)
            windows = self.attn.mix(*qkv.chunk(3, dim=-1), window, mask=mask)
            return self.attn.proj(window_reverse(windows, hw, window, shift))
        windows = self.attn(window_partition(x, window, shift), hw_shape=window, mask=mask)
        return window_reverse(windows, hw, window, shift)

    def _switch_to_deploy(self) -> None:
        """Queries, keys and values come from the map, before it is padded and cut into windows.

        Padding is zeros after the norm. Once the norm is folded no input of the projection need stand for them (where
        a channel's scale is 0 there is none), but their queries, keys and values are known: the projection's former bias.
        An attention that projects otherwise, as one with a spatial reduction, or that may do so, as a subclass, keeps a
        scale and a shift in front of it.
        """
        self.projects_map = is_foldable(self.attn) and all(hasattr(self.attn, n) for n in ('qkv', 'mix', 'proj'))
        if self.projects_map:
            bias = self.attn.qkv.bias
            padding = (
                self.attn.qkv.weight.new_zeros(self.attn.qkv.out_features) if bias is None else bias.detach().clone()
            )
            self.register_buffer('qkv_of_padding', padding)
        super()._switch_to_deploy()

    def takes_norm1(self) -> Optional[nn.Module]:
        return self.attn if self.projects_map else None

    def add_attention_(self, x: Tensor) -> None:
        B, H, W, C = x.shape
        window, shift = self.window_of((H, W))
        if not self.projects_map or window == (H, W):  # a window that is the map needs no indices
            return super().add_attention_(x)
        N = window[0] * window[1]
        masked = getattr(self.attn, 'uses_mask', False)
        max_windows = max(rows_in_piece(x, 3 * C) // N, 1)
        rows = x.view(-1, C)
        for piece in window_indices(B, (H, W), window, shift, masked, max_windows, x.device):
            qkv = self.attn.qkv(self.norm1(rows.index_select(0, piece.tokens)))
            if piece.padding is not None:
                qkv[piece.padding] = self.qkv_of_padding.to(qkv.dtype)
            qkv = qkv.view(-1, N, 3 * C).split([n for n, _ in piece.runs])
            outs = [self.attn.mix(*t.chunk(3, dim=-1), window, mask=mask) for t, (_, mask) in zip(qkv, piece.runs)]
            out = (torch.cat(outs) if len(outs) > 1 else outs[0]).view(-1, C)
            if piece.kept is not None:
                out = out.index_select(0, piece.kept)
            rows.index_add_(0, piece.target, self.attn.proj(out).to(rows.dtype))


@foldable(reduction=LINEAR)
class PatchMerging(nn.Module):
    """Halves the map: ``(B, H, W, C)`` to ``(B, ceil(H / 2), ceil(W / 2), 2C)``, padded with zeros before the norm."""

    def __init__(self, embed_dims: int, norm_cfg: dict) -> None:
        super().__init__()
        self.norm = build_norm(norm_cfg, 4 * embed_dims)
        self.reduction = nn.Linear(4 * embed_dims, 2 * embed_dims, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        H, W = x.shape[1:3]
        if symbolic(H, W) or H % 2 or W % 2:
            x = F.pad(x, (0, 0, 0, W % 2, 0, H % 2))
        x = x.reshape(x.shape[0], (H + 1) // 2, 2, (W + 1) // 2, 2, x.shape[-1])
        x = x.permute(0, 1, 3, 4, 2, 5).flatten(3)  # Microsoft's order of the four: down, then across
        return self.reduction(self.norm(x))

    def switch_to_deploy(self) -> None:
        """The inference form: the norm becomes part of the linear layer after it, in a subclass a scale and a shift."""
        if is_foldable(self):
            self.norm = folded(self.norm, self.reduction)
        else:
            keep_affine(self)


@MODELS.register_module()
@foldable()
class SLABSwin(SLABBackbone):
    """Swin Transformer with per-stage attention and any norm; one class for each of the paper's Swin rows.

    With the defaults it is SLAB-Swin-T for detection: SLA in stages 1 and 2, windows 56 and 28, softmax in
    windows of 7 after them, PRepBN throughout, LN on the maps handed to the neck (authors' setting). The
    baseline Swin-T is ``attn='softmax', window_sizes=7, norm_cfg=dict(type='LN')``.

    Args:
        arch (str | dict): 'tiny', 'small', 'base', or ``dict(embed_dims=, depths=, num_heads=)``.
        in_channels (int): Of the image. Defaults to 3.
        patch_size (int): Pixels along a side of a patch. Defaults to 4.
        attn (str | dict | Sequence): Attention, one for all stages or one per stage: 'sla' (Eq. 9), 'focused',
            'softmax', or the name or config of a registered attention.
        window_sizes (int | Sequence): Tokens along a side of the windows; one for all stages or one per stage,
            each an int or a pair (height, width).
        mlp_ratio (float): Hidden over embedding dimensions of the MLP. Defaults to 4.
        qkv_bias (bool): Whether q, k and v have a bias. Defaults to True.
        drop_rate (float): Dropout rate after embedding, projections and MLP layers. Defaults to 0.
        attn_drop_rate (float): Dropout rate of softmax attention weights. Defaults to 0.
        drop_path_rate (float): Stochastic depth, growing linearly from 0 at the first block. Defaults to 0.1.
        norm_cfg (dict): Norms in the blocks, the patch embedding and the merging.
        ffn_norm_cfg (dict, optional): A norm between the MLP's linear layers (FFNBN, Yao et al. 2021).
        out_norm_cfg (dict, optional): Norms on the returned maps; None for none.
        patch_norm (bool): Whether the patch embedding has a norm. Defaults to True.
        out_indices (Sequence[int]): Stages whose maps are returned. Defaults to all four.
        frozen_stages (int): Stages up to this one, and the patch embedding, are frozen; 0 freezes the patch
            embedding alone, -1 (default) nothing.
        norm_eval (bool): Whether BN statistics stay frozen while training, as the authors fine-tune. Defaults to False.
        with_cp (bool): Whether to use gradient checkpointing. Defaults to False.
        pad_small_map (bool): True (default): maps smaller than a window are padded to it and shifted, the form
            for detection. False: the window shrinks to them, the form for classification.
        deploy (bool): Builds the inference form, which a folded checkpoint fits. Defaults to False.
        init_cfg (dict, optional): ``dict(type='Pretrained', checkpoint=...)``, see :mod:`mmslab.checkpoints`.

    Shape:
        Images ``(B, in_channels, H, W)`` of any size from one patch, to a tuple of maps
        ``(B, C * 2**i, ceil(H / (4 * 2**i)), ceil(W / (4 * 2**i)))``, one for each stage i of ``out_indices``.

    Raises:
        ValueError: For an unknown arch, attention or norm, a per-stage sequence of the wrong length, heads that
            do not divide the channels, an image smaller than one patch.
    """

    def __init__(
        self,
        arch: Union[str, dict] = 'tiny',
        in_channels: int = 3,
        patch_size: int = 4,
        attn: Union[str, dict, Sequence] = ('sla', 'sla', 'softmax', 'softmax'),
        window_sizes: Union[int, Sequence] = (56, 28, 7, 7),
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        norm_cfg: dict = dict(type='PRepBN'),
        ffn_norm_cfg: Optional[dict] = None,
        out_norm_cfg: Optional[dict] = dict(type='LN'),
        patch_norm: bool = True,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        pad_small_map: bool = True,
        deploy: bool = False,
        init_cfg: Optional[dict] = None,
    ) -> None:
        arch = resolve_arch(arch, ARCHS, 'SLABSwin')
        depths, num_heads = tuple(arch['depths']), tuple(arch['num_heads'])
        num_stages = len(depths)
        num_heads = per_stage(num_heads, num_stages, "arch['num_heads']")
        attns = per_stage(attn, num_stages, 'attn')
        windows = [to_pair(w, 'window_sizes') for w in per_stage(window_sizes, num_stages, 'window_sizes')]
        num_features = [arch['embed_dims'] * 2**i for i in range(num_stages)]
        for dims, heads in zip(num_features, num_heads):
            check_heads(dims, heads)
        rates = drop_path_rates(drop_path_rate, depths)
        super().__init__(num_stages, out_indices, frozen_stages, norm_eval, with_cp, init_cfg, deploy)
        patch_norm_cfg = norm_cfg if patch_norm else None
        self.patch_embed = PatchEmbed(in_channels, num_features[0], patch_size, patch_norm_cfg, drop_rate)
        stages = []
        for i in range(self.out_indices[-1] + 1):  # later stages would be parameters that never see a gradient
            dims = num_features[i]
            blocks = [
                SwinBlock(
                    build_attention(
                        attns[i],
                        softmax_args=dict(attn_drop=attn_drop_rate),
                        embed_dims=dims,
                        num_heads=num_heads[i],
                        window_size=windows[i],
                        qkv_bias=qkv_bias,
                        proj_drop=drop_rate,
                    ),
                    windows[i],
                    shifted=bool(j % 2),
                    pad_small_map=pad_small_map,
                    embed_dims=dims,
                    mlp_ratio=mlp_ratio,
                    drop=drop_rate,
                    drop_path=rate,
                    norm_cfg=norm_cfg,
                    ffn_norm_cfg=ffn_norm_cfg,
                )
                for j, rate in enumerate(rates[i])
            ]
            stages.append(Stage(blocks, PatchMerging(dims, norm_cfg) if i < self.out_indices[-1] else None))
        self.layers = nn.ModuleList(stages)
        self.finish(out_norm_cfg, num_features)
