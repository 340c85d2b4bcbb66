# SLAB-Swin-T from LayerNorm weights: the other way of training. gamma decays while the detector trains (Eq. 6), over the
# first 8 of the 12 epochs, and the BN statistics are recalibrated at the end. The paper reports no figure for it.
_base_ = './maskrcnn_slab_swin_t_1x.py'

model = dict(
    backbone=dict(
        norm_cfg=dict(gamma=1.0),
        norm_eval=False,
        init_cfg=dict(checkpoint='{{$SWIN_T:swin_tiny_patch4_window7_224}}'),
    )
)
custom_hooks = [
    dict(type='GammaDecayHook', T=8, unit='epoch'),
    dict(type='BNRecalibrationHook', num_epochs=1),
]
