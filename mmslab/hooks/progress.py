"""A training display for people, in place of log lines."""

import contextlib
import io
import logging
from functools import cached_property
from typing import Dict, Optional

from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import EpochBasedTrainLoop, Runner
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .bn_recalibration import BNRecalibrationHook


@HOOKS.register_module()
class RichProgressHook(Hook):
    """Shows one bar for the whole training, with loss, learning rate and gamma, and a line per validation.

    Where the output is no terminal it prints a plain line every ``interval`` iterations. The log file keeps all
    of mmengine's lines; those below WARNING leave the screen.

    Args:
        interval (int): Iterations between plain lines. Defaults to 50.
        metrics (tuple[str]): Beginnings of the names of metrics to show after a validation. Defaults to mmdet's
            AP and AP50 of boxes and masks and mmpretrain's accuracy.
    """

    priority = 'LOW'  # after LoggerHook, whose smoothed values it shows

    def __init__(
        self,
        interval: int = 50,
        metrics: tuple = ('coco/bbox_mAP', 'coco/segm_mAP', 'accuracy'),
    ) -> None:
        if interval < 1:
            raise ValueError(f'interval must be at least 1, but got {interval}.')
        self.interval = interval
        self.metrics = tuple(metrics)
        self.bar: Optional[Progress] = None
        self._silence = contextlib.ExitStack()

    @cached_property
    def console(self) -> Console:
        return Console()  # made when first used, to find out then whether the output is a terminal

    @master_only
    def before_train(self, runner: Runner) -> None:
        for handler in runner.logger.handlers:
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                handler.setLevel(max(handler.level, logging.WARNING))
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn('[bold]{task.description}'),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn('{task.fields[status]}'),
                TimeElapsedColumn(),
                TextColumn('eta'),
                TimeRemainingColumn(),
                console=self.console,
                expand=True,
            )
            self.bar.start()
            self.task = self.bar.add_task('training', total=runner.max_iters, completed=runner.iter, status='')

    @master_only
    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch=None, outputs: Optional[dict] = None) -> None:
        if self.bar is None and not self.every_n_train_iters(runner, self.interval):
            return
        scalars = runner.message_hub.log_scalars
        parts = []
        for name, key, pattern in (('loss', 'train/loss', '{:.3f}'), ('gamma', 'train/gamma', '{:.3f}')):
            if key in scalars:
                value = scalars[key].mean(self.interval) if name == 'loss' else scalars[key].current()
                parts.append(f'{name} ' + pattern.format(value))
        lr = runner.optim_wrapper.get_lr()
        parts.append(f'lr {next(iter(lr.values()))[0]:.1e}')
        status, place = '  '.join(parts), self._place(runner)
        if self.bar is not None:
            self.bar.update(self.task, completed=runner.iter + 1, description=place, status=status)
            return
        seconds = scalars['train/time'].mean(self.interval) * (runner.max_iters - runner.iter - 1)
        self.console.print(
            f'{place}  iter {runner.iter + 1}/{runner.max_iters}  {status}  eta {int(seconds // 60)}:{int(seconds % 60):02d}',
            highlight=False,
            soft_wrap=True,
        )

    def _place(self, runner: Runner) -> str:
        if isinstance(runner.train_loop, EpochBasedTrainLoop):
            return f'epoch {runner.epoch + 1}/{runner.max_epochs}'
        return 'training'

    @master_only
    def before_val_epoch(self, runner: Runner) -> None:
        # pycocotools prints its progress; the log file has the metrics anyway
        self._silence.enter_context(contextlib.redirect_stdout(io.StringIO()))

    @master_only
    def after_val_epoch(self, runner: Runner, metrics: Optional[Dict[str, float]] = None) -> None:
        self._silence.close()
        shown = {
            k: v
            for k, v in (metrics or {}).items()
            if k.startswith(self.metrics) and not k.endswith(('_s', '_m', '_l', '_75'))
        }
        text = '  '.join(f'{k.split("/")[-1]} {v:.3f}' for k, v in shown.items())
        before = any(isinstance(hook, BNRecalibrationHook) and hook.validating for hook in runner.hooks)
        self.console.print(
            f'  validation after iteration {runner.iter}{", before the BN recalibration" if before else ""}:  '
            f'{text or metrics}',
            highlight=False,
            soft_wrap=True,
        )

    @master_only
    def after_train(self, runner: Runner) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None
