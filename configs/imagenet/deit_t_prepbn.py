# DeiT-T-PRepBN (Tables 1 and 7: 73.6 top-1, 1.3 GFLOPs, 4194 images/s).
# T = 0 is Table A1's "linear decay steps": RepBN from the start, as in the authors' code for the smallest models.
_base_ = './_base_/deit.py'

norm_cfg = dict(type='PRepBN', ln_eps=1e-6)
model = dict(
    backbone=dict(
        arch='tiny',
        attn='softmax',
        out_type='cls_token',
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.0,
    ),
)
custom_hooks = [
    dict(type='GammaDecayHook', T=0, unit='iter'),
    dict(type='BNRecalibrationHook', num_epochs=10),
]
