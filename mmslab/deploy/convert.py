"""From a config and a checkpoint to those of the folded model, checked against each other."""

import copy
import os
import tempfile
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from rich.table import Table
from torch import Tensor

from .. import checkpoints
from ..apis import check_checkpoint, check_mmdet, load_config, without_init_cfg
from ..backbones.base import SLABBackbone
from ..data.checks import check_writable
from ..layers.fold import check_foldable
from ..layers.norm import PRepBN, RepBN
from .fold import fold

PathLike = Union[str, os.PathLike]
Size = Tuple[int, int]
TOLERANCE = 1e-5
SIZES = ((224, 224), (250, 330))  # the first divides into windows of 56, 28 and 7 tokens, the second into none
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


class Difference(NamedTuple):
    """How far the folded model is from the original in one output, for images of one size.

    ``relative`` is the largest difference over the largest magnitude of the original's output.
    """

    size: Size
    output: str
    relative: float


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
    a user would, by config, and compared with the original by :func:`compare` before they get their names.

    Args:
        config (str | Path): A config file with a backbone of mmslab.
        checkpoint (str | Path): Its trained weights, every PRepBN at gamma 0.
        out (str | Path): A folder, made if missing.
        force (bool): Whether to replace these files in ``out``.
        options (dict, optional): Config entries to replace, by dotted key.
        trust_checkpoint (bool): See :func:`mmslab.checkpoints.load_file`.
        sizes (Sequence): Heights and widths of the images to compare on.
        tolerance (float): Largest relative difference that passes, in float32. Defaults to 1e-5. Weights that
            magnify rounding, as untrained ones of many layers do, get more: ten times what float32 makes of the
            original itself, against float64.

    Raises:
        FileNotFoundError, FileExistsError, OSError: For a missing config or checkpoint, files of these names in
            ``out``, an ``out`` that cannot be written.
        ValueError: For a config without a backbone of mmslab, or folded already; a checkpoint that does not fit; a
            gamma above 0; a folded model that differs from the original. Nothing is written then.
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
    targets = [Path(out) / f'{Path(config).stem}_deploy.py', Path(out) / f'{Path(checkpoint).stem}_deploy.pth']
    present = [p for p in targets if p.exists()]
    if present and not force:
        raise FileExistsError(f'out: {str(present[0])!r} exists. Choose another folder, or pass --force.')
    content = checkpoints.load_file(checkpoint, trust_checkpoint)
    with checkpoints.use_safe_loading(trust_checkpoint):
        original = load_model(cfg, content, repr(str(checkpoint)))
    _check_norms(original, config)
    folded = fold(copy.deepcopy(original))
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
        _check_differences(differences, original, tolerance, repr(str(checkpoint)))
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


@torch.no_grad()
def compare(original: nn.Module, folded: nn.Module, sizes: Sequence[Size] = SIZES) -> List[Difference]:
    """Compares two detectors or classifiers on a random image, in zero mean and unit variance, of each size.

    Compared are the maps of the backbone, unless output norms have moved out of the folded one; of a detector the
    neck's maps, and what its heads make of them: scores, box deltas and mask logits, in a second stage for the
    proposals of the original. Boxes after non-maximum suppression are not compared: where two scores are nearly
    equal, rounding decides which box survives. Of a classifier the class scores are compared.
    """
    generator = torch.Generator().manual_seed(0)
    differences = []
    for height, width in sizes:
        image = torch.randn(1, 3, height, width, generator=generator)
        expected = outputs(original, image)
        actual = outputs(folded, image, expected.get('proposals'))  # near ties would make other proposals
        for name in expected:
            if name == 'proposals' or (name == 'backbone' and _norms_moved(original, folded)):
                continue
            relative = max(_relative(a, e) for a, e in zip(actual[name], expected[name]))
            differences.append(Difference((height, width), name, relative))
    return differences


def outputs(model: nn.Module, image: Tensor, proposals: Optional[list] = None) -> Dict[str, list]:
    """What a model computes from normalized images ``(1, 3, H, W)``: lists of tensors, by the name of the part.

    Args:
        proposals (list, optional): Of a second stage, as mmdet's heads take them. By default those of the first
            stage, which are returned as 'proposals'.
    """
    image = image.to(next(model.parameters()).dtype)
    maps = model.backbone(image)
    out = dict(backbone=_tensors(maps))
    if _of(model, 'mmpretrain'):
        maps = model.neck(maps) if model.with_neck else maps
        return {**out, 'class scores': [model.head(maps).softmax(dim=-1)]} if model.with_head else out
    if getattr(model, 'with_neck', False):
        maps = model.neck(maps)
        out['neck'] = _tensors(maps)
    if getattr(model, 'rpn_head', None) is not None and getattr(model, 'roi_head', None) is not None:
        from mmdet.structures import DetDataSample

        size = tuple(image.shape[2:])
        sample = DetDataSample(metainfo=dict(img_shape=size, ori_shape=size, pad_shape=size, scale_factor=(1.0, 1.0)))
        out['first stage'] = _tensors(model.rpn_head(maps))
        if proposals is None:
            proposals = [p[:100] for p in model.rpn_head.predict(maps, [sample], rescale=False)]
        out['second stage'] = _tensors(model.roi_head(maps, [p.to(image.dtype) for p in proposals], [sample]))
        out['proposals'] = proposals
    elif getattr(model, 'bbox_head', None) is not None:
        out['head'] = _tensors(model.bbox_head(maps))
    return out


def table(differences: Sequence[Difference], what: str = 'folded') -> Table:
    """The differences in a table, an output in a row and an image size in a column."""
    sizes = list(dict.fromkeys(d.size for d in differences))
    made = Table(title=f'{what} against original')
    made.add_column('relative difference')
    for height, width in sizes:
        made.add_column(f'{height}x{width}', justify='right')
    for output in dict.fromkeys(d.output for d in differences):
        made.add_row(output, *(f'{d.relative:.1e}' for d in differences if d.output == output))
    return made


def _tensors(node: Any) -> List[Tensor]:
    """The tensors in nested lists and tuples, in order."""
    if isinstance(node, Tensor):
        return [node]
    return [t for child in node for t in _tensors(child)] if isinstance(node, (list, tuple)) else []


def _relative(actual: Tensor, expected: Tensor) -> float:
    if expected.numel() == 0:
        return 0.0
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def _check_differences(differences: Sequence[Difference], original: nn.Module, tolerance: float, name: str) -> None:
    over = [d for d in differences if not d.relative <= tolerance]
    if not over:
        return
    exact = copy.deepcopy(original).double()
    rounding = {d[:2]: d.relative for d in compare(original, exact, list(dict.fromkeys(d.size for d in over)))}
    for size, output, relative in over:
        own = rounding[size, output]
        if not relative <= max(tolerance, 10 * own):
            raise ValueError(
                f'the folded model differs from {name} by {relative:.1e} (relative) in {output} for images of '
                f'{size[0]}x{size[1]}: over the tolerance of {tolerance:.0e}, and rounding alone makes {own:.1e} in the '
                'original. Nothing was written. Look for BN variances near 0 in the weights.'
            )


def _norms_moved(original: nn.Module, folded: nn.Module) -> bool:
    names = [f'norm{i}' for i in original.backbone.out_indices]
    return any(
        isinstance(getattr(folded.backbone, n), nn.Identity)
        and not isinstance(getattr(original.backbone, n), nn.Identity)
        for n in names
    )


def _of(model: nn.Module, package: str) -> bool:
    return any(c.__module__.split('.')[0] == package for c in type(model).__mro__)


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
