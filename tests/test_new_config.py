"""A config for a data set of one's own: what it finds, what it chooses, and that it trains as it is."""

import json
import re
import shlex
import shutil
from collections import OrderedDict

import cv2
import numpy as np
import pytest
import torch
from mmdet.visualization import DetLocalVisualizer
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from mmslab import cli
from mmslab import new_config as module
from mmslab.data.shapes import CLASSES, make_shapes
from mmslab.new_config import archs, fit_anchors, new_config

from .conftest import ROOT

# as fine as it need be for one step on 64 pixels
SMALL = """
model['backbone']['arch'] = dict(_delete_=True, embed_dims=16, depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8))
model.setdefault('neck', {})['in_channels'] = [16, 32, 64, 128]
model['roi_head']['bbox_head']['fc_out_channels'] = 32
model['roi_head']['mask_head']['num_convs'] = 1
model.update(train_cfg=dict(rpn_proposal=dict(max_per_img=50)), test_cfg=dict(rpn=dict(max_per_img=20)))
"""


@pytest.fixture(scope='module')
def shapes(tmp_path_factory):
    """24 images of 64 pixels in each split, annotations beside them."""
    folder = tmp_path_factory.mktemp('own') / 'mine'
    make_shapes(folder, num_train=24, num_val=2, size=64, layout='folders', progress=False)
    return folder


def edited(path, edit):
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_the_commands_of_the_page_run_as_they_stand(tmp_path, monkeypatch):
    """docs/own-data.md, with fewer images, one epoch and a small backbone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(DetLocalVisualizer, '_instance_dict', OrderedDict())  # of earlier tests, which write elsewhere
    page = (ROOT / 'docs' / 'own-data.md').read_text()
    lines = [
        line for block in re.findall('```bash\n(.*?)```', page, re.S) for line in block.replace('\\\n', '').splitlines()
    ]
    ran = []
    for line in lines:
        program, *args = shlex.split(re.sub(r'epoch_\d+', 'epoch_1', line))
        assert program == 'mmslab'
        if args[0] == 'make-shapes':
            args += ['--num-train', '4', '--num-val', '2', '--size', '64']
        if args[0] in ('train', 'test'):
            args += ['--cfg-options', 'val_dataloader.num_workers=0', 'val_dataloader.persistent_workers=False']
            args += ['test_dataloader.num_workers=0', 'test_dataloader.persistent_workers=False']
        if args[0] == 'train':
            args += ['train_dataloader.num_workers=0', 'train_dataloader.persistent_workers=False']
            args += [
                'train_cfg.max_epochs=1',
                'train_cfg.val_interval=1',
                'default_hooks.checkpoint.save_optimizer=False',
            ]
            args += ['train_dataloader.batch_size=2']
        try:
            cli.main(args)
        except SystemExit as e:
            assert not e.code
        ran.append(args[0])
        if args[0] == 'new-config' and 'my.py' in args:
            (tmp_path / 'my.py').open('a').write(SMALL)
    assert ran == ['make-shapes', 'new-config', 'train', 'test', 'infer', 'new-config']
    scalars = next(tmp_path.glob('work_dirs/my/*/vis_data/scalars.json')).read_text()
    losses = [json.loads(line)['loss'] for line in scalars.splitlines() if 'loss_mask' in line]
    assert 'coco/segm_mAP' in scalars and all(np.isfinite(losses))
    state = torch.load(tmp_path / 'work_dirs' / 'my' / 'epoch_1.pth', weights_only=False)['state_dict']
    assert {float(v) for k, v in state.items() if k.endswith('.gamma')} == {0.0}  # handed over, from scratch
    assert len(list((tmp_path / 'drawn').glob('*.jpg'))) == 2
    held = [json.loads((tmp_path / f'held_{split}.json').read_text()) for split in ('train', 'val')]
    names = [{i['file_name'] for i in part['images']} for part in held]
    assert [len(n) for n in names] == [3, 1] and not names[0] & names[1]
    for part in held:
        assert {a['image_id'] for a in part['annotations']} <= {i['id'] for i in part['images']}
    cfg = Config.fromfile(tmp_path / 'held.py')
    assert cfg.train_dataloader.dataset.ann_file == str(tmp_path / 'held_train.json')


def test_what_is_measured_is_what_is_written(tmp_path):
    """Wide images, small flat boxes, two categories of which one has no instance, one image without any, 90 in another."""
    folder = tmp_path / 'flat'
    (folder / 'images').mkdir(parents=True)
    (folder / 'annotations').mkdir()
    for number in range(40):
        cv2.imwrite(str(folder / 'images' / f'{number}.png'), np.zeros((50, 100, 3), np.uint8))
    images = [dict(id=i, file_name=f'{i}.png', height=50, width=100) for i in range(40)]
    images[0] = dict(id=0, file_name='0.png', height=20, width=100)
    of = [1] * 90 + [i for i in range(1, 39)]
    annotations = [
        dict(id=n, image_id=i, category_id=7, bbox=[3, 4, 16, 8], area=128, iscrowd=0) for n, i in enumerate(of)
    ]
    annotations.append(dict(id=999, image_id=2, category_id=7, bbox=[0, 0, 100, 50], area=5000, iscrowd=1))
    categories = [dict(id=3, name='all'), dict(id=7, name='bar')]
    content = dict(images=images, annotations=annotations, categories=categories)
    for split in ('train', 'val'):
        (folder / 'annotations' / f'{split}.json').write_text(json.dumps(content))
    plan = new_config(folder, 'pvt_t', tmp_path / 'flat.py')
    text = (tmp_path / 'flat.py').read_text().replace('\n# ', ' ')
    cfg = Config.fromfile(tmp_path / 'flat.py')
    # classes and images
    assert cfg.metainfo.classes == ('bar',) and "left out: ('all',)" in text and '128 instances each' in text
    assert cfg.train_dataloader.dataset.filter_cfg.min_size == 20 and '2 images without one' in text
    assert cfg.image_scale == (100, 50)
    for loader, kind in ((cfg.train_dataloader, 'RandomResize'), (cfg.test_dataloader, 'Resize')):
        assert loader.dataset.pipeline[[t.type for t in loader.dataset.pipeline].index(kind)].scale == (100, 50)
        assert loader.dataset.data_prefix.img == 'images/'
    # boxes alone
    assert cfg.model.type == 'FasterRCNN' and cfg.model.roi_head.mask_head is None
    assert cfg.val_evaluator.metric == 'bbox' and 'have no mask' in text
    # anchors: boxes of 16 x 8 are in one of area 12^2 with the same ratio, and in COCO's smallest, of 32^2
    made = cfg.model.rpn_head.anchor_generator
    assert (plan.anchors.iou, plan.anchors.iou_of_coco) == pytest.approx((128 / 144, 128 / 1024)) and made.scales == [3]
    assert cfg.model.neck.num_outs == len(made.strides) == 4
    # 38 images with an instance: 2 at once (a tenth), 100 epochs; PVT's 2e-4 is for 16
    assert cfg.train_dataloader.batch_size == 2 and cfg.auto_scale_lr.base_batch_size == 2
    assert cfg.train_cfg.max_epochs == 100 and cfg.param_scheduler[1].milestones == [66, 91]
    assert (
        cfg.optim_wrapper.optimizer.lr == pytest.approx(2e-4 * 2 / 16) and cfg.optim_wrapper.optimizer.type == 'AdamW'
    )
    assert cfg.model.test_cfg.rcnn.max_per_img == 200 and 'one image has 91 instances' in text
    assert cfg.model.backbone.init_cfg.type == 'Pretrained'  # ours


def test_anchors_that_fit():
    coco = np.array([[16.0, 32.0], [64.0, 64.0], [256.0, 128.0], [512.0, 512.0]]) * [
        [1.41, 1.41],
        [1, 1],
        [0.71, 0.71],
        [1, 1],
    ]
    made = fit_anchors(np.repeat(coco, 100, 0))
    assert made[:3] == (8, (0.5, 1.0, 2.0), (4, 8, 16, 32, 64)) and made.iou == made.iou_of_coco > 0.9
    tall = fit_anchors(np.array([[10.0, 60.0], [20.0, 120.0]]))
    assert tall.ratios == (6.0,) and tall.strides == (4, 8, 16, 32)
    # by hand: sides of 24.5 and 49, anchors of 24 and 48 (6 strides of 4, of 8) with the boxes' own ratio
    assert tall.scale in (3, 6, 12) and tall.iou == pytest.approx((24 / 600**0.5) ** 2, abs=1e-6)


@pytest.mark.parametrize('masks, scratch', [(True, False), (False, True)])
def test_every_arch_is_written_the_way_it_is_trained(shapes, tmp_path, masks, scratch, monkeypatch):
    """Hooks and norms go together, classes and levels agree; one model is built, on the meta device."""
    for split in () if masks else ('train', 'val'):
        (tmp_path / split).symlink_to(shapes / split)
        content = json.loads((shapes / split / '_annotations.coco.json').read_text())
        content['annotations'] = [{**a, 'segmentation': []} for a in content['annotations']]
        (tmp_path / f'{split}.json').write_text(json.dumps(content))
    data = shapes if masks else tmp_path
    names = {} if masks else {f'{split}_ann': tmp_path / f'{split}.json' for split in ('train', 'val')}
    monkeypatch.chdir(tmp_path)
    assert {'slab_swin_t', 'slab_swin_s', 'slab_swin_t_from_ln', 'slab_pvt_t', 'pvt_t_prepbn', 'slab_cswin_t'} < set(
        archs()
    )
    for arch in archs():
        new_config(data, arch, 'my.py', from_scratch=scratch, force=True, **names)  # checks the classes
        cfg = Config.fromfile('my.py')
        assert (cfg.model.backbone.init_cfg is None) == scratch
        norm = cfg.model.backbone.norm_cfg
        hooks = [hook.type for hook in cfg.get('custom_hooks') or []]
        handover = norm.type == 'PRepBN' and norm.get('gamma', 1.0) == 1.0
        assert hooks == (['GammaDecayHook', 'BNRecalibrationHook'] if handover else []), arch
        assert handover == (('from_ln' in arch) or scratch and norm.type == 'PRepBN')
        assert not (handover and cfg.model.backbone.get('norm_eval'))
        heads = cfg.model.roi_head
        assert (heads.mask_head is not None) == masks and cfg.model.type == ('MaskRCNN' if masks else 'FasterRCNN')
        assert cfg.model.neck.num_outs == len(cfg.model.rpn_head.anchor_generator.strides)
    cfg.model.backbone.init_cfg = None
    init_default_scope('mmdet')
    with torch.device('meta'):
        model = MODELS.build(cfg.model).eval()
        levels = model.extract_feat(torch.zeros(1, 3, 64, 64))
        scores, _ = model.rpn_head(levels)
    anchors = model.rpn_head.prior_generator.num_base_priors
    assert len(levels) == cfg.model.neck.num_outs and [s.shape[1] for s in scores] == anchors
    assert model.with_mask == masks and model.roi_head.bbox_head.num_classes == len(CLASSES)


def test_how_the_config_refers_to_ours(shapes, tmp_path, monkeypatch):
    name = 'maskrcnn_slab_swin_t_1x.py'
    plain = Config._get_cfg_path

    def base(out, known=None):
        """``known``: what mmengine makes of 'mmslab::'; without it, it knows no such package."""

        def _get_cfg_path(path, file):
            if not path.startswith('mmslab::'):
                return plain(path, file)
            assert known, 'mmengine does not support to load mmslab config.'
            return str(known), None

        monkeypatch.setattr(Config, '_get_cfg_path', staticmethod(_get_cfg_path))
        new_config(shapes, 'slab_swin_t', out)
        assert Config.fromfile(out).model.backbone.type == 'SLABSwin'
        return re.search(r"_base_ = '(.*)'", out.read_text())[1]

    assert base(tmp_path / 'a.py') == (ROOT / 'configs' / name).as_posix()
    assert base(tmp_path / 'b.py', known=ROOT / 'configs' / name) == f'mmslab::{name}'
    another = tmp_path / name  # of another mmslab, which is installed beside this one
    another.write_text('')
    assert base(tmp_path / 'c.py', known=another) == (ROOT / 'configs' / name).as_posix()
    # in a checkout
    checkout = tmp_path / 'checkout'
    shutil.copytree(ROOT / 'configs', checkout / 'configs')
    monkeypatch.setattr(module, 'CONFIGS', checkout / 'configs')
    (checkout / 'projects').mkdir()
    assert base(checkout / 'projects' / 'd.py', known=checkout / 'configs' / name) == f'../configs/{name}'
    assert base(checkout / 'e.py') == f'configs/{name}'


def test_whoever_inherits_the_demo_trains_and_tests_at_one_size(shapes, tmp_path):
    from mmdet.registry import DATASETS

    cv2.imwrite(str(tmp_path / 'wide.jpg'), np.zeros((300, 400, 3), np.uint8))
    triangle = dict(segmentation=[[9, 9, 99, 99, 9, 99]])
    content = dict(
        images=[dict(id=1, file_name='wide.jpg', height=300, width=400)],
        annotations=[dict(id=1, image_id=1, category_id=1, bbox=[9, 9, 90, 90], area=4050, iscrowd=0, **triangle)],
        categories=[dict(id=1, name='disc')],
    )
    (tmp_path / 'all.json').write_text(json.dumps(content))
    dataset = "dict(data_root='', data_prefix=dict(img=FOLDER), ann_file=FILE, metainfo=dict(classes=('disc', )))"
    (tmp_path / 'my.py').write_text(
        f'_base_ = {str(ROOT / "configs" / "demo" / "maskrcnn_slab_swin_shapes.py")!r}\n'
        f'FOLDER, FILE = {str(tmp_path)!r}, {str(tmp_path / "all.json")!r}\n'
        f'train_dataloader = dict(dataset={dataset})\ntest_dataloader = dict(dataset={dataset})\n'
    )
    cfg = Config.fromfile(tmp_path / 'my.py')
    init_default_scope('mmdet')
    seen = [tuple(DATASETS.build(cfg[f'{s}_dataloader'].dataset)[0]['inputs'].shape) for s in ('train', 'test')]
    assert seen == [(3, 96, 128)] * 2


def test_bad_input_is_named_before_anything_is_written(shapes, tmp_path, monkeypatch):
    out = tmp_path / 'out' / 'my.py'
    folder = tmp_path / 'copy'
    make_shapes(folder, num_train=2, num_val=2, size=32, progress=False)
    train = folder / 'annotations' / 'instances_train.json'
    whole = train.read_text()

    def refused(error, message, data=folder, arch='slab_swin_t', to=out, **kwargs):
        with pytest.raises(error, match=message):
            new_config(data, arch, to, **kwargs)
        assert not out.parent.exists()

    refused(ValueError, "--arch must be one of .*slab_swin_s, slab_swin_t.*, but got 'swin'", arch='swin')
    refused(ValueError, "--out must name a .py file, but got 'my.yml'", to='my.yml')
    refused(FileNotFoundError, "--data 'nowhere' is no folder", data='nowhere')
    refused(
        FileNotFoundError,
        'has no training set in a place that is known .*Give its annotation file with --train-ann',
        tmp_path,
    )
    refused(FileNotFoundError, "--train-ann 'no.json' does not exist", train_ann='no.json')
    refused(FileNotFoundError, "image '000001.jpg'.* is not in .*--train-images", train_images=tmp_path)
    refused(ValueError, '--hold-out 0.01 of 2 images is 0', hold_out_fraction=0.01)
    refused(ValueError, '--hold-out takes .*leave --val-ann', hold_out_fraction=0.5, val_ann=train)
    (tmp_path / 'mine.py').write_text('mine')
    refused(FileExistsError, 'mine.py.* exists.*--force', to=tmp_path / 'mine.py')
    assert (tmp_path / 'mine.py').read_text() == 'mine'
    (folder / 'annotations' / 'instances_train2.json').write_text(whole)
    refused(
        ValueError, 'several annotation files of a training set: .*instances_train.json.*Choose one with --train-ann'
    )
    (folder / 'annotations' / 'instances_train2.json').unlink()
    (folder / 'annotations' / 'instances_val.json').rename(tmp_path / 'val.json')
    refused(FileNotFoundError, 'has no validation set .*--val-ann FILE, or hold .*--hold-out 0.2')
    (tmp_path / 'val.json').rename(folder / 'annotations' / 'instances_val.json')
    for edit, message in (
        (lambda c: [a.pop('area') for a in c['annotations']], 'has no area, which mmdet and pycocotools read'),
        (lambda c: c['images'][1].update(width=0), 'no positive height and width'),
        (lambda c: [a.update(bbox=[1, 1, 0, 5]) for a in c['annotations']], 'no instance with a box of a pixel'),
        (lambda c: c['categories'][1].update(name='disc'), "'disc'.* more than once"),
        (lambda c: c.pop('categories'), "no list 'categories'"),
        (lambda c: c['categories'].reverse(), 'another order than the categories'),
    ):
        edited(train, edit)
        refused(ValueError, message)
        train.write_text(whole)
    train.write_text(whole[:-20])
    refused(ValueError, 'is no JSON file')


def test_the_command_line_says_what_it_found(shapes, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cli.main(['new-config', '--data', str(shapes), '--arch', 'slab_swin_t', '--out', 'my.py'])
    said = capsys.readouterr().out
    assert re.search(
        r'24 images to train on with \d+ instances of 5 classes, with masks; 2 images to validate on', said
    )
    assert '100 epochs in batches of 2, images within 64x64' in said
    with pytest.raises(SystemExit, match="error: --out: 'my.py' exists"):
        cli.main(['new-config', '--data', str(shapes), '--arch', 'slab_swin_t', '--out', 'my.py'])
