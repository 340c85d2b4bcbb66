# PVT-M-PRepBN (Table 1: 81.7 top-1, 6.7 GFLOPs, 556 images/s).
_base_ = './_base_/pvt.py'

norm_cfg = dict(type='PRepBN', ln_eps=1e-6)
model = dict(
    backbone=dict(
        arch='medium',
        attn='softmax',
        norm_cfg=norm_cfg,
        drop_path_rate=0.3,
    ),
)
custom_hooks = [
    dict(type='GammaDecayHook', T=300000, unit='iter'),
    dict(type='BNRecalibrationHook', num_epochs=10),
]
