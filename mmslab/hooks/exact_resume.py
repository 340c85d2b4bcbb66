"""A training that was killed and resumed ends as one that nobody interrupted."""

import os
import re
import zipfile
from functools import partial
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple, Union

import torch
import torch.nn as nn
from mmengine.dataset import InfiniteSampler
from mmengine.dist import all_gather, all_gather_object, get_rank, get_world_size, is_main_process
from mmengine.fileio import LocalBackend, get_file_backend
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapperDict
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from torch import Tensor

from ..data.place import (
    EndlessBatches,
    PlacedBatchSampler,
    States,
    place_batches,
    random_states,
    sampler_of,
    set_random_states,
    states_from_plain,
    states_to_plain,
)

KEY = 'exact_resume'  # of the hook's part of a checkpoint


@HOOKS.register_module()
class ExactResumeHook(Hook):
    """Makes ``--resume`` exact: on a CPU, the weights at the end are bit for bit those of an uninterrupted run.

    Every checkpoint that a training can go on from gets, for each rank, the states of the random generators of
    Python, NumPy, torch and every GPU, gradients that were accumulated and not yet applied, and BN statistics where
    ranks differ. On resuming they are restored, and the data goes on at the batch after the last one, in the middle of
    an epoch too, whose rest is then run with mmengine's loops and hooks counting as ever. Passing over data loads
    nothing.

    So that a place is enough to know a batch by, loading draws random numbers that depend on seed, rank, epoch and
    batch alone (:class:`mmslab.data.place.PlacedBatch`): a run may go on with another number of workers. Validation
    leaves the training's random states as they were.

    No moment is a bad one to be killed in: a checkpoint is written under another name (``.part``) and then renamed, an
    old one is removed only after that, and resuming takes the newest that is whole (:func:`latest_checkpoint`).

    What it cannot restore is what others keep to themselves: transforms with a generator or a cache of their own
    (``CachedMosaic``), hooks that do not put their state into the checkpoint (``EarlyStoppingHook``), GPU kernels
    that add in any order. A validation that was cut off is not run again. With another number of ranks, another batch
    size or other data a warning says what differs, and the training goes on from the same share of the epoch. So it
    does, with a warning, from a checkpoint that was written without this hook.

    Raises:
        ValueError: Before training, for a loop other than mmengine's two, or data without places.
    """

    priority = 'HIGHEST'  # random states are set before any other hook draws, and kept before a validation does

    def __init__(self) -> None:
        self._resumed = False
        self._loaded: Optional[Dict[str, Any]] = None  # what the checkpoint resumed from had of this hook
        self._states: Optional[States] = None  # to begin the next epoch with
        self._kept: Optional[States] = None  # the training's, during a validation
        self._to_save: Optional[Dict[str, Any]] = None
        self._first = 0  # the batch to begin the next epoch with

    def before_run(self, runner: Runner) -> None:
        if runner._resume and runner._load_from is None:
            runner._load_from = latest_checkpoint(runner.work_dir)

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        if runner._resume:
            self._resumed = True
            self._loaded = checkpoint.get(KEY)

    def before_train(self, runner: Runner) -> None:
        loop = runner.train_loop
        if not isinstance(loop, (EpochBasedTrainLoop, IterBasedTrainLoop)):
            raise ValueError(
                f'ExactResumeHook knows the places of EpochBasedTrainLoop and IterBasedTrainLoop, not of '
                f'{type(loop).__name__}. Train with one of them, or remove the hook (default_hooks.exact_resume=None).'
            )
        sampler = place_batches(loader := loop.dataloader, runner.seed, get_rank())
        self._sampler = sampler
        if 'save_checkpoint' not in vars(runner):
            runner.save_checkpoint = partial(self._save, runner, runner.save_checkpoint)
        if self._resumed:
            self._first = self._restore(runner, sampler)
            self._resumed, self._loaded = False, None
        if isinstance(loop, IterBasedTrainLoop):
            if isinstance(sampler_of(loader), InfiniteSampler):  # what the loop's own iterator has taken is not gone
                sampler_of(loader).indices = sampler_of(loader)._indices_of_rank()
            skips_itself = hasattr(loop.dataloader_iterator, 'skip_iter')
            loop.dataloader_iterator = EndlessBatches(
                loader, sampler, self._first, self._states, unused=0 if skips_itself else loop.iter
            )

    def before_train_epoch(self, runner: Runner) -> None:
        for hook in runner.hooks:
            if isinstance(hook, CheckpointHook) and not isinstance(hook.file_backend, _RemovesLater):
                hook.file_backend = _RemovesLater(hook.file_backend)
        loop = runner.train_loop
        if isinstance(loop, EpochBasedTrainLoop):
            self._sampler.epoch = runner.epoch
            self._sampler.start = self._first
            self._sampler.states = self._states or random_states()
            if self._first:
                first, run_iter = self._first, loop.run_iter
                loop.run_iter = lambda idx, data_batch: run_iter(idx + first, data_batch)
        self._first, self._states = 0, None

    def after_train_epoch(self, runner: Runner) -> None:
        runner.train_loop.__dict__.pop('run_iter', None)  # the next epoch begins at its first batch

    def before_val(self, runner: Runner) -> None:
        self._kept = random_states(gpus=True)

    def after_val(self, runner: Runner) -> None:
        set_random_states(self._kept)
        self._kept = None

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        if self._to_save is not None:
            checkpoint[KEY] = self._to_save

    def _save(self, runner: Runner, save: Any, out_dir: str, filename: str, *args: Any, **kwargs: Any) -> None:
        """In the place of ``runner.save_checkpoint``, on every rank: that runs hooks on the main process only."""
        # without its optimizer (save_best) no training goes on from a checkpoint
        self._to_save = self._collect(runner) if kwargs.get('save_optimizer', True) else None
        local = not any(args) and kwargs.get('backend_args') is None
        local = local and isinstance(get_file_backend(out_dir), LocalBackend)
        save(out_dir, f'{filename}.part' if local else filename, *args, **kwargs)
        self._to_save = None
        if not is_main_process():
            return
        path = os.path.join(out_dir, filename)
        if local:
            with open(f'{path}.part', 'rb') as file:
                os.fsync(file.fileno())  # a name never outlives what it names, were the power to go
            os.replace(f'{path}.part', path)
        for hook in runner.hooks:
            if isinstance(hook, CheckpointHook) and isinstance(getattr(hook, 'file_backend', None), _RemovesLater):
                hook.file_backend.remove_now(but=path)

    def _collect(self, runner: Runner) -> Dict[str, Any]:
        """The state of all ranks, on the main process; every rank must call it."""
        loader = runner.train_dataloader
        model = _unwrap(runner.model)
        grads = {n: p.grad.detach() for n, p in model.named_parameters() if p.grad is not None}
        if not _accumulating(runner):
            grads = {}
        mine = dict(
            random=states_to_plain(self._kept or random_states(gpus=True)),
            data_seed=self._sampler.seed,
            sampler_seed=getattr(sampler_of(loader), 'seed', None),
            gradients=list(grads),
            buffers={n: b.cpu() for n, b in _buffers(runner) if b.is_floating_point()} if get_world_size() > 1 else {},
        )
        ranks: List[dict] = all_gather_object(mine)
        names = sorted({name for rank in ranks for name in rank['gradients']})
        for rank in ranks:
            rank['gradients'] = dict.fromkeys(rank['gradients'])
        parameters = dict(model.named_parameters())
        for name in names:  # one by one: all at once would take the memory of as many models as there are ranks
            grad = grads.get(name, torch.zeros_like(parameters[name])).contiguous()
            for rank, value in zip(ranks, all_gather(grad)):
                if name in rank['gradients']:
                    rank['gradients'][name] = value.cpu()
        for rank in ranks[::-1]:  # those of the main process are the checkpoint's weights
            main = ranks[0]['buffers']
            rank['buffers'] = {n: b for n, b in rank['buffers'].items() if not torch.equal(b, main[n])}
        return dict(**_circumstances(runner), ranks=ranks)

    def _restore(self, runner: Runner, sampler: PlacedBatchSampler) -> int:
        """Sets all but the random states, which wait for the first batch; returns how many batches are done."""
        loop, saved = runner.train_loop, self._loaded
        by_epoch = isinstance(loop, EpochBasedTrainLoop)
        here = _circumstances(runner)
        if saved is None:
            runner.logger.warning(
                'the checkpoint was written without ExactResumeHook and has no random states: the training goes on, but '
                'will not end as if nobody had interrupted it.'
            )
            done = loop.iter - loop.epoch * here['batches'] if by_epoch else loop.iter
            return done if not by_epoch or 0 <= done <= here['batches'] else 0
        done = loop.iter - loop.epoch * saved['batches'] if by_epoch else loop.iter
        differences = [f'{n} was {saved[n]} and is {here[n]}' for n in here if saved[n] != here[n]]
        if differences:
            runner.logger.warning(
                f'this run is not the one that the checkpoint is of: {"; ".join(differences)}. The training goes on from '
                'the same share of the data, but will not end as if nobody had interrupted it.'
            )
        same_ranks = saved['world_size'] == here['world_size']
        mine = saved['ranks'][get_rank() if same_ranks else 0]
        sampler.seed = mine['data_seed']
        if mine['sampler_seed'] is not None:
            sampler_of(loop.dataloader).seed = mine['sampler_seed']
        if same_ranks:
            self._states = states_from_plain(mine['random'])
            parameters, buffers = dict(_unwrap(runner.model).named_parameters()), dict(_buffers(runner))
            for name, grad in mine['gradients'].items():
                parameters[name].grad = grad.to(parameters[name])
            for name, value in mine['buffers'].items():
                buffers[name].copy_(value)
            if mine['gradients']:
                runner.logger.info('the gradients accumulated before the checkpoint are restored: none is lost')
        done = round(done * here['batches'] / saved['batches'])
        return min(max(done, 0), here['batches']) if by_epoch else done


def latest_checkpoint(folder: Union[str, os.PathLike]) -> Optional[str]:
    """The checkpoint to resume a run in ``folder`` from: the one in its ``last_checkpoint``, if that is whole.

    A process that is killed while it writes can leave a checkpoint cut off, or ``last_checkpoint`` empty or naming one
    that is removed. Then the newest ``epoch_*.pth`` or ``iter_*.pth`` in the folder that is whole is taken.

    Returns:
        str | None: Its path; None if the folder has no checkpoints.

    Raises:
        FileNotFoundError: If there are, or there was one, but none is whole.
    """
    folder = Path(folder)
    pointer = folder / 'last_checkpoint'
    named = pointer.read_text().strip() if pointer.is_file() else ''
    if '://' in named or _is_whole(named):
        return named
    present = [p for p in folder.glob('*.pth') if re.fullmatch(r'(epoch|iter)_\d+', p.stem)]
    whole = [p for p in present if _is_whole(p)]
    if whole:
        return str(max(whole, key=lambda p: p.stat().st_mtime))
    if named or present:
        raise FileNotFoundError(
            f'--resume: {named or str(present[0])!r} is missing or cut off, and {str(folder)!r} has no other checkpoint '
            'that is whole. Name one (--resume FILE), or train anew without --resume.'
        )
    return None


def _is_whole(path: Union[str, os.PathLike]) -> bool:
    """Whether torch wrote the file to its end, where a zip archive has its table of contents."""
    return os.path.isfile(path) and zipfile.is_zipfile(path)


class _RemovesLater:
    """A file backend that keeps what it is told to remove until the checkpoint in its place is whole."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._waiting: List[Tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def remove(self, path: str) -> None:
        self._waiting.append(('remove', path))

    def rmtree(self, path: str) -> None:
        self._waiting.append(('rmtree', path))

    def remove_now(self, but: str) -> None:
        for how, path in self._waiting:
            if path != but:
                getattr(self._backend, how)(path)
        self._waiting.clear()


def _circumstances(runner: Runner) -> Dict[str, int]:
    """What must be the same for a run to go on exactly."""
    loader, ranks = runner.train_dataloader, get_world_size()
    # an InfiniteSampler's length is that of the whole data set, whatever the number of ranks
    shared = ranks if isinstance(sampler_of(loader), InfiniteSampler) else 1
    return dict(
        world_size=ranks,
        batch_size=loader.batch_sampler.batch_size,
        batches=-(-len(loader) // shared),
        images=len(loader.dataset),
    )


def _accumulating(runner: Runner) -> bool:
    """Whether gradients wait for a later iteration to be applied."""
    wrapper = runner.optim_wrapper
    wrappers = wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    return not all(w.should_update() for w in wrappers)


def _buffers(runner: Runner) -> Iterator[Tuple[str, Tensor]]:
    yield from _unwrap(runner.model).named_buffers(prefix='model')
    for hook in runner.hooks:
        if isinstance(hook, EMAHook) and hasattr(hook, 'ema_model'):
            yield from hook.ema_model.named_buffers(prefix='ema')


def _unwrap(model: nn.Module) -> nn.Module:
    return model.module if is_model_wrapper(model) else model
