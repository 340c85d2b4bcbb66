# A small SLAB-PVT that learns the classes of shapes (tools/make_shapes.py --classes --size 64 data/shape_classes): the
# pre-training for maskrcnn_slab_pvt_shapes.py. About two minutes on two CPU cores.
_base_ = '../imagenet/_base_/pvt.py'

norm_cfg = dict(type='PRepBN', ln_eps=1e-6)
model = dict(
    backbone=dict(
        arch=dict(embed_dims=(32, 64, 128, 256), depths=(1, 1, 2, 1), num_heads=(1, 2, 4, 8), mlp_ratios=(4, 4, 4, 4)),
        attn='sla',
        norm_cfg=norm_cfg,
        pretrain_img_size=64,
        drop_path_rate=0.0,
    ),
    head=dict(in_channels=256, num_classes=5),
    train_cfg=None,
)
data_preprocessor = dict(num_classes=5)

data_root = '{{$SHAPE_CLASSES_ROOT:data/shape_classes}}'
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
test_pipeline = [dict(type='LoadImageFromFile'), dict(type='PackInputs')]
dataset = dict(_delete_=True, type='CustomDataset', data_root=data_root)
train_dataloader = dict(
    batch_size=32,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(data_prefix='train', pipeline=train_pipeline, **dataset),
)
val_dataloader = dict(
    batch_size=32,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(data_prefix='val', pipeline=test_pipeline, **dataset),
)
test_dataloader = val_dataloader
val_evaluator = dict(topk=(1,))
test_evaluator = val_evaluator

max_epochs = 10
train_cfg = dict(max_epochs=max_epochs)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, end=50),
    dict(type='CosineAnnealingLR', by_epoch=True, begin=0, end=max_epochs, eta_min=1e-5, convert_to_iter_based=True),
]
custom_hooks = [
    dict(type='GammaDecayHook', T=0.6),
    dict(type='BNRecalibrationHook', num_epochs=1),
    dict(type='RichProgressHook', interval=50),
]
default_hooks = dict(logger=dict(interval=10))
randomness = dict(seed=0)
