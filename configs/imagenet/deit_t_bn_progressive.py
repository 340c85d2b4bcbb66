# DeiT-T-BN-Progressive (Table 7: 73.1 top-1). The paper does not say its T; this is that of the larger models (Table A1).
_base_ = './_base_/deit.py'

norm_cfg = dict(type='PRepBN', ln_eps=1e-6, use_eta=False)
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
    dict(type='GammaDecayHook', T=300000, unit='iter'),
    dict(type='BNRecalibrationHook', num_epochs=10),
]
