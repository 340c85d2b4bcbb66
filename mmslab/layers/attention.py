"""Attention: simplified linear (SLAB paper, Eq. 9), focused linear, and softmax, in windows or on a whole map.

Every class is called in the same way by a backbone, ``attn(x, hw_shape=(h, w), mask=None)`` (by keyword), with ``x`` the
tokens of windows, ``(num_windows, h * w, C)``. A new attention type is a module with that call and the
constructor arguments ``embed_dims, num_heads, window_size, qkv_bias, proj_drop``, registered in ``MODELS``;
a backbone then takes its name as it takes ``'sla'``. Two backbones ask for more: PVT passes ``sr_ratio`` and
``norm_cfg`` too, CSWin passes ``with_projections=False`` and calls ``mix(q, k, v, hw_shape)``.

Pre-trained weights come from networks with other attention. What is common to all is the projections, linear layers
``qkv`` (or ``q`` and ``kv``) and ``proj``: where an attention has them, a checkpoint must have them. All else is its
own: where a checkpoint has none of it, it stays as initialized, and is reported. A class that has parts which a
checkpoint may have one without the other names them in ``own_parameters``, a dict of names of its parameters and
children by part, as ``{'linear attention': ('dwc', 'positional_encoding')}``. What it does not name there is one part more.
A checkpoint has a part as a whole or not at all, in all blocks of a stage; a gap in it is an error. Declared parts are also
what a checkpoint may have beyond what another kind of attention takes from it.

For inference a block offers the norm before it to ``attn.absorb(scale, shift)``, if the class itself has that method.
An attention without it, and a subclass of one with it, which may compute something else, keep a scale and a shift in front
of them and stay in the form that they are trained in. A subclass for which the inference form of the classes here is right
says so: :func:`~mmslab.layers.fold.foldable`. SLABSwin, which pads between the norm and the attention, offers the norm to
these classes alone.
"""

from contextlib import nullcontext
from typing import Dict, Iterator, List, Optional, Set, Tuple, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.model import BaseModule
from mmengine.registry import MODELS, Registry
from torch import Tensor

from .fold import CONV, LINEAR, fold_forward, foldable, folded_back, is_foldable, keep_affine
from .inference import conv_of_patches, cuts_patches, is_traced, may_overwrite, use_channels_last
from .norm import build_norm
from .windows import Size, symbolic

_PARTS = dict(
    qkv=LINEAR, q=LINEAR, kv=LINEAR, sr=CONV, dwc=nn.Conv2d, proj=LINEAR, proj_drop=nn.Dropout, attn_drop=nn.Dropout
)


def to_pair(value: Union[int, Size], name: str = 'window_size') -> Size:
    """``7`` -> ``(7, 7)``; raises ValueError, naming ``name``, for anything but positive integers."""
    pair = tuple(value) if isinstance(value, (list, tuple)) else (value, value)
    if len(pair) != 2 or not all(isinstance(v, int) and v > 0 for v in pair):
        raise ValueError(f'{name} must be a positive integer or a pair of them, but got {value!r}.')
    return pair


def check_heads(embed_dims: int, num_heads: int) -> int:
    """Returns the dimensions of one head; raises ValueError unless ``num_heads`` divides ``embed_dims``."""
    if num_heads < 1 or embed_dims % num_heads:
        raise ValueError(
            f'num_heads must divide embed_dims, but got num_heads={num_heads}, embed_dims={embed_dims}. '
            f'Choose a divisor of {embed_dims}.'
        )
    return embed_dims // num_heads


def resize_positional_encoding(encoding: Tensor, old: Size, new: Size, mode: str = 'bicubic') -> Tensor:
    """Resizes an encoding ``(1, old[0] * old[1], C)`` to ``(1, new[0] * new[1], C)``."""
    grid = encoding.reshape(1, *old, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid.float(), size=new, mode=mode, align_corners=False)
    return grid.flatten(2).transpose(1, 2).to(encoding.dtype)


_PROJECTIONS = ({'qkv'}, {'q', 'kv'}, {'proj'})
Parts = Dict[str, Tuple[str, ...]]


def own_parts(attn: nn.Module) -> Dict[str, List[str]]:
    """What ``attn`` has beyond the projections, by part: names in its ``state_dict``. See the top of this module.

    A part is one that the class declares in ``own_parameters``; what it does not name is a part under the class's name.
    """
    declared = {name: part for part, names in declared_parts(type(attn)).items() for name in names}
    common = set().union(*(names for names in _PROJECTIONS if all(hasattr(attn, name) for name in names)))
    parts: Dict[str, List[str]] = {}
    for key in attn.state_dict():
        name = key.partition('.')[0]
        if name not in common or name in declared:
            parts.setdefault(declared.get(name, type(attn).__name__), []).append(key)
    return parts


def declared_parts(cls: type) -> Parts:
    """``own_parameters`` of a class of attention; none where it declares nothing.

    Raises:
        ValueError: If they are no dict of sequences of names.
    """
    parts = getattr(cls, 'own_parameters', {})
    if not isinstance(parts, dict) or not all(
        isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names) for names in parts.values()
    ):
        raise ValueError(
            f'{getattr(cls, "__name__", cls)}.own_parameters must be a dict of parts, each a tuple of names, such as '
            f"{{'gating': ('gate',)}}, but got {parts!r}."
        )
    return parts


def may_leave(attn: nn.Module, name: str) -> bool:
    """Whether a checkpoint may have a parameter or child ``name`` in the place of ``attn``, which has none of that name.

    It may be part of another kind of attention that is registered, or a projection that ``attn`` does without. Where
    ``attn`` has parameters that no class declares, nothing is known of what it stands for, and it may be anything.
    """
    undeclared = type(attn).__name__ in own_parts(attn)
    projection = any(name in names for names in _PROJECTIONS)
    return undeclared or projection and not hasattr(attn, name) or name in _declared_names()


def _declared_names() -> Set[str]:
    registered = [m for registry in scopes(MODELS) for m in registry.module_dict.values()]
    declared = [getattr(m, 'own_parameters', None) for m in registered]
    return {name for parts in declared if isinstance(parts, dict) for names in parts.values() for name in names}


def scopes(registry: Registry) -> Iterator[Registry]:
    """``registry`` and all below it: those of the projects, such as mmdet's, that have been imported."""
    yield registry
    for child in registry.children.values():
        yield from scopes(child)


class _SelfAttention(BaseModule):
    """What attention on a map needs around the attention itself: projections to q, k, v, and back.

    With ``sr_ratio`` > 1 keys and values come from a map reduced so many times along each side by a convolution
    and a norm: the spatial reduction of PVT (Wang et al. 2021). The convolution drops a remainder; a map smaller
    than its kernel is padded with zeros.
    """

    deploy = False
    own_parameters: Parts = {'spatial reduction': ('sr', 'norm')}

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        qkv_bias: bool,
        proj_drop: float,
        sr_ratio: int,
        norm_cfg: dict,
        with_projections: bool,
        init_cfg: Optional[dict],
    ) -> None:
        super().__init__(init_cfg)
        self.head_dims = check_heads(embed_dims, num_heads)
        if not isinstance(sr_ratio, int) or sr_ratio < 1:
            raise ValueError(f'sr_ratio must be a positive integer (1: no reduction), but got {sr_ratio!r}.')
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.sr_ratio = sr_ratio
        if not with_projections:
            return
        if sr_ratio == 1:
            self.qkv = nn.Linear(embed_dims, 3 * embed_dims, bias=qkv_bias)
        else:
            self.q = nn.Linear(embed_dims, embed_dims, bias=qkv_bias)
            self.kv = nn.Linear(embed_dims, 2 * embed_dims, bias=qkv_bias)
            self.sr = nn.Conv2d(embed_dims, embed_dims, sr_ratio, stride=sr_ratio)
            self.norm = build_norm(norm_cfg, embed_dims)
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.proj_drop = nn.Dropout(proj_drop)

    def reduced_size(self, hw_shape: Size) -> Size:
        """The size of the map of keys and values for a map of queries of size ``hw_shape``."""
        return max(hw_shape[0] // self.sr_ratio, 1), max(hw_shape[1] // self.sr_ratio, 1)

    def project(self, x: Tensor, hw_shape: Optional[Size]) -> Tuple[Tensor, Tensor, Tensor]:
        """Queries ``(B, N, C)``, and keys and values ``(B, N', C)`` of the reduced map, of tokens ``(B, N, C)``."""
        if self.sr_ratio == 1:
            return self.qkv(x).chunk(3, dim=-1)
        (H, W), s = hw_shape, self.sr_ratio
        if self.deploy and H >= s and W >= s and not is_traced(x):
            reduced = conv_of_patches(self.sr, x.view(x.shape[0], H, W, -1)).flatten(1, 2)
            return (self.q(x), *self.kv(self.norm(reduced)).chunk(2, dim=-1))
        grid = x.transpose(1, 2).reshape(x.shape[0], -1, H, W)
        if H < s or W < s:
            reduced = self._reduce_small(grid) if self.deploy else self.sr(_pad_to(grid, s))
        else:
            reduced = self.sr(grid)
        reduced = self.norm(reduced.flatten(2).transpose(1, 2))
        return (self.q(x), *self.kv(reduced).chunk(2, dim=-1))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """The attention without its projections: queries ``(B, N, C)``, keys and values ``(B, N', C)`` to ``(B, N, C)``."""
        raise TypeError(f'{type(self).__name__} must define mix()')

    def switch_to_deploy(self) -> None:
        """The inference form, of the classes that have one; in others norms become scales and shifts."""
        if is_foldable(self) and all(cuts_patches(c) for name, c in self.named_children() if name == 'sr'):
            if not self.deploy:
                self._switch_to_deploy()
        else:
            keep_affine(self)

    def _switch_to_deploy(self) -> None:
        """The norm of the spatial reduction becomes part of its convolution."""
        self.deploy = True
        if self.sr_ratio > 1:
            self.norm = folded_back(self.sr, self.norm)
            use_channels_last(self.sr)
            self.register_buffer('sr_shift', self.sr.weight.new_zeros(self.sr.weight.shape[0], *self.sr.kernel_size))

    @torch.no_grad()
    def absorb(self, scale: Tensor, shift: Tensor) -> None:
        """Takes over a norm before it: ``attn(x)`` becomes what ``attn(scale * x + shift)`` was, in the inference form."""
        if self.sr_ratio == 1:
            fold_forward(scale, shift, self.qkv)
            return
        fold_forward(scale, shift, self.q)
        # what the shift adds at each place of the kernel, for maps that do not fill it
        self.sr_shift.copy_((self.sr.weight.double() * shift.view(1, -1, 1, 1)).sum(1))
        fold_forward(scale, shift, self.sr)
        use_channels_last(self.sr)

    def _reduce_small(self, grid: Tensor) -> Tensor:
        """The spatial reduction of a map smaller than its kernel, of which only the part on the map counts."""
        h, w = (min(side, self.sr_ratio) for side in grid.shape[2:])
        outside = self.sr_shift.sum((1, 2)) - self.sr_shift[:, :h, :w].sum((1, 2))
        return F.conv2d(grid, self.sr.weight[:, :, :h, :w], self.sr.bias - outside, stride=self.sr_ratio)


def _pad_to(grid: Tensor, side: int) -> Tensor:
    H, W = grid.shape[2:]
    return F.pad(grid, (0, max(side - W, 0), 0, max(side - H, 0)))


class _LinearAttention(_SelfAttention):
    """What simplified and focused linear attention share: all but the map from q, k to positive features."""

    own_parameters = {**_SelfAttention.own_parameters, 'linear attention': ('dwc', 'positional_encoding')}

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        window_size: Union[int, Size],
        qkv_bias: bool = True,
        kernel_size: int = 5,
        proj_drop: float = 0.0,
        batch_first: bool = True,
        sr_ratio: int = 1,
        norm_cfg: dict = dict(type='LN'),
        with_projections: bool = True,
        init_cfg: Optional[dict] = None,
    ) -> None:
        super().__init__(embed_dims, num_heads, qkv_bias, proj_drop, sr_ratio, norm_cfg, with_projections, init_cfg)
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f'kernel_size must be odd, so that the map keeps its size, but got {kernel_size}.')
        self.window_size = to_pair(window_size)
        self.batch_first = batch_first
        # one kernel per dimension of a head, shared by the heads
        self.dwc = nn.Conv2d(
            self.head_dims, self.head_dims, kernel_size, padding=kernel_size // 2, groups=self.head_dims
        )
        self.encoding_size = h, w = self.reduced_size(self.window_size)
        self.positional_encoding = nn.Parameter(torch.zeros(1, h * w, embed_dims))

    def features(self, q: Tensor, k: Tensor) -> Tuple[Tensor, Tensor]:
        """Maps queries ``(B, N, C)`` and keys ``(B, N', C)`` to non-negative features of the same shapes."""
        raise TypeError(f'{type(self).__name__} must define features()')

    def attend(self, x: Tensor, hw_shape: Size, pos: Optional[Tensor] = None) -> Tensor:
        """Attention among the ``N = h * w`` tokens of each window: ``(B, N, C)`` to the same.

        ``pos`` is added to what queries and keys, not values, are computed from.
        """
        q, k, v = self.project(x, hw_shape)
        if pos is not None:
            q, k, _ = self.project(x + pos, hw_shape)
        return self.proj_drop(self.proj(self.mix(q, k, v, hw_shape)))

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size, mask: Optional[Tensor] = None) -> Tensor:
        """Eq. 9 without its projections: the output of queries ``(B, N, C)`` for keys and values ``(B, N', C)``.

        ``hw_shape`` is the size of the map of queries; with ``sr_ratio`` > 1 keys and values have the reduced one.
        ``mask`` is ignored.
        """
        encoding, size = self.positional_encoding, self.reduced_size(hw_shape)
        if symbolic(*size) or size != self.encoding_size:
            encoding = resize_positional_encoding(encoding, self.encoding_size, size)
        if self.deploy and k.dtype == encoding.dtype and may_overwrite(k, self):
            k = k.add_(encoding)  # q, k and v have just been computed
        else:
            k = k + encoding
        q, k = self.features(q, k)
        out = _linear_attention(q, k, v, self.num_heads, self.normalizer_eps(k.shape[1]))
        out = out.to(encoding.dtype)  # the weights': float32 under autocast, half in a model that was made so
        if self.sr_ratio > 1:  # the authors bring the values back to N tokens along the sequence, not on the map
            v = F.interpolate(v.transpose(1, 2), size=q.shape[1], mode='linear').transpose(1, 2)
        return (self.local(v, hw_shape).unflatten(2, out.shape[2:]) + out).flatten(
            2
        )  # the sum is contiguous, as its first

    def normalizer_eps(self, num_tokens: int) -> float:
        """What keeps the normalizer ``q sum(k)`` over ``num_tokens`` keys from zero."""
        return 1e-6

    def local(self, v: Tensor, hw_shape: Size) -> Tensor:
        """The depth-wise convolution of the values (Eq. 9), all heads at once: ``(B, N, C)`` to the same."""
        B, N, C = v.shape
        grid = v.reshape(B, *hw_shape, C).permute(0, 3, 1, 2)
        weight, bias = self.dwc.weight, self.dwc.bias
        if not self.deploy:
            weight, bias = weight.repeat(self.num_heads, 1, 1, 1), bias.repeat(self.num_heads)
        grid = F.conv2d(grid, weight, bias, padding=self.dwc.padding, groups=C)
        return grid.permute(0, 2, 3, 1).reshape(B, N, C)

    def _switch_to_deploy(self) -> None:
        """The kernels that the heads share are there once for each."""
        super()._switch_to_deploy()
        for name, shared in list(self.dwc.named_parameters()):
            copies = shared.detach().repeat(self.num_heads, *[1] * (shared.dim() - 1))
            setattr(self.dwc, name, nn.Parameter(copies, requires_grad=False))

    def forward(
        self,
        query: Tensor,
        key: Optional[Tensor] = None,
        value: Optional[Tensor] = None,
        identity: Optional[Tensor] = None,
        query_pos: Optional[Tensor] = None,
        key_pos: Optional[Tensor] = None,
        attn_mask: Optional[Tensor] = None,
        key_padding_mask: Optional[Tensor] = None,
        *,
        hw_shape: Optional[Size] = None,
        mask: Optional[Tensor] = None,
        **kwargs,
    ) -> Tensor:
        """Called ``(x, hw_shape=(h, w))`` by a backbone: returns the attention alone.

        Called with a ``key``, as mmcv's ``BaseTransformerLayer`` does: returns ``identity`` (``query`` unless
        given) plus the attention, mmcv's convention for a member of ``attn_cfgs``. It is self-attention: ``key``
        and ``value`` must be ``query``. ``mask`` is ignored, as the authors train without one.

        Args:
            query (Tensor): ``(B, N, C)``, or ``(N, B, C)`` with ``batch_first=False``.
            hw_shape (tuple[int, int], optional): Height and width, N in all, of the tokens' map. By default
                ``window_size`` if that has N tokens, else a square.

        Raises:
            ValueError: If ``key`` is another tensor than ``query``, a mask of mmcv's is given, or N tokens do
                not fill ``hw_shape``.
        """
        from_mmcv = key is not None or value is not None
        if from_mmcv:
            for name, other in (('key', key), ('value', value)):
                if other is not None and other is not query:
                    raise ValueError(
                        f'{type(self).__name__} is self-attention, but {name} is not query. Use it as such, and pass hw_shape '
                        'and mask by keyword.'
                    )
            for name, other in (('attn_mask', attn_mask), ('key_padding_mask', key_padding_mask)):
                if other is not None:
                    raise ValueError(
                        f'{type(self).__name__} sums over all keys at once and can apply no {name}. Pass None, or '
                        "use 'MultiheadAttention'."
                    )
            identity = query if identity is None else identity
        if not self.batch_first:
            query = query.transpose(0, 1)
            query_pos = None if query_pos is None else query_pos.transpose(0, 1)
        out = self.attend(query, self._hw_shape(query.shape[1], hw_shape), query_pos)
        out = out if self.batch_first else out.transpose(0, 1)
        return identity + out if from_mmcv else out

    def _hw_shape(self, num_tokens: int, hw_shape: Optional[Size]) -> Size:
        if hw_shape is None:
            side = round(num_tokens**0.5)
            h, w = self.window_size
            hw_shape = self.window_size if h * w == num_tokens else (side, side)
        if hw_shape[0] * hw_shape[1] != num_tokens:
            raise ValueError(
                f'hw_shape={tuple(hw_shape)} does not hold the {num_tokens} tokens of the input. Pass hw_shape=(h, w) '
                f'with h * w = {num_tokens}.'
            )
        return tuple(hw_shape)


def linear_attention(q: Tensor, k: Tensor, v: Tensor, num_heads: int, eps: float = 1e-6) -> Tensor:
    """``q (k^T v) / (q sum(k) + eps)`` per head (SLAB paper, Eqs. 7 and 9), in float32 under mixed precision.

    Of the two orders of the triple product the cheaper is taken: ``q (k^T v)`` is linear in the tokens,
    ``(q k^T) v`` is linear in the dimensions of a head.

    Args:
        q (Tensor): Non-negative features of the queries, ``(B, N, C)``.
        k (Tensor): Those of the keys, ``(B, N', C)``.
        v (Tensor): ``(B, N', C)``.
        num_heads (int): Heads, a divisor of C.
        eps (float): Keeps the normalizer from zero. Defaults to 1e-6.

    Returns:
        Tensor: ``(B, N, C)``.
    """
    return _linear_attention(q, k, v, num_heads, eps).flatten(2)


def _linear_attention(q: Tensor, k: Tensor, v: Tensor, num_heads: int, eps: float) -> Tensor:
    """:func:`linear_attention` as ``(B, N, num_heads, C / num_heads)``, not contiguous."""
    (_, N, C), M = q.shape, k.shape[1]
    d = C // num_heads
    # on the meta device, where only shapes are computed, autocast does not exist
    with nullcontext() if v.is_meta else torch.autocast(v.device.type, enabled=False):
        if v.dtype in (torch.float16, torch.bfloat16):
            q, k, v = q.float(), k.float(), v.float()
        q, k, v = [split_heads(t, num_heads).flatten(0, 1) for t in (q, k, v)]  # (B * heads, N, d)
        normalizer = torch.bmm(q, k.sum(dim=1).unsqueeze(2)) + eps
        if symbolic(N, M) or 2 * N * M > d * (N + M):
            out = torch.bmm(q, torch.bmm(k.transpose(1, 2), v))
        else:
            out = torch.bmm(torch.bmm(q, k.transpose(1, 2)), v)
        return (out / normalizer).unflatten(0, (-1, num_heads)).transpose(1, 2)


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """``(B, N, C)`` to ``(B, num_heads, N, C / num_heads)``."""
    B, N, C = x.shape
    return x.reshape(B, N, num_heads, C // num_heads).transpose(1, 2)


@MODELS.register_module(name=['SimplifiedLinearAttention', 'SLA'])
@foldable(**_PARTS)
class SimplifiedLinearAttention(_LinearAttention):
    """Simplified linear attention, SLA (SLAB paper, Eq. 9).

    ``q = relu(Wq x)``, ``k = relu(Wk x + positional_encoding)``, ``o = q (k^T v) / (q sum(k) + 1e-6) + DWC(v)``,
    then a projection. DWC is a depth-wise convolution of the values, shared by the heads.

    Args:
        embed_dims (int): Channels C.
        num_heads (int): Heads, a divisor of ``embed_dims``.
        window_size (int | tuple[int, int]): Height and width of the windows that the positional encoding is
            made for. Windows of another size get it resized.
        qkv_bias (bool): Whether q, k and v have a bias. Defaults to True.
        kernel_size (int): Of DWC, odd. Defaults to 5.
        proj_drop (float): Dropout rate after the projection. Defaults to 0.
        batch_first (bool): Whether inputs are ``(B, N, C)`` or ``(N, B, C)``. Defaults to True.
        sr_ratio (int): Spatial reduction of keys and values, along each side (PVT). The positional encoding has
            the reduced size; DWC sees the values brought back to N tokens. Defaults to 1, none.
        norm_cfg (dict): The norm after the reducing convolution. Defaults to ``dict(type='LN')``.
        with_projections (bool): False leaves the linear layers before and after the attention to the caller of
            :meth:`mix` (CSWin). Defaults to True.
        init_cfg (dict, optional): As in every ``BaseModule``.

    Raises:
        ValueError: If heads do not divide dims, ``kernel_size`` is even, or ``sr_ratio`` is no positive integer.
    """

    def features(self, q: Tensor, k: Tensor) -> Tuple[Tensor, Tensor]:
        in_place = self.deploy and may_overwrite(q, self) and may_overwrite(k, self)
        return F.relu(q, in_place), F.relu(k, in_place)


@MODELS.register_module()
@foldable(**_PARTS)
class FocusedLinearAttention(_LinearAttention):
    """Focused linear attention of the FLatten Transformer (Han et al., ICCV 2023), the baseline of Table 2.

    The features of SLA are sharpened: divided by a learnt ``softplus(scale)``, raised to ``focusing_factor``
    and scaled back to their former norm, which is taken over all heads together.

    Args:
        focusing_factor (float): The power p of the paper. Defaults to 3.
        **kwargs: Those of :class:`SimplifiedLinearAttention`.
    """

    own_parameters = {**_LinearAttention.own_parameters, 'focusing': ('scale',)}

    def __init__(self, embed_dims: int, *args, focusing_factor: float = 3, **kwargs) -> None:
        super().__init__(embed_dims, *args, **kwargs)
        if focusing_factor <= 0:
            raise ValueError(f'focusing_factor must be positive, but got {focusing_factor}.')
        self.focusing_factor = focusing_factor
        self.scale = nn.Parameter(torch.zeros(1, 1, embed_dims))

    def features(self, q: Tensor, k: Tensor) -> Tuple[Tensor, Tensor]:
        scale = F.softplus(self.scale)
        return self._focus(q, scale), self._focus(k, scale)

    def normalizer_eps(self, num_tokens: int) -> float:
        return 1e-6 * num_tokens  # its authors add 1e-6 to the mean over the keys, not to the sum

    def _focus(self, x: Tensor, scale: Tensor) -> Tensor:
        x = (F.relu(x) + 1e-6) / scale  # float32 also under mixed precision, as scale is
        focused = x**self.focusing_factor
        return focused * (x.norm(dim=-1, keepdim=True) / focused.norm(dim=-1, keepdim=True))


@MODELS.register_module()
@foldable(**_PARTS)
class SoftmaxWindowAttention(_SelfAttention):
    """Softmax attention in windows with a relative position bias (Swin Transformer, Liu et al. 2021; Eq. 8).

    Args:
        embed_dims (int): Channels C.
        num_heads (int): Heads, a divisor of ``embed_dims``.
        window_size (int | tuple[int, int]): Height and width of a window.
        qkv_bias (bool): Whether q, k and v have a bias. Defaults to True.
        attn_drop (float): Dropout rate of the attention weights. Defaults to 0.
        proj_drop (float): Dropout rate after the projection. Defaults to 0.
        init_cfg (dict, optional): As in every ``BaseModule``.

    Raises:
        ValueError: If heads do not divide dims.
    """

    uses_mask = True  # a block makes a mask for shifted windows only where this is set
    own_parameters = {'relative positions': ('relative_position_bias_table',)}

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        window_size: Union[int, Size],
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        init_cfg: Optional[dict] = None,
    ) -> None:
        super().__init__(embed_dims, num_heads, qkv_bias, proj_drop, 1, {}, True, init_cfg)
        self.window_size = h, w = to_pair(window_size)
        self.attn_drop = nn.Dropout(attn_drop)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * h - 1) * (2 * w - 1), num_heads))
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)
        rows = torch.arange(h)[:, None] - torch.arange(h) + h - 1
        cols = torch.arange(w)[:, None] - torch.arange(w) + w - 1
        index = rows[:, None, :, None] * (2 * w - 1) + cols[None, :, None, :]  # (h, w, h, w)
        self.register_buffer('relative_position_index', index, persistent=False)

    def position_bias(self, hw_shape: Size) -> Tensor:
        """The bias of windows of ``hw_shape``, at most ``window_size``: ``(num_heads, h * w, h * w)``."""
        h, w = hw_shape
        if self.deploy:
            return self.bias[:, :h, :w, :h, :w].reshape(-1, h * w, h * w)
        index = self.relative_position_index[:h, :w, :h, :w].reshape(h * w, h * w)
        return self.relative_position_bias_table[index].permute(2, 0, 1)

    def _switch_to_deploy(self) -> None:
        """The position bias is looked up once and for all."""
        super()._switch_to_deploy()
        table = self.relative_position_bias_table.detach()
        self.register_buffer('bias', table[self.relative_position_index].permute(4, 0, 1, 2, 3).contiguous())
        del self.relative_position_bias_table, self.relative_position_index

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size, mask: Optional[Tensor] = None) -> Tensor:
        """The attention without its projections, ``(B * num_windows, h * w, C)`` to the same."""
        B, N, C = q.shape
        bias = self.position_bias(hw_shape)
        q, k, v = [split_heads(t, self.num_heads) for t in (q, k, v)]
        if self.deploy:
            if mask is not None and mask.dim() == 3:
                bias = bias.expand(mask.shape[0], -1, -1, -1).masked_fill(~mask[:, None], float('-inf'))
                bias = bias.repeat(B // bias.shape[0], 1, 1, 1)
            elif mask is not None:
                bias = bias.masked_fill(~mask, float('-inf'))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype).expand(B, -1, -1, -1))
            return out.transpose(1, 2).reshape(B, N, C)
        attn = (q * self.head_dims**-0.5) @ k.transpose(-2, -1) + bias
        if mask is not None:
            attn = attn.view(-1, mask.shape[0], self.num_heads, N, N)
            attn = attn.masked_fill(~mask[:, None], float('-inf')).view(B, self.num_heads, N, N)
        attn = self.attn_drop(attn.softmax(dim=-1))
        return (attn @ v).transpose(1, 2).reshape(B, N, C)

    def forward(self, x: Tensor, *, hw_shape: Optional[Size] = None, mask: Optional[Tensor] = None) -> Tensor:
        """Attention within windows, ``(B * num_windows, h * w, C)`` to the same.

        Args:
            hw_shape (tuple[int, int], optional): Height and width of a window. Defaults to ``window_size``.
            mask (Tensor, optional): bool, ``(num_windows, h * w, h * w)``, True where attention is allowed.
        """
        hw_shape = hw_shape or self.window_size
        return self.proj_drop(self.proj(self.mix(*self.project(x, hw_shape), hw_shape, mask)))


@MODELS.register_module()
@foldable(**_PARTS)
class SoftmaxAttention(_SelfAttention):
    """Softmax attention on a whole map without positional terms: ViT's, and with ``sr_ratio`` > 1 PVT's.

    Args:
        embed_dims (int): Channels C.
        num_heads (int): Heads, a divisor of ``embed_dims``.
        window_size (int | tuple[int, int], optional): Taken for the sake of one signature; nothing depends on it.
        qkv_bias (bool): Whether q, k and v have a bias. Defaults to True.
        attn_drop (float): Dropout rate of the attention weights. Defaults to 0.
        proj_drop (float): Dropout rate after the projection. Defaults to 0.
        sr_ratio (int): Spatial reduction of keys and values, along each side. Defaults to 1, none.
        norm_cfg (dict): The norm after the reducing convolution. Defaults to ``dict(type='LN')``.
        with_projections (bool): False leaves the linear layers before and after the attention to the caller of
            :meth:`mix` (CSWin). Defaults to True.
        init_cfg (dict, optional): As in every ``BaseModule``.

    Raises:
        ValueError: If heads do not divide dims, or ``sr_ratio`` is no positive integer.
    """

    takes_class_token = True  # tokens need no place on a map, so a class token may be among them

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        window_size: Union[int, Size, None] = None,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        sr_ratio: int = 1,
        norm_cfg: dict = dict(type='LN'),
        with_projections: bool = True,
        init_cfg: Optional[dict] = None,
    ) -> None:
        super().__init__(embed_dims, num_heads, qkv_bias, proj_drop, sr_ratio, norm_cfg, with_projections, init_cfg)
        self.attn_drop = nn.Dropout(attn_drop)

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, hw_shape: Optional[Size] = None, mask: Optional[Tensor] = None
    ) -> Tensor:
        """``softmax(q k^T / sqrt(d)) v`` per head, for queries ``(B, N, C)``, keys and values ``(B, N', C)``.

        ``mask`` is not supported, it must be None.
        """
        B, N, C = q.shape
        q, k, v = [split_heads(t, self.num_heads) for t in (q, k, v)]
        if self.deploy:
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C)
        weights = self.attn_drop(((q * self.head_dims**-0.5) @ k.transpose(-2, -1)).softmax(dim=-1))
        return (weights @ v).transpose(1, 2).reshape(B, N, C)

    def forward(self, x: Tensor, *, hw_shape: Optional[Size] = None, mask: Optional[Tensor] = None) -> Tensor:
        """Attention among all tokens, ``(B, N, C)`` to the same.

        Args:
            hw_shape (tuple[int, int], optional): Height and width of the map, needed with ``sr_ratio`` > 1.
            mask (Tensor, optional): Not supported, must be None.
        """
        return self.proj_drop(self.proj(self.mix(*self.project(x, hw_shape), hw_shape)))
