# Swin-B-BN-FFNBN (Table 1: 83.1 top-1, 15.4 GFLOPs, 284 images/s).
_base_ = './_base_/swin.py'

norm_cfg = dict(type='BN')
model = dict(
    backbone=dict(
        arch='base',
        attn='softmax',
        window_sizes=7,
        norm_cfg=norm_cfg,
        ffn_norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.3,
    ),
    head=dict(in_channels=1024),
)
