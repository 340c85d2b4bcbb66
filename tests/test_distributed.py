"""Several processes on CPUs: torchrun, Slurm, SyncBatchNorm."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from mmengine.model import convert_sync_batchnorm

from mmslab.apis import build_tester, build_trainer
from mmslab.data.shapes import make_shape_classes
from mmslab.distributed import SyncBatchNormOnCPU, check_sync_bn, sync_on_cpu
from mmslab.hooks.bn_recalibration import recalibrate_bn
from mmslab.layers import PRepBN

from .conftest import ROOT
from .hooks.toy import Items, Toy, in_two_processes

# a classifier whose training in two processes is that of one with batches of twice the size: nothing is drawn at random
CONFIG = f"""
_base_ = {str(ROOT / 'configs' / 'demo' / 'slab_pvt_shapes_classes.py')!r}
custom_imports = dict(imports=['mmslab', 'tests.kill_and_resume'])
model = dict(
    backbone=dict(arch=dict(_delete_=True, embed_dims=(8, 16, 24, 32), depths=(1,) * 4, num_heads=(1,) * 4, mlp_ratios=(2,) * 4)),
    head=dict(in_channels=32),
)
pipeline = [dict(type='LoadImageFromFile'), dict(type='PackInputs')]
train_dataloader = dict(batch_size=4, dataset=dict(pipeline=pipeline))
train_cfg = dict(max_epochs=2, val_interval=2)
optim_wrapper = dict(_delete_=True, optimizer=dict(type='SGD', lr=0.05, momentum=0.9))
param_scheduler = []
default_hooks = dict(logger=dict(interval=1))
sync_bn = 'torch'
"""
KILL = """
custom_hooks = [
    dict(type='GammaDecayHook', T=0.6),
    dict(type='BNRecalibrationHook', num_epochs=1),
    dict(type='_TestKilledOnce', iteration=6, flag='killed'),
]
"""


@pytest.fixture(scope='module')
def classes(tmp_path_factory):
    root = tmp_path_factory.mktemp('distributed')
    make_shape_classes(root / 'data', num_train=32, num_val=10, size=64, progress=False)
    (root / 'config.py').write_text(CONFIG)
    (root / 'killed.py').write_text(CONFIG + KILL)
    return root


def script(name, *args, cwd, **env):
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        env.setdefault('PORT', str(s.getsockname()[1]))
    path = f'{Path(sys.executable).parent}:{os.environ["PATH"]}'
    env = {
        **os.environ,
        'PYTHONPATH': str(ROOT),
        'CUDA_VISIBLE_DEVICES': '',
        'PATH': path,
        'OMP_NUM_THREADS': '1',
        **env,
    }
    command = [str(ROOT / 'tools' / name), *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def top1(text):
    return float(re.findall(r'accuracy/top1: ([\d.]+)', text)[-1])


def test_two_processes_of_torchrun_are_one(classes, monkeypatch):
    """Trained with SyncBatchNorm, killed with SIGKILL, started again and resumed, recalibrated: the weights are those of one
    process that nobody killed, with batches of twice the size."""
    data = dict(SHAPE_CLASSES_ROOT=str(classes / 'data'))
    train = ('dist_train.sh', 'killed.py', 2, '--work-dir', 'out', '--resume')
    killed = script(*train, cwd=classes, **data)
    assert killed.returncode != 0 and (classes / 'killed').read_text() in killed.stderr
    run = script(*train, cwd=classes, **data)
    assert run.returncode == 0, run.stderr
    logs = [path.read_text() for path in sorted(classes.glob('out/*/*.log'))]
    assert len(logs) == 2 and 'resumed epoch: 1, iter: 4' in logs[1]
    for log in logs:
        assert '2 processes on CPUs, which talk by gloo, in the place of nccl (env_cfg.dist_cfg.backend)' in log
    assert 'recalibrated over 4 batches' in logs[1]

    tested = script('dist_test.sh', 'config.py', 'out/epoch_2.pth', 2, '--work-dir', 'test', cwd=classes, **data)
    assert tested.returncode == 0, tested.stderr
    assert top1(tested.stdout + tested.stderr) == top1(logs[1])

    monkeypatch.chdir(classes)
    monkeypatch.setenv('SHAPE_CLASSES_ROOT', str(classes / 'data'))
    build_trainer('config.py', work_dir='one', options={'train_dataloader.batch_size': 8, 'sync_bn': None}).train()
    one = torch.load('one/epoch_2.pth', weights_only=False)['state_dict']
    two = torch.load('out/epoch_2.pth', weights_only=False)['state_dict']
    assert one.keys() == two.keys()
    for key in one:
        assert torch.allclose(one[key].double(), two[key].double(), rtol=1e-3, atol=1e-5), key


class Norms(nn.Module):
    """PRepBN half way, on tokens, and BatchNorm2d on maps, to the same shape ``(B, 4, 3, 3)``."""

    def __init__(self):
        super().__init__()
        self.tokens = PRepBN(4, gamma=0.5)
        self.maps = nn.BatchNorm2d(4, momentum=None)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.linspace(0.5, 1.5, p.numel()))

    def forward(self, x):
        return self.maps(self.tokens(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) * 2 + 1)


def _synchronized():
    """Batches of two and of five images."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    x = (torch.randn(7, 4, 3, 3) + 3).split([2, 5])[rank].requires_grad_()
    model = Norms()
    sync_on_cpu(model, all_norms=True)
    out = model(x)
    (out.sin().sum()).backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    for g in grads.values():
        torch.distributed.all_reduce(g)
    model.eval()
    return out.detach(), x.grad, grads, model.state_dict(), model(x).detach(), _recalibrated()


def _recalibrated():
    """Statistics by recalibration of a model with SyncBatchNorm, batches of 4 and of 2 items."""
    rank = torch.distributed.get_rank()
    model = Toy()
    sync_on_cpu(model, all_norms=rank == 0)
    sync_on_cpu(convert_sync_batchnorm(model), all_norms=False)  # as a SyncBN of the config is
    items, size = Items(12), (4, 2)[rank]
    start = (0, 8)[rank]
    batches = [dict(inputs=items.x[i : i + size], y=items.y[i : i + size]) for i in (start, start + size)]
    recalibrate_bn(model, iter(batches), 2, progress=False)
    assert all(type(m) is SyncBatchNormOnCPU for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
    return model.state_dict()


def test_statistics_and_gradients_are_those_of_the_whole_batch():
    ranks = in_two_processes(_synchronized)
    torch.manual_seed(0)
    x = (torch.randn(7, 4, 3, 3) + 3).requires_grad_()
    model = Norms()
    out = model(x)
    out.sin().sum().backward()
    model.eval()
    evaluated = model(x)

    def same(a, b):
        return torch.allclose(a.double(), b.double(), atol=2e-5, rtol=1e-4)

    for i, want in ((0, out), (1, x.grad), (4, evaluated)):
        assert same(torch.cat([rank[i] for rank in ranks]), want), i
    for _, _, grads, state, _, _ in ranks:
        assert all(same(grads[n], p.grad) for n, p in model.named_parameters())
        assert all(same(state[n], v) for n, v in model.state_dict().items())
    one, items = Toy(), Items(12)
    batches = [torch.tensor(i) for i in ([0, 1, 2, 3, 8, 9], [4, 5, 6, 7, 10, 11])]
    recalibrate_bn(one, (dict(inputs=items.x[i], y=items.y[i]) for i in batches), 2, progress=False)
    for *_, recalibrated in ranks:
        assert all(same(recalibrated[n], v) for n, v in one.state_dict().items())


def test_a_sync_bn_that_does_not_synchronize_is_named():
    ours, others = Norms(), nn.Sequential(nn.BatchNorm2d(4))
    for model in (ours, others):
        check_sync_bn('torch', model, 'cpu')
        with pytest.raises(ValueError, match="sync_bn='yes' .* neither 'torch' nor 'mmcv'"):
            check_sync_bn('yes', model, 'cuda')
    check_sync_bn('mmcv', others, 'cuda')
    with pytest.raises(ValueError, match="sync_bn='mmcv' needs a GPU. Use sync_bn='torch'"):
        check_sync_bn('mmcv', others, 'cpu')
    with pytest.raises(ValueError, match="sync_bn='mmcv' does not work with norm_eval and BN recalibration"):
        check_sync_bn('mmcv', ours, 'cuda')


@pytest.mark.parametrize(
    'launcher, starter',
    [('pytorch', 'torchrun, as tools/dist_train.sh'), ('slurm', 'srun, as tools/slurm_train.sh'), ('mpi', 'mpirun')],
)
def test_a_launcher_that_has_not_started_this_is_named(launcher, starter, monkeypatch):
    for name in list(os.environ):
        if name.startswith(('SLURM_', 'OMPI_')) or name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT'):
            monkeypatch.delenv(name)
    for build in (
        lambda: build_trainer('no.py', launcher=launcher),
        lambda: build_tester('no.py', 'no.pth', launcher=launcher),
    ):
        with pytest.raises(
            ValueError, match=f'--launcher {launcher} is for processes started by {starter}.* is not set'
        ):
            build()
    with pytest.raises(ValueError, match="launcher must be none, .* but got 'ssh'"):
        build_trainer('no.py', launcher='ssh')
    if launcher == 'slurm':
        for name, value in dict(SLURM_PROCID='0', SLURM_NTASKS='1', SLURM_NODELIST='a[1-2]', PATH='').items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match='scontrol is not on the PATH. Set MASTER_ADDR'):
            build_trainer('no.py', launcher='slurm')


def test_a_task_of_slurm(classes, monkeypatch):
    """What srun sets, for one task on a machine whose name scontrol knows."""
    monkeypatch.chdir(classes)
    (classes / 'scontrol').write_text('#!/bin/sh\n[ "$*" = "show hostnames local[1-2]" ] && echo 127.0.0.1\n')
    (classes / 'scontrol').chmod(0o755)
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    set_by_srun = dict(SLURM_PROCID='0', SLURM_NTASKS='1', SLURM_LOCALID='0', SLURM_NODELIST='local[1-2]')
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'MASTER_ADDR', 'MASTER_PORT'):
        monkeypatch.setenv(name, 'not yet')
        monkeypatch.delenv(name)
    for name, value in dict(set_by_srun, PATH=f'{classes}:{os.environ["PATH"]}').items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv('SHAPE_CLASSES_ROOT', str(classes / 'data'))
    options = {'env_cfg.dist_cfg.port': port, 'train_cfg.max_epochs': 1, 'log_level': 'WARNING'}
    try:
        run = build_trainer('config.py', work_dir='slurm', launcher='slurm', options=options)
        assert torch.distributed.get_backend() == 'gloo' and os.environ['MASTER_ADDR'] == '127.0.0.1'
        run.train()
    finally:
        torch.distributed.destroy_process_group()
    assert run.iter == 8 and (classes / 'slurm' / 'epoch_1.pth').is_file()
    assert any(type(m) is SyncBatchNormOnCPU for m in run.model.modules())


@pytest.fixture
def slurm(tmp_path):
    """srun and sbatch that write down what they are asked; sbatch then runs its job."""
    for name in ('srun', 'sbatch'):
        (tmp_path / name).write_text(
            f'#!/bin/bash\nprintf "%s\\n" "$@" > {name}.args\n'
            + ('while [ "$1" != --wrap ]; do shift; done\nSLURM_JOB_ID=7 bash -c "$2"\n' if name == 'sbatch' else '')
        )
        (tmp_path / name).chmod(0o755)
    return tmp_path


def asked(folder, name):
    return (folder / f'{name}.args').read_text().splitlines()


def test_slurm_train_is_requeued_and_resumes(slurm):
    env = dict(PATH=f'{slurm}:{os.environ["PATH"]}', GPUS='16', GPUS_PER_NODE='4', SRUN_ARGS='-l --mpi=none')
    env['SBATCH_ARGS'] = '--time=1:00:00'
    run = script('slurm_train.sh', 'gpu', 'my job', 'c.py', 'my out', '--amp', cwd=slurm, **env)
    assert run.returncode == 0, run.stderr
    resources = [
        '--partition=gpu',
        '--job-name=my job',
        '--ntasks=16',
        '--ntasks-per-node=4',
        '--cpus-per-task=5',
        '--gres=gpu:4',
    ]
    assert asked(slurm, 'sbatch')[:-2] == ['--requeue', '--open-mode=append', *resources, '--time=1:00:00']
    command = asked(slurm, 'srun')
    assert command[:9] == [*resources, '--kill-on-bad-exit=1', '-l', '--mpi=none']
    assert command[9:11] == ['python', '-u'] and command[11] == str(ROOT / 'tools' / 'train.py')
    assert command[12:] == ['c.py', '--launcher', 'slurm', '--resume', '--work-dir', 'my out', '--amp']
    (slurm / 'sbatch').unlink()
    env.update(REQUEUE='0', GRES='')
    assert script('slurm_train.sh', 'gpu', 'j', 'c.py', '--amp', cwd=slurm, **env).returncode == 0
    assert asked(slurm, 'srun')[-5:] == ['c.py', '--launcher', 'slurm', '--resume', '--amp']
    assert not any(a.startswith('--gres') for a in asked(slurm, 'srun'))
    missing = script('slurm_train.sh', 'gpu', 'j', 'c.py', cwd=slurm, **{**env, 'REQUEUE': '1'})
    assert missing.returncode == 1 and missing.stderr.startswith('error: sbatch is not on the PATH')


def test_slurm_test(slurm):
    env = dict(PATH=f'{slurm}:{os.environ["PATH"]}', GPUS='2', GPUS_PER_NODE='2')
    assert script('slurm_test.sh', 'gpu', 'j', 'c.py', 'w.pth', '--tta', cwd=slurm, **env).returncode == 0
    command = asked(slurm, 'srun')
    assert command[:2] == ['--partition=gpu', '--job-name=j'] and '--ntasks=2' in command and '--gres=gpu:2' in command
    assert command[-5:] == ['c.py', 'w.pth', '--launcher', 'slurm', '--tta']


@pytest.mark.parametrize('name, number', [('slurm_train.sh', 3), ('slurm_test.sh', 4)])
def test_without_slurm_the_scripts_say_so(name, number, tmp_path):
    run = script(name, *'pjcw'[:number], cwd=tmp_path)
    assert run.returncode == 1 and len(run.stderr.splitlines()) == 1
    assert run.stderr.startswith('error: srun is not on the PATH') and name.replace('slurm', 'dist') in run.stderr
    usage = script(name, 'p', cwd=tmp_path)
    assert usage.returncode == 2 and 'PARTITION JOB_NAME CONFIG' in usage.stderr
