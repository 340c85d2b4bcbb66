"""A model of a few PRepBN blocks, data that draws nothing at random, and runs of it, in one process or in two."""

import os
import socket
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
from mmcv.cnn.bricks.drop import DropPath
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.registry import DATASETS, METRICS, MODELS, OPTIM_WRAPPERS
from mmengine.runner import Runner
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from mmslab.layers import PRepBN


@DATASETS.register_module(name='_TestItems', force=True)
class Items(Dataset):
    """(x, y) pairs, the same in every process."""

    def __init__(self, number=16):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(number, 5, 6, generator=generator) * 2 + 1
        self.y = torch.randn(number, 5, 3, generator=generator)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return dict(inputs=self.x[i], y=self.y[i])


@MODELS.register_module(name='_TestToy', force=True)
class Toy(BaseModel):
    def __init__(self, with_cp=False, forwards=1, drop_path=0.0, norm=None):
        super().__init__()
        torch.manual_seed(5)
        norm = norm or PRepBN
        self.backbone = nn.ModuleDict(
            dict(norm1=norm(6), fc1=nn.Linear(6, 8), norm2=norm(8), fc2=nn.Linear(8, 3), drop=DropPath(drop_path))
        )
        self.with_cp = with_cp
        self.forwards = forwards
        self.seen = []

    def _features(self, x):
        b = self.backbone
        x = b['norm1'](x)
        return b['fc2'](b['drop'](b['norm2'](b['fc1'](x).relu())))

    def forward(self, inputs, y=None, mode='tensor'):
        self.seen.append([float(m.gamma) for m in self.modules() if isinstance(m, PRepBN)])
        for _ in range(self.forwards):
            out = checkpoint(self._features, inputs, use_reentrant=False) if self.with_cp else self._features(inputs)
        return dict(loss=(out - y).square().mean()) if mode == 'loss' else out

    def val_step(self, data):
        return [self(**self.data_preprocessor(data, False))]


@OPTIM_WRAPPERS.register_module(name='_TestBF16OptimWrapper', force=True)
class BF16OptimWrapper(OptimWrapper):
    """AmpOptimWrapper is for GPUs; this is its autocast on a CPU."""

    def optim_context(self, model):
        import contextlib

        stack = contextlib.ExitStack()
        stack.enter_context(super().optim_context(model))
        stack.enter_context(torch.autocast('cpu', torch.bfloat16))
        return stack


@MODELS.register_module(name='_TestPlain', force=True)
class Plain(Toy):
    def __init__(self):
        super().__init__(norm=nn.LayerNorm)


@MODELS.register_module(name='_TestFrozen', force=True)
class Frozen(Toy):
    """Its first norm frozen as a stage, all norms as by norm_eval, or without gradients; at ``gamma``."""

    def __init__(self, how, gamma=1.0):
        super().__init__()
        self.how = how
        self.first = [self.backbone['norm1']] if how == 'stage' else [self.backbone['norm1'], self.backbone['norm2']]
        for norm in self.first:
            norm.set_gamma(gamma)
            norm.requires_grad_(how == 'norm_eval')

    def train(self, mode=True):
        super().train(mode)
        if self.how != 'requires_grad':
            for norm in self.first:
                norm.repbn.bn.eval()
        return self


@METRICS.register_module(name='_TestCollect', force=True)
class Collect(BaseMetric):
    """The mean output, so that a test sees which weights and statistics a validation used."""

    def process(self, data_batch, data_samples):
        self.results += [float(s.mean()) for s in data_samples]

    def compute_metrics(self, results):
        return dict(mean=float(np.mean(results)))


class StopAfter(Hook):
    """Interrupts a run as a power cut would, once a checkpoint of ``iteration`` is written."""

    priority = 100

    def __init__(self, iteration):
        self.iteration = iteration

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == self.iteration:
            raise KeyboardInterrupt


def runner(
    work_dir,
    hooks,
    epochs=4,
    batch_size=4,
    iter_based=False,
    model=None,
    resume=False,
    ema=None,
    accumulative=1,
    items=16,
    val=False,
    extra=(),
    optim_type='OptimWrapper',
    checkpoint_every=1,
    num_workers=0,
    shuffle=False,
    dataset='_TestItems',
    loader=None,
    checkpoint=None,
    seed=0,
):
    iters = epochs * items // batch_size
    train_loader = dict(
        batch_size=batch_size,
        num_workers=num_workers,
        dataset=dict(type=dataset, number=items),
        sampler=dict(type='InfiniteSampler' if iter_based else 'DefaultSampler', shuffle=shuffle),
        collate_fn=dict(type='default_collate'),
    )
    train_loader.update(loader or {})
    cfg = dict(
        default_scope='mmengine',
        model=model or dict(type='_TestToy'),
        work_dir=str(work_dir),
        train_dataloader=train_loader,
        train_cfg=dict(type='IterBasedTrainLoop', max_iters=iters, val_interval=1000)
        if iter_based
        else dict(by_epoch=True, max_epochs=epochs, val_interval=1),
        optim_wrapper=dict(
            type=optim_type, accumulative_counts=accumulative, optimizer=dict(type='AdamW', lr=0.05, weight_decay=0.01)
        ),
        default_hooks=dict(
            checkpoint={
                **dict(type='CheckpointHook', interval=checkpoint_every, by_epoch=not iter_based, max_keep_ckpts=-1),
                **(checkpoint or {}),
            },
            logger=dict(type='LoggerHook', interval=1, log_metric_by_epoch=not iter_based),
        ),
        log_processor=dict(by_epoch=not iter_based),
        custom_hooks=[*hooks, *([ema] if ema else [])],
        resume=resume,
        log_level='WARNING',
        randomness=dict(seed=seed),
        experiment_name=next(tempfile._get_candidate_names()),
    )
    if val:
        cfg.update(
            val_dataloader={**train_loader, 'sampler': dict(type='DefaultSampler', shuffle=False)},
            val_cfg=dict(),
            val_evaluator=dict(type='_TestCollect'),
        )
    if dist.is_available() and dist.is_initialized():
        cfg.update(
            launcher='pytorch',
            model_wrapper_cfg=dict(
                type='MMDistributedDataParallel',
                device_ids=None,
                find_unused_parameters=False,
                broadcast_buffers=False,
            ),
        )
    made = Runner.from_cfg(Config(cfg, format_python_code=False))  # yapf takes longer than the training
    for hook in extra:
        made.register_hook(hook)
    return made


def gammas_seen(run):
    model = run.model.module if hasattr(run.model, 'module') else run.model
    assert all(len(set(g)) == 1 for g in model.seen)
    return [g[0] for g in model.seen]


def _worker(rank, function, args, port, out):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port)
    )
    torch.set_num_threads(1)
    dist.init_process_group('gloo')
    result = function(*args)
    torch.save(result, f'{out}/{rank}.pt')
    dist.barrier()
    dist.destroy_process_group()


def in_two_processes(function, *args):
    """Runs ``function(*args)`` in 2 gloo processes; the results of rank 0 and 1. An error there is an error here."""
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as out:
        mp.start_processes(_worker, (function, args, port, out), nprocs=2, start_method='spawn')
        return [torch.load(f'{out}/{rank}.pt') for rank in (0, 1)]
