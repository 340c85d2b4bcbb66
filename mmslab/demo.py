"""The whole way on a small scale: data, training, recalibration, evaluation, drawings, folding, timing."""

import contextlib
import io
import os
import shutil
import time
from pathlib import Path
from typing import Any, Dict, Optional, Union

import cv2
from rich.console import Console
from rich.table import Table

from .apis import build_tester, build_trainer
from .benchmark.models import Settings
from .benchmark.report import machine_line
from .benchmark.report import table as report_table
from .benchmark.run import run
from .configs import find_config
from .data.checks import check_writable
from .data.shapes import make_shapes
from .deploy.compare import table as differences_table
from .deploy.convert import deploy
from .infer import infer
from .layers.norm import prepbn_modules
from .plots import draw_curves, draw_sheet, read_scalars

CONFIG = Path(find_config('demo/maskrcnn_slab_swin_shapes'))
METRICS = {
    'box AP': 'coco/bbox_mAP',
    'box AP50': 'coco/bbox_mAP_50',
    'mask AP': 'coco/segm_mAP',
    'mask AP50': 'coco/segm_mAP_50',
}


def run_demo(
    out: Union[str, os.PathLike] = 'work_dirs/demo',
    data: Union[str, os.PathLike] = 'data/shapes',
    images: int = 12,
    options: Optional[Dict[str, Any]] = None,
) -> dict:
    """Makes the shapes, trains ``configs/demo/maskrcnn_slab_swin_shapes.py`` on them, evaluates the checkpoint, draws,
    folds the checkpoint for inference, and times it folded beside unfolded.

    An earlier demo in ``out`` is moved aside to ``<out>.1``, ``<out>.2``..., not overwritten; shapes that are in
    ``data`` are used again.

    Args:
        out (str | Path): A folder for checkpoint, logs, curves and drawn images.
        data (str | Path): A folder for the data set.
        images (int): Held-out images to draw.
        options (dict, optional): Config entries to replace, by dotted key.

    Returns:
        dict: The metrics of the final checkpoint.
    """
    console = Console()
    started = time.time()
    out, data = Path(out), Path(data)
    _move_aside(out)
    check_writable(out, 'out')
    console.rule('1/6  data')
    if (data / 'annotations' / 'instances_val.json').exists():
        console.print(f'using the shapes in {data}')
    else:
        counts = make_shapes(data)
        console.print(f'{data}: {counts["train"]} instances to train on, {counts["val"]} held out')
    os.environ['SHAPES_ROOT'] = str(data)

    console.rule('2/6  training')
    console.print('LayerNorm (gamma 1) fades into RepBN (gamma 0); at the end the BN statistics are recalibrated')
    with _log_file_only():
        runner = build_trainer(CONFIG, work_dir=out, options=options)
        _ = runner.train_loop, runner.val_loop  # what their data sets print while loading is no news either
    runner.train()
    before = runner.message_hub.get_info('metrics_before_recalibration')
    iters_per_epoch = len(runner.train_dataloader)
    scalars = Path(runner.log_dir) / 'vis_data' / 'scalars.json'
    gamma = read_scalars(scalars)['gamma']
    checkpoint = out / 'slab_swin_shapes.pth'
    shutil.copyfile(out / f'epoch_{runner.max_epochs}.pth', checkpoint)

    console.rule('3/6  evaluation of the final checkpoint')
    with _log_file_only():
        tester = build_tester(CONFIG, checkpoint, work_dir=out / 'test', options=options)
        metrics = tester.test()
    final_gamma = max(float(m.gamma) for m in prepbn_modules(tester.model))

    console.rule('4/6  drawings')
    chosen = out / 'images'
    chosen.mkdir()
    for image in sorted((data / 'val').iterdir())[:images]:  # enlarged: labels would cover images of 128 pixels
        enlarged = cv2.resize(cv2.imread(str(image)), None, fx=3, fy=3, interpolation=cv2.INTER_CUBIC)
        cv2.imwrite(str(chosen / f'{image.stem}.png'), enlarged)
    with _log_file_only():
        drawn = infer(chosen, CONFIG, checkpoint, out / 'drawn', score_thr=0.5).drawn
    draw_sheet(drawn, out / 'drawn.jpg')
    draw_curves(scalars, out / 'curves.png', iters_per_epoch)

    console.rule('5/6  folding')
    with _log_file_only():
        deployed = deploy(CONFIG, checkpoint, out / 'deploy', options=options)
    console.print("RepBN is an affine map by now: every norm of the backbone's blocks becomes part of its neighbours")
    console.print(differences_table(deployed.differences))

    console.rule('6/6  timing')
    trained = out / CONFIG.name  # as the training has dumped it, options included
    report = run([trained], Settings(image=(128, 128), rounds=30, warmup=5, no_fold=True), [checkpoint])
    (console if console.is_terminal else Console(width=160)).print(report_table(report))
    console.print(f'measured on {machine_line(report.machine)}', highlight=False)

    picked = range(0, len(gamma[0]), max(1, len(gamma[0]) // 10))
    console.print('gamma over the iterations: ' + '  '.join(f'{gamma[0][i]}: {gamma[1][i]:.2f}' for i in picked))
    console.print(f'gamma of the final checkpoint: {final_gamma:g}', highlight=False)
    table = Table(title='held-out split, by pycocotools')
    table.add_column('metric')
    table.add_column('before recalibration', justify='right')
    table.add_column('final checkpoint', justify='right')
    for name, key in METRICS.items():
        table.add_row(name, f'{before[key]:.3f}', f'{metrics[key]:.3f}')
    console.print(table)
    drawings = f'{out / "drawn"}, together in {out / "drawn.jpg"}'
    for what, path in (
        ('checkpoint', checkpoint),
        ('drawn images', drawings),
        ('curves', out / 'curves.png'),
        ('folded checkpoint', deployed.checkpoint),
        ('its config', deployed.config),
    ):
        console.print(f'{what}: {path}', highlight=False)
    console.print(f'{(time.time() - started) / 60:.1f} minutes in all')
    return dict(metrics)


def _log_file_only():
    """mmengine's loggers that are made within it keep to their files; errors are raised as ever."""
    return contextlib.redirect_stdout(io.StringIO())


def _move_aside(out: Path) -> None:
    if not out.exists():
        return
    number = 1
    while (aside := out.with_name(f'{out.name}.{number}')).exists():
        number += 1
    out.rename(aside)
