# Swin-B (Table 1: 83.5 top-1, 15.4 GFLOPs, 274 images/s).
_base_ = './_base_/swin.py'

norm_cfg = dict(type='LN')
model = dict(
    backbone=dict(
        arch='base',
        attn='softmax',
        window_sizes=7,
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.5,
    ),
    head=dict(in_channels=1024),
)
