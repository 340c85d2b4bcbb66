import importlib.util
import re
import subprocess
import sys
import types
from importlib import metadata

import mmcv
import pytest
from mmengine.config import Config
from mmengine.utils import digit_version

from mmslab.apis import check_mmdet
from mmslab.versions import DETECTION, REQUIRED, check_detection, check_versions, transformers_trouble

from .conftest import ROOT


def test_this_environment_passes():
    check_versions()
    check_detection()


@pytest.mark.parametrize('version', ['2.0.1', '2.4.0'])
def test_another_version_is_named(monkeypatch, version):
    monkeypatch.setattr(mmcv, '__version__', version)
    with pytest.raises(ImportError, match=f'needs mmcv>=2.1.0,<2.4.0, but found {version}.*pip install "onedl-mmcv'):
        check_versions()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'mmcv', None)
    with pytest.raises(
        ImportError, match='needs mmcv, which cannot be imported.*pip install "onedl-mmcv.*original mmcv'
    ):
        check_versions()
    monkeypatch.setitem(sys.modules, 'mmdet', None)
    with pytest.raises(ImportError, match='needs mmdet.*onedl-mmdetection'):
        check_detection()


def test_mmcv_without_ops_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'mmdet', types.SimpleNamespace(__version__='3.5.1'))
    monkeypatch.setitem(sys.modules, 'mmcv._ext', None)
    with pytest.raises(
        ImportError, match='mmcv has no compiled ops.*MMCV_WITH_OPS=1 pip .*--no-build-isolation.* (.*)$'
    ) as e:
        check_detection()
    assert (
        metadata.version(str(e.value).rsplit(' ', 1)[1]) == mmcv.__version__
    )  # of the two distributions, the one here


def installed(folder, distribution, version):
    info = folder / f'{distribution}-{version}.dist-info'
    info.mkdir()
    (info / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n')


def test_transformers_that_mmpretrain_does_not_take_are_named(tmp_path, monkeypatch):
    """Found by its metadata alone: it is as slow to import as torch."""
    monkeypatch.syspath_prepend(tmp_path)
    installed(tmp_path, 'transformers', '5.0.1')
    message = r'mmpretrain.* beside transformers 5\.0\.1.*pip install "transformers<5".*pip uninstall transformers'
    with pytest.raises(ImportError, match=message):
        check_detection()
    for scope in ('mmdet', 'mmpretrain'):
        with pytest.raises(ImportError, match=message):
            check_mmdet(Config(dict(default_scope=scope)))
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)  # no mmpretrain
    assert transformers_trouble() is None


def test_older_transformers_are_no_trouble(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    installed(tmp_path, 'transformers', '4.57.3')
    assert transformers_trouble() is None
    check_detection()


def test_setup_claims_what_is_tested():
    """The versions that each stack's requirements pin are the ends of the ranges that setup.py and the imports take."""
    said = (ROOT / 'setup.py').read_text()
    old, new = (pins(ROOT / 'requirements' / stack) for stack in ('openmmlab', ''))
    for name in ('torch', 'numpy'):
        lowest, below = re.search(rf"'{name}>=([\d.]+),<([\d.]+)'", said).groups()
        major, minor = new[name].split('.')[:2]
        assert lowest == old[name] and below == f'{major}.{int(minor) + 1}'
    for name in ('filelock', 'fvcore', 'matplotlib', 'pycocotools', 'rich', 'tensorboard'):
        assert re.search(rf"'{name}>=([\w.]+)'", said)[1] == old[name]
    for lowest, below, maintained, original in {**REQUIRED, **DETECTION}.values():
        assert old[original] == lowest
        assert digit_version(lowest) < digit_version(new[maintained]) < digit_version(below)


def pins(folder):
    lines = [line for file in folder.glob('*.txt') for line in file.read_text().splitlines()]
    return dict(line.split('==') for line in lines if '==' in line)


def test_importing_the_package_needs_neither_mmdet_nor_compiled_ops():
    code = (
        'import sys; sys.modules.update({"mmdet": None, "mmpretrain": None, "mmcv._ext": None, "mmcv.ops": None})\n'
        'sys.argv += ["as", "long", "as", "its", "parent"]  # which multiprocessing gives to a process that it spawns\n'
        'import mmslab, torch\n'
        'from mmengine.registry import MODELS\n'
        'print([tuple(o.shape) for o in MODELS.build(dict(type="SLABSwin")).eval()(torch.zeros(1, 3, 32, 32))][-1])'
    )
    run = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0 and '(1, 768, 1, 1)' in run.stdout, run.stderr
