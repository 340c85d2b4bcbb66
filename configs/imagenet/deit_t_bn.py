# DeiT-T-BN (Table 7: 71.9 top-1).
_base_ = './_base_/deit.py'

norm_cfg = dict(type='BN')
model = dict(
    backbone=dict(
        arch='tiny',
        attn='softmax',
        out_type='cls_token',
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
        drop_path_rate=0.0,
    ),
)
