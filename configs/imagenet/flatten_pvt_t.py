# Flatten-PVT-T (Tables 2 and 6: 77.8 top-1, 2.0 GFLOPs, 10.8 ms).
_base_ = './_base_/pvt.py'

norm_cfg = dict(type='LN', eps=1e-6)
model = dict(
    backbone=dict(
        arch='tiny',
        attn='focused',
        norm_cfg=norm_cfg,
        drop_path_rate=0.1,
    ),
)
