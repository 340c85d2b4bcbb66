# Swin-T-PRepBN (Table 1: 81.4 top-1, 4.5 GFLOPs, 805 images/s).
# T = 0 is Table A1's "linear decay steps": RepBN from the start, as in the authors' code for the smallest models.
_base_ = './_base_/swin.py'

norm_cfg = dict(type='PRepBN')
model = dict(
    backbone=dict(
        arch='tiny',
        attn='softmax',
        window_sizes=7,
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.1,
    ),
)
custom_hooks = [
    dict(type='GammaDecayHook', T=0, unit='iter'),
    dict(type='BNRecalibrationHook', num_epochs=10),
]
