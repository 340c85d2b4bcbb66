# DeiT-S-BN-FFNBN (Table 1: 78.8 top-1, 4.6 GFLOPs, 990 images/s).
_base_ = './_base_/deit.py'

norm_cfg = dict(type='BN')
model = dict(
    backbone=dict(
        arch='small',
        attn='softmax',
        out_type='cls_token',
        norm_cfg=norm_cfg,
        ffn_norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.0,
    ),
    head=dict(in_channels=384),
)
