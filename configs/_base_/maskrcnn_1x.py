# Mask R-CNN with a backbone of mmslab. What a row of Table 3 adds is in configs/maskrcnn_<row>_1x.py.
_base_ = ['mmdet::_base_/models/mask-rcnn_r50_fpn.py', './coco_1x.py']

model = dict(
    backbone=dict(
        _delete_=True,
        type='SLABSwin',
        arch='tiny',
        attn='softmax',
        window_sizes=7,
        norm_cfg=dict(type='LN'),
        out_norm_cfg=dict(type='LN'),
    ),
    neck=dict(in_channels=[96, 192, 384, 768]),
)
