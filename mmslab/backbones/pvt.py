"""SLABPVT: the Pyramid Vision Transformer (Wang et al. 2021) with the norms and the attention of the SLAB paper."""

from typing import Optional, Sequence, Union

import torch.nn as nn
from mmengine.registry import MODELS

from ..layers.attention import check_heads
from ..layers.embed import ConvDownsample, PatchEmbed, PositionEmbedding
from ..layers.fold import foldable
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

_WIDTHS = dict(embed_dims=(64, 128, 320, 512), num_heads=(1, 2, 5, 8), mlp_ratios=(8, 8, 4, 4))
ARCHS = {
    'tiny': dict(depths=(2, 2, 2, 2), **_WIDTHS),
    'small': dict(depths=(3, 4, 6, 3), **_WIDTHS),
    'medium': dict(depths=(3, 4, 18, 3), **_WIDTHS),
    'large': dict(depths=(3, 8, 27, 3), **_WIDTHS),
}


@MODELS.register_module()
@foldable()
class SLABPVT(SLABBackbone):
    """Pyramid Vision Transformer, v1, with per-stage attention and any norm; one class for each of the paper's PVT rows.

    With the defaults it is SLAB-PVT-T: SLA on the whole map in every stage, PRepBN throughout. The baseline PVT-T is
    ``attn='softmax', norm_cfg=dict(type='LN', eps=1e-6)``. As the authors train it there is no class token and no
    norm at the end; a classifier takes the mean of the last map.

    Args:
        arch (str | dict): 'tiny', 'small', 'medium', 'large', or
            ``dict(embed_dims=, depths=, num_heads=, mlp_ratios=)`` with one entry per stage in each.
        in_channels (int): Of the image. Defaults to 3.
        patch_size (int): Pixels along a side of a patch; later stages halve the map. Defaults to 4.
        pretrain_img_size (int): The image size that position embeddings and encodings are made for, and resized
            from at any other. Defaults to 224.
        attn (str | dict | Sequence): Attention, one for all stages or one per stage: 'sla' (Eq. 9), 'focused',
            'softmax', or the name or config of a registered attention.
        sr_ratios (int | Sequence): Spatial reduction of keys and values where the attention is 'softmax'.
        sla_sr_ratios (int | Sequence): The same where it is anything else. Defaults to 1, none.
        qkv_bias (bool): Whether q, k and v have a bias. Defaults to True.
        drop_rate (float): Dropout rate after position embeddings, projections and MLP layers. Defaults to 0.
        attn_drop_rate (float): Dropout rate of softmax attention weights. Defaults to 0.
        drop_path_rate (float): Stochastic depth, growing linearly from 0 at the first block. Defaults to 0.1.
        norm_cfg (dict): Norms in the blocks, after patch embeddings and in spatial reductions.
        ffn_norm_cfg (dict, optional): A norm between the MLP's linear layers (FFNBN, Yao et al. 2021).
        out_norm_cfg (dict, optional): Norms on the returned maps; None (default) for none.
        out_indices (Sequence[int]): Stages whose maps are returned. Defaults to all four.
        frozen_stages (int): Stages up to this one, and the patch embedding, are frozen; 0 freezes the patch
            embedding alone, -1 (default) nothing.
        norm_eval (bool): Whether BN statistics stay frozen while training, as the authors fine-tune. Defaults to False.
        with_cp (bool): Whether to use gradient checkpointing. Defaults to False.
        deploy (bool): Builds the inference form, which a folded checkpoint fits. Defaults to False.
        init_cfg (dict, optional): ``dict(type='Pretrained', checkpoint=...)``, see :mod:`mmslab.checkpoints`.

    Shape:
        Images ``(B, in_channels, H, W)`` of any size from one patch, to a tuple of maps
        ``(B, embed_dims[i], ceil(H / (4 * 2**i)), ceil(W / (4 * 2**i)))``, one for each stage i of ``out_indices``.

    Raises:
        ValueError: For an unknown arch, attention or norm, a per-stage sequence of the wrong length, heads that do
            not divide the channels, a reduction below 1, a pre-training size below one patch, an image smaller
            than one patch.
    """

    def __init__(
        self,
        arch: Union[str, dict] = 'tiny',
        in_channels: int = 3,
        patch_size: int = 4,
        pretrain_img_size: int = 224,
        attn: Union[str, dict, Sequence] = 'sla',
        sr_ratios: Union[int, Sequence] = (8, 4, 2, 1),
        sla_sr_ratios: Union[int, Sequence] = 1,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        norm_cfg: dict = dict(type='PRepBN', ln_eps=1e-6),
        ffn_norm_cfg: Optional[dict] = None,
        out_norm_cfg: Optional[dict] = None,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        deploy: bool = False,
        init_cfg: Optional[dict] = None,
    ) -> None:
        arch = resolve_arch(arch, ARCHS, 'SLABPVT')
        depths = tuple(arch['depths'])
        num_stages = len(depths)
        dims, heads, mlp_ratios = (
            per_stage(arch[key], num_stages, f'arch[{key!r}]') for key in ('embed_dims', 'num_heads', 'mlp_ratios')
        )
        attns = per_stage(attn, num_stages, 'attn')
        softmax_ratios = per_stage(sr_ratios, num_stages, 'sr_ratios')
        other_ratios = per_stage(sla_sr_ratios, num_stages, 'sla_sr_ratios')
        for name, ratios in (('sr_ratios', softmax_ratios), ('sla_sr_ratios', other_ratios)):
            if not all(isinstance(r, int) and not isinstance(r, bool) and r > 0 for r in ratios):
                raise ValueError(f'{name} must be positive integers (1: no reduction), but got {ratios!r}.')
        for d, h in zip(dims, heads):
            check_heads(d, h)
        rates = drop_path_rates(drop_path_rate, depths)
        grid = check_pretrain_size(pretrain_img_size, patch_size) // patch_size
        super().__init__(num_stages, out_indices, frozen_stages, norm_eval, with_cp, init_cfg, deploy)
        self.patch_embed = PatchEmbed(in_channels, dims[0], patch_size, norm_cfg)
        stages = []
        for i in range(self.out_indices[-1] + 1):  # later stages would be parameters that never see a gradient
            side = max(grid // 2**i, 1)
            blocks = [
                TransformerBlock(
                    build_attention(
                        attns[i],
                        softmax='SoftmaxAttention',
                        softmax_args=dict(attn_drop=attn_drop_rate),
                        embed_dims=dims[i],
                        num_heads=heads[i],
                        window_size=(side, side),
                        qkv_bias=qkv_bias,
                        proj_drop=drop_rate,
                        sr_ratio=softmax_ratios[i] if is_softmax(attns[i]) else other_ratios[i],
                        norm_cfg=norm_cfg,
                    ),
                    embed_dims=dims[i],
                    mlp_ratio=mlp_ratios[i],
                    drop=drop_rate,
                    drop_path=rate,
                    norm_cfg=norm_cfg,
                    ffn_norm_cfg=ffn_norm_cfg,
                )
                for rate in rates[i]
            ]
            last = i == self.out_indices[-1]
            downsample = None if last else ConvDownsample(dims[i], dims[i + 1], 2, norm_cfg)
            pos_embed = PositionEmbedding(dims[i], (side, side), drop=drop_rate, mode='bilinear')
            stages.append(Stage(blocks, downsample, pos_embed))
        self.layers = nn.ModuleList(stages)
        self.finish(out_norm_cfg, dims)
