# SLAB-DeiT-S (Table 2: 80.0 top-1, 4.4 GFLOPs, 10.4 ms).
_base_ = './_base_/deit.py'

norm_cfg = dict(type='PRepBN', ln_eps=1e-6)
model = dict(
    backbone=dict(
        arch='small',
        attn='sla',
        out_type='avg_featmap',
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.0,
    ),
    head=dict(in_channels=384),
)
custom_hooks = [
    dict(type='GammaDecayHook', T=300000, unit='iter'),
    dict(type='BNRecalibrationHook', num_epochs=10),
]
