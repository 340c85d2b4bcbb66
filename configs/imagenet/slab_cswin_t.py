# SLAB-CSWin-T (Table 2: 82.8 top-1, 4.3 GFLOPs, 29.3 ms).
_base_ = './_base_/cswin.py'

norm_cfg = dict(type='PRepBN')
model = dict(
    backbone=dict(
        arch='slab_tiny',
        attn=('sla', 'sla', 'softmax', 'softmax'),
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.1,
    ),
)
custom_hooks = [
    dict(type='GammaDecayHook', T=0, unit='iter'),
    dict(type='BNRecalibrationHook', num_epochs=10),
]
