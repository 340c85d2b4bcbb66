"""Folded models as graphs: ONNX and torch.export, for images of any size, checked against the unfolded PyTorch model.

What is exported is the inference form. While a size is open (``torch.SymInt``), the layers pad, resize and crop always,
by amounts that may be zero, instead of asking whether they must. The parts of a detector that depend on the data, from
the choice of proposals and non-maximum suppression on, are not part of the graph; see :func:`part_of`.
"""

import copy
import importlib.util
import json
import logging
import operator
import os
import re
import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from torch import Tensor

from .. import checkpoints
from ..apis import check_checkpoint, check_mmdet, load_config
from ..backbones.base import SLABBackbone
from ..backbones.swin import SwinBlock
from ..data.checks import check_writable
from ..errors import reason
from ..versions import check_torch
from .compare import SIZES, Difference, Size, divisor_of, is_of, padded, relative, tensors
from .convert import PathLike, check_backbone, load_model
from .fold import fold
from .metadata import FILE, as_strings, describe

PARTS = ('backbone', 'model')
TORCH = '2.11'  # the oldest that is known to export all of this
EXAMPLE = (256, 320)
TOLERANCE = 1e-4


def export(
    config: PathLike,
    checkpoint: PathLike,
    out: PathLike,
    part: str = 'backbone',
    size: Optional[Size] = None,
    force: bool = False,
    options: Optional[Dict[str, Any]] = None,
    trust_checkpoint: bool = False,
    sizes: Sequence[Size] = SIZES,
    tolerance: float = TOLERANCE,
) -> List[Difference]:
    """Folds a model, if it is not folded yet, writes a part of it as a graph, and checks the file.

    The graph of a backbone or a classifier takes any number of images, that of a detector one. The file says how to make its
    input of an image, and what its outputs are, see :func:`mmslab.deploy.metadata.describe`: each entry as JSON in ONNX's
    metadata, or all of them in ``mmslab.json``, an extra file of a .pt2.

    Args:
        config (str | Path): A config, by path or name, with a backbone of mmslab.
        checkpoint (str | Path): Its weights.
        out (str | Path): The file to write: ``.onnx``, run in onnxruntime, or ``.pt2``, ``torch.export``'s format.
            From a .pt2 take ``torch.export.load(out).module(check_guards=False)``: the guards tell one window from
            several, which the graph does not care about. What is left is a least height and width, of more than one
            stripe for SLABCSWin, which it names when given less.
        part (str): 'backbone' (default), or 'model', see :func:`part_of`.
        size (tuple[int, int], optional): Height and width, if the graph shall take images of this size alone.
            By default it takes every size.
        force (bool): Whether to replace ``out``.
        options (dict, optional): Config entries to replace, by dotted key.
        trust_checkpoint (bool): See :func:`mmslab.checkpoints.load_file`.
        sizes (Sequence): Heights and widths of the random images to check on; the graph is made with another.
        tolerance (float): Largest relative difference that passes. Defaults to 1e-4.

    Returns:
        list[Difference]: Of every output from the unfolded model's.

    Raises:
        ImportError: If a package for ONNX is missing.
        FileNotFoundError, FileExistsError, OSError: For a missing config or checkpoint, or an ``out`` that exists or
            cannot be written.
        ValueError: For a torch before 2.11, another suffix, an unknown part, a config without a backbone of mmslab, a
            checkpoint that does not fit, a gamma above 0, a backbone whose windows depend on the image size, a detector whose
            head cannot be in a graph, a size that its neck does not take, a graph that computes something else. Nothing is
            written then.
    """
    out = Path(out)
    if out.suffix not in ('.onnx', '.pt2'):
        raise ValueError(f'out must name an .onnx or a .pt2 file, but got {str(out)!r}.')
    if part not in PARTS:
        raise ValueError(f'part must be one of {PARTS}, but got {part!r}.')
    if size is not None and (len(size) != 2 or min(size) < 1):
        raise ValueError(f'size must be a height and a width in pixels, but got {size!r}.')
    _check_torch()
    if out.suffix == '.onnx':
        check_onnx()
    cfg = load_config(config, options)
    check_mmdet(cfg)
    check_backbone(cfg, config)
    check_checkpoint(checkpoint, 'checkpoint')
    if out.exists() and not force:
        raise FileExistsError(f'out {str(out)!r} exists. Choose another name, or pass --force to replace it.')
    content = checkpoints.load_file(checkpoint, trust_checkpoint)
    with checkpoints.use_safe_loading(trust_checkpoint):
        original = load_model(cfg, content, repr(str(checkpoint)))
    if size is None:
        check_any_size(original.backbone)
    divisor = divisor_of(original, 1) if part == 'model' else 1
    if size is not None and tuple(size) != padded(size, divisor):
        raise ValueError(
            f'size={tuple(size)}: the neck, {type(original.neck).__name__}, takes images with sides of multiples of {divisor} '
            f'alone. Give {padded(size, divisor)}.'
        )
    expected, names = part_of(original, part, divisor)
    folded = copy.deepcopy(original)
    if part == 'model':
        fold(folded, check=False)  # the graph is compared with the original
    elif not folded.backbone.deploy:  # by itself, so that its output norms stay with it
        folded.backbone.switch_to_deploy(check=False)
    graph, _ = part_of(folded, part, divisor)
    batch = part == 'backbone' or is_of(original, 'mmpretrain')
    with _no_graph(original, part):
        program = to_program(
            graph, size or padded(EXAMPLE, divisor), dynamic=size is None, divisor=divisor, batch=batch
        )
    metadata = describe(cfg, folded, content, part, names, size, divisor)
    check_writable(out.parent, 'the folder of out')
    with tempfile.TemporaryDirectory(prefix='.export-', dir=out.parent) as folder:
        partial = Path(folder) / out.name
        if out.suffix == '.onnx':
            with _no_graph(original, part):
                to_onnx(program, partial, names, metadata)
            run = onnx_runner(partial)
        else:
            torch.export.save(program, partial, extra_files={FILE: json.dumps(metadata)})
            module = torch.export.load(partial).module(check_guards=False)
            run = lambda image: tensors(module(image))  # noqa: E731
        sizes = [size] if size else [padded(s, divisor) for s in sizes]
        differences = compare_runs(expected, run, names, sizes, batches=(1, 3) if batch else (1,))
        worst = max(differences, key=lambda d: (d.relative != d.relative, d.relative))
        if not worst.relative <= tolerance:
            raise ValueError(
                f'the graph differs from {str(checkpoint)!r} by {worst.relative:.1e} (relative) in {worst.output!r} for images '
                f'of {worst.size[0]}x{worst.size[1]}, over the tolerance of {tolerance:.0e}. Nothing was written.'
            )
        os.replace(partial, out)
    return differences


@contextmanager
def _no_graph(model: nn.Module, part: str) -> Iterator[None]:
    """Says of what torch's exporters raise for code that is not ours, such as a head's, which it comes from."""
    try:
        yield
    except Exception as e:
        if part == 'backbone':
            raise
        raise ValueError(
            f"part='model': what the neck and head of {type(model).__name__} compute has no such graph ({reason(e)}). Use "
            "part='backbone'."
        ) from e


class _Part(nn.Module):
    """A function of a model's images as a module with the model's weights."""

    def __init__(self, model: nn.Module, function: Callable[[nn.Module, Tensor], List[Tensor]]) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, image: Tensor) -> Tuple[Tensor, ...]:
        return tuple(self.function(self.model, image))


def part_of(model: nn.Module, part: str, divisor: int = 1) -> Tuple[nn.Module, List[str]]:
    """What of a detector or classifier becomes a graph, and the names of its outputs.

    The graph takes normalized images ``(B, 3, H, W)``, named ``image``; B is 1 for a detector. With ``part`` 'backbone' it
    gives the maps of the stages, ``map0``... With 'model' it gives

    * of a classifier the class scores ``(B, num_classes)``, ``scores``;
    * of a detector with one stage what its head computes, in its order: ``scores0``, ... and ``deltas0``, ..., for each
      level, and of heads with more than these ``output2_0``, ...;
    * of a detector with two stages the same of the RPN, and the neck's maps, ``neck0``..., which its second stage
      takes.

    Anchors, the choice of proposals, non-maximum suppression and the second stage are left to the caller: mmdet's
    code for them branches on the data and calls mmcv's compiled operators, which have no form in ONNX.

    Args:
        divisor (int): What the sides of images must be multiples of, see :func:`mmslab.deploy.compare.divisor_of`.

    Raises:
        ValueError: For 'model' of a detector without a head that computes something of the neck's maps alone, as those
            with queries.
    """
    if part == 'backbone':
        return _Part(model.backbone, lambda m, x: tensors(m(x))), [f'map{i}' for i in model.backbone.out_indices]
    if is_of(model, 'mmpretrain'):
        return _Part(model, _class_scores), ['scores']
    head = 'rpn_head' if getattr(model, 'rpn_head', None) is not None else 'bbox_head'
    if getattr(model, head, None) is None:
        raise ValueError(
            f"part='model' exports classifiers and detectors with an rpn_head or a bbox_head, but {type(model).__name__} has "
            "neither. Use part='backbone'."
        )
    two_stages = head == 'rpn_head'
    like = next(model.parameters())
    with torch.no_grad():
        maps = _features(model, like.new_zeros(1, 3, *padded((64, 64), divisor)))
        try:
            made = getattr(model, head)(maps)
        except Exception as e:  # of a head that is called otherwise
            raise ValueError(
                f"part='model' exports heads that take the neck's maps, but the {head} of {type(model).__name__}, "
                f"{type(getattr(model, head)).__name__}, wants something else ({reason(e)}). Use part='backbone'."
            ) from e
    names = [f'neck{i}' for i in range(len(maps))] if two_stages else []
    for i, output in enumerate(made):
        kind = ('scores', 'deltas')[i] if i < 2 else f'output{i}_'
        names += [f'{kind}{level}' for level in range(len(tensors(output)))]

    def dense(m: nn.Module, image: Tensor) -> List[Tensor]:
        maps = _features(m, image)
        made = tensors(getattr(m, head)(maps))
        return [*maps, *made] if two_stages else made

    return _Part(model, dense), names


def _features(model: nn.Module, image: Tensor) -> Sequence[Tensor]:
    maps = model.backbone(image)
    return maps if getattr(model, 'neck', None) is None else model.neck(maps)


def _class_scores(model: nn.Module, image: Tensor) -> List[Tensor]:
    maps = model.backbone(image)
    return [model.head(model.neck(maps) if model.with_neck else maps).softmax(dim=-1)]


def check_any_size(backbone: SLABBackbone) -> None:
    """Raises ValueError if the windows of ``backbone`` depend on the size of the image, as no graph's can."""
    if any(isinstance(m, SwinBlock) and not m.pad_small_map for m in backbone.modules()):
        raise ValueError(
            'pad_small_map=False shrinks the windows to small images, so no one graph is right for images of every size. Give a '
            'size (--size 224 224), or set model.backbone.pad_small_map=True if the model was trained so.'
        )


@torch.no_grad()
def to_program(
    model: nn.Module, size: Size = EXAMPLE, dynamic: bool = True, divisor: int = 1, batch: bool = True
) -> torch.export.ExportedProgram:
    """``torch.export`` of a folded backbone, or of another module that takes images ``(B, 3, H, W)``, in eval mode.

    Args:
        size (tuple[int, int]): Height and width of the image to trace with. The maps of every stage should be at
            least as large as the spatial reduction there (PVT), and so must those of images given to the graph.
        dynamic (bool): Whether height and width stay open. Defaults to True.
        divisor (int): What open heights and widths are multiples of. Defaults to 1.
        batch (bool): Whether the number of images stays open, or is 1. Defaults to True.

    Raises:
        ValueError: For a torch before 2.11.
    """
    _check_torch()
    dims = {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC} if dynamic else {}
    if dynamic and divisor > 1:
        dims = {i: divisor * torch.export.Dim(name, min=1) for i, name in ((2, 'rows'), (3, 'columns'))}
    if batch:
        dims[0] = torch.export.Dim.DYNAMIC
    # open sizes of 1, such as a single window, are sizes like all others
    with _quiet(), torch.fx.experimental._config.patch(backed_size_oblivious=True):
        return torch.export.export(model, (torch.zeros(1 + batch, 3, *size),), dynamic_shapes=(dims,), strict=False)


def to_onnx(
    program: torch.export.ExportedProgram,
    path: PathLike,
    names: Sequence[str],
    metadata: Optional[Dict[str, Any]] = None,
) -> None:
    """Writes an exported program as ONNX, its input ``image`` and its outputs ``names``, and ``metadata``, each value as JSON.

    The open axes of the input are called ``batch``, ``height`` and ``width``, and those of the outputs what they are of these,
    such as ``((height + 3)//4)``.
    """
    from onnxscript import opset18 as op

    def floordiv(a, b):  # Python's. onnxscript takes its operands for positive, and ONNX's Div rounds towards 0
        return op.Div(op.Sub(a, op.Mod(a, b)), b)

    with _quiet():
        made = torch.onnx.export(
            program,
            input_names=['image'],
            output_names=list(names),
            custom_translation_table={operator.floordiv: floordiv},
            dynamo=True,
            verbose=False,
        )
        _name_axes(made)
        made.model.metadata_props.update(as_strings(metadata or {}))
        made.save(str(path), external_data=False)


def _name_axes(made: Any) -> None:
    image = made.model.graph.inputs[0]
    axes = [axis if isinstance(axis, int) else str(getattr(axis, 'value', axis)) for axis in image.shape]
    names: Dict[Any, str] = {}
    for i, name in ((0, 'batch'), (2, 'height'), (3, 'width')):
        if isinstance(axes[i], str):
            (symbol,) = re.findall(r'[A-Za-z_]\w*', axes[i])  # s0, or 32*s0 where a side is a multiple
            (factor,) = re.findall(r'\b\d+\b', axes[i]) or ('1',)
            names[symbol] = name if factor == '1' else f'({name}//{factor})'
            axes[i] = name
    made.rename_axes(names)
    image.shape = type(image.shape)(axes)


def onnx_runner(path: PathLike) -> Callable[[Tensor], List[Tensor]]:
    """A function that gives images to an ONNX file in onnxruntime, on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=['CPUExecutionProvider'])
    return lambda image: [torch.from_numpy(a) for a in session.run(None, {'image': image.numpy()})]


@torch.no_grad()
def compare_runs(
    expected: Callable[[Tensor], Sequence[Tensor]],
    run: Callable[[Tensor], Sequence[Tensor]],
    names: Sequence[str],
    sizes: Sequence[Size],
    batches: Sequence[int] = (1,),
) -> List[Difference]:
    """How far ``run`` is from ``expected`` in each output, for random images of each size; infinitely for another shape.

    ``batches`` says how many images there are at once, in turns, the last first.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for i, size in enumerate(sizes):
        image = torch.randn(batches[-1 - i % len(batches)], 3, *size, generator=generator)
        for name, actual, wanted in zip(names, run(image), expected(image)):
            found.append(Difference(tuple(size), name, relative(actual, wanted)))
    return found


def _check_torch() -> None:
    remedy = 'Export in an environment with a newer one (make setup): a config and a checkpoint of this one are the same there.'
    check_torch('a graph for ONNX or torch.export', TORCH, remedy)


def check_onnx() -> None:
    """Raises ImportError unless what ONNX needs is installed."""
    missing = [name for name in ('onnx', 'onnxscript', 'onnxruntime') if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f'ONNX needs {" and ".join(missing)}. Install: pip install onnx onnxscript onnxruntime (requirements/runtime.txt has '
            'tested versions), or write a .pt2 file.'
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """torch's exporters report inequalities that they could not simplify and what they will deprecate."""
    logger = logging.getLogger('torch')
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    finally:
        logger.setLevel(level)
