# SLAB-Swin-S, whose recipe the authors publish; the paper has no figure for it.
# Trained as the authors do: from PRepBN weights pre-trained on ImageNet, gamma 0 from the start, BN statistics frozen.
_base_ = './maskrcnn_slab_swin_t_1x.py'

model = dict(
    backbone=dict(
        arch='small',
        drop_path_rate=0.2,
        init_cfg=dict(checkpoint='{{$SLAB_SWIN_S:slab_swin_small}}'),
    )
)
