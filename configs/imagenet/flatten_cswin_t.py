# Flatten-CSWin-T (Table 2: 83.1 top-1, 4.3 GFLOPs, 32.4 ms).
_base_ = './_base_/cswin.py'

norm_cfg = dict(type='LN')
model = dict(
    backbone=dict(
        arch='slab_tiny',
        attn=('focused', 'focused', 'softmax', 'softmax'),
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.2,
    ),
)
