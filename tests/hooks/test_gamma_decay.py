import json
import math

import pytest
import torch
from mmengine.hooks import Hook

from mmslab.hooks import GammaDecayHook
from mmslab.layers import PRepBN

from .toy import StopAfter, Toy, gammas_seen, in_two_processes, runner

LINEAR = dict(type='GammaDecayHook', T=0.5)


def eq_6(t, T):
    return max(0.0, (T - t) / T)


@pytest.mark.parametrize(
    'kwargs, want',
    [
        (dict(T=8, unit='iter'), lambda t: eq_6(t, 8)),
        (dict(T=2, unit='epoch'), lambda t: eq_6(t, 8)),  # 4 iterations an epoch
        (dict(T=0.5, unit='fraction'), lambda t: eq_6(t, 8)),  # 16 iterations in all
        (dict(T=1.0), lambda t: eq_6(t, 16)),
        (dict(T=8, unit='iter', hold=4), lambda t: 1.0 if t < 4 else eq_6(t - 4, 8)),
        (dict(T=1, unit='epoch', hold=1), lambda t: 1.0 if t < 4 else eq_6(t - 4, 4)),
        (dict(T=8, unit='iter', start=0.5), lambda t: 0.5 * eq_6(t, 8)),
        (dict(T=8, unit='iter', schedule='cosine'), lambda t: 0.5 + 0.5 * math.cos(math.pi * min(t / 8, 1))),
        (dict(T=8, unit='iter', schedule='step', num_steps=2), lambda t: 1.0 if t < 4 else 0.5 if t < 8 else 0.0),
        (dict(T=0), lambda t: 0.0),
        (dict(T=0, hold=0.25), lambda t: 1.0 if t < 4 else 0.0),
    ],
)
@pytest.mark.parametrize('iter_based', [False, True])
def test_schedules(tmp_path, kwargs, want, iter_based):
    run = runner(tmp_path, [dict(type='GammaDecayHook', **kwargs)], iter_based=iter_based, checkpoint_every=1000)
    run.train()
    assert gammas_seen(run) == pytest.approx([want(t) for t in range(16)], abs=1e-6)
    # afterwards gamma is that of all 16 iterations, here and in the last checkpoint
    last = torch.load(next(tmp_path.glob('*_4.pth' if not iter_based else '*_16.pth')), weights_only=False)
    for gamma in (run.model.backbone['norm1'].gamma, last['state_dict']['backbone.norm2.gamma']):
        assert float(gamma) == pytest.approx(want(16), abs=1e-6)


@pytest.mark.parametrize('iter_based', [False, True])
@pytest.mark.parametrize('stop', [1, 6, 8, 11])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, iter_based, stop):
    if not iter_based and stop % 4:
        stop = stop // 4 * 4 + 4  # EpochBased loops resume at an epoch's end
    whole = runner(tmp_path / 'whole', [LINEAR], iter_based=iter_based)
    whole.train()
    cut = runner(tmp_path / 'cut', [LINEAR], iter_based=iter_based, extra=[StopAfter(stop + (not iter_based))])
    with pytest.raises(KeyboardInterrupt):
        cut.train()
    rest = runner(tmp_path / 'cut', [LINEAR], iter_based=iter_based, resume=True)
    rest.train()
    assert gammas_seen(cut)[:stop] + gammas_seen(rest) == gammas_seen(whole)
    assert gammas_seen(whole)[0] == 1 and gammas_seen(whole)[-1] == 0
    for (name, a), b in zip(whole.model.state_dict().items(), rest.model.state_dict().values()):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    'variant',
    [
        dict(model=dict(type='_TestToy', with_cp=True)),
        dict(model=dict(type='_TestToy', forwards=3)),
        dict(accumulative=2),
    ],
)
def test_gamma_counts_iterations_and_nothing_else(tmp_path, variant):
    plain = runner(tmp_path / 'a', [LINEAR])
    plain.train()
    other = runner(tmp_path / 'b', [LINEAR], **variant)
    other.train()
    assert gammas_seen(other) == gammas_seen(plain)


def test_autocast(tmp_path):
    run = runner(tmp_path, [LINEAR], optim_type='_TestBF16OptimWrapper')
    run.train()
    assert gammas_seen(run) == pytest.approx([eq_6(t, 8) for t in range(16)])
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_gamma_is_logged(tmp_path):
    run = runner(tmp_path, [LINEAR])
    run.train()
    scalars = next(tmp_path.rglob('vis_data/scalars.json')).read_text().splitlines()
    logged = [json.loads(line)['gamma'] for line in scalars]
    assert logged == pytest.approx([eq_6(t, 8) for t in range(16)])


@pytest.mark.parametrize('update_buffers', [False, True])
def test_with_ema(tmp_path, update_buffers):
    """The averaged model is at the gamma of its iteration, whether or not buffers are averaged."""
    ema = dict(type='EMAHook', momentum=0.1, update_buffers=update_buffers)
    run = runner(tmp_path, [dict(type='GammaDecayHook', T=8, unit='iter')], ema=ema, val=True)
    run.train()
    seen = gammas_seen(run)
    training, validation = [], []
    while seen:  # 4 training iterations, then 4 batches of validation
        training += seen[:4]
        validation.append(seen[4:8])
        seen = seen[8:]
    assert training == pytest.approx([eq_6(t, 8) for t in range(16)])
    assert validation == [[0.5] * 4, [0.0] * 4, [0.0] * 4, [0.0] * 4]
    first = torch.load(tmp_path / 'epoch_1.pth', weights_only=False)
    for state, key in (('state_dict', 'backbone.norm1.gamma'), ('ema_state_dict', 'module.backbone.norm1.gamma')):
        assert first[state][key] == 0.5


def _train_in_ddp(work_dir, T, epochs):
    run = runner(work_dir, [dict(type='GammaDecayHook', T=T, unit='iter')], epochs=epochs, checkpoint_every=1000)
    assert run.model.find_unused_parameters is False
    run.train()
    return gammas_seen(run), run.model.module.state_dict()


@pytest.mark.parametrize('T', [0, 3])
def test_two_processes_without_find_unused_parameters(tmp_path, T):
    (seen, state), (other_seen, other_state) = in_two_processes(_train_in_ddp, str(tmp_path), T, 4)
    want = [0.0] * 8 if T == 0 else [1.0, 2 / 3, 1 / 3, 0, 0, 0, 0, 0]
    assert seen == other_seen == pytest.approx(want)
    for name, value in state.items():
        if not name.endswith(('running_mean', 'running_var')):  # each rank has statistics of its own data
            assert torch.equal(value, other_state[name]), name
    assert not torch.equal(state['backbone.fc1.weight'], Toy().state_dict()['backbone.fc1.weight'])


@pytest.mark.parametrize(
    'kwargs, message',
    [
        (dict(T=-1, unit='iter'), 'T must be a number, at least 0.*-1'),
        (dict(T=float('nan'), unit='iter'), 'T must be a number, at least 0.*nan'),
        (dict(T='a'), "T must be a number.*'a'"),
        (dict(T=None), 'T must be a number.*None'),
        (dict(T=1.5), r'T is a fraction.*\[0, 1\].*1.5'),
        (dict(T=300000), "unit='iter'"),
        (dict(hold=-0.1), 'hold must be a number, at least 0'),
        (dict(hold=2), 'hold is a fraction'),
        (dict(unit='step'), "unit must be one of.*'step'"),
        (dict(schedule='exp'), "schedule must be one of.*'exp'"),
        (dict(start=2), 'start must lie in'),
        (dict(num_steps=0), 'num_steps must be at least 1'),
    ],
)
def test_bad_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        GammaDecayHook(**kwargs)


def test_a_model_without_prepbn_is_named(tmp_path):
    run = runner(tmp_path, [LINEAR], model=dict(type='_TestPlain'))
    with pytest.raises(ValueError, match='GammaDecayHook: Plain has no PRepBN.*norm_cfg'):
        run.train()
    assert run.model.seen == []


def test_a_gamma_left_above_zero_is_warned_of(tmp_path, caplog):
    run = runner(tmp_path, [dict(type='GammaDecayHook', T=0.5, hold=0.75)], epochs=1)
    run.train()
    assert 0 < float(next(m for m in run.model.modules() if isinstance(m, PRepBN)).gamma) == 0.5
    text = next(tmp_path.rglob('*.log')).read_text()
    assert 'gamma is still 0.500 after the last iteration' in text


ALL = 'backbone.norm1, backbone.norm2'


@pytest.mark.parametrize(
    'how, number, names', [('stage', 1, 'backbone.norm1'), ('norm_eval', 2, ALL), ('requires_grad', 2, ALL)]
)
def test_frozen_layers_that_would_never_learn_are_named(tmp_path, how, number, names):
    run = runner(tmp_path, [LINEAR], model=dict(type='_TestFrozen', how=how))
    message = (
        f'{number} of 2 PRepBN layers have gamma above 0 and a frozen RepBN.*: {names}. Train them .frozen_stages=-1'
    )
    with pytest.raises(ValueError, match=message):
        run.train()
    assert run.model.seen == []


def test_frozen_layers_at_gamma_0_keep_it(tmp_path):
    run = runner(tmp_path, [LINEAR], model=dict(type='_TestFrozen', how='stage', gamma=0.0), checkpoint_every=2)
    run.train()
    assert [first for first, _ in run.model.seen] == [0.0] * 16
    assert [second for _, second in run.model.seen] == pytest.approx([eq_6(t, 8) for t in range(16)])
    saved = torch.load(tmp_path / 'epoch_2.pth', weights_only=False)['state_dict']
    assert saved['backbone.norm1.gamma'] == 0


def test_frozen_layers_take_their_gamma_from_the_weights(tmp_path):
    """The config builds them at gamma 1; the weights, which are loaded before the hook looks, are at 0."""
    weights = Toy()
    for name in ('norm1', 'norm2'):
        weights.backbone[name].set_gamma(0)
    torch.save(weights.state_dict(), tmp_path / 'prepbn.pth')
    hooks = [dict(type='GammaDecayHook', T=0)]
    run = runner(tmp_path, hooks, model=dict(type='_TestFrozen', how='stage'), epochs=1)
    run._load_from = str(tmp_path / 'prepbn.pth')
    run.train()
    assert gammas_seen(run) == [0.0] * 4


def test_a_gamma_that_stays_leaves_frozen_layers_alone(tmp_path):
    """Nothing is handed over, so nothing need learn."""
    frozen = dict(type='_TestFrozen', how='norm_eval', gamma=0.3)
    run = runner(tmp_path, [dict(type='GammaDecayHook', hold=1.0, start=0.3)], epochs=1, model=frozen)
    run.train()
    assert gammas_seen(run) == pytest.approx([0.3] * 4)


def test_the_teacher_of_a_student_learns_without_gradients(tmp_path):
    class MeanTeacherHook(Hook):
        """By the name of mmdet's."""

    def train(folder, hooks):
        run = runner(tmp_path / folder, [LINEAR], epochs=1, extra=hooks)
        run.model.teacher = Toy().requires_grad_(False)
        run.train()
        return run

    assert float(train('taught', [MeanTeacherHook()]).model.teacher.backbone['norm1'].gamma) == 0
    with pytest.raises(ValueError, match='2 of 4 PRepBN layers .*teacher.backbone.norm1'):
        train('alone', [])
