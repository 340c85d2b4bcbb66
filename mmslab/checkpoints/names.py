"""Anyone's key names to ours."""

import re
from typing import Callable, Sequence

import torch

from .files import StateDict


def canonical(state: StateDict) -> StateDict:
    """Renames the keys of the SLAB authors and of OpenMMLab's Swin to ours; ours and Microsoft's Swin pass through.

    The authors keep the key names of the families that they build on, so PVT's, DeiT's (timm's) and CSWin's own
    checkpoints are renamed too.

    Raises:
        ValueError: If some of the authors' PRepBNs have counters of their steps and another has not.
    """
    state = _from_openmmlab_swin(state)
    for known_by, renames in _FAMILIES:
        if any(re.search(known_by, k) for k in state):
            state = {_rename(key, renames): value for key, value in state.items()}
    state = fit_projections(state, lambda at: f'{at}sr.weight' not in state)
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
