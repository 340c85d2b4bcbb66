"""Any model's LayerNorms and RMSNorms become PRepBNs, which compute the same until gamma falls (SLAB paper, Eq. 5)."""

import math
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, Type, Union

import torch
import torch.nn as nn
from mmengine.logging import print_log
from mmengine.registry import MODELS
from torch import Tensor

from ..layers.norm import PRepBN

Patterns = Union[str, Iterable[str], None]

# Norms by the exact class, since a subclass may normalize something else (timm's and mmpretrain's LayerNorm2d are subclasses of
# torch's LayerNorm): where it is defined, its name, and the dimension of its channels
_KNOWN: Dict[Tuple[str, str], int] = {
    ('torch.nn.modules.normalization', 'LayerNorm'): -1,
    ('torch.nn.modules.normalization', 'RMSNorm'): -1,
    ('mmslab.layers.norm', 'RMSNorm'): -1,
    ('mmpretrain.models.utils.norm', 'LayerNorm2d'): 1,
    ('mmdet.models.layers.transformer.utils', 'LayerNorm2d'): 1,
    ('torchvision.models.convnext', 'LayerNorm2d'): 1,
    ('timm.layers.norm', 'LayerNorm'): -1,
    ('timm.layers.norm', 'LayerNorm2d'): 1,
    ('timm.layers.norm', 'LayerNormFp32'): -1,
    ('timm.layers.norm', 'LayerNorm2dFp32'): 1,
    ('timm.layers.norm', 'RmsNorm'): -1,
    ('timm.layers.norm', 'RmsNorm2d'): 1,
    ('timm.models.mambaout', 'LayerNorm'): -1,
}
_REGISTERED: Dict[type, int] = {}


@dataclass
class ConversionRow:
    """What became of a norm: its name in the model, its class, 'converted' or 'kept', and why it was kept."""

    name: str
    kind: str
    fate: str
    reason: str = ''


@dataclass
class ConversionReport:
    """What became of each norm of a model. ``print`` shows a table."""

    rows: List[ConversionRow] = field(default_factory=list)

    def count(self, fate: str) -> int:
        return sum(row.fate == fate for row in self.rows)

    def __str__(self) -> str:
        names, kinds = (max([len(getattr(r, k)) for r in self.rows], default=0) for k in ('name', 'kind'))
        lines = [f'{r.name:<{names}}  {r.kind:<{kinds}}  {r.fate:<9}  {r.reason}'.rstrip() for r in self.rows]
        return '\n'.join(
            [*lines, f'{len(self.rows)} norms: {self.count("converted")} converted, {self.count("kept")} kept']
        )


def register_norm(channel_dim: int = -1) -> Callable[[Type[nn.Module]], Type[nn.Module]]:
    """Class decorator: instances of this very class normalize each token's channels, which are in ``channel_dim``.

    They have their number of channels from ``weight``, ``normalized_shape`` or ``num_features``.
    """

    def register(cls: Type[nn.Module]) -> Type[nn.Module]:
        _REGISTERED[cls] = channel_dim
        return cls

    return register


def convert_norms(
    model: nn.Module, include: Patterns = None, exclude: Patterns = None, **prepbn: Any
) -> ConversionReport:
    """Puts a PRepBN at gamma 1 around each LayerNorm and RMSNorm of ``model``, in place: the same outputs, to the bit.

    Converted are torch's LayerNorm and RMSNorm, channels-first ones of timm, mmpretrain and torchvision, classes named
    ``...RMSNorm`` that have a weight and compute what that name says (it is tried), and what :func:`register_norm` names;
    no subclasses of these. The norm itself stays, as the PRepBN's online part, with its weights, type, device and state of
    training; its keys in checkpoints get ``ln.`` before their last part, and a checkpoint of the unconverted model loads.

    Then train while gamma falls (``GammaDecayHook``, or :func:`mmslab.layers.set_gamma` in any loop), recalibrate, and
    ``mmslab.fold``.

    Args:
        model (nn.Module): Any.
        include (str | list[str], optional): Names of modules, or patterns of them (``'blocks.*.norm1'``): what is within
            them is converted. Everything by default.
        exclude (str | list[str], optional): What is not.
        **prepbn: ``eps``, ``momentum`` and ``use_eta`` of the RepBNs.

    Returns:
        ConversionReport: What became of each norm, and why.

    Raises:
        ValueError: If a pattern fits no module, or there is no norm to convert; nothing has changed then.
    """
    names = {name: m for name, m in model.named_modules() if name}
    for argument, patterns in (('include', include), ('exclude', exclude)):
        for pattern in _listed(patterns):
            if not any(_fits(name, [pattern]) for name in names):
                raise ValueError(
                    f'{argument}: {pattern!r} fits no module of {type(model).__name__}. Use names as {_some(names)}.'
                )
    report, found = ConversionReport(), {}
    inside = tuple(f'{name}.' for name, m in names.items() if isinstance(m, PRepBN))
    for name, module in names.items():
        if name.startswith(inside) or not _looks_like_norm(module):
            continue
        row = ConversionRow(name, type(module).__name__, 'converted')
        report.rows.append(row)
        reason = _why_not(module)
        if (include is not None and not _fits(name, _listed(include))) or _fits(name, _listed(exclude)):
            reason = 'by include' if not _fits(name, _listed(exclude)) else 'by exclude'
        if reason:
            row.fate, row.reason = 'kept', reason
        else:
            found[name] = module
    if not found:
        raise ValueError(f'{type(model).__name__} has no norm to convert:\n{report}')
    made = {id(norm): _around(norm, prepbn) for norm in found.values()}
    for parent in list(model.modules()):
        if not isinstance(parent, PRepBN):
            for key, child in parent._modules.items():
                if id(child) in made:
                    parent._modules[key] = made[id(child)]
                    if isinstance(parent, nn.TransformerEncoderLayer):
                        parent.activation_relu_or_gelu = (
                            0  # it would leave its modules out, and compute with their weights
                        )
    keys = {f'{name}.{key}': f'{name}.ln.{key}' for name, m in found.items() for key in m.state_dict()}
    model._register_load_state_dict_pre_hook(_Unconverted(keys, list(found)))
    return report


@MODELS.register_module(name='ConvertNorms')
def build_converted(model: dict, include: Patterns = None, exclude: Patterns = None, **prepbn: Any) -> nn.Module:
    """Builds ``model`` and converts its norms, see :func:`convert_norms`: the model itself comes out, of whatever project.

    ``model = dict(type='ConvertNorms', model=dict(type='MaskRCNN', ...), include='backbone')``
    """
    built = MODELS.build(model)
    report = convert_norms(built, include, exclude, **prepbn)
    print_log(f'ConvertNorms: {str(report).splitlines()[-1]} in {type(built).__name__}', logger='current')
    return built


class _Unconverted:
    """Lets a checkpoint of the model with its own norms load: a hook before ``load_state_dict``."""

    def __init__(self, keys: Dict[str, str], norms: List[str]) -> None:
        self.keys, self.norms = keys, norms

    def __call__(self, state: Dict[str, Tensor], prefix: str, *args: Any) -> None:
        moved = {prefix + old: prefix + new for old, new in self.keys.items()}
        moved = {old: new for old, new in moved.items() if old in state and new not in state}
        for old, new in moved.items():
            state[new] = state.pop(old)
        if moved:
            count = len({old.rpartition('.')[0] for old in moved})
            print_log(
                f'{count} norms of an unconverted model became the online part of PRepBNs, whose RepBNs stay as they are.',
                logger='current',
            )


def _around(norm: nn.Module, prepbn: Dict[str, Any]) -> PRepBN:
    channels = _channels(norm)
    made = PRepBN.around(norm, channels, _channel_dim(norm), **prepbn)
    if _offset(norm) and norm.weight is not None:
        made.repbn.bn.weight.data.add_(1)
    return made


def _channel_dim(norm: nn.Module) -> int:
    if type(norm) in _REGISTERED:
        return _REGISTERED[type(norm)]
    return _KNOWN.get((type(norm).__module__, type(norm).__name__), -1)


def _channels(norm: nn.Module) -> int:
    shape = getattr(norm, 'normalized_shape', None)
    if shape is not None:
        return shape[-1] if isinstance(shape, (tuple, list, torch.Size)) else int(shape)
    weight = getattr(norm, 'weight', None)
    return len(weight) if weight is not None else norm.num_features


def _looks_like_norm(module: nn.Module) -> bool:
    kind = type(module).__name__.lower()
    return (
        type(module) in _REGISTERED
        or isinstance(module, nn.LayerNorm)
        or any(word in kind for word in ('layernorm', 'rmsnorm'))
    )


def _why_not(norm: nn.Module) -> str:
    """Why ``norm`` is not converted; '' if it is."""
    if type(norm) in _REGISTERED:
        return ''
    known = (type(norm).__module__, type(norm).__name__) in _KNOWN
    if len(getattr(norm, 'normalized_shape', (1,))) > 1:
        return f'over {len(norm.normalized_shape)} dimensions, {tuple(norm.normalized_shape)}'
    if known:
        return ''
    if _is_rms(norm):
        return ''
    return f'{type(norm).__module__}.{type(norm).__name__} is not known: mmslab.handover.register_norm'


@torch.no_grad()
def _is_rms(norm: nn.Module) -> bool:
    """Whether a class named so computes ``weight * x / sqrt(mean(x^2) + eps)``, or with ``1 + weight``."""
    weight, eps = getattr(norm, 'weight', None), _eps(norm)
    if 'RMSNorm' not in type(norm).__name__ or weight is None or weight.dim() != 1 or eps is None or weight.is_meta:
        return False
    x = torch.randn(4, len(weight), generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    x = (x * torch.tensor([[1e-3], [1.0], [10.0], [1.0]]) + torch.tensor([[0.0], [0.0], [3.0], [1.0]])).to(weight)
    try:
        given = norm(x).double()
    except Exception:
        return False
    x = x.double()
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    tolerance = 64 * torch.finfo(weight.dtype).eps
    scale = weight.double() + _offset(norm)
    return given.shape == x.shape and torch.allclose(given, scale * normed, rtol=tolerance, atol=tolerance)


def _offset(norm: nn.Module) -> int:
    """Whether the weight is counted from 1, as Gemma's."""
    return int('Gemma' in type(norm).__name__)


def _eps(norm: nn.Module) -> Optional[float]:
    for name in ('variance_epsilon', 'eps', 'epsilon'):
        value = getattr(norm, name, None)
        if isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
    return None


def _listed(patterns: Patterns) -> List[str]:
    return [] if patterns is None else [patterns] if isinstance(patterns, str) else list(patterns)


def _fits(name: str, patterns: List[str]) -> bool:
    return any(fnmatchcase(name, p) or fnmatchcase(name, f'{p}.*') for p in patterns)


def _some(names: Iterable[str]) -> str:
    return ', '.join(repr(name) for name in list(names)[:3])
