"""Timing: rounds in which every model runs once, and what is said of them."""

import time
from typing import Any, Callable, Optional, Sequence, Tuple

import numpy as np
import torch

RESAMPLES = 2000
Timer = Callable[[Callable[[], Any]], float]


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
) -> np.ndarray:
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
        np.ndarray: Seconds, (len(calls), rounds).

    Raises:
        ValueError: If a call raises, naming it, or an argument is out of range.
    """
    if not calls:
        raise ValueError('calls is empty: there is nothing to measure. Give at least one.')
    if rounds < 1 or warmup < 0:
        raise ValueError(f'rounds must be at least 1 and warmup at least 0, but got {rounds} and {warmup}.')
    seconds = np.empty((len(calls), rounds))
    order = np.random.default_rng(0)
    for number in range(-warmup, rounds):
        for i in order.permutation(len(calls)):
            try:
                taken = timer(calls[i])
            except Exception as e:  # whatever a model raises
                name = names[i] if names else f'call {i}'
                raise ValueError(f'{name}: failed in round {number + warmup + 1} ({reason(e)}).') from e
            if number >= 0:
                seconds[i, number] = taken
            advance()
    return seconds


def reason(error: BaseException) -> str:
    """The kind of an error and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f'{type(error).__name__}: {lines[0]}' if lines else type(error).__name__


def statistics(seconds: np.ndarray) -> dict:
    """Mean, median, 90th percentile and standard deviation (of a sample) of some times, in their unit."""
    return dict(
        mean=float(np.mean(seconds)),
        median=float(np.median(seconds)),
        p90=float(np.percentile(seconds, 90)),
        std=float(np.std(seconds, ddof=1)) if len(seconds) > 1 else 0.0,
    )


def ratio(seconds: np.ndarray, first: np.ndarray) -> Tuple[float, Tuple[float, float]]:
    """How long a row takes relative to another: the median over the rounds of their ratio in each round.

    Returns:
        tuple: The median, and its 95% interval from a percentile bootstrap over the rounds (2000 resamples, a fixed seed).
    """
    ratios = np.asarray(seconds) / np.asarray(first)
    draws = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.percentile(np.median(ratios[draws], axis=1), [2.5, 97.5])
    return float(np.median(ratios)), (float(low), float(high))
