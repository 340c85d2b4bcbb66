"""Which layers can take a norm: any model is run with labels of its channels beside its tensors.

At inference a norm is ``scale * x + shift`` per channel (SLAB paper, Lemma 4.1). A layer takes it over if every number that it
gets from the norm meets, wherever it stands, the weights of the same channel, and if nothing else sees these numbers. Neither is
to be read off a model's classes; both are seen in a run: the output of a norm gets a second tensor of its shape, whose elements
say (norm, channel). What only moves numbers (``view``, ``permute``, ``roll``, windows, ``cat``, padding...) moves the labels
too. A mean over other dimensions keeps them. A linear layer or convolution that finds the same label at all positions can take
the norm. Every other operation is a barrier.

What linear layers and convolutions give is labelled as well: a norm that alone takes it goes back into them.
"""

import gc
import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from ..layers.norm import channel_dim_of

ZERO, UNKNOWN = 0.0, -1.0  # of a number that padding made, and of one that has no label; labels of channels are above
_STRIDE = 2**24  # channels of a source at most; float64, which all operations take, counts to 2**53

# what gives its first argument's numbers again, at other places
_MOVES = frozenset(
    """
    reshape view flatten unflatten ravel permute transpose swapaxes swapdims movedim moveaxis t T mT squeeze unsqueeze
    expand expand_as view_as reshape_as broadcast_to repeat tile repeat_interleave roll flip fliplr flipud rot90 split
    split_with_sizes unsafe_split chunk unsafe_chunk tensor_split hsplit vsplit dsplit unbind select narrow index_select
    gather take_along_dim __getitem__ cat concat concatenate stack hstack vstack dstack pad unfold pixel_shuffle
    pixel_unshuffle channel_shuffle diagonal
    """.split()
)
# ... at the same places
_KEEPS = frozenset(
    'contiguous clone detach to type type_as float double half bfloat16 cpu cuda data real alias identity'.split()
)
_DROPS = frozenset(
    'dropout dropout1d dropout2d dropout3d feature_dropout alpha_dropout'.split()
)  # as they are in eval mode
# what asks about a tensor, but not for its numbers
_ASKS = frozenset(
    """
    shape dtype device layout ndim size dim ndimension numel nelement stride storage_offset itemsize nbytes element_size
    is_contiguous is_floating_point is_complex is_signed is_conj is_neg is_coalesced is_same_size is_inference is_cuda is_cpu
    is_quantized is_meta is_sparse is_nested is_mps is_mkldnn is_xpu is_vulkan is_maia is_ipu is_xla is_ort is_leaf
    requires_grad retains_grad grad grad_fn get_device names output_nr _version __len__ __hash__ __format__ __repr__ __dir__
    zeros_like ones_like empty_like full_like rand_like randn_like new_zeros new_ones new_empty new_full new_tensor
    """.split()
)


class Slot(NamedTuple):
    """A place for an affine map: the weight, by its name in the model, of a layer that is linear in its input.

    Args:
        weight (str): The name of the weight.
        bias (str, optional): That of the bias; None if the layer has none.
        layer (str): The name of the module, '' for the model itself.
        rows (tuple[int, int], optional): The rows of weight and bias that this is about, as the keys' in an attention.
        in_axis (int): The weight's axis of input channels.
        groups (int): Of a convolution.
        padded (bool): Whether it puts zeros around its input: only a shift of zero may pass them.
        grows (bool): Whether a missing bias can be added, since the layer's own forward gives its ``bias`` to the operation.
    """

    weight: str
    bias: Optional[str]
    layer: str
    rows: Optional[Tuple[int, int]] = None
    in_axis: int = 1
    groups: int = 1
    padded: bool = False
    grows: bool = False

    @property
    def out_axis(self) -> int:
        return 1 - self.in_axis


@dataclass(eq=False)
class Source:
    """Where labels come from: a norm, or the output of a layer that a norm may go back into.

    Args:
        name (str): Of the norm, or of the layer.
        channels (int): Their number.
        slot (Slot, optional): None for a norm.
        index (int): Among the sources of a trace.
    """

    name: str
    channels: int
    slot: Optional[Slot] = None
    index: int = 0
    calls: int = 0
    barriers: Dict[int, str] = field(default_factory=dict)  # channel -> the first reason
    norms: Dict[int, Set[Tuple[str, int]]] = field(
        default_factory=lambda: defaultdict(set)
    )  # channel -> (norm, channel)


@dataclass
class Trace:
    """What runs of a model have shown.

    Args:
        norms (dict[str, Source]): By the norms' names.
        layers (dict[Slot, Source]): The outputs of layers.
        inputs (dict[Slot, list[Tensor]]): For each layer and call the label of each input channel.
        fed (dict[str, list[Tensor | None]]): For each norm and call the labels of its input as (numbers, channels).
        used (dict[str, set]): For each weight or bias what it is used for: slots, or the name of another operation.
    """

    norms: Dict[str, Source] = field(default_factory=dict)
    layers: Dict[Slot, Source] = field(default_factory=dict)
    inputs: Dict[Slot, List[Tensor]] = field(default_factory=lambda: defaultdict(list))
    fed: Dict[str, List[Optional[Tensor]]] = field(default_factory=lambda: defaultdict(list))
    used: Dict[str, Set[Any]] = field(default_factory=lambda: defaultdict(set))
    sources: List[Source] = field(default_factory=list)

    def source(self, label: float) -> Tuple[Source, int]:
        """The source of a label of a channel, and the channel."""
        index, channel = divmod(int(label) - 1, _STRIDE)
        return self.sources[index], channel

    def labels(self, source: Source) -> Tensor:
        return source.index * _STRIDE + 1 + torch.arange(source.channels, dtype=torch.float64)

    def add(self, source: Source) -> Source:
        source.index = len(self.sources)
        self.sources.append(source)
        return source


def trace(model: nn.Module, runs: Sequence[Callable[[nn.Module], Any]], norms: Sequence[str]) -> Trace:
    """Runs ``model`` and tells where the outputs of ``norms`` go.

    Args:
        model (nn.Module): In eval mode.
        runs (sequence[callable]): Each runs the model, as ``run(model)``.
        norms (sequence[str]): Their names.
    """
    found = Trace()
    for name in norms:
        found.norms[name] = found.add(Source(name, model.get_submodule(name).num_features))
    for run in runs:
        with torch.no_grad(), _Labels(model, found, norms) as mode:
            output = run(model)
        mode.close(output)
        del output
    return found


class _Labels(TorchFunctionMode):
    """The mode in which a model is run: it labels what norms and layers give, and follows the labels."""

    def __init__(self, model: nn.Module, found: Trace, norms: Sequence[str]) -> None:
        super().__init__()
        self.found, self.quiet = found, False
        self.labels: Dict[int, Tuple[weakref.ref, Tensor]] = {}
        self.stack: List[str] = []
        self.names = {id(m): name for name, m in model.named_modules()}
        self.parameters: Dict[int, List[str]] = defaultdict(list)
        self.owners: Dict[str, nn.Module] = {}
        for prefix, module in model.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    full = f'{prefix}.{name}'.lstrip('.')
                    self.parameters[id(parameter)].append(full)
                    self.owners[full] = module
        self.norms = {name: model.get_submodule(name) for name in norms}

    def __enter__(self) -> '_Labels':
        for name, norm in self.norms.items():
            norm.forward = partial(self._call_norm, norm.forward, name)  # in the way of the class's own
        self.handles = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module),
        ]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for handle in self.handles:
            handle.remove()
        for norm in self.norms.values():
            del norm.forward

    def _enter_module(self, module: nn.Module, args: tuple) -> None:
        self.stack.append(self.names.get(id(module), type(module).__name__))

    def _leave_module(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.stack.pop()

    def close(self, output: Any) -> None:
        """What is still there once the run is over has left the model, or stays in it: nobody knows who uses it."""
        returned = {_memory(t) for t in _tensors(output)}
        for collect in (False, True):
            alive = [(ref(), label) for ref, label in self.labels.values() if ref() is not None]
            kept = [label for x, label in alive if _memory(x) not in returned]
            if kept and not collect:
                del alive
                gc.collect()  # it takes a second in a large program
        for x, label in alive:
            self._bar(label, 'returned by the model' if _memory(x) in returned else 'kept after the run', where='')
        self.labels.clear()

    # -- labels -------------------------------------------------------------------------------------------------------------
    def _label(self, x: Any) -> Optional[Tensor]:
        ref, label = self.labels.get(id(x), (None, None))
        return label if ref is not None and ref() is x else None

    def _put(self, x: Tensor, label: Tensor) -> None:
        if (label > ZERO).any():
            self.labels[id(x)] = (weakref.ref(x), label)

    def _bar(self, label: Tensor, reason: str, where: Optional[str] = None) -> None:
        where = self.stack[-1] if where is None and self.stack else where
        reason = f'{reason} in {where}' if where else reason
        for value in label.unique().tolist():
            if value > ZERO:
                source, channel = self.found.source(value)
                source.barriers.setdefault(channel, reason)

    def _bar_all(self, node: Any, reason: str) -> None:
        for x in _tensors(node):
            label = self._label(x)
            if label is not None:
                self._bar(label, reason)

    # -- norms --------------------------------------------------------------------------------------------------------------
    def _call_norm(self, forward: Callable, name: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        dim = channel_dim_of(self.norms[name], kwargs.get('data_format'))
        source, label = self.found.norms[name], self._label(x)
        self.quiet = True
        try:
            out = forward(x, *args, **kwargs)
            self.found.fed[name].append(None if label is None else self._fed(source, label.movedim(dim, -1)))
            self._emit(source, out, dim)
        finally:
            self.quiet = False
        return out

    def _emit(self, source: Source, out: Tensor, dim: int) -> None:
        source.calls += 1
        shape = [1] * out.dim()
        shape[dim] = -1
        self._put(out, self.found.labels(source).view(shape).expand(out.shape))

    def _fed(self, norm: Source, label: Tensor) -> Tensor:
        """Notes which channels of layers go into which of a norm; returns their different labels in columns."""
        columns = label.reshape(-1, label.shape[-1]).unique(dim=0)
        for column, values in enumerate(columns.t()):
            for value in values.unique().tolist():
                if value > ZERO:
                    source, channel = self.found.source(value)
                    if source.slot is None:
                        source.barriers.setdefault(channel, f'another norm, {norm.name}')
                    else:
                        source.norms[channel].add((norm.name, column))
        return columns

    # -- operations ---------------------------------------------------------------------------------------------------------
    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: Optional[dict] = None) -> Any:
        kwargs = kwargs or {}
        if self.quiet:
            return func(*args, **kwargs)
        name = getattr(func, '__name__', str(func))
        if name == '__get__':
            name = getattr(getattr(func, '__self__', None), '__name__', name)
        if name == '__iter__':
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args))
        if name in _ASKS:
            return func(*args, **kwargs)
        rule = _RULES.get(name)
        if rule is None:
            self._bar_all((args, kwargs), name.strip('_'))
            self._use((args, kwargs), name)
            out = func(*args, **kwargs)
            for x in _tensors(out):  # its own argument, if it works in place
                self.labels.pop(id(x), None)
            return out
        out = func(*args, **kwargs)
        rule(self, name, func, args, kwargs, out)
        return out

    def _use(self, node: Any, operation: Any) -> None:
        for x in _tensors(node):
            for name in self.parameters.get(id(x), ()):
                self.found.used[name].add(operation)

    def _move(self, name: str, func: Callable, args: tuple, kwargs: dict, out: Any) -> None:
        args, kwargs, first = _first(args, kwargs)
        self._use((first, args, kwargs), name)
        if kwargs.get('out') is not None or not any(self._label(x) is not None for x in _tensors(first)):
            return self._bar_all((first, args, kwargs), name)
        if name not in ('expand_as', 'view_as', 'reshape_as'):  # which look at a shape
            self._bar_all((args, kwargs), name)
        labels = [self._label(x) if self._label(x) is not None else x.new_full(x.shape, UNKNOWN, dtype=torch.float64)
                  for x in _tensors(first)]  # fmt: skip
        if name == 'pad':
            pad, mode, value = _named(args, kwargs, 'pad', 'mode', 'value')
            args, kwargs = (), dict(pad=pad, mode=mode or 'constant')
            if kwargs['mode'] == 'constant':
                kwargs['value'] = UNKNOWN if value else ZERO
        if name in ('view', 'view_as'):  # labels that are expanded have no view of another shape
            if any(isinstance(a, torch.dtype) for a in (*args, *kwargs.values())):
                return self._bar_all(first, name)
            func = torch.Tensor.reshape if name == 'view' else torch.Tensor.reshape_as
        moved = func(labels[0] if isinstance(first, Tensor) else type(first)(labels), *args, **kwargs)
        for x, label in zip(_tensors(out), _tensors(moved)):
            self._put(x, label)

    def _keep(self, name: str, func: Callable, args: tuple, kwargs: dict, out: Any) -> None:
        label = self._label(args[0]) if args else None
        self._use((args, kwargs), name)
        if label is not None and isinstance(out, Tensor):
            if out.is_floating_point():
                self._put(out, label)
            else:
                self._bar(label, name)
        self._bar_all((args[1:] if name != 'type_as' else (), kwargs), name)

    def _drop(self, name: str, func: Callable, args: tuple, kwargs: dict, out: Any) -> None:
        if kwargs.get('training', args[2] if len(args) > 2 else True):
            return self._bar_all((args, kwargs), name)
        self._keep(name, func, args[:1] or (kwargs['input'],), {}, out)

    def _mean(self, name: str, func: Callable, args: tuple, kwargs: dict, out: Any) -> None:
        """A mean over numbers of one label has it: ``mean(scale * x + shift) = scale * mean(x) + shift``."""
        rest, others, x = _first(args, kwargs)
        label = self._label(x)
        self._bar_all((rest, others), name)
        if label is None:
            return
        dims = others.get('dim', rest[0] if rest else None)
        if dims is None or others.get('out') is not None:
            return self._bar(label, name)
        keep = others.get('keepdim', rest[1] if len(rest) > 1 else False)
        self._reduced(name, label, label.amin(dims, keep), label.amax(dims, keep), out)

    def _pool(self, name: str, func: Callable, args: tuple, kwargs: dict, out: Any) -> None:
        rest, others, x = _first(args, kwargs)
        label = self._label(x)
        if label is None:
            return
        pool = getattr(torch.nn.functional, name.replace('avg', 'max'))
        if name.startswith('adaptive'):
            return self._reduced(name, label, -pool(-label, *rest), pool(label, *rest), out)
        names = ('kernel_size', 'stride', 'padding', 'ceil_mode', 'count_include_pad', 'divisor_override')
        given = dict(zip(names, rest), **others)
        if any(_numbers(given.get('padding', 0))) or given.get('ceil_mode') or given.get('divisor_override'):
            return self._bar(label, name)
        sizes = given['kernel_size'], given.get('stride') or given['kernel_size']
        self._reduced(name, label, -pool(-label, *sizes), pool(label, *sizes), out)

    def _resize(self, name: str, func: Callable, args: tuple, kwargs: dict, out: Any) -> None:
        """Interpolation weighs with numbers that sum up to 1: of numbers of one label it is a mean."""
        rest, others, x = _first(args, kwargs)
        label = self._label(x)
        if label is None:
            return
        spatial = tuple(range(2, label.dim()))
        low, high = label.amin(spatial, True), label.amax(spatial, True)
        self._reduced(name, label, low.expand(out.shape), high.expand(out.shape), out)

    def _reduced(self, name: str, label: Tensor, low: Tensor, high: Tensor, out: Tensor) -> None:
        if low.equal(high):
            return self._put(out, low)
        self._bar(label, f'{name} over several channels or padding')

    # -- layers -------------------------------------------------------------------------------------------------------------
    def _linear(self, name: str, func: Callable, args: tuple, kwargs: dict, out: Tensor) -> None:
        x, weight, bias = _named(args, kwargs, 'input', 'weight', 'bias')
        self._layer(name, x, weight, bias, out, -1)

    def _conv(self, name: str, func: Callable, args: tuple, kwargs: dict, out: Tensor) -> None:
        names = ('input', 'weight', 'bias', 'stride', 'padding', 'dilation', 'groups')
        x, weight, bias, _, padding, _, groups = _named(args, kwargs, *names)
        padded = padding != 'valid' if isinstance(padding, str) else any(_numbers(padding or 0))
        self._layer(name, x, weight, bias, out, 1 - weight.dim(), groups=groups or 1, padded=padded)

    def _conv_transpose(self, name: str, func: Callable, args: tuple, kwargs: dict, out: Tensor) -> None:
        x, weight, bias, _, _, _, groups = _named(
            args, kwargs, 'input', 'weight', 'bias', 'stride', 'padding', '', 'groups'
        )
        if (groups or 1) != 1:
            return self._bar_all((args, kwargs), name)
        # at its borders and where kernels overlap other numbers of weights meet: no shift passes
        self._layer(name, x, weight, bias, out, 1 - weight.dim(), in_axis=0, padded=True)

    def _addmm(self, name: str, func: Callable, args: tuple, kwargs: dict, out: Tensor) -> None:
        bias, x, weight = _named(args, kwargs, 'input', 'mat1', 'mat2')
        if any(kwargs.get(k, 1) != 1 for k in ('alpha', 'beta')) or len(args) > 3 or bias.dim() != 1:
            return self._bar_all((args, kwargs), name)
        self._layer(name, x, weight, bias, out, -1, in_axis=0)

    def _matmul(self, name: str, func: Callable, args: tuple, kwargs: dict, out: Tensor) -> None:
        others = [v for k, v in kwargs.items() if k != 'out']
        x, weight = (*args, *others)[:2]
        if id(weight) not in self.parameters or weight.dim() != 2:
            self._use((args, kwargs), name)
            return self._bar_all((args, kwargs), name)
        self._layer(name, x, weight, None, out, -1, in_axis=0, grows=False)

    def _attention(self, name: str, func: Callable, args: tuple, kwargs: dict, out: Any) -> None:
        given = dict(zip(_MHA, args), **kwargs)
        bias = given['in_proj_bias']
        tokens = [given[k] for k in ('query', 'key', 'value')]
        extra = [v for k, v in given.items() if k not in _MHA_LAYERS]
        if given['bias_k'] is not None or given.get('add_zero_attn') or given.get('static_k') is not None:
            return self._bar_all((args, kwargs), name)
        self._bar_all(extra, name)
        dims = given['embed_dim_to_check']
        for i, x in enumerate(tokens):
            rows = (i * dims, (i + 1) * dims)
            if given.get('use_separate_proj_weight'):
                weight = given[f'{"qkv"[i]}_proj_weight']
                if bias is not None:
                    self._bar_all(x, f'{name} with separate weights')
                    self._use((weight, bias), name)
                    continue
                self._layer(name, x, weight, None, None, -1, grows=False)
            else:
                self._layer(name, x, given['in_proj_weight'], bias, None, -1, rows=rows, grows=False)
        self._layer(name, None, given['out_proj_weight'], given['out_proj_bias'], out[0], -1, grows=False)

    def _layer(
        self,
        name: str,
        x: Optional[Tensor],
        weight: Tensor,
        bias: Optional[Tensor],
        out: Optional[Tensor],
        dim: int,
        grows: bool = True,
        **layout: Any,
    ) -> None:
        """A layer that is linear in ``x``, whose channels are in ``dim``: its slot, what it takes, what it gives."""
        label = None if x is None else self._label(x)
        self._bar_all((weight, bias), f'{name}, as a weight')
        weights, biases = self.parameters.get(id(weight), []), self.parameters.get(id(bias), [])
        reason = None
        if not weights:
            reason = f'{name} with a weight that is computed'
        elif bias is not None and not biases:
            reason = f'{name} with a bias that is computed'
        elif len(weights) > 1:
            reason = f'{name} with a weight of {len(weights)} layers'
        elif len(biases) > 1:
            reason = f'{name} with a bias of {len(biases)} layers'
        if reason is not None:
            self._use((weight, bias), reason)
            return None if label is None else self._bar(label, reason)
        owner = self.owners[weights[0]]
        layer = self.names[id(owner)]
        own = bool(self.stack) and self.stack[-1] == layer and isinstance(owner, (nn.Linear, nn.modules.conv._ConvNd))
        slot = Slot(weights[0], biases[0] if biases else None, layer, grows=grows and own, **layout)
        self.found.used[weights[0]].add(slot)
        if biases:
            self.found.used[biases[0]].add(slot)
        if x is not None:
            self.found.inputs[slot].append(self._columns(label, x, dim, name))
        if out is None:
            return
        source = self.found.layers.get(slot)
        if source is None:
            source = self.found.layers[slot] = self.found.add(Source(layer, out.shape[dim], slot))
        self._emit(source, out, dim)

    def _columns(self, label: Optional[Tensor], x: Tensor, dim: int, name: str) -> Tensor:
        """The label of each channel; what differs between positions is barred."""
        if label is None:
            return torch.full((x.shape[dim],), UNKNOWN, dtype=torch.float64)
        columns = label.movedim(dim, -1).reshape(-1, label.shape[dim])
        low, high = columns.amin(0), columns.amax(0)
        mixed = low != high
        if mixed.any():
            padded = (columns[:, mixed] == ZERO).any()
            self._bar(columns[:, mixed], f'zero padding before {name}' if padded else f'{name} of several channels')
        return low.masked_fill(mixed, UNKNOWN)


_MHA = (
    'query key value embed_dim_to_check num_heads in_proj_weight in_proj_bias bias_k bias_v add_zero_attn dropout_p '
    'out_proj_weight out_proj_bias training key_padding_mask need_weights attn_mask use_separate_proj_weight q_proj_weight '
    'k_proj_weight v_proj_weight static_k static_v average_attn_weights is_causal'
).split()
_MHA_LAYERS = {'query', 'key', 'value', *(name for name in _MHA if name.endswith(('weight', 'bias')))}

_RULES: Dict[str, Callable] = {
    **dict.fromkeys(_MOVES, _Labels._move),
    **dict.fromkeys(_KEEPS, _Labels._keep),
    **dict.fromkeys(_DROPS, _Labels._drop),
    'mean': _Labels._mean,
    **{f'{kind}avg_pool{i}d': _Labels._pool for kind in ('', 'adaptive_') for i in (1, 2, 3)},
    'interpolate': _Labels._resize,
    'linear': _Labels._linear,
    **{f'conv{i}d': _Labels._conv for i in (1, 2, 3)},
    **{f'conv_transpose{i}d': _Labels._conv_transpose for i in (1, 2, 3)},
    'addmm': _Labels._addmm,
    **dict.fromkeys(('matmul', '__matmul__', 'mm'), _Labels._matmul),
    'multi_head_attention_forward': _Labels._attention,
}


def _first(args: tuple, kwargs: dict) -> Tuple[tuple, dict, Any]:
    """The first argument, by whatever name, apart from the others."""
    if args:
        return args[1:], kwargs, args[0]
    name = next(n for n in ('input', 'self', 'tensors') if n in kwargs)
    return (), {k: v for k, v in kwargs.items() if k != name}, kwargs[name]


def _named(args: tuple, kwargs: dict, *names: str) -> List[Any]:
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _numbers(value: Any) -> Sequence[int]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _tensors(node: Any) -> List[Tensor]:
    return list(_walk(node))


def _walk(node: Any) -> Iterator[Tensor]:
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, (list, tuple)):
        for child in node:
            yield from _walk(child)
    elif isinstance(node, dict):
        for child in node.values():
            yield from _walk(child)
