import subprocess
import sys
import types

import mmcv
import pytest

from mmslab.versions import check_detection, check_versions

from .conftest import ROOT


def test_this_environment_passes():
    check_versions()
    check_detection()


@pytest.mark.parametrize('version', ['1.7.2', '3.0.0'])
def test_another_version_is_named(monkeypatch, version):
    monkeypatch.setattr(mmcv, '__version__', version)
    with pytest.raises(ImportError, match=f'needs mmcv>=2.0.0,<3.0.0, but found {version}.*pip install "onedl-mmcv'):
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
    with pytest.raises(ImportError, match='mmcv has no compiled ops.*--no-build-isolation'):
        check_detection()


def test_importing_the_package_needs_neither_mmdet_nor_compiled_ops():
    code = (
        'import sys; sys.modules.update({"mmdet": None, "mmpretrain": None, "mmcv._ext": None, "mmcv.ops": None})\n'
        'import mmslab, torch\n'
        'from mmengine.registry import MODELS\n'
        'print([tuple(o.shape) for o in MODELS.build(dict(type="SLABSwin")).eval()(torch.zeros(1, 3, 32, 32))][-1])'
    )
    run = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0 and '(1, 768, 1, 1)' in run.stdout, run.stderr
