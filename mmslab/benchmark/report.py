"""What a benchmark found: as a table, as JSON, as a drawing of accuracy against time."""

import json
import os
import platform
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import mmcv
import numpy as np
import torch
from rich import box
from rich.table import Table

from ..version import __version__
from .allocators import advice, current_allocator
from .latency import Measurement, over_processes, ratio, ratio_of_means, statistics
from .models import GROUPS, Settings, Subject
from .processes import allowed_cores

PathLike = Union[str, os.PathLike]
DRAWINGS = ('.png', '.pdf', '.svg')
MIB = 2**20
MANY_FAULTS = 1000  # of a forward: about a millisecond
MARKERS = dict(
    zip(
        GROUPS,
        (('*', 'red'), ('s', 'orange'), ('D', 'blue'), ('^', 'purple'), ('P', 'brown'), ('o', 'gray'), ('v', 'green')),
    )
)


@dataclass
class Report:
    """Rows in the order that they were asked for, and what each process measured of them; nothing where nothing was timed."""

    settings: Settings
    subjects: List[Subject]
    measured: List[Measurement] = field(default_factory=list)
    machine: Dict[str, Any] = field(default_factory=dict)
    left_out: List[str] = field(default_factory=list)  # of the drawing

    @property
    def sizes_differ(self) -> bool:
        return len({s.padded for s in self.subjects}) > 1

    def rows(self) -> List[Dict[str, Any]]:
        """What the JSON has of each row.

        Times are in ms, of a batch, over the rounds of all processes, as are the mean page faults and the mean time in the kernel
        of one forward. Ratios are of times, to the first row: within one process with an interval over its rounds, of several
        with one over the processes.
        """
        found = []
        for i, s in enumerate(self.subjects):
            row = dict(
                name=s.name,
                config=s.config,
                checkpoint=s.checkpoint,
                folded=s.folded,
                image=list(s.image),
                padded=list(s.padded),
                params=s.params,
                flops=s.flops,
                peak_memory_bytes=s.peak_memory,
                detections=s.detections,
                paper=s.paper,
            )
            if self.measured:
                row.update(self._measured_of(i))
            found.append(row)
        return found

    def _measured_of(self, i: int) -> Dict[str, Any]:
        seconds = np.concatenate([m.seconds[i] for m in self.measured])
        processes = []
        for m in self.measured:
            middle, interval = (ratio if self.settings.protocol is None else ratio_of_means)(m.seconds[i], m.seconds[0])
            processes.append(
                dict(
                    ratio=middle,
                    ratio_interval=interval,
                    rounds_ms=(m.seconds[i] * 1e3).tolist(),
                    rounds_system_ms=(m.system_seconds[i] * 1e3).tolist(),
                    rounds_faults=m.faults[i].astype(int).tolist(),
                )
            )
        found = dict(
            ms=statistics(seconds * 1e3),
            system_ms=float(np.mean([m.system_seconds[i] for m in self.measured])) * 1e3,
            faults=float(np.mean([m.faults[i] for m in self.measured])),
        )
        if len(processes) == 1:
            found.update(ratio=middle, ratio_interval=interval, ratio_interval_over='rounds')
        else:
            spread = over_processes([p['ratio'] for p in processes])
            found.update(
                ratio=spread.median,
                ratio_range=(spread.low, spread.high),
                ratio_mean=spread.mean,
                ratio_interval=spread.interval,
                ratio_interval_over='processes',
            )
        if self.sizes_differ:
            s, first = self.subjects[i], self.subjects[0]
            found['ratio_per_pixel'] = found['ratio'] * first.padded[0] * first.padded[1] / (s.padded[0] * s.padded[1])
        if self.settings.mode == 'throughput':
            found['images_per_second'] = self.settings.batch_size / float(np.mean(seconds))
        return dict(found, processes=processes)

    def notes(self) -> List[str]:
        """What has to be said below the table."""
        notes = list(dict.fromkeys(note for subject in self.subjects for note in subject.notes))
        found = [subject.detections for subject in self.subjects if subject.detections is not None]
        if found:
            counts = '; '.join(', '.join(map(str, row)) for row in found)
            how = '' if self.subjects[0].checkpoint else ' (random weights: the score threshold is set to have so many)'
            notes.append(f'detections in an image, row by row: {counts}{how}.')
        if self.measured and len(self.subjects) > 1:
            notes += self._notes_on_ratios()
        if self.measured and self.sizes_differ:
            notes.append('per pixel: the ratio of times divided by the ratio of pixels, padded ones included.')
        if self.measured:
            notes.append(
                'faults: minor page faults of one forward, each a page that the kernel maps at its first touch; sys: CPU time in '
                'the kernel of one forward, all threads together. Means.'
            )
            glibc = self.machine.get('allocator', {}).get('name') == 'glibc'
            if glibc and max(row['faults'] for row in self.rows()) >= MANY_FAULTS:
                notes.append(advice())
        notes.append(
            'peak memory: beyond weights and input, in one forward. GFLOPs: multiply-adds of one image, counted unfolded.'
        )
        if any(self.settings.mode in subject.paper for subject in self.subjects):
            notes.append("V100: the paper's figure, on another machine.")
        if self.left_out:
            notes.append(f'not drawn, since the paper has no accuracy for them: {", ".join(self.left_out)}.')
        return notes

    def _notes_on_ratios(self) -> List[str]:
        n = len(self.measured)
        if self.settings.protocol is not None:
            of = 'mean time of the row over that of the first row'
        else:
            of = 'median over the rounds of the time of the row over that of the first row in the same round'
        if n == 1:
            more = '' if self.settings.protocol else ', which --processes 5 shows'
            return [
                f'ratio: {of}, and its 95% bootstrap interval over the rounds of one process; between processes it varies '
                f'more{more}.'
            ]
        notes = [
            f'ratio: {of}, of {n} processes the median and the range (smallest-largest). By process, and the mean over '
            'the processes with its 95% t interval:'
        ]
        for row in self.rows()[1:]:
            each = ', '.join(f'{p["ratio"]:.3f}' for p in row['processes'])
            low, high = row['ratio_interval']
            notes.append(f'  {row["name"]}: {each}; {row["ratio_mean"]:.3f} ({low:.3f} to {high:.3f})')
        return notes


def machine(settings: Settings) -> Dict[str, Any]:
    """Processor, GPU, allocator and versions of this process, for which a measurement holds; 'pinned' are cores of threads."""
    cuda = settings.torch_device.type == 'cuda'
    try:
        from mmdet import __version__ as mmdet
    except ImportError:
        mmdet = None
    return dict(
        cpu=_processor(),
        cores=len(allowed_cores()),
        threads=torch.get_num_threads(),
        pinned=None,
        allocator=current_allocator(),
        gpu=torch.cuda.get_device_name(settings.torch_device) if cuda else None,
        cuda=torch.version.cuda if cuda else None,
        python=platform.python_version(),
        torch=torch.__version__,
        mmcv=mmcv.__version__,
        mmdet=mmdet,
        mmslab=__version__,
    )


def _processor() -> str:
    cpuinfo = Path('/proc/cpuinfo')
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    models = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
    return models[0] if models else platform.processor() or platform.machine()


def machine_line(machine: Dict[str, Any]) -> str:
    """The same in a line."""
    gpu = f'{machine["gpu"]}, CUDA {machine["cuda"]}; ' if machine['gpu'] else ''
    versions = ', '.join(f'{k} {machine[k]}' for k in ('torch', 'mmcv', 'mmdet', 'mmslab') if machine[k])
    pinned = f' on cores {_ranges(machine["pinned"])}' if machine['pinned'] else ''
    return (
        f'{gpu}{machine["cpu"]}, {machine["cores"]} cores, {machine["threads"]} threads{pinned}; '
        f'{_allocator(machine["allocator"])}; {versions}'
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending integers, those in a row as '0-3'."""
    groups: List[List[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ', '.join(f'{g[0]}-{g[-1]}' if len(g) > 1 else f'{g[0]}' for g in groups)


def _allocator(found: Dict[str, Any]) -> str:
    if found['name'] is None:
        return 'allocator unknown'
    variables = ' '.join(f'{k}={v}' for k, v in found['variables'].items())
    return (f'{found["name"]} malloc' if found['name'] == 'glibc' else found['name']) + (
        variables and f' ({variables})'
    )


def settings_line(report: Report) -> str:
    """What was measured, and how."""
    s = report.settings
    what = {
        'latency': 'latency',
        'throughput': f'throughput at batch size {s.batch_size}',
        'flops': 'parameters and FLOPs',
    }
    of = 'backbone' if s.scope == 'backbone' else 'whole model'
    sizes = dict.fromkeys((r.image, r.padded) for r in report.subjects)
    images = ' and '.join(f'{h}x{w}' + (f' padded to {p[0]}x{p[1]}' if p != (h, w) else '') for (h, w), p in sizes)
    how = [s.dtype, s.device] + [
        o.replace('_', '-') for o in ('compile', 'cuda_graph', 'channels_last') if getattr(s, o)
    ]
    if s.allocator is not None:
        how.append(s.allocator)
    if report.measured:
        n = len(report.measured)
        rounds = f'{s.rounds} rounds after {s.warmup}' + (' in a process' if n == 1 else f' in each of {n} processes')
        how.append(rounds + (', interleaved' if len(report.subjects) > 1 else ''))
    protocol = '' if s.protocol is None else "the paper's protocol (one image, mean of 100 rounds): "
    return f'{protocol}{what[s.mode]} of the {of}, {images}, {", ".join(how)}'


def table(report: Report) -> Table:
    """The rows as a table: times, what they are in the kernel, ratio, parameters, FLOPs, peak memory, the paper's figure."""
    mode, timed = report.settings.mode, bool(report.measured)
    over = '95%' if len(report.measured) < 2 else 'range'
    result = Table(
        title=settings_line(report), box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, title_justify='left'
    )
    result.add_column('model', justify='left', overflow='fold')
    columns = (
        ['mean\nms', 'median\nms', 'p90\nms', 'std\nms', 'sys\nms', 'faults\n', f'ratio\n({over})'] if timed else []
    )
    if timed and report.sizes_differ:
        columns.append('per\npixel')
    columns = (['images\n/s'] if mode == 'throughput' else []) + columns + ['params\nM', 'GFLOPs\n', 'peak\nMiB']
    unit = {'latency': 'ms', 'throughput': 'images/s'}.get(mode)
    for column in columns + ([f'V100\n{unit}'] if unit else []):
        result.add_column(column, justify='right', no_wrap=True)
    for i, row in enumerate(report.rows()):
        cells = [row['name']]
        if mode == 'throughput':
            cells.append(f'{row["images_per_second"]:.1f}')
        if timed:
            cells += [_digits(row['ms'][k]) for k in ('mean', 'median', 'p90', 'std')]
            cells += [_digits(row['system_ms']), f'{row["faults"]:.0f}']
            low, high = row.get('ratio_range', row['ratio_interval'])
            cells.append(f'{row["ratio"]:.3f} ({low:.3f}-{high:.3f})' if i else '1')
            if report.sizes_differ:
                cells.append(f'{row["ratio_per_pixel"]:.3f}')
        cells.append(f'{row["params"] / 1e6:.2f}')
        cells.append('-' if row['flops'] is None else _digits(row['flops'] / 1e9))
        cells.append(f'{row["peak_memory_bytes"] / MIB:.1f}')
        if unit:
            cells.append(f'{row["paper"][mode]:g}' if mode in row['paper'] else '-')
        result.add_row(*cells)
    return result


def _digits(value: float) -> str:
    """Four digits, or to a thousandth."""
    return f'{value:.{min(3, max(0, 4 - len(str(int(value)))))}f}'


def check_output(path: Optional[PathLike], name: str, suffixes: Tuple[str, ...], force: bool = False) -> None:
    """Checks a file that will be written, before anything is measured.

    Raises:
        ValueError: If its ending is none of ``suffixes``.
        FileExistsError: If it exists and ``force`` is not set.
        OSError: If its folder does not exist or cannot be written.
    """
    if path is None:
        return
    target = Path(path)
    if target.suffix.lower() not in suffixes:
        raise ValueError(f'{name} must name a file that ends in {" or ".join(suffixes)}, but got {str(path)!r}.')
    if target.is_dir():
        raise OSError(f'{name} {str(path)!r} is a folder. Choose another name.')
    if target.exists() and not force:
        raise FileExistsError(f'{name} {str(path)!r} exists. Choose another name, or pass --force to replace it.')
    try:
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as e:
        raise OSError(f'{name} {str(path)!r} cannot be written ({e.strerror}). Choose a folder of your own.') from e


def write_json(reports: Sequence[Report], path: PathLike) -> None:
    """Settings, machine, notes and rows of a report, with each round's time; of several, a list of these as 'reports'."""
    each = [dict(settings=asdict(r.settings), machine=r.machine, notes=r.notes(), rows=r.rows()) for r in reports]
    content = each[0] if len(each) == 1 else dict(reports=each)
    Path(path).write_text(json.dumps(content, indent=2) + '\n')


def check_drawable(figures: Sequence[Dict[str, Any]]) -> None:
    """Raises ValueError unless one of the rows has an accuracy of the paper, and all that have it the same one."""
    metrics = sorted({f['metric'] for f in figures if 'metric' in f})
    if not metrics:
        raise ValueError(
            '--plot draws the accuracies of the paper, which has none for these configs. Give some of its rows, or leave it out.'
        )
    if len(metrics) > 1:
        raise ValueError(f'--plot has one axis for {" and ".join(metrics)}. Draw detectors and classifiers apart.')


def draw(report: Report, path: PathLike) -> List[str]:
    """Draws the paper's accuracies against the measured times, as its Figures 4 and 5 do; rows that it has none for are left out.

    Detectors and classifiers against the median latency in ms, or against images per second. A folded row is a filled
    marker, an unfolded twin an open one.

    Returns:
        list[str]: The names of the rows that were left out.
    """
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    mode, device = report.settings.mode, report.machine['gpu'] or report.machine['cpu']
    rows = list(zip(report.subjects, report.rows()))
    drawn = [(s, r) for s, r in rows if 'accuracy' in s.paper]
    twins = {s.config for s, _ in drawn if s.folded}
    figure, ax = plt.subplots(figsize=(9, 6), layout='constrained')
    xs = [row['images_per_second'] if mode == 'throughput' else row['ms']['median'] for _, row in drawn]
    for x, (subject, _) in zip(xs, drawn):
        y = subject.paper['accuracy']
        marker, colour = MARKERS[subject.group]
        colour = f'tab:{colour}'
        filled = subject.folded or subject.config not in twins
        ax.plot(x, y, marker, color=colour, mfc=colour if filled else 'none', ms=8, label=subject.group)
        place = dict(xytext=(6, 5)) if x <= (min(xs) + max(xs)) / 2 else dict(xytext=(-6, 5), ha='right')
        ax.annotate(subject.name, (x, y), **place, textcoords='offset points', fontsize='x-small')
    what = 'backbone' if report.settings.scope == 'backbone' else 'whole model'
    speed = (
        f'images per second at batch size {report.settings.batch_size}'
        if mode == 'throughput'
        else 'median latency in ms'
    )
    metric = {'box AP': 'COCO box AP', 'Top 1 Accuracy': 'ImageNet top-1 in %'}[drawn[0][0].paper['metric']]
    ax.set(xlabel=f'{speed}, {what}, measured here: {device}', ylabel=f"{metric}: the paper's, not ours")
    ax.margins(0.2)
    ax.grid(alpha=0.3)
    handles, labels = ax.get_legend_handles_labels()
    once = dict(zip(reversed(labels), reversed(handles)))
    ax.legend(once.values(), once.keys())
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return [s.name for s, _ in rows if 'accuracy' not in s.paper]
