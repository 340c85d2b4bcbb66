"""A whole benchmark: checks, builds, tries, measures."""

import os
from dataclasses import asdict, replace
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from mmengine.config import Config
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .. import checkpoints as weights
from .allocators import find_library
from .latency import Measurement, cpu_timer, cuda_timer, measure
from .models import Settings, Subject, check_inputs, names_of, paper_figures, prepare, quiet
from .processes import Step, allowed_cores, cores_to_pin, environment, measure_in_process
from .report import DRAWINGS, Report, check_drawable, check_output, draw, machine, write_json

PathLike = Union[str, os.PathLike]


def run(
    configs: Sequence[PathLike],
    settings: Settings,
    checkpoints: Optional[Sequence[PathLike]] = None,
    json: Optional[PathLike] = None,
    plot: Optional[PathLike] = None,
    force: bool = False,
    trust_checkpoint: bool = False,
    show_progress: bool = True,
) -> Report:
    """Measures models interleaved, round by round, after all of them have been built and have run once.

    With ``settings.processes`` that is done in each of so many fresh processes, else in this one.

    Args:
        configs (sequence[str | Path]): Configs, by path or name.
        settings (Settings): What to measure, and how.
        checkpoints (sequence[str | Path], optional): One for each config, in their order. By default random weights.
        json (str | Path, optional): A .json file to write, with each round's time.
        plot (str | Path, optional): A .png, .pdf or .svg to draw the paper's accuracy against the measured time into.
        force (bool): Whether to replace these files.
        trust_checkpoint (bool): See :func:`mmslab.checkpoints.load_file`.

    Raises:
        FileNotFoundError, FileExistsError, OSError, ValueError: For input that is missing or makes no sense, a file that
            cannot be written, or a model that cannot run, before anything is measured.
        ChildProcessError: If one of the processes crashes.
    """
    given = (settings.allocator,)
    return run_with_allocators(
        configs, settings, given, checkpoints, json, plot, force, trust_checkpoint, show_progress
    )[0]


def run_with_allocators(
    configs: Sequence[PathLike],
    settings: Settings,
    allocators: Sequence[Optional[str]],
    checkpoints: Optional[Sequence[PathLike]] = None,
    json: Optional[PathLike] = None,
    plot: Optional[PathLike] = None,
    force: bool = False,
    trust_checkpoint: bool = False,
    show_progress: bool = True,
) -> List[Report]:
    """A :func:`run` with each of several allocators in place of ``settings.allocator``, their processes taking turns."""
    if not allocators or len(set(allocators)) < len(allocators):
        raise ValueError(f'--allocator must name different ones, but got {", ".join(map(str, allocators)) or "none"}.')
    each = [replace(settings, allocator=name) for name in allocators]
    check_output(json, '--json', ('.json',), force)
    check_output(plot, '--plot', DRAWINGS, force)
    if plot is not None and settings.mode == 'flops':
        raise ValueError(
            '--plot draws against a time, and --flops measures none. Use it with --latency or --throughput.'
        )
    if plot is not None and len(each) > 1:
        raise ValueError(f'--plot draws one table, but --allocator names {len(each)}. Name one, or leave --plot out.')
    found = check_inputs(configs, checkpoints, settings)
    if plot is not None:
        check_drawable([paper_figures(c) for c in configs])
    columns = (TextColumn('{task.description}'), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # twice a second: what draws the bars takes time from what is measured
    console = None if show_progress else Console(quiet=True)  # rich before 14.3 ends a disabled one with an empty line
    with Progress(*columns, console=console, disable=not show_progress, refresh_per_second=2) as progress:
        if settings.processes and settings.mode != 'flops':
            reports = _in_processes(configs, each, checkpoints, trust_checkpoint, progress)
        else:
            step = _bars(progress)
            subjects, measured = measure_here(configs, found, settings, checkpoints, trust_checkpoint, step)
            reports = [Report(settings, subjects, [measured] if measured else [], machine(settings))]
    if plot is not None:
        reports[0].left_out = draw(reports[0], plot)
    if json is not None:
        write_json(reports, json)
    return reports


def measure_here(
    configs: Sequence[PathLike],
    read: Sequence[Config],
    settings: Settings,
    checkpoints: Optional[Sequence[PathLike]],
    trust_checkpoint: bool,
    step: Step,
    part: Optional[str] = None,
) -> Tuple[List[Subject], Optional[Measurement]]:
    """Builds the models of ``configs``, which :func:`check_inputs` has ``read``, and measures them in this process.

    Args:
        part (str, optional): 'counts', FLOPs and memory alone; 'times', all but these. By default both.

    Returns:
        tuple: Their rows, and what was measured of them; None if ``settings.mode`` is 'flops', or ``part`` is 'counts'.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    names, subjects = names_of(configs), []
    advance = _counter(step, 'building', len(configs) * len(settings.scales))
    with weights.use_safe_loading(trust_checkpoint):
        for i, cfg in enumerate(read):
            for scale in settings.scales:
                saved = checkpoints[i] if checkpoints else None
                subjects += prepare(names[i], configs[i], cfg, settings, saved, scale, part != 'times')
                advance()
    if settings.mode == 'flops' or part == 'counts':
        return subjects, None
    advance = _counter(step, 'measuring', len(subjects) * (settings.rounds + settings.warmup))
    timer = cuda_timer if settings.torch_device.type == 'cuda' else cpu_timer
    calls, labels = [s.call for s in subjects], [s.name for s in subjects]
    with quiet():
        return subjects, measure(calls, settings.rounds, settings.warmup, timer, labels, advance)


def _in_processes(
    configs: Sequence[PathLike],
    each: Sequence[Settings],
    checkpoints: Optional[Sequence[PathLike]],
    trust_checkpoint: bool,
    progress: Progress,
) -> List[Report]:
    """A report for each settings, of which all but the allocator are the same.

    Several processes leave FLOPs and memory to one more, before them: it makes them shorter, and all alike.
    """
    total, cores = each[0].processes, cores_to_pin(each[0])
    threads = len(cores) if cores else each[0].threads
    environments = [environment(s.allocator, s.allocator and find_library(s.allocator), cores) for s in each]
    several = total * len(each) > 1

    def measured(name: str, settings: Settings, env: Dict[str, str], part: Optional[str]) -> Dict[str, Any]:
        job = dict(
            configs=[str(c) for c in configs],
            settings=asdict(replace(settings, threads=threads)),
            checkpoints=checkpoints and [str(c) for c in checkpoints],
            trust_checkpoint=trust_checkpoint,
            part=part,
        )
        return measure_in_process(job, env, cores, _bars(progress, f'{name}: ' if several else ''), name)

    counted = measured('counting', each[0], environments[0], 'counts')['subjects'] if several else None
    done: List[List[Dict[str, Any]]] = [[] for _ in each]
    for number in range(1, total + 1):
        for settings, env, results in zip(each, environments, done):
            name = f'process {number} of {total}' + (f', {settings.allocator}' if settings.allocator else '')
            results.append(measured(name, settings, env, 'times' if several else None))
    return [
        _report(settings, counted or results[0]['subjects'], results, cores) for settings, results in zip(each, done)
    ]


def _report(
    settings: Settings, rows: List[Dict[str, Any]], results: List[Dict[str, Any]], cores: Optional[List[int]]
) -> Report:
    """What the processes said, together. The machine is the first one's: the others' are the same."""
    subjects = [Subject(**{**row, 'image': tuple(row['image']), 'padded': tuple(row['padded'])}) for row in rows]
    measured = [Measurement(**{k: np.array(v) for k, v in r['measurement'].items()}) for r in results]
    found = dict(
        results[0]['machine'], cores=len(allowed_cores()), pinned=cores
    )  # there, each thread sees its own core
    return Report(settings, subjects, measured, found)


def _bars(progress: Progress, prefix: str = '') -> Step:
    """Shows each stage as a bar."""
    tasks: Dict[str, Any] = {}

    def step(stage: str, done: int, total: int) -> None:
        if stage not in tasks:
            tasks[stage] = progress.add_task(prefix + stage, total=total)
        progress.update(tasks[stage], completed=done)

    return step


def _counter(step: Step, stage: str, total: int):
    """A call for each step that is made."""
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        step(stage, done, total)

    step(stage, 0, total)
    return advance
