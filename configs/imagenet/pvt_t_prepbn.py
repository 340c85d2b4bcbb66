# PVT-T-PRepBN (Table 1: 76.0 top-1, 1.9 GFLOPs, 1756 images/s).
# T = 0 is Table A1's "linear decay steps": RepBN from the start, as in the authors' code for the smallest models.
_base_ = './_base_/pvt.py'

norm_cfg = dict(type='PRepBN', ln_eps=1e-6)
model = dict(
    backbone=dict(
        arch='tiny',
        attn='softmax',
        norm_cfg=norm_cfg,
        drop_path_rate=0.0,
    ),
)
custom_hooks = [
    dict(type='GammaDecayHook', T=0, unit='iter'),
    dict(type='BNRecalibrationHook', num_epochs=10),
]
