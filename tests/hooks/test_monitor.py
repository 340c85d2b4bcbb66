import json
import math

import cv2
import numpy as np
import pytest
import torch
from mmengine.hooks import Hook

from mmslab.cli import main
from mmslab.hooks import GammaDecayHook, HandoverMonitorHook
from mmslab.hooks.monitor import measure
from mmslab.layers import PRepBN
from mmslab.plots import read_handover

from .toy import StopAfter, gammas_seen, runner

MONITOR = dict(type='HandoverMonitorHook', interval=2)
ADAPTIVE = dict(type='GammaDecayHook', T=0.75, schedule='adaptive', distance=2.0)


def formula(norm, x):
    """In float64, written out: LayerNorm and RepBN with the batch's statistics; tokens with a channel beyond ten sigma."""
    x = x.double().reshape(-1, x.shape[-1]).numpy()
    w, b, alpha, beta = (
        t.detach().double().numpy() for t in (norm.ln.weight, norm.ln.bias, norm.repbn.bn.weight, norm.repbn.bn.bias)
    )
    online = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + norm.ln.eps) * w + b
    normed = (x - x.mean(0)) / np.sqrt(x.var(0) + norm.repbn.bn.eps)
    offline = alpha * normed + beta + norm.repbn.eta.item() * x
    return np.linalg.norm(online - offline) / np.linalg.norm(online), (abs(normed) > 10).any(1).mean()


@pytest.mark.parametrize('channel_dim', [-1, 1])
def test_what_is_measured(channel_dim):
    norm = PRepBN(6, channel_dim=channel_dim)
    for p in norm.parameters():
        torch.nn.init.uniform_(p, 0.5, 1.5)
    x = torch.randn(4, 50, 6) * 3 + 1
    x[0, 0, 2] = 500.0
    before = {k: v.clone() for k, v in norm.state_dict().items()}
    found = measure(norm, x.movedim(-1, channel_dim))
    distance, outliers = formula(norm, x)
    assert found.distance == pytest.approx(distance, rel=1e-5) and found.outliers == pytest.approx(outliers) == 1 / 200
    assert (found.eta, found.variance) == (pytest.approx(norm.repbn.eta.item()), 1.0)
    assert all(torch.equal(before[k], v) for k, v in norm.state_dict().items())


def test_it_is_logged_and_drawn(tmp_path, capsys):
    run = runner(tmp_path / 'run', [LINEAR, MONITOR])
    run.train()
    found = read_handover(tmp_path / 'run')
    assert [line['step'] for line in found] == [
        1,
        3,
        5,
        7,
    ]  # of 16 iterations; after 8 gamma is 0, and nothing is handed over
    assert set(found[0]['layers']) == {'backbone.norm1', 'backbone.norm2'}
    scalars = [
        json.loads(line) for line in next((tmp_path / 'run').glob('*/vis_data/scalars.json')).read_text().splitlines()
    ]
    logged = {line['step']: line for line in scalars if 'handover/distance' in line}
    for line in found:
        values = [layer['distance'] for layer in line['layers'].values()]
        mine = logged[line['step']]
        assert (mine['handover/distance'], mine['handover/distance_worst']) == pytest.approx(
            (np.mean(values), max(values))
        )
        smallest = min(layer['variance'] for layer in line['layers'].values())
        assert mine['handover/variance_worst'] == pytest.approx(smallest)
    assert not any(m._forward_hooks for m in run.model.modules())

    main(['analyze', 'handover', str(tmp_path / 'run')])
    picture = cv2.imread(str(tmp_path / 'run' / 'handover.png'))
    assert picture.shape[1] > 1000 and picture.std() > 10
    for args, message in (
        ([str(tmp_path / 'none')], 'has no handover.json'),
        ([str(tmp_path / 'run'), '--out', str(tmp_path / 'run/handover.png')], 'exists. Choose another name'),
        ([str(tmp_path / 'run'), '--out', 'a.pdf'], 'must name a .png file'),
    ):
        with pytest.raises(SystemExit, match=message):
            main(['analyze', 'handover', *args])


LINEAR = dict(type='GammaDecayHook', T=0.5)


class Poison(Hook):
    """Makes something NaN at an iteration, as overflow does."""

    def __init__(self, iteration, what):
        self.iteration, self.what = iteration, what

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.iteration:
            norm = runner.model.backbone['norm2']
            (norm.repbn.bn.running_var if self.what == 'norm' else runner.model.backbone['fc2'].weight.data).fill_(
                math.nan
            )


@pytest.mark.parametrize('what, iteration', [('loss', 6), ('norm', 5)])
def test_nan_stops_the_run_and_no_checkpoint_has_it(tmp_path, what, iteration):
    run = runner(tmp_path, [LINEAR, dict(type='HandoverMonitorHook', interval=100)], extra=[Poison(iteration, what)])
    text = (
        'iteration 7, gamma 0.25: loss is nan'
        if what == 'loss'
        else r"iteration 8, gamma 0: .*'backbone.norm2' are not finite"
    )
    with pytest.raises(FloatingPointError, match=f'{text}.*The last checkpoint is .*epoch_1.pth'):
        run.train()
    assert [p.name for p in tmp_path.glob('*.pth')] == ['epoch_1.pth']


def adaptive(distances, T=12, bounds=(0.25, 4.0), limit=2.0, interval=2):
    """The schedule written out: the last measured distance, speed in proportion, 0 at the latest after T."""
    gamma, out = 1.0, [1.0]
    for i in range(16):
        d = distances[i // interval] if i // interval < len(distances) else distances[-1]
        speed = (bounds[1] + (bounds[0] - bounds[1]) * min(d / limit, 1)) / T
        left = T - (i + 1)
        gamma = max(gamma - max(speed, gamma / (left + 1)), 0) if left > 0 else 0.0
        out.append(gamma)
    return out[:16]


def test_adaptive_goes_by_what_is_measured(tmp_path):
    run = runner(tmp_path, [ADAPTIVE, MONITOR])
    run.train()
    distances = [np.mean([h['distance'] for h in line['layers'].values()]) for line in read_handover(tmp_path)]
    assert gammas_seen(run) == pytest.approx(adaptive(distances), abs=1e-5)
    assert len(set(np.diff(gammas_seen(run)[:5]).round(4))) > 1  # it is no line


@pytest.mark.parametrize('distance, bounds', [(1e-6, (0.25, 4.0)), (1e-6, (0.0, 1.0)), (1e6, (0.25, 4.0))])
def test_adaptive_at_its_bounds_and_in_time(tmp_path, distance, bounds):
    run = runner(tmp_path, [{**ADAPTIVE, 'distance': distance, 'bounds': bounds}, MONITOR])
    run.train()
    gammas = gammas_seen(run)
    assert gammas[0] == 1 and all(a >= b for a, b in zip(gammas, gammas[1:])) and gammas[12:] == [0] * 4
    if distance == 1e6:  # the fastest: four times the linear schedule's 1 / 12
        assert gammas[:4] == pytest.approx([1, 2 / 3, 1 / 3, 0], abs=1e-4)
    else:  # as slowly as it may, and in time
        slowest = bounds[0] / 12
        assert gammas[1] == pytest.approx(1 - max(slowest, 1 / 12), abs=1e-6)


@pytest.mark.parametrize('iter_based', [False, True])
def test_an_adaptive_run_resumes_exactly(tmp_path, iter_based):
    hooks, stop = [ADAPTIVE, MONITOR], 8
    whole = runner(tmp_path / 'whole', hooks, iter_based=iter_based)
    whole.train()
    cut = runner(tmp_path / 'cut', hooks, iter_based=iter_based, extra=[StopAfter(stop + (not iter_based))])
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    rest = runner(tmp_path / 'cut', hooks, iter_based=iter_based, resume=True)
    rest.train()
    assert gammas_seen(cut)[:stop] + gammas_seen(rest) == gammas_seen(whole) and 0 < gammas_seen(whole)[stop] < 1
    assert all(torch.equal(a, b) for a, b in zip(rest.model.state_dict().values(), whole.model.state_dict().values()))


def test_bad_arguments(tmp_path):
    for value in (0, 1.5, True):
        with pytest.raises(ValueError, match='interval must be a positive integer, but got'):
            HandoverMonitorHook(value)
    with pytest.raises(ValueError, match='distance must be positive, but got 0'):
        GammaDecayHook(schedule='adaptive', distance=0)
    for bounds in ((1, 0.5), (-1, 1), (1,), (0, math.inf)):
        with pytest.raises(ValueError, match='bounds must be two numbers, 0 <= slowest <= fastest, but got'):
            GammaDecayHook(schedule='adaptive', bounds=bounds)
    with pytest.raises(ValueError, match="schedule='adaptive' goes by what HandoverMonitorHook measures.*custom_hooks"):
        runner(tmp_path, [ADAPTIVE]).train()
