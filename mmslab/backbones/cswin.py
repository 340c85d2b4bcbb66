"""SLABCSWin: the CSWin Transformer (Dong et al. 2022) with the norms and the attention of the SLAB paper."""

from typing import Iterator, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import Tensor

from ..layers.attention import check_heads
from ..layers.embed import ConvDownsample, PatchEmbed
from ..layers.fold import LINEAR, fold_forward, foldable, is_known, keep_affine, switch_to_deploy
from ..layers.windows import Size, centering, padded_size, symbolic, window_partition, window_reverse
from .base import (
    SLABBackbone,
    Stage,
    TransformerBlock,
    build_attention,
    check_pretrain_size,
    drop_path_rates,
    is_softmax,
    per_stage,
    resolve_arch,
)

_WIDTHS = dict(embed_dims=64, num_heads=(2, 4, 8, 16))
ARCHS = {
    'tiny': dict(depths=(1, 2, 21, 1), **_WIDTHS),
    'slab_tiny': dict(depths=(2, 4, 18, 1), **_WIDTHS),
    'small': dict(depths=(2, 4, 32, 2), **_WIDTHS),
}
PATCH_SIZE = 4


@foldable(qkv=LINEAR, proj=LINEAR, proj_drop=nn.Dropout)
class CrossShapedAttention(nn.Module):
    """Attention in stripes: half the channels in vertical ones, half in horizontal ones (CSWin).

    A vertical stripe is as high as the map and ``split_size`` wide, a horizontal one lies across. Queries, keys and
    values are padded with zeros, evenly at both sides, until stripes cover them; the padding takes part, as in its
    authors' segmentation. Where the map of the pre-training is a single stripe (``one_branch``), all channels attend
    on the whole map. LePE, a 3x3 depth-wise convolution of the values in each stripe, is added to the output.

    Args:
        attn (str | dict): As in :func:`~mmslab.backbones.base.build_attention`; the module must have ``mix``.
        embed_dims (int): Channels C.
        num_heads (int): Heads of both branches together.
        resolution (int): Side of the map of the pre-training, which positional encodings are made for.
        split_size (int): The short side of a stripe.
        one_branch (bool): See above.
        qkv_bias (bool): Whether q, k and v have a bias.
        attn_drop (float): Dropout rate of softmax attention weights.
        proj_drop (float): Dropout rate after the projection.

    Raises:
        ValueError: If heads do not divide channels, in each branch.
    """

    def __init__(
        self,
        attn: Union[str, dict],
        embed_dims: int,
        num_heads: int,
        resolution: int,
        split_size: int,
        one_branch: bool,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.split_size = split_size
        self.num_branches = 1 if one_branch else 2
        if num_heads % self.num_branches:
            raise ValueError(
                f'num_heads must be even where attention is in two kinds of stripes, but got {num_heads}. Use a '
                'multiple of 2.'
            )
        dims = embed_dims // self.num_branches
        self.qkv = nn.Linear(embed_dims, 3 * embed_dims, bias=qkv_bias)
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.proj_drop = nn.Dropout(proj_drop)
        self.branches = nn.ModuleList(
            build_attention(
                attn,
                softmax='SoftmaxAttention',
                softmax_args=dict(attn_drop=attn_drop),
                embed_dims=dims,
                num_heads=num_heads // self.num_branches,
                window_size=self.stripe(branch, (resolution, resolution)),
                with_projections=False,
            )
            for branch in range(self.num_branches)
        )
        self.lepe = nn.ModuleList(nn.Conv2d(dims, dims, 3, padding=1, groups=dims) for _ in range(self.num_branches))

    def stripe(self, branch: int, hw_shape: Size) -> Size:
        """Height and width of the stripes of a branch on a map of size ``hw_shape``."""
        if self.num_branches == 1:
            return hw_shape
        return (hw_shape[0], self.split_size) if branch == 0 else (self.split_size, hw_shape[1])

    def switch_to_deploy(self) -> None:
        """The inference form of the attention in its branches; in a subclass norms become scales and shifts."""
        if is_known(self):
            for branch in self.branches:
                switch_to_deploy(branch)
        keep_affine(self)

    def absorb(self, scale: Tensor, shift: Tensor) -> None:
        """Takes over a norm before it. Padding comes after the projection, so it stays zeros."""
        fold_forward(scale, shift, self.qkv)

    def forward(self, x: Tensor, *, hw_shape: Size) -> Tensor:
        """Tokens of a map, ``(B, h * w, C)``, to the same."""
        (B, N, C), (H, W) = x.shape, hw_shape
        qkv = self.qkv(x).view(B, H, W, 3, self.num_branches, C // self.num_branches)
        outs = []
        for branch, (attn, lepe) in enumerate(zip(self.branches, self.lepe)):
            window = self.stripe(branch, hw_shape)
            top, left = centering(hw_shape, window)
            maps = qkv[..., branch, :].unbind(3)
            Hp, Wp = padded_size(hw_shape, window)
            if symbolic(H, W) or (Hp, Wp) != (H, W):
                maps = [F.pad(t, (0, 0, left, Wp - W - left, top, Hp - H - top)) for t in maps]
            q, k, v = (window_partition(t, window) for t in maps)
            local = lepe(v.transpose(1, 2).unflatten(2, window)).flatten(2).transpose(1, 2)
            out = window_reverse(attn.mix(q, k, v, window) + local, (Hp, Wp), window)
            outs.append(out.narrow(1, top, H).narrow(2, left, W))
        return self.proj_drop(self.proj(torch.cat(outs, dim=-1).view(B, N, C)))


@MODELS.register_module()
@foldable()
class SLABCSWin(SLABBackbone):
    """CSWin Transformer with per-stage attention and any norm; one class for each of the paper's CSWin rows.

    With the defaults it is SLAB-CSWin-T as its authors train it: SLA on the whole map in stages 1 and 2, softmax in
    stripes after them, PRepBN throughout, LN on the maps handed to the neck. The baseline CSWin-T is
    ``arch='tiny', attn='softmax', norm_cfg=dict(type='LN')``.

    Args:
        arch (str | dict): 'tiny' (depths 1, 2, 21, 1: CSWin's own), 'slab_tiny' (2, 4, 18, 1: the SLAB authors'),
            'small', or ``dict(embed_dims=, depths=, num_heads=)``.
        in_channels (int): Of the image. Defaults to 3.
        pretrain_img_size (int): The image size of the pre-training. It decides which positional encodings there are
            (resized at any other size), and that a stage whose map has the side of one split has one branch, on
            the whole map, as the last stage always has. Defaults to 224.
        attn (str | dict | Sequence): Attention, one for all stages or one per stage: 'sla' (Eq. 9), 'focused',
            'softmax', or the name or config of a registered attention with ``mix``.
        split_sizes (int | Sequence): Short sides of the stripes where the attention is 'softmax'.
        sla_split_sizes (int | Sequence): The same where it is anything else; by default the whole map at 224.
        mlp_ratio (float): Hidden over embedding dimensions of the MLP. Defaults to 4.
        qkv_bias (bool): Whether q, k and v have a bias. Defaults to True.
        drop_rate (float): Dropout rate after embedding, projections and MLP layers. Defaults to 0.
        attn_drop_rate (float): Dropout rate of softmax attention weights. Defaults to 0.
        drop_path_rate (float): Stochastic depth, growing linearly from 0 at the first block. Defaults to 0.1.
        norm_cfg (dict): Norms in the blocks, after the embedding and the merging convolutions.
        ffn_norm_cfg (dict, optional): A norm between the MLP's linear layers (FFNBN, Yao et al. 2021).
        out_norm_cfg (dict, optional): Norms on the returned maps; None for none.
        out_indices (Sequence[int]): Stages whose maps are returned. Defaults to all four.
        frozen_stages (int): Stages up to this one, and the patch embedding, are frozen; 0 freezes the patch
            embedding alone, -1 (default) nothing.
        norm_eval (bool): Whether BN statistics stay frozen while training, as the authors fine-tune. Defaults to False.
        with_cp (bool): Whether to use gradient checkpointing. Defaults to False.
        deploy (bool): Builds the inference form, which a folded checkpoint fits. Defaults to False.
        init_cfg (dict, optional): ``dict(type='Pretrained', checkpoint=...)``, see :mod:`mmslab.checkpoints`.

    Shape:
        Images ``(B, in_channels, H, W)`` of any size from 4 pixels, to a tuple of maps ``(B, C * 2**i, H_i, W_i)``,
        one for each stage i of ``out_indices``, with ``H_0 = floor((H + 1) / 4)`` and ``H_i = ceil(H_0 / 2**i)``.

    Raises:
        ValueError: For an unknown arch, attention or norm, a per-stage sequence of the wrong length, heads that do
            not divide the channels of a branch, a split below 1, a pre-training size or an image below 4 pixels.
    """

    def __init__(
        self,
        arch: Union[str, dict] = 'slab_tiny',
        in_channels: int = 3,
        pretrain_img_size: int = 224,
        attn: Union[str, dict, Sequence] = ('sla', 'sla', 'softmax', 'softmax'),
        split_sizes: Union[int, Sequence] = (1, 2, 7, 7),
        sla_split_sizes: Union[int, Sequence] = (56, 28, 14, 7),
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        norm_cfg: dict = dict(type='PRepBN'),
        ffn_norm_cfg: Optional[dict] = None,
        out_norm_cfg: Optional[dict] = dict(type='LN'),
        out_indices: Sequence[int] = (0, 1, 2, 3),
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        deploy: bool = False,
        init_cfg: Optional[dict] = None,
    ) -> None:
        arch = resolve_arch(arch, ARCHS, 'SLABCSWin')
        depths = tuple(arch['depths'])
        num_stages = len(depths)
        num_heads = per_stage(arch['num_heads'], num_stages, "arch['num_heads']")
        num_features = [arch['embed_dims'] * 2**i for i in range(num_stages)]
        attns = per_stage(attn, num_stages, 'attn')
        softmax_splits = _check_splits(per_stage(split_sizes, num_stages, 'split_sizes'), 'split_sizes')
        other_splits = _check_splits(per_stage(sla_split_sizes, num_stages, 'sla_split_sizes'), 'sla_split_sizes')
        for dims, heads in zip(num_features, num_heads):
            check_heads(dims, heads)
        rates = drop_path_rates(drop_path_rate, depths)
        grid = check_pretrain_size(pretrain_img_size, PATCH_SIZE) // PATCH_SIZE
        super().__init__(num_stages, out_indices, frozen_stages, norm_eval, with_cp, init_cfg, deploy)
        self.patch_embed = PatchEmbed(
            in_channels, num_features[0], PATCH_SIZE, norm_cfg, drop_rate, kernel_size=7, padding=2
        )
        stages = []
        for i in range(self.out_indices[-1] + 1):  # later stages would be parameters that never see a gradient
            dims, resolution = num_features[i], max(grid // 2**i, 1)
            split = softmax_splits[i] if is_softmax(attns[i]) else other_splits[i]
            blocks = [
                TransformerBlock(
                    CrossShapedAttention(
                        attns[i],
                        embed_dims=dims,
                        num_heads=num_heads[i],
                        resolution=resolution,
                        split_size=split,
                        one_branch=i == num_stages - 1 or resolution == split,
                        qkv_bias=qkv_bias,
                        attn_drop=attn_drop_rate,
                        proj_drop=drop_rate,
                    ),
                    embed_dims=dims,
                    mlp_ratio=mlp_ratio,
                    drop=drop_rate,
                    drop_path=rate,
                    norm_cfg=norm_cfg,
                    ffn_norm_cfg=ffn_norm_cfg,
                )
                for rate in rates[i]
            ]
            last = i == self.out_indices[-1]
            downsample = None if last else ConvDownsample(dims, 2 * dims, 2, norm_cfg, kernel_size=3, padding=1)
            stages.append(Stage(blocks, downsample))
        self.layers = nn.ModuleList(stages)
        self.finish(out_norm_cfg, num_features)

    def attentions(self) -> Iterator[Tuple[str, nn.Module]]:
        for name, attn in super().attentions():
            yield from ((f'{name}.branches.{i}', branch) for i, branch in enumerate(attn.branches))


def _check_splits(splits: Sequence, name: str) -> Sequence[int]:
    if not all(isinstance(s, int) and s > 0 for s in splits):
        raise ValueError(
            f'{name} must be positive integers, tokens along the short side of a stripe, but got {splits}.'
        )
    return splits
