# Swin-S-BN-FFNBN (Table 1: 82.8 top-1, 8.7 GFLOPs, 452 images/s).
_base_ = './_base_/swin.py'

norm_cfg = dict(type='BN')
model = dict(
    backbone=dict(
        arch='small',
        attn='softmax',
        window_sizes=7,
        norm_cfg=norm_cfg,
        ffn_norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.3,
    ),
)
