# PVT-M (Table 1: 81.2 top-1, 6.7 GFLOPs, 520 images/s).
_base_ = './_base_/pvt.py'

norm_cfg = dict(type='LN', eps=1e-6)
model = dict(
    backbone=dict(
        arch='medium',
        attn='softmax',
        norm_cfg=norm_cfg,
        drop_path_rate=0.3,
    ),
)
