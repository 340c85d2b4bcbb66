"""The norms of the SLAB paper: RepBN (Eq. 2) and PRepBN (Eq. 5).

Both normalize the last dimension of a token tensor, as LayerNorm does, or another one, so each can stand wherever a
transformer has a LayerNorm; both build through any ``norm_cfg`` (``dict(type='PRepBN')``).
"""

import math
import sys
from contextlib import contextmanager
from typing import Any, Iterator, Optional, Tuple

import torch
import torch.nn as nn
from mmcv.cnn import build_norm_layer
from mmengine.registry import MODELS
from torch import Tensor


def _check_channels(name: str, x: Tensor, num_features: int, dim: int) -> None:
    if x.shape[dim] != num_features:
        if dim != -1:
            raise ValueError(
                f'{name}(num_features={num_features}, channel_dim={dim}) got an input of shape {tuple(x.shape)}. Pass maps as '
                f'(B, {num_features}, H, W).'
            )
        raise ValueError(
            f'{name}(num_features={num_features}) normalizes the last dimension, but got an input of shape '
            f'{tuple(x.shape)}. Pass tokens as (..., {num_features}); permute a (B, C, H, W) map to (B, H, W, C).'
        )


def channel_dim_of(norm: nn.Module, data_format: Optional[str] = None) -> int:
    """The dimension of the channels in a call of ``norm``, which may say it as mmpretrain's LayerNorm2d is told it."""
    return -1 if data_format == 'channel_last' else getattr(norm, 'channel_dim', -1)


def _bn_affine(bn: nn.Module) -> Tuple[Tensor, Tensor]:
    scale = bn.weight.double() / torch.sqrt(bn.running_var.double() + bn.eps)
    return scale, bn.bias.double() - scale * bn.running_mean.double()


@MODELS.register_module()
class RepBN(nn.Module):
    """Re-parameterized BatchNorm: ``RepBN(x) = BN(x) + eta * x`` (SLAB paper, Eq. 2).

    The extra ``eta * x`` carries the input past the normalization and eases training; it costs nothing at
    inference, because a BN plus a scaled identity is again one affine map per channel (Lemma 4.1).

    Args:
        num_features (int): Channels, the size of the last input dimension.
        eps (float): Added to the variance. Defaults to 1e-5.
        momentum (float | None): Of the running statistics, as in ``nn.BatchNorm1d``. Defaults to 0.1.
        use_eta (bool): False fixes eta at 0, which leaves a plain BN (the ablation in Table 7). Defaults to True.
        channel_dim (int): The dimension of the channels: 1 for maps ``(B, C, H, W)``. Defaults to -1.

    Shape:
        ``(..., num_features)`` to the same. The statistics are taken over all dimensions but that of the channels.

    Raises:
        ValueError: If the dimension of the channels of an input is not ``num_features``.
    """

    _abbr_ = 'norm'

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: Optional[float] = 0.1,
        use_eta: bool = True,
        channel_dim: int = -1,
    ) -> None:
        super().__init__()
        self.num_features = num_features
        self.channel_dim = channel_dim
        self.eta = nn.Parameter(torch.full((1,), float(use_eta)), requires_grad=use_eta)
        self.bn = nn.BatchNorm1d(num_features, eps=eps, momentum=momentum)

    def forward(self, x: Tensor, eta: Optional[Tensor] = None, data_format: Optional[str] = None) -> Tensor:
        """``BN(x) + eta * x``; ``eta`` is the module's own unless given (PRepBN gives one)."""
        dim = channel_dim_of(self, data_format)
        _check_channels('RepBN', x, self.num_features, dim)
        eta = self.eta if eta is None else eta
        tokens = x if dim == -1 else x.movedim(dim, -1)
        # (tokens, C): the layout in which BatchNorm1d and SyncBatchNorm both take their channels from dim 1
        out = self.bn(tokens.reshape(-1, self.num_features)).view(tokens.shape) + eta * tokens
        return out if dim == -1 else out.movedim(-1, dim)

    def affine(self) -> Tuple[Tensor, Tensor]:
        """The inference form, ``RepBN(x) = scale * x + shift`` per channel (Lemma 4.1).

        With ``alpha``, ``beta`` the BN's weight and bias, ``mu`` its running mean and
        ``sigma = sqrt(running_var + eps)``: ``scale = alpha / sigma + eta``, ``shift = beta - alpha mu / sigma``.

        Returns:
            tuple[Tensor, Tensor]: scale and shift in float64, each of shape ``(num_features,)``.
        """
        scale, shift = _bn_affine(self.bn)
        return scale + self.eta.double(), shift

    def extra_repr(self) -> str:
        return f'{self.num_features}'


@MODELS.register_module()
class PRepBN(nn.Module):
    """Progressive re-parameterized BatchNorm (SLAB paper, Eq. 5).

    ``PRepBN(x) = gamma * LN(x) + (1 - gamma) * RepBN(x)``, in training and in evaluation alike. ``gamma`` runs
    from 1 (a pure LayerNorm) to 0 (a pure RepBN, which folds into its neighbours); ``GammaDecayHook`` moves it
    (Eq. 6). It is a buffer, so a checkpoint holds it.

    How the rest follows from that:

    * ``gamma`` is never read back from the device. The one thing a forward has to know about it, whether the
      LayerNorm is still needed, is kept as a Python bool beside it, so the forward neither synchronizes nor
      makes ``torch.compile`` recompile at every step (it recompiles once, when gamma becomes 0).
    * At gamma = 1 RepBN still runs in training: its statistics must be there when its turn comes.
    * At gamma = 0 LN is not computed. Its parameters stay in the graph with a gradient of exactly zero, so
      DistributedDataParallel needs no ``find_unused_parameters`` on either side of the handover.

    Args:
        num_features (int): Channels, the size of the last input dimension.
        eps (float): Of RepBN, and of LN unless ``ln_eps`` is given. Defaults to 1e-5.
        ln_eps (float | None): Of LN alone. Defaults to None.
        momentum (float | None): Of RepBN's running statistics. Defaults to 0.1.
        gamma (float): The initial gamma, in [0, 1]. Defaults to 1.
        use_eta (bool): See :class:`RepBN`. Defaults to True.
        channel_dim (int): The dimension of the channels: 1 for maps ``(B, C, H, W)``. Defaults to -1.
        online (str): 'LN', or 'RMS' for an RMSNorm in the LayerNorm's place (Sec. 5.3). Defaults to 'LN'.

    Shape:
        ``(..., num_features)`` to the same.

    Raises:
        ValueError: If ``gamma`` is outside [0, 1], ``online`` is another name, or the dimension of the channels of an input is
            not ``num_features``.
    """

    _abbr_ = 'norm'

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        ln_eps: Optional[float] = None,
        momentum: Optional[float] = 0.1,
        gamma: float = 1.0,
        use_eta: bool = True,
        channel_dim: int = -1,
        online: str = 'LN',
    ) -> None:
        super().__init__()
        if online not in _ONLINE:
            raise ValueError(f"online must be 'LN' or 'RMS', but got {online!r}.")
        self.num_features = num_features
        self.channel_dim = channel_dim
        self.ln = _ONLINE[online](num_features, eps if ln_eps is None else ln_eps, channel_dim)
        self.repbn = RepBN(num_features, eps, momentum, use_eta, channel_dim)
        self.register_buffer('gamma', torch.ones(()))
        self.set_gamma(gamma)

    @classmethod
    def around(cls, norm: nn.Module, num_features: int, channel_dim: int = -1, **kwargs: Any) -> 'PRepBN':
        """A PRepBN at gamma 1 whose online part is ``norm`` itself, so that it computes what ``norm`` does, to the bit.

        Its BN begins with the weight and bias of ``norm``, and is trained or frozen as that is.

        Args:
            norm (nn.Module): A normalization of each token by itself.
            num_features (int): Channels.
            channel_dim (int): Their dimension. Defaults to -1.
            **kwargs: ``eps``, ``momentum`` and ``use_eta`` of the RepBN.
        """
        made = cls(num_features, channel_dim=channel_dim, **kwargs)
        made.ln = norm
        like = next(norm.parameters(), None)
        if like is not None:
            made.repbn.to(like.device, like.dtype)
            made.gamma = made.gamma.to(like.device)
            made.repbn.requires_grad_(like.requires_grad)
            made.repbn.eta.requires_grad_(like.requires_grad and kwargs.get('use_eta', True))
            with torch.no_grad():
                made.repbn.bn.weight.copy_(getattr(norm, 'weight', like))
                if getattr(norm, 'bias', None) is not None:
                    made.repbn.bn.bias.copy_(norm.bias)
        return made.train(norm.training)

    @property
    def eps(self) -> float:
        """That of the online norm, which code around a norm may ask for."""
        return getattr(self.ln, 'eps', self.repbn.bn.eps)

    def set_gamma(self, gamma: float) -> None:
        """Sets gamma, a number in [0, 1]. Writing to the buffer directly would leave the module's bool stale."""
        gamma = check_gamma(gamma)
        self.gamma.fill_(gamma)
        self._set_ln_needed(gamma > 0)

    def forward(self, x: Tensor, data_format: Optional[str] = None) -> Tensor:
        """``data_format='channel_last'`` puts the channels last for one call, as mmpretrain's LayerNorm2d has it."""
        _check_channels('PRepBN', x, self.num_features, channel_dim_of(self, data_format))
        how = {} if data_format is None else dict(data_format=data_format)
        if self.ln_needed:
            return self.gamma * self.ln(x, **how) + (1 - self.gamma) * self.repbn(x, **how)
        weights = (
            [p for p in self.ln._parameters.values() if p is not None and p.requires_grad] if self.training else []
        )
        if weights:
            # a zero that depends on LN's parameters, added to a scalar: free, and DDP sees every parameter used
            return self.repbn(x, self.repbn.eta + 0 * sum([p.sum() for p in weights]), **how)
        return self.repbn(x, **how)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._set_ln_needed(bool(self.gamma > 0))  # loading is where a synchronization is allowed

    def _set_ln_needed(self, needed: bool) -> None:
        changed = getattr(self, 'ln_needed', needed) != needed
        self.ln_needed = needed
        dynamo = sys.modules.get('torch._dynamo')
        # torch 2.1 does not look at a module's attributes again: what it compiled would go on with this layer's old form
        if changed and dynamo is not None and not dynamo.config.guard_nn_modules:
            dynamo.reset()

    def extra_repr(self) -> str:
        return f'{self.num_features}'


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` over a dimension, the statistics in float32 (Zhang and Sennrich 2019)."""

    def __init__(self, num_features: int, eps: float = 1e-6, channel_dim: int = -1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_features))
        self.eps = eps
        self.channel_dim = channel_dim

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(self.channel_dim, -1)
        high = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        normed = high * torch.rsqrt(high.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * normed.to(x.dtype)).movedim(-1, self.channel_dim)


class _MapLayerNorm(nn.LayerNorm):
    """LayerNorm over another dimension than the last."""

    def __init__(self, num_features: int, eps: float, channel_dim: int) -> None:
        super().__init__(num_features, eps)
        self.channel_dim = channel_dim

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(self.channel_dim, -1)).movedim(-1, self.channel_dim)


_ONLINE = {
    'LN': lambda channels, eps, dim: nn.LayerNorm(channels, eps) if dim == -1 else _MapLayerNorm(channels, eps, dim),
    'RMS': RMSNorm,
}


class TokenBN(nn.Module):
    """Plain BatchNorm of tokens: what ``norm_cfg=dict(type='BN')`` means in the backbones here.

    ``(..., num_features)`` to the same, the statistics over all leading dimensions. The baseline that RepBN
    extends (Table 7), and the norm of BN + FFNBN (Yao et al. 2021).
    """

    _abbr_ = 'norm'

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: Optional[float] = 0.1) -> None:
        super().__init__()
        self.num_features = num_features
        self.bn = nn.BatchNorm1d(num_features, eps=eps, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        _check_channels('BN', x, self.num_features, -1)
        return self.bn(x.reshape(-1, self.num_features)).view(x.shape)

    def affine(self) -> Tuple[Tensor, Tensor]:
        """The inference form, ``BN(x) = scale * x + shift`` per channel, in float64; see :meth:`RepBN.affine`."""
        return _bn_affine(self.bn)


def build_norm(cfg: dict, num_features: int, name: str = 'norm_cfg') -> nn.Module:
    """Builds a norm over the last dimension of ``(..., num_features)`` from a ``norm_cfg``.

    'BN' is BatchNorm of tokens; every other type is what mmcv's ``build_norm_layer`` makes of it.

    Raises:
        ValueError: If ``cfg`` is no dict with a ``type``, or the type is not registered; it names ``name``.
    """
    known = "'PRepBN', 'RepBN', 'LN', 'BN', or the name of a registered norm"
    if not isinstance(cfg, dict) or 'type' not in cfg:
        raise ValueError(f'{name} must be a dict with a type ({known}), but got {cfg!r}.')
    try:
        if cfg['type'] == 'BN':
            norm = TokenBN(num_features, **{k: v for k, v in cfg.items() if k not in ('type', 'requires_grad')})
            return norm.requires_grad_(cfg.get('requires_grad', True))
        return build_norm_layer(cfg, num_features)[1]
    except KeyError as e:
        raise ValueError(f'{name} has the unknown type {cfg["type"]!r}. Use {known}.') from e
    except TypeError as e:
        raise ValueError(f'{name}={cfg!r} cannot be built: {e}. Remove what the norm does not take.') from e


def check_gamma(gamma: float, name: str = 'gamma') -> float:
    """Returns ``gamma`` as a float; raises ValueError, naming ``name``, unless it is a number in [0, 1]."""
    if isinstance(gamma, bool) or not isinstance(gamma, (int, float)) or not math.isfinite(gamma):
        raise ValueError(f'{name} must be a number in [0, 1], but got {gamma!r}.')
    if not 0 <= gamma <= 1:
        raise ValueError(f'{name} must lie in [0, 1] (1: pure LayerNorm, 0: pure RepBN), but got {gamma!r}.')
    return float(gamma)


def prepbn_modules(model: nn.Module) -> Iterator[PRepBN]:
    """All PRepBN layers of ``model``, in the order of ``model.modules()``."""
    return (m for m in model.modules() if isinstance(m, PRepBN))


def repbn_modules(model: nn.Module) -> Iterator[RepBN]:
    """All RepBN layers of ``model``, those inside PRepBN included."""
    return (m for m in model.modules() if isinstance(m, RepBN))


def set_gamma(model: nn.Module, gamma: float) -> None:
    """Sets the gamma of every PRepBN in ``model``, a number in [0, 1] (Eq. 5).

    Raises:
        ValueError: If ``gamma`` is outside [0, 1], or ``model`` has no PRepBN.
    """
    layers = list(prepbn_modules(model))
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no PRepBN layer whose gamma could be set. Build it with norm_cfg=dict(type='PRepBN')."
        )
    for layer in layers:
        layer.set_gamma(gamma)


@contextmanager
def frozen_bn_statistics(module: nn.Module) -> Iterator[None]:
    """Within it, BN layers of ``module`` normalize as before but do not update their running statistics.

    Gradient checkpointing runs a block's forward twice a step; the second run happens in this context, else
    each batch would enter the running statistics twice.
    """
    layers = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training]
    kept = [(m.momentum, None if m.num_batches_tracked is None else m.num_batches_tracked.clone()) for m in layers]
    for layer in layers:
        layer.momentum = 0.0  # the same operations on the same tensors, which checkpointing insists on
    try:
        yield
    finally:
        for layer, (momentum, batches) in zip(layers, kept):
            layer.momentum = momentum
            if batches is not None:
                layer.num_batches_tracked.copy_(batches)
