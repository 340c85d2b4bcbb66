"""Measuring in fresh processes, each with an allocator, cores and an environment of its own."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Sequence

import torch

from .allocators import preloading
from .models import Settings

Step = Callable[[str, int, int], Any]  # a stage, steps done of it, steps in all
WORKER = (sys.executable, '-m', 'mmslab.benchmark.worker')
PINNING = ('OMP_PROC_BIND', 'OMP_PLACES', 'GOMP_CPU_AFFINITY', 'KMP_AFFINITY')
ERRORS = {kind.__name__: kind for kind in (ValueError, OSError, FileNotFoundError, FileExistsError, ImportError)}
LAST_LINES = 15
PATIENCE = 5  # seconds that a process has to end when it is asked to


def allowed_cores() -> List[int]:
    """The cores that this process may run on."""
    if hasattr(os, 'sched_getaffinity'):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def cores_to_pin(settings: Settings) -> Optional[List[int]]:
    """The first of the allowed cores, one for each thread; None if threads are not to be pinned, as for a GPU.

    (The thread that queues a GPU's work would share its one core with all that CUDA starts.)

    Raises:
        ValueError: If there are fewer than ``settings.threads``.
    """
    if not settings.pin or settings.torch_device.type != 'cpu':
        return None
    allowed = allowed_cores()
    threads = settings.threads or min(torch.get_num_threads(), len(allowed))
    if threads > len(allowed):
        raise ValueError(
            f'threads={threads}, but this process may run on {len(allowed)} cores, and each thread is pinned to one. '
            f'Give --threads {len(allowed)}, or --no-pin.'
        )
    return allowed[:threads]


def environment(
    allocator: Optional[str],
    library: Optional[str],
    cores: Optional[Sequence[int]],
    env: Mapping[str, str] = os.environ,
) -> Dict[str, str]:
    """``env`` for a worker: it imports what this process imports; see :func:`preloading` for the allocator.

    OpenMP reads once, when torch is loaded, which core to keep each thread on. The variables are those of its standard, for
    GNU's runtime, which torch brings along, and for Intel's alike; what ``env`` says of it in another way is taken out.
    """
    env = preloading(allocator, library, env)
    env.update(PYTHONPATH=os.pathsep.join(p or os.getcwd() for p in sys.path), PYTHONSAFEPATH='1')
    if cores is not None:
        for variable in PINNING:
            env.pop(variable, None)
        places = ','.join(f'{{{core}}}' for core in cores)
        env.update(OMP_PROC_BIND='close', OMP_PLACES=places, OMP_NUM_THREADS=str(len(cores)))
    return env


def measure_in_process(
    job: Dict[str, Any], env: Mapping[str, str], cores: Optional[Sequence[int]], step: Step, name: str = 'the process'
) -> Dict[str, Any]:
    """Runs :func:`mmslab.benchmark.worker.work` in a fresh process, and leaves none behind however it ends.

    Args:
        job (dict): What to measure; travels as JSON, as does what comes back.
        env (mapping): Its environment, see :func:`environment`.
        cores (sequence[int], optional): The cores that it may run on.
        step (callable): Told of each step that it makes.
        name (str): Of the process, for errors.

    Raises:
        ValueError, OSError, ImportError: For input that makes no sense, as :func:`mmslab.benchmark.run.run` in this process.
        ChildProcessError: If the process ends in any other way, with the last lines that it wrote.
    """
    with tempfile.TemporaryDirectory(prefix='mmslab-benchmark-') as folder:
        given, result, log = (Path(folder) / n for n in ('job.json', 'result.json', 'log.txt'))
        given.write_text(json.dumps(job))
        reading, writing = os.pipe()
        with open(reading) as steps, open(log, 'wb') as output:
            try:
                command = [*WORKER, str(given), str(result), str(writing)]
                with _affinity(cores):
                    process = subprocess.Popen(
                        command,
                        env=dict(env),
                        pass_fds=(writing,),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                    )
            finally:
                os.close(writing)
            try:
                for line in steps:  # until it closes its end
                    step(*json.loads(line))
                code = process.wait()
            finally:
                _end(process)
        found = json.loads(result.read_text()) if code == 0 and result.is_file() else None
        if found is None:
            how = f'signal {-code} ({signal.strsignal(-code)})' if code < 0 else f'exit code {code}'
            said = '\n'.join(log.read_text(errors='replace').splitlines()[-LAST_LINES:])
            raise ChildProcessError(f'{name} ended with {how} before it had measured all. Its last lines:\n{said}')
    if 'error' in found:
        raise ERRORS.get(found['kind'], ValueError)(found['error'])
    return found


@contextmanager
def _affinity(cores: Optional[Sequence[int]]) -> Iterator[None]:
    """What is started within it inherits these cores; the thread that starts it gets its own back."""
    if cores is None or not hasattr(os, 'sched_setaffinity'):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _end(process: subprocess.Popen) -> None:
    """Ends it if it still runs, as after Ctrl-C."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
