# Flatten-DeiT-T (Tables 2 and 6: 74.1 top-1, 1.1 GFLOPs, 15.2 ms).
_base_ = './_base_/deit.py'

norm_cfg = dict(type='LN', eps=1e-6)
model = dict(
    backbone=dict(
        arch='tiny',
        attn='focused',
        out_type='avg_featmap',
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.1,
    ),
)
