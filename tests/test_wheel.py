"""The wheel, in an environment that has it and not the checkout, in an empty folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from .conftest import ROOT

# two steps of the demo's detector on a few shapes, then more that takes a config by name; in one process, as torch takes
# seconds to import
PROGRAM = """
import sys
from pathlib import Path

from mmengine.config import Config

# tools that do not import mmslab: mmengine reads bases before it does custom_imports, so the name is known too late
Path('name.py').write_text("_base_ = 'mmslab::maskrcnn_slab_swin_t_1x.py'\\n")
Path('call.py').write_text("_base_ = __import__('mmslab').find_config('maskrcnn_slab_swin_t_1x')\\n")
try:
    raise SystemExit(Config.fromfile('name.py'))
except ValueError:
    assert 'mmslab' not in sys.modules
assert Config.fromfile('call.py').model.backbone.type == 'SLABSwin'

import mmslab
from mmslab.cli import COMMANDS, main

assert Path(mmslab.__file__).is_relative_to(sys.prefix), mmslab.__file__


def run(*args):
    try:
        main([str(a) for a in args])
    except SystemExit as stop:
        assert not stop.code, (args, stop.code)


for command in COMMANDS:
    run(command, '--help')
run()

from mmengine.hub import get_config

from mmslab.data.shapes import make_shapes
from mmslab.demo import CONFIG

assert CONFIG.is_relative_to(sys.prefix), CONFIG
assert get_config('mmslab::imagenet/slab_swin_t.py').model.backbone.type == 'SLABSwin'
make_shapes('data/shapes', num_train=4, num_val=2, size=64, progress=False)
Path('mine.py').write_text("_base_ = 'mmslab::demo/maskrcnn_slab_swin_shapes.py'\\nrandomness = dict(seed=1)\\n")
short = ['train_dataloader.batch_size=2', 'train_cfg.max_epochs=1', 'custom_hooks.0.T=0.5', 'custom_hooks.0.hold=0.0']
short += ['optim_wrapper.optimizer.fused=False']
run('train', 'mine.py', '--cfg-options', *short)
checkpoint = 'work_dirs/mine/epoch_1.pth'
name = 'demo/maskrcnn_slab_swin_shapes'
run('deploy', f'mmslab::{name}.py', checkpoint, '--out', 'folded')
assert Path('folded/maskrcnn_slab_swin_shapes_deploy.py').is_file()
run('benchmark', name, '--flops', '--image', 64, 64)
print('ALL RAN')
"""


@pytest.fixture(scope='module')
def environment(tmp_path_factory):
    """A virtual environment with the wheel, built from what git has, on top of the packages that the tests run with."""
    root = tmp_path_factory.mktemp('wheel')
    source = root / 'source'
    ignore = shutil.ignore_patterns('__pycache__', '.mim')
    for name in ('mmslab', 'configs', 'tools'):
        shutil.copytree(ROOT / name, source / name, ignore=ignore)
    for name in ('setup.py', 'pyproject.toml', 'MANIFEST.in', 'README.md', 'LICENSE', 'model-index.yml'):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, '-m', 'pip', '--disable-pip-version-check', '--no-input']
    offline = ['--no-deps', '--no-index']
    wheel = [*pip, 'wheel', *offline, '--no-build-isolation', '-w', str(root), str(source)]
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
    built = subprocess.run(wheel, capture_output=True, text=True, env=env, cwd=root)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = root.glob('mmslab-*.whl')
    venv.create(root / 'venv', symlinks=True)
    python = root / 'venv' / 'bin' / 'python'
    installed = subprocess.run(
        [pip[0], '-m', 'pip', '--python', str(python), *pip[3:], 'install', *offline, str(path)],
        capture_output=True,
        text=True,
        env=env,
        cwd=root,
    )
    assert installed.returncode == 0, installed.stdout + installed.stderr
    (site,) = (root / 'venv').glob('lib/python*/site-packages')
    # a folder that is named so has its packages, and not its .pth files, of which one finds the checkout
    (site / 'others.pth').write_text('\n'.join({sysconfig.get_path('purelib'), sysconfig.get_path('platlib')}))
    return path, python


def test_the_wheel_has_the_configs_and_the_index(environment):
    names = set(zipfile.ZipFile(environment[0]).namelist())
    for path in (ROOT / 'configs').rglob('*'):
        if path.suffix in ('.py', '.yml'):
            assert f'mmslab/.mim/configs/{path.relative_to(ROOT / "configs").as_posix()}' in names
    assert {'mmslab/.mim/model-index.yml', 'mmslab/.mim/configs/metafile.yml', 'mmslab/.mim/tools/train.py'} <= names
    assert not any('__pycache__' in n or n.startswith(('configs/', 'tests/')) for n in names)


def test_commands_run_from_the_wheel_in_an_empty_folder(environment, tmp_path):
    _, python = environment
    env = {k: v for k, v in os.environ.items() if k not in ('PYTHONPATH', 'SHAPES_ROOT')}
    env['CUDA_VISIBLE_DEVICES'] = ''
    given = dict(capture_output=True, text=True, cwd=tmp_path, env=env)
    run = subprocess.run([python, '-c', PROGRAM], **given)
    assert run.returncode == 0 and run.stdout.endswith('ALL RAN\n'), run.stdout[-3000:] + run.stderr[-3000:]
    assert 'usage: mmslab doctor' in run.stdout and 'commands:' in run.stdout
    doctor = subprocess.run([Path(python).parent / 'mmslab', 'doctor'], **given)
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert 'nms runs on cpu' in doctor.stdout and f'{python.parent.parent}' in doctor.stdout.replace('\n', '')
