# PVT-S (Table 1: 79.8 top-1, 3.8 GFLOPs, 814 images/s).
_base_ = './_base_/pvt.py'

norm_cfg = dict(type='LN', eps=1e-6)
model = dict(
    backbone=dict(
        arch='small',
        attn='softmax',
        norm_cfg=norm_cfg,
        drop_path_rate=0.1,
    ),
)
