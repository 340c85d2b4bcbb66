# Swin-T (Table 1: 81.3 top-1, 4.5 GFLOPs, 740 images/s).
_base_ = './_base_/swin.py'

norm_cfg = dict(type='LN')
model = dict(
    backbone=dict(
        arch='tiny',
        attn='softmax',
        window_sizes=7,
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.2,
    ),
)
