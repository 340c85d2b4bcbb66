# DeiT-T (Table 1: 72.2 top-1, 1.3 GFLOPs, 3432 images/s).
_base_ = './_base_/deit.py'

norm_cfg = dict(type='LN', eps=1e-6)
model = dict(
    backbone=dict(
        arch='tiny',
        attn='softmax',
        out_type='cls_token',
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.1,
    ),
)
