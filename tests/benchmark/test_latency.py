import mmap

import numpy as np
import pytest
import torch
from scipy import stats

from mmslab.benchmark.latency import (
    T_QUANTILES,
    cpu_timer,
    cuda_timer,
    measure,
    over_processes,
    ratio,
    ratio_of_means,
    reason,
    statistics,
)


class Clock:
    """A timer whose calls take what they return, in a machine that is slower by the round."""

    def __init__(self, calls, slow):
        self.number, self.calls, self.slow = 0, calls, slow

    def __call__(self, call):
        factor = self.slow[self.number // self.calls]
        self.number += 1
        return call() * factor


def test_every_round_runs_each_once_in_an_order_without_habits():
    ran, steps = [], []
    calls = [lambda i=i: ran.append(i) for i in range(3)]
    seconds = measure(calls, 40, 2, advance=lambda: steps.append(1)).seconds
    assert seconds.shape == (3, 40) and (seconds >= 0).all() and len(steps) == 3 * 42
    rounds = np.array(ran).reshape(42, 3)
    assert (np.sort(rounds, axis=1) == [0, 1, 2]).all()
    followed = {(a, b) for r in rounds for a, b in zip(r, r[1:])}
    assert followed == {(a, b) for a in range(3) for b in range(3) if a != b}
    again = []
    measure([lambda i=i: again.append(i) for i in range(3)], 40, 2)
    assert again == ran


def test_warm_up_is_not_timed_and_a_disturbance_leaves_the_ratio():
    slow = [100.0] * 3 + [1.0, 1.0, 7.0, 1.0, 3.0, 1.0]
    calls = [lambda: 2.0, lambda: 3.0]
    seconds = measure(calls, 6, 3, timer=Clock(2, slow)).seconds
    assert np.allclose(seconds, np.outer([2, 3], slow[3:]))
    assert ratio(seconds[1], seconds[0]) == (1.5, (1.5, 1.5))
    assert ratio(seconds[0], seconds[0]) == (1.0, (1.0, 1.0))


def test_statistics_by_their_formulas():
    x = np.random.default_rng(0).gamma(2.0, size=100)
    s = statistics(x)
    ordered = np.sort(x)
    assert s['mean'] == pytest.approx(x.sum() / 100)
    assert s['median'] == pytest.approx((ordered[49] + ordered[50]) / 2)
    assert s['p90'] == pytest.approx(ordered[89] + 0.1 * (ordered[90] - ordered[89]))
    assert s['std'] == pytest.approx((((x - x.mean()) ** 2).sum() / 99) ** 0.5)


def test_the_interval_is_that_of_a_median():
    """Against the binomial one, which is exact: the 40th and 61st of 100 ordered ratios hold the median in 95%."""
    ratios = np.random.default_rng(1).normal(0.8, 0.1, 100)
    first = np.random.default_rng(2).uniform(1, 2, 100)
    middle, (low, high) = ratio(ratios * first, first)
    assert middle == pytest.approx(np.median(ratios)) and low < middle < high
    ordered = np.sort(ratios)
    width = ordered[60] - ordered[39]
    assert low == pytest.approx(ordered[39], abs=0.3 * width) and high == pytest.approx(ordered[60], abs=0.3 * width)


def test_ratio_of_means_and_its_interval_by_their_formulas():
    """The interval against the delta method's, from the residuals of a ratio estimator."""
    first = np.random.default_rng(3).gamma(50.0, size=100)
    second = 0.8 * first + np.random.default_rng(4).normal(0, 1, 100)
    middle, (low, high) = ratio_of_means(second, first)
    assert middle == pytest.approx(second.sum() / first.sum())
    half = 1.96 * np.std(second - middle * first, ddof=1) / 100**0.5 / first.mean()
    assert (low, high) == pytest.approx((middle - half, middle + half), abs=0.2 * half)
    assert ratio_of_means(3 * first, first)[1] == pytest.approx((3.0, 3.0))


def test_processes_are_the_sample_not_their_rounds():
    """Five ratios, and their mean's t interval by scipy."""
    values = [0.77, 0.93, 0.88, 0.86, 1.00]
    spread = over_processes(values)
    assert (spread.median, spread.low, spread.high) == (0.88, 0.77, 1.00)
    assert spread.mean == pytest.approx(sum(values) / 5)
    assert spread.interval == pytest.approx(stats.t.interval(0.95, 4, np.mean(values), stats.sem(values)), abs=1e-4)
    assert np.allclose(T_QUANTILES, stats.t.ppf(0.975, np.arange(1, 31)), atol=6e-4)
    many = list(np.random.default_rng(0).normal(1, 0.1, 50))
    low, high = over_processes(many).interval
    assert high - low == pytest.approx(2 * 2.042 * np.std(many, ddof=1) / 50**0.5)
    with pytest.raises(ValueError, match='values must be of at least 2 processes, but there are 1'):
        over_processes([0.9])


def test_page_faults_are_those_of_the_call():
    """1000 pages are touched by one call and none by the other, whatever the machine does besides."""

    def touches():
        with mmap.mmap(-1, 1000 * mmap.PAGESIZE) as fresh:
            fresh.madvise(mmap.MADV_NOHUGEPAGE)
            for page in range(1000):
                fresh[page * mmap.PAGESIZE] = 1

    measured = measure([lambda: None, touches], 5, 1)
    assert measured.faults.shape == measured.system_seconds.shape == (2, 5)
    assert (measured.faults[1] >= 1000).all() and (np.median(measured.faults, axis=1) < [500, 1500]).all()
    assert (measured.system_seconds >= 0).all()


def test_a_call_that_fails_is_named():
    def fails():
        raise RuntimeError('out of memory\nand much more')

    with pytest.raises(ValueError, match=r'^b: failed in round 1 \(RuntimeError: out of memory\)\.$'):
        measure([lambda: None, fails], 5, 0, names=['a', 'b'])
    with pytest.raises(ValueError, match='calls is empty'):
        measure([])
    with pytest.raises(ValueError, match='rounds must be at least 1 and warmup at least 0, but got 0 and -1'):
        measure([lambda: None], 0, -1)
    assert reason(KeyError()) == 'KeyError'


def test_the_clock_ticks():
    assert cpu_timer(lambda: sum(range(1000))) > 0


def test_events_on_a_gpu_enclose_the_call_alone(monkeypatch):
    """The order of what is asked of CUDA, without a GPU."""
    did = []

    class Event:
        def __init__(self, enable_timing):
            self.name = 'end' if any(e == 'start made' for e in did) else 'start'
            did.append(f'{self.name} made')

        def record(self):
            did.append(self.name)

        def synchronize(self):
            did.append(f'{self.name} reached')

        def elapsed_time(self, other):
            assert (self.name, other.name) == ('start', 'end')
            return 250.0  # ms

    monkeypatch.setattr(torch.cuda, 'Event', Event)
    monkeypatch.setattr(torch.cuda, 'synchronize', lambda: did.append('idle'))
    assert cuda_timer(lambda: did.append('call')) == 0.25
    assert did[2:] == ['idle', 'start', 'call', 'end', 'end reached']
