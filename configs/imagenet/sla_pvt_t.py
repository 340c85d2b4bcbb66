# SLA-PVT-T (Table 6: 75.2 top-1, 2.0 GFLOPs, 8.5 ms).
_base_ = './_base_/pvt.py'

norm_cfg = dict(type='LN', eps=1e-6)
model = dict(
    backbone=dict(
        arch='tiny',
        attn='sla',
        norm_cfg=norm_cfg,
        drop_path_rate=0.1,
    ),
)
