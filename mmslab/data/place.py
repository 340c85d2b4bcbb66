"""Random states, and a place in the data: what a training has to know to go on as if nobody had interrupted it."""

import random
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

States = Tuple[tuple, tuple, torch.Tensor, List[torch.Tensor]]  # of Python, NumPy, torch, and each GPU


def random_states(gpus: bool = False) -> States:
    """The states of the global random generators of Python, NumPy and torch; of every GPU's too, if asked for."""
    # a GPU that nobody has used yet has nothing to keep, and asking would start CUDA
    devices = torch.cuda.get_rng_state_all() if gpus and torch.cuda.is_initialized() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), devices


def set_random_states(states: States) -> None:
    """Sets what :func:`random_states` gave; GPUs that it does not hold, or that are not here, are left alone."""
    python, numpy, cpu, devices = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if devices:  # else the GPUs are not even counted
        for i, state in enumerate(devices[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, i)


def seed_random_states(*key: int) -> None:
    """Seeds Python, NumPy and torch on the CPU with a hash of non-negative integers."""
    words = np.random.SeedSequence(key).generate_state(10)
    random.seed(words[:4].tobytes())
    np.random.seed(words[4:8])
    torch.default_generator.manual_seed(int(words[8:].view(np.int64)[0]))  # torch.manual_seed would seed GPUs too


def states_to_plain(states: States) -> Dict[str, Any]:
    """States as tensors and plain containers, so that a checkpoint with them is read without unpickling objects."""
    (version, numbers, python_gauss), (kind, keys, position, has_gauss, gauss), cpu, devices = states
    return dict(
        python=dict(version=version, state=torch.tensor(numbers), gauss=python_gauss),
        numpy=dict(
            kind=str(kind),
            state=torch.from_numpy(keys.astype(np.int64)),
            position=int(position),
            has_gauss=int(has_gauss),
            gauss=float(gauss),
        ),
        torch=cpu,
        cuda=list(devices),
    )


def states_from_plain(plain: Dict[str, Any]) -> States:
    """The inverse of :func:`states_to_plain`, wherever the tensors have been loaded to."""
    p, n = plain['python'], plain['numpy']
    return (
        (p['version'], tuple(p['state'].tolist()), p['gauss']),
        (n['kind'], n['state'].cpu().numpy().astype(np.uint32), n['position'], n['has_gauss'], n['gauss']),
        plain['torch'].cpu(),
        [state.cpu() for state in plain['cuda']],
    )


class PlacedBatch(list):
    """The indices of a batch, with the key of the random numbers that loading it draws.

    A data loader iterates over the indices as it loads them, in a worker or in the main process; the generators are
    seeded when that begins. So a batch depends on its place in the data alone: not on the batches that were loaded
    before it, nor on how many workers there are, nor on how far they have gone ahead. The main process, which trains,
    gets its own states back.
    """

    def __init__(self, indices: Iterable[Any], key: Tuple[int, ...]) -> None:
        super().__init__(indices)
        self.key = key

    def __iter__(self) -> Iterator[Any]:
        kept = random_states() if get_worker_info() is None else None
        seed_random_states(*self.key)
        try:
            yield from super().__iter__()
        finally:
            if kept is not None:
                set_random_states(kept)

    def __reduce__(self):  # list's own would iterate, in the thread that feeds a worker
        return PlacedBatch, (self[:], self.key)


class PlacedBatchSampler:
    """A batch sampler that begins where it is told to, with batches that load the same wherever that is.

    Batches before the place are passed over by their indices alone: nothing is loaded. The sampler draws from random
    states of its own, and making a data loader's iterator, which draws too, leaves the training's as they were.

    Args:
        batch_sampler: The batch sampler of a data loader.
        seed (int): Of the random numbers that loading draws.
        rank (int): Each rank draws others.

    Attributes:
        epoch (int): Which pass over the data the next iteration is.
        start (int): How many batches the next iteration passes over.
        states: Random states to set as the next iteration begins.
        skipped (int): How many batches the last iteration passed over; fewer than told if it had no more.
    """

    def __init__(self, batch_sampler: Any, seed: int, rank: int) -> None:
        self.batch_sampler = batch_sampler
        self.sampler = getattr(batch_sampler, 'sampler', None)
        self.batch_size = batch_sampler.batch_size
        self.drop_last = getattr(batch_sampler, 'drop_last', False)
        self.seed = seed
        self.rank = rank
        self.epoch = 0
        self.start = 0
        self.states: Optional[States] = None
        self.skipped = 0

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[PlacedBatch]:
        start, self.start, self.skipped = self.start, 0, 0
        if self.states is not None:  # here a loader's iterator has been made and has drawn the seed of its workers
            set_random_states(self.states)
            self.states = None
        key = (self.seed, self.rank, self.epoch, getattr(self.sampler, 'epoch', 0) or 0)
        stream = _Stream(*key, 0)
        with stream.drawn_from():
            batches = iter(self.batch_sampler)
            for _ in islice(batches, start):
                self.skipped += 1
        for position in count(start):
            with stream.drawn_from():
                indices = next(batches, None)
            if indices is None:
                return
            yield PlacedBatch(indices, (*key, 1, position))


class _Stream:
    """Random numbers apart from those of the global generators, for code that knows the global ones only."""

    def __init__(self, *key: int) -> None:
        self.key = key
        self.states: Optional[States] = None

    @contextmanager
    def drawn_from(self) -> Iterator[None]:
        kept = random_states()
        if self.states is None:
            seed_random_states(*self.key)
        else:
            set_random_states(self.states)
        try:
            yield
        finally:
            self.states = random_states()
            set_random_states(kept)


class EndlessBatches:
    """A loader's batches without end from any place on, for mmengine's ``IterBasedTrainLoop``.

    Args:
        loader (DataLoader): Its batch sampler is ``sampler``; see :func:`place_batches`.
        sampler (PlacedBatchSampler): Says where to begin.
        place (int): Batches to pass over.
        states (optional): Random states of that place; by default those in which the first batch is asked for.
        unused (int): How many batches the loop will ask for to get to the place by itself, as mmengine did before
            0.10.8; they are not loaded.
    """

    def __init__(
        self,
        loader: DataLoader,
        sampler: PlacedBatchSampler,
        place: int = 0,
        states: Optional[States] = None,
        unused: int = 0,
    ) -> None:
        self.loader = loader
        self.sampler = sampler
        self.place = place
        self.states = states
        self.unused = unused
        self.epoch = 0
        self._iterator: Optional[Iterator[Any]] = None

    def __iter__(self) -> 'EndlessBatches':
        return self

    def skip_iter(self, num_iters: int) -> None:
        """How mmengine's loop goes to its place: the sampler begins there already."""

    def __next__(self) -> Any:
        if self.unused:
            self.unused -= 1
            return None
        while True:
            begins = self._iterator is None
            if begins:
                set_epoch(self.loader, self.epoch)
                self.sampler.epoch = self.epoch
                self.sampler.start = self.place
                self.sampler.states = self.states or random_states()
                self.states = None
                self._iterator = iter(self.loader)
            try:
                return next(self._iterator)
            except StopIteration:
                if begins and not self.sampler.skipped:
                    raise ValueError(
                        'the training data has no batch. Give it images, or set drop_last=False.'
                    ) from None
                self.place = max(self.place - self.sampler.skipped, 0) if begins else 0
                self.epoch += 1
                self._iterator = None


def sampler_of(loader: DataLoader) -> Any:
    """The sampler whose indices a loader takes; where a batch sampler groups those of another sampler, that one."""
    sampler = loader.sampler
    return sampler if hasattr(sampler, 'set_epoch') else getattr(loader.batch_sampler, 'sampler', sampler)


def set_epoch(loader: DataLoader, epoch: int) -> None:
    """Tells the loader's sampler which pass over the data is next, if it wants to know."""
    sampler = sampler_of(loader)
    if hasattr(sampler, 'set_epoch'):
        sampler.set_epoch(epoch)


def place_batches(loader: DataLoader, seed: int, rank: int) -> PlacedBatchSampler:
    """Puts a :class:`PlacedBatchSampler` around the batch sampler of a loader, once.

    Raises:
        ValueError: If the data has no places, being an ``IterableDataset`` or not in batches.
    """
    if isinstance(loader.batch_sampler, PlacedBatchSampler):
        return loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise ValueError(
            f'ExactResumeHook cannot find its place in train_dataloader: {type(loader.dataset).__name__} '
            + ('is an IterableDataset' if isinstance(loader.dataset, IterableDataset) else 'is read without batch_size')
            + '. Use a dataset with indices, in batches, or remove the hook (default_hooks.exact_resume=None).'
        )
    placed = PlacedBatchSampler(loader.batch_sampler, seed, rank)
    loader.__dict__['batch_sampler'] = placed  # DataLoader forbids to assign it, since its iterator might exist already
    return placed
