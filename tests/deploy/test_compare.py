"""Two forms of a model compared: with one's decisions, in all that heads compute, on images that the model takes."""

import copy

import pytest
import torch
import torch.nn as nn

from mmslab.deploy import compare as module
from mmslab.deploy import fold
from mmslab.deploy.compare import Decisions, Difference, check_differences, compare, divisor_of, relative
from mmslab.layers import set_gamma

from .test_convert import build, config
from .test_families import detector

SIZES = ((64, 64), (75, 100))


def select(scores, boxes):
    """What detectors do with scores: the best, those over a threshold, levels, in place too."""
    best, index = scores.topk(3)
    kept = boxes[scores > 0.5]
    level = boxes.log2().floor().long()
    flags = torch.zeros(len(scores), dtype=torch.int32)
    flags.copy_(scores.round())
    order = scores.sort(descending=True)[1]
    return best, boxes[index], kept, level, flags, boxes[order], index


def test_a_run_with_the_decisions_of_another():
    """Near ties go as in the recorded run, while all that is no decision is computed anew."""
    scores = torch.tensor([0.7, 0.5 - 1e-7, 0.7 + 1e-6, 0.9, 0.1])
    boxes = torch.tensor([1.0, 2.0, 4.0 - 1e-6, 8.0, 16.0])
    with Decisions() as first:
        expected = select(scores, boxes)
    moved = torch.tensor([0.7 + 2e-6, 0.5 + 1e-6, 0.7, 0.9, 0.1])
    moved_boxes = boxes + 2e-6
    assert [a.shape for a in select(moved, moved_boxes)] != [e.shape for e in expected]
    with Decisions(first.made):
        best, of_best, kept, level, flags, in_order, index = select(moved, moved_boxes)
    assert torch.equal(index, torch.tensor([3, 2, 0])) and torch.equal(of_best, moved_boxes[index])
    assert torch.equal(best, moved.topk(3)[0]) and torch.equal(kept, moved_boxes[[0, 2, 3]])
    assert level.tolist() == [0, 1, 1, 3, 4] and flags.tolist() == [1, 0, 1, 1, 0]
    assert torch.equal(in_order, moved_boxes[[3, 2, 0, 1, 4]])
    with pytest.raises(ValueError, match='computes aten.sort.*where the original computes aten.topk'):
        with Decisions(first.made):
            scores.sort()


def test_relative():
    inf, nan = float('inf'), float('nan')
    expected = torch.tensor([1.0, -4.0, inf])
    assert relative(torch.tensor([1.0, -4.4, inf]), expected) == pytest.approx(0.1)
    assert relative(torch.tensor([1.0, -4.0, 4.0]), expected) == inf
    assert not relative(torch.tensor([nan, -4.0, inf]), expected) <= 1
    assert relative(torch.zeros(2), torch.zeros(2)) == 0 and relative(torch.zeros(0, 4), torch.zeros(0, 4)) == 0
    assert relative(torch.zeros(3), torch.zeros(2)) == inf


def test_every_part_of_a_detector_is_compared(tmp_path):
    model = build(config(tmp_path, 'detector')).eval()
    set_gamma(model, 0)
    before = copy.deepcopy(dict(model.roi_head.test_cfg))
    folded = fold(copy.deepcopy(model))
    found = compare(model, folded, SIZES[1:])
    assert {d.output for d in found} == {'neck', 'rpn_head', 'roi_head.bbox_head', 'roi_head.mask_head'}
    assert {d.size for d in found} == set(SIZES[1:]) and max(d.relative for d in found) < 1e-5
    for spoilt in ('roi_head.mask_head.conv_logits.bias', 'neck.fpn_convs.0.conv.bias'):
        with torch.no_grad():
            folded.get_parameter(spoilt).add_(0.1)
        worse = {d.output for d in compare(model, folded, SIZES[:1]) if d.relative > 1e-4}
        assert worse >= {'neck', 'rpn_head'} if 'neck' in spoilt else worse == {'roi_head.mask_head'}
    assert dict(model.roi_head.test_cfg) == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_queries_are_those_of_the_original():
    """A model that is somewhat off chooses other queries, and with those of the original is as far off as it is."""
    model = detector('DINO')
    found = compare(model, fold(copy.deepcopy(model)), SIZES)
    assert {d.output for d in found} >= {'backbone', 'neck', 'encoder', 'decoder', 'bbox_head'}
    assert max(d.relative for d in found) < 1e-5

    other, image = copy.deepcopy(model), torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        for p in other.neck.parameters():
            p.mul_(1 + 0.01 * torch.randn(p.shape))
        chosen = Decisions()
        expected, own = module._outputs(model, image, 1, chosen), module._outputs(other, image, 1, Decisions())
        same = module._outputs(other, image, 1, Decisions(chosen.made))
    assert max(map(relative, own['decoder'], expected['decoder'])) > 0.2
    for part in expected:
        assert max(map(relative, same[part], expected[part])) < 0.05, part

    other = fold(copy.deepcopy(model))
    with torch.no_grad():
        other.decoder.layers[1].ffn.layers[1].bias[0].add_(0.1)
    assert {d.output for d in compare(model, other, SIZES[:1]) if d.relative > 1e-4} == {'decoder', 'bbox_head'}


def test_images_are_as_large_as_the_model_takes(tmp_path):
    rtmdet = detector('RTMDet')
    assert rtmdet.data_preprocessor.pad_size_divisor == 1 and divisor_of(rtmdet) == 32
    mask_rcnn = build(config(tmp_path, 'detector')).eval()
    assert divisor_of(mask_rcnn) == mask_rcnn.data_preprocessor.pad_size_divisor and divisor_of(mask_rcnn, 1) == 1

    class Picky(nn.Module):
        def forward(self, maps):
            raise RuntimeError('sizes do not match')

    rtmdet.neck = Picky()
    with pytest.raises(
        ValueError, match='the neck, Picky, does not take .* of 1 or 32 or 64 or 128 .RuntimeError: sizes do not match'
    ):
        divisor_of(rtmdet)


def test_a_head_that_wants_larger_maps_gets_larger_images():
    model = detector('RTMDet')

    def three_pixels(module, args):
        if args[0][-1].shape[-1] < 3:
            raise RuntimeError('input image is smaller than kernel')

    model.bbox_head.register_forward_pre_hook(three_pixels)
    assert {d.size for d in compare(model, model, [(64, 64)])} == {(128, 128)}


def test_a_model_that_cannot_predict_is_named(tmp_path):
    model = detector('RTMDet')
    model.bbox_head.predict = None
    with pytest.raises(
        ValueError, match='RTMDet cannot be compared .* predict fails .* 64x64 .TypeError: .*Nothing was'
    ):
        compare(model, model, SIZES)


def test_weights_that_magnify_rounding_get_more(monkeypatch):
    """In float64 the original's backbone makes it 1e-4 off: the folded one may be ten times that, no more."""
    own = [Difference((64, 64), 'neck', 1e-4)]
    monkeypatch.setattr(module, '_compare', lambda original, exact, sizes: own)
    model = nn.ModuleDict(dict(backbone=nn.Linear(1, 1)))
    model.backbone = model['backbone']
    check_differences([own[0]._replace(relative=9e-4)], model, 1e-5, 'a')
    for worse in (2e-3, float('nan')):
        with pytest.raises(ValueError, match='over the tolerance of 1e-05, and rounding alone makes 1.0e-04'):
            check_differences([own[0]._replace(relative=worse)], model, 1e-5, 'a')


def test_rounding_is_that_of_the_backbone():
    model = detector('RTMDet')
    exact = copy.deepcopy(model)
    exact.backbone.double()
    found = {d.output: d.relative for d in compare(model, exact, SIZES)}
    assert set(found) == {'backbone', 'neck', 'bbox_head'} and 0 < max(found.values()) < 1e-5
    check_differences(compare(model, fold(copy.deepcopy(model)), SIZES), model, 1e-9, 'a')
