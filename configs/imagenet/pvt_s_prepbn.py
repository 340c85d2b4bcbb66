# PVT-S-PRepBN (Table 1: 80.1 top-1, 3.8 GFLOPs, 911 images/s).
_base_ = './_base_/pvt.py'

norm_cfg = dict(type='PRepBN', ln_eps=1e-6)
model = dict(
    backbone=dict(
        arch='small',
        attn='softmax',
        norm_cfg=norm_cfg,
        drop_path_rate=0.1,
    ),
)
custom_hooks = [
    dict(type='GammaDecayHook', T=300000, unit='iter'),
    dict(type='BNRecalibrationHook', num_epochs=10),
]
