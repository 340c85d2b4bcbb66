"""Recomputes the BN statistics of a trained model (SLAB paper, Sec. 5.1)."""

import random
from contextlib import contextmanager
from itertools import islice
from typing import Any, Collection, Dict, Iterator, List, Optional

import numpy as np
import torch
import torch.nn as nn
from fvcore.nn.precise_bn import update_bn_stats
from mmengine.dataset import InfiniteSampler
from mmengine.dist import all_reduce, get_world_size, is_main_process
from mmengine.hooks import (
    CheckpointHook,
    EarlyStoppingHook,
    EMAHook,
    Hook,
    LoggerHook,
    ParamSchedulerHook,
    RuntimeInfoHook,
)
from mmengine.model import is_model_wrapper
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop, Runner
from rich.progress import Progress
from torch import Tensor

from ..data.place import sampler_of
from ..layers.norm import RepBN, repbn_modules
from .frozen import frozen_repbn

BEFORE = 'before_recalibration'

# What these make of a validation (the best checkpoint, an early end, a learning rate, the metrics of an epoch) they make of
# the one after the recalibration: no checkpoint has the statistics of the one before
_CONCLUDING = (CheckpointHook, EarlyStoppingHook, LoggerHook, ParamSchedulerHook, RuntimeInfoHook)


class _Forward(nn.Module):
    """The model as fvcore wants it: one argument, a batch of the data loader.

    Only what holds the norms has to run. In mmdet and mmpretrain that is usually backbone and neck; a model with
    norms elsewhere runs whole.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        names = [n for n, m in model.named_modules() if any(m is r for r in repbn_modules(model))]
        self.features = hasattr(model, 'extract_feat') and all(n.startswith(('backbone.', 'neck.')) for n in names)

    def forward(self, data: Any) -> None:
        data = self.model.data_preprocessor(data, True)
        if self.features and isinstance(data, dict) and 'inputs' in data:
            self.model.extract_feat(data['inputs'])
        else:
            self.model._run_forward(data, mode='loss')


def recalibrate_bn(
    model: nn.Module, data: Iterator[Any], num_iters: int, progress: bool = True, frozen: Collection[str] = ()
) -> int:
    """Replaces the running statistics of every RepBN by the population statistics of ``num_iters`` batches.

    Drop path shifts the variance that BN sees in training (Li et al. 2019), so at the end the weights are frozen
    and only the statistics are taken anew, with the model as it will infer: in eval mode, with the BN layers
    inside PRepBN and RepBN alone in training mode. The statistics are those of all batches together
    (fvcore's ``precise_bn``), over all ranks. Nothing else changes: parameters, modes, momenta, random states.

    Args:
        model (nn.Module): An mmengine model, not wrapped.
        data (Iterator): Batches of its data loader, at least ``num_iters``.
        num_iters (int): Batches to use on each rank.
        progress (bool): Whether the main process shows a progress bar.
        frozen (Collection[str]): Names of RepBN layers that keep their statistics. By default none does.

    Returns:
        int: The number of BN layers recalibrated.
    """
    layers = [m.bn for name, m in model.named_modules() if isinstance(m, RepBN) and name not in frozen]
    tokens = [0] * len(layers)

    def count(i: int):
        def hook(module: nn.Module, args: tuple) -> None:
            tokens[i] += args[0].numel() // args[0].shape[1]

        return hook

    with _restored(model, layers), torch.no_grad():
        buffers = [(bn.running_mean, bn.running_var) for bn in layers]
        model.eval()
        for i, bn in enumerate(layers):
            if type(bn) is not nn.BatchNorm1d:
                bn.register_forward_hook(_own_statistics)
            bn.train()
            bn.register_forward_pre_hook(count(i))
        with Progress(disable=not (progress and is_main_process())) as bar:
            update_bn_stats(_Forward(model), _advancing(bar, islice(data, num_iters), num_iters), num_iters)
        results = [(bn.running_mean, bn.running_var) for bn in layers]
    for n, (mean, var), (new_mean, new_var) in zip(tokens, buffers, results):
        if n or get_world_size() > 1:
            new_mean, new_var = _over_ranks(new_mean, new_var, n)
            mean.copy_(new_mean)
            var.copy_(new_var)
    return len(layers)


def _own_statistics(bn: nn.Module, args: tuple, output: Tensor) -> None:
    """Behind a SyncBatchNorm with momentum 1, which normalizes by the batches of all ranks: puts in its buffers the statistics of
    this rank's batch, since those of the ranks are put together at the end, weighted by their tokens."""
    x = args[0].to(bn.running_mean.dtype)
    bn.running_mean.copy_(x.mean(0))
    bn.running_var.copy_(x.var(0))


def _advancing(bar: Progress, batches: Iterator[Any], number: int) -> Iterator[Any]:
    task = bar.add_task('BN recalibration', total=number)
    for batch in batches:
        bar.advance(task)  # before, since nobody asks for a batch after the last
        yield batch


def _over_ranks(mean: Tensor, var: Tensor, tokens: int) -> List[Tensor]:
    """Population mean and variance of all ranks' data from each rank's own, weighted by its number of tokens."""
    mean, var = mean.double(), var.double()
    sums = torch.cat([mean * tokens, (var + mean.square()) * tokens, mean.new_tensor([tokens])])
    all_reduce(sums)
    first, second = sums[:-1].div(sums[-1]).chunk(2)
    return [first, second - first.square()]


@contextmanager
def _restored(model: nn.Module, layers: List[nn.Module]) -> Iterator[None]:
    """On leaving, modes, momenta, buffers, hooks and random states are what they were on entering.

    fvcore puts new tensors in place of the buffers, to which DDP and others hold references, and leaves its hooks
    behind if the data fails.
    """
    modes = [(m, m.training) for m in model.modules()]
    hooks = [[(of, of.copy()) for of in (bn._forward_pre_hooks, bn._forward_hooks)] for bn in layers]
    kept = [(bn, bn.momentum, dict(bn._buffers)) for bn in layers]
    values = [{name: buffer.clone() for name, buffer in buffers.items()} for _, _, buffers in kept]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for m, mode in modes:
            m.training = mode
        for (bn, momentum, buffers), old, both in zip(kept, values, hooks):
            bn.momentum = momentum
            bn._buffers.update(buffers)
            for name, buffer in buffers.items():
                buffer.copy_(old[name])
            for of, before in both:
                of.clear()
                of.update(before)


@HOOKS.register_module()
class BNRecalibrationHook(Hook):
    """Recalibrates the BN statistics after the last training epoch, before its validation and its checkpoint.

    See :func:`recalibrate_bn` for what it does and why (the paper does it for 10 epochs, Sec. 5.1). With an
    ``EMAHook``, the averaged model gets statistics of its own, which its validation and its checkpoint use.

    Statistics that the training left as they were (``frozen_stages``, ``norm_eval=True``) are left so. Frozen stages run
    in eval mode, where no drop path shifts what they see, and with ``norm_eval`` drop path changes no statistics; all
    weights behind have learned on the outputs of these norms as they are.

    Args:
        num_epochs (int, optional): Passes over the training data. Give this or ``num_iters``.
        num_iters (int, optional): Batches of training data on each rank.
        validate_before (bool): Whether to run validation once more before, to see what recalibration changes. Its
            metrics are logged under the same epoch (or iteration) as those after, with ``before_recalibration/`` before
            their names, and kept in the message hub as ``metrics_before_recalibration``; neither the best checkpoint nor
            early stopping nor a scheduler goes by them. Defaults to False.

    Raises:
        ValueError: Unless exactly one of ``num_epochs`` and ``num_iters`` is given and positive; before training,
            if the model has neither PRepBN nor RepBN, or none whose statistics the training updates.
    """

    priority = 58  # after GammaDecayHook (55), so gamma is final; before LoggerHook (60) and CheckpointHook (90)

    def __init__(
        self, num_epochs: Optional[int] = None, num_iters: Optional[int] = None, validate_before: bool = False
    ) -> None:
        given = [v for v in (num_epochs, num_iters) if v is not None]
        if len(given) != 1 or not isinstance(given[0], int) or given[0] < 1:
            raise ValueError(
                'BNRecalibrationHook takes one of num_epochs and num_iters, a positive integer, but got '
                f'num_epochs={num_epochs!r}, num_iters={num_iters!r}.'
            )
        self.num_epochs = num_epochs
        self.num_iters = num_iters
        self.validate_before = validate_before
        self.validating = False
        self._ema: Optional[nn.Module] = None

    def before_train(self, runner: Runner) -> None:
        model = _unwrap(runner.model)
        number = sum(1 for _ in repbn_modules(model))
        if number == 0:
            raise ValueError(
                f'BNRecalibrationHook: {type(model).__name__} has neither PRepBN nor RepBN, whose '
                "statistics could be recalibrated. Build it with norm_cfg=dict(type='PRepBN'), or remove the hook."
            )
        if len(frozen_repbn(model)) == number:
            raise ValueError(
                f'BNRecalibrationHook: all {number} RepBN layers of {type(model).__name__} are frozen (norm_eval=True or '
                'frozen_stages), so the weights are trained on their statistics as they are. Set norm_eval=False, or remove '
                'the hook.'
            )

    def after_train_epoch(self, runner: Runner) -> None:
        if isinstance(runner.train_loop, EpochBasedTrainLoop) and self.is_last_train_epoch(runner):
            self.recalibrate(runner)

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch=None, outputs: Optional[dict] = None) -> None:
        if not isinstance(runner.train_loop, EpochBasedTrainLoop) and self.is_last_train_iter(runner):
            self.recalibrate(runner)

    def recalibrate(self, runner: Runner) -> None:
        """Recalibrates ``runner``'s model, and its EMA if it has one, on its training data."""
        if self.validate_before and runner.val_loop is not None:
            modes = [(m, m.training) for m in runner.model.modules()]
            with self._aside(runner):
                metrics = runner.val_loop.run()
                self._log(runner, metrics)
            for m, mode in modes:
                m.training = mode
            runner.message_hub.update_info('metrics_before_recalibration', dict(metrics))
        model = _unwrap(runner.model)
        hook = next((h for h in runner.hooks if isinstance(h, EMAHook)), None)
        models: Dict[str, nn.Module] = {'model': model}
        if hook is not None:
            models['EMA'] = hook.ema_model.module
        frozen = frozen_repbn(model)
        for name, each in models.items():
            iters = self._num_iters(runner.train_dataloader)
            batches = _batches(runner.train_dataloader, runner.max_epochs)
            layers = recalibrate_bn(each, batches, iters, frozen=frozen)
            runner.logger.info(f'BN statistics of {layers} layers of the {name} recalibrated over {iters} batches')
        if hook is not None and not hook.ema_model.update_buffers:
            self._ema = hook.ema_model.module

    @contextmanager
    def _aside(self, runner: Runner) -> Iterator[None]:
        """A validation within it is of the epoch (or iteration) that has just ended, and nothing follows from it.

        mmengine counts an epoch or iteration after the hooks for its end, and validates only then.
        """
        loop = runner.train_loop
        counter = '_epoch' if isinstance(loop, EpochBasedTrainLoop) else '_iter'
        done = getattr(loop, counter)
        hooks = [hook for hook in runner.hooks if isinstance(hook, _CONCLUDING)]
        setattr(loop, counter, done + 1)
        self.validating = True
        for hook in hooks:
            hook.after_val_epoch = lambda *args, **kwargs: None  # in the way of the class's own
        try:
            yield
        finally:
            for hook in hooks:
                del hook.after_val_epoch
            self.validating = False
            setattr(loop, counter, done)

    def _log(self, runner: Runner, metrics: Dict[str, Any]) -> None:
        named = {f'{BEFORE}/{k}': float(v) for k, v in metrics.items() if isinstance(v, (int, float, np.number))}
        logger = next((hook for hook in runner.hooks if isinstance(hook, LoggerHook)), None)
        by_epoch = logger.log_metric_by_epoch if logger else isinstance(runner.train_loop, EpochBasedTrainLoop)
        step = runner.epoch if by_epoch else runner.iter
        shown = '  '.join(f'{name}: {value:.4f}' for name, value in named.items())
        runner.logger.info(f'{"Epoch" if by_epoch else "Iter"}(val) [{step}]  {shown}')
        if logger:
            runner.visualizer.add_scalars(named, step=step, file_path=logger.json_log_path)

    def _num_iters(self, loader) -> int:
        if self.num_iters is not None:
            return self.num_iters
        # an InfiniteSampler's length is that of the whole data set, whatever the number of ranks
        ranks = get_world_size() if isinstance(sampler_of(loader), InfiniteSampler) else 1
        return self.num_epochs * -(-len(loader) // ranks)

    def _swap_statistics(self, runner: Runner) -> None:
        for mine, averaged in zip(repbn_modules(_unwrap(runner.model)), repbn_modules(self._ema)):
            for a, b in (
                (mine.bn.running_mean, averaged.bn.running_mean),
                (mine.bn.running_var, averaged.bn.running_var),
            ):
                kept = a.clone()
                a.copy_(b)
                b.copy_(kept)

    def before_val_epoch(self, runner: Runner) -> None:
        # EMAHook swaps parameters for the validation, but not buffers unless told to
        if self._ema is not None:
            self._swap_statistics(runner)

    def after_val_epoch(self, runner: Runner, metrics: Optional[Dict[str, float]] = None) -> None:
        if self._ema is not None:
            self._swap_statistics(runner)


def _unwrap(model: nn.Module) -> nn.Module:
    return model.module if is_model_wrapper(model) else model


def _batches(loader, epoch: int) -> Iterator[Any]:
    """The loader's batches without end; each pass with the sampler's shuffle of another epoch, which is then reset."""
    sampler = sampler_of(loader)
    before = getattr(sampler, 'epoch', None)
    try:
        while True:
            if hasattr(sampler, 'set_epoch'):
                sampler.set_epoch(epoch)
            yield from loader
            epoch += 1
    finally:
        if hasattr(sampler, 'set_epoch'):
            sampler.set_epoch(before)
