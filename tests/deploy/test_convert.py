"""Config and checkpoint of a folded model, loaded by others' tools and compared with the original."""

import copy

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import load_checkpoint

from mmslab.apis import build_tester
from mmslab.data.shapes import make_shapes
from mmslab.deploy import convert
from mmslab.deploy.convert import deploy
from mmslab.layers import set_gamma

from ..conftest import ROOT, assert_relative

DETECTOR = ROOT / 'configs' / 'demo' / 'maskrcnn_slab_swin_shapes.py'
SMALL = """
_base_ = {base!r}
model = dict(
    backbone=dict(arch=dict(embed_dims=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8)), out_norm_cfg={out_norm}),
    neck=dict(in_channels=[16, 32, 64, 128]),
)
"""
CLASSIFIER = """
_base_ = {base!r}
norm_cfg = dict(type='PRepBN')
model = dict(
    backbone=dict(
        arch=dict(embed_dims=16, depths=(1, 1, 2, 1), num_heads=(1, 2, 4, 8)),
        attn=('sla', 'sla', 'softmax', 'softmax'),
        window_sizes=(14, 7, 7, 7),
        norm_cfg=norm_cfg,
        out_norm_cfg=norm_cfg,
    ),
    head=dict(in_channels=128, num_classes=5),
)
data_preprocessor = dict(num_classes=5)
"""
SIZES = ((64, 64), (75, 100))


def config(folder, kind, out_norm="dict(_delete_=True, type='PRepBN')"):
    path = folder / f'{kind}.py'
    if kind == 'classifier':
        path.write_text(CLASSIFIER.format(base=str(ROOT / 'configs' / 'imagenet' / '_base_' / 'swin.py')))
    else:
        path.write_text(SMALL.format(base=str(DETECTOR), out_norm=out_norm))
    return path


def build(path):
    cfg = Config.fromfile(path)
    init_default_scope(cfg.default_scope)
    model = copy.deepcopy(cfg.model)
    if cfg.get('data_preprocessor') is not None:
        model.setdefault('data_preprocessor', cfg.data_preprocessor)
    return MODELS.build(model)


def trained(folder, path, gamma=0.0, name='weights.pth'):
    """A checkpoint as mmengine's runner saves it, with statistics that are not the initial ones."""
    model = build(path)
    generator = torch.Generator().manual_seed(1)
    for key, buffer in model.named_buffers():
        if key.endswith('running_mean'):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
        elif key.endswith('running_var'):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    set_gamma(model, gamma)
    meta = dict(dataset_meta=dict(classes=('a', 'b', 'c', 'd', 'e')), epoch=3, cfg='the old one')
    torch.save(dict(state_dict=model.state_dict(), meta=meta, optimizer={}), folder / name)
    return folder / name, model.eval()


@pytest.mark.parametrize('kind', ['detector', 'classifier'])
def test_what_is_written_computes_the_same(tmp_path, kind):
    path = config(tmp_path, kind)
    weights, original = trained(tmp_path, path)
    done = deploy(path, weights, tmp_path / 'out', sizes=SIZES)
    assert done.config == tmp_path / 'out' / f'{kind}_deploy.py'
    assert done.checkpoint == tmp_path / 'out' / 'weights_deploy.pth'
    assert sorted(p.name for p in (tmp_path / 'out').iterdir()) == [f'{kind}_deploy.py', 'weights_deploy.pth']
    assert {d.size for d in done.differences} == set(SIZES) and max(d.relative for d in done.differences) < 1e-5
    names = {d.output for d in done.differences}
    detector = {'neck', 'rpn_head', 'roi_head.bbox_head', 'roi_head.mask_head'}
    assert names == (detector if kind == 'detector' else {'class scores'})

    folded = build(done.config)
    report = folded.load_state_dict(torch.load(done.checkpoint, weights_only=True)['state_dict'])
    assert not report.missing_keys and folded.backbone.deploy
    image = torch.randn(1, 3, 75, 100)
    with torch.no_grad():
        for actual, expected in zip(folded.eval().extract_feat(image), original.extract_feat(image)):
            if kind == 'detector':
                assert_relative(actual, expected, 1e-5)
        if kind == 'classifier':
            assert_relative(folded(image, mode='tensor'), original(image, mode='tensor'), 1e-5)
    meta = torch.load(done.checkpoint, weights_only=True)['meta']
    assert meta['dataset_meta']['classes'][0] == 'a' and 'deploy=True' in meta['cfg']


def test_what_of_the_training_stays_in_the_config(tmp_path):
    path = config(tmp_path, 'detector')
    weights, _ = trained(tmp_path, path)
    cfg = Config.fromfile(deploy(path, weights, tmp_path / 'out', sizes=SIZES[:1]).config)
    for gone in ('train_dataloader', 'train_cfg', 'optim_wrapper', 'param_scheduler', 'auto_scale_lr', 'load_from'):
        assert cfg.get(gone) is None, gone
    assert [hook['type'] for hook in cfg.custom_hooks] == ['RichProgressHook']
    assert cfg.model.backbone.out_norm_cfg is None and cfg.model.train_cfg is None
    assert cfg.custom_imports['imports'] == ['mmslab'] and cfg.test_dataloader.dataset.ann_file


def test_a_layer_norm_on_the_outputs_stays(tmp_path):
    path = config(tmp_path, 'detector', out_norm="dict(type='LN')")
    weights, _ = trained(tmp_path, path)
    done = deploy(path, weights, tmp_path / 'out', sizes=SIZES)
    assert Config.fromfile(done.config).model.backbone.out_norm_cfg == dict(type='LN')
    assert 'backbone' in {d.output for d in done.differences}


def test_mmdet_and_our_tester_take_the_files(tmp_path, monkeypatch):
    from mmdet.apis import DetInferencer, inference_detector, init_detector

    make_shapes(tmp_path / 'shapes', num_train=2, num_val=2, size=64, progress=False)
    monkeypatch.setenv('SHAPES_ROOT', str(tmp_path / 'shapes'))
    path = config(tmp_path, 'detector')
    weights, original = trained(tmp_path, path)
    done = deploy(path, weights, tmp_path / 'out', sizes=SIZES[:1])
    image = np.random.default_rng(0).integers(0, 255, (75, 100, 3), dtype=np.uint8)
    model = init_detector(str(done.config), str(done.checkpoint), device='cpu')
    assert model.dataset_meta['classes'] == ('a', 'b', 'c', 'd', 'e')
    inference_detector(model, image)
    DetInferencer(str(done.config), str(done.checkpoint), device='cpu', show_progress=False)(image)
    runner = build_tester(done.config, done.checkpoint, work_dir=tmp_path / 'test')
    load_checkpoint(runner.model, str(done.checkpoint), strict=True)
    metrics = runner.test()
    assert 'coco/bbox_mAP' in metrics


def test_what_is_there_is_kept(tmp_path):
    path = config(tmp_path, 'classifier')
    weights, _ = trained(tmp_path, path)
    (tmp_path / 'weights_deploy.pth').write_text('mine')
    with pytest.raises(FileExistsError, match='out: .*weights_deploy.pth.* exists.*--force'):
        deploy(path, weights, tmp_path, sizes=SIZES[:1])
    assert (tmp_path / 'weights_deploy.pth').read_text() == 'mine'
    before = path.read_text()
    done = deploy(path, weights, tmp_path, force=True, sizes=SIZES[:1])
    assert torch.load(done.checkpoint, weights_only=True)['state_dict'] and path.read_text() == before


def test_bad_input_is_named_before_anything_is_written(tmp_path):
    path, out = config(tmp_path, 'classifier'), tmp_path / 'out'
    weights, _ = trained(tmp_path, path)
    half, _ = trained(tmp_path, path, gamma=0.5, name='half.pth')
    other = tmp_path / 'other.py'
    other.write_text(
        "default_scope = 'mmdet'\nmodel = dict(type='RetinaNet', backbone=dict(type='mmdet.ResNet', depth=18))\n"
    )
    folded = tmp_path / 'folded.py'
    folded.write_text(f'_base_ = {str(path)!r}\nmodel = dict(backbone=dict(deploy=True))\n')
    with pytest.raises(FileNotFoundError, match='config .*no.py.* does not exist'):
        deploy('no.py', weights, out)
    with pytest.raises(FileNotFoundError, match='checkpoint .*no.pth.* does not exist'):
        deploy(path, 'no.pth', out)
    with pytest.raises(ValueError, match=r"other.py.* has no backbone of mmslab .*'mmdet.ResNet'.* nothing to fold"):
        deploy(other, weights, out)
    with pytest.raises(ValueError, match='folded.py.* is of a folded model already'):
        deploy(folded, weights, out)
    with pytest.raises(ValueError, match=r"layer 'backbone.patch_embed.norm' has gamma=0.5"):
        deploy(path, half, out)
    with pytest.raises(ValueError, match='is not of this config'):
        deploy(path, weights, out, options={'model.head.num_classes': 7})
    (tmp_path / 'file').write_text('')
    with pytest.raises(OSError, match='out=.*cannot be written'):
        deploy(path, weights, tmp_path / 'file' / 'sub')
    assert not out.exists()


def test_norms_outside_the_backbone_are_refused(tmp_path):
    path = tmp_path / 'head.py'
    path.write_text(f"_base_ = {str(DETECTOR)!r}\nmodel = dict(backbone=dict(norm_cfg=dict(type='PRepBN')))\n")
    model = build(path)
    model.neck.extra = MODELS.build(dict(type='PRepBN', num_features=4))
    set_gamma(model, 0)
    with pytest.raises(ValueError, match=r"a PRepBN at 'neck.extra', outside the backbone"):
        convert._check_norms(model.eval(), path)


def test_a_difference_is_found_and_leaves_nothing(tmp_path, monkeypatch):
    path = config(tmp_path, 'classifier')
    weights, _ = trained(tmp_path, path)
    fold = convert.fold

    def fold_wrongly(model, **kwargs):
        folded = fold(model, **kwargs)
        with torch.no_grad():
            folded.head.fc.bias[0] += 0.1
        return folded

    monkeypatch.setattr(convert, 'fold', fold_wrongly)
    with pytest.raises(ValueError, match=r'differs from .*weights.pth.* in class scores for images of 64x64'):
        deploy(path, weights, tmp_path / 'out', sizes=SIZES[:1])
    assert not list((tmp_path / 'out').iterdir())
