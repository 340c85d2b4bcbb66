# SLAB-DeiT-T (Tables 2 and 6: 74.3 top-1, 1.1 GFLOPs, 9.6 ms).
_base_ = './_base_/deit.py'

norm_cfg = dict(type='PRepBN', ln_eps=1e-6)
model = dict(
    backbone=dict(
        arch='tiny',
        attn='sla',
        out_type='avg_featmap',
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.0,
    ),
)
custom_hooks = [
    dict(type='GammaDecayHook', T=0, unit='iter'),
    dict(type='BNRecalibrationHook', num_epochs=10),
]
