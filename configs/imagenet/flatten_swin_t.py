# Flatten-Swin-T (Tables 2 and 6: 82.1 top-1, 4.5 GFLOPs, 10.9 ms).
_base_ = './_base_/swin.py'

norm_cfg = dict(type='LN')
model = dict(
    backbone=dict(
        arch='tiny',
        attn=('focused', 'focused', 'softmax', 'softmax'),
        window_sizes=(56, 28, 7, 7),
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.2,
    ),
)
