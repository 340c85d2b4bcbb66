"""Reading checkpoint files: nothing that a file brings is run."""

import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Dict, Optional, Union

import torch
from torch import Tensor

StateDict = Dict[str, Tensor]
_trusting = False  # what a command line said of the checkpoints of this process, see use_safe_loading


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
