# SLAB-PVT-T: SLA in every stage, PRepBN. Nobody has trained it for detection yet.
_base_ = './maskrcnn_pvt_t_prepbn_1x.py'

model = dict(
    backbone=dict(attn='sla', init_cfg=dict(checkpoint='{{$SLAB_PVT_T:slab_pvt_tiny}}')),
)
