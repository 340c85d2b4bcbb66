"""SLABDeiT: DeiT (Touvron et al. 2021) with the norms and the attention of the SLAB paper."""

from typing import Optional, Tuple, Union

import torch.nn as nn
from mmengine.registry import MODELS
from torch import Tensor

from ..layers.attention import check_heads
from ..layers.embed import PatchEmbed, PositionEmbedding
from ..layers.fold import foldable
from .base import (
    SLABBackbone,
    Stage,
    TransformerBlock,
    build_attention,
    check_pretrain_size,
    drop_path_rates,
    resolve_arch,
)

ARCHS = {
    'tiny': dict(embed_dims=192, depth=12, num_heads=3),
    'small': dict(embed_dims=384, depth=12, num_heads=6),
    'base': dict(embed_dims=768, depth=12, num_heads=12),
}
OUT_TYPES = ('featmap', 'avg_featmap', 'cls_token')


@MODELS.register_module()
@foldable()
class SLABDeiT(SLABBackbone):
    """DeiT with any norm and attention; one class for each of the paper's DeiT rows. It has a single stage.

    With the defaults it is SLAB-DeiT-T: SLA on the whole map, PRepBN throughout, no class token; its classifier takes
    the mean of the tokens (``out_type='avg_featmap'``). The baseline DeiT-T has softmax attention and a class token
    (``attn='softmax', norm_cfg=dict(type='LN', eps=1e-6)``, the same ``out_norm_cfg``, ``out_type='cls_token'``).
    A detector puts :class:`~mmslab.necks.SimpleFeaturePyramid` behind the map of stride 16.

    Args:
        arch (str | dict): 'tiny', 'small', 'base', or ``dict(embed_dims=, depth=, num_heads=)``.
        in_channels (int): Of the image. Defaults to 3.
        patch_size (int): Pixels along a side of a patch. Defaults to 16.
        pretrain_img_size (int): The image size that position embeddings and encodings are made for, and resized
            from at any other. Defaults to 224.
        attn (str | dict): 'sla' (Eq. 9), 'focused', 'softmax', or the name or config of a registered attention.
            Only softmax attention has a class token.
        out_type (str): 'featmap' (default), the map without the class token; 'avg_featmap', its mean; 'cls_token', and after
            it the distillation token if there is one, as mmpretrain's ``DeiTClsHead`` takes the two.
        distilled (bool): Whether there is a distillation token beside the class token, as distilled weights have it (Touvron
            et al. 2021, Sec. 4). Defaults to False.
        mlp_ratio (float): Hidden over embedding dimensions of the MLP. Defaults to 4.
        qkv_bias (bool): Whether q, k and v have a bias. Defaults to True.
        drop_rate (float): Dropout rate after position embeddings, projections and MLP layers. Defaults to 0.
        attn_drop_rate (float): Dropout rate of softmax attention weights. Defaults to 0.
        drop_path_rate (float): Stochastic depth, growing linearly from 0 at the first block. Defaults to 0.1.
        norm_cfg (dict): Norms in the blocks. The patch embedding has none.
        ffn_norm_cfg (dict, optional): A norm between the MLP's linear layers (FFNBN, Yao et al. 2021).
        out_norm_cfg (dict, optional): The norm after the last block; None for none.
        frozen_stages (int): 1 freezes the backbone, 0 the patch embedding alone, -1 (default) nothing.
        norm_eval (bool): Whether BN statistics stay frozen while training, as the authors fine-tune. Defaults to False.
        with_cp (bool): Whether to use gradient checkpointing. Defaults to False.
        deploy (bool): Builds the inference form, which a folded checkpoint fits. Defaults to False.
        init_cfg (dict, optional): ``dict(type='Pretrained', checkpoint=...)``, see :mod:`mmslab.checkpoints`.

    Shape:
        Images ``(B, in_channels, H, W)`` of any size from one patch, to a tuple with one tensor:
        ``(B, embed_dims, ceil(H / 16), ceil(W / 16))``, or ``(B, embed_dims)`` for the other out types; to a tuple with a
        pair of these for 'cls_token' where it is ``distilled``.

    Raises:
        ValueError: For an unknown arch, attention, norm or out type, heads that do not divide the channels, the
            class or distillation token of an attention that has none, a pre-training size or an image smaller than one patch.
    """

    def __init__(
        self,
        arch: Union[str, dict] = 'tiny',
        in_channels: int = 3,
        patch_size: int = 16,
        pretrain_img_size: int = 224,
        attn: Union[str, dict] = 'sla',
        out_type: str = 'featmap',
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        norm_cfg: dict = dict(type='PRepBN', ln_eps=1e-6),
        ffn_norm_cfg: Optional[dict] = None,
        out_norm_cfg: Optional[dict] = dict(type='PRepBN', ln_eps=1e-6),
        frozen_stages: int = -1,
        norm_eval: bool = False,
        with_cp: bool = False,
        deploy: bool = False,
        init_cfg: Optional[dict] = None,
        distilled: bool = False,
    ) -> None:
        arch = resolve_arch(arch, ARCHS, 'SLABDeiT')
        dims, heads = arch['embed_dims'], arch['num_heads']
        check_heads(dims, heads)
        if out_type not in OUT_TYPES:
            raise ValueError(f'out_type must be one of {OUT_TYPES}, but got {out_type!r}.')
        (rates,) = drop_path_rates(drop_path_rate, [arch['depth']])
        side = check_pretrain_size(pretrain_img_size, patch_size) // patch_size
        super().__init__(1, (0,), frozen_stages, norm_eval, with_cp, init_cfg, deploy)
        self.out_type = out_type
        self.patch_embed = PatchEmbed(in_channels, dims, patch_size, None)
        blocks = [
            TransformerBlock(
                build_attention(
                    attn,
                    softmax='SoftmaxAttention',
                    softmax_args=dict(attn_drop=attn_drop_rate),
                    embed_dims=dims,
                    num_heads=heads,
                    window_size=(side, side),
                    qkv_bias=qkv_bias,
                    proj_drop=drop_rate,
                ),
                embed_dims=dims,
                mlp_ratio=mlp_ratio,
                drop=drop_rate,
                drop_path=rate,
                norm_cfg=norm_cfg,
                ffn_norm_cfg=ffn_norm_cfg,
            )
            for rate in rates
        ]
        with_cls_token = all(getattr(block.attn, 'takes_class_token', False) for block in blocks)
        if out_type == 'cls_token' and not with_cls_token:
            raise ValueError(
                f"out_type='cls_token' needs attention with a class token, but attn={attn!r} has none. Use "
                "out_type='avg_featmap', as the authors do, or attn='softmax'."
            )
        if distilled and not with_cls_token:
            raise ValueError(
                f'distilled=True needs attention with a class token, but attn={attn!r} has none. Leave it out, or use '
                "attn='softmax'."
            )
        self.distilled = distilled
        pos_embed = PositionEmbedding(dims, (side, side), with_cls_token, drop_rate, with_dist_token=distilled)
        self.layers = nn.ModuleList([Stage(blocks, pos_embed=pos_embed)])
        self.finish(out_norm_cfg, [dims])

    def forward(self, x: Tensor) -> Tuple[Union[Tensor, Tuple[Tensor, Tensor]]]:
        x = self.patch_embed(x)
        B, H, W, C = x.shape
        x = self.norm0(self.run_stage(self.layers[0], x)).reshape(B, -1, C)
        beside, tokens = x.tensor_split([x.shape[1] - H * W], dim=1)
        if self.out_type == 'cls_token':
            return (beside.unbind(1) if self.distilled else beside[:, 0],)
        if self.out_type == 'avg_featmap':
            return (tokens.mean(dim=1),)
        return (tokens.transpose(1, 2).reshape(B, C, H, W).contiguous(),)
