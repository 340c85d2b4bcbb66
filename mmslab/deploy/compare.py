"""Two forms of a model compared: what their parts make of the same images.

A detector decides: which proposals are the best, which pixels a query may look at, which box survives. Where two scores
are nearly equal, rounding decides otherwise, and everything after that is of another object. Decisions have no weights
that folding could have spoilt, so the second model is given those of the first (:class:`Decisions`), and what
its heads, encoders and decoders compute is compared tensor by tensor.
"""

import copy
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ..errors import reason

Size = Tuple[int, int]
TOLERANCE = 1e-5
SIZES = ((224, 224), (250, 330))  # the first divides into windows of 56, 28 and 7 tokens, the second into none
_MAX_PROPOSALS = 20  # and detections; more of them say no more


class Difference(NamedTuple):
    """How far a model is from the original in one output, for images of one size.

    ``relative`` is the largest difference over the largest magnitude of the original's output.
    """

    size: Size
    output: str
    relative: float


def compare(original: nn.Module, folded: nn.Module, sizes: Sequence[Size] = SIZES) -> List[Difference]:
    """Compares two forms of a detector or classifier on a random image, in zero mean and unit variance, of each size.

    The images of a detector are padded as its data preprocessor would, or as its neck needs (:func:`divisor_of`). Compared
    are the maps of the backbone, unless output norms have moved out of the folded one; of a detector all that
    the neck and what comes after it (``rpn_head``, ``roi_head.bbox_head``, ``encoder``...) compute in ``predict``, with
    the decisions of the original; of a classifier the class scores. What a detector makes of its heads' outputs, from
    decoding to non-maximum suppression, has no weights and is not compared.

    Raises:
        ValueError: If the original cannot predict from such images, or if the other takes another way through its code.
    """
    return _compare(original, folded, sizes)


def check_differences(differences: Sequence[Difference], original: nn.Module, tolerance: float, name: str) -> None:
    """Raises ValueError, naming the model ``name``, for a difference over ``tolerance`` that rounding does not explain.

    Untrained weights, of many layers above all, may magnify rounding. Ten times what float32 in the backbone makes of
    the original passes: its backbone in float64, the rest as it is, against all of it in float32.
    """
    over = [d for d in differences if not d.relative <= tolerance]
    if not over:
        return
    exact = copy.deepcopy(original)
    exact.backbone.double()
    rounding = {d[:2]: d.relative for d in _compare(original, exact, list(dict.fromkeys(d.size for d in over)))}
    for size, output, relative in over:
        own = rounding[size, output]
        if not relative <= max(tolerance, 10 * own):
            raise ValueError(
                f'the folded model differs from {name} by {relative:.1e} (relative) in {output} for images of '
                f'{size[0]}x{size[1]}: over the tolerance of {tolerance:.0e}, and rounding alone makes {own:.1e} in the '
                'original. Nothing was written. Look for BN variances near 0 in the weights.'
            )


def divisor_of(model: nn.Module, least: Optional[int] = None) -> int:
    """What the height and width of images must be multiples of, for a detector to take them; 1 of other models.

    That is the data preprocessor's ``pad_size_divisor``, or ``least`` if given. Necks that add or concatenate maps doubled
    in size may need more, which a pipeline that pads to a fixed size hides (RTMDet's): then it is the first of 32, 64 and
    128 that the neck takes.

    Raises:
        ValueError: If the neck takes none of these.
    """
    if least is None:
        least = int(getattr(getattr(model, 'data_preprocessor', None), 'pad_size_divisor', None) or 1)
    if not is_of(model, 'mmdet') or getattr(model, 'neck', None) is None:
        return least
    like = next(model.parameters())
    tried, why = [least, *(d for d in (32, 64, 128) if d > least and d % least == 0)], ''
    for divisor in tried:
        image = like.new_zeros(1, 3, *padded((100, 140), divisor))  # odd in every stage, if not padded
        with torch.no_grad():
            maps = model.backbone(image)
            try:
                model.neck(maps)
                return divisor
            except Exception as e:  # of others: sizes that do not match, numbers of channels that do not
                why = reason(e)
    raise ValueError(
        f"the neck, {type(model.neck).__name__}, does not take the backbone's maps of images with sides of multiples of "
        f'{" or ".join(map(str, tried))} ({why}). Check its in_channels, and the pad_size_divisor of the data preprocessor.'
    )


def padded(size: Size, divisor: int) -> Size:
    """``size`` up to multiples of ``divisor``."""
    return -(-size[0] // divisor) * divisor, -(-size[1] // divisor) * divisor


def table(differences: Sequence[Difference], what: str = 'folded') -> Table:
    """The differences in a table, an output in a row and an image size in a column."""
    sizes = list(dict.fromkeys(d.size for d in differences))
    found = {(d.output, d.size): f'{d.relative:.1e}' for d in differences}
    made = Table(title=f'{what} against original')
    made.add_column('relative difference')
    for height, width in sizes:
        made.add_column(f'{height}x{width}', justify='right')
    for output in dict.fromkeys(d.output for d in differences):
        made.add_row(output, *(found.get((output, size), '') for size in sizes))
    return made


class _OtherWay(ValueError):
    """Two runs that were to do the same steps do not."""


class _CannotPredict(ValueError):
    """A detector fails on a random image."""


class Decisions(TorchDispatchMode):
    """The integers and booleans that a run computes: recorded, or handed to another run in the place of its own.

    Indices of the best scores, masks of what passes a threshold, levels that boxes belong to: near a tie, rounding
    changes them, and they are no continuous function of anything. All else is. The values that ``topk`` and ``sort`` give
    are too, however close the scores are.

    Args:
        made (list, optional): The ``made`` of a run of the same code, to hand out again. By default it records.

    Raises:
        ValueError: In a run that computes something else than the recorded one.
    """

    def __init__(self, made: Optional[List[Tuple[Any, Tensor]]] = None) -> None:
        super().__init__()
        self.made: List[Tuple[Any, Tensor]] = [] if made is None else made
        self.handed_out: Optional[Iterator] = None if made is None else iter(made)
        self.paused = False

    def share(self, value: Tensor) -> Tensor:
        """``value``, or what the recorded run had here, for a float that is as good as a decision."""
        return self._decide('share', value, False)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        aliases = [r.alias_info for r in func._schema.returns if r.alias_info is not None]
        if self.paused or (aliases and not any(a.is_write for a in aliases)):  # a view of what is known already
            return out
        return tree_map(lambda t: self._decide(func, t, bool(aliases)) if _is_discrete(t) else t, out)

    def _decide(self, func: Any, value: Tensor, in_place: bool) -> Tensor:
        if self.handed_out is None:
            self.made.append((func, value.clone()))
            return value
        of, decided = next(self.handed_out, (None, None))
        if of is not func or (in_place and decided.shape != value.shape):
            raise _OtherWay(
                f'the folded model computes {func} where the original computes {of or "nothing"}, so that they cannot be '
                'compared. Nothing was written.'
            )
        return value.copy_(decided) if in_place else decided.clone()


def _is_discrete(value: Any) -> bool:
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


@torch.no_grad()
def _compare(original: nn.Module, other: nn.Module, sizes: Sequence[Size]) -> List[Difference]:
    divisor = divisor_of(original)
    differences = []
    for number, size in enumerate(sizes):
        decisions, image, expected = _first(original, size, divisor, number)
        actual = _outputs(other, image, divisor, Decisions(decisions.made))
        for name, wanted in expected.items():
            if name == 'backbone' and _norms_moved(original, other):
                continue
            made = actual.get(name, [])
            worst = max((relative(a, e) for a, e in zip(made, wanted)), default=0.0)
            if len(made) != len(wanted):
                worst = float('inf')
            differences.append(Difference((image.shape[2], image.shape[3]), name, worst))
    return differences


def _first(model: nn.Module, size: Size, divisor: int, seed: int) -> Tuple[Decisions, Tensor, Dict[str, List[Tensor]]]:
    """A random image, what a model makes of it, and the decisions.

    Some heads have convolutions that want more than a map of one or two pixels (DDOD's): where a model takes no image of
    ``size``, it gets one of twice or four times its sides.
    """
    errors = []
    for factor in (1, 2, 4):
        generator = torch.Generator().manual_seed(seed)
        image = torch.randn(1, 3, factor * size[0], factor * size[1], generator=generator)
        decisions = Decisions()
        try:
            return decisions, image, _outputs(model, image, divisor, decisions)
        except _CannotPredict as e:
            errors.append(e)
    raise errors[0]


def _outputs(model: nn.Module, image: Tensor, divisor: int, decisions: Decisions) -> Dict[str, List[Tensor]]:
    """What a model computes from normalized images ``(1, 3, H, W)``: lists of tensors, by the name of the part."""
    if not is_of(model, 'mmdet'):
        maps = model.backbone(image.to(next(model.backbone.parameters()).dtype))
        out = dict(backbone=tensors(maps))
        maps = tree_map(lambda t: t.to(_dtype_behind_backbone(model)), maps)
        if getattr(model, 'neck', None) is not None:
            maps = model.neck(maps)
            out['neck'] = tensors(maps)
        if is_of(model, 'mmpretrain') and model.with_head:
            out = {'backbone': out['backbone'], 'class scores': [model.head(maps).softmax(dim=-1)]}
        return out

    size = (image.shape[2], image.shape[3])
    whole = padded(size, divisor)
    image = F.pad(image, (0, whole[1] - size[1], 0, whole[0] - size[0]))
    samples = [_sample(size, whole)]
    with _all_detections(model), _recorded(model, decisions) as made, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            with decisions:
                model.predict(image, samples)
        except Exception as e:  # of torch, mmcv, mmdet...
            if isinstance(e, _OtherWay):
                raise
            raise _CannotPredict(
                f'{type(model).__name__} cannot be compared with its folded form: its predict fails on a random image of '
                f'{size[0]}x{size[1]} ({reason(e)}). Nothing was written. In Python, mmslab.deploy.fold(model) folds it.'
            ) from e
    return made


def _sample(size: Size, whole: Size):
    """What mmdet's preprocessor and pipelines say of an image of ``size``, padded to ``whole``."""
    from mmdet.structures import DetDataSample

    meta = dict(img_id=0, img_shape=size, ori_shape=size, pad_shape=whole, batch_input_shape=whole)
    return DetDataSample(metainfo=dict(meta, scale_factor=(1.0, 1.0), flip=False, border=(0, 0, 0, 0)))


@contextmanager
def _recorded(model: nn.Module, decisions: Decisions) -> Iterator[Dict[str, List[Tensor]]]:
    """Collects what the parts of a model give, by :func:`_part`; the backbone's own steps are not ``decisions``.

    Only the outermost calls count: a head that is called as a module gives its output, of one whose methods call its
    layers, each layer does; what has no weights does not. Boxes to pool are those of the recorded run, as their places
    among the pixels magnify rounding a hundredfold; the deltas that they come from have been compared.
    """
    made: Dict[str, List[Tensor]] = {}
    depth = 0

    def enter(module: nn.Module, args: Any) -> None:
        nonlocal depth
        depth += 1
        decisions.paused = decisions.paused or module is model.backbone

    def leave(name: str) -> Callable:
        def hook(module: nn.Module, args: Any, out: Any) -> Any:
            nonlocal depth
            depth -= 1
            if depth == 0 and any(True for _ in module.parameters()):
                made.setdefault(_part(name), []).extend(t for t in tensors(out) if t.is_floating_point())
            if module is not model.backbone:
                return None
            decisions.paused = False
            return tree_map(lambda t: t.to(_dtype_behind_backbone(model)), out)

        return hook

    from mmdet.models.roi_heads.roi_extractors import BaseRoIExtractor

    def pool(module: nn.Module, args: Any) -> Any:
        return (args[0], decisions.share(args[1]).to(args[1].dtype), *args[2:])

    handles = []
    for name, module in model.named_modules():
        if isinstance(module, BaseRoIExtractor):
            handles.append(module.register_forward_pre_hook(pool))
        if name and not name.startswith('backbone.'):
            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave(name)))
    inner = next(model.backbone.parameters()).dtype
    handles.append(model.backbone.register_forward_pre_hook(lambda module, args: (args[0].to(inner), *args[1:])))
    try:
        yield made
    finally:
        for handle in handles:
            handle.remove()


def _dtype_behind_backbone(model: nn.Module) -> torch.dtype:
    """What neck and heads take, of a model whose backbone may be in float64 alone."""
    rest = (p.dtype for name, p in model.named_parameters() if not name.startswith('backbone.'))
    return next(rest, next(model.backbone.parameters()).dtype)


def _part(name: str) -> str:
    """The part that a module belongs to: 'neck', 'encoder', 'bbox_head', and within 'roi_head' one of its own."""
    parts = name.split('.')
    return '.'.join(parts[: 2 if parts[0] == 'roi_head' else 1])


@contextmanager
def _all_detections(model: nn.Module) -> Iterator[None]:
    """Lets all detections pass, so that a head that comes after the boxes has some; random weights are sure of none."""
    heads = [getattr(model, name, None) for name in ('rpn_head', 'bbox_head', 'roi_head')]
    modules = [m for head in heads if head is not None for m in head.modules()]
    kept = [(m, m.test_cfg) for m in modules if isinstance(getattr(m, 'test_cfg', None), dict)]
    for module, test_cfg in kept:
        module.test_cfg = copy.deepcopy(test_cfg)
        if 'score_thr' in test_cfg:
            module.test_cfg['score_thr'] = 0.0
        if test_cfg.get('max_per_img') and 'nms' in test_cfg:
            module.test_cfg['max_per_img'] = min(test_cfg['max_per_img'], _MAX_PROPOSALS)
    try:
        yield
    finally:
        for module, test_cfg in kept:
            module.test_cfg = test_cfg


def _norms_moved(original: nn.Module, folded: nn.Module) -> bool:
    names = [f'norm{i}' for i in original.backbone.out_indices]
    return any(
        isinstance(getattr(folded.backbone, n), nn.Identity)
        and not isinstance(getattr(original.backbone, n), nn.Identity)
        for n in names
    )


def is_of(model: nn.Module, package: str) -> bool:
    """Whether the class of ``model``, or one that it inherits from, is of ``package``, which need not be installed."""
    return any(c.__module__.split('.')[0] == package for c in type(model).__mro__)


def tensors(node: Any) -> List[Tensor]:
    """The tensors in nested lists, tuples and dicts, in order."""
    if isinstance(node, Tensor):
        return [node]
    if isinstance(node, dict):
        node = list(node.values())
    return [t for child in node for t in tensors(child)] if isinstance(node, (list, tuple)) else []


def relative(actual: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest magnitude of ``expected``; infinite for another shape.

    Equal infinities, which mmdet gives to places outside of an image, do not differ.
    """
    if actual.shape != expected.shape:
        return float('inf')
    if expected.numel() == 0:
        return 0.0
    actual, expected = actual.double(), expected.double()
    difference = (actual - expected).abs().masked_fill(actual == expected, 0.0)
    scale = expected.abs().masked_fill(expected.isinf(), 0.0).max().clamp(min=1e-30)
    return (difference.max() / scale).item()
