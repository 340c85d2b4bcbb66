"""Weights into a given model: taken, resized, refused."""

import logging
import os
import re
from dataclasses import dataclass, field
from typing import Any, List, Optional, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from torch import Tensor

from ..layers.attention import resize_positional_encoding
from ..layers.embed import PositionEmbedding
from ..layers.norm import PRepBN, RepBN, TokenBN
from .files import StateDict, read_state_dict
from .names import canonical, fit_projections


@dataclass
class LoadReport:
    """What became of every tensor: names of the checkpoint (``unused``) and of the model (the others)."""

    taken: List[str] = field(default_factory=list)
    resized: List[str] = field(default_factory=list)
    new: List[str] = field(default_factory=list)
    unused: List[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f'{len(self.taken)} tensors taken, {len(self.resized)} resized, {len(self.new)} newly initialized, '
            f'{len(self.unused)} unused'
        ]
        for what in ('resized', 'new', 'unused'):
            names = getattr(self, what)
            if names:
                lines.append(f'  {what}: ' + ', '.join(names))
        return '\n'.join(lines)


# What a checkpoint may lack: parts that another kind of attention or norm has, and the norms on the outputs
_OF_ONE_ATTENTION = r'attn\.(branches\.\d\.)?(dwc|positional_encoding|scale|relative_position_bias_table|sr|norm)(\.|$)'
_MAY_BE_NEW = re.compile(rf'{_OF_ONE_ATTENTION}|mlp\.norm\.|^norm\d+\.|num_batches_tracked$')
_MAY_BE_UNUSED = re.compile(
    rf'{_OF_ONE_ATTENTION}|attn\.relative_position_index|attn_mask$|'
    r'(^|\.)cls_token$|^norm\d*\.|^head\.|^neck\.|^rpn_head\.|^roi_head\.|^bbox_head\.|^data_preprocessor\.'
)


def load_pretrained(
    backbone: nn.Module,
    checkpoint: Union[str, os.PathLike, dict],
    prefix: Optional[str] = None,
    trust: Optional[bool] = None,
    logger: Any = 'current',
) -> LoadReport:
    """Loads published weights into a backbone of this package, whatever its norms and window sizes.

    * A PRepBN takes weights of a PRepBN (its gamma too), of a RepBN (gamma becomes 0) and of a LayerNorm (gamma
      stays as configured; the RepBN beside it is new, its statistics come from training or recalibration).
    * Positional encodings, position embeddings and relative position tables of other sizes are resized; where the
      model has no class token, its embedding is left out.
    * Attention of another kind takes the projections; what only one of the two kinds has is new or unused.
    * All else must be there and have the right shape. What was done is logged, tensor by tensor.

    Args:
        backbone (nn.Module): Built, its parameters on any device.
        checkpoint (str | Path | dict): A file, or what a file holds.
        prefix (str, optional): Take only keys with this prefix. By default ``backbone.`` if any key has it.
        trust (bool): See :func:`load_file`.
        logger: As in mmengine's ``print_log``.

    Returns:
        LoadReport: The names of tensors taken, resized, new and unused.

    Raises:
        FileNotFoundError, ValueError: See :func:`read_state_dict`; ValueError also for a checkpoint of another
            architecture or of another norm, or if just one of checkpoint and backbone is folded. Nothing is loaded then.
    """
    name = 'dict' if isinstance(checkpoint, dict) else str(checkpoint)
    model = backbone.module if is_model_wrapper(backbone) else backbone
    state = canonical(read_state_dict(checkpoint, trust))
    report = LoadReport()
    if prefix is None and any(k.startswith('backbone.') for k in state):
        prefix = 'backbone.'
    if prefix:
        prefix = prefix.rstrip('.') + '.'
        report.unused += [k for k in state if not k.startswith(prefix)]
        state = {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}
    target = model.state_dict()
    _check_form(model, state, repr(name))
    state = fit_projections(state, lambda at: f'{at}q.weight' not in target)
    state = _fit_norms(state, model, name)
    fitted: StateDict = {}
    for key, value in state.items():
        if key not in target:
            report.unused.append(key)
        elif value.shape == target[key].shape:
            fitted[key] = value
            report.taken.append(key)
        else:
            fitted[key] = _resize(key, value, target[key], model, name)
            report.resized.append(key)
    report.new = [k for k in target if k not in fitted]
    if not report.taken:
        raise ValueError(
            f'checkpoint {name!r} has no tensor of {type(model).__name__}; its keys begin with '
            f'{", ".join(sorted(state)[:3]) or "another prefix"}. Give weights of this kind of backbone.'
        )
    _check_complete(report, model, name, prefix)
    gamma = {k: float(v) for k, v in fitted.items() if k.endswith('gamma')}
    other = next((k for k in gamma if gamma[k] > 0 and target[k] == 0), None)
    model.load_state_dict(fitted, strict=False)
    print_log(f'{name} into {type(model).__name__}: {report}', logger=logger)
    if other is not None:
        print_log(
            f'{name} is from the middle of a handover: its gamma, {gamma[other]:g}, takes the place of the configured 0. Without '
            'a GammaDecayHook it will stay there.',
            logger=logger,
            level=logging.WARNING,
        )
    return report


def check_fits(model: nn.Module, checkpoint: Union[str, os.PathLike, dict], name: Optional[str] = None) -> None:
    """Raises ValueError unless ``checkpoint`` has just the weights of ``model``, finite: what evaluation and resuming need.

    mmengine's own loader leaves a model as it is where a checkpoint does not fit, with a warning. ``checkpoint`` is a file,
    or what a file holds, which ``name`` then names.
    """
    name = name or repr(str(checkpoint))
    state = read_state_dict(checkpoint, name=name)
    model = model.module if is_model_wrapper(model) else model
    target = model.state_dict()
    for at, module in model.named_modules():
        prefix = f'{at}.' if at else ''
        _check_form(module, {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}, name)
    # what authors leave in their weights without using it, as the class token of an SLA DeiT, may be there too
    wrong = [k for k in target if k not in state] or [
        k for k in state if k not in target and not _MAY_BE_UNUSED.search(k)
    ]
    if wrong:
        side = 'lacks' if wrong[0] in target else 'has, and the model has not,'
        more = f' and {len(wrong) - 1} more' if len(wrong) > 1 else ''
        raise ValueError(
            f'checkpoint {name} is not of this config: it {side} {wrong[0]!r}{more}. Give the config that it was '
            'trained with.'
        )
    for key, value in target.items():
        if value.shape != state[key].shape:
            raise ValueError(
                f'checkpoint {name} is not of this config: {key!r} is {tuple(state[key].shape)} there and '
                f'{tuple(value.shape)} in the model. Give the config that it was trained with.'
            )


# What only a folded backbone has, and what only another has. LayerNorms are in both.
_OF_FOLDED = re.compile(r'\.qkv_of_padding$|\.attn\.(bias|sr_shift)$|(^|\.)norm\d*\.(scale|shift)$')
_OF_UNFOLDED = re.compile(r'(^|\.)norm\d*\.(repbn\.|eta$|bn\.)|\.relative_position_bias_table$')


def _differ(own: Tensor, other: Optional[Tensor]) -> bool:
    return other is not None and own.shape != other.shape


def _check_form(backbone: nn.Module, state: StateDict, name: str) -> None:
    """Raises ValueError if ``backbone`` is one of this package, and one of it and ``state`` is folded, the other not."""
    if not hasattr(backbone, 'deploy') or not hasattr(backbone, 'patch_embed'):
        return
    blocks = [k for k in state if re.match(r'layers\.\d+\.blocks\.', k)]
    lacking = [k for k in backbone.state_dict() if _OF_FOLDED.search(k) and k not in state]
    folded = None
    if any(_OF_FOLDED.search(k) for k in state) or (blocks and not any('.norm1.' in k for k in blocks)):
        folded = True
    elif any(_OF_UNFOLDED.search(k) for k in state) or (blocks and lacking):
        folded = False
    else:  # blocks with LayerNorm: folding copies the kernels that the heads of a linear attention share
        other = [(k, len(v), len(state[k])) for k, v in backbone.state_dict().items() if _differ(v, state.get(k))]
        if other and all('.dwc.' in k for k, _, _ in other):
            folded = other[0][2] > other[0][1]
    if folded and not backbone.deploy:
        raise ValueError(
            f'checkpoint {name} is folded: its norms have become part of other layers. Set deploy=True in the config of '
            'the backbone.'
        )
    if folded is False and backbone.deploy:
        raise ValueError(
            f'checkpoint {name} is not folded, but the {type(backbone).__name__} is built with deploy=True. Run '
            'tools/deploy.py on it, or set deploy=False.'
        )
    if folded and lacking and all(re.match(r'norm\d+\.', k) for k in lacking):
        raise ValueError(
            f'checkpoint {name} is folded, its output norms into the layers after the backbone: it lacks {lacking[0]!r}. '
            'Set out_norm_cfg=None in the config of the backbone.'
        )


def _fit_norms(state: StateDict, model: nn.Module, name: str) -> StateDict:
    """Moves each norm's tensors to where the model's norm of that place wants them."""
    state = dict(state)
    outs = tuple(getattr(model, 'out_indices', ()))
    if len(outs) == 1 and not any(k.startswith(f'norm{outs[0]}.') for k in state):  # a classifier's only norm
        state = {re.sub(r'^norm\.', f'norm{outs[0]}.', k): v for k, v in state.items()}

    def move(old: str, new: str) -> None:
        moved = {key: state.pop(key) for key in list(state) if key.startswith(old)}
        state.update({new + key[len(old) :]: value for key, value in moved.items()})

    def kind(at: str) -> Optional[str]:
        for key, found in (('repbn.eta', 'PRepBN'), ('eta', 'RepBN'), ('bn.weight', 'BN'), ('weight', 'LN')):
            if f'{at}.{key}' in state:
                return found
        return None

    for at, module in model.named_modules():
        if not isinstance(module, (PRepBN, RepBN, TokenBN, nn.LayerNorm)) or at.endswith(('.repbn', '.ln')):
            continue
        wanted, found = {nn.LayerNorm: 'LN', TokenBN: 'BN'}.get(type(module), type(module).__name__), kind(at)
        if found is None or found == wanted:
            continue
        if (wanted, found) == ('PRepBN', 'RepBN'):
            move(f'{at}.', f'{at}.repbn.')
            state[f'{at}.gamma'] = torch.zeros(())
        elif (wanted, found) == ('PRepBN', 'LN'):
            move(f'{at}.', f'{at}.ln.')
        elif (wanted, found) == ('RepBN', 'PRepBN') and state[f'{at}.gamma'] == 0:
            for key in [k for k in state if k.startswith((f'{at}.ln.', f'{at}.gamma'))]:
                del state[key]
            move(f'{at}.repbn.', f'{at}.')
        elif re.match(r'norm\d+$', at):  # the norm on an output: a detector has its own
            for key in [k for k in state if k.startswith(f'{at}.')]:
                state[f'{at}.{found}.{key[len(at) + 1 :]}'] = state.pop(key)  # stays, as unused
        else:
            gamma = f' at gamma {float(state[at + ".gamma"]):g}' if found == 'PRepBN' else ''
            raise ValueError(
                f"checkpoint {name!r} has a {found}{gamma} at {at!r}, but the model's norm_cfg makes a {wanted} there. "
                f"Build it with norm_cfg=dict(type='{found}')."
            )
    return state


def _resize(key: str, value: Tensor, target: Tensor, model: nn.Module, name: str) -> Tensor:
    """Position terms of another window or image, resized; any other tensor of another shape is an error."""
    module = model.get_submodule(key.rpartition('.')[0])
    window = getattr(module, 'window_size', None)
    if isinstance(module, PositionEmbedding) and value.dim() == 3 and value.shape[2] == target.shape[2]:
        has, wants = int(_side(value.shape[1]) is None), int(module.cls_token is not None)
        side = _side(value.shape[1] - has)
        if side is not None and has >= wants:
            grid = value[:, has:]
            if (side, side) != module.grid:
                grid = resize_positional_encoding(grid, (side, side), module.grid, module.mode)
            return torch.cat([value[:, :wants], grid], dim=1)
    if key.endswith('positional_encoding') and value.dim() == 3 and value.shape[2] == target.shape[2]:
        side, (h, w) = _side(value.shape[1]), module.encoding_size
        if side is not None and (h == w or '.branches.' not in key):  # of CSWin's stripes the old shape is unknown
            return resize_positional_encoding(value, (side, side), module.encoding_size)
    if key.endswith('relative_position_bias_table') and value.dim() == 2 and value.shape[1] == target.shape[1]:
        side = _side(value.shape[0])
        if side is not None and window is not None:
            grid = value.reshape(1, side, side, -1).permute(0, 3, 1, 2).float()
            new = tuple(2 * w - 1 for w in window)
            grid = F.interpolate(grid, size=new, mode='bicubic', align_corners=False)
            return grid.flatten(2).squeeze(0).t().to(value.dtype)
    raise ValueError(
        f'checkpoint {name!r} is of another architecture: {key!r} is {tuple(value.shape)} there and '
        f"{tuple(target.shape)} in the model. Set the backbone's arch to the checkpoint's."
    )


def _side(tokens: int) -> Optional[int]:
    """The side of a square of so many tokens, or None."""
    side = round(tokens**0.5)
    return side if side * side == tokens else None


def _check_complete(report: LoadReport, model: nn.Module, name: str, prefix: Optional[str]) -> None:
    """A block too few or too many means another architecture, however well the rest fits."""
    norms = tuple(f'{at}.' for at, m in model.named_modules() if isinstance(m, (PRepBN, RepBN, TokenBN)))
    with_norm = {k for k in report.taken if k.startswith(norms)}

    def norm_part(key: str) -> bool:  # part of a norm of which the checkpoint has another part
        return any(key.startswith(at) and any(k.startswith(at) for k in with_norm) for at in norms)

    missing = [k for k in report.new if not _MAY_BE_NEW.search(k) and not norm_part(k)]
    layers = len(model.layers) if hasattr(model, 'layers') else None

    def beyond(key: str) -> bool:  # a stage after the last one that is returned is not built
        m = re.match(r'layers\.(\d+)\.(downsample)?', key)
        return bool(m and layers and (int(m[1]) >= layers or (m[2] and int(m[1]) == layers - 1)))

    outside = report.unused if prefix is None else [k for k in report.unused if not k.startswith(prefix)]
    strange = [k for k in outside if not _MAY_BE_UNUSED.search(k) and not beyond(k)]
    if prefix is not None:  # keys outside the prefix are another module's
        strange = [k for k in strange if k.startswith(('patch_embed.', 'layers.'))]
    if missing or strange:
        what = f'it lacks {missing[0]!r}' if missing else f'the model has no {strange[0]!r}'
        more = len(missing) + len(strange) - 1
        raise ValueError(
            f'checkpoint {name!r} is of another architecture: {what}{f" (and {more} more)" if more else ""}. '
            "Set the backbone's arch, attn and norm_cfg to the checkpoint's."
        )
