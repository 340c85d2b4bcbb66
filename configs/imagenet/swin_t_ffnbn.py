# Swin-T-BN-FFNBN (Table 1: 80.9 top-1, 4.5 GFLOPs, 805 images/s).
_base_ = './_base_/swin.py'

norm_cfg = dict(type='BN')
model = dict(
    backbone=dict(
        arch='tiny',
        attn='softmax',
        window_sizes=7,
        norm_cfg=norm_cfg,
        ffn_norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.1,
    ),
)
