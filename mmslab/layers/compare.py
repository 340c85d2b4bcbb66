"""Folding is tried on copies of a model, and compared there, before the model itself is changed."""

import copy
import math
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from torch import Tensor

TOLERANCE = 1e-7  # in float64, where what differs by more is no rounding unless the weights magnify it
ROUNDING = 1e-5  # in float32, where a fold of ill-conditioned weights may lose digits


class Part(NamedTuple):
    """A part of a model to be compared by itself: what ``run`` makes, of it, from the input of the layer ``of``."""

    name: str
    of: str
    run: Callable[[nn.Module, Tensor], Any] = lambda module, x: module(x)


class _CannotRun(Exception):
    pass


@torch.no_grad()
def check_unchanged(
    model: nn.Module,
    fold: Callable[[nn.Module], None],
    run: Callable[[nn.Module], Any],
    parts: Callable[[nn.Module], Sequence[Part]],
) -> None:
    """Raises ValueError unless ``fold`` leaves the outputs of ``model`` as they are; ``model`` itself is left alone.

    Copies are run before and after ``fold``. In float64 outputs must agree to 1e-7, or to a hundred times what a
    change of all weights by a few units in the last place makes. Those in the model's own type must be as near to
    float64 as they were: to 1e-5 in float32, or to ten times what rounding makes of the unfolded model. A model that
    cannot run in one of the two is compared in the other. Of one on the meta device nothing is compared.

    Random states stay as they are.

    Args:
        fold (Callable): Folds a model like ``model`` in place.
        run (Callable): The outputs, tensors in lists and tuples, of such a model, in eval mode, for inputs of the type
            of its weights (:func:`random_like`).
        parts (Callable): The parts of such a model, in the order of the computation, to find the one at fault.

    Raises:
        ValueError: If outputs differ, naming the first part that does; if ``model`` cannot be copied or run.
    """
    weights = [*model.parameters(), *model.buffers()]
    own = next((t.dtype for t in weights if t.is_floating_point()), None)
    if own is None or any(t.is_meta for t in weights):
        return
    outputs = {}
    for dtype in dict.fromkeys((torch.float64, own)):
        try:
            outputs[dtype] = _before_and_after(model, fold, run, dtype)
        except _CannotRun as e:
            cause = e.__cause__
    if not outputs:
        raise ValueError(
            f'{type(model).__name__} cannot be copied and run on random input to check its folding: {cause} A '
            'backbone may define example_image() to give what it takes. check=False folds unchecked.'
        ) from cause
    best = next(iter(outputs))  # float64, where the model runs in it
    before, after = outputs[best]
    relative = relative_difference(after, before)
    tolerance = TOLERANCE if best == torch.float64 else _scaled(ROUNDING, best)
    if not relative <= tolerance:
        tolerance = max(tolerance, 100 * _rounding(model, run, best, before))
        if not relative <= tolerance:
            where, relative = _first_changed(model, fold, run, parts, best, tolerance) or (
                type(model).__name__,
                relative,
            )
            raise ValueError(
                f'folding would change what {where} computes, by {relative:.1e} (relative). Nothing has changed. A class '
                'of your own that has absorb(scale, shift) or switch_to_deploy() must compute the same after them; without '
                'them a scale and a shift stay in front of it. check=False folds regardless.'
            )
    if own in outputs and own != best:
        rounded, folded = (relative_difference(outs, before) for outs in outputs[own])
        if not folded <= max(_scaled(ROUNDING, own), 10 * rounded):
            tolerance = _scaled(ROUNDING, own)
            where, _ = _first_changed(model, fold, run, parts, own, tolerance) or (type(model).__name__, folded)
            raise ValueError(
                f'folded, {type(model).__name__} would differ by {folded:.1e} (relative) from float64, where rounding alone '
                f'makes {rounded:.1e} in the unfolded model, in {where} first. Nothing has changed. Look for BN variances '
                'near 0 in the weights. check=False folds regardless.'
            )


def random_like(module: nn.Module, shape: Sequence[int]) -> Tensor:
    """Random numbers in zero mean and unit variance, always the same, of the type and on the device of the weights."""
    like = next(t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point())
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device='cpu')
    return numbers.to(like.dtype).to(like.device)


def relative_difference(actual: Any, expected: Any) -> float:
    """The largest difference over the largest magnitude, in any of the tensors; infinite for other shapes."""
    actual, expected = tensors_in(actual), tensors_in(expected)
    if [t.shape for t in actual] != [t.shape for t in expected]:
        return math.inf
    worst = 0.0
    for a, e in zip(actual, expected):
        a, e = a.detach().cpu().double(), e.detach().cpu().double()
        errors = (a - e).abs().masked_fill((a == e) | (a.isnan() & e.isnan()), 0.0)
        if errors.any():  # also a nan
            ratio = (
                (errors.max() / e[e.isfinite()].abs().max().clamp(min=1e-30)).item() if e.isfinite().any() else math.inf
            )
            worst = max(worst, math.inf if math.isnan(ratio) else ratio)
    return worst


def tensors_in(node: Any) -> List[Tensor]:
    """The tensors in nested lists and tuples, in order."""
    if isinstance(node, Tensor):
        return [node]
    return [t for child in node for t in tensors_in(child)] if isinstance(node, (list, tuple)) else []


def _before_and_after(model: nn.Module, fold: Callable, run: Callable, dtype: torch.dtype) -> Tuple[list, list]:
    try:
        trial = _copy(model, dtype)
        before = _run(trial, run)
    except Exception as e:
        raise _CannotRun from e
    fold(trial)
    try:
        return before, _run(trial, run)
    except Exception as e:
        raise ValueError(
            f'folded, {type(model).__name__} cannot be run: {e} Nothing has changed. Look for code that uses what '
            'folding takes away, or pass check=False.'
        ) from e


def _run(model: nn.Module, run: Callable) -> List[Tensor]:
    with _undisturbed(model):  # random layers, too, draw the same numbers in each run
        return [t.clone() for t in tensors_in(run(model))]


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device('cpu'))
    in_its_type = torch.autocast(device.type, enabled=False) if device.type in ('cpu', 'cuda') else nullcontext()
    with torch.random.fork_rng([device] if device.type == 'cuda' else []), in_its_type:
        yield


def _copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    # weight_norm and its like keep a computed weight, which deepcopy refuses
    computed = [t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor) and not t.is_leaf]
    made = copy.deepcopy(model, {id(t): t.detach().clone() for t in computed})
    return made.double() if dtype == torch.float64 else made


def _rounding(model: nn.Module, run: Callable, dtype: torch.dtype, outputs: Sequence[Tensor]) -> float:
    """What a change of all weights by a few units in the last place makes of the outputs."""
    changed, generator = _copy(model, dtype), torch.Generator().manual_seed(1)
    for t in (*changed.parameters(), *changed.buffers()):
        if t.is_floating_point():
            noise = torch.randn(t.shape, generator=generator, dtype=torch.float64, device='cpu')
            t.copy_(t.cpu().double() * (1 + 4 * torch.finfo(t.dtype).eps * noise))
    return relative_difference(_run(changed, run), outputs)


def _scaled(tolerance: float, dtype: torch.dtype) -> float:
    return tolerance * max(torch.finfo(dtype).eps / torch.finfo(torch.float32).eps, 1.0)


def _first_changed(
    model: nn.Module, fold: Callable, run: Callable, parts: Callable, dtype: torch.dtype, tolerance: float
) -> Optional[Tuple[str, float]]:
    """The first part that computes something else once folded, from the same input, and by how much."""
    original, folded = _copy(model, dtype), _copy(model, dtype)
    fold(folded)
    listed, inputs = parts(original), {}
    for of in {part.of for part in listed}:
        keep = partial(_keep_input, inputs, of)
        original.get_submodule(of).register_forward_pre_hook(keep)
    _run(original, run)
    for part in listed:
        expected, actual = (_output(m, part, inputs.get(part.of)) for m in (original, folded))
        if expected is not None:
            relative = math.inf if actual is None else relative_difference(actual, expected)
            if not relative <= tolerance:
                return f'layer {part.name!r}', relative
    return None


def _keep_input(inputs: Dict[str, Tensor], name: str, layer: nn.Module, args: Tuple[Tensor, ...]) -> None:
    inputs[name] = args[0].clone()


def _output(model: nn.Module, part: Part, x: Optional[Tensor]) -> Optional[List[Tensor]]:
    """What ``part`` of ``model`` computes, None where it cannot."""
    try:
        return None if x is None else _run(model.get_submodule(part.of), lambda layer: part.run(layer, x.clone()))
    except Exception:
        return None
