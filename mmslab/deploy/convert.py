"""From a config and a checkpoint to those of the folded model, checked against each other."""

import copy
import os
import tempfile
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Union

import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from .. import checkpoints
from ..apis import check_checkpoint, check_mmdet, load_config, without_init_cfg
from ..backbones.base import SLABBackbone
from ..data.checks import check_writable
from ..layers.fold import check_foldable
from ..layers.norm import PRepBN, RepBN
from .compare import SIZES, TOLERANCE, Difference, Size, check_differences, compare
from .fold import fold

PathLike = Union[str, os.PathLike]
_TRAINING = (
    'train_dataloader',
    'train_pipeline',
    'train_cfg',
    'optim_wrapper',
    'param_scheduler',
    'auto_scale_lr',
    'load_from',
    'resume',
    'launcher',
    'work_dir',
)
_TRAINING_HOOKS = ('GammaDecayHook', 'BNRecalibrationHook')
_META = ('dataset_meta', 'CLASSES', 'PALETTE', 'epoch', 'iter', 'experiment_name', 'mmengine_version')


class Deployed(NamedTuple):
    """The files that :func:`deploy` wrote, and what its check found."""

    config: Path
    checkpoint: Path
    differences: List[Difference]


def deploy(
    config: PathLike,
    checkpoint: PathLike,
    out: PathLike,
    force: bool = False,
    options: Optional[Dict[str, Any]] = None,
    trust_checkpoint: bool = False,
    sizes: Sequence[Size] = SIZES,
    tolerance: float = TOLERANCE,
) -> Deployed:
    """Folds a detector or classifier and writes config and checkpoint of the folded model.

    The files are ``<out>/<config's stem>_deploy.py`` and ``<out>/<checkpoint's stem>_deploy.pth``. They are loaded as
    a user would, by config, and compared with the original before they get their names, see
    :func:`mmslab.deploy.compare.compare`.

    Args:
        config (str | Path): A config, by path or name, with a backbone of mmslab.
        checkpoint (str | Path): Its trained weights, every PRepBN at gamma 0.
        out (str | Path): A folder, made if missing.
        force (bool): Whether to replace these files in ``out``.
        options (dict, optional): Config entries to replace, by dotted key.
        trust_checkpoint (bool): See :func:`mmslab.checkpoints.load_file`.
        sizes (Sequence): Heights and widths of the images to compare on, before they are padded to what the model takes.
        tolerance (float): Largest relative difference that passes, in float32. Defaults to 1e-5. Weights that
            magnify rounding, as untrained ones of many layers do, get more: ten times what float32 makes of the
            original itself, against float64.

    Raises:
        FileNotFoundError, FileExistsError, OSError: For a missing config or checkpoint, files of these names in
            ``out``, an ``out`` that cannot be written.
        ValueError: For a config without a backbone of mmslab, or folded already; a checkpoint that does not fit; a
            gamma above 0; a folded model that differs from the original; a detector that cannot be compared, as it
            cannot predict from an image alone. Nothing is written then.
    """
    cfg = load_config(config, options)
    check_mmdet(cfg)
    check_backbone(cfg, config)
    if cfg.model.backbone.get('deploy'):
        raise ValueError(
            f'config {str(config)!r} is of a folded model already (model.backbone.deploy is True). Give the config that the '
            'model was trained with.'
        )
    check_checkpoint(checkpoint, 'checkpoint')
    targets = [Path(out) / f'{Path(cfg.filename).stem}_deploy.py', Path(out) / f'{Path(checkpoint).stem}_deploy.pth']
    present = [p for p in targets if p.exists()]
    if present and not force:
        raise FileExistsError(f'out: {str(present[0])!r} exists. Choose another folder, or pass --force.')
    content = checkpoints.load_file(checkpoint, trust_checkpoint)
    with checkpoints.use_safe_loading(trust_checkpoint):
        original = load_model(cfg, content, repr(str(checkpoint)))
    _check_norms(original, config)
    folded = fold(copy.deepcopy(original), check=False)  # it is compared below, as it is loaded
    check_writable(out, 'out')
    meta = content.get('meta') if isinstance(content.get('meta'), dict) else {}
    deploy_cfg = deployed_config(cfg, folded)
    meta = {key: meta[key] for key in _META if key in meta}
    with tempfile.TemporaryDirectory(prefix='.deploy-', dir=out) as folder:
        partial = [Path(folder) / p.name for p in targets]
        deploy_cfg.dump(partial[0])
        torch.save(dict(meta={**meta, 'cfg': deploy_cfg.pretty_text}, state_dict=folded.state_dict()), partial[1])
        loaded = load_model(load_config(partial[0]), checkpoints.load_file(partial[1], trust=False), str(partial[1]))
        differences = compare(original, loaded, sizes)
        check_differences(differences, original, tolerance, repr(str(checkpoint)))
        for source, target in zip(partial, targets):
            os.replace(source, target)
    return Deployed(*targets, differences)


def load_model(cfg: Config, content: Any, name: str) -> nn.Module:
    """The model of ``cfg`` in eval mode, with the weights of what a checkpoint file holds; ``name`` is for errors.

    Raises:
        ValueError: If they do not fit each other.
    """
    model_cfg = copy.deepcopy(cfg.model)
    if cfg.get('data_preprocessor') is not None:  # as mmengine's Runner does
        model_cfg.setdefault('data_preprocessor', copy.deepcopy(cfg.data_preprocessor))
    without_init_cfg(model_cfg)
    init_default_scope(cfg.get('default_scope', 'mmdet'))
    model = MODELS.build(model_cfg).eval()
    checkpoints.check_fits(model, content, name)
    model.load_state_dict(checkpoints.read_state_dict(content, name=name), strict=False)
    return model


def deployed_config(cfg: Config, folded: nn.Module) -> Config:
    """The config of a folded model: ``deploy=True``, nothing of the training, no output norms where they moved on."""
    cfg = copy.deepcopy(cfg)
    for key in _TRAINING:
        cfg.pop(key, None)
    if 'train_cfg' in cfg.model:
        cfg.model.train_cfg = None
    without_init_cfg(cfg.model)
    cfg.model.backbone.update(deploy=True, init_cfg=None)
    backbone = folded.backbone
    if all(isinstance(getattr(backbone, f'norm{i}'), nn.Identity) for i in backbone.out_indices):
        cfg.model.backbone.out_norm_cfg = None
    if cfg.get('custom_hooks'):
        cfg.custom_hooks = [hook for hook in cfg.custom_hooks if hook.get('type') not in _TRAINING_HOOKS]
    imports = cfg.get('custom_imports') or dict(imports=[])
    if 'mmslab' not in imports['imports']:
        cfg.custom_imports = dict(imports=[*imports['imports'], 'mmslab'])
    return cfg


def check_backbone(cfg: Config, config: PathLike) -> None:
    """Raises ValueError, naming ``config``, unless the model of ``cfg`` has a backbone of mmslab."""
    backbone = (cfg.get('model') or {}).get('backbone') or {}
    made = MODELS.get(backbone['type']) if isinstance(backbone.get('type'), str) else backbone.get('type')
    if not (isinstance(made, type) and issubclass(made, SLABBackbone)):
        raise ValueError(
            f'config {str(config)!r} has no backbone of mmslab (model.backbone.type is {backbone.get("type")!r}), so there is '
            'nothing to fold. Give a config with SLABSwin, SLABPVT, SLABDeiT or SLABCSWin.'
        )


def _check_norms(model: nn.Module, config: PathLike) -> None:
    """What :func:`fold` refuses, before anything is copied; and norms that a config could not ask for once folded."""
    check_foldable(model)
    for name, module in model.named_modules():
        if isinstance(module, (PRepBN, RepBN)) and not name.startswith('backbone.'):
            raise ValueError(
                f'config {str(config)!r} has a {type(module).__name__} at {name!r}, outside the backbone: folded, no config '
                'can build it. Fold it in Python with mmslab.deploy.fold(model), or use another norm there.'
            )
