"""What the command lines do, as functions: build a trainer or a tester, infer."""

import os
from pathlib import Path
from typing import Any, Callable, Dict, Optional, Union

import torch
from mmengine.config import Config
from mmengine.runner import Runner

from . import checkpoints
from .configs import find_config
from .data.checks import check_datasets, check_writable
from .data.classes import check_classes, check_trained_classes
from .distributed import check_launcher
from .hooks import latest_checkpoint
from .infer import infer  # noqa: F401  (handed on)
from .runner import SafeRunner
from .tta import MASK_HEAD, use_tta
from .versions import check_detection, check_transformers

PathLike = Union[str, os.PathLike]


def load_config(config: PathLike, options: Optional[Dict[str, Any]] = None, launcher: str = 'none') -> Config:
    """Reads a config, by path or name, and merges ``options``, ``{'dotted.key': value}``, into it.

    Its ``filename`` is the path where it was found.

    Raises:
        FileNotFoundError, ValueError: See :func:`mmslab.configs.find_config`.
    """
    path = find_config(config)
    try:
        cfg = Config.fromfile(path)
    except Exception:
        check_detection()  # a base of mmdet's that is not there has a clearer error
        raise
    cfg.launcher = launcher
    if options:
        cfg.merge_from_dict(options)
    return cfg


def build_trainer(
    config: PathLike,
    work_dir: Optional[PathLike] = None,
    amp: bool = False,
    auto_scale_lr: bool = False,
    resume: Optional[str] = None,
    options: Optional[Dict[str, Any]] = None,
    launcher: str = 'none',
    trust_checkpoint: bool = False,
) -> Runner:
    """A runner ready to ``train()``; what it will read and write is checked before anything is built.

    Args:
        config (str | Path): A config, by path or name, see :func:`mmslab.configs.find_config`.
        work_dir (str | Path, optional): For logs and checkpoints. Defaults to the config's, or work_dirs/<config>.
        amp (bool): Mixed precision, whatever the config says.
        auto_scale_lr (bool): Scale the learning rate to the number of GPUs times the batch size.
        resume (str, optional): A checkpoint to resume from, or 'auto' for the latest in ``work_dir`` that is whole.
        options (dict, optional): Config entries to replace, by dotted key.
        launcher (str): 'none', 'pytorch', 'slurm' or 'mpi'.
        trust_checkpoint (bool): See :func:`mmslab.checkpoints.load_file`.

    Raises:
        FileNotFoundError, OSError, ValueError: For a missing config, data set or checkpoint, bad annotations, classes
            that are not the same in the model and all data, a work_dir that cannot be written, ``auto_scale_lr`` without
            a base batch size, a ``launcher`` that has not started this process.
    """
    check_launcher(launcher)
    cfg = load_config(config, options, launcher)
    check_mmdet(cfg)
    cfg.work_dir = str(work_dir or cfg.get('work_dir') or Path('work_dirs') / Path(cfg.filename).stem)
    if amp:
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')
    if auto_scale_lr:
        if not cfg.get('auto_scale_lr', {}).get('base_batch_size'):
            raise ValueError(
                f'--auto-scale-lr needs auto_scale_lr = dict(base_batch_size=...) in the config, which {str(config)!r} lacks.'
            )
        cfg.auto_scale_lr.enable = True
    if resume is not None:
        cfg.resume, cfg.load_from = True, None if resume == 'auto' else resume
    if cfg.get('resume') and not cfg.get('load_from'):
        cfg.load_from = latest_checkpoint(cfg.work_dir)  # None, where there is no checkpoint: the training begins
    check_datasets(cfg, ('train', 'val'))
    check_classes(cfg, ('train', 'val'))
    if cfg.get('load_from'):
        check_checkpoint(cfg.load_from, '--resume' if cfg.get('resume') else 'load_from')
    _check_init_cfg(cfg.get('model'), checkpoints.check_known)
    if cfg.optim_wrapper.get('type') == 'AmpOptimWrapper' and not torch.cuda.is_available():
        raise ValueError(
            'mixed precision (--amp, or AmpOptimWrapper in the config) needs a GPU, and there is none. To train on a CPU use '
            '--cfg-options optim_wrapper.type=OptimWrapper.'
        )
    check_writable(cfg.work_dir, 'work_dir')
    if not trust_checkpoint:  # which leaves some addresses to mmengine
        _check_init_cfg(cfg.get('model'), checkpoints.locate)  # downloads
    content = None
    if cfg.get('load_from'):
        content = checkpoints.load_file(cfg.load_from, trust_checkpoint)
        checkpoints.read_state_dict(content, name=repr(cfg.load_from))
    if content is not None and cfg.get('resume') and not (isinstance(content, dict) and 'meta' in content):
        raise ValueError(
            f'--resume {cfg.load_from!r} holds weights alone, no state of a training. Start from it with '
            f'--cfg-options load_from={cfg.load_from}.'
        )
    if content is not None and cfg.get('resume'):
        check_trained_classes(content, repr(cfg.load_from), cfg, 'train')
    runner = SafeRunner.build(cfg, trust_checkpoint)
    if content is not None and cfg.get('resume'):
        checkpoints.check_fits(runner.model, content, repr(cfg.load_from))
    return runner


def build_tester(
    config: PathLike,
    checkpoint: PathLike,
    work_dir: Optional[PathLike] = None,
    out: Optional[PathLike] = None,
    show_dir: Optional[PathLike] = None,
    show: bool = False,
    wait_time: float = 2.0,
    options: Optional[Dict[str, Any]] = None,
    launcher: str = 'none',
    trust_checkpoint: bool = False,
    tta: bool = False,
) -> Runner:
    """A runner ready to ``test()`` a checkpoint; see :func:`build_trainer` for what the arguments share.

    Args:
        out (str | Path, optional): A .pkl file to write the predictions to.
        show_dir (str | Path, optional): A folder, within ``work_dir``'s run, for images with predictions, in the folders
            that they are in below the one that all of the test set's share.
        show (bool): Whether to show them in a window, each for ``wait_time`` seconds.
        tta (bool): Whether to merge the predictions for each image and its mirror image, see :func:`mmslab.tta.use_tta`.
    """
    check_launcher(launcher)
    cfg = load_config(config, options, launcher)
    check_mmdet(cfg)
    cfg.work_dir = str(work_dir or cfg.get('work_dir') or Path('work_dirs') / Path(cfg.filename).stem)
    if out is not None and not str(out).endswith(('.pkl', '.pickle')):
        raise ValueError(f'--out must name a .pkl file, but got {str(out)!r}.')
    if out is not None and os.path.exists(out):
        raise FileExistsError(f'--out {str(out)!r} exists. Choose another name.')
    if show or show_dir:
        _check_show(cfg, show_dir)
    check_datasets(cfg, ('test',))
    check_classes(cfg, ('test',))
    notice = use_tta(cfg) if tta else None
    check_checkpoint(checkpoint, 'checkpoint')
    check_writable(cfg.work_dir, 'work_dir')
    without_init_cfg(cfg.get('model'))  # the checkpoint has all weights
    cfg.load_from = str(checkpoint)
    if show or show_dir:
        hook = cfg.default_hooks.visualization
        hook.update(draw=True, show=show, wait_time=wait_time)
        if show_dir:
            hook.test_out_dir = str(show_dir)
            if hook.type in ('DetVisualizationHook', 'mmdet.DetVisualizationHook'):
                hook.type = 'mmslab.hooks.visualization.FolderVisualizationHook'
    content = checkpoints.load_file(checkpoint, trust_checkpoint)
    check_trained_classes(content, repr(str(checkpoint)), cfg)
    runner = SafeRunner.build(cfg, trust_checkpoint)
    if notice is not None:
        runner.logger.warning(notice)
        state = checkpoints.read_state_dict(content, name=repr(str(checkpoint)))
        content = {key: value for key, value in state.items() if not key.startswith(MASK_HEAD)}
    checkpoints.check_fits(runner.model, content, repr(str(checkpoint)))
    if out is not None:
        from mmdet.evaluation import DumpDetResults

        runner.test_evaluator.metrics.append(DumpDetResults(out_file_path=str(out)))
    return runner


def check_device(device: Optional[str]) -> None:
    """Raises ValueError unless ``device`` is None, or one that torch knows and that is there."""
    try:
        kind = None if device is None else torch.device(device).type
    except RuntimeError as e:
        raise ValueError(f"device {device!r} is none that torch knows. Use 'cpu' or 'cuda:0'.") from e
    if kind == 'cuda' and not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: there is no GPU here. Use 'cpu'.")
    if kind == 'cuda' and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise ValueError(f'device {device!r}: the GPUs here are cuda:0 to cuda:{torch.cuda.device_count() - 1}.')


def check_mmdet(cfg: Config) -> None:
    """Raises ImportError if ``cfg`` needs mmdet or mmpretrain and it, or mmcv's compiled ops, cannot be imported."""
    if cfg.get('default_scope') == 'mmdet':
        check_detection()
    else:
        check_transformers()


def check_checkpoint(path: PathLike, name: str) -> None:
    """Raises FileNotFoundError, calling it ``name``, unless ``path`` is a file, an address or a name of published weights."""
    checkpoints.check_known(path, name)


def _check_show(cfg: Config, show_dir: Optional[PathLike]) -> None:
    """Raises ValueError if ``cfg`` has no hook that draws detections, FileExistsError if ``show_dir`` has files in it."""
    if 'visualization' not in cfg.default_hooks:
        raise ValueError('--show and --show-dir need a visualization hook in default_hooks of the config.')
    if cfg.default_hooks.visualization.type in ('VisualizationHook', 'mmpretrain.VisualizationHook'):
        raise ValueError(
            '--show and --show-dir draw detections, and the config is of a classifier. For the images with their classes use '
            '--cfg-options default_hooks.visualization.enable=True default_hooks.visualization.interval=1 '
            'default_hooks.visualization.out_dir=DIR.'
        )
    if show_dir:  # which may lead out of the new folder of this run
        folder = os.path.normpath(os.path.join(cfg.work_dir, '<run>', show_dir))
        if os.path.isdir(folder) and os.listdir(folder):
            raise FileExistsError(f'--show-dir {str(show_dir)!r} has files in it. Choose another folder.')


def _init_cfgs(node: Any):
    if isinstance(node, dict):
        init = node.get('init_cfg')
        if isinstance(init, dict) and init.get('type') == 'Pretrained':
            yield node
        for value in node.values():
            yield from _init_cfgs(value)


def _check_init_cfg(model: Any, check: Callable[[str], Any]) -> None:
    """Has ``check`` look at all pre-trained weights of a model's config; its OSErrors say what to set instead."""
    for node in _init_cfgs(model):
        try:
            check(node['init_cfg']['checkpoint'])
        except OSError as e:
            raise (FileNotFoundError if isinstance(e, FileNotFoundError) else OSError)(
                f'pre-trained weights of {node.get("type")}: {e} Or name others with '
                '--cfg-options model.backbone.init_cfg.checkpoint=FILE, or train from scratch with '
                '--cfg-options model.backbone.init_cfg=None.'
            ) from e


def without_init_cfg(model: Any) -> None:
    """Removes from a model's config, in place, all pre-trained weights: ``init_cfg`` and the older ``pretrained``."""
    for node in list(_init_cfgs(model)):
        node['init_cfg'] = None
    _without_pretrained(model)


def _without_pretrained(node: Any) -> None:
    if isinstance(node, dict):
        if node.get('pretrained'):
            node['pretrained'] = False if node['pretrained'] is True else None
        for value in node.values():
            _without_pretrained(value)
