import json
import os
import subprocess
import sys
from dataclasses import asdict

import numpy as np
import pytest
import torch

import mmslab.benchmark.processes as processes
from mmslab.benchmark.allocators import current_allocator
from mmslab.benchmark.models import Settings
from mmslab.benchmark.processes import allowed_cores, cores_to_pin, environment, measure_in_process
from mmslab.benchmark.run import run, run_with_allocators
from mmslab.benchmark.worker import main, work

from ..conftest import ROOT

CLASSIFIER = ROOT / 'configs' / 'demo' / 'slab_pvt_shapes_classes.py'
SMALL = dict(device='cpu', image=(64, 64), rounds=5, warmup=1, scope='backbone')


def worker(monkeypatch, code):
    """Puts a program in the place of the worker; its arguments are the files and the pipe."""
    monkeypatch.setattr(processes, 'WORKER', (sys.executable, '-c', code))


def no_step(*_):
    pass


def test_two_processes_measure_what_one_does(capfd):
    """The rows, as this process builds them; the times are of both, and nothing else is printed."""
    here = run([CLASSIFIER], Settings(**SMALL, no_fold=True), show_progress=False)
    report = run([CLASSIFIER], Settings(**SMALL, no_fold=True, processes=2, threads=1), show_progress=False)
    assert [s.name for s in report.subjects] == ['slab_pvt_shapes_classes (folded)', 'slab_pvt_shapes_classes']
    for ours, theirs in zip(here.subjects, report.subjects):
        assert theirs.call is None
        ours.call = None
        assert ours == theirs
    assert len(report.measured) == 2 and all(m.seconds.shape == (2, 5) for m in report.measured)
    assert not np.array_equal(report.measured[0].seconds, report.measured[1].seconds)
    assert report.machine['pinned'] == allowed_cores()[:1] and report.machine['threads'] == 1
    assert report.machine['cores'] == len(allowed_cores())
    assert capfd.readouterr() == ('', '')


def test_threads_stay_on_their_cores():
    """Which cores the threads of a process have that computes in parallel."""
    cores = allowed_cores()[:2]
    code = (
        'import os, torch; a = torch.randn(2000, 2000); a @ a; (a + a).sum()\n'
        "print(torch.get_num_threads(), [sorted(os.sched_getaffinity(int(t))) for t in os.listdir('/proc/self/task')])"
    )
    given = dict(os.environ, GOMP_CPU_AFFINITY='0', KMP_AFFINITY='disabled', OMP_NUM_THREADS='7')
    env = environment(None, None, cores, given)
    assert 'GOMP_CPU_AFFINITY' not in env and 'KMP_AFFINITY' not in env
    with processes._affinity(cores):
        printed = subprocess.run([sys.executable, '-c', code], env=env, capture_output=True, text=True, check=True)
    threads, _, masks = printed.stdout.partition(' ')
    masks = json.loads(masks)
    assert int(threads) == len(cores) and sorted({tuple(m) for m in masks}) == [(c,) for c in cores]
    assert allowed_cores()[:2] == cores


def test_which_cores(monkeypatch):
    monkeypatch.setattr(processes, 'allowed_cores', lambda: [1, 4, 5, 7])
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 3)
    assert cores_to_pin(Settings(device='cpu')) == [1, 4, 5]
    assert cores_to_pin(Settings(device='cpu', threads=2)) == [1, 4]
    assert cores_to_pin(Settings(device='cpu', threads=9, pin=False)) is None
    with pytest.raises(ValueError, match='threads=5, but this process may run on 4 cores.*--threads 4, or --no-pin'):
        cores_to_pin(Settings(device='cpu', threads=5))
    assert environment(None, None, [1, 4], {})['OMP_PLACES'] == '{1},{4}'
    assert 'OMP_PLACES' not in environment(None, None, None, {})


def test_allocators_take_turns(monkeypatch):
    """Two of them, two processes each; jemalloc need not be here for that."""
    ran = []

    def measured(job, env, cores, step, name):
        ran.append((job['settings']['allocator'], env.get('LD_PRELOAD'), name, job['part']))
        times = [[float(len(ran))] * 5]
        return dict(subjects=[], measurement=dict(seconds=times, faults=times, system_seconds=times), machine={})

    import mmslab.benchmark.run as module

    monkeypatch.setattr(module, 'measure_in_process', measured)
    monkeypatch.setattr(module, 'find_library', lambda name: dict(jemalloc='/x/libjemalloc.so.2').get(name))
    monkeypatch.delenv('LD_PRELOAD', raising=False)
    reports = run_with_allocators(
        [CLASSIFIER], Settings(**SMALL, processes=2), ['glibc', 'jemalloc'], show_progress=False
    )
    assert ran == [
        ('glibc', None, 'counting', 'counts'),
        ('glibc', None, 'process 1 of 2, glibc', 'times'),
        ('jemalloc', '/x/libjemalloc.so.2', 'process 1 of 2, jemalloc', 'times'),
        ('glibc', None, 'process 2 of 2, glibc', 'times'),
        ('jemalloc', '/x/libjemalloc.so.2', 'process 2 of 2, jemalloc', 'times'),
    ]
    assert [r.settings.allocator for r in reports] == ['glibc', 'jemalloc']
    assert [[m.seconds[0, 0] for m in r.measured] for r in reports] == [[2, 4], [3, 5]]


@pytest.mark.parametrize(
    'allocators, given, error, message',
    [
        (['glibc', 'glibc'], {}, ValueError, '--allocator must name different ones, but got glibc, glibc'),
        (['glibc', 'tbb'], {}, ValueError, "allocator must be one of .*, but got 'tbb'"),
        (['glibc', 'jemalloc'], dict(plot='a.png'), ValueError, '--plot draws one table, but --allocator names 2'),
        (['mimalloc'], {}, FileNotFoundError, "allocator 'mimalloc': there is no libmimalloc.so here"),
    ],
)
def test_bad_input_starts_no_process(monkeypatch, tmp_path, allocators, given, error, message):
    import mmslab.benchmark.allocators as module

    monkeypatch.setattr(module, '_system_folders', lambda: [])
    monkeypatch.setattr(module.ctypes.util, 'find_library', lambda name: None)
    monkeypatch.delenv('LD_LIBRARY_PATH', raising=False)
    monkeypatch.setattr(subprocess, 'Popen', lambda *_, **__: pytest.fail('started'))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        run_with_allocators([CLASSIFIER], Settings(**SMALL, processes=1), allocators, show_progress=False, **given)


def test_what_a_process_says_of_bad_input_is_raised_here(monkeypatch, tmp_path):
    """The worker's answer, written in this process, and read as if by another."""
    for name, settings, kind, message in (
        (
            'a',
            dict(image=(2, 3)),
            ValueError,
            r'^slab_pvt_shapes_classes \(folded\): cannot run on 1 x 2x3 pixels in fp32',
        ),
        ('b', dict(), FileNotFoundError, "^checkpoint 'gone.pth' does not exist"),
    ):
        job = dict(
            configs=[str(CLASSIFIER)], settings=asdict(Settings(device='cpu', **settings)), trust_checkpoint=False
        )
        job['checkpoints'] = None if settings else ['gone.pth']
        (tmp_path / 'job.json').write_text(json.dumps(job))
        reading, writing = os.pipe()
        main(str(tmp_path / 'job.json'), str(tmp_path / name), str(writing))
        with open(reading) as steps:
            assert steps.read() == ('["building", 0, 1]\n' if settings else '')
        worker(monkeypatch, f'import shutil, sys; shutil.copy({str(tmp_path / name)!r}, sys.argv[2])')
        with pytest.raises(kind, match=message):
            measure_in_process(job, os.environ, None, no_step)


def test_an_allocator_that_is_not_there_is_not_measured():
    """As where the dynamic linker warns of a file that is no library, and goes on without it."""
    other = 'tcmalloc' if current_allocator()['name'] == 'jemalloc' else 'jemalloc'
    job = dict(configs=[str(CLASSIFIER)], checkpoints=None, trust_checkpoint=False)
    job['settings'] = asdict(Settings(**SMALL, processes=1, allocator=other))
    with pytest.raises(ValueError, match=f"^allocator '{other}' was asked for, but the process has .*LD_PRELOAD="):
        work(job, no_step)


def test_a_process_that_crashes(monkeypatch):
    worker(monkeypatch, 'import os; print("last words", flush=True); os.kill(os.getpid(), 9)')
    message = r'^process 2 of 5 ended with signal 9 \(Killed\) before it had measured all. Its last lines:\nlast words$'
    with pytest.raises(ChildProcessError, match=message):
        measure_in_process({}, os.environ, None, no_step, 'process 2 of 5')
    worker(monkeypatch, 'raise KeyError("a defect")')
    with pytest.raises(ChildProcessError, match=r"exit code 1 [^$]*KeyError: 'a defect'"):
        measure_in_process({}, os.environ, None, no_step)
    worker(monkeypatch, 'pass')
    with pytest.raises(ChildProcessError, match='exit code 0 before it had measured all'):
        measure_in_process({}, os.environ, None, no_step)


def test_ctrl_c_leaves_no_process_behind(monkeypatch):
    """One that would sleep for a minute, and will not end when it is asked to."""
    worker(
        monkeypatch,
        'import json, os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n'
        'os.write(int(sys.argv[3]), (json.dumps(["a", os.getpid(), 1]) + "\\n").encode()); time.sleep(60)',
    )
    monkeypatch.setattr(processes, 'PATIENCE', 0.2)
    seen = []

    def interrupted(stage, pid, total):
        seen.append(pid)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_in_process({}, os.environ, None, interrupted)
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)
