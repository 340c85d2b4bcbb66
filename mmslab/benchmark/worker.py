"""One of the processes that a benchmark measures in: ``python -m mmslab.benchmark.worker JOB RESULT PIPE``.

JOB and RESULT are JSON files; PIPE is a file descriptor, which gets a line of JSON for each step that is made. Input that makes
no sense becomes RESULT's 'error' and its 'kind'; any other exception ends the process with its trace.
"""

import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Dict

from ..errors import input_errors
from .allocators import current_allocator
from .models import Settings, Subject, check_inputs
from .processes import Step
from .report import machine
from .run import measure_here


def work(job: Dict[str, Any], step: Step) -> Dict[str, Any]:
    """Measures what :func:`mmslab.benchmark.run.run` asks for: 'subjects', 'measurement' and 'machine', for JSON.

    Raises:
        ValueError: If this process has not the allocator that it was to be started with, and whatever measuring raises.
    """
    given = job['settings']
    settings = Settings(**{**given, 'image': given['image'] and tuple(given['image'])})
    found = current_allocator()
    if settings.allocator not in (None, found['name']):
        raise ValueError(
            f'allocator {settings.allocator!r} was asked for, but the process has {found["name"]} ({found["library"]}): '
            f'LD_PRELOAD={os.environ.get("LD_PRELOAD", "")!r} or /etc/ld.so.preload is in the way. Preload a library of this '
            "machine's architecture, or leave --allocator out."
        )
    configs, checkpoints = job['configs'], job['checkpoints']
    read = check_inputs(configs, checkpoints, settings)
    subjects, measured = measure_here(
        configs, read, settings, checkpoints, job['trust_checkpoint'], step, job.get('part')
    )
    names = [f.name for f in fields(Subject) if f.name != 'call']
    return dict(
        subjects=[{name: getattr(s, name) for name in names} for s in subjects],
        measurement={f.name: getattr(measured, f.name).tolist() for f in fields(measured)} if measured else None,
        machine=machine(settings),
    )


def main(job: str, result: str, pipe: str) -> None:
    os.set_inheritable(int(pipe), False)  # whoever reads it waits until no process holds it
    with open(int(pipe), 'w', buffering=1) as steps:
        try:
            with input_errors():
                done = work(
                    json.loads(Path(job).read_text()), lambda *now: print(json.dumps(now), file=steps, flush=True)
                )
        except SystemExit as stop:  # by input_errors, in the handler of what was raised
            done = dict(error=str(stop.code).removeprefix('error: '), kind=type(stop.__context__).__name__)
        Path(result).write_text(json.dumps(done))


if __name__ == '__main__':
    main(*sys.argv[1:])
