"""A whole benchmark: checks, builds, tries, measures."""

import os
from typing import Optional, Sequence, Union

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .. import checkpoints as weights
from .latency import cpu_timer, cuda_timer, measure
from .models import Settings, check_inputs, names_of, paper_figures, prepare, quiet
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

    Args:
        configs (sequence[str | Path]): Config files, or ``package::path`` of an installed OpenMMLab package.
        settings (Settings): What to measure, and how.
        checkpoints (sequence[str | Path], optional): One for each config, in their order. By default random weights.
        json (str | Path, optional): A .json file to write, with each round's time.
        plot (str | Path, optional): A .png, .pdf or .svg to draw the paper's accuracy against the measured time into.
        force (bool): Whether to replace these files.
        trust_checkpoint (bool): See :func:`mmslab.checkpoints.load_file`.

    Raises:
        FileNotFoundError, FileExistsError, OSError, ValueError: For input that is missing or makes no sense, a file that
            cannot be written, or a model that cannot run, before anything is measured.
    """
    check_output(json, '--json', ('.json',), force)
    check_output(plot, '--plot', DRAWINGS, force)
    if plot is not None and settings.mode == 'flops':
        raise ValueError(
            '--plot draws against a time, and --flops measures none. Use it with --latency or --throughput.'
        )
    found = check_inputs(configs, checkpoints, settings)
    if plot is not None:
        check_drawable([paper_figures(c) for c in configs])
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    names, subjects = names_of(configs), []
    columns = (TextColumn('{task.description}'), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with weights.use_safe_loading(trust_checkpoint), Progress(*columns, disable=not show_progress) as progress:
        task = progress.add_task('building', total=len(configs) * len(settings.scales))
        for i, cfg in enumerate(found):
            for scale in settings.scales:
                saved = checkpoints[i] if checkpoints else None
                subjects += prepare(names[i], configs[i], cfg, settings, saved, scale)
                progress.advance(task)
        seconds = None
        if settings.mode != 'flops':
            task = progress.add_task('measuring', total=len(subjects) * (settings.rounds + settings.warmup))
            timer = cuda_timer if settings.torch_device.type == 'cuda' else cpu_timer
            calls, labels = [s.call for s in subjects], [s.name for s in subjects]
            with quiet():
                seconds = measure(
                    calls, settings.rounds, settings.warmup, timer, labels, lambda: progress.advance(task)
                )
    report = Report(settings, subjects, seconds, machine(settings))
    if plot is not None:
        report.left_out = draw(report, plot)
    if json is not None:
        write_json(report, json)
    return report
