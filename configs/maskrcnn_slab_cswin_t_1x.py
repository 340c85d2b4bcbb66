# SLAB-CSWin-T: SLA in stages 1 and 2, PRepBN. Nobody has trained it for detection yet.
_base_ = './_base_/maskrcnn_1x.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='SLABCSWin',
        arch='slab_tiny',
        attn=('sla', 'sla', 'softmax', 'softmax'),
        norm_cfg=dict(type='PRepBN', gamma=0.0),
        norm_eval=True,
        drop_path_rate=0.1,
        init_cfg=dict(type='Pretrained', checkpoint='{{$SLAB_CSWIN_T:slab_cswin_tiny}}'),
    ),
    neck=dict(in_channels=[64, 128, 256, 512]),
)
