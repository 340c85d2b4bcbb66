# A small SLAB-Swin Mask R-CNN for the shapes that tools/make_shapes.py draws, from scratch, on two CPU cores.
# For data of your own let `mmslab new-config` write a config: what is chosen here is chosen for shapes.
_base_ = '../maskrcnn_slab_swin_t_1x.py'

import torch  # noqa: E402  (mmengine takes a config that begins with an import for one of its new kind)

# model: a narrow, shallow Swin; windows that divide the maps of 128-pixel images; anchors of 16 to 128 pixels, as the shapes
# are; light heads. Each was chosen to fit some 2000 steps into ten minutes of two cores.
num_classes = 5
dims = 64
model = dict(
    data_preprocessor=dict(pad_size_divisor=32),
    backbone=dict(
        arch=dict(_delete_=True, embed_dims=48, depths=(2, 2, 2, 2), num_heads=(2, 4, 8, 16)),
        window_sizes=(16, 16, 8, 4),
        norm_cfg=dict(gamma=1.0),
        norm_eval=False,
        drop_path_rate=0.0,
        init_cfg=None,
    ),
    neck=dict(in_channels=[48, 96, 192, 384], out_channels=dims, num_outs=4),
    rpn_head=dict(
        in_channels=dims,
        feat_channels=dims,
        anchor_generator=dict(scales=[4], strides=[4, 8, 16, 32]),
    ),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=dims, finest_scale=28),
        bbox_head=dict(in_channels=dims, fc_out_channels=256, num_classes=num_classes),
        mask_roi_extractor=dict(out_channels=dims, finest_scale=28),
        mask_head=dict(in_channels=dims, conv_out_channels=dims, num_convs=2, num_classes=num_classes),
    ),
    train_cfg=dict(
        rpn_proposal=dict(nms_pre=500, max_per_img=200),
        rcnn=dict(sampler=dict(num=48, pos_fraction=0.33)),
    ),
    test_cfg=dict(rpn=dict(nms_pre=300, max_per_img=100), rcnn=dict(max_per_img=50)),
)

# data
data_root = '{{$SHAPES_ROOT:data/shapes}}'
classes = ('disc', 'rectangle', 'triangle', 'star', 'ring')
metainfo = dict(classes=classes)
image_scale = (128, 128)  # of what it trains on and of what it is tested on, whatever the size of the files
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='Resize', scale=image_scale, keep_ratio=True),
    dict(type='RandomFlip', prob=[0.3, 0.3], direction=['horizontal', 'vertical']),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=image_scale, keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
]
train_dataloader = dict(
    batch_size=4,
    num_workers=0,  # loading takes a hundredth of a step; a worker would take a core from it
    persistent_workers=False,
    batch_sampler=None,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/instances_train.json',
        data_prefix=dict(img='train/'),
        filter_cfg=dict(min_size=8),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=8,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        data_root=data_root,
        metainfo=metainfo,
        ann_file='annotations/instances_val.json',
        data_prefix=dict(img='val/'),
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=f'{data_root}/annotations/instances_val.json')
test_evaluator = val_evaluator

# schedule: 4 epochs of 500 iterations; many small steps learn more from scratch than few large ones. LayerNorm for the first
# tenth, then a linear handover (Eq. 6) that is done at 60%, so that the rest trains the model that will infer
max_epochs = 4
train_cfg = dict(max_epochs=max_epochs, val_interval=1)
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(lr=1e-3, fused=torch.__version__ >= (2, 4)),  # on a CPU, in one kernel
    clip_grad=dict(max_norm=5.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=100),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=0, end=max_epochs, eta_min=1e-5, convert_to_iter_based=True),
]
custom_hooks = [
    dict(type='GammaDecayHook', T=0.5, hold=0.1),
    dict(type='BNRecalibrationHook', num_epochs=1, validate_before=True),
    dict(type='RichProgressHook', interval=50),
]
default_hooks = dict(logger=dict(interval=10), checkpoint=dict(interval=1))
randomness = dict(seed=0)
