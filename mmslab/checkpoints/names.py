"""Anyone's key names to ours."""

import re
from typing import Callable, Dict, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import Tensor

from .files import StateDict


class Family(NamedTuple):
    """The key names of a network as someone publishes it, and what makes ours of them.

    Attributes:
        known_by (str): A pattern; checkpoints of the family have it in one of their keys.
        renames (Sequence[tuple]): Patterns and their replacements, as ``re.sub`` takes them, one after the other. Three
            tensors that are one of ours are named ``qkv#0``, ``qkv#1`` and ``qkv#2``, in the order in which they are joined.
        values (Sequence[tuple]): Patterns of our keys, and functions of the tensors there.
        unless (str, optional): A pattern that none of the keys has.
    """

    known_by: str
    renames: Sequence[Tuple[str, Union[str, Callable[[re.Match], str]]]]
    values: Sequence[Tuple[str, Callable[[Tensor], Tensor]]] = ()
    unless: Optional[str] = None


def canonical(state: StateDict) -> StateDict:
    """Renames the keys of the SLAB authors, and of those whose networks the backbones here are, to ours.

    The SLAB authors keep the names of the families that they build on. Known are Swin as Microsoft (whose names are ours), timm,
    Hugging Face and OpenMMLab have it, PVT as its authors and mmdet, DeiT as timm and mmpretrain, with its distillation token
    or without, and CSWin as its authors, for classification and for segmentation.

    Raises:
        ValueError: If some of the authors' PRepBNs have counters of their steps and another has not, or if two keys mean
            the same of ours.
    """
    for family in _FAMILIES:
        if any(re.search(family.known_by, k) for k in state):
            if family.unless is None or not any(re.search(family.unless, k) for k in state):
                state = _renamed(state, family)
    state = fit_projections(state, lambda at: f'{at}sr.weight' not in state)
    return _canonical_norms(state)


def _in_microsofts_order(value: Tensor) -> Tensor:
    """Weights of the four patches that are merged: channel by channel, in rows (00 01 10 11), to patch by patch (00 10 01 11)."""
    if value.dim() == 0 or value.shape[-1] % 4 or value.numel() == 1:
        return value
    patches = value.reshape(*value.shape[:-1], -1, 4)[..., [0, 2, 1, 3]]
    return patches.transpose(-1, -2).reshape(value.shape)


def _without_kernel(value: Tensor) -> Tensor:
    """A convolution of 1x1 as a linear layer."""
    return value.flatten(1) if value.dim() == 4 else value


_AT = r'(^|\.)'  # a key begins here, with or without a prefix before it
_TOKENS = (
    (_AT + r'pos_embed$', r'\1layers.0.pos_embed.weight'),
    (_AT + r'(cls|dist)_token$', r'\1layers.0.pos_embed.\2_token'),
)
_FAMILIES = (
    Family(  # Swin of mmdet and mmpretrain
        known_by=r'attn\.w_msa\.',
        renames=(
            (_AT + r'stages\.(\d)', r'\1layers.\2'),
            (r'attn\.w_msa\.', 'attn.'),
            (r'ffn\.layers\.0\.0\.', 'mlp.fc1.'),
            (r'ffn\.layers\.1\.', 'mlp.fc2.'),
            (r'patch_embed\.projection\.', 'patch_embed.proj.'),
        ),
        values=((r'\.downsample\.', _in_microsofts_order),),
    ),
    Family(  # Swin of Hugging Face
        known_by=r'encoder\.layers\.0\.blocks\.0\.layernorm_before\.',
        renames=(
            (_AT + r'swin\.', r'\1'),
            (r'^classifier\.', 'head.'),
            (_AT + r'embeddings\.patch_embeddings\.projection\.', r'\1patch_embed.proj.'),
            (_AT + r'embeddings\.', r'\1patch_embed.'),
            (_AT + r'encoder\.layers\.', r'\1layers.'),
            (r'\.layernorm_before\.', '.norm1.'),
            (r'\.layernorm_after\.', '.norm2.'),
            (r'\.attention\.self\.query\.', '.attn.qkv#0.'),
            (r'\.attention\.self\.key\.', '.attn.qkv#1.'),
            (r'\.attention\.self\.value\.', '.attn.qkv#2.'),
            (r'\.attention\.self\.', '.attn.'),
            (r'\.attention\.output\.dense\.', '.attn.proj.'),
            (r'\.intermediate\.dense\.', '.mlp.fc1.'),
            (r'\.output\.dense\.', '.mlp.fc2.'),
            (_AT + r'layernorm\.', r'\1norm.'),
            (_AT + r'hidden_states_norms\.stage(\d)\.', lambda m: f'{m[1]}norm{int(m[2]) - 1}.'),
        ),
    ),
    Family(  # Swin of timm, where merging opens a stage; before timm 0.9 it closed one, as in Microsoft's
        known_by=_AT + r'layers\.[1-9]\.downsample\.reduction\.',
        unless=_AT + r'layers\.0\.downsample\.',
        renames=(
            (_AT + r'layers\.([1-9])\.downsample\.', lambda m: f'{m[1]}layers.{int(m[2]) - 1}.downsample.'),
            (r'^head\.fc\.', 'head.'),
        ),
    ),
    Family(  # PVT of mmdet
        known_by=_AT + r'layers\.0\.1\.0\.pos_embed$',
        renames=(
            (_AT + r'layers\.0\.0\.', r'\1patch_embed.'),
            (_AT + r'layers\.([1-9])\.0\.', lambda m: f'{m[1]}layers.{int(m[2]) - 1}.downsample.'),
            (_AT + r'layers\.(\d)\.1\.0\.pos_embed$', r'\1layers.\2.pos_embed.weight'),
            (_AT + r'layers\.(\d)\.1\.(\d+)\.', lambda m: f'{m[1]}layers.{m[2]}.blocks.{int(m[3]) - 1}.'),
            (r'(patch_embed|downsample)\.projection\.', r'\1.proj.'),
            (r'\.attn\.attn\.in_proj_(weight|bias)$', r'.attn.qkv.\1'),
            (r'\.attn\.attn\.out_proj\.', '.attn.proj.'),
            (r'\.ffn\.layers\.0\.', '.mlp.fc1.'),
            (r'\.ffn\.layers\.3\.', '.mlp.fc2.'),
        ),
        values=((r'\.mlp\.fc[12]\.weight$', _without_kernel),),
    ),
    Family(  # PVT of its authors
        known_by=_AT + r'block1\.0\.attn\.',
        renames=(
            (_AT + r'block(\d)\.', lambda m: f'{m[1]}layers.{int(m[2]) - 1}.blocks.'),
            (_AT + r'patch_embed1\.', r'\1patch_embed.'),
            (_AT + r'patch_embed(\d)\.', lambda m: f'{m[1]}layers.{int(m[2]) - 2}.downsample.'),
            (_AT + r'pos_embed(\d)$', lambda m: f'{m[1]}layers.{int(m[2]) - 1}.pos_embed.weight'),
        ),
    ),
    Family(  # DeiT of its authors and of timm
        known_by=r'(^|(?<!layers\.\d)\.)blocks\.0\.attn\.qkv\.',
        renames=((r'(^|(?<!layers\.\d)\.)blocks\.', r'\1layers.0.blocks.'), *_TOKENS),
    ),
    Family(  # DeiT of mmpretrain
        known_by=_AT + r'layers\.0\.ln1\.',
        renames=(
            (_AT + r'layers\.(\d+)\.(?=ln|attn|ffn)', r'\1layers.0.blocks.\2.'),
            (r'(\.blocks\.\d+\.)ln([12])\.', r'\1norm\2.'),
            (r'(\.blocks\.\d+\.)ffn\.layers\.0\.0\.', r'\1mlp.fc1.'),
            (r'(\.blocks\.\d+\.)ffn\.layers\.1\.', r'\1mlp.fc2.'),
            (_AT + r'patch_embed\.projection\.', r'\1patch_embed.proj.'),
            (_AT + r'ln1\.', r'\1norm.'),
            *_TOKENS,
        ),
    ),
    Family(  # CSWin of its authors; that for segmentation has a norm on each output, counted from 1
        known_by=_AT + r'stage1_conv_embed\.0\.',
        renames=(
            (_AT + r'stage1_conv_embed\.0\.', r'\1patch_embed.proj.'),
            (_AT + r'stage1_conv_embed\.2\.', r'\1patch_embed.norm.'),
            (_AT + r'merge(\d)\.conv\.', lambda m: f'{m[1]}layers.{int(m[2]) - 1}.downsample.proj.'),
            (_AT + r'merge(\d)\.norm\.', lambda m: f'{m[1]}layers.{int(m[2]) - 1}.downsample.norm.'),
            (_AT + r'stage(\d)\.(\d+)\.', lambda m: f'{m[1]}layers.{int(m[2]) - 1}.blocks.{m[3]}.'),
            (r'(\.blocks\.\d+\.)(qkv|proj)\.', r'\1attn.\2.'),
            (r'\.attns\.(\d)\.get_v\.', r'.attn.lepe.\1.'),
            (r'\.attns\.(\d)\.', r'.attn.branches.\1.'),
            # of a PRepBN inside another part the norms are norm1 and norm2 too
            (
                r'^((?:(?!layers\.|patch_embed\.|norm\d?\.)\w+\.)*)norm([1-4])\.',
                lambda m: f'{m[1]}norm{int(m[2]) - 1}.',
            ),
        ),
    ),
)


def _renamed(state: StateDict, family: Family) -> StateDict:
    out: StateDict = {}
    before: Dict[str, str] = {}
    for key, value in state.items():
        new = key
        for pattern, replacement in family.renames:
            new = re.sub(pattern, replacement, new)
        if new in out:
            raise ValueError(
                f'the checkpoint has two tensors for {new!r}: {before[new]!r} and {key!r}. Take out the one that is not meant.'
            )
        for pattern, change in family.values:
            value = change(value) if re.search(pattern, new) else value
        out[new], before[new] = value, key
    return _joined(out)


def _joined(state: StateDict) -> StateDict:
    """Puts three tensors that are one of ours, ``qkv#0`` to ``qkv#2``, together; where one lacks they stay, to be refused."""
    state = dict(state)
    for m in [m for m in (re.fullmatch(r'(.*\.qkv)#0(\..*)', k) for k in state) if m]:
        names = [f'{m[1]}#{i}{m[2]}' for i in range(3)]
        parts = [state[name] for name in names if name in state]
        if len(parts) == 3 and parts[0].dim() and len({p.shape for p in parts}) == 1:
            state[m[1] + m[2]] = torch.cat(parts)
            for name in names:
                del state[name]
    return state


_PARTNER = dict(q='kv', kv='q')


def fit_projections(state: StateDict, joined: Callable[[str], bool]) -> StateDict:
    """Joins PVT's ``q`` and ``kv`` to ``qkv`` in each attention (named with its dot) that is ``joined``, else parts them."""
    out = {}
    for key, value in state.items():
        m = re.fullmatch(r'(.*\battn\.)(qkv|q|kv)(\.(?:weight|bias))', key)
        other = m and f'{m[1]}{_PARTNER.get(m[2])}{m[3]}'
        both = (value, state.get(other, value))
        if any(t.dim() == 0 for t in both) or both[0].shape[1:] != both[1].shape[1:]:
            m = None  # they are no projections: left as they are, to be refused where they do not fit
        if m and m[2] == 'q' and other in state and joined(m[1]):
            out[f'{m[1]}qkv{m[3]}'] = torch.cat([value, state[other]])
        elif m and m[2] == 'qkv' and not joined(m[1]) and value.shape[0] % 3 == 0:
            C = value.shape[0] // 3
            out[f'{m[1]}q{m[3]}'], out[f'{m[1]}kv{m[3]}'] = value[:C], value[C:]
        elif not (m and m[2] == 'kv' and other in state and joined(m[1])):
            out[key] = value
    return out


def _canonical_norms(state: StateDict) -> StateDict:
    """The authors' PRepBN (norm1, norm2.alpha, norm2.bn, iter, total_step, warm) and RepBN (alpha, bn) to ours.

    One with a gap is told by what it still has, so that :func:`load_pretrained` finds the gap and names it.
    """
    second = (re.fullmatch(r'((?:.*\.)?)norm2\.(?:alpha|bn\.\w+)', k) for k in state)
    prepbn = {m[1] for m in second if m and any(f'{m[1]}norm1.{k}' in state for k in ('weight', 'bias'))}
    bn = {m[1] for m in (re.fullmatch(r'((?:.*\.)?)bn\.\w+', k) for k in state) if m}
    repbn = {p for p in bn if f'{p}alpha' in state} - {f'{p}norm2.' for p in prepbn}
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
    for counter in ('iter', 'total_step'):
        without = sorted(p for p in prepbn if p + counter not in state)
        if without and len(without) < len(prepbn):
            raise ValueError(
                f'the checkpoint is incomplete: it lacks {without[0] + counter!r}, which says how far the handover of that '
                'norm was, and has it of others. Give a complete one.'
            )
    for p in prepbn:  # Eq. 6; a converted checkpoint without counters has left the LayerNorm behind
        steps, total = state.get(p + 'iter'), state.get(p + 'total_step')
        for counter in (steps, total):
            if counter is not None and counter.numel() != 1:
                raise ValueError(
                    f'the checkpoint has {tuple(counter.shape)} numbers as a count of steps of the handover of {p[:-1]!r}, '
                    'which is one. Give an unchanged one.'
                )
        gamma = 0.0 if steps is None or total is None or total == 0 else float(steps) / float(total)
        out[p + 'gamma'] = torch.tensor(min(max(gamma, 0.0), 1.0))
    return out


def _ends_with(key: str, tail: str) -> bool:
    return key == tail or key.endswith('.' + tail)
