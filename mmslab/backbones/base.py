"""What every backbone here shares: blocks, stages, checked arguments, weights, freezing, gradient checkpointing."""

from contextlib import nullcontext
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from mmengine.model import BaseModule
from mmengine.registry import MODELS
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..checkpoints import load_pretrained
from ..layers.attention import declared_parts, scopes
from ..layers.compare import Part, check_unchanged, random_like
from ..layers.embed import MLP, DropPath, PositionEmbedding
from ..layers.fold import (
    check_foldable,
    foldable,
    folded,
    has_hooks,
    is_exactly,
    is_foldable,
    is_known,
    keep_affine,
    one_place_each,
    switch_to_deploy,
)
from ..layers.inference import add_, may_overwrite
from ..layers.norm import build_norm, frozen_bn_statistics, prepbn_modules

LINEAR_ATTENTION = {'sla': 'SimplifiedLinearAttention', 'focused': 'FocusedLinearAttention'}


@foldable(mlp=MLP, drop_path=(DropPath, nn.Identity))
class TransformerBlock(nn.Module):
    """``x = x + Attn(Norm(x))``, ``x = x + MLP(Norm(x))`` (Eq. 1), the attention on the whole map.

    Maps ``(B, H, W, C)`` to the same, or tokens without places, ``(B, N, C)``, to the same.
    """

    deploy = False
    in_place = False  # whether update_ does what forward does

    def __init__(
        self,
        attn: nn.Module,
        embed_dims: int,
        mlp_ratio: float,
        drop: float,
        drop_path: float,
        norm_cfg: dict,
        ffn_norm_cfg: Optional[dict],
    ) -> None:
        super().__init__()
        self.norm1 = build_norm(norm_cfg, embed_dims)
        self.attn = attn
        self.norm2 = build_norm(norm_cfg, embed_dims)
        self.mlp = MLP(embed_dims, int(embed_dims * mlp_ratio), drop, ffn_norm_cfg)
        self.drop_path = DropPath(drop_path)

    def attention(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            return self.attn(x)
        hw = (x.shape[1], x.shape[2])
        return self.attn(x.reshape(x.shape[0], hw[0] * hw[1], -1), hw_shape=hw).view(x.shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.attention(self.norm1(x)))
        return x + self.drop_path(self.mlp(self.norm2(x)))

    def switch_to_deploy(self) -> None:
        """The inference form: norms become part of the linear layers after them, in a subclass scales and shifts."""
        if not is_known(self):
            keep_affine(self)
        elif not self.deploy:
            self.deploy = True
            self._switch_to_deploy()
            self.in_place = is_foldable(self)

    def _switch_to_deploy(self) -> None:
        switch_to_deploy(self.attn)
        switch_to_deploy(self.mlp)
        self.norm1 = folded(self.norm1, self.takes_norm1())
        self.norm2 = folded(self.norm2, self.mlp)
        if is_exactly(self.drop_path, DropPath):
            self.drop_path = nn.Identity()

    def takes_norm1(self) -> Optional[nn.Module]:
        """What ``norm1`` goes into, if that can take it."""
        return self.attn

    def update_(self, x: Tensor) -> Tensor:
        """What ``forward`` does, written over ``x``, contiguous; for the inference form alone, where it is ``in_place``."""
        self.add_attention_(x)
        return add_(x, lambda rows: self.mlp(self.norm2(rows)), width=self.mlp.fc1.out_features)

    def add_attention_(self, x: Tensor) -> None:
        x.add_(self.attention(self.norm1(x)))


def _run_block(block: nn.Module, x: Tensor) -> Tensor:
    """``block(x)``, contiguous, written over ``x`` where the block has such a form, else in memory of its own."""
    if getattr(block, 'in_place', False) and not has_hooks(block):
        return block.update_(x)
    return _copy_of(block(x))


def _copy_of(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


class Stage(nn.Module):
    """The blocks of one stage, the position embedding before them, and what leads to the next stage."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        downsample: Optional[nn.Module] = None,
        pos_embed: Optional[PositionEmbedding] = None,
    ) -> None:
        super().__init__()
        self.pos_embed = pos_embed
        self.blocks = nn.ModuleList(blocks)
        self.downsample = downsample


class SLABBackbone(BaseModule):
    """Base of the backbones. A subclass builds ``patch_embed`` and ``layers`` (its stages), then calls
    :meth:`finish`.

    Args:
        out_indices (Sequence[int]): Stages whose maps are returned. Stages after the last of them are not built.
        frozen_stages (int): Stages 1 to this, and the patch embedding, are neither trained nor put into
            training mode; 0 freezes the patch embedding alone, -1 nothing.
        norm_eval (bool): Whether BatchNorm statistics stay frozen while training.
        with_cp (bool): Whether blocks recompute their activations in the backward pass, to save memory.
        init_cfg (dict, optional): ``dict(type='Pretrained', checkpoint=...)`` takes the formats that
            :mod:`mmslab.checkpoints` knows.
        deploy (bool): Whether to build the inference form, without norms, for the weights of a folded checkpoint.
    """

    def __init__(
        self,
        num_stages: int,
        out_indices: Sequence[int],
        frozen_stages: int,
        norm_eval: bool,
        with_cp: bool,
        init_cfg: Optional[dict],
        deploy: bool = False,
    ) -> None:
        super().__init__(init_cfg)
        self.deploy = False
        self._makes_its_maps = False
        self._build_deploy = deploy
        if (
            not isinstance(out_indices, (list, tuple))
            or not out_indices
            or sorted(set(out_indices)) != list(out_indices)
            or not set(out_indices) <= set(range(num_stages))
        ):
            raise ValueError(
                f'out_indices must be ascending stages out of {tuple(range(num_stages))}, but got {out_indices!r}.'
            )
        out_indices = tuple(out_indices)
        if not isinstance(frozen_stages, int) or not -1 <= frozen_stages <= num_stages:
            raise ValueError(f'frozen_stages must lie in [-1, {num_stages}], but got {frozen_stages!r}.')
        self.out_indices = out_indices
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval
        self.with_cp = with_cp

    def finish(self, out_norm_cfg: Optional[dict], num_features: Sequence[int]) -> None:
        """Adds the norms on the outputs, ``norm{i}``, and initializes and freezes what has been built."""
        self.num_features = list(num_features)
        for i in self.out_indices:
            norm = nn.Identity() if out_norm_cfg is None else build_norm(out_norm_cfg, num_features[i], 'out_norm_cfg')
            self.add_module(f'norm{i}', norm)
        init_transformer(self)
        if self._build_deploy:
            for norm in prepbn_modules(self):
                norm.set_gamma(0.0)
            self._fold()
        self._freeze_stages()

    def switch_to_deploy(self, check: bool = True) -> None:
        """Folds every norm into its neighbours and takes the inference form, in place: the same outputs, faster.

        PRepBN, RepBN and BN become part of the linear layer or convolution next to them (Lemma 4.1), an output norm
        of these types a scale and a shift. LayerNorm depends on each token's own statistics and stays. Folded
        parameters are frozen: the training form is gone. A second call does nothing.

        This holds for the layers of this package. A subclass of one, a layer with hooks or parametrizations, or one
        that stands in several places, computes what it did, behind a scale and a shift.

        Args:
            check (bool): Whether to fold a copy first, and compare its outputs for a small random image with those of
                the backbone. Defaults to True.

        Raises:
            ValueError: If the backbone is in training mode, a PRepBN has gamma above 0, or the check finds other
                outputs; it names the layer, and nothing has changed.
        """
        if self.deploy:
            return
        check_foldable(self)
        if check:
            check_unchanged(self, lambda m: m._fold(), lambda m: m(m.example_image()), lambda m: m.parts())
        self._fold()

    def _fold(self) -> None:
        with one_place_each(self):
            switch_to_deploy(self.patch_embed)
            for stage in self.layers:
                for block in stage.blocks:
                    switch_to_deploy(block)
                if stage.downsample is not None:
                    switch_to_deploy(stage.downsample)
            keep_affine(self)  # output norms, and those of parts that a subclass has added
            self._makes_its_maps = is_known(self) and all(is_foldable(m) for m in self._map_makers())
        for module in self.modules():
            if is_exactly(module, nn.Dropout):
                module.p = 0.0
            elif is_exactly(module, DropPath):
                module.drop_prob = 0.0
        self.requires_grad_(False)
        self.deploy = True

    def _map_makers(self) -> List[nn.Module]:
        """The layers whose outputs the blocks begin with."""
        made = [self.patch_embed, *(m for stage in self.layers for m in (stage.pos_embed, stage.downsample))]
        return [m for m in made if m is not None]

    def example_image(self) -> Tensor:
        """A small random image ``(1, in_channels, H, W)`` that windows do not divide, for :meth:`switch_to_deploy`.

        A subclass whose ``forward`` takes something else returns that.
        """
        patch = getattr(self.patch_embed, 'stride', 1)
        channels = getattr(getattr(self.patch_embed, 'proj', None), 'in_channels', 3)
        return random_like(self, (1, channels, max(64, 2 * patch), max(80, 3 * patch)))

    def parts(self) -> List[Part]:
        """What :meth:`switch_to_deploy` compares to find the layer at fault, in the order of the computation."""
        parts = [Part('patch_embed', 'patch_embed')]
        for i, stage in enumerate(self.layers):
            if stage.pos_embed is not None:
                parts.append(Part(f'layers.{i}.pos_embed', f'layers.{i}.pos_embed'))
            for j, block in enumerate(stage.blocks):
                name = f'layers.{i}.blocks.{j}'
                if isinstance(block, TransformerBlock):
                    parts.append(Part(f'{name}.attn', name, lambda block, x: block.attention(block.norm1(x))))
                    parts.append(Part(f'{name}.mlp', name, lambda block, x: block.mlp(block.norm2(x))))
                parts.append(Part(name, name, _run_block))
            if i in self.out_indices:
                parts.append(Part(f'norm{i}', f'norm{i}'))
            if stage.downsample is not None:
                parts.append(Part(f'layers.{i}.downsample', f'layers.{i}.downsample'))
        return parts

    def forward(self, x: Tensor) -> Tuple[Tensor, ...]:
        x = self.patch_embed(x)
        outs = []
        for i, stage in enumerate(self.layers):
            x = self.run_stage(stage, x)
            if i in self.out_indices:
                outs.append(getattr(self, f'norm{i}')(x).permute(0, 3, 1, 2).contiguous())
            if stage.downsample is not None:
                x = stage.downsample(x)
        return tuple(outs)

    def run_stage(self, stage: Stage, x: Tensor) -> Tensor:
        """The stage's position embedding and blocks, without what leads to the next stage."""
        if stage.pos_embed is not None:
            x = stage.pos_embed(x)
        if self.deploy and may_overwrite(x, stage):
            if self._makes_its_maps and not any(has_hooks(m) for m in self._map_makers()):
                x = x.contiguous()  # a tensor that patch embedding or downsampling has just made
            else:
                x = _copy_of(x)  # a tensor that others may keep
            for block in stage.blocks:
                x = _run_block(block, x)
            return x
        for block in stage.blocks:
            x = self.run_block(block, x)
        return x

    def attentions(self) -> Iterator[Tuple[str, nn.Module]]:
        """The modules that ``attn`` stands for, with their names in the backbone (``layers.0.blocks.0.attn``)."""
        for i, stage in enumerate(self.layers):
            for j, block in enumerate(stage.blocks):
                yield f'layers.{i}.blocks.{j}.attn', block.attn

    def get_layer_depth(self, param_name: str, prefix: str = '') -> Tuple[int, int]:
        """How deep in the network a parameter is, for layer-wise learning-rate decay, counted as mmpretrain does.

        Args:
            param_name (str): Its name, which begins with ``prefix`` if it is the backbone's.
            prefix (str): What the names of the backbone's parameters begin with, such as 'backbone.'.

        Returns:
            tuple[int, int]: The depth and the number of depths n, the blocks and two: 0 for the embedding of patches and of the
            places of the first stage, i for the i-th block, for what leads to the next stage that of the last block before
            it, and n - 1 for all that comes behind, the norms on the outputs included.
        """
        depths = [len(stage.blocks) for stage in self.layers]
        last = sum(depths) + 1
        path = param_name[len(prefix) :].split('.') if param_name.startswith(prefix) else ['']
        if path[0] == 'patch_embed':
            return 0, last + 1
        if path[0] != 'layers':
            return last, last + 1
        stage, part = int(path[1]), path[2]
        before = sum(depths[:stage])
        if part == 'blocks':
            return before + int(path[3]) + 1, last + 1
        return (before + depths[stage] if part == 'downsample' else before), last + 1

    def init_weights(self) -> None:
        """Loads ``init_cfg``'s checkpoint, whatever its known format. Random weights come with construction."""
        if self.init_cfg and self.init_cfg.get('type') == 'Pretrained':
            load_pretrained(self, self.init_cfg['checkpoint'], prefix=self.init_cfg.get('prefix'))
            self._is_init = True
        else:
            super().init_weights()

    def train(self, mode: bool = True) -> 'SLABBackbone':
        super().train(mode)
        self._freeze_stages()
        if mode and self.norm_eval:
            for m in self.modules():
                if isinstance(m, nn.modules.batchnorm._BatchNorm):
                    m.eval()
        return self

    def frozen(self) -> List[nn.Module]:
        """What ``frozen_stages`` freezes: the patch embedding, and the stages with the norms on their outputs."""
        frozen = [self.patch_embed] if self.frozen_stages >= 0 else []
        for i in range(min(self.frozen_stages, len(self.layers))):
            frozen.append(self.layers[i])
            if i in self.out_indices:
                frozen.append(getattr(self, f'norm{i}'))
        return frozen

    def _freeze_stages(self) -> None:
        for module in self.frozen():
            module.eval()
            module.requires_grad_(False)

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        """``block(x)``, under gradient checkpointing if ``with_cp``; BN statistics see each batch once."""
        if self.with_cp and x.requires_grad:
            return checkpoint(
                block, x, use_reentrant=False, context_fn=lambda: (nullcontext(), frozen_bn_statistics(block))
            )
        return block(x)


def init_transformer(module: nn.Module) -> None:
    """Weights of a fresh transformer: linear layers truncated normal (0.02), their biases zero."""
    for m in module.modules():
        if isinstance(m, nn.Linear):
            nn.init.trunc_normal_(m.weight, std=0.02)
            if m.bias is not None:
                nn.init.zeros_(m.bias)


def resolve_arch(arch: Union[str, Dict[str, Any]], zoo: Dict[str, Dict[str, Any]], owner: str) -> Dict[str, Any]:
    """The settings of an arch, by name or as a dict with the keys that the named ones have.

    Raises:
        ValueError: For an unknown name, missing or unknown keys, per-stage tuples of unequal lengths, heads
            that do not divide the channels.
    """
    keys = next(iter(zoo.values())).keys()
    if isinstance(arch, str):
        if arch not in zoo:
            raise ValueError(
                f'{owner} has no arch {arch!r}. Choose one of {sorted(zoo)}, or give a dict with {sorted(keys)}.'
            )
        return zoo[arch]
    if not isinstance(arch, dict) or set(arch) != set(keys):
        raise ValueError(f'arch must be one of {sorted(zoo)} or a dict with exactly {sorted(keys)}, but got {arch!r}.')
    for key, value in arch.items():
        values = value if isinstance(value, (list, tuple)) else [value]
        if not values or not all(isinstance(v, (int, float)) and v > 0 for v in values):
            raise ValueError(f'arch[{key!r}] must be a positive number or a sequence of them, but got {value!r}.')
        named = next(iter(zoo.values()))[key]
        if key in ('depth', 'depths', 'embed_dims') and not all(isinstance(v, int) for v in values):
            raise ValueError(f'arch[{key!r}] must be of integers, but got {value!r}.')
        if isinstance(named, tuple) != isinstance(value, (list, tuple)) and key != 'num_heads':
            form = 'a sequence, an entry per stage' if isinstance(named, tuple) else 'one number'
            raise ValueError(f'arch[{key!r}] must be {form}, but got {value!r}.')
    return dict(arch)


def per_stage(value: Any, num_stages: int, name: str) -> Tuple:
    """One value per stage: a scalar is repeated, a sequence must have ``num_stages`` entries (else ValueError)."""
    if isinstance(value, (list, tuple)):
        if len(value) != num_stages:
            raise ValueError(
                f'{name} must have one entry for each of the {num_stages} stages, but got {len(value)}: {value!r}.'
            )
        return tuple(value)
    return (value,) * num_stages


def drop_path_rates(drop_path_rate: float, depths: Sequence[int]) -> List[List[float]]:
    """The drop path rate of each block, per stage: from 0 at the first block linearly to ``drop_path_rate``.

    Raises:
        ValueError: If the rate is outside [0, 1).
    """
    if not isinstance(drop_path_rate, (int, float)) or not 0 <= drop_path_rate < 1:
        raise ValueError(f'drop_path_rate must be a number in [0, 1), but got {drop_path_rate!r}.')
    return [r.tolist() for r in torch.linspace(0, drop_path_rate, sum(depths), device='cpu').split(list(depths))]


def check_pretrain_size(pretrain_img_size: int, patch_size: int) -> int:
    """Returns ``pretrain_img_size``; raises ValueError unless it is an integer of at least one patch."""
    if not isinstance(patch_size, int) or patch_size < 1:
        raise ValueError(f'patch_size must be a positive integer, but got {patch_size!r}.')
    if not isinstance(pretrain_img_size, int) or pretrain_img_size < patch_size:
        raise ValueError(
            f'pretrain_img_size must be an integer, at least one patch of {patch_size} pixels, but got '
            f'{pretrain_img_size!r}. Give the side of the square images of the pre-training, such as 224.'
        )
    return pretrain_img_size


def is_softmax(attn: Union[str, dict]) -> bool:
    """Whether ``attn``, as :func:`build_attention` takes it, is a family's own softmax attention."""
    return (attn.get('type') if isinstance(attn, dict) else attn) == 'softmax'


def build_attention(
    attn: Union[str, dict], softmax: str = 'SoftmaxWindowAttention', softmax_args: Optional[dict] = None, **args
) -> nn.Module:
    """Builds the attention of a block.

    Args:
        attn (str | dict): 'sla', 'focused', 'softmax', the registered name of another attention, or a config
            dict of one, whose entries win over ``args``. A name may begin with its scope, ``'mmdet.MyAttention'``; without
            one it is looked up as mmengine does, and then in all scopes.
        softmax (str): What 'softmax' stands for in this family of backbones.
        softmax_args (dict, optional): Arguments for 'softmax' alone.

    Raises:
        ValueError: If the name is unknown or ambiguous, or what it names does not take these arguments.
    """
    names = {**LINEAR_ATTENTION, 'softmax': softmax}
    cfg = dict(type=attn) if isinstance(attn, str) else attn
    if not isinstance(cfg, dict) or 'type' not in cfg:
        raise ValueError(f'attn must be a name, one of {sorted(names)}, or a dict with a type, but got {attn!r}.')
    cfg, name = dict(cfg), cfg['type']
    if name == 'softmax':
        args.update(softmax_args or {})
    if isinstance(name, str):
        cfg['type'] = _registered(names.get(name, name), cfg.get('_scope_'))
        if cfg['type'] is None:
            raise ValueError(
                f'attn has the unknown type {name!r}. Use one of {sorted(names)}, or the name of an attention '
                'registered in MODELS (import its module first).'
            )
    declared_parts(cfg['type'])
    try:
        return MODELS.build({**args, **cfg})
    except TypeError as e:
        raise ValueError(
            f'attn={attn!r} cannot be built: {e} It must take {", ".join(args)}, and what the config adds.'
        ) from e


def _registered(name: str, scope: Optional[str] = None) -> Any:
    """What is registered in MODELS as ``name``, in its own scope, ``scope``, the default scope or any other; or None.

    Raises:
        ValueError: If several scopes have the name, and neither it nor the default scope says which.
    """
    if not all(name.split('.')):
        return None
    with MODELS.switch_scope_and_registry(scope) as registry:
        found = registry.get(name)
    if callable(found):  # else it is a Python module of that name
        return found
    places = {r.scope: r.module_dict[name] for r in scopes(MODELS) if name in r.module_dict}
    if len(set(places.values())) > 1:
        raise ValueError(
            f'attn has the type {name!r}, which several scopes have. Write which, one of '
            f'{", ".join(repr(f"{place}.{name}") for place in sorted(places))}.'
        )
    return next(iter(places.values()), None)
