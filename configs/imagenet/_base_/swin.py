# At 224 pixels a map that fits into one window shrinks the window to itself.
_base_ = './classifier.py'

model = dict(
    backbone=dict(type='SLABSwin', out_indices=(3,), pad_small_map=False),
    head=dict(in_channels=768),
)
