# PVT-S with LayerNorm (Table 3: 40.5 box AP, 37.9 mask AP), the baseline.
_base_ = './_base_/maskrcnn_pvt_1x.py'

model = dict(
    backbone=dict(
        arch='small',
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='{{$PVT_S:pvt_small}}'),
    )
)
