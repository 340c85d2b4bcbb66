"""Every backbone at the sizes that detectors meet, batches against one image at a time."""

import pytest
import torch
from mmengine.registry import MODELS

from ..conftest import assert_relative, randomize

SWIN = dict(embed_dims=8, depths=(2, 2, 2, 1), num_heads=(1, 2, 2, 4))
PVT = dict(embed_dims=(8, 16, 16, 32), depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 4), mlp_ratios=(2, 2, 2, 2))
CSWIN = dict(embed_dims=8, depths=(1, 1, 2, 1), num_heads=(2, 2, 4, 4))
BACKBONES = {
    'swin-sla': dict(type='SLABSwin', arch=SWIN),
    'swin-softmax': dict(type='SLABSwin', arch=SWIN, attn='softmax', window_sizes=7),
    'swin-focused': dict(type='SLABSwin', arch=SWIN, attn=('focused', 'focused', 'softmax', 'softmax')),
    'pvt-sla': dict(type='SLABPVT', arch=PVT),
    'pvt-softmax': dict(type='SLABPVT', arch=PVT, attn='softmax'),
    'deit-sla': dict(type='SLABDeiT', arch=dict(embed_dims=12, depth=2, num_heads=3)),
    'deit-softmax': dict(type='SLABDeiT', arch=dict(embed_dims=12, depth=2, num_heads=3), attn='softmax'),
    'cswin-sla': dict(type='SLABCSWin', arch=CSWIN),
    'cswin-softmax': dict(type='SLABCSWin', arch=CSWIN, attn='softmax'),
}


@pytest.mark.parametrize('hw', [(448, 448), (37, 53), (800, 1333)], ids=lambda hw: f'{hw[0]}x{hw[1]}')
@pytest.mark.parametrize('name', BACKBONES)
def test_a_batch_equals_its_images(name, hw):
    model = randomize(MODELS.build(BACKBONES[name])).eval()
    x = torch.randn(3, 3, *hw)
    with torch.no_grad():
        together = model(x)
        alone = [model(x[i : i + 1]) for i in range(3)]
    assert len(together) == (1 if 'deit' in name else 4)
    for i, out in enumerate(together):
        stride = 16 if 'deit' in name else 4 * 2**i
        assert out.is_contiguous() and torch.isfinite(out).all()
        assert all(abs(side * stride - pixels) < 2 * stride for side, pixels in zip(out.shape[-2:], hw))
        for j in range(3):
            assert_relative(out[j : j + 1], alone[j][i], 1e-4)
