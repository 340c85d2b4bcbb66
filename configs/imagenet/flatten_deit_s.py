# Flatten-DeiT-S (Table 2: 80.4 top-1, 4.4 GFLOPs, 15.5 ms).
_base_ = './_base_/deit.py'

norm_cfg = dict(type='LN', eps=1e-6)
model = dict(
    backbone=dict(
        arch='small',
        attn='focused',
        out_type='avg_featmap',
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.1,
    ),
    head=dict(in_channels=384),
)
