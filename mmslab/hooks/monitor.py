"""Watches a handover from LayerNorm to RepBN while it happens, and stops a run that has become NaN."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Union

import torch
import torch.nn as nn
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner, find_latest_checkpoint
from torch import Tensor

from ..layers.norm import PRepBN, channel_dim_of

FILE = 'handover.json'
SIGMAS = 10.0
DATA_BATCH = Optional[Union[dict, tuple, list]]


class Handover(NamedTuple):
    """What a layer shows of its handover on a batch.

    Args:
        distance (float): ``|LN(x) - RepBN(x)| / |LN(x)|``, over all numbers of the batch, RepBN with the batch's statistics.
        outliers (float): The share of tokens of which a channel lies more than ten standard deviations from the channel's mean.
        eta (float): RepBN's.
        variance (float): The smallest running variance of its channels.
    """

    distance: float
    outliers: float
    eta: float
    variance: float


@torch.no_grad()
def measure(norm: PRepBN, x: Tensor, data_format: Optional[str] = None) -> Handover:
    """The :class:`Handover` of ``norm`` for an input, whose statistics it does not touch."""
    how = {} if data_format is None else dict(data_format=data_format)
    dim = channel_dim_of(norm, data_format)
    tokens = x.movedim(dim, -1).reshape(-1, norm.num_features).float()
    online = norm.ln(x, **how).movedim(dim, -1).reshape(-1, norm.num_features).float()
    bn, eta = norm.repbn.bn, norm.repbn.eta.float()
    variance, mean = torch.var_mean(tokens, 0, unbiased=False)
    normed = (tokens - mean) / torch.sqrt(variance + bn.eps)
    offline = bn.weight.float() * normed + bn.bias.float() + eta * tokens
    distance = (online - offline).norm() / online.norm().clamp(min=torch.finfo(torch.float32).tiny)
    outliers = (normed.abs() > SIGMAS).any(1).float().mean()
    values = torch.stack([distance, outliers, eta.squeeze(), bn.running_var.min().float()])
    return Handover(*values.tolist())  # one synchronization


@HOOKS.register_module()
class HandoverMonitorHook(Hook):
    """Shows how far RepBN is from the LayerNorm that hands over to it, and stops a run whose loss or norms become NaN.

    Every ``interval`` iterations each PRepBN is measured on the batch of that iteration (:class:`Handover`). Of each
    quantity the visualizer gets the mean and the worst over all layers, as ``handover/distance`` and
    ``handover/distance_worst``..., and the log the name of the worst; ``vis_data/handover.json`` gets all of them, a line for
    each time, which ``mmslab analyze handover WORK_DIR`` draws. A layer at gamma 0 is no longer measured.

    A loss that is NaN or infinite stops the run at once, as do running statistics that are, at the next measurement or before
    the next checkpoint, so that none is written with them.

    Args:
        interval (int): Iterations from one measurement to the next. Defaults to 50.

    Raises:
        ValueError: If ``interval`` is no positive integer.
        FloatingPointError: In training, naming the first layer with such statistics, the iteration, gamma and the last
            checkpoint.
    """

    priority = 54  # before GammaDecayHook (55), which may go by what this one has measured

    def __init__(self, interval: int = 50) -> None:
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ValueError(f'interval must be a positive integer, but got {interval!r}.')
        self.interval = interval
        self.found: Dict[str, Handover] = {}
        self._handles: List[Any] = []
        self._watching = False
        self._done = 0

    def _layers(self, runner: Runner) -> Dict[str, PRepBN]:
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        return {name: m for name, m in model.named_modules() if isinstance(m, PRepBN)}

    def before_train(self, runner: Runner) -> None:
        self._handles = [
            layer.register_forward_hook(partial(self._measure, name), with_kwargs=True)
            for name, layer in self._layers(runner).items()
        ]

    def after_train(self, runner: Runner) -> None:
        for handle in self._handles:
            handle.remove()

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: DATA_BATCH = None) -> None:
        self.found.clear()
        self._watching = runner.iter % self.interval == 0

    def _measure(self, name: str, layer: PRepBN, args: tuple, kwargs: dict, out: Tensor) -> None:
        if self._watching and layer.training and layer.ln_needed:
            self.found[name] = measure(layer, args[0], kwargs.get('data_format'))

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: DATA_BATCH = None, outputs: Optional[dict] = None
    ) -> None:
        watched, self._watching = self._watching, False
        self._done = runner.iter + 1
        losses = {
            k: float(v.detach() if isinstance(v, Tensor) else v)
            for k, v in (outputs or {}).items()
            if k.startswith('loss') and _is_number(v)
        }
        bad = next((f'{k} is {v}' for k, v in losses.items() if not math.isfinite(v)), None)
        if bad or watched:
            self._check(runner, bad)
        if watched and self.found:
            self._log(runner)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self._check(runner, None)

    def _check(self, runner: Runner, bad: Optional[str]) -> None:
        layers = self._layers(runner)
        first = next((name for name, layer in layers.items() if not _is_finite(layer)), None)
        if bad is None and first is None:
            return
        gamma = max((float(layer.gamma) for layer in layers.values()), default=math.nan)
        what = ', '.join(filter(None, (bad, first and f'statistics or weights of layer {first!r} are not finite')))
        latest = find_latest_checkpoint(runner.work_dir)
        raise FloatingPointError(
            f'iteration {self._done}, gamma {gamma:.3g}: {what}. The last checkpoint is {latest or "none"}. Resume from it with '
            'a lower learning rate, or let gamma fall more slowly (GammaDecayHook T, or schedule="adaptive").'
        )

    def _log(self, runner: Runner) -> None:
        scalars: Dict[str, float] = {}
        for field in Handover._fields:
            values = {name: getattr(h, field) for name, h in self.found.items()}
            worst = (min if field == 'variance' else max)(values, key=lambda name: abs(values[name]))
            scalars[f'handover/{field}'] = sum(values.values()) / len(values)
            scalars[f'handover/{field}_worst'] = values[worst]
            if field == 'distance':
                runner.message_hub.update_info('handover_worst', worst)
                mean = scalars['handover/distance']
                runner.logger.info(
                    f'handover: LN and RepBN differ by {mean:.3g} on average, by {values[worst]:.3g} in {worst}'
                )
        for name, value in scalars.items():
            runner.message_hub.update_scalar(f'train/{name}', value)
        runner.visualizer.add_scalars(scalars, step=runner.iter + 1)
        if is_main_process():
            folder = Path(runner.log_dir) / 'vis_data'
            folder.mkdir(parents=True, exist_ok=True)
            line = dict(step=runner.iter + 1, layers={name: h._asdict() for name, h in self.found.items()})
            with open(folder / FILE, 'a') as f:
                f.write(json.dumps(line) + '\n')


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _is_finite(layer: nn.Module) -> bool:
    return all(bool(t.isfinite().all()) for t in (*layer.parameters(), *layer.buffers()) if t.is_floating_point())
