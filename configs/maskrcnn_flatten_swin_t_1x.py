# Flatten-Swin-T (Table 3: 44.2 box AP, 40.2 mask AP; Han et al. 2023): focused linear attention in stages 1 and 2.
_base_ = './maskrcnn_swin_t_1x.py'

model = dict(
    backbone=dict(
        attn=('focused', 'focused', 'softmax', 'softmax'),
        window_sizes=(56, 28, 7, 7),
        init_cfg=dict(checkpoint='{{$FLATTEN_SWIN_T:checkpoints/flatten_swin_t.pth}}'),
    )
)
