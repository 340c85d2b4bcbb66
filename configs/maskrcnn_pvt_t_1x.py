# PVT-T with LayerNorm (Table 3: 36.6 box AP, 34.9 mask AP), the baseline.
_base_ = './_base_/maskrcnn_pvt_1x.py'

model = dict(
    backbone=dict(
        arch='tiny',
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='{{$PVT_T:pvt_tiny}}'),
    )
)
