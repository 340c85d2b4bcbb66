import copy
import os
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.fileio import LocalBackend
from mmengine.registry import DATASETS, MODELS

from mmslab.apis import build_trainer
from mmslab.checkpoints import load_file
from mmslab.data.place import place_batches
from mmslab.data.shapes import make_shapes
from mmslab.hooks import ExactResumeHook, latest_checkpoint

from ..conftest import ROOT
from ..kill_and_resume import compare, differences, kill_and_resume
from .toy import Items, StopAfter, Toy, in_two_processes, runner

EXACT = dict(type='ExactResumeHook')
BY_ITER = dict(by_epoch=False)


def draws():
    """One number of each generator."""
    return random.random() + float(np.random.rand()) + float(torch.rand(()))


@DATASETS.register_module(name='_TestRestlessItems', force=True)
class RestlessItems(Items):
    """Items with an augmentation that draws from all generators."""

    def __getitem__(self, i):
        item = super().__getitem__(i)
        return dict(item, inputs=item['inputs'] * (1 + 0.1 * draws()))


@MODELS.register_module(name='_TestRestless', force=True)
class Restless(Toy):
    """A model that draws from all generators: drop path, and noise as a detector's samplers draw."""

    def __init__(self):
        super().__init__(drop_path=0.2)

    def forward(self, inputs, y=None, mode='tensor'):
        self.inputs = [*getattr(self, 'inputs', []), inputs.detach().clone()] if mode == 'loss' else []
        # a validation draws too
        return super().forward(inputs * (1 + 0.1 * draws()), y, mode)


def restless(work_dir, hooks=(EXACT,), **kwargs):
    kwargs = {**dict(dataset='_TestRestlessItems', model=dict(type='_TestRestless'), shuffle=True, val=True), **kwargs}
    return runner(work_dir, [*hooks], **kwargs)


def train_restless(work_dir, kwargs, begun=None, stop=None):
    torch.set_num_threads(1)
    resume = Path(work_dir).exists()
    run = restless(work_dir, resume=resume, extra=[h for h in (begun, stop and StopAfter(stop)) if h], **kwargs)
    if stop:
        with pytest.raises(KeyboardInterrupt):
            run.train()
    else:
        run.train()
    return run


# what is trained, how often a checkpoint is written
VARIANTS = {
    'epochs': dict(checkpoint=dict(save_best='mean', rule='less')),  # written again after a validation that is best
    'in epochs': dict(checkpoint=BY_ITER),
    'in epochs, workers': dict(checkpoint=dict(by_epoch=False, interval=3), num_workers=2),
    'in epochs, workers that stay': dict(
        checkpoint=BY_ITER, num_workers=2, loader=dict(persistent_workers=True, prefetch_factor=3)
    ),
    'iterations': dict(iter_based=True),
    'iterations, workers': dict(iter_based=True, num_workers=2, checkpoint=dict(interval=3)),
    'iterations over epochs': dict(
        iter_based=True, items=14, loader=dict(sampler=dict(type='DefaultSampler', shuffle=True), drop_last=True)
    ),
    'EMA, accumulation': dict(checkpoint=BY_ITER, ema=dict(type='EMAHook', momentum=0.2), accumulative=3),
    'no seed': dict(checkpoint=BY_ITER, seed=None),
    'recalibration': dict(
        checkpoint=BY_ITER,
        num_workers=1,
        hooks=[
            EXACT,
            dict(type='GammaDecayHook', T=0.5),
            dict(type='BNRecalibrationHook', num_epochs=1, validate_before=True),
        ],
    ),
}


@pytest.mark.parametrize(
    'name, stop',
    [
        ('epochs', 5),  # an epoch has four batches, and a checkpoint follows each epoch
        ('in epochs', 3),
        ('in epochs', 8),  # an epoch is over, what comes at its end is not
        ('in epochs, workers', 6),
        ('in epochs, workers that stay', 6),
        ('iterations', 8),
        ('iterations, workers', 6),
        ('iterations over epochs', 5),
        ('EMA, accumulation', 5),
        ('no seed', 6),
        ('recalibration', 6),
        ('recalibration', 12),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, name, stop):
    kwargs = dict(epochs=3, **VARIANTS[name])
    drawn = dict(seed=7) if kwargs.get('seed', 0) is None else {}  # what the first run draws where the config says None
    train_restless(tmp_path / 'killed', {**kwargs, **drawn}, stop=stop)
    whole = train_restless(tmp_path / 'whole', {**kwargs, **drawn})
    rest = train_restless(tmp_path / 'killed', kwargs)
    assert len(rest.model.seen) < len(whole.model.seen) and rest.iter == whole.iter > stop - 1
    assert compare(tmp_path / 'whole', tmp_path / 'killed') == []
    for (key, a), b in zip(whole.model.state_dict().items(), rest.model.state_dict().values()):
        assert torch.equal(a, b), key


def test_without_the_hook_it_is_another(tmp_path):
    """So the tests above do test something."""
    kwargs = dict(hooks=[], epochs=3)
    train_restless(tmp_path / 'killed', kwargs, stop=9)
    train_restless(tmp_path / 'whole', kwargs)
    train_restless(tmp_path / 'killed', kwargs)
    assert any('state_dict/backbone.fc1.weight' in d for d in compare(tmp_path / 'whole', tmp_path / 'killed'))


def _both_ranks(folder):
    kwargs = dict(epochs=3, batch_size=2, accumulative=3, num_workers=1, checkpoint=BY_ITER)
    kwargs['ema'] = dict(type='EMAHook', momentum=0.2, update_buffers=True)
    ends = []
    for name, stop in (('killed', 5), ('whole', None), ('killed', None)):
        torch.distributed.barrier()
        run = train_restless(Path(folder) / name, kwargs, stop=stop)
        ema = next(h for h in run.hooks if type(h).__name__ == 'EMAHook').ema_model
        ends.append({**run.model.module.state_dict(), **{f'ema.{k}': v for k, v in ema.state_dict().items()}})
    return ends[1:]


def test_two_processes_that_accumulate(tmp_path):
    """Each rank has random numbers, gradients not yet applied, and BN statistics of its own."""
    ranks = in_two_processes(_both_ranks, str(tmp_path))
    assert compare(tmp_path / 'whole', tmp_path / 'killed') == []
    for whole, resumed in ranks:
        assert differences(whole, resumed) == []
    key = 'backbone.norm1.repbn.bn.running_mean'
    assert not torch.equal(ranks[0][0][key], ranks[1][0][key])
    state = torch.load(tmp_path / 'killed' / 'iter_5.pth', weights_only=False)['exact_resume']
    first, second = (rank['gradients']['backbone.fc1.weight'] for rank in state['ranks'])
    assert not torch.equal(first, second)


@pytest.mark.parametrize('name, processes', [('in epochs, workers', 1), ('EMA, accumulation', 2)])
def test_killed_at_random_moments(tmp_path, name, processes):
    """The short form of ``python -m tests.kill_and_resume``."""
    kwargs = dict(epochs=4, batch_size=4 // processes, val=False, **VARIANTS[name])
    killed, started = kill_and_resume(train_restless, (str(tmp_path), kwargs), 2, processes, latest=0.5)
    assert 1 <= killed < started
    assert compare(tmp_path / 'whole', tmp_path / 'killed') == []


def test_another_number_of_workers_changes_nothing(tmp_path):
    kwargs = dict(epochs=2, checkpoint=BY_ITER)
    train_restless(tmp_path / 'killed', {**kwargs, 'num_workers': 2}, stop=3)
    train_restless(tmp_path / 'whole', kwargs)
    train_restless(tmp_path / 'killed', kwargs)
    assert compare(tmp_path / 'whole', tmp_path / 'killed') == []


def log_of(folder):
    return sorted(folder.glob('*/*.log'))[-1].read_text()


def test_a_checkpoint_without_random_states_is_resumed_with_a_warning(tmp_path):
    train_restless(tmp_path, dict(hooks=[], epochs=2, checkpoint=BY_ITER), stop=6)
    run = train_restless(tmp_path, dict(epochs=2, checkpoint=BY_ITER))
    assert (run.iter, run.epoch) == (8, 2)
    assert 'was written without ExactResumeHook and has no random states' in log_of(tmp_path)


def test_another_batch_size_is_warned_of(tmp_path):
    train_restless(tmp_path, dict(epochs=2, checkpoint=BY_ITER), stop=6)
    run = train_restless(tmp_path, dict(epochs=2, batch_size=2, checkpoint=BY_ITER))
    assert 'batch_size was 4 and is 2; batches was 4 and is 8' in log_of(tmp_path)
    assert run.iter == 6 + 4 and len(run.model.inputs or []) <= 4  # half of the second epoch was left


def test_a_checkpoint_is_read_without_unpickling(tmp_path):
    train_restless(tmp_path, dict(epochs=1))
    state = load_file(tmp_path / 'epoch_1.pth', trust=False)['exact_resume']
    assert state['world_size'] == 1 and torch.is_tensor(state['ranks'][0]['random']['torch'])


def test_a_write_cut_off_costs_nothing(tmp_path, monkeypatch):
    """With one checkpoint kept, the old one is there until the new one is whole."""
    put = LocalBackend.put

    def cut(self, content, path):
        if 'iter_6' in str(path):
            put(self, content[: len(content) // 2], path)
            raise KeyboardInterrupt
        put(self, content, path)

    kwargs = dict(epochs=2, checkpoint=dict(by_epoch=False, max_keep_ckpts=1))
    monkeypatch.setattr(LocalBackend, 'put', cut)
    with pytest.raises(KeyboardInterrupt):
        train_restless(tmp_path / 'killed', kwargs)
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / 'killed').glob('*.pth')] == ['iter_5.pth']
    train_restless(tmp_path / 'killed', kwargs)
    assert sorted(p.name for p in (tmp_path / 'killed').glob('*.p*t*')) == ['iter_8.pth']
    train_restless(tmp_path / 'whole', kwargs)
    assert compare(tmp_path / 'whole', tmp_path / 'killed') == []


def test_the_newest_whole_checkpoint_is_found(tmp_path):
    assert latest_checkpoint(tmp_path) is None
    pointer = tmp_path / 'last_checkpoint'
    for i, name in enumerate(('epoch_1', 'epoch_2', 'best_mAP_epoch_9', 'iter_30')):
        torch.save(dict(a=torch.zeros(1000)), tmp_path / f'{name}.pth')
        os.utime(tmp_path / f'{name}.pth', (i, i))
    pointer.write_text(str(tmp_path / 'epoch_1.pth'))
    assert latest_checkpoint(tmp_path) == str(tmp_path / 'epoch_1.pth')
    for named in ('', 'gone.pth', str(tmp_path / 'iter_30.pth')):
        pointer.write_text(named)
        content = (tmp_path / 'iter_30.pth').read_bytes()
        (tmp_path / 'iter_30.pth').write_bytes(content[: len(content) - 100])
        assert latest_checkpoint(tmp_path) == str(tmp_path / 'epoch_2.pth')
    for file in tmp_path.glob('epoch_*.pth'):
        file.write_bytes(b'')
    with pytest.raises(FileNotFoundError, match='--resume: .*iter_30.pth.* is missing or cut off.*--resume FILE'):
        latest_checkpoint(tmp_path)


def test_data_and_loops_without_places_are_named(tmp_path):
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield from Items()

    with pytest.raises(ValueError, match='place in train_dataloader: Stream is an IterableDataset.*exact_resume=None'):
        place_batches(torch.utils.data.DataLoader(Stream()), 0, 0)
    with pytest.raises(ValueError, match='knows the places of EpochBasedTrainLoop.*not of SimpleNamespace'):
        ExactResumeHook().before_train(SimpleNamespace(train_loop=SimpleNamespace()))


SMALL = {
    'model.backbone.arch': dict(embed_dims=16, depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8)),
    'model.backbone.drop_path_rate': 0.2,
    'model.neck': dict(in_channels=[16, 32, 64, 128]),
    'model.roi_head.bbox_head.fc_out_channels': 32,
    'model.roi_head.mask_head.num_convs': 1,
    'model.train_cfg.rpn_proposal': dict(nms_pre=50, max_per_img=20),
    'train_dataloader': dict(
        batch_size=2, num_workers=2, batch_sampler=dict(_delete_=True, type='AspectRatioBatchSampler')
    ),
    'train_cfg.max_epochs': 1,
    'default_hooks.checkpoint': dict(interval=3, by_epoch=False),
    'optim_wrapper.accumulative_counts': 2,
    'custom_hooks.1.validate_before': False,
    **dict.fromkeys(('val_cfg', 'val_dataloader', 'val_evaluator')),
}


def test_a_detector_resumed_in_an_epoch(tmp_path, monkeypatch):
    """Mask R-CNN, whose samplers draw; flips in workers; a batch sampler of mmdet's that holds images back."""
    make_shapes(tmp_path / 'shapes', num_train=7, num_val=2, size=64, progress=False)
    monkeypatch.setenv('SHAPES_ROOT', str(tmp_path / 'shapes'))
    config = ROOT / 'configs' / 'demo' / 'maskrcnn_slab_swin_shapes.py'

    def train(name, resume=None):
        build_trainer(config, work_dir=tmp_path / name, resume=resume, options=copy.deepcopy(SMALL)).train()

    train('whole')
    train('killed', resume=str(tmp_path / 'whole' / 'iter_3.pth'))  # as if it had been killed after that was written
    assert compare(tmp_path / 'whole', tmp_path / 'killed') == []
