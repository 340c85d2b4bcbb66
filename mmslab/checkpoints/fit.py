"""Weights into a given model: taken, resized, refused.

A checkpoint may lack what the model has for three reasons alone, each of which holds for whole parts: its norms are of another
kind, its attention is, or its network has no such part anywhere (norms on the outputs, norms in the MLPs, the counters that
BatchNorm has had since torch 0.4.1). A single tensor that is not there is a gap, and an error.
"""

import logging
import os
import re
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.logging import print_log
from mmengine.model import BaseTTAModel, is_model_wrapper
from torch import Tensor

from ..layers.attention import may_leave, own_parts, resize_positional_encoding
from ..layers.embed import PositionEmbedding
from ..layers.norm import PRepBN, RepBN, TokenBN
from .files import StateDict, read_state_dict
from .names import canonical, fit_projections

_MAX_REASONS = 5  # lines of the report for what is new, and as many for what is unused


@dataclass
class LoadReport:
    """What became of every tensor: names of the checkpoint (``unused``) and of the model (the others).

    ``reasons`` says of each new and each unused tensor why it is. As a string it is a summary of at most a dozen lines,
    which gives for each reason how many there are, and examples.
    """

    taken: List[str] = field(default_factory=list)
    resized: List[str] = field(default_factory=list)
    new: List[str] = field(default_factory=list)
    unused: List[str] = field(default_factory=list)
    reasons: Dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f'{len(self.taken)} tensors taken, {len(self.resized)} resized, {len(self.new)} newly initialized, '
            f'{len(self.unused)} unused'
        ]
        for what in ('resized', 'new', 'unused'):
            by_reason: Dict[str, List[str]] = {}
            for key in getattr(self, what):
                by_reason.setdefault(self.reasons.get(key, ''), []).append(key)
            groups = list(by_reason.items())
            if len(groups) > _MAX_REASONS:
                rest = groups[_MAX_REASONS - 1 :]
                groups[_MAX_REASONS - 1 :] = [('; '.join(r for r, _ in rest), [k for _, keys in rest for k in keys])]
            for reason, keys in groups:
                more = ', ...' if len(keys) > 2 else ''
                lines.append(f'  {len(keys)} {what}: {", ".join(keys[:2])}{more}{reason and f" ({reason})"}')
        return '\n'.join(lines)


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
      model has no class token, its embedding and that of a distillation token are left out.
    * Attention of another kind takes the projections; what only one of the two kinds has (:mod:`mmslab.layers.attention`)
      is new or unused.
    * Norms on the outputs may all be new, or all but the last, the only one that a classifier has; so may all norms in the
      MLPs, and all counters of batches.
    * All else must be there and have the right shape. What was done is logged, by reason.

    Args:
        backbone (nn.Module): Built, its parameters on any device.
        checkpoint (str | Path | dict): A file, or what a file holds.
        prefix (str, optional): Take only keys with this prefix. By default ``backbone.`` if any key has it.
        trust (bool): See :func:`load_file`.
        logger: As in mmengine's ``print_log``.

    Returns:
        LoadReport: The names of tensors taken, resized, new and unused, and why they are new or unused.

    Raises:
        FileNotFoundError, ValueError: See :func:`read_state_dict`; ValueError also for a checkpoint of another
            architecture or of another norm, one with a gap, one with LayerNorms for PRepBNs at gamma 0 whose statistics
            will not be learnt, or if just one of checkpoint and backbone is folded. Nothing is loaded then.
    """
    name = 'dict' if isinstance(checkpoint, dict) else str(checkpoint)
    model = backbone.module if is_model_wrapper(backbone) else backbone
    if not _is_backbone(model):
        raise ValueError(
            f'backbone must be one of mmslab, but got a {type(model).__name__}. Of a detector, pass model.backbone.'
        )
    state = canonical(read_state_dict(checkpoint, trust))
    report = LoadReport()
    if prefix is None and any(k.startswith('backbone.') for k in state):
        prefix = 'backbone.'
    if prefix:
        prefix = prefix.rstrip('.') + '.'
        report.unused += [k for k in state if not k.startswith(prefix)]
        report.reasons.update(dict.fromkeys(report.unused, f'not in {prefix}*'))
        state = {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}
    target = model.state_dict()
    _check_form(model, state, repr(name))
    state = fit_projections(state, lambda at: f'{at}kv.weight' not in target)
    state, converted, left = _fit_norms(state, model, name)
    fitted: StateDict = {}
    for key, value in state.items():
        if key not in target:
            continue
        if value.shape == target[key].shape:
            fitted[key] = value
            report.taken.append(key)
        else:
            fitted[key] = _resize(key, value, target[key], model, name)
            report.resized.append(key)
    left += [k for k in state if k not in target]
    report.new = [k for k in target if k not in fitted]
    report.unused += left
    if not report.taken:
        raise ValueError(
            f'checkpoint {name!r} has no tensor of {type(model).__name__}; its keys begin with '
            f'{", ".join(sorted(state)[:3]) or "another prefix"}. Give weights of this kind of backbone.'
        )
    report.reasons.update(_why_new(model, list(target), report.new, left, converted))
    report.reasons.update(_why_unused(model, left))
    _check_complete(
        [k for k in report.new if k not in report.reasons], [k for k in left if k not in report.reasons], name
    )
    warnings = _check_handover(model, report.new, converted, name)
    gamma = {k: float(v) for k, v in fitted.items() if k.endswith('gamma')}
    other = next((k for k in gamma if gamma[k] > 0 and target[k] == 0), None)
    if other is not None:
        warnings.append(
            f'{name} is from the middle of a handover: its gamma, {gamma[other]:g}, takes the place of the configured 0. Without '
            'a GammaDecayHook it will stay there.'
        )
    model.load_state_dict(fitted, strict=False)
    print_log(f'{name} into {type(model).__name__}: {report}', logger=logger)
    for warning in warnings:
        print_log(warning, logger=logger, level=logging.WARNING)
    return report


def check_fits(model: nn.Module, checkpoint: Union[str, os.PathLike, dict], name: Optional[str] = None) -> None:
    """Raises ValueError unless ``checkpoint`` has just the weights of ``model``, finite: what evaluation and resuming need.

    mmengine's own loader leaves a model as it is where a checkpoint does not fit, with a warning. ``checkpoint`` is a file,
    or what a file holds, which ``name`` then names.
    """
    name = name or ('the given dict' if isinstance(checkpoint, dict) else repr(str(checkpoint)))
    state = read_state_dict(checkpoint, name=name)
    model = model.module if is_model_wrapper(model) else model
    model = model.module if isinstance(model, BaseTTAModel) else model
    target = model.state_dict()
    for at, module in model.named_modules():
        if not _is_backbone(module):
            continue
        prefix = f'{at}.' if at else ''
        _check_form(module, {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}, name)
    # what authors leave in their weights without using it, as the class token of an SLA DeiT, may be there too
    wrong = [k for k in target if k not in state] or [k for k in state if k not in target and not _LEFT_OVER.search(k)]
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


def _is_backbone(module: nn.Module) -> bool:
    return hasattr(module, 'attentions')  # mmslab.backbones imports this module, not the other way round


def _differ(own: Tensor, other: Optional[Tensor]) -> bool:
    return other is not None and own.shape != other.shape


def _check_form(backbone: nn.Module, state: StateDict, name: str) -> None:
    """Raises ValueError if just one of ``backbone`` and ``state`` is folded."""
    blocks = [k for k in state if re.match(r'layers\.\d+\.blocks\.', k)]
    lacking = [k for k in backbone.state_dict() if _OF_FOLDED.search(k) and k not in state]
    folded = None
    if any(_OF_FOLDED.search(k) for k in state) or (blocks and not any('.norm1.' in k for k in blocks)):
        folded = True
    elif any(_OF_UNFOLDED.search(k) for k in state) or (blocks and lacking):
        folded = False
    else:  # blocks with LayerNorm: folding copies the kernels that the heads of a linear attention share
        other = [
            (k, v.shape[:1], state[k].shape[:1]) for k, v in backbone.state_dict().items() if _differ(v, state.get(k))
        ]
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
            'mmslab deploy on it, or set deploy=False.'
        )
    if folded and lacking and all(re.match(r'norm\d+\.', k) for k in lacking):
        raise ValueError(
            f'checkpoint {name} is folded, its output norms into the layers after the backbone: it lacks {lacking[0]!r}. '
            'Set out_norm_cfg=None in the config of the backbone.'
        )


_BN = ('weight', 'bias', 'running_mean', 'running_var')
# The tensors of each kind of norm, without BatchNorm's counter, which old checkpoints lack. A kind is told by having any
# of those that begin so, the first that fits.
_NORMS = {
    'PRepBN': ('gamma', 'ln.weight', 'ln.bias', 'repbn.eta', *(f'repbn.bn.{k}' for k in _BN)),
    'RepBN': ('eta', *(f'bn.{k}' for k in _BN)),
    'BN': tuple(f'bn.{k}' for k in _BN),
    'LN': ('weight', 'bias'),
}
_TELLTALES = {'PRepBN': ('gamma', 'ln.', 'repbn.'), 'RepBN': ('eta',), 'BN': ('bn.',), 'LN': ('weight', 'bias')}
_OUTPUT_NORM = re.compile(r'norm\d+$')
# A PRepBN may be made from these: where their tensors go, and why the rest of it is new then
_INTO_PREPBN = {'LN': ('ln', 'RepBN and gamma, beside a LayerNorm'), 'RepBN': ('repbn', 'LayerNorm, beside a RepBN')}


def _fit_norms(state: StateDict, model: nn.Module, name: str) -> Tuple[StateDict, Dict[str, str], List[str]]:
    """Moves each norm's tensors to where the model's norm of that place wants them.

    Returns:
        tuple[dict, dict, list]: The tensors; the places of PRepBNs that are made from another norm, with that norm's kind;
        the names of norms on the outputs that the model cannot take, and does without.
    """
    state = dict(state)
    outs = tuple(getattr(model, 'out_indices', ()))
    if len(outs) == 1 and not any(k.startswith(f'norm{outs[0]}.') for k in state):  # a classifier's only norm
        state = {re.sub(r'^norm\.', f'norm{outs[0]}.', k): v for k, v in state.items()}

    def move(old: str, new: str) -> None:
        moved = {key: state.pop(key) for key in list(state) if key.startswith(old)}
        state.update({new + key[len(old) :]: value for key, value in moved.items()})

    converted: Dict[str, str] = {}
    left: List[str] = []
    kinds: Dict[str, Dict[str, str]] = {}  # argument that makes the norm -> place -> kind in the checkpoint
    for at, module in model.named_modules():
        if not isinstance(module, (PRepBN, RepBN, TokenBN, nn.LayerNorm)) or at.endswith(('.repbn', '.ln')):
            continue
        wanted = {nn.LayerNorm: 'LN', TokenBN: 'BN'}.get(type(module), type(module).__name__)
        parts = {k[len(at) + 1 :] for k in state if k.startswith(f'{at}.')}
        found = next((k for k, begins in _TELLTALES.items() if any(p.startswith(begins) for p in parts)), None)
        if found is None:
            continue
        argument = _argument(at)
        kinds.setdefault(argument, {})[at] = found
        if found == wanted:
            continue
        no_eta = found == 'BN' and wanted in ('RepBN', 'PRepBN')  # a gap, or another norm: only the user can tell
        into_prepbn = wanted == 'PRepBN' and found in _INTO_PREPBN
        if into_prepbn or (wanted, found) == ('RepBN', 'PRepBN'):
            _check_complete([f'{at}.{part}' for part in _NORMS[found] if part not in parts], [], name)
        if into_prepbn:
            move(f'{at}.', f'{at}.{_INTO_PREPBN[found][0]}.')
            converted[at] = found
            if found == 'RepBN':
                state[f'{at}.gamma'] = torch.zeros(())
        elif (wanted, found) == ('RepBN', 'PRepBN') and state[f'{at}.gamma'] == 0:
            for key in [k for k in state if k.startswith((f'{at}.ln.', f'{at}.gamma'))]:
                del state[key]
            move(f'{at}.repbn.', f'{at}.')
        elif _OUTPUT_NORM.match(at) and not no_eta:  # a detector has its own
            left += [f'{at}.{part}' for part in parts]
            state = {k: v for k, v in state.items() if not k.startswith(f'{at}.')}
        else:
            value = state.get(f'{at}.gamma')
            gamma = f' at gamma {float(value):g}' if value is not None and value.numel() == 1 else ''
            without = f' without {f"{at}.eta"!r}' if no_eta else ''
            raise ValueError(
                f"checkpoint {name!r} has a {found}{gamma} at {at!r}{without}, but the model's {argument} makes a {wanted} "
                f"there. Build it with {argument}=dict(type='{found}')."
            )
    for places in kinds.values():  # one argument makes them all: a PRepBN among LayerNorms is a gap
        if len(set(places.values())) > 1:
            at = next((at for at in places if at in converted), None)
            if at is not None:
                _check_complete([f'{at}.gamma' if converted[at] == 'LN' else f'{at}.ln.weight'], [], name)
    return state, converted, left


def _argument(at: str) -> str:
    """The argument of the backbone that makes the norm at ``at``."""
    if _OUTPUT_NORM.match(at):
        return 'out_norm_cfg'
    if at.endswith('.mlp.norm'):
        return 'ffn_norm_cfg'
    return "attn's norm_cfg" if '.attn.' in at else 'norm_cfg'


def _resize(key: str, value: Tensor, target: Tensor, model: nn.Module, name: str) -> Tensor:
    """Position terms of another window or image, resized; any other tensor of another shape is an error."""
    module = model.get_submodule(key.rpartition('.')[0])
    window = getattr(module, 'window_size', None)
    encodes = value.dim() == 3 and value.numel() > 0 and value.shape[::2] == target.shape[::2]
    if isinstance(module, PositionEmbedding) and encodes:
        wants, has = len(module.tokens()), next((n for n in range(3) if _side(value.shape[1] - n)), None)
        if has == 2 and wants == 1:
            raise ValueError(
                f'checkpoint {name!r} has a distillation token, which takes part in the attention, and the model has none. '
                'Build it with distilled=True.'
            )
        if has is not None and has >= wants:
            side, grid = _side(value.shape[1] - has), value[:, has:]
            if (side, side) != module.grid:
                grid = resize_positional_encoding(grid, (side, side), module.grid, module.mode)
            return torch.cat([value[:, :wants], grid], dim=1)
    if key.endswith('positional_encoding') and encodes:
        side, (h, w) = _side(value.shape[1]), module.encoding_size
        if side is not None and (h == w or '.branches.' not in key):  # of CSWin's stripes the old shape is unknown
            return resize_positional_encoding(value, (side, side), module.encoding_size)
    if key.endswith('relative_position_bias_table') and value.dim() == 2 and value.shape[1] == target.shape[1]:
        side = _side(value.shape[0])
        if side and window is not None:
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


def _why_new(
    model: nn.Module, target: Sequence[str], new: Sequence[str], left: Sequence[str], converted: Dict[str, str]
) -> Dict[str, str]:
    """The reason of each tensor that the checkpoint lacks and may lack; the others are gaps.

    Args:
        target (Sequence[str]): What the model has.
        new (Sequence[str]): What the checkpoint lacks.
        left (Sequence[str]): What it has and the model has not.
        converted (dict): See :func:`_fit_norms`.
    """
    lacking, reasons = set(new), {}
    for at, kind in converted.items():
        into, reason = _INTO_PREPBN[kind]
        reasons.update(
            {k: reason for k in new if k.startswith(f'{at}.') and k.startswith(f'{at}.ln.') == (into == 'repbn')}
        )

    norms = {
        at: [k for k in target if k.startswith(f'{at}.')]
        for at, _ in model.named_modules()
        if _OUTPUT_NORM.match(at) or at.endswith('.mlp.norm')
    }
    for argument, reason in (('out_norm_cfg', 'norms on the outputs'), ('ffn_norm_cfg', 'norms in the MLPs')):
        places = {at: keys for at, keys in norms.items() if keys and _argument(at) == argument}
        there = [at for at, keys in places.items() if not lacking.issuperset(keys)]
        if not there or (argument == 'out_norm_cfg' and there == list(places)[-1:]):  # a classifier has the last one
            reasons.update({k: reason for at, keys in places.items() if at not in there for k in keys})

    counters = [k for k in target if k.endswith('.num_batches_tracked') and k not in reasons]
    counters = [k for k in counters if k.replace('num_batches_tracked', 'running_var') not in lacking]
    if len(counters) > 1 and lacking.issuperset(counters):
        reasons.update(dict.fromkeys(counters, 'counters of batches, which checkpoints of old have not'))
    if not getattr(model, 'deploy', False):  # a folded checkpoint has all of its attention
        reasons.update(_why_new_in_attention(model, lacking.issuperset, left))
    return reasons


def _why_new_in_attention(
    model: nn.Module, lacks: Callable[[Sequence[str]], bool], left: Sequence[str]
) -> Iterator[Tuple[str, str]]:
    """Parts of attention that the checkpoint has in no block of a stage: its attention is of another kind there.

    A part of a single tensor says that only if the checkpoint has other things in the place, or the tensor nowhere.
    """
    stages: Dict[str, Dict[str, Dict[str, List[str]]]] = {}  # part -> stage -> place -> its tensors
    undeclared = set()
    for at, attn in model.attentions():
        for part, names in own_parts(attn).items():
            stages.setdefault(part, {}).setdefault(at.split('.')[1], {})[at] = [f'{at}.{name}' for name in names]
            if part == type(attn).__name__:
                undeclared.add(part)
    for part, by_stage in stages.items():
        without = {stage: places for stage, places in by_stage.items() if all(map(lacks, places.values()))}
        tensors = sum(len(keys) for places in without.values() for keys in places.values())
        nowhere = without == by_stage and (tensors > 1 or part in undeclared)
        for places in without.values():
            other = all(any(k.startswith(f'{at}.') and not _COMPUTED.search(k) for k in left) for at in places)
            if nowhere or other or all(len(keys) > 1 for keys in places.values()):
                yield from ((k, f'{part}, not in its attention') for keys in places.values() for k in keys)


_COMPUTED = re.compile(r'(relative_position_index|attn_mask)$')
_OF_HEADS = r'^(head|head_dist|neck|rpn_head|roi_head|bbox_head|data_preprocessor)\.'
_MAY_BE_UNUSED = (
    (_COMPUTED, 'computed by the model'),
    (re.compile(r'(^|\.)cls_token$'), 'class token'),
    (re.compile(r'(^|\.)dist_token$'), 'distillation token'),
    (re.compile(r'^patch_embed\.mask_token$|^decoder\.'), 'of masked pre-training'),
    (re.compile(r'^norm\d*\.'), 'other norms on the outputs'),
    (re.compile(_OF_HEADS), 'not of a backbone'),
)
# What authors leave in their weights without using it: the class token of an SLA DeiT, the scales of an SLA CSWin
_LEFT_OVER = re.compile(rf'{_COMPUTED.pattern}|(^|\.)cls_token$|attn\.branches\.\d+\.scale$|^norm\d*\.|{_OF_HEADS}')


def _why_unused(model: nn.Module, left: Sequence[str]) -> Dict[str, str]:
    """The reason of each tensor that the model has not and need not have."""
    layers = len(model.layers)
    attentions = dict(model.attentions())

    def beyond(key: str) -> bool:  # a stage after the last one that is returned is not built
        m = re.match(r'layers\.(\d+)\.(downsample)?', key)
        return bool(m and (int(m[1]) >= layers or (m[2] and int(m[1]) == layers - 1)))

    def of_attention(key: str) -> bool:
        at = next((at for at in attentions if key.startswith(f'{at}.')), None)
        return at is not None and may_leave(attentions[at], key[len(at) + 1 :].partition('.')[0])

    reasons = {}
    for key in left:
        if beyond(key):
            reasons[key] = 'stages that the model does not build'
        elif any(pattern.search(key) for pattern, _ in _MAY_BE_UNUSED):
            reasons[key] = next(reason for pattern, reason in _MAY_BE_UNUSED if pattern.search(key))
        elif of_attention(key):
            reasons[key] = 'of another kind of attention'
    return reasons


def _check_complete(missing: Sequence[str], strange: Sequence[str], name: str) -> None:
    """A block too few or too many means another architecture, however well the rest fits; one tensor is a gap."""
    if missing or strange:
        what = f'it lacks {missing[0]!r}' if missing else f'the model has no {strange[0]!r}'
        more = len(missing) + len(strange) - 1
        raise ValueError(
            f'checkpoint {name!r} is incomplete or of another architecture: {what}{f" (and {more} more)" if more else ""}. '
            "Give a complete one, or set the backbone's arch, attn and norm_cfg to the checkpoint's."
        )


_HANDOVER = 'gamma=1.0 in norm_cfg, {}, and GammaDecayHook and BNRecalibrationHook in custom_hooks'


def _check_handover(model: nn.Module, new: Sequence[str], converted: Dict[str, str], name: str) -> List[str]:
    """Raises ValueError where LayerNorms would go unused beside BN statistics that are never learnt; returns warnings."""
    frozen = {m for part in model.frozen() for m in part.modules()}
    kept = [
        at
        for at, m in model.named_modules()
        if isinstance(m, (RepBN, TokenBN)) and f'{at}.bn.running_var' in new and (model.norm_eval or m in frozen)
    ]
    what = 'norm_eval=True' if model.norm_eval else f'frozen_stages={model.frozen_stages}'
    instead = 'norm_eval=False' + (', frozen_stages=-1' if frozen else '')
    at_zero = [at for at, kind in converted.items() if kind == 'LN' and not model.get_submodule(at).ln_needed]
    unlearnt = next((at for at in at_zero if f'{at}.repbn' in kept), None)
    if unlearnt is not None:
        raise ValueError(
            f'checkpoint {name!r} has a LayerNorm at {unlearnt!r}, where the model has a PRepBN at gamma 0, which computes '
            f'its RepBN alone; and {what} keeps the BN statistics of that as initialized. Give weights that were trained '
            f'with PRepBN, or make the handover: {_HANDOVER.format(instead)}.'
        )
    warnings = []
    if at_zero:
        warnings.append(
            f'{name} has LayerNorms, which {len(at_zero)} PRepBNs at gamma 0 do not compute: their RepBNs start untrained, so '
            f'that the features are not those of the pre-training. To make the handover set {_HANDOVER.format(instead)}.'
        )
    if kept:
        warnings.append(
            f'{name} has no BN statistics for {len(kept)} norms, {kept[0]!r} first, and {what} keeps them as initialized. '
            f'Unless gamma stays 1 there, set {instead}.'
        )
    return warnings
