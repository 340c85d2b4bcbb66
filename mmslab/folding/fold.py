"""Folding norms of any model into its linear layers and convolutions: the sums, in float64, and their proof.

What a layer computes of a norm's output ``scale * x + shift`` (SLAB paper, Lemma 4.1) it computes of ``x`` with other weights:
``W (scale * x + shift) + b = (W scale) x + (W shift + b)``. A norm after a layer goes back into it,
``scale * (W x + b) + shift = (scale W) x + (scale b + shift)``. :mod:`mmslab.folding.labels` tells where that is right.
"""

import copy
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..layers.compare import relative_difference
from ..layers.fold import Affine, affine_of, check_foldable, is_affine
from ..layers.norm import PRepBN, RepBN, TokenBN, channel_dim_of
from .labels import UNKNOWN, ZERO, Slot, Trace, trace

NORMS = (PRepBN, RepBN, TokenBN)
TOLERANCE = 1e-10  # of a comparison in float64, unless the model magnifies rounding
Example = Union[Tensor, tuple, Mapping[str, Any], Callable[[nn.Module], Any]]


class Folded(nn.Identity):
    """In the place of a folded norm; it takes what the norm took."""

    def forward(self, x: Tensor, data_format: Optional[str] = None) -> Tensor:
        return x


@dataclass
class Row:
    """What became of a norm.

    Args:
        name (str): Its name in the model.
        fate (str): 'folded', 'scale and shift', or 'kept'.
        detail (str): The layers that took it, or why none did.
    """

    name: str
    fate: str
    detail: str


@dataclass
class Report:
    """What became of each norm of a model. ``print`` shows a table.

    Args:
        rows (list[Row]): In the order of the model's modules.
        difference (float): Of the outputs before and after, relative, in float64; the largest of all examples.
        examples (list[str]): Sizes of what the model was run on.
    """

    rows: List[Row] = field(default_factory=list)
    difference: float = 0.0
    examples: List[str] = field(default_factory=list)

    def count(self, fate: str) -> int:
        return sum(row.fate == fate for row in self.rows)

    def __str__(self) -> str:
        names = max([len(row.name) for row in self.rows], default=0)
        lines = [f'{row.name:<{names}}  {row.fate:<15}  {row.detail}' for row in self.rows]
        counts = ', '.join(f'{self.count(fate)} {fate}' for fate in ('folded', 'scale and shift', 'kept'))
        ran = ', '.join(self.examples)
        return '\n'.join([*lines, f'{len(self.rows)} norms: {counts}; outputs differ by {self.difference:.1e} ({ran})'])


@dataclass
class Plan:
    """Which norms go where.

    Args:
        into (dict[str, list[str]]): For each norm that folds the layers that take it.
        forward (dict[Slot, Tensor]): For each layer the labels of its input channels.
        backward (dict[str, dict]): For each norm that goes back the channels of layers, ``(slot, channel) -> channel``.
        reasons (dict[str, str]): For each norm that does not fold, why.
    """

    into: Dict[str, List[str]] = field(default_factory=dict)
    forward: Dict[Slot, Tensor] = field(default_factory=dict)
    backward: Dict[str, Dict[Tuple[Slot, int], int]] = field(default_factory=dict)
    reasons: Dict[str, str] = field(default_factory=dict)


def fold(model: nn.Module, *examples: Example) -> Report:
    """Folds every PRepBN and RepBN of any model into its neighbours, in place: the same outputs, faster.

    The model is run on the examples to see which layers take a norm, see :mod:`mmslab.folding.labels`. What no layer takes
    becomes a scale and a shift. Other norms are left alone, LayerNorms that were not converted among them. Before ``model``
    is changed, a copy of it in float64 is folded and compared with the original; a norm by which outputs change by more than
    1e-10, or ten times what rounding of the weights makes of the original itself, is not folded, and the report names it.

    Args:
        model (nn.Module): In eval mode; every PRepBN at gamma 0.
        *examples (Tensor | tuple | dict | callable): What to run the model on: its input, a tuple or dict of its arguments, or a
            function that is given the model. Of an input that is a tensor of images or tokens, one of another size and one with
            twice the batch are made too; of any other give two sizes, one of them divisible by nothing, since a model may pad at
            some sizes only.

    Returns:
        Report: What became of each norm, and why.

    Raises:
        ValueError: If no example is given, a part of the model is in training mode or has gamma above 0, or the model cannot
            be run on an example. Nothing has changed then.
    """
    if not examples:
        raise ValueError('fold() needs an example to run the model on, but got none. Pass fold(model, images).')
    norms = {name: m for name, m in model.named_modules() if isinstance(m, NORMS)}
    norms = {n: m for n, m in norms.items() if not isinstance(norms.get(n.rpartition('.')[0]), PRepBN)}
    check_foldable(model)
    runs = list(_runs(model, examples))
    known = {n: m for n, m in norms.items() if is_affine(m)}
    found = trace(model, [run for _, run in runs], list(known))
    affine = {n: affine_of(m) for n, m in known.items() if found.norms[n].calls}
    plan = make_plan(model, found, affine)

    proof = _copy(model).double()
    expected = [_run(proof, run) for _, run in runs]

    def difference(names: Iterable[str]) -> float:
        trial = copy.deepcopy(proof)
        apply(trial, plan, affine, found, set(names))
        return max(relative_difference(_run(trial, run), e) for (_, run), e in zip(runs, expected))

    tolerance, by = TOLERANCE, difference(plan.into)
    if by > tolerance:  # a model may magnify rounding
        tolerance = max(tolerance, 10 * _rounding(proof, [run for _, run in runs], expected))
    rejected = _rejected(sorted(plan.into), difference, tolerance) if by > tolerance else {}
    for name, by in rejected.items():
        plan.reasons[name] = f'outputs would differ by {by:.1e}'
        del plan.into[name]
    if rejected:
        by = difference(plan.into)
    report = Report(difference=by, examples=[text for text, _ in runs])
    apply(model, plan, affine, found, set(plan.into))
    for name in norms:
        if name in plan.into:
            report.rows.append(Row(name, 'folded', f'into {", ".join(plan.into[name])}'))
        elif name in affine:
            report.rows.append(Row(name, 'scale and shift', plan.reasons[name]))
        elif name in known:
            report.rows.append(Row(name, 'kept', 'not run'))
        else:
            report.rows.append(Row(name, 'kept', f'{type(norms[name]).__name__} with hooks or methods of its own'))
    return report


def make_plan(model: nn.Module, found: Trace, affine: Mapping[str, Tuple[Tensor, Tensor]]) -> Plan:
    """Decides for each norm whether it folds, from what the runs have shown."""
    plan = Plan()
    broken = {slot: reason for slot in (*found.inputs, *found.layers) for reason in [_why_not(slot, found)] if reason}
    takers: Dict[str, Dict[Slot, None]] = defaultdict(dict)
    for slot, calls in found.inputs.items():
        first = calls[0]
        differ = torch.stack([row != first for row in calls]).any(0)
        plan.forward[slot] = first.masked_fill(differ, UNKNOWN)
        for label in torch.stack(calls).unique().tolist():
            if label > ZERO:
                source, channel = found.source(label)
                if source.slot is None:
                    takers[source.name][slot] = None
                    columns = (torch.stack(calls) == label).any(0)
                    if (columns & differ).any():
                        source.barriers.setdefault(channel, f'{slot.layer}, which takes something else too')
                else:
                    source.barriers.setdefault(channel, slot.layer)
    for name, (_, shift) in affine.items():
        source = found.norms[name]
        reason = next(iter(source.barriers.values()), None)
        for slot in takers[name]:
            reason = reason or broken.get(slot)
            if shift.any() and slot.padded:
                reason = reason or f'zero padding in {slot.layer}'
            if shift.any() and slot.bias is None and not slot.grows:
                reason = reason or f'no bias in {slot.layer}'
        if reason is None and takers[name]:
            plan.into[name] = [slot.layer for slot in takers[name]]
        elif reason is None:
            plan.reasons[name] = 'nothing takes it'
        else:
            back = _backward(found, name, shift, broken)
            if back is None:
                plan.reasons[name] = reason
            else:
                plan.backward[name] = back
                plan.into[name] = list(dict.fromkeys(slot.layer for slot, _ in back))
    return plan


def _why_not(slot: Slot, found: Trace) -> Optional[str]:
    """Why the weights of ``slot`` must stay as they are, if they must."""
    for name in (slot.weight, slot.bias):
        for use in found.used.get(name, ()):
            if not isinstance(use, Slot):
                return f'{name} is used elsewhere ({use})'
            if use._replace(rows=None) != slot._replace(rows=None):
                return f'{name} is used by {use.layer} in another way'
            if use.rows != slot.rows and (use.rows is None or slot.rows is None):
                return f'{name} is used in parts'
    return None


def _backward(
    found: Trace, name: str, shift: Tensor, broken: Mapping[Slot, str]
) -> Optional[Dict[Tuple[Slot, int], int]]:
    """The channels of layers that the norm ``name`` alone takes, if it takes nothing else."""
    channels: Dict[Tuple[Slot, int], int] = {}
    for columns in found.fed[name]:
        if columns is None or (columns <= ZERO).any():
            return None
        for j, column in enumerate(columns.t()):
            for label in column.unique().tolist():
                source, channel = found.source(label)
                if source.slot is None or channel in source.barriers or source.norms[channel] != {(name, j)}:
                    return None
                if source.slot in broken or (shift.any() and source.slot.bias is None and not source.slot.grows):
                    return None
                channels[source.slot, channel] = j
    return channels or None


@torch.no_grad()
def apply(model: nn.Module, plan: Plan, affine: Mapping[str, Tuple[Tensor, Tensor]], found: Trace, names: set) -> None:
    """Folds the norms ``names`` of ``model`` as planned; the others of ``affine`` become scales and shifts."""
    for slot, labels in plan.forward.items():
        scale, shift = torch.ones_like(labels), torch.zeros_like(labels)
        for i, label in enumerate(labels.tolist()):
            source, channel = found.source(label) if label > ZERO else (None, 0)
            if source is not None and source.slot is None and source.name in names and source.name not in plan.backward:
                scale[i], shift[i] = (t[channel] for t in affine[source.name])
        if (scale != 1).any() or shift.any():
            _fold_forward(model, slot, scale, shift)
    backward: Dict[Slot, Tuple[Tensor, Tensor]] = {}
    for name in names & plan.backward.keys():
        for (slot, channel), j in plan.backward[name].items():
            if slot not in backward:
                out = found.layers[slot].channels
                backward[slot] = torch.ones(out).double(), torch.zeros(out).double()
            for mine, norms in zip(backward[slot], affine[name]):
                mine[channel] = norms[j]
    for slot, (scale, shift) in backward.items():
        _fold_backward(model, slot, scale, shift)
    for name in affine:
        norm = model.get_submodule(name)
        kind = Folded() if name in names else _affine(norm, *affine[name])
        for parent in list(model.modules()):
            for key, child in parent._modules.items():
                if child is norm:
                    parent._modules[key] = kind.train(norm.training)


def _fold_forward(model: nn.Module, slot: Slot, scale: Tensor, shift: Tensor) -> None:
    """Makes ``layer(x)`` what ``layer(scale * x + shift)`` was."""
    parameter = model.get_parameter(slot.weight)
    rows = slice(None) if slot.rows is None else slice(*slot.rows)
    weight = parameter.data.double()
    part = weight[rows] if slot.in_axis == 1 else weight.transpose(0, 1)
    # (groups, out, in, positions of the kernel): a group's channels meet its rows of the weight alone
    grouped = part.reshape(slot.groups, part.shape[0] // slot.groups, part.shape[1], -1)
    per_input = (t.to(weight.device).view(slot.groups, 1, -1, 1) for t in (scale, shift))
    scale, shift = per_input
    added = (grouped * shift).sum((2, 3)).reshape(-1)
    changed = (grouped * scale).reshape(part.shape)
    if slot.in_axis == 1:
        weight = weight.clone()
        weight[rows] = changed
    else:
        weight = changed.transpose(0, 1)
    parameter.data.copy_(weight)
    if added.any():
        bias = _bias(model, slot, weight.shape[slot.out_axis])
        total = bias.data.double()
        total[rows] += added
        bias.data.copy_(total)


def _fold_backward(model: nn.Module, slot: Slot, scale: Tensor, shift: Tensor) -> None:
    """Makes ``layer(x)`` what ``scale * layer(x) + shift`` was."""
    parameter = model.get_parameter(slot.weight)
    scale, shift = scale.to(parameter.device), shift.to(parameter.device)
    shape = [1] * parameter.dim()
    shape[slot.out_axis] = -1
    parameter.data.copy_(parameter.data.double() * scale.view(shape))
    if slot.bias is not None or shift.any():
        bias = _bias(model, slot, len(shift))
        bias.data.copy_(bias.data.double() * scale + shift)


def _bias(model: nn.Module, slot: Slot, channels: int) -> nn.Parameter:
    if slot.bias is not None:
        return model.get_parameter(slot.bias)
    layer, weight = model.get_submodule(slot.layer), model.get_parameter(slot.weight)
    if layer.bias is None:
        layer.bias = nn.Parameter(weight.new_zeros(channels), requires_grad=weight.requires_grad)
    return layer.bias


def _affine(norm: nn.Module, scale: Tensor, shift: Tensor) -> Affine:
    like = next(norm.parameters())
    return Affine(scale.to(like), shift.to(like), channel_dim_of(norm))


def _rejected(names: Sequence[str], difference: Callable[[Iterable[str]], float], tolerance: float) -> Dict[str, float]:
    """Those of ``names`` by which outputs change, and by how much: halves are tried until one is left."""
    by = difference(names)
    if by <= tolerance:
        return {}
    if len(names) <= 1:
        return dict.fromkeys(names, by)
    half = len(names) // 2
    found = {**_rejected(names[:half], difference, tolerance), **_rejected(names[half:], difference, tolerance)}
    return found or dict.fromkeys(names, by)  # each half alone is right, not both


def _rounding(model: nn.Module, runs: Sequence[Callable], outputs: Sequence[List[Tensor]]) -> float:
    """What a change of all weights by about a unit in the last place makes of the outputs."""
    changed, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for t in (*changed.parameters(), *changed.buffers()):
            if t.is_floating_point():
                noise = torch.randn(t.shape, generator=generator, dtype=t.dtype)
                t.mul_(1 + torch.finfo(t.dtype).eps * noise.to(t.device))
    return max(relative_difference(_run(changed, run), e) for run, e in zip(runs, outputs))


# -- examples -------------------------------------------------------------------------------------------------------------------
def _runs(model: nn.Module, examples: Sequence[Example]) -> List[Tuple[str, Callable[[nn.Module], Any]]]:
    """The examples and variants of them, each with a word for it, as functions of the model that it can be run by."""
    runs = []
    for given in examples:
        run = _runner(given)
        try:
            _run(model, run, double=False)
        except Exception as e:
            raise ValueError(f'{type(model).__name__} cannot be run on the example {_text(given)}: {e!r}') from e
        runs.append((_text(given), run))
        for variant in _variants(given):
            try:
                _run(model, _runner(variant), double=False)
            except Exception:  # a model of one size
                continue
            runs.append((_text(variant), _runner(variant)))
    return runs


def _runner(example: Example) -> Callable[[nn.Module], Any]:
    if isinstance(example, Mapping):
        return lambda model: model(**example)
    if isinstance(example, tuple):
        return lambda model: model(*example)
    if isinstance(example, Tensor):
        return lambda model: model(example)
    if callable(example):
        return example
    raise ValueError(
        f'an example is a tensor, a tuple or dict of arguments, or a function of the model, but got {example!r}.'
    )


def _variants(example: Example) -> List[Tensor]:
    """The same with twice the batch, and of a size that nothing divides."""
    if not isinstance(example, Tensor) or example.dim() < 2:
        return []
    variants = [torch.cat([example, example.flip(-1)])]
    if example.dim() == 4:
        size = [n + odd for n, odd in zip(example.shape[-2:], (13, 27))]
        variants.append(nn.functional.interpolate(example, size))
    elif not example.is_floating_point() and example.shape[1] > 3:
        variants.append(example[:, :-3])
    return variants


def _text(example: Example) -> str:
    if isinstance(example, Tensor):
        return 'x'.join(map(str, example.shape))
    if isinstance(example, Mapping):
        return ' '.join(f'{k}={_text(v)}' for k, v in example.items())
    if isinstance(example, tuple):
        return ' '.join(map(_text, example))
    return getattr(example, '__name__', type(example).__name__)


def _run(model: nn.Module, run: Callable[[nn.Module], Any], double: bool = True) -> List[Tensor]:
    with torch.no_grad(), torch.random.fork_rng([]), _Double() if double else nullcontext():
        return [t.clone() for t in _outputs(run(model))]


def _outputs(node: Any) -> List[Tensor]:
    if isinstance(node, Tensor):
        return [node]
    if isinstance(node, Mapping):
        node = list(node.values())
    return [t for child in node for t in _outputs(child)] if isinstance(node, (list, tuple)) else []


def _copy(model: nn.Module) -> nn.Module:
    # weight_norm and its like keep a computed weight, which deepcopy refuses
    computed = [t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor) and not t.is_leaf]
    return copy.deepcopy(model, {id(t): t.detach().clone() for t in computed})


_CASTS = {'float', 'half', 'bfloat16', 'type', 'to'}


class _Double(TorchFunctionMode):
    """Takes a model that asks for lower precision in places (``x.float()``, ``softmax(dtype=torch.float32)``) in float64."""

    def __enter__(self) -> '_Double':
        self.default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self.default)

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Optional[dict] = None) -> Any:
        name = getattr(func, '__name__', '')
        if name in ('__get__', '__set__'):
            return func(*args, **(kwargs or {}))
        args, kwargs = _doubled(args), _doubled(kwargs or {})
        if name in ('float', 'half', 'bfloat16'):
            func = torch.Tensor.double
        return func(*args, **kwargs)


def _doubled(node: Any) -> Any:
    if isinstance(node, torch.dtype):
        return torch.float64 if node.is_floating_point else node
    if type(node) is Tensor and node.is_floating_point() and node.dtype != torch.float64:
        return node.double()
    if type(node) in (list, tuple):
        return type(node)(_doubled(child) for child in node)
    if type(node) is dict:
        return {k: _doubled(v) for k, v in node.items()}
    return node
