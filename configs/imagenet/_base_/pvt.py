_base_ = './classifier.py'

model = dict(
    backbone=dict(type='SLABPVT', out_indices=(3,)),
    head=dict(in_channels=512),
)
