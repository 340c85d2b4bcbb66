"""mmengine's runner with checkpoints that are read as data."""

import logging
from pathlib import Path
from typing import Any, Union

from mmengine.config import Config
from mmengine.logging import print_log
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.runner import Runner

from .checkpoints import use_safe_loading
from .logs import grouped_parameters


class SafeRunner(Runner):
    """Reads every checkpoint by :func:`mmslab.checkpoints.load_file`, whenever it is read, and believes it no more than it must.

    Where ``trust_checkpoint`` is not set, what mmengine would make of a checkpoint's mere data is kept from it:

    * ``meta['config']``, which ``Runner.resume`` runs as a Python program, is left out;
    * what ``CheckpointHook`` would go on to delete or rewrite (``best_ckpt``, ``last_ckpt`` and ``keep_ckpt_ids`` in
      ``message_hub``) is left out unless it names checkpoints in ``work_dir`` itself.
    """

    trust_checkpoint = False

    @classmethod
    def build(cls, cfg: Config, trust_checkpoint: bool = False) -> 'SafeRunner':
        """``Runner.from_cfg``, with what the command line said of checkpoints."""
        with use_safe_loading(trust_checkpoint):
            runner = cls.from_cfg(cfg)
        runner.trust_checkpoint = trust_checkpoint
        return runner

    def train(self) -> Any:
        with use_safe_loading(self.trust_checkpoint):
            return super().train()

    def val(self) -> dict:
        with use_safe_loading(self.trust_checkpoint):
            return super().val()

    def test(self) -> dict:
        with use_safe_loading(self.trust_checkpoint):
            return super().test()

    def build_optim_wrapper(self, optim_wrapper: Any) -> Union[OptimWrapper, OptimWrapperDict]:
        with grouped_parameters():
            return super().build_optim_wrapper(optim_wrapper)

    def load_checkpoint(self, filename: str, *args: Any, **kwargs: Any) -> dict:
        with use_safe_loading(self.trust_checkpoint):
            checkpoint = super().load_checkpoint(filename, *args, **kwargs)
        if not self.trust_checkpoint and isinstance(checkpoint, dict):
            self._disarm(checkpoint, filename)
        return checkpoint

    def _disarm(self, checkpoint: dict, filename: str) -> None:
        if isinstance(checkpoint.get('meta'), dict):
            checkpoint['meta'].pop('config', None)
        hub = checkpoint.get('message_hub')
        known = hub.get('runtime_info') if isinstance(hub, dict) else None
        for key in [k for k in known or () if str(k).startswith(('best_ckpt', 'last_ckpt', 'keep_ckpt_ids'))]:
            if not self._is_own(key, known[key]):
                print_log(
                    f'{filename} has {key}={known[key]!r}, which is no checkpoint in {self.work_dir}: left out.',
                    logger='current',
                    level=logging.WARNING,
                )
                del known[key]

    def _is_own(self, key: str, value: Any) -> bool:
        if key == 'keep_ckpt_ids':
            return isinstance(value, list) and all(type(i) is int for i in value)
        path = Path(str(value))
        ours = path.resolve().parent == Path(self.work_dir).resolve() and not path.is_dir()
        return ours and (path.name.startswith('best_') or not key.startswith('best'))
