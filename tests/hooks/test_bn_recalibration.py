import copy
import json
import random

import numpy as np
import pytest
import torch
from mmcv.cnn.bricks.drop import DropPath
from mmengine.evaluator import BaseMetric
from mmengine.hooks import EarlyStoppingHook, Hook
from mmengine.registry import METRICS
from torch.utils.data import DataLoader

from mmslab.hooks import BNRecalibrationHook
from mmslab.hooks.bn_recalibration import _batches, recalibrate_bn
from mmslab.layers import RepBN

from .toy import Items, Toy, in_two_processes, runner

AT_ZERO = dict(type='GammaDecayHook', T=0)


def statistics(model):
    return [t for m in model.modules() if isinstance(m, RepBN) for t in (m.bn.running_mean, m.bn.running_var)]


def population_statistics(model, batches):
    """Layer by layer in float64: BN by the batch in front, the mean and variance of all batches together behind."""
    b = copy.deepcopy(model).double().backbone
    first, second = [], []
    for x in batches:
        x = x.double()
        first.append(x.reshape(-1, 6))
        n = b['norm1'].repbn
        normed = (x - x.mean((0, 1))) / (x.var((0, 1), unbiased=False) + 1e-5).sqrt() * n.bn.weight + n.bn.bias
        second.append(b['fc1'](normed + n.eta * x).relu().reshape(-1, 8))
    out = []
    for seen in (torch.cat(first), torch.cat(second)):
        out += [seen.mean(0), seen.var(0, unbiased=False)]
    return out


def trained_toy(**kwargs):
    model = Toy(**kwargs)
    for m in model.modules():
        if hasattr(m, 'set_gamma'):
            m.set_gamma(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape) * 0.1)
    return model


def test_statistics_are_the_populations():
    model = trained_toy(drop_path=0.5)
    items = Items(14)
    loader = DataLoader(items, batch_size=4)  # the last batch is smaller
    batches = [b['inputs'] for b in loader]
    want = population_statistics(model, batches)
    assert recalibrate_bn(model, iter(loader), len(loader), progress=False) == 2
    for a, b in zip(statistics(model), want):
        assert torch.allclose(a.double(), b, atol=1e-5), (a, b)


def test_drop_path_and_dropout_are_off():
    """They stand before a norm, so that its statistics tell; at 0.9 no chance hides them."""
    model = trained_toy()
    fc1 = model.backbone['fc1']
    model.backbone['fc1'] = torch.nn.Sequential(fc1, DropPath(0.9), torch.nn.Dropout(0.9))
    loader = DataLoader(Items(), batch_size=4)
    want = population_statistics(copy.deepcopy(model).eval(), [b['inputs'] for b in loader])
    model.train()
    recalibrate_bn(model, iter(loader), len(loader), progress=False)
    for a, b in zip(statistics(model), want):
        assert torch.allclose(a.double(), b, atol=1e-5), (a, b)


def test_everything_else_is_left_as_it_was():
    model = trained_toy(drop_path=0.5).train()
    model.backbone['fc2'].eval()
    model.backbone['norm1'].repbn.bn.momentum = 0.03
    optimizer = torch.optim.AdamW(model.parameters())
    model(Items().x, Items().y, mode='loss')['loss'].backward()
    optimizer.step()
    before = copy.deepcopy(model.state_dict())
    buffers = statistics(model)
    optimizer_before = copy.deepcopy(optimizer.state_dict())
    modes = [(m, m.training) for m in model.modules()]
    grads = [p.grad.clone() for p in model.parameters()]
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()

    class Drawing(Items):
        def __getitem__(self, i):
            torch.rand(1), np.random.rand(), random.random()
            return super().__getitem__(i)

    recalibrate_bn(model, _batches(DataLoader(Drawing(), batch_size=4, shuffle=True), 0), 4, progress=False)
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all() and states[2] == random.getstate()
    assert all(m.training == mode for m, mode in modes)
    assert model.backbone['norm1'].repbn.bn.momentum == 0.03
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads))
    assert str(optimizer.state_dict()) == str(optimizer_before)
    assert all(a is b for a, b in zip(buffers, statistics(model)))  # the same tensors, in place
    changed = [k for k, v in model.state_dict().items() if not torch.equal(v, before[k])]
    assert sorted(changed) == sorted(k for k in before if k.endswith(('running_mean', 'running_var')))


def test_an_error_on_the_way_leaves_the_model_as_it_was():
    model = trained_toy().train()
    before = copy.deepcopy(model.state_dict())

    def broken():
        yield from DataLoader(Items(4), batch_size=4)
        raise RuntimeError('disk on fire')

    with pytest.raises(RuntimeError, match='disk on fire'):
        recalibrate_bn(model, broken(), 3, progress=False)
    assert model.training and all(m.bn.momentum == 0.1 for m in model.modules() if isinstance(m, RepBN))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize('iter_based', [False, True])
@pytest.mark.parametrize('num_workers', [0, 1])
def test_hook_recalibrates_before_the_last_checkpoint(tmp_path, iter_based, num_workers):
    run = runner(
        tmp_path,
        [AT_ZERO, dict(type='BNRecalibrationHook', num_epochs=1)],
        iter_based=iter_based,
        num_workers=num_workers,
        epochs=2,
        shuffle=False,
    )
    run.train()
    saved = torch.load(tmp_path / ('iter_8.pth' if iter_based else 'epoch_2.pth'), weights_only=False)['state_dict']
    model = Toy()
    model.load_state_dict(saved)
    batches = Items().x.split(4)
    for a, b in zip(statistics(model), population_statistics(model, batches)):
        assert torch.allclose(a.double(), b, atol=1e-5)
    assert run.model.backbone['norm1'].repbn.bn.num_batches_tracked == 8  # as trained


def test_the_last_validation_is_of_the_recalibrated_model(tmp_path):
    seen = {}

    class Watch(Hook):
        def after_val_epoch(self, runner, metrics=None):
            seen.setdefault(runner.iter, []).append(metrics['mean'])

    hooks = [AT_ZERO, dict(type='BNRecalibrationHook', num_iters=4, validate_before=True)]
    run = runner(tmp_path, hooks, epochs=2, val=True, extra=[Watch()])
    run.train()
    assert len(seen[4]) == 1 and len(seen[8]) == 2
    with torch.no_grad():
        want = float(run.model.eval()._features(Items().x).mean())
    assert seen[8][1] == pytest.approx(want, rel=1e-5) and seen[8][0] != pytest.approx(want, rel=1e-5)
    assert run.message_hub.get_info('metrics_before_recalibration') == {'mean': seen[8][0]}


@METRICS.register_module(name='_TestScores', force=True)
class Scores(BaseMetric):
    """1 at the first validation, 3 before the recalibration, 2 after it."""

    def __init__(self):
        super().__init__()
        self.scores = iter([1.0, 3.0, 2.0])

    def process(self, data_batch, data_samples):
        self.results.append(0)

    def compute_metrics(self, results):
        return dict(score=next(self.scores))


@pytest.mark.parametrize('iter_based', [False, True])
def test_the_validation_before_stands_in_the_log_beside_the_one_after_and_decides_nothing(tmp_path, iter_based):
    stopping = EarlyStoppingHook(monitor='score', rule='greater', patience=100)
    run = runner(
        tmp_path,
        [dict(type='GammaDecayHook', T=1.0), dict(type='BNRecalibrationHook', num_iters=4, validate_before=True)],
        epochs=2,
        val=True,
        iter_based=iter_based,
        checkpoint=dict(save_best='score', rule='greater'),
        extra=[stopping],
    )
    run.val_evaluator.metrics[0] = Scores()
    if iter_based:
        run._train_loop['val_interval'] = 4  # a dict, until it is first used
    for handler in run.logger.handlers:
        handler.setLevel('INFO')
    gammas = []
    run.model.register_forward_pre_hook(lambda m, args: gammas.append(float(m.backbone['norm1'].gamma)))
    run.train()
    # in scalars.json: under the last step both, by different names
    first, last = (4, 8) if iter_based else (1, 2)
    lines = [json.loads(line) for line in next(tmp_path.glob('*/vis_data/scalars.json')).read_text().splitlines()]
    scores = [(k, v, line['step']) for line in lines for k, v in line.items() if k.endswith('score')]
    assert scores == [('score', 1.0, first), ('before_recalibration/score', 3.0, last), ('score', 2.0, last)]
    # in the log
    log = next(tmp_path.glob('*/*.log')).read_text().splitlines()
    kind = 'Iter' if iter_based else 'Epoch'
    (before,) = [line for line in log if 'before_recalibration/score' in line]
    assert before.endswith(f'{kind}(val) [{last}]  before_recalibration/score: 3.0000')
    assert len([line for line in log if ' score: 3' in line]) == 0
    assert iter_based or all(f'Epoch(val) [{e}]' in '\n'.join(log) for e in (1, 2))
    assert not any('Epoch(val) [1]' in line for line in log[log.index(before) - 4 :])
    # the best checkpoint and early stopping go by the model that is kept
    (best,) = tmp_path.glob('best_*')
    assert best.stem == f'best_score_{kind.lower()}_{last}' and run.message_hub.get_info('best_score') == 2.0
    assert stopping.best_score == 2.0
    state = torch.load(best, weights_only=False)['state_dict']
    assert torch.equal(state['backbone.norm2.repbn.bn.running_mean'], statistics(run.model)[2])
    # the model that it validates, as the one that is recalibrated, is at the end of its decay
    assert gammas[-12:] == [0.0] * 12  # 4 batches before, 4 to recalibrate, 4 after
    assert run.iter == 8 and (iter_based or run.epoch == 2)


@pytest.mark.parametrize('update_buffers', [False, True])
def test_ema_gets_statistics_of_its_own(tmp_path, update_buffers):
    seen = []

    class Watch(Hook):
        def after_val_epoch(self, runner, metrics=None):
            seen.append(metrics['mean'])

    ema = dict(type='EMAHook', momentum=0.3, update_buffers=update_buffers)
    hooks = [AT_ZERO, dict(type='BNRecalibrationHook', num_epochs=1)]
    run = runner(tmp_path, hooks, epochs=2, val=True, ema=ema, extra=[Watch()])
    run.train()
    saved = torch.load(tmp_path / 'epoch_2.pth', weights_only=False)
    batches = Items().x.split(4)
    averaged, plain = Toy(), Toy()
    averaged.load_state_dict(saved['state_dict'])  # EMAHook puts the averaged weights here
    plain.load_state_dict({k[7:]: v for k, v in saved['ema_state_dict'].items() if k.startswith('module.')})
    for model in (averaged, plain):
        for a, b in zip(statistics(model), population_statistics(model, batches)):
            assert torch.allclose(a.double(), b, atol=1e-5)
    assert not torch.equal(averaged.backbone['fc1'].weight, plain.backbone['fc1'].weight)
    with torch.no_grad():
        assert seen[-1] == pytest.approx(float(averaged.eval()._features(Items().x).mean()), rel=1e-5)
    for a, b in zip(statistics(run.model), statistics(plain)):
        assert torch.equal(a, b)  # the validation has put everything back


def _recalibrate_on_two_ranks(work_dir):
    # rank r of 2 sees items r, r + 2, ...; three of rank 0's and three of rank 1's
    hooks = [AT_ZERO, dict(type='BNRecalibrationHook', num_epochs=1)]
    run = runner(work_dir, hooks, epochs=1, batch_size=1, items=6, checkpoint_every=1000)
    run.train()
    return run.model.module.state_dict()


def test_two_processes_give_the_statistics_of_one(tmp_path):
    states = in_two_processes(_recalibrate_on_two_ranks, str(tmp_path))
    models = [Toy(), Toy()]
    for model, state in zip(models, states):
        model.load_state_dict(state)
    alone = copy.deepcopy(models[0])
    recalibrate_bn(alone, iter(DataLoader(Items(6), batch_size=1)), 6, progress=False)
    for a, b, want in zip(*map(statistics, [*models, alone])):
        assert torch.equal(a, b)
        assert torch.allclose(a, want, atol=1e-5)


@pytest.mark.parametrize('kwargs', [{}, dict(num_epochs=1, num_iters=1), dict(num_epochs=0), dict(num_iters=1.5)])
def test_bad_arguments_are_named(kwargs):
    with pytest.raises(ValueError, match='takes one of num_epochs and num_iters, a positive integer'):
        BNRecalibrationHook(**kwargs)


def test_a_model_without_repbn_is_named(tmp_path):
    run = runner(tmp_path, [dict(type='BNRecalibrationHook', num_iters=1)], model=dict(type='_TestPlain'))
    with pytest.raises(ValueError, match='BNRecalibrationHook: Plain has neither PRepBN nor RepBN'):
        run.train()
    assert run.model.seen == []


@pytest.mark.parametrize('ema', [None, dict(type='EMAHook', momentum=0.3)])
def test_frozen_statistics_are_left_as_they_were(tmp_path, ema):
    hooks = [AT_ZERO, dict(type='BNRecalibrationHook', num_epochs=1)]
    run = runner(tmp_path, hooks, model=dict(type='_TestFrozen', how='stage', gamma=0.0), epochs=1, ema=ema)
    with torch.no_grad():
        run.model.backbone['norm1'].repbn.bn.running_mean.fill_(0.7)
        run.model.backbone['norm1'].repbn.bn.running_var.fill_(3.0)
    run.train()
    saved = torch.load(tmp_path / 'epoch_1.pth', weights_only=False)['state_dict']
    assert (saved['backbone.norm1.repbn.bn.running_mean'] == 0.7).all()
    assert (saved['backbone.norm1.repbn.bn.running_var'] == 3.0).all()
    # behind it, the population's, of what the frozen norm gives
    model = Toy()
    model.load_state_dict(saved)
    with torch.no_grad():
        b = model.double().eval().backbone
        seen = b['fc1'](b['norm1'](Items().x.double())).relu().reshape(-1, 8)
    assert torch.allclose(b['norm2'].repbn.bn.running_mean, seen.mean(0), atol=1e-5)
    assert torch.allclose(b['norm2'].repbn.bn.running_var, seen.var(0, unbiased=False), atol=1e-5)


def test_a_model_with_frozen_statistics_alone_is_named(tmp_path):
    hooks = [dict(type='BNRecalibrationHook', num_iters=1)]
    run = runner(tmp_path, hooks, model=dict(type='_TestFrozen', how='norm_eval', gamma=0.0))
    with pytest.raises(
        ValueError, match='all 2 RepBN layers of Frozen are frozen .norm_eval=True.*Set norm_eval=False'
    ):
        run.train()
    assert run.model.seen == []
