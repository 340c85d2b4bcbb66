"""mmengine's runner: checkpoints read as data, a config's text made once, several processes where there is no GPU."""

import inspect
import itertools
import logging
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Optional, Union

import torch.nn as nn
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import is_distributed
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import LOOPS, MODEL_WRAPPERS
from mmengine.runner import Runner
from mmengine.visualization import Visualizer

from .checkpoints import use_safe_loading
from .distributed import check_sync_bn, start_on_cpu, sync_on_cpu
from .logs import grouped_parameters


class TextOnce(Config):
    """A config that keeps its text until it changes.

    mmengine asks for the text several times at each start and again with each checkpoint, and yapf takes about a second for it.
    """

    @classmethod
    def of(cls, cfg: Config) -> 'TextOnce':
        """``cfg`` itself, which shares its entries, as one of this kind."""
        made = cls.__new__(cls)
        made.__dict__.update(cfg.__dict__)
        return made

    @property
    def pretty_text(self) -> str:
        entries = repr(self.to_dict())
        if self.__dict__.get('_pretty_of') != entries:
            self.__dict__.update(_pretty_of=entries, _pretty=Config.pretty_text.fget(self))
        return self.__dict__['_pretty']


class SafeRunner(Runner):
    """Reads every checkpoint by :func:`mmslab.checkpoints.load_file`, whenever it is read, and believes it no more than it must.

    Where ``trust_checkpoint`` is not set, what mmengine would make of a checkpoint's mere data is kept from it:

    * ``meta['config']``, which ``Runner.resume`` runs as a Python program, is left out;
    * what ``CheckpointHook`` would go on to delete or rewrite (``best_ckpt``, ``last_ckpt`` and ``keep_ckpt_ids`` in
      ``message_hub``) is left out unless it names checkpoints in ``work_dir`` itself.

    Without a GPU several processes talk by gloo, and SyncBatchNorm works. A visualizer is the runner's own, in its own folder.

    Raises:
        ValueError: On building, for a ``sync_bn`` that would not synchronize the model's norms, and for a key of ``train_cfg``,
            ``val_cfg`` or ``test_cfg`` that their loops do not take.
    """

    trust_checkpoint = False
    _on_cpu: Optional[str] = None  # what to log, once there is a logger

    @classmethod
    def build(cls, cfg: Config, trust_checkpoint: bool = False) -> 'SafeRunner':
        """``Runner.from_cfg``, with what the command line said of checkpoints."""
        _check_loops(cfg)
        with use_safe_loading(trust_checkpoint):
            runner = cls.from_cfg(TextOnce.of(cfg))
        runner.trust_checkpoint = trust_checkpoint
        return runner

    def setup_env(self, env_cfg: dict) -> None:
        if self.distributed and not is_distributed() and get_device() == 'cpu':
            self._on_cpu = start_on_cpu(self._launcher, env_cfg.get('dist_cfg'))
        super().setup_env(env_cfg)

    def wrap_model(self, model_wrapper_cfg: Optional[dict], model: nn.Module) -> nn.Module:
        if self.distributed and self.cfg.get('sync_bn') is not None:
            check_sync_bn(self.cfg.sync_bn, model, get_device())
        if not self.distributed or get_device() != 'cpu' or is_model_wrapper(model):
            return super().wrap_model(model_wrapper_cfg, model)
        if self._on_cpu:
            self.logger.info(self._on_cpu)
        sync_on_cpu(model, self.cfg.get('sync_bn') is not None)
        if model_wrapper_cfg is None:
            unused = self.cfg.get('find_unused_parameters', False)
            model_wrapper_cfg = dict(broadcast_buffers=False, find_unused_parameters=unused)
        defaults = dict(type='MMDistributedDataParallel', module=model)  # mmengine's has a GPU among them
        return MODEL_WRAPPERS.build(dict(model_wrapper_cfg), default_args=defaults)

    def build_visualizer(self, visualizer: Union[Visualizer, dict, None] = None) -> Visualizer:
        """One of a name of its own: mmengine hands out the first of a name again, and mmdet's configs all say 'visualizer'.

        So the scalars of a process's second run would be in the first one's folder; and mmdet's hook, which takes the last
        visualizer that was made, would draw with that of whatever ran between.
        """
        if isinstance(visualizer, dict):
            name = visualizer.get('name', self.experiment_name)
            names = (name if i == 1 else f'{name} {i}' for i in itertools.count(1))
            visualizer = {**visualizer, 'name': next(n for n in names if not Visualizer.check_instance_created(n))}
        return super().build_visualizer(visualizer)

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


def _check_loops(cfg: Config) -> None:
    """Raises ValueError for a key that a loop does not take, which mmengine finds out when the loop begins."""
    by_epoch = (cfg.get('train_cfg') or {}).get('by_epoch', True)
    defaults = dict(
        train_cfg='EpochBasedTrainLoop' if by_epoch else 'IterBasedTrainLoop', val_cfg='ValLoop', test_cfg='TestLoop'
    )
    for name, default in defaults.items():
        given = cfg.get(name)
        loop = LOOPS.get(given.get('type', default)) if isinstance(given, dict) else None
        if loop is None:
            continue
        parameters = inspect.signature(loop).parameters
        if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            continue
        for key in given:
            if key not in parameters and key not in ('type', 'by_epoch', '_scope_', '_delete_'):
                near = get_close_matches(key, parameters, n=1)
                remedy = f'Did you mean {near[0]!r}?' if near else f'{loop.__name__} takes {", ".join(parameters)}.'
                raise ValueError(f'{name}.{key}={given[key]!r}: {loop.__name__} has no such argument. {remedy}')
