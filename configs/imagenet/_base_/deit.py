# DeiT gives a vector, of its class token or of the mean of its tokens.
_base_ = './classifier.py'

model = dict(
    neck=None,
    backbone=dict(type='SLABDeiT'),
    head=dict(in_channels=192),
)
