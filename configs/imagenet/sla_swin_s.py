# SLA-Swin-S (Table 6: 83.4 top-1, 8.8 GFLOPs, 18.0 ms).
_base_ = './_base_/swin.py'

norm_cfg = dict(type='LN')
model = dict(
    backbone=dict(
        arch='small',
        attn=('sla', 'sla', 'softmax', 'softmax'),
        window_sizes=(56, 28, 7, 7),
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.3,
    ),
)
