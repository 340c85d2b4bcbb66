_base_ = './classifier.py'

model = dict(
    backbone=dict(type='SLABCSWin', out_indices=(3,)),
    head=dict(in_channels=512),
)
