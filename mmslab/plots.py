"""Curves of a training, from the scalars that mmengine's LocalVisBackend writes."""

import json
import os
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple, Union

import cv2
import numpy as np

from .hooks.bn_recalibration import BEFORE

Curve = Tuple[List[int], List[float]]


def read_scalars(path: Union[str, os.PathLike]) -> Dict[str, Curve]:
    """Each scalar in a ``scalars.json`` as (steps, values). Validation metrics are logged by epoch, the rest by iteration."""
    curves: Dict[str, Curve] = {}
    for line in Path(path).read_text().splitlines():
        entry = json.loads(line)
        step = entry.get('step', entry.get('iter'))
        for name, value in entry.items():
            if isinstance(value, (int, float)) and name not in ('step', 'iter', 'epoch'):
                steps, values = curves.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
    return curves


def draw_curves(scalars: Union[str, os.PathLike], out: Union[str, os.PathLike], iters_per_epoch: int) -> None:
    """Draws loss, gamma and AP50 over the iterations of a training into a PNG, AP50 before a recalibration as open markers.

    Args:
        scalars (str | Path): A ``scalars.json``.
        out (str | Path): The PNG to write.
        iters_per_epoch (int): To put the validations, counted in epochs, on the same axis.
    """
    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    curves = read_scalars(scalars)
    figure, axes = plt.subplots(3, 1, figsize=(8, 8), sharex=True, layout='constrained')
    axes[0].plot(*curves['loss'], color='tab:gray', lw=1)
    axes[0].set(ylabel='training loss', ylim=(0, None))
    axes[1].plot(*curves['gamma'], color='tab:purple')
    axes[1].set(ylabel='gamma', ylim=(-0.05, 1.05))
    axes[1].annotate('LayerNorm', (0.99, 0.9), xycoords='axes fraction', ha='right', va='top', color='gray')
    axes[1].annotate('RepBN', (0.99, 0.1), xycoords='axes fraction', ha='right', va='bottom', color='gray')
    for kind, colour in (('bbox', 'tab:blue'), ('segm', 'tab:orange')):
        name = f'coco/{kind}_mAP_50'
        if name in curves:
            epochs, values = curves[name]
            axes[2].plot([e * iters_per_epoch for e in epochs], values, 'o-', color=colour, label=f'{kind} AP50')
        if f'{BEFORE}/{name}' in curves:
            epochs, values = curves[f'{BEFORE}/{name}']
            steps = [e * iters_per_epoch for e in epochs]
            axes[2].plot(steps, values, 'o', mfc='none', color=colour, label=f'{kind}, before recalibration')
    axes[2].set(ylabel='AP50', xlabel='iteration', ylim=(0, 1))
    axes[2].legend(loc='upper left', fontsize='small')
    for ax in axes:
        ax.grid(alpha=0.3)
    figure.savefig(out, dpi=120)
    plt.close(figure)


def draw_sheet(images: Sequence[Path], out: Union[str, os.PathLike], columns: int = 4, side: int = 300) -> None:
    """Puts images beside and below each other into one, each ``side`` pixels wide and high."""
    cells = [cv2.resize(cv2.imread(str(p)), (side, side), interpolation=cv2.INTER_AREA) for p in images]
    cells += [np.full_like(cells[0], 255)] * (-len(cells) % columns)
    rows = [np.hstack(cells[i : i + columns]) for i in range(0, len(cells), columns)]
    if not cv2.imwrite(str(out), np.vstack(rows)):
        raise OSError(f'out: {str(out)!r} cannot be written.')


def read_handover(work_dir: Union[str, os.PathLike]) -> List[Dict[str, Any]]:
    """What HandoverMonitorHook has measured in a run, resumed ones too: ``step`` and ``layers``, in order.

    Raises:
        FileNotFoundError: If there is nothing of the hook in ``work_dir``.
        ValueError: For a file that is not the hook's.
    """
    files = sorted(Path(work_dir).glob('**/vis_data/handover.json'))
    if not files:
        raise FileNotFoundError(
            f'work_dir: {str(work_dir)!r} has no handover.json. Train with dict(type="HandoverMonitorHook") in custom_hooks.'
        )
    found: Dict[int, Dict[str, Any]] = {}
    for file in files:  # a resumed run measures again what came after its checkpoint
        try:
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            found.update({line['step']: line for line in lines if line['layers']})
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(
                f'{file} is no file of HandoverMonitorHook ({e!r}). Give the work_dir of a training.'
            ) from e
    return [found[step] for step in sorted(found)]


def draw_handover(work_dir: Union[str, os.PathLike], out: Union[str, os.PathLike]) -> None:
    """Draws what HandoverMonitorHook has measured as pictures of layers by time, into a PNG.

    Args:
        work_dir (str | Path): Of a training.
        out (str | Path): The PNG to write.

    Raises:
        FileNotFoundError, ValueError: See :func:`read_handover`.
    """
    found = read_handover(work_dir)

    import matplotlib

    matplotlib.use('Agg')
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    layers = list(dict.fromkeys(name for line in found for name in line['layers']))
    steps = [line['step'] for line in found]
    titles = dict(
        distance='|LN(x) - RepBN(x)| / |LN(x)|',
        outliers='share of tokens beyond ten sigma',
        eta='eta',
        variance='smallest running variance',
    )
    figure, axes = plt.subplots(2, 2, figsize=(14, 4 + 0.16 * len(layers)), sharey=True, layout='constrained')
    for ax, (field, title) in zip(axes.flat, titles.items()):
        values = np.full((len(layers), len(steps)), np.nan)
        for column, line in enumerate(found):
            for name, measured in line['layers'].items():
                values[layers.index(name), column] = measured[field]
        positive = values[np.isfinite(values) & (values > 0)]
        log = field in ('distance', 'variance') and positive.size > 0
        image = ax.imshow(
            values,
            aspect='auto',
            interpolation='nearest',
            norm=LogNorm(positive.min(), max(positive.max(), positive.min() * 1.01)) if log else None,
            extent=(-0.5, len(steps) - 0.5, len(layers) - 0.5, -0.5),
        )
        shown = range(0, len(steps), max(1, len(steps) // 8))
        ax.set(title=title, xlabel='iteration', xticks=list(shown), xticklabels=[steps[i] for i in shown])
        ax.set_yticks(range(len(layers)), layers, fontsize=6)
        figure.colorbar(image, ax=ax)
    figure.savefig(out, dpi=110)
    plt.close(figure)
