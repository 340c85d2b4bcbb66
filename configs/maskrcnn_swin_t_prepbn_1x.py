# Swin-T-PRepBN (Table 3: 42.9 box AP, 39.3 mask AP).
# Trained as the authors do: from PRepBN weights pre-trained on ImageNet, gamma 0 from the start, BN statistics frozen.
_base_ = './_base_/maskrcnn_1x.py'

model = dict(
    backbone=dict(
        norm_cfg=dict(type='PRepBN', gamma=0.0),
        norm_eval=True,
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='{{$SWIN_T_PREPBN:swin_tiny_prepbn}}'),
    )
)
