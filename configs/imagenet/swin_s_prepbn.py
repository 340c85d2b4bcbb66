# Swin-S-PRepBN (Table 1: 83.2 top-1, 8.7 GFLOPs, 452 images/s).
_base_ = './_base_/swin.py'

norm_cfg = dict(type='PRepBN')
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
custom_hooks = [
    dict(type='GammaDecayHook', T=300000, unit='iter'),
    dict(type='BNRecalibrationHook', num_epochs=10),
]
