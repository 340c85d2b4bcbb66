"""Predictions drawn while testing, under names of their own. It needs mmdet, so mmslab.hooks does not import it."""

import os

from mmdet.engine.hooks import DetVisualizationHook
from mmengine.registry import HOOKS
from mmengine.runner import Runner


@HOOKS.register_module()
class FolderVisualizationHook(DetVisualizationHook):
    """mmdet's hook, but that images of one name from two folders are not drawn over each other.

    Under ``test_out_dir`` it keeps the folders in which the test set's images are, below the one that all share.
    """

    def before_test_epoch(self, runner: Runner) -> None:
        if self.draw and self.test_out_dir is not None:
            dataset = runner.test_dataloader.dataset
            self._shared = os.path.commonpath(
                {_folder(dataset.get_data_info(i)['img_path']) for i in range(len(dataset))}
            )

    def after_test_iter(self, runner: Runner, batch_idx: int, data_batch: dict, outputs) -> None:
        if not self.draw or self.test_out_dir is None:
            return super().after_test_iter(runner, batch_idx, data_batch, outputs)
        shown = os.path.join(runner.work_dir, runner.timestamp, self.test_out_dir)
        for sample in outputs:
            self.test_out_dir = os.path.join(shown, os.path.relpath(_folder(sample.img_path), self._shared))
            super().after_test_iter(runner, batch_idx, data_batch, [sample])
        self.test_out_dir = shown


def _folder(path: str) -> str:
    return os.path.dirname(os.path.abspath(path))
