# SLAB-Swin-T (Table 3: 43.9 box AP, 40.1 mask AP): SLA in stages 1 and 2, PRepBN throughout.
# Trained as the authors do: from PRepBN weights pre-trained on ImageNet, gamma 0 from the start, BN statistics frozen.
_base_ = './maskrcnn_swin_t_prepbn_1x.py'

model = dict(
    backbone=dict(
        attn=('sla', 'sla', 'softmax', 'softmax'),
        window_sizes=(56, 28, 7, 7),
        init_cfg=dict(checkpoint='{{$SLAB_SWIN_T:slab_swin_tiny}}'),
    )
)
