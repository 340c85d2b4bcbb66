"""Moves PRepBN's gamma from LayerNorm to RepBN while a model trains (SLAB paper, Eq. 6)."""

import logging
import math
from typing import Dict, Optional, Sequence, Set, Tuple, Union

from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from ..layers.norm import PRepBN, check_gamma
from .frozen import frozen_repbn
from .monitor import HandoverMonitorHook

DATA_BATCH = Optional[Union[dict, tuple, list]]
OF_TIME = ('linear', 'cosine', 'step')
SCHEDULES = (*OF_TIME, 'adaptive')
_STATE = 'gamma_decay'
UNITS = ('iter', 'epoch', 'fraction')


@HOOKS.register_module()
class GammaDecayHook(Hook):
    """Sets ``gamma = max(0, (T - t) / T)`` (Eq. 6) in every PRepBN, t being the training iterations done.

    Schedule 'adaptive' goes by what :class:`HandoverMonitorHook`, which it needs beside it, measures. gamma falls at a speed
    between ``bounds``, in multiples of the linear one: at the upper where RepBN is at no distance from LayerNorm (the mean over
    layers), at the lower where it is at ``distance`` or beyond, and in between in proportion; but never more slowly than lets it
    reach 0 after T. Where it is, is in the checkpoint.

    With the other schedules gamma depends on the runner's iteration alone: a resumed run goes through the same gammas as one
    that was never interrupted, and neither gradient checkpointing nor accumulation nor several forwards a step change
    it. Validation and checkpoints after t iterations have the gamma of t. The gamma of each training iteration
    is logged as ``gamma``, so every visualizer backend shows it.

    A layer can hand over only to a RepBN that learns beside its LayerNorm. Where the RepBN is frozen
    (``frozen_stages``, ``norm_eval=True``, ``requires_grad=False`` in ``norm_cfg``), the layer keeps the gamma that its
    weights came with, as everything that is frozen keeps what it came with: right at gamma 0, from PRepBN weights. Above
    it, training is refused: moved, the layer would end in statistics that nothing has trained; left alone, it would be
    found only by folding, which needs gamma 0 everywhere, when the training is over.

    Args:
        T (float): How long the decay takes, in ``unit``. 0 means gamma 0 as soon as ``hold`` is over, from the
            start if there is none.
        unit (str): 'iter', 'epoch', or 'fraction' (of the whole training). Defaults to 'fraction'.
        schedule (str): 'linear' (Eq. 6), 'cosine' or 'step' (Sec. 4.1 names both), or 'adaptive'. Defaults to 'linear'.
        hold (float): How long gamma stays at ``start`` before it decays, in ``unit``. Defaults to 0.
        start (float): gamma before the decay, in [0, 1]. Defaults to 1.
        num_steps (int): Of schedule 'step': gamma falls in that many equal steps. Defaults to 10.
        distance (float): Of schedule 'adaptive': from which on gamma falls most slowly. Defaults to 0.5.
        bounds (tuple[float, float]): Of schedule 'adaptive': the slowest and the fastest fall, in multiples of the linear one.
            Defaults to (0.25, 4).

    Raises:
        ValueError: If T or hold is negative, or outside [0, 1] as a fraction; for an unknown unit or schedule;
            for ``start`` outside [0, 1]; before training, if the model has no PRepBN, or one above gamma 0 whose
            RepBN is frozen; it names the layers; for a distance that is not positive, bounds that are not
            ``0 <= slowest <= fastest``, or schedule 'adaptive' without a HandoverMonitorHook.
    """

    priority = 55  # after EMAHook (50), which swaps buffers, and before LoggerHook (60) and CheckpointHook (90)

    def __init__(
        self,
        T: float = 0.5,
        unit: str = 'fraction',
        schedule: str = 'linear',
        hold: float = 0.0,
        start: float = 1.0,
        num_steps: int = 10,
        distance: float = 0.5,
        bounds: Sequence[float] = (0.25, 4.0),
    ) -> None:
        if unit not in UNITS:
            raise ValueError(f'unit must be one of {UNITS}, but got {unit!r}.')
        if schedule not in SCHEDULES:
            raise ValueError(f'schedule must be one of {SCHEDULES}, but got {schedule!r}.')
        for name, value in (('T', T), ('hold', hold)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0 or math.isinf(value):
                raise ValueError(
                    f'{name} must be a number, at least 0, but got {value!r}. Use T=0 for gamma 0 from the start.'
                )
            if unit == 'fraction' and value > 1:
                raise ValueError(
                    f'{name} is a fraction of the training and must lie in [0, 1], but got {value!r}. For iterations set '
                    "unit='iter', for epochs unit='epoch'."
                )
        if num_steps < 1:
            raise ValueError(f'num_steps must be at least 1, but got {num_steps}.')
        if not distance > 0:
            raise ValueError(f'distance must be positive, but got {distance!r}.')
        if len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1] < math.inf:
            raise ValueError(f'bounds must be two numbers, 0 <= slowest <= fastest, but got {bounds!r}.')
        self.T = T
        self.unit = unit
        self.schedule = schedule
        self.hold = hold
        self.start = check_gamma(start, 'start')
        self.num_steps = num_steps
        self.distance = distance
        self.bounds = tuple(bounds)
        self._adaptive: Dict[str, float] = {}  # iter, gamma, distance: where schedule 'adaptive' is
        self._training = False
        self._frozen: Set[PRepBN] = set()

    def gamma_at(self, t: float, T: float, hold: float = 0.0) -> float:
        """gamma after ``t`` of the ``T`` iterations of a decay that begins at ``hold``."""
        if t < hold:
            return self.start
        done = 1.0 if T == 0 else min((t - hold) / T, 1.0)
        if self.schedule == 'adaptive':  # at the latest
            return self.start if done < 1 else 0.0
        if self.schedule == 'cosine':
            return self.start * (1 + math.cos(math.pi * done)) / 2 if done < 1 else 0.0
        if self.schedule == 'step':
            done = math.floor(done * self.num_steps + 1e-9) / self.num_steps
        return self.start * (1 - done)

    def gamma_of(self, runner: Runner, iteration: int) -> float:
        """gamma after ``iteration`` iterations of this run."""
        if self._adaptive.get('iter') == iteration:
            return self._adaptive['gamma']
        return self.gamma_at(iteration, *self._spans(runner))

    def _spans(self, runner: Runner) -> Tuple[float, float]:
        """T and hold in iterations."""
        scales = dict(iter=lambda: 1, epoch=lambda: len(runner.train_dataloader), fraction=lambda: runner.max_iters)
        scale = scales[self.unit]()
        return self.T * scale, self.hold * scale

    def _adapt(self, runner: Runner) -> None:
        """The gamma after the iteration that has just been done, by the distance measured last."""
        T, hold = self._spans(runner)
        done, gamma = runner.iter + 1, self.gamma_of(runner, runner.iter)
        measured = self._monitor.found
        if measured:
            self._adaptive['distance'] = sum(h.distance for h in measured.values()) / len(measured)
        if done > hold:
            slowest, fastest = self.bounds
            share = min(self._adaptive.get('distance', self.distance) / self.distance, 1.0)
            speed = (fastest + (slowest - fastest) * share) * self.start / max(T, 1.0)
            left = hold + T - done
            gamma = max(gamma - max(speed, gamma / (left + 1)), 0.0) if left > 0 else 0.0
        self._adaptive.update(iter=done, gamma=gamma)

    def _model(self, runner: Runner):
        return runner.model.module if is_model_wrapper(runner.model) else runner.model

    def _set_gamma(self, runner: Runner, gamma: float) -> None:
        for layer in self._model(runner).modules():
            if isinstance(layer, PRepBN) and layer not in self._frozen:
                layer.set_gamma(gamma)

    def before_train(self, runner: Runner) -> None:
        # the weights have been loaded (init_cfg, load_from, resume), so each layer's gamma is the one it came with
        model = self._model(runner)
        layers = {name: m for name, m in model.named_modules() if isinstance(m, PRepBN)}
        if not layers:
            raise ValueError(
                f'GammaDecayHook: {type(model).__name__} has no PRepBN whose gamma could decay. Build it '
                "with norm_cfg=dict(type='PRepBN'), or remove the hook from custom_hooks."
            )
        if self.schedule == 'adaptive':
            self._monitor = next((hook for hook in runner.hooks if isinstance(hook, HandoverMonitorHook)), None)
            if self._monitor is None:
                raise ValueError(
                    "GammaDecayHook: schedule='adaptive' goes by what HandoverMonitorHook measures, but there is none. Add "
                    "dict(type='HandoverMonitorHook') to custom_hooks."
                )
        if (
            self._adaptive.get('iter') != runner.iter or not runner.iter
        ):  # of another run, whose weights this one loaded
            self._adaptive = {}
        last = self.gamma_of(runner, runner.max_iters)
        frozen = self._find_frozen(runner, layers, last)
        self._frozen = set(frozen.values())
        if last > 0:
            print_log(
                f'GammaDecayHook: gamma is still {last:.3f} after the last iteration, so the model will not be a pure '
                'RepBN and cannot be folded. Shorten T or hold to change that.',
                logger='current',
                level=logging.WARNING,
            )
        if frozen:
            print_log(
                f'GammaDecayHook: {len(frozen)} of {len(layers)} PRepBN layers are frozen and keep their gamma, from '
                f'{next(iter(frozen))!r} to {next(reversed(frozen))!r}.',
                logger='current',
            )
        self._training = True
        self._set_gamma(runner, self.gamma_of(runner, runner.iter))

    def _find_frozen(self, runner: Runner, layers: Dict[str, PRepBN], last: float) -> Dict[str, PRepBN]:
        statistics = frozen_repbn(self._model(runner))
        # the teacher of semi-supervised detection has no gradients, but learns: it averages the student
        taught = any(type(hook).__name__ == 'MeanTeacherHook' for hook in runner.hooks)
        frozen = {
            name: layer
            for name, layer in layers.items()
            if f'{name}.repbn'.lstrip('.') in statistics
            or not (layer.repbn.bn.weight.requires_grad or taught and name.startswith('teacher.'))
        }
        stuck = [name for name, layer in frozen.items() if float(layer.gamma) > last + 1e-6]
        if stuck:
            shown = ', '.join(stuck[:3]) + (f' and {len(stuck) - 3} more' if len(stuck) > 3 else '')
            raise ValueError(
                f'GammaDecayHook: {len(stuck)} of {len(layers)} PRepBN layers have gamma above {last:g} and a frozen RepBN, '
                f'which cannot learn what LayerNorm hands over: {shown}. Train them (frozen_stages=-1, norm_eval=False, no '
                'requires_grad=False in norm_cfg), or start from weights with PRepBN at gamma 0 (init_cfg or load_from).'
            )
        return frozen

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: DATA_BATCH = None) -> None:
        self._set_gamma(runner, self.gamma_of(runner, runner.iter))

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: DATA_BATCH = None, outputs: Optional[dict] = None
    ) -> None:
        runner.message_hub.update_scalar('train/gamma', self.gamma_of(runner, runner.iter))
        if self.schedule == 'adaptive':
            self._adapt(runner)
        self._set_gamma(runner, self.gamma_of(runner, runner.iter + 1))

    def before_val_epoch(self, runner: Runner) -> None:
        if self._training:  # EMAHook may just have swapped in a gamma averaged over time
            self._set_gamma(runner, self.gamma_of(runner, runner.iter))

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        state = checkpoint.get(_STATE)
        if self.schedule == 'adaptive' and isinstance(state, dict):
            self._adaptive = {k: v for k, v in state.items() if isinstance(v, (int, float))}

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        if self._adaptive:
            checkpoint[_STATE] = dict(self._adaptive)
        # the same for what EMAHook put into the checkpoint
        for name, layer in self._model(runner).named_modules():
            if isinstance(layer, PRepBN):
                key = f'{name}.gamma' if name else 'gamma'
                for state in (checkpoint.get('state_dict', {}), checkpoint.get('ema_state_dict', {})):
                    for k in (key, f'module.{key}'):
                        if k in state:
                            state[k] = layer.gamma.detach().cpu().clone()

    def after_train(self, runner: Runner) -> None:
        self._training = False
