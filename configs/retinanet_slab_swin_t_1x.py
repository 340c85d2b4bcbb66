# RetinaNet with SLAB-Swin-T: nothing here is tied to Mask R-CNN. The paper has no figure for it.
_base_ = ['mmdet::_base_/models/retinanet_r50_fpn.py', './_base_/coco_1x.py']

model = dict(
    backbone=dict(
        _delete_=True,
        type='SLABSwin',
        arch='tiny',
        attn=('sla', 'sla', 'softmax', 'softmax'),
        window_sizes=(56, 28, 7, 7),
        norm_cfg=dict(type='PRepBN', gamma=0.0),
        norm_eval=True,
        drop_path_rate=0.1,
        out_indices=(1, 2, 3),
        init_cfg=dict(type='Pretrained', checkpoint='{{$SLAB_SWIN_T:slab_swin_tiny}}'),
    ),
    neck=dict(in_channels=[192, 384, 768], start_level=0),
)
val_evaluator = dict(metric='bbox')
test_evaluator = val_evaluator
