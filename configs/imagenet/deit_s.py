# DeiT-S (Table 1: 79.8 top-1, 4.6 GFLOPs, 952 images/s).
_base_ = './_base_/deit.py'

norm_cfg = dict(type='LN', eps=1e-6)
model = dict(
    backbone=dict(
        arch='small',
        attn='softmax',
        out_type='cls_token',
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.1,
    ),
    head=dict(in_channels=384),
)
