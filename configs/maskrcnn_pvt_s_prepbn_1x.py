# PVT-S-PRepBN (Table 3: 40.6 box AP, 38.0 mask AP).
# Trained as the authors do: from PRepBN weights pre-trained on ImageNet, gamma 0 from the start, BN statistics frozen.
_base_ = './_base_/maskrcnn_pvt_1x.py'

model = dict(
    backbone=dict(
        arch='small',
        norm_cfg=dict(_delete_=True, type='PRepBN', ln_eps=1e-6, gamma=0.0),
        norm_eval=True,
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='{{$PVT_S_PREPBN:pvt_small_prepbn}}'),
    )
)
