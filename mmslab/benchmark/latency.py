"""Timing: rounds in which every model runs once, and what is said of them."""

import resource
import time
from dataclasses import dataclass
from typing import Any, Callable, Optional, Sequence, Tuple

import numpy as np
import torch

from ..errors import reason

RESAMPLES = 2000
# Student's t: 97.5% quantiles for 1 to 30 degrees of freedom
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
Timer = Callable[[Callable[[], Any]], float]


@dataclass(frozen=True)
class Measurement:
    """What one process measured, arrays of (rows, rounds).

    ``seconds`` are by the clock; ``faults`` are minor page faults, of memory that the kernel maps at its first touch;
    ``system_seconds`` are of CPU time in the kernel, summed over the threads, in which the faults are served.
    """

    seconds: np.ndarray
    faults: np.ndarray
    system_seconds: np.ndarray


@dataclass(frozen=True)
class Spread:
    """A figure over several processes: ``median``, ``low`` and ``high`` as measured; ``mean`` and its 95% t interval."""

    median: float
    low: float
    high: float
    mean: float
    interval: Tuple[float, float]


def cpu_timer(call: Callable[[], Any]) -> float:
    """Seconds that ``call`` takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def cuda_timer(call: Callable[[], Any]) -> float:
    """Seconds between two events on the current GPU's stream, one before and one after ``call``.

    The GPU is idle before the first and has reached the second when this returns, so that no work of another call is in it.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure(
    calls: Sequence[Callable[[], Any]],
    rounds: int = 100,
    warmup: int = 10,
    timer: Timer = cpu_timer,
    names: Optional[Sequence[str]] = None,
    advance: Callable[[], Any] = lambda: None,
) -> Measurement:
    """Times ``calls`` interleaved: every round runs each of them once.

    What disturbs a machine for a while then disturbs all of them, and their ratio within a round holds. The order is drawn
    anew each round (always the same draws), so that none always follows the same other, whose memory it would find in the
    caches.

    Args:
        calls (sequence): What to time, without arguments.
        rounds (int): How many times each is timed.
        warmup (int): Rounds before these that are not timed.
        timer (callable): Runs a call and returns its seconds: :func:`cpu_timer`, :func:`cuda_timer`.
        names (sequence[str], optional): Of the calls, for errors.
        advance (callable): Called after each call of every round, for a progress bar.

    Returns:
        Measurement: Of (len(calls), rounds).

    Raises:
        ValueError: If a call raises, naming it, or an argument is out of range.
    """
    if not calls:
        raise ValueError('calls is empty: there is nothing to measure. Give at least one.')
    if rounds < 1 or warmup < 0:
        raise ValueError(f'rounds must be at least 1 and warmup at least 0, but got {rounds} and {warmup}.')
    seconds, faults, system = (np.empty((len(calls), rounds)) for _ in range(3))
    order = np.random.default_rng(0)
    for number in range(-warmup, rounds):
        for i in order.permutation(len(calls)):
            before = resource.getrusage(resource.RUSAGE_SELF)
            try:
                taken = timer(calls[i])
            except Exception as e:  # whatever a model raises
                name = names[i] if names else f'call {i}'
                raise ValueError(f'{name}: failed in round {number + warmup + 1} ({reason(e)}).') from e
            after = resource.getrusage(resource.RUSAGE_SELF)
            if number >= 0:
                seconds[i, number] = taken
                faults[i, number] = after.ru_minflt - before.ru_minflt
                system[i, number] = after.ru_stime - before.ru_stime
            advance()
    return Measurement(seconds, faults, system)


def statistics(seconds: np.ndarray) -> dict:
    """Mean, median, 90th percentile and standard deviation (of a sample) of some times, in their unit."""
    return dict(
        mean=float(np.mean(seconds)),
        median=float(np.median(seconds)),
        p90=float(np.percentile(seconds, 90)),
        std=float(np.std(seconds, ddof=1)) if len(seconds) > 1 else 0.0,
    )


def ratio(seconds: np.ndarray, first: np.ndarray) -> Tuple[float, Tuple[float, float]]:
    """How long a row takes relative to another in one process: the median over the rounds of their ratio in each round.

    Returns:
        tuple: The median, and its 95% interval from a percentile bootstrap over the rounds (2000 resamples, a fixed seed).
            It says nothing of other processes, see :func:`over_processes`.
    """
    ratios = np.asarray(seconds) / np.asarray(first)
    low, high = np.percentile(np.median(ratios[_resamples(len(ratios))], axis=1), [2.5, 97.5])
    return float(np.median(ratios)), (float(low), float(high))


def ratio_of_means(seconds: np.ndarray, first: np.ndarray) -> Tuple[float, Tuple[float, float]]:
    """The same of the mean times, as the paper compares them; the interval resamples the rounds of both together."""
    seconds, first = np.asarray(seconds), np.asarray(first)
    draws = _resamples(len(seconds))
    low, high = np.percentile(seconds[draws].mean(axis=1) / first[draws].mean(axis=1), [2.5, 97.5])
    return float(seconds.mean() / first.mean()), (float(low), float(high))


def _resamples(rounds: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, rounds, (RESAMPLES, rounds))


def over_processes(values: Sequence[float]) -> Spread:
    """What several processes say of a figure that each has measured once, as its median ratio.

    A process differs from the next in where its memory lies and in what the machine does meanwhile; its rounds share that, so
    that their interval is too narrow. The mean's 95% interval is Student's, ``mean +- t std / sqrt(n)``: of a handful of
    values a bootstrap would give no more than the smallest and the largest. Beyond 31 processes t is that of 31, a little wide.

    Raises:
        ValueError: For less than two values.
    """
    n = len(values)
    if n < 2:
        raise ValueError(f'values must be of at least 2 processes, but there are {n}. Measure more of them.')
    mean = float(np.mean(values))
    half = T_QUANTILES[min(n - 1, len(T_QUANTILES)) - 1] * float(np.std(values, ddof=1)) / n**0.5
    return Spread(float(np.median(values)), float(min(values)), float(max(values)), mean, (mean - half, mean + half))
