# PVT-T (Table 1: 75.1 top-1, 1.9 GFLOPs, 1500 images/s).
_base_ = './_base_/pvt.py'

norm_cfg = dict(type='LN', eps=1e-6)
model = dict(
    backbone=dict(
        arch='tiny',
        attn='softmax',
        norm_cfg=norm_cfg,
        drop_path_rate=0.1,
    ),
)
