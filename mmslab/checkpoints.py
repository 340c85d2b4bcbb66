"""Loading weights that others published: the SLAB authors', those of the families they build on, OpenMMLab's Swin.

A checkpoint is read in three steps, each a function: :func:`read_state_dict` (file to tensors),
:func:`canonical` (anyone's key names to ours), :func:`load_pretrained` (into a backbone, whatever its norms and
window sizes). Our names are Microsoft's Swin names (``patch_embed``, ``layers.0.blocks.0.attn.qkv``,
``layers.0.downsample``) in every family, with ``layers.0.pos_embed`` where there is one, and ``ln``, ``repbn.eta``,
``repbn.bn`` and ``gamma`` inside a PRepBN.
"""

import logging
import os
import re
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from torch import Tensor

from .layers.attention import resize_positional_encoding
from .layers.embed import PositionEmbedding
from .layers.norm import PRepBN, RepBN, TokenBN

StateDict = Dict[str, Tensor]
HEADS = ('keep', 'drop', 'mmpretrain')
_trusting = False  # what a command line said of the checkpoints of this process, see use_safe_loading


@dataclass
class LoadReport:
    """What became of every tensor: names of the checkpoint (``unused``) and of the model (the others)."""

    taken: List[str] = field(default_factory=list)
    resized: List[str] = field(default_factory=list)
    new: List[str] = field(default_factory=list)
    unused: List[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f'{len(self.taken)} tensors taken, {len(self.resized)} resized, {len(self.new)} newly initialized, '
            f'{len(self.unused)} unused'
        ]
        for what in ('resized', 'new', 'unused'):
            names = getattr(self, what)
            if names:
                lines.append(f'  {what}: ' + ', '.join(names))
        return '\n'.join(lines)


# ---------------------------------------------------------------------------------------------- reading files


def load_file(path: Union[str, os.PathLike], trust: Optional[bool] = None) -> Any:
    """Reads a file that ``torch.save`` wrote.

    Args:
        path (str | Path): A local file, or an http(s) address, which is downloaded to torch's cache.
        trust (bool, optional): False accepts tensors and plain containers only (``weights_only=True``). True
            unpickles anything, so the file can run any code: only for files that you trust. By default what
            :func:`use_safe_loading` was told, else False.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it is damaged, no checkpoint, or needs ``trust``.
    """
    path = str(path)
    if re.match('https?://', path):
        cached = Path(torch.hub.get_dir()) / 'checkpoints' / path.rsplit('/', 1)[-1]
        if not cached.exists():
            cached.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(path, str(cached))
        path = str(cached)
    if not os.path.isfile(path):
        raise FileNotFoundError(f'checkpoint {path!r} does not exist. Give the path of a .pth file.')
    try:
        with _mmengine_globals():
            return torch.load(path, map_location='cpu', weights_only=not (_trusting if trust is None else trust))
    except Exception as e:  # torch raises half a dozen types for a bad file
        if re.search('unsupported (global|class)', str(e), re.IGNORECASE):
            raise ValueError(
                f'checkpoint {path!r} holds Python objects beside tensors, which can run code when loaded. If you trust '
                'where it comes from, load it with --trust-checkpoint (in Python: trust=True).'
            ) from e
        raise ValueError(
            f'checkpoint {path!r} cannot be read ({type(e).__name__}: {str(e).splitlines()[0] if str(e) else ""}). '
            'It is truncated, corrupted, or no PyTorch checkpoint; download or write it again.'
        ) from e


def _mmengine_globals():
    """Allows the few classes that mmengine itself writes into training checkpoints, where torch can list them."""
    if not hasattr(torch.serialization, 'safe_globals'):
        return nullcontext()
    import numpy as np
    from mmengine.logging.history_buffer import HistoryBuffer

    core = getattr(np, '_core', None) or np.core
    dtypes = [getattr(np.dtypes, n) for n in ('Float64DType', 'Float32DType', 'Int64DType') if hasattr(np, 'dtypes')]
    allowed = [
        HistoryBuffer,
        core.multiarray._reconstruct,
        core.multiarray.scalar,
        np.ndarray,
        np.dtype,
        *dtypes,
        getattr,
    ]
    return torch.serialization.safe_globals(allowed)


def use_safe_loading(trust: bool = False) -> None:
    """Makes mmengine read every local checkpoint of this process through :func:`load_file`.

    The command lines call it, so that ``--resume`` and ``load_from`` do not unpickle what the user did not vouch for;
    ``trust`` holds for ``init_cfg`` too.
    """
    global _trusting
    _trusting = trust
    from mmengine.runner.checkpoint import CheckpointLoader

    @CheckpointLoader.register_scheme(prefixes='', force=True)
    def load_local(filename, map_location=None, logger=None):  # the signature mmengine calls
        checkpoint = load_file(os.path.expanduser(filename), trust)
        return checkpoint


def read_state_dict(
    checkpoint: Union[str, os.PathLike, dict], trust: Optional[bool] = None, name: Optional[str] = None
) -> StateDict:
    """The weights in a checkpoint, whether at its top or inside ``state_dict`` or ``model``.

    A ``module.`` prefix, which DistributedDataParallel adds, is removed. ``name`` is what errors call the checkpoint, by
    default its path.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it cannot be read, holds no tensors, or a tensor is not finite.
    """
    name = name or ('the given dict' if isinstance(checkpoint, dict) else repr(str(checkpoint)))
    content = checkpoint if isinstance(checkpoint, dict) else load_file(checkpoint, trust)
    for key in ('state_dict', 'model'):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    state = {k: v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, dict) else {}
    if not state:
        raise ValueError(
            f'checkpoint {name} holds no tensors, neither at its top nor in state_dict or model. Give a file of weights.'
        )
    if all(k.startswith('module.') for k in state):
        state = {k[len('module.') :]: v for k, v in state.items()}
    for key, value in state.items():
        if value.is_floating_point() and not torch.isfinite(value).all():
            raise ValueError(f'checkpoint {name} has NaN or infinite values in {key!r}. Use an earlier checkpoint.')
    return state


# ------------------------------------------------------------------------------------------------- key names


def canonical(state: StateDict) -> StateDict:
    """Renames the keys of the SLAB authors and of OpenMMLab's Swin to ours; ours and Microsoft's Swin pass through.

    The authors keep the key names of the families that they build on, so PVT's, DeiT's (timm's) and CSWin's own
    checkpoints are renamed too.
    """
    state = _from_openmmlab_swin(state)
    for known_by, renames in _FAMILIES:
        if any(re.search(known_by, k) for k in state):
            state = {_rename(key, renames): value for key, value in state.items()}
    state = _fit_projections(state, lambda at: f'{at}sr.weight' not in state)
    return _canonical_norms(state)


_AT = r'(^|\.)'  # a key begins here, with or without a prefix before it
# (a key that tells the family, (pattern, its replacement; a function gets the stage, counted from 0 here)...)
_FAMILIES = (
    (
        _AT + r'block1\.0\.attn\.',  # PVT
        (
            (_AT + r'block(\d)\.', lambda m: f'{m[1]}layers.{int(m[2]) - 1}.blocks.'),
            (_AT + r'patch_embed1\.', r'\1patch_embed.'),
            (_AT + r'patch_embed(\d)\.', lambda m: f'{m[1]}layers.{int(m[2]) - 2}.downsample.'),
            (_AT + r'pos_embed(\d)$', lambda m: f'{m[1]}layers.{int(m[2]) - 1}.pos_embed.weight'),
        ),
    ),
    (
        r'(^|(?<!layers\.\d)\.)blocks\.0\.attn\.qkv\.',  # DeiT
        (
            (r'(^|(?<!layers\.\d)\.)blocks\.', r'\1layers.0.blocks.'),
            (_AT + r'pos_embed$', r'\1layers.0.pos_embed.weight'),
            (_AT + r'cls_token$', r'\1layers.0.pos_embed.cls_token'),
        ),
    ),
    (
        _AT + r'stage1_conv_embed\.0\.',  # CSWin
        (
            (_AT + r'stage1_conv_embed\.0\.', r'\1patch_embed.proj.'),
            (_AT + r'stage1_conv_embed\.2\.', r'\1patch_embed.norm.'),
            (_AT + r'merge(\d)\.conv\.', lambda m: f'{m[1]}layers.{int(m[2]) - 1}.downsample.proj.'),
            (_AT + r'merge(\d)\.norm\.', lambda m: f'{m[1]}layers.{int(m[2]) - 1}.downsample.norm.'),
            (_AT + r'stage(\d)\.(\d+)\.', lambda m: f'{m[1]}layers.{int(m[2]) - 1}.blocks.{m[3]}.'),
            (r'(\.blocks\.\d+\.)(qkv|proj)\.', r'\1attn.\2.'),
            (r'\.attns\.(\d)\.get_v\.', r'.attn.lepe.\1.'),
            (r'\.attns\.(\d)\.', r'.attn.branches.\1.'),
        ),
    ),
)


def _rename(key: str, renames: Sequence[tuple]) -> str:
    for pattern, replacement in renames:
        key = re.sub(pattern, replacement, key)
    return key


def _fit_projections(state: StateDict, joined: Callable[[str], bool]) -> StateDict:
    """Joins PVT's ``q`` and ``kv`` to ``qkv`` in each attention (named with its dot) that is ``joined``, else parts them."""
    out = {}
    for key, value in state.items():
        m = re.fullmatch(r'(.*\battn\.)(qkv|q|kv)(\.(?:weight|bias))', key)
        other = m and f'{m[1]}{dict(q="kv", kv="q").get(m[2])}{m[3]}'
        if m and m[2] == 'q' and other in state and joined(m[1]):
            out[f'{m[1]}qkv{m[3]}'] = torch.cat([value, state[other]])
        elif m and m[2] == 'qkv' and not joined(m[1]) and value.shape[0] % 3 == 0:
            C = value.shape[0] // 3
            out[f'{m[1]}q{m[3]}'], out[f'{m[1]}kv{m[3]}'] = value[:C], value[C:]
        elif not (m and m[2] == 'kv' and other in state and joined(m[1])):
            out[key] = value
    return out


def _from_openmmlab_swin(state: StateDict) -> StateDict:
    """mmdet's and mmpretrain's Swin: other names, and another order of the four patches that are merged."""
    if not any('attn.w_msa.' in k for k in state):
        return state
    renames = (
        (r'(^|\.)stages\.(\d)', r'\1layers.\2'),
        (r'attn\.w_msa\.', 'attn.'),
        (r'ffn\.layers\.0\.0\.', 'mlp.fc1.'),
        (r'ffn\.layers\.1\.', 'mlp.fc2.'),
        (r'patch_embed\.projection\.', 'patch_embed.proj.'),
    )
    out = {}
    for key, value in state.items():
        key = _rename(key, renames)
        if '.downsample.' in key and value.dim() and value.shape[-1] % 4 == 0 and value.numel() > 1:
            # theirs: channel by channel, (row, col) = 00 01 10 11; ours: patch by patch, 00 10 01 11
            patches = value.reshape(*value.shape[:-1], -1, 4)[..., [0, 2, 1, 3]]
            value = patches.transpose(-1, -2).reshape(value.shape)
        out[key] = value
    return out


def _canonical_norms(state: StateDict) -> StateDict:
    """The authors' PRepBN (norm1, norm2.alpha, norm2.bn, iter, total_step, warm) and RepBN (alpha, bn) to ours."""
    prepbn = {
        p
        for p in (k[: -len('norm2.alpha')] for k in state if _ends_with(k, 'norm2.alpha'))
        if p + 'norm1.weight' in state
    }
    repbn = {p for p in (k[: -len('alpha')] for k in state if _ends_with(k, 'alpha')) if p + 'bn.weight' in state} - {
        p + 'norm2.' for p in prepbn
    }
    out = {}
    for key, value in state.items():
        owner = next(
            (
                key[: m.start()]
                for m in re.finditer(r'norm[12]\.|iter$|total_step$|warm$', key)
                if key[: m.start()] in prepbn
            ),
            None,
        )
        if owner is not None:
            inner = key[len(owner) :]
            if inner in ('iter', 'total_step', 'warm'):
                continue
            inner = re.sub('^norm1', 'ln', inner)
            inner = re.sub('^norm2.alpha', 'repbn.eta', inner)
            out[owner + re.sub('^norm2', 'repbn', inner)] = value
        elif _ends_with(key, 'alpha') and key[: -len('alpha')] in repbn:
            out[key[: -len('alpha')] + 'eta'] = value
        else:
            out[key] = value
    for p in prepbn:  # Eq. 6; a converted checkpoint without counters has left the LayerNorm behind
        steps, total = state.get(p + 'iter'), state.get(p + 'total_step')
        gamma = 0.0 if steps is None or total is None or total == 0 else float(steps) / float(total)
        out[p + 'gamma'] = torch.tensor(min(max(gamma, 0.0), 1.0))
    return out


def _ends_with(key: str, tail: str) -> bool:
    return key == tail or key.endswith('.' + tail)


# ------------------------------------------------------------------------------------- into a given backbone

# What a checkpoint may lack: parts that another kind of attention or norm has, and the norms on the outputs
_OF_ONE_ATTENTION = r'attn\.(branches\.\d\.)?(dwc|positional_encoding|scale|relative_position_bias_table|sr|norm)(\.|$)'
_MAY_BE_NEW = re.compile(rf'{_OF_ONE_ATTENTION}|mlp\.norm\.|^norm\d+\.|num_batches_tracked$')
_MAY_BE_UNUSED = re.compile(
    rf'{_OF_ONE_ATTENTION}|attn\.relative_position_index|attn_mask$|'
    r'(^|\.)cls_token$|^norm\d*\.|^head\.|^neck\.|^rpn_head\.|^roi_head\.|^bbox_head\.|^data_preprocessor\.'
)


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
      model has no class token, its embedding is left out.
    * Attention of another kind takes the projections; what only one of the two kinds has is new or unused.
    * All else must be there and have the right shape. What was done is logged, tensor by tensor.

    Args:
        backbone (nn.Module): Built, its parameters on any device.
        checkpoint (str | Path | dict): A file, or what a file holds.
        prefix (str, optional): Take only keys with this prefix. By default ``backbone.`` if any key has it.
        trust (bool): See :func:`load_file`.
        logger: As in mmengine's ``print_log``.

    Returns:
        LoadReport: The names of tensors taken, resized, new and unused.

    Raises:
        FileNotFoundError, ValueError: See :func:`read_state_dict`; ValueError also for a checkpoint of another
            architecture or of another norm, or if just one of checkpoint and backbone is folded. Nothing is loaded then.
    """
    name = 'dict' if isinstance(checkpoint, dict) else str(checkpoint)
    model = backbone.module if is_model_wrapper(backbone) else backbone
    state = canonical(read_state_dict(checkpoint, trust))
    report = LoadReport()
    if prefix is None and any(k.startswith('backbone.') for k in state):
        prefix = 'backbone.'
    if prefix:
        prefix = prefix.rstrip('.') + '.'
        report.unused += [k for k in state if not k.startswith(prefix)]
        state = {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}
    target = model.state_dict()
    _check_form(model, state, repr(name))
    state = _fit_projections(state, lambda at: f'{at}q.weight' not in target)
    state = _fit_norms(state, model, name)
    fitted: StateDict = {}
    for key, value in state.items():
        if key not in target:
            report.unused.append(key)
        elif value.shape == target[key].shape:
            fitted[key] = value
            report.taken.append(key)
        else:
            fitted[key] = _resize(key, value, target[key], model, name)
            report.resized.append(key)
    report.new = [k for k in target if k not in fitted]
    if not report.taken:
        raise ValueError(
            f'checkpoint {name!r} has no tensor of {type(model).__name__}; its keys begin with '
            f'{", ".join(sorted(state)[:3]) or "another prefix"}. Give weights of this kind of backbone.'
        )
    _check_complete(report, model, name, prefix)
    gamma = {k: float(v) for k, v in fitted.items() if k.endswith('gamma')}
    other = next((k for k in gamma if gamma[k] > 0 and target[k] == 0), None)
    model.load_state_dict(fitted, strict=False)
    print_log(f'{name} into {type(model).__name__}: {report}', logger=logger)
    if other is not None:
        print_log(
            f'{name} is from the middle of a handover: its gamma, {gamma[other]:g}, takes the place of the configured 0. Without '
            'a GammaDecayHook it will stay there.',
            logger=logger,
            level=logging.WARNING,
        )
    return report


def check_fits(model: nn.Module, checkpoint: Union[str, os.PathLike, dict], name: Optional[str] = None) -> None:
    """Raises ValueError unless ``checkpoint`` has just the weights of ``model``, finite: what evaluation and resuming need.

    mmengine's own loader leaves a model as it is where a checkpoint does not fit, with a warning. ``checkpoint`` is a file,
    or what a file holds, which ``name`` then names.
    """
    name = name or repr(str(checkpoint))
    state = read_state_dict(checkpoint, name=name)
    model = model.module if is_model_wrapper(model) else model
    target = model.state_dict()
    for at, module in model.named_modules():
        prefix = f'{at}.' if at else ''
        _check_form(module, {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}, name)
    # what authors leave in their weights without using it, as the class token of an SLA DeiT, may be there too
    wrong = [k for k in target if k not in state] or [
        k for k in state if k not in target and not _MAY_BE_UNUSED.search(k)
    ]
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


def _differ(own: Tensor, other: Optional[Tensor]) -> bool:
    return other is not None and own.shape != other.shape


def _check_form(backbone: nn.Module, state: StateDict, name: str) -> None:
    """Raises ValueError if ``backbone`` is one of this package, and one of it and ``state`` is folded, the other not."""
    if not hasattr(backbone, 'deploy') or not hasattr(backbone, 'patch_embed'):
        return
    blocks = [k for k in state if re.match(r'layers\.\d+\.blocks\.', k)]
    lacking = [k for k in backbone.state_dict() if _OF_FOLDED.search(k) and k not in state]
    folded = None
    if any(_OF_FOLDED.search(k) for k in state) or (blocks and not any('.norm1.' in k for k in blocks)):
        folded = True
    elif any(_OF_UNFOLDED.search(k) for k in state) or (blocks and lacking):
        folded = False
    else:  # blocks with LayerNorm: folding copies the kernels that the heads of a linear attention share
        other = [(k, len(v), len(state[k])) for k, v in backbone.state_dict().items() if _differ(v, state.get(k))]
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
            'tools/deploy.py on it, or set deploy=False.'
        )
    if folded and lacking and all(re.match(r'norm\d+\.', k) for k in lacking):
        raise ValueError(
            f'checkpoint {name} is folded, its output norms into the layers after the backbone: it lacks {lacking[0]!r}. '
            'Set out_norm_cfg=None in the config of the backbone.'
        )


def _fit_norms(state: StateDict, model: nn.Module, name: str) -> StateDict:
    """Moves each norm's tensors to where the model's norm of that place wants them."""
    state = dict(state)
    outs = tuple(getattr(model, 'out_indices', ()))
    if len(outs) == 1 and not any(k.startswith(f'norm{outs[0]}.') for k in state):  # a classifier's only norm
        state = {re.sub(r'^norm\.', f'norm{outs[0]}.', k): v for k, v in state.items()}

    def move(old: str, new: str) -> None:
        moved = {key: state.pop(key) for key in list(state) if key.startswith(old)}
        state.update({new + key[len(old) :]: value for key, value in moved.items()})

    def kind(at: str) -> Optional[str]:
        for key, found in (('repbn.eta', 'PRepBN'), ('eta', 'RepBN'), ('bn.weight', 'BN'), ('weight', 'LN')):
            if f'{at}.{key}' in state:
                return found
        return None

    for at, module in model.named_modules():
        if not isinstance(module, (PRepBN, RepBN, TokenBN, nn.LayerNorm)) or at.endswith(('.repbn', '.ln')):
            continue
        wanted, found = {nn.LayerNorm: 'LN', TokenBN: 'BN'}.get(type(module), type(module).__name__), kind(at)
        if found is None or found == wanted:
            continue
        if (wanted, found) == ('PRepBN', 'RepBN'):
            move(f'{at}.', f'{at}.repbn.')
            state[f'{at}.gamma'] = torch.zeros(())
        elif (wanted, found) == ('PRepBN', 'LN'):
            move(f'{at}.', f'{at}.ln.')
        elif (wanted, found) == ('RepBN', 'PRepBN') and state[f'{at}.gamma'] == 0:
            for key in [k for k in state if k.startswith((f'{at}.ln.', f'{at}.gamma'))]:
                del state[key]
            move(f'{at}.repbn.', f'{at}.')
        elif re.match(r'norm\d+$', at):  # the norm on an output: a detector has its own
            for key in [k for k in state if k.startswith(f'{at}.')]:
                state[f'{at}.{found}.{key[len(at) + 1 :]}'] = state.pop(key)  # stays, as unused
        else:
            gamma = f' at gamma {float(state[at + ".gamma"]):g}' if found == 'PRepBN' else ''
            raise ValueError(
                f"checkpoint {name!r} has a {found}{gamma} at {at!r}, but the model's norm_cfg makes a {wanted} there. "
                f"Build it with norm_cfg=dict(type='{found}')."
            )
    return state


def _resize(key: str, value: Tensor, target: Tensor, model: nn.Module, name: str) -> Tensor:
    """Position terms of another window or image, resized; any other tensor of another shape is an error."""
    module = model.get_submodule(key.rpartition('.')[0])
    window = getattr(module, 'window_size', None)
    if isinstance(module, PositionEmbedding) and value.dim() == 3 and value.shape[2] == target.shape[2]:
        has, wants = int(_side(value.shape[1]) is None), int(module.cls_token is not None)
        side = _side(value.shape[1] - has)
        if side is not None and has >= wants:
            grid = value[:, has:]
            if (side, side) != module.grid:
                grid = resize_positional_encoding(grid, (side, side), module.grid, module.mode)
            return torch.cat([value[:, :wants], grid], dim=1)
    if key.endswith('positional_encoding') and value.dim() == 3 and value.shape[2] == target.shape[2]:
        side, (h, w) = _side(value.shape[1]), module.encoding_size
        if side is not None and (h == w or '.branches.' not in key):  # of CSWin's stripes the old shape is unknown
            return resize_positional_encoding(value, (side, side), module.encoding_size)
    if key.endswith('relative_position_bias_table') and value.dim() == 2 and value.shape[1] == target.shape[1]:
        side = _side(value.shape[0])
        if side is not None and window is not None:
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


def _check_complete(report: LoadReport, model: nn.Module, name: str, prefix: Optional[str]) -> None:
    """A block too few or too many means another architecture, however well the rest fits."""
    norms = tuple(f'{at}.' for at, m in model.named_modules() if isinstance(m, (PRepBN, RepBN, TokenBN)))
    with_norm = {k for k in report.taken if k.startswith(norms)}

    def norm_part(key: str) -> bool:  # part of a norm of which the checkpoint has another part
        return any(key.startswith(at) and any(k.startswith(at) for k in with_norm) for at in norms)

    missing = [k for k in report.new if not _MAY_BE_NEW.search(k) and not norm_part(k)]
    layers = len(model.layers) if hasattr(model, 'layers') else None

    def beyond(key: str) -> bool:  # a stage after the last one that is returned is not built
        m = re.match(r'layers\.(\d+)\.(downsample)?', key)
        return bool(m and layers and (int(m[1]) >= layers or (m[2] and int(m[1]) == layers - 1)))

    outside = report.unused if prefix is None else [k for k in report.unused if not k.startswith(prefix)]
    strange = [k for k in outside if not _MAY_BE_UNUSED.search(k) and not beyond(k)]
    if prefix is not None:  # keys outside the prefix are another module's
        strange = [k for k in strange if k.startswith(('patch_embed.', 'layers.'))]
    if missing or strange:
        what = f'it lacks {missing[0]!r}' if missing else f'the model has no {strange[0]!r}'
        more = len(missing) + len(strange) - 1
        raise ValueError(
            f'checkpoint {name!r} is of another architecture: {what}{f" (and {more} more)" if more else ""}. '
            "Set the backbone's arch, attn and norm_cfg to the checkpoint's."
        )


# -------------------------------------------------------------------------------------------------- converting


def convert(
    source: Union[str, os.PathLike],
    target: Union[str, os.PathLike],
    trust: Optional[bool] = None,
    force: bool = False,
    head: str = 'keep',
) -> None:
    """Writes a published checkpoint under our key names, as ``dict(state_dict=..., meta=...)``.

    Args:
        head (str): What to do with a classification head: 'keep' (default) its names, 'drop' it, or 'mmpretrain', which
            names the whole as mmpretrain's ``ImageClassifier`` does (``backbone.``, ``head.fc.``).

    Raises:
        FileExistsError: If ``target`` exists and ``force`` is not set.
        FileNotFoundError, ValueError: See :func:`read_state_dict`; ValueError also for an unknown ``head``.
    """
    if head not in HEADS:
        raise ValueError(f'head must be one of {HEADS}, but got {head!r}.')
    target = Path(target)
    if target.exists() and not force:
        raise FileExistsError(f'OUT {str(target)!r} exists. Choose another name, or pass --force to replace it.')
    if not target.parent.is_dir():
        raise FileNotFoundError(f'the folder of OUT {str(target)!r} does not exist. Make it first.')
    if target.is_dir() or not os.access(target.parent, os.W_OK):
        raise OSError(f'OUT {str(target)!r} cannot be written. Give a file name in a folder of your own.')
    read = read_state_dict(source, trust)
    state = canonical(read)
    if not any(re.search(r'(^|\.)layers\.\d+\.blocks\.\d+\.', k) for k in state):
        raise ValueError(
            f'IN {str(source)!r} holds no transformer of a kind that mmslab knows; its keys begin with '
            f'{", ".join(sorted(state)[:3])}. Give weights of a Swin, PVT, DeiT or CSWin.'
        )
    recomputed = [k for k in state if k.endswith(('relative_position_index', 'attn_mask'))]
    heads = [k for k in state if k.startswith('head.')] if head == 'drop' else []
    state = {k: v for k, v in state.items() if k not in recomputed + heads}
    if head == 'mmpretrain' and not any(k.startswith('backbone.') for k in state):
        last = max((int(m[1]) for m in (re.match(r'layers\.(\d+)\.', k) for k in state) if m), default=0)
        state = {re.sub(r'^norm\.', f'norm{last}.', k): v for k, v in state.items()}
        state = {
            k.replace('head.', 'head.fc.') if k.startswith('head.') else f'backbone.{k}': v for k, v in state.items()
        }
    partial = target.with_name(target.name + '.part')
    torch.save(dict(state_dict=state, meta=dict(converted_from=Path(source).name)), partial)
    os.replace(partial, target)
    renamed = sum(k not in read for k in state)
    left_out = f'{len(recomputed)} recomputed by the model and {len(heads)} of the head left out'
    names = ': ' + ', '.join(recomputed + heads) if recomputed + heads else ''
    print_log(f'{source} -> {target}: {len(state)} tensors, {renamed} renamed, {left_out}{names}')
