# SLAB-Swin-S (Tables 2 and 6: 83.6 top-1, 8.7 GFLOPs, 16.2 ms).
_base_ = './_base_/swin.py'

norm_cfg = dict(type='PRepBN')
model = dict(
    backbone=dict(
        arch='small',
        attn=('sla', 'sla', 'softmax', 'softmax'),
        window_sizes=(56, 28, 7, 7),
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.3,
    ),
)
custom_hooks = [
    dict(type='GammaDecayHook', T=300000, unit='iter'),
    dict(type='BNRecalibrationHook', num_epochs=10),
]
