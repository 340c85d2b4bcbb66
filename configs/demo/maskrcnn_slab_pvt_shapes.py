# A small SLAB-PVT Mask R-CNN for shapes, from the weights of slab_pvt_shapes_classes.py, as the authors fine-tune: gamma 0 from
# the start, BN statistics frozen.
_base_ = './maskrcnn_slab_swin_shapes.py'

model = dict(
    backbone=dict(
        _delete_=True,
        type='SLABPVT',
        arch=dict(embed_dims=(32, 64, 128, 256), depths=(1, 1, 2, 1), num_heads=(1, 2, 4, 8), mlp_ratios=(4, 4, 4, 4)),
        attn='sla',
        norm_cfg=dict(type='PRepBN', ln_eps=1e-6, gamma=0.0),
        norm_eval=True,
        pretrain_img_size=64,
        drop_path_rate=0.0,
        init_cfg=dict(
            type='Pretrained', checkpoint='{{$SHAPES_CLASSIFIER:work_dirs/slab_pvt_shapes_classes/epoch_10.pth}}'
        ),
    ),
    neck=dict(in_channels=[32, 64, 128, 256]),
)
custom_hooks = [dict(type='RichProgressHook', interval=50)]
