# SLAB-Swin-T (Tables 2 and 6: 81.8 top-1, 4.5 GFLOPs, 8.7 ms).
_base_ = './_base_/swin.py'

norm_cfg = dict(type='PRepBN')
model = dict(
    backbone=dict(
        arch='tiny',
        attn=('sla', 'sla', 'softmax', 'softmax'),
        window_sizes=(56, 28, 7, 7),
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.1,
    ),
)
custom_hooks = [
    dict(type='GammaDecayHook', T=0, unit='iter'),
    dict(type='BNRecalibrationHook', num_epochs=10),
]
