from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.config.utils import MODULE2PACKAGE

import mmslab
from mmslab.apis import build_tester, build_trainer, load_config
from mmslab.benchmark.models import names_of, paper_figures, read_config
from mmslab.configs import CONFIGS, INDEX, find_config

from .conftest import ROOT

MMDET = 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py'


@pytest.mark.parametrize(
    'name, path',
    [
        ('maskrcnn_slab_swin_t_1x', 'maskrcnn_slab_swin_t_1x.py'),
        ('maskrcnn_slab_swin_t_1x.py', 'maskrcnn_slab_swin_t_1x.py'),
        ('imagenet/slab_swin_t', 'imagenet/slab_swin_t.py'),
        ('mmslab::maskrcnn_slab_swin_t_1x.py', 'maskrcnn_slab_swin_t_1x.py'),
        ('mmslab::demo/maskrcnn_slab_swin_shapes', 'demo/maskrcnn_slab_swin_shapes.py'),
        ('mmslab::_base_/coco_1x.py', '_base_/coco_1x.py'),
    ],
)
def test_names_of_ours(name, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config(name) == str(ROOT / 'configs' / path)
    assert CONFIGS == ROOT / 'configs' and INDEX == ROOT / 'model-index.yml'


def test_a_file_goes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('maskrcnn_slab_swin_t_1x.py').write_text('mine = True\n')
    assert load_config('maskrcnn_slab_swin_t_1x.py').mine
    assert find_config('maskrcnn_slab_swin_t_1x') == str(ROOT / 'configs' / 'maskrcnn_slab_swin_t_1x.py')
    with pytest.raises(FileNotFoundError):
        find_config('./maskrcnn_slab_swin_s_1x.py')  # a path, and none is there


def test_configs_of_other_packages():
    assert load_config(MMDET).model.backbone.type == 'SwinTransformer'
    assert load_config(MMDET[: -len('.py')]).filename == load_config(MMDET).filename
    assert load_config('mmpretrain::swin_transformer/swin-tiny_16xb64_in1k.py').model.type == 'ImageClassifier'


@pytest.mark.parametrize(
    'name, error, message',
    [
        (
            'maskrcnn_slab_swin_1x',
            FileNotFoundError,
            "^config 'maskrcnn_slab_swin_1x' does not exist.*'maskrcnn_slab_swin_t_1x'",
        ),
        ('configs/maskrcnn_swin_t_1x.py', FileNotFoundError, "Did you mean 'maskrcnn_swin_t_1x'"),
        ('slab_swin_t', FileNotFoundError, "Did you mean 'imagenet/slab_swin_t'"),
        ('mmslab::swin_t_1x.py', FileNotFoundError, "mmslab has no configs/swin_t_1x.py. Did you mean 'mmslab::"),
        ('zzz', FileNotFoundError, 'by name they are as'),
        ('mmdet::mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py', FileNotFoundError, f"Did you mean '{MMDET}'"),
        ('mmnone::a.py', ValueError, "no package 'mmnone' is installed"),
        ('a.pth', ValueError, 'The config comes first'),
    ],
)
def test_what_is_not_there_has_near_names(name, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path('a.pth').write_text('')
    with pytest.raises(error, match=message):
        load_config(name)


def test_what_is_written_beside_a_config_has_its_stem(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []

    def look(cfg, names):
        seen.append(cfg.work_dir)
        raise ValueError('enough')

    monkeypatch.setattr('mmslab.apis.check_datasets', look)
    with pytest.raises(ValueError, match='enough'):
        build_trainer('mmslab::maskrcnn_slab_swin_t_1x.py')
    with pytest.raises(ValueError, match='enough'):
        build_tester(MMDET, 'a.pth')
    assert seen == ['work_dirs/maskrcnn_slab_swin_t_1x', f'work_dirs/{Path(MMDET).stem}']


def test_the_benchmark_knows_names():
    assert names_of(['imagenet/deit_t', 'mmslab::maskrcnn_swin_t_1x.py', 'b_1.5x']) == [
        'deit_t',
        'maskrcnn_swin_t_1x',
        'b_1.5x',
    ]
    assert paper_figures('mmslab::maskrcnn_swin_t_1x.py') == paper_figures('maskrcnn_swin_t_1x') != {}
    assert read_config('imagenet/deit_t').model.backbone.type == 'SLABDeiT'


def test_other_peoples_configs_inherit_ours(tmp_path):
    base = Config.fromfile(ROOT / 'configs' / 'imagenet' / 'deit_t.py')
    (tmp_path / 'mine.py').write_text("_base_ = 'mmslab::imagenet/deit_t.py'\nrandomness = dict(seed=7)\n")
    cfg = Config.fromfile(tmp_path / 'mine.py')
    assert cfg.randomness.seed == 7 and cfg.model == base.model  # no scope is added to it
    (tmp_path / 'mine.py').write_text("_base_ = 'mmslab::no.py'\n")
    with pytest.raises(FileNotFoundError, match='mmslab has no configs/no.py'):
        Config.fromfile(tmp_path / 'mine.py')
    assert MODULE2PACKAGE['mmslab'] == 'mmslab' and mmslab.find_config is find_config


def test_bases_of_other_packages_are_found_without_reading_their_indices(tmp_path, monkeypatch):
    """mmengine reads a hundred YAML files for each; what it is asked for all the same keeps its own error."""
    monkeypatch.setattr('mmengine.config.config._get_external_cfg_path', lambda *_: pytest.fail('an index is read'))
    (tmp_path / 'mine.py').write_text(f'_base_ = {[MMDET]!r}\nseed = 7\n')
    cfg = Config.fromfile(tmp_path / 'mine.py')
    assert cfg.seed == 7 and cfg.model._scope_ == 'mmdet' and cfg.model.backbone.type == 'SwinTransformer'
    (tmp_path / 'mine.py').write_text("_base_ = 'mmseg::_base_/default_runtime.py'\n")
    with pytest.raises(ModuleNotFoundError, match='mmseg.* is not installed'):
        Config.fromfile(tmp_path / 'mine.py')
