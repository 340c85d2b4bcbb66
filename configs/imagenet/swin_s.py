# Swin-S (Table 1: 83.0 top-1, 8.7 GFLOPs, 421 images/s).
_base_ = './_base_/swin.py'

norm_cfg = dict(type='LN')
model = dict(
    backbone=dict(
        arch='small',
        attn='softmax',
        window_sizes=7,
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.3,
    ),
)
