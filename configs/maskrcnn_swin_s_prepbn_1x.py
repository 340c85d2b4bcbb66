# Swin-S-PRepBN (Table 3: 45.9 box AP, 41.4 mask AP).
# Trained as the authors do: from PRepBN weights pre-trained on ImageNet, gamma 0 from the start, BN statistics frozen.
_base_ = './maskrcnn_swin_t_prepbn_1x.py'

model = dict(
    backbone=dict(
        arch='small',
        drop_path_rate=0.2,
        init_cfg=dict(checkpoint='{{$SWIN_S_PREPBN:checkpoints/swin_small_prepbn.pth}}'),
    )
)
