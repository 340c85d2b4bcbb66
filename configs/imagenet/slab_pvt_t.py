# SLAB-PVT-T (Tables 2 and 6: 76.5 top-1, 2.0 GFLOPs, 8.0 ms).
_base_ = './_base_/pvt.py'

norm_cfg = dict(type='PRepBN', ln_eps=1e-6)
model = dict(
    backbone=dict(
        arch='tiny',
        attn='sla',
        norm_cfg=norm_cfg,
        drop_path_rate=0.0,
    ),
)
custom_hooks = [
    dict(type='GammaDecayHook', T=0, unit='iter'),
    dict(type='BNRecalibrationHook', num_epochs=10),
]
