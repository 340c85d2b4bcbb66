# Swin-S with LayerNorm (Table 3: 46.2 box AP, 41.7 mask AP), the baseline.
_base_ = './maskrcnn_swin_t_1x.py'

model = dict(
    backbone=dict(
        arch='small',
        drop_path_rate=0.2,
        init_cfg=dict(checkpoint='{{$SWIN_S:swin_small_patch4_window7_224}}'),
    )
)
