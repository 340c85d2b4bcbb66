# Pre-training on ImageNet-1K as Table A1 says: 300 epochs, batch 1024 (8 GPUs x 128), AdamW 1e-3, weight decay 0.05, cosine
# with 20 epochs of warm-up; DeiT's augmentation. A row of Tables 1, 2, 6 and 7 adds to it in configs/imagenet/<row>.py.
# Set IMAGENET_ROOT to the folder that has train/<class>/ and val/<class>/.
_base_ = [
    'mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py',
    'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py',
    'mmpretrain::_base_/default_runtime.py',
]
custom_imports = dict(imports=['mmslab'])

model = dict(
    type='ImageClassifier',
    backbone=dict(),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(
        type='LinearClsHead',
        num_classes=1000,
        loss=dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        cal_acc=False,
    ),
    train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]),
)

data_root = '{{$IMAGENET_ROOT:data/imagenet}}'
train_dataloader = dict(batch_size=128, dataset=dict(data_root=data_root))
val_dataloader = dict(batch_size=128, dataset=dict(data_root=data_root))
test_dataloader = val_dataloader

optim_wrapper = dict(
    paramwise_cfg=dict(
        custom_keys={
            'norm': dict(decay_mult=0.0),
            'pos_embed': dict(decay_mult=0.0),
            'cls_token': dict(decay_mult=0.0),
            'positional_encoding': dict(decay_mult=0.0),
        }
    ),
    clip_grad=dict(max_norm=5.0),
)
default_hooks = dict(checkpoint=dict(max_keep_ckpts=2), exact_resume=dict(type='ExactResumeHook'))
