# Swin-T with LayerNorm (Table 3: 43.1 box AP, 39.4 mask AP), the baseline.
_base_ = './_base_/maskrcnn_1x.py'

model = dict(
    backbone=dict(
        norm_cfg=dict(type='LN'),
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='{{$SWIN_T:swin_tiny_patch4_window7_224}}'),
    )
)
