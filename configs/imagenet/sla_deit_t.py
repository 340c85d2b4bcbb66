# SLA-DeiT-T (Table 6: 73.0 top-1, 1.1 GFLOPs, 10.2 ms).
_base_ = './_base_/deit.py'

norm_cfg = dict(type='LN', eps=1e-6)
model = dict(
    backbone=dict(
        arch='tiny',
        attn='sla',
        out_type='avg_featmap',
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.1,
    ),
)
