"""What the command lines do, as functions: build a trainer or a tester, draw detections."""

import os
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

import cv2
import torch
from mmengine.config import Config
from mmengine.runner import Runner
from rich.progress import track

from . import checkpoints
from .data.checks import check_datasets, check_writable
from .hooks import latest_checkpoint
from .versions import check_detection

PathLike = Union[str, os.PathLike]
IMAGE_SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp', '.tif', '.tiff', '.webp')


def load_config(config: PathLike, options: Optional[Dict[str, Any]] = None, launcher: str = 'none') -> Config:
    """Reads a config file and merges ``options``, ``{'dotted.key': value}``, into it.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it has not the name of a config file.
    """
    if not os.path.isfile(config):
        raise FileNotFoundError(f'config {str(config)!r} does not exist. The configs are in configs/.')
    if not str(config).endswith(('.py', '.yml', '.yaml', '.json')):
        raise ValueError(
            f'config {str(config)!r} is no config file (.py, .yml, .yaml or .json). The config comes first.'
        )
    try:
        cfg = Config.fromfile(str(config))
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
        config (str | Path): A config file.
        work_dir (str | Path, optional): For logs and checkpoints. Defaults to the config's, or work_dirs/<config>.
        amp (bool): Mixed precision, whatever the config says.
        auto_scale_lr (bool): Scale the learning rate to the number of GPUs times the batch size.
        resume (str, optional): A checkpoint to resume from, or 'auto' for the latest in ``work_dir`` that is whole.
        options (dict, optional): Config entries to replace, by dotted key.
        launcher (str): 'none', 'pytorch', 'slurm' or 'mpi'.
        trust_checkpoint (bool): See :func:`mmslab.checkpoints.load_file`.

    Raises:
        FileNotFoundError, OSError, ValueError: For a missing config, data set or checkpoint, bad annotations, a
            work_dir that cannot be written, ``auto_scale_lr`` without a base batch size.
    """
    cfg = load_config(config, options, launcher)
    check_mmdet(cfg)
    cfg.work_dir = str(work_dir or cfg.get('work_dir') or Path('work_dirs') / Path(config).stem)
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
    if cfg.get('load_from'):
        check_checkpoint(cfg.load_from, '--resume' if cfg.get('resume') else 'load_from')
    _check_init_cfg(cfg.get('model'))
    if cfg.optim_wrapper.get('type') == 'AmpOptimWrapper' and not torch.cuda.is_available():
        raise ValueError(
            'mixed precision (--amp, or AmpOptimWrapper in the config) needs a GPU, and there is none. To train on a CPU use '
            '--cfg-options optim_wrapper.type=OptimWrapper.'
        )
    check_writable(cfg.work_dir, 'work_dir')
    checkpoints.use_safe_loading(trust_checkpoint)
    local = cfg.get('load_from') and '://' not in cfg.load_from
    content = checkpoints.load_file(cfg.load_from) if local else None
    if content is not None:
        checkpoints.read_state_dict(content, name=repr(cfg.load_from))
    if content is not None and cfg.get('resume') and not (isinstance(content, dict) and 'meta' in content):
        raise ValueError(
            f'--resume {cfg.load_from!r} holds weights alone, no state of a training. Start from it with '
            f'--cfg-options load_from={cfg.load_from}.'
        )
    runner = Runner.from_cfg(cfg)
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
) -> Runner:
    """A runner ready to ``test()`` a checkpoint; see :func:`build_trainer` for what the arguments share.

    Args:
        out (str | Path, optional): A .pkl file to write the predictions to.
        show_dir (str | Path, optional): A folder, within ``work_dir``'s run, for images with predictions.
        show (bool): Whether to show them in a window, each for ``wait_time`` seconds.
    """
    cfg = load_config(config, options, launcher)
    check_mmdet(cfg)
    cfg.work_dir = str(work_dir or cfg.get('work_dir') or Path('work_dirs') / Path(config).stem)
    if out is not None and not str(out).endswith(('.pkl', '.pickle')):
        raise ValueError(f'--out must name a .pkl file, but got {str(out)!r}.')
    if out is not None and os.path.exists(out):
        raise FileExistsError(f'--out {str(out)!r} exists. Choose another name.')
    check_datasets(cfg, ('test',))
    check_checkpoint(checkpoint, 'checkpoint')
    check_writable(cfg.work_dir, 'work_dir')
    without_init_cfg(cfg.get('model'))  # the checkpoint has all weights
    cfg.load_from = str(checkpoint)
    if show or show_dir:
        hooks = cfg.default_hooks
        if 'visualization' not in hooks:
            raise ValueError('--show and --show-dir need a visualization hook in default_hooks of the config.')
        hooks.visualization.update(draw=True, show=show, wait_time=wait_time)
        if show_dir:
            hooks.visualization.test_out_dir = str(show_dir)
    checkpoints.use_safe_loading(trust_checkpoint)
    runner = Runner.from_cfg(cfg)
    checkpoints.check_fits(runner.model, checkpoint)
    if out is not None:
        from mmdet.evaluation import DumpDetResults

        runner.test_evaluator.metrics.append(DumpDetResults(out_file_path=str(out)))
    return runner


def infer(
    images: PathLike,
    config: PathLike,
    checkpoint: PathLike,
    out: PathLike,
    score_thr: float = 0.3,
    device: Optional[str] = None,
    force: bool = False,
    trust_checkpoint: bool = False,
) -> List[Path]:
    """Draws the boxes and masks that a detector finds into copies of images.

    Args:
        images (str | Path): An image, or a folder of images.
        out (str | Path): A folder for the drawn images, under their own names.
        score_thr (float): Detections below it are not drawn, in [0, 1].
        device (str, optional): 'cpu', 'cuda:0', ... By default a GPU if there is one.
        force (bool): Whether to replace images of the same name in ``out``.

    Returns:
        list[Path]: The files written.

    Raises:
        FileNotFoundError: If there are no images, config or checkpoint.
        FileExistsError: If ``out`` has an image of the same name and ``force`` is not set.
        ValueError: For a score threshold outside [0, 1].
    """
    check_detection()
    if not 0 <= score_thr <= 1:
        raise ValueError(f'score_thr must lie in [0, 1], but got {score_thr}.')
    source = Path(images)
    if source.is_dir():
        files = sorted(p for p in source.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES)
    else:
        files = [source] if source.is_file() else []
    if not files:
        raise FileNotFoundError(
            f'no image at {str(images)!r}. Give an image, or a folder with some of {IMAGE_SUFFIXES}.'
        )
    unreadable = [f for f in files if not cv2.haveImageReader(str(f))]
    if unreadable:
        raise ValueError(f'{str(unreadable[0])!r} is no image that can be read. Remove it, or give another folder.')
    if Path(out).resolve() == (source if source.is_dir() else source.parent).resolve():
        raise ValueError(
            f'out={str(out)!r} is where the images are, which would be overwritten. Choose another folder.'
        )
    check_device(device)
    check_checkpoint(checkpoint, 'checkpoint')
    cfg = load_config(config)
    without_init_cfg(cfg.get('model'))
    written = [Path(out) / f.name for f in files]
    present = [p for p in written if p.exists()]
    if present and not force:
        raise FileExistsError(f'out: {str(present[0])!r} exists. Choose another folder, or pass --force.')
    check_writable(out, 'out')
    checkpoints.use_safe_loading(trust_checkpoint)

    from mmdet.apis import DetInferencer

    inferencer = DetInferencer(cfg, str(checkpoint), device=device, show_progress=False)
    checkpoints.check_fits(inferencer.model, checkpoint)
    for file, target in track(list(zip(files, written)), description='drawing', disable=len(files) == 1):
        result = inferencer(str(file), return_vis=True, no_save_pred=True, pred_score_thr=score_thr)
        if not cv2.imwrite(str(target), result['visualization'][0][..., ::-1]):
            raise OSError(f'out: {str(target)!r} cannot be written.')
    return written


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
    """Raises ImportError if ``cfg`` needs mmdet and it, or mmcv's compiled ops, are missing."""
    if cfg.get('default_scope') == 'mmdet':
        check_detection()


def check_checkpoint(path: PathLike, name: str) -> None:
    """Raises FileNotFoundError, calling it ``name``, if ``path`` is a local file that does not exist."""
    if '://' not in str(path) and not os.path.isfile(path):
        raise FileNotFoundError(f'{name} {str(path)!r} does not exist. Give the path of a .pth file.')


def _init_cfgs(node: Any):
    if isinstance(node, dict):
        init = node.get('init_cfg')
        if isinstance(init, dict) and init.get('type') == 'Pretrained':
            yield node
        for value in node.values():
            yield from _init_cfgs(value)


def _check_init_cfg(model: Any) -> None:
    for node in _init_cfgs(model):
        path = node['init_cfg']['checkpoint']
        if '://' not in path and not os.path.isfile(path):
            raise FileNotFoundError(
                f'the pre-trained weights {path!r} of {node.get("type")} do not exist. Put them there, name another file '
                'with --cfg-options model.backbone.init_cfg.checkpoint=FILE, or train from scratch with '
                '--cfg-options model.backbone.init_cfg=None.'
            )


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
