"""A checkpoint of anyone's written under our key names."""

import os
import re
from pathlib import Path
from typing import Optional, Union

import torch
from mmengine.logging import print_log

from .files import read_state_dict
from .names import canonical

HEADS = ('keep', 'drop', 'mmpretrain')


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
