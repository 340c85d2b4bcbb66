# PVT's own recipe for Mask R-CNN, 1x (Wang et al. 2021): AdamW 2e-4, weight decay 1e-4, one scale.
_base_ = './maskrcnn_1x.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='SLABPVT',
        arch='tiny',
        attn='softmax',
        norm_cfg=dict(type='LN', eps=1e-6),
    ),
    neck=dict(in_channels=[64, 128, 320, 512]),
)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='Resize', scale=(1333, 800), keep_ratio=True),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
optim_wrapper = dict(optimizer=dict(lr=2e-4, weight_decay=1e-4))
