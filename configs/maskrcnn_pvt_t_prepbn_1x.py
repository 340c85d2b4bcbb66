# PVT-T-PRepBN (Table 3: 36.5 box AP, 34.4 mask AP).
# Trained as the authors do: from PRepBN weights pre-trained on ImageNet, gamma 0 from the start, BN statistics frozen.
_base_ = './_base_/maskrcnn_pvt_1x.py'

model = dict(
    backbone=dict(
        arch='tiny',
        norm_cfg=dict(_delete_=True, type='PRepBN', ln_eps=1e-6, gamma=0.0),
        norm_eval=True,
        drop_path_rate=0.0,
        init_cfg=dict(type='Pretrained', checkpoint='{{$PVT_T_PREPBN:pvt_tiny_prepbn}}'),
    )
)
