"""Graphs of folded models, run at sizes that they were not made with, against the unfolded PyTorch model."""

import copy
import importlib.util
import itertools
import json

import numpy as np
import onnxruntime
import pytest
import torch
from mmengine.registry import MODELS

from mmslab.deploy import export as module
from mmslab.deploy.export import TORCH, check_any_size, export, onnx_runner, to_onnx, to_program
from mmslab.version import __version__

from ..conftest import ROOT, assert_relative, needs_torch, randomize
from .test_convert import config, trained
from .test_families import detector, small

NORM = dict(type='PRepBN', gamma=0.0)
SWIN = dict(
    type='SLABSwin',
    arch=dict(embed_dims=8, depths=(1, 2), num_heads=(2, 2)),
    attn=('sla', 'softmax'),
    window_sizes=(8, 5),
    norm_cfg=NORM,
    out_indices=(0, 1),
)
FAMILIES = dict(
    swin=SWIN,
    pvt=dict(
        type='SLABPVT',
        arch=dict(embed_dims=(8, 16), depths=(1, 1), num_heads=(2, 2), mlp_ratios=(2, 2)),
        attn=('softmax', 'sla'),
        sr_ratios=(4, 2),
        sla_sr_ratios=2,
        pretrain_img_size=64,
        norm_cfg=NORM,
        out_indices=(0, 1),
    ),
    deit=dict(
        type='SLABDeiT',
        arch=dict(embed_dims=8, depth=1, num_heads=2),
        pretrain_img_size=64,
        norm_cfg=NORM,
        out_norm_cfg=NORM,
    ),
    cswin=dict(
        type='SLABCSWin',
        arch=dict(embed_dims=8, depths=(1, 1), num_heads=(2, 2)),
        attn=('sla', 'softmax'),
        split_sizes=(1, 7),
        sla_split_sizes=(7, 7),
        pretrain_img_size=64,
        norm_cfg=NORM,
        out_indices=(0, 1),
    ),
)
# whole windows, padded ones, few, many
SIZES = ((160, 80), (100, 75), (33, 34), (34, 190))


@pytest.mark.parametrize('family', FAMILIES)
@needs_torch(TORCH)
def test_a_backbone_as_a_graph_takes_images_of_any_size(family, tmp_path):
    original = randomize(MODELS.build(FAMILIES[family])).eval()
    folded = copy.deepcopy(original)
    folded.switch_to_deploy()
    program = to_program(folded, (96, 128))
    names = [f'map{i}' for i in folded.out_indices]
    to_onnx(program, tmp_path / 'graph.onnx', names)
    run = onnx_runner(tmp_path / 'graph.onnx')
    tiny = torch.randn(1, 3, 18, 17)  # one window; torch's own graph says where it wants more than one
    if family != 'pvt':
        for a, e in zip(run(tiny), original(tiny)):
            assert_relative(a, e, 1e-4)
    module = program.module(check_guards=False)
    for size, batch in itertools.product(SIZES, (1, 2, 3)):
        image = torch.randn(batch, 3, *size)
        with torch.no_grad():
            expected = original(image)
            for actual in (run(image), module(image)):
                assert len(actual) == len(expected)
                for a, e in zip(actual, expected):
                    assert_relative(a, e, 1e-4)
    # the axes are named, and the names of the outputs' are formulas of the input's
    session = onnxruntime.InferenceSession(str(tmp_path / 'graph.onnx'))
    assert session.get_inputs()[0].shape == ['batch', 3, 'height', 'width']
    sizes = dict(batch=batch, height=size[0], width=size[1])
    for output, e in zip(session.get_outputs(), expected):
        shape = [eval(axis, {}, sizes) if isinstance(axis, str) else axis for axis in output.shape]
        assert shape == list(e.shape)


def docs_code(name, of):
    """The code block of a page that has ``of`` in it."""
    blocks = (ROOT / 'docs' / name).read_text().split('```')[1::2]
    (code,) = [block for block in blocks if of in block]
    return code.partition('\n')[2]


@needs_torch(TORCH)
def test_a_detector_up_to_its_heads_from_an_image_by_the_files_own_recipe(tmp_path, monkeypatch):
    """RPN scores, deltas and the neck's maps, by NumPy and onnxruntime alone, as docs/export.md does, against the detector."""
    path = config(tmp_path, 'detector')
    text = path.read_text().replace('(2, 2, 2, 2)', '(1, 1, 1, 1)')
    other = 'mean=[3.0, 100.0, 120.0], std=[50.0, 60.0, 70.0], bgr_to_rgb=False, pad_size_divisor=64, pad_value=0.5'
    path.write_text(text.replace('model = dict(', f'model = dict(data_preprocessor=dict({other}),'))
    weights, original = trained(tmp_path, path)
    found = export(path, weights, tmp_path / 'backbone.onnx', part='model', sizes=((64, 64), (75, 100)))
    names = [f'{what}{i}' for what in ('neck', 'scores', 'deltas') for i in range(4)]
    assert {d.output for d in found} == set(names) and max(d.relative for d in found) < 1e-4

    image = np.random.default_rng(0).integers(0, 256, (75, 130, 3), dtype=np.uint8)
    monkeypatch.chdir(tmp_path)
    used = dict(image=image)
    exec(docs_code('export.md', 'def prepare'), used)
    inputs = original.data_preprocessor(dict(inputs=[torch.from_numpy(image.transpose(2, 0, 1).copy())]))['inputs']
    assert inputs.shape == (1, 3, 128, 192)
    np.testing.assert_allclose(used['prepare'](image), inputs, atol=1e-6)
    with torch.no_grad():
        maps = original.extract_feat(inputs)
        scores, deltas = original.rpn_head(maps)
    assert list(used['outputs']) == names
    for actual, expected in zip(used['outputs'].values(), [*maps, *scores, *deltas]):
        assert_relative(torch.from_numpy(actual), expected, 1e-4)

    meta = used['meta']
    assert meta['channel_order'] == 'BGR' and meta['class_names'] == ['a', 'b', 'c', 'd', 'e'] and meta['size'] is None
    assert meta['folded'] is True and meta['part'] == 'model' and meta['mmslab_version'] == __version__
    assert (meta['model'], meta['backbone']) == ('MaskRCNN', 'SLABSwin')
    session = onnxruntime.InferenceSession('backbone.onnx')
    assert session.get_inputs()[0].shape == [1, 3, 'height', 'width']


def written(folder, family):
    """Config and checkpoint of a family of mmdet's detectors, and its model."""
    model = detector(family)
    small(family).dump(folder / f'{family}.py')
    torch.save(dict(state_dict=model.state_dict()), folder / f'{family}.pth')
    return folder / f'{family}.py', folder / f'{family}.pth', model


class TopDown(torch.nn.Module):
    """What an RTMDet's neck does to sizes: maps doubled and put beside those of the level before, in multiples of 8."""

    def forward(self, image):
        levels = [torch.nn.functional.avg_pool2d(image, 3, 2, 1)]
        for _ in range(2):
            levels.append(torch.nn.functional.avg_pool2d(levels[-1], 3, 2, 1))
        x = levels[2]
        for level in levels[1::-1]:
            x = torch.cat([torch.nn.functional.interpolate(x, scale_factor=2.0), level], 1)
        return (x,)


@needs_torch(TORCH)
def test_a_graph_for_multiples():
    program = to_program(TopDown(), (64, 96), divisor=8)
    for size in ((8, 8), (160, 88)):
        image = torch.randn(1, 3, *size)
        assert_relative(program.module(check_guards=False)(image)[0], TopDown()(image)[0], 1e-6)


@needs_torch(TORCH)
def test_a_neck_that_takes_few_sizes(tmp_path):
    """RTMDet's: multiples of 32, though no pad_size_divisor says so."""
    path, weights, original = written(tmp_path, 'RTMDet')
    with pytest.raises(
        ValueError, match=r'size=\(96, 100\): the neck, CSPNeXtPAFPN, .* multiples of 32 .*Give \(96, 128\)'
    ):
        export(path, weights, tmp_path / 'graph.pt2', part='model', size=(96, 100))
    assert not (tmp_path / 'graph.pt2').exists()
    found = export(path, weights, tmp_path / 'graph.pt2', part='model', size=(64, 96))
    assert {d.output for d in found} == {f'{what}{i}' for what in ('scores', 'deltas') for i in range(3)}
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        scores, deltas = original.bbox_head(original.extract_feat(image))
    graph = torch.export.load(tmp_path / 'graph.pt2').module(check_guards=False)
    for actual, expected in zip(graph(image), [*scores, *deltas]):
        assert_relative(actual, expected, 1e-4)


@needs_torch(TORCH)
def test_heads_that_no_graph_takes_are_named_before_anything_is_written(tmp_path, monkeypatch):
    path, weights, _ = written(tmp_path, 'DINO')
    out = tmp_path / 'out' / 'graph.pt2'
    with pytest.raises(ValueError, match="the bbox_head of DINO, DINOHead, wants something else .*Use part='backbone'"):
        export(path, weights, out, part='model')
    path, weights, _ = written(tmp_path, 'RTMDet')

    def no_form(*args, **kwargs):
        raise RuntimeError('an operator without a form in graphs')

    monkeypatch.setattr(module, 'to_program', no_form)
    with pytest.raises(ValueError, match="neck and head of RTMDet .* an operator without .*Use part='backbone'"):
        export(path, weights, out, part='model')
    assert not out.parent.exists()


@needs_torch(TORCH)
def test_a_classifier_of_one_size(tmp_path):
    path = config(tmp_path, 'classifier')
    weights, original = trained(tmp_path, path)
    with pytest.raises(ValueError, match='pad_small_map=False shrinks the windows.*--size'):
        export(path, weights, tmp_path / 'graph.onnx', part='model')
    assert not list(tmp_path.glob('graph*')) and not list(tmp_path.glob('.export*'))
    export(path, weights, tmp_path / 'graph.onnx', part='model', size=(64, 64))
    export(path, weights, tmp_path / 'graph.pt2', part='model', size=(64, 64))
    extra = {'mmslab.json': ''}
    graph = torch.export.load(tmp_path / 'graph.pt2', extra_files=extra).module(check_guards=False)
    for batch in (1, 2, 3):
        image = torch.randn(batch, 3, 64, 64)
        with torch.no_grad():
            expected = original(image, mode='tensor').softmax(-1)
        assert_relative(onnx_runner(tmp_path / 'graph.onnx')(image)[0], expected, 1e-4)
        assert_relative(graph(image)[0], expected, 1e-4)
    session = onnxruntime.InferenceSession(str(tmp_path / 'graph.onnx'))
    assert [each.shape for each in (*session.get_inputs(), *session.get_outputs())] == [
        ['batch', 3, 64, 64],
        ['batch', 5],
    ]
    meta = json.loads(extra['mmslab.json'])
    written = session.get_modelmeta().custom_metadata_map
    assert {key: json.loads(value) for key, value in written.items()} == meta
    assert (meta['size'], meta['channel_order'], meta['output_names']) == ([64, 64], 'RGB', ['scores'])
    assert [step['type'] for step in meta['resize']] == ['ResizeEdge', 'CenterCrop']  # ImageNet's
    assert meta['resize'][1]['crop_size'] == 224
    assert meta['mean'] == [123.675, 116.28, 103.53] and meta['std'] == [58.395, 57.12, 57.375]


@needs_torch(TORCH)
def test_bad_input_is_named_before_anything_is_written(tmp_path, monkeypatch):
    path = config(tmp_path, 'classifier')
    weights, _ = trained(tmp_path, path)
    half, _ = trained(tmp_path, path, gamma=0.5, name='half.pth')
    out = tmp_path / 'out' / 'graph.onnx'
    with pytest.raises(ValueError, match='out must name an .onnx or a .pt2 file, but got .*graph.txt'):
        export(path, weights, tmp_path / 'graph.txt')
    with pytest.raises(ValueError, match="part must be one of .*, but got 'head'"):
        export(path, weights, out, part='head')
    with pytest.raises(ValueError, match='size must be a height and a width'):
        export(path, weights, out, size=(224,))
    with pytest.raises(FileNotFoundError, match='checkpoint .*no.pth.* does not exist'):
        export(path, 'no.pth', out)
    with pytest.raises(ValueError, match='has gamma=0.5'):
        export(path, half, out, size=(64, 64))
    (tmp_path / 'mine.onnx').write_text('mine')
    with pytest.raises(FileExistsError, match='mine.onnx.* exists.*--force'):
        export(path, weights, tmp_path / 'mine.onnx', size=(64, 64))
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(ImportError, match='ONNX needs onnx and onnxscript and onnxruntime. Install: pip install onnx'):
        export(path, weights, out)
    assert not out.parent.exists() and (tmp_path / 'mine.onnx').read_text() == 'mine'


def test_an_older_torch_is_named_before_anything_is_read_or_written(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, '__version__', '2.1.2+cu121')
    message = r'needs torch >= 2\.\d+, but this is 2\.1\.2\+cu121\. Export in an environment with a newer one'
    with pytest.raises(ValueError, match=message):
        export('no.py', 'no.pth', tmp_path / 'out' / 'graph.onnx')
    with pytest.raises(ValueError, match=message):
        to_program(TopDown())
    assert not (tmp_path / 'out').exists()


def test_windows_that_shrink_are_refused():
    check_any_size(MODELS.build(SWIN))
    with pytest.raises(ValueError, match='pad_small_map=False'):
        check_any_size(MODELS.build(dict(SWIN, pad_small_map=False)))
