"""Findings from faked packages and metadata; that all is well here is seen in test_wheel.py."""

import json
import os
import subprocess
import sys

import pytest

from mmslab import doctor
from mmslab.deploy.export import TORCH
from mmslab.doctor import DISTRIBUTIONS, EXPORT, NOTE, OK, WRONG, Finding

from .conftest import ROOT

GLIBC, JEMALLOC = dict(name='glibc'), dict(name='jemalloc')


def healthy():
    """What is installed and probed where all is well."""
    installed = {name: {names[0]: '2.5.0'} for name, names in DISTRIBUTIONS.items()}
    installed.update({name: {name: '1.0'} for name in EXPORT})
    installed.update(numpy=dict(numpy='2.2.6'), transformers={}, mmdet={'onedl-mmdetection': '3.5.1'})
    probed = {name: dict(value='works') for name in doctor.PROBED}
    probed['torch'] = dict(value=dict(version='2.5.0', cuda=None, gpus=[], archs=[], threads=1))
    return installed, probed


def wrong(findings):
    return {f.name: f'{f.found} {f.remedy}' for f in findings if f.verdict == WRONG}


def test_nothing_is_wrong_where_all_is_well():
    installed, probed = healthy()
    found = [
        *doctor.versions(installed, probed),
        *doctor.troubles(installed, probed, True),
        *doctor.gpus(probed, False),
    ]
    assert {f.verdict for f in found} == {OK} and not any(f.remedy for f in found)
    assert Finding('mmdet', 'works (onedl-mmdetection 3.5.1)') in found


@pytest.mark.parametrize(
    'changes, name, message',
    [
        (dict(mmcv={'onedl-mmcv': '2.3.6', 'mmcv': '2.1.0'}), 'two of mmcv', 'pip uninstall onedl-mmcv mmcv'),
        (
            dict(opencv={'opencv-python-headless': '4.12', 'opencv-python': '4.8'}),
            'two of OpenCV',
            'then pip install opencv-python-headless',
        ),
        (dict(torch=dict(torch='2.1.2')), 'numpy 2', 'pip install "numpy<2"'),
        (dict(transformers=dict(transformers='5.0.1')), 'transformers 5', 'pip install "transformers<5"'),
        (dict(mmengine=dict(mmengine='0.10.7')), 'setuptools', 'pip install setuptools==69.5.1'),
        (dict(torch=dict(torch='2.14.0')), 'torch for mmcv', 'pip install torch==2.11.0'),
    ],
)
def test_known_troubles_of_distributions(changes, name, message):
    installed, probed = healthy()
    probed['mmcv ops'] = dict(error="ModuleNotFoundError: No module named 'mmcv._ext'")
    assert not doctor.troubles(installed, probed, pkg_resources=False)
    found = wrong(doctor.troubles({**installed, **changes}, probed, pkg_resources=name != 'setuptools'))
    assert list(found) == [name] and message in found[name]


def test_both_variants_of_opencv_of_one_version_are_no_trouble():
    installed, probed = healthy()
    installed['opencv'] = {'opencv-python-headless': '4.12', 'opencv-python': '4.12'}
    assert not doctor.troubles(installed, probed, True)


@pytest.mark.parametrize(
    'name, error, remedy',
    [
        ('mmdet', 'TypeError: NoneType takes no arguments', 'pip install "transformers<5"'),
        ('mmdet', 'AssertionError: MMCV==2.2.0 is used but incompatible. Please install', 'mmcv 2.1.0'),
        (
            'mmcv ops',
            "ModuleNotFoundError: No module named 'mmcv._ext'",
            'MMCV_WITH_OPS=1 pip install --no-build-isolation',
        ),
        ('mmcv ops', 'ImportError: _ext.so: undefined symbol: _ZN3c10', 'with torch installed first, rebuild mmcv'),
        ('opencv', 'ImportError: libGL.so.1: cannot open shared object file', 'opencv-python-headless'),
        ('numpy with torch', 'RuntimeError: Numpy is not available', 'pip install "numpy<2"'),
        ('mmengine', "ModuleNotFoundError: No module named 'pkg_resources'", 'setuptools==69.5.1'),
        ('torchvision', 'RuntimeError: operator torchvision::nms does not exist', 'pytorch.org'),
    ],
)
def test_what_cannot_be_imported_has_its_remedy(name, error, remedy):
    installed, probed = healthy()
    probed[name] = dict(error=error)
    found = wrong(doctor.versions(installed, probed))
    assert list(found) == [name] and error in found[name] and remedy in found[name]


def test_what_is_not_installed():
    installed, probed = healthy()
    for name in ('mmdet', 'mmpretrain'):
        installed[name], probed[name] = {}, dict(error=f"ModuleNotFoundError: No module named '{name}'")
    installed['onnxscript'] = {}
    found = {f.name: f for f in doctor.versions(installed, probed)}
    assert found['mmdet'].verdict == WRONG and 'pip install onedl-mmdetection' in found['mmdet'].remedy
    assert found['mmpretrain'].verdict == NOTE and 'imagenet' in found['mmpretrain'].remedy
    assert found['ONNX'].verdict == NOTE and 'onnxscript' in found['ONNX'].found
    assert f'torch >= {TORCH} and' in found['ONNX'].remedy


def test_gpus(monkeypatch):
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    _, probed = healthy()
    (found,) = doctor.gpus(probed, driver=True)
    assert found.verdict == WRONG and 'for CPUs alone' in found.found and 'pytorch.org' in found.remedy
    gpu = dict(name='H200', gib=139.8, capability=[9, 0])
    probed['torch']['value'].update(cuda='12.1', gpus=[gpu], archs=['sm_80', 'sm_90a'])
    assert doctor.gpus(probed) == [Finding('GPU cuda:0', 'H200, 140 GiB, capability 9.0')]
    gpu['capability'] = [12, 0]
    (found,) = doctor.gpus(probed)
    assert found.verdict == WRONG and 'compiled for sm_80, sm_90a' in found.remedy


def test_the_machine(tmp_path, monkeypatch):
    usage = type('Usage', (), dict(free=2**29, total=2**26))
    monkeypatch.setattr(doctor.shutil, 'disk_usage', lambda folder: usage)
    _, probed = healthy()
    probed['torch']['value']['threads'] = 10_000
    found = {f.name: f for f in doctor.machine(probed, shared=str(tmp_path), allocator=GLIBC)}
    assert {name: f.verdict for name, f in found.items()} == {
        'cores': NOTE,
        'allocator': NOTE,
        'free space here': WRONG,
        'shared memory': NOTE,
    }
    assert 'OMP_NUM_THREADS=' in found['cores'].remedy and 'jemalloc' in found['allocator'].remedy
    assert '--work-dir' in found['free space here'].remedy and '--shm-size' in found['shared memory'].remedy
    usage.free = usage.total = 2**40
    probed['torch']['value']['threads'] = 1
    assert {f.verdict for f in doctor.machine(probed, shared=str(tmp_path), allocator=JEMALLOC)} == {OK}


def test_data_roots_are_those_of_the_configs(tmp_path, monkeypatch):
    monkeypatch.setenv('COCO_ROOT', str(tmp_path))
    monkeypatch.setenv('IMAGENET_ROOT', 'no/where')
    found = {f.name: f for f in doctor.data_roots()}
    assert found.keys() == {'COCO_ROOT', 'IMAGENET_ROOT', 'SHAPES_ROOT', 'SHAPE_CLASSES_ROOT'}
    assert found['COCO_ROOT'] == Finding('COCO_ROOT', str(tmp_path))
    assert found['IMAGENET_ROOT'].verdict == NOTE and 'no/where is not there' == found['IMAGENET_ROOT'].found


def test_it_runs_where_nothing_can_be_imported(tmp_path):
    """Packages that raise, exit and crash the process: each is named, and so is what comes after them."""
    fakes = dict(
        torch="raise RuntimeError('no torch')",
        numpy="__version__ = '1.26.4'",
        cv2="import sys; sys.exit('bye')",
        mmengine='import os; os.abort()',
        mmcv="raise TypeError('NoneType takes no arguments')",
        torchvision="__version__ = '0.16.2'",
    )
    for name, code in fakes.items():
        (tmp_path / f'{name}.py').write_text(code)
    env = {**os.environ, 'PYTHONPATH': f'{tmp_path}{os.pathsep}{ROOT}'}
    command = [sys.executable, '-m', 'mmslab', 'doctor', '--json']
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert run.returncode == 1, run.stderr
    report = json.loads(run.stdout)
    found = {f['name']: f for f in report['findings']}
    assert report['ok'] is False and found['torch']['found'].startswith('RuntimeError: no torch')
    assert found['numpy']['verdict'] == OK and found['numpy']['found'].startswith('1.26.4')
    assert 'SystemExit: bye' in found['opencv']['found'] and 'crashed (exit code -6)' in found['mmengine']['found']
    assert '"transformers<5"' in found['mmcv']['remedy'] and found['torchvision']['verdict'] == OK
    assert {found[name]['verdict'] for name in ('mmslab', 'mmdet', 'mmcv ops')} == {WRONG}
    assert 'free space here' in found
    other = subprocess.run(
        [sys.executable, '-m', 'mmslab', 'train', 'a'], capture_output=True, text=True, cwd=tmp_path, env=env
    )
    assert other.returncode != 0  # any other command needs them
