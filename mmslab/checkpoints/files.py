"""Reading checkpoint files: nothing that a file brings is run."""

import os
from typing import Any, Dict, Optional, Union
from urllib.parse import urlsplit

import torch
from mmengine.runner import checkpoint as mmengine_checkpoint
from mmengine.runner.checkpoint import CheckpointLoader
from torch import Tensor

from ..versions import check_torch
from .download import download
from .reader import NewerDtypeError, NotDenseError, NotPlainError, read
from .releases import check_known

StateDict = Dict[str, Tensor]
_ORIGINAL = CheckpointLoader.__dict__['load_checkpoint']  # the one way to all of mmengine's loaders
_trusting = False  # what a command line said of the checkpoints that it reads, see use_safe_loading
_CONTAINERS = ('state_dict', 'model', 'state_dict_ema')
_WEIGHT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool, torch.uint8) + (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
)


def load_file(path: Union[str, os.PathLike], trust: Optional[bool] = None) -> Any:
    """Reads a file that ``torch.save`` wrote, onto the CPU.

    Args:
        path (str | Path): What :func:`locate` takes: a local file, a name of published weights, or an address.
        trust (bool, optional): False accepts tensors, NumPy arrays of numbers, mmengine's HistoryBuffers and plain containers,
            and runs nothing, see :mod:`mmslab.checkpoints.reader`. True unpickles anything, so the file can run any code: only
            for files that you trust; addresses that mmengine alone can read (``s3://``, ...) are then left to it. By default
            what :func:`use_safe_loading` was told, else False.

    Raises:
        FileNotFoundError: If there is no such file, and no such name.
        OSError: If it cannot be downloaded.
        ValueError: If it is damaged, no checkpoint, needs ``trust``, or is at another kind of address.
    """
    path, trust = str(path), _trusting if trust is None else trust
    if trust and '://' in path and not path.startswith(('http://', 'https://')):
        return _ORIGINAL.__get__(None, CheckpointLoader)(path, map_location='cpu')
    local = locate(path)
    try:
        if trust:
            return torch.load(local, map_location='cpu', weights_only=False)
        return read(local)
    except NewerDtypeError as e:
        remedy = 'Load it with a newer one, and save its tensors in another dtype.'
        check_torch(f'checkpoint {local!r}, which has {e.dtype} tensors,', e.since, remedy)
        raise
    except NotPlainError as e:
        raise ValueError(
            f'checkpoint {local!r} holds Python objects beside tensors ({e}), which can run code when loaded. If you trust '
            'where it comes from, load it with --trust-checkpoint (in Python: trust=True).'
        ) from e
    except NotDenseError as e:
        raise ValueError(f'checkpoint {local!r} has {e}, with torch.save, and load that.') from e
    except Exception as e:  # a bad file raises any of a dozen types
        raise ValueError(
            f'checkpoint {local!r} cannot be read ({type(e).__name__}: {str(e).splitlines()[0] if str(e) else ""}). '
            'It is truncated, corrupted, or no PyTorch checkpoint; remove it, and download or write it again.'
        ) from e


def locate(checkpoint: Union[str, os.PathLike]) -> str:
    """The local file that ``checkpoint`` stands for; what is not here yet is downloaded, see :func:`~.download.download`.

    Args:
        checkpoint (str | Path): A local file; a name of :data:`~.releases.RELEASES`, as ``'slab_swin_tiny'``, unless there is a
            file of that name; an http(s) address; or a name in one of mmengine's lists of addresses
            (``torchvision://resnet50``, ``open-mmlab://...``, ``mmcls://...``).

    Raises:
        FileNotFoundError: If there is no such file and no such name; it says which names are near.
        OSError: If it cannot be downloaded.
        ValueError: If it is at another kind of address.
    """
    path = str(checkpoint)
    release = check_known(path)
    if release is not None:
        return str(download(release.address, path))
    return str(download(_address(path), path)) if '://' in path else os.path.expanduser(path)


def _address(address: str) -> str:
    """The http(s) address that ``address`` is, or stands for in one of mmengine's lists."""
    scheme, _, name = address.partition('://')
    lists = {
        'torchvision': mmengine_checkpoint.get_torchvision_models,
        'modelzoo': mmengine_checkpoint.get_torchvision_models,
        'open-mmlab': mmengine_checkpoint.get_external_models,
        'openmmlab': mmengine_checkpoint.get_external_models,
        'mmcls': mmengine_checkpoint.get_mmcls_models,
    }
    url = address
    if scheme in lists:
        if 'mmlab' in scheme:
            name = mmengine_checkpoint.get_deprecated_model_names().get(name, name)
        url = lists[scheme]().get(name, '')
    if not url.startswith(('http://', 'https://')) or not os.path.basename(urlsplit(url).path):
        known = 'is no name that mmengine knows' if scheme in lists else 'is no address that can be read safely'
        raise ValueError(f'checkpoint {address!r} {known}. Download the file yourself and give its path.')
    return url


class use_safe_loading:
    """Makes mmengine, and all that loads through it, read every checkpoint through :func:`load_file`.

    As ``torch.set_grad_enabled`` it holds from the call on, or for a ``with`` block alone::

        with use_safe_loading():
            runner.train()  # load_from, resume, auto-resume, init_cfg

    mmengine's own loader unpickles anything where its safe attempt fails; within, it cannot be reached.

    Args:
        trust (bool): Unpickle anything, here and in :func:`load_file`. Defaults to False.
    """

    def __init__(self, trust: bool = False) -> None:
        global _trusting
        self._before = (_trusting, CheckpointLoader.__dict__['load_checkpoint'])
        _trusting, CheckpointLoader.load_checkpoint = trust, staticmethod(_load_for_mmengine)

    def __enter__(self) -> 'use_safe_loading':
        return self

    def __exit__(self, *error: Any) -> None:
        global _trusting
        _trusting, CheckpointLoader.load_checkpoint = self._before


def _load_for_mmengine(filename: str, map_location: Any = None, logger: Any = 'current') -> Any:
    content = load_file(filename)
    if filename.startswith('mmcls://') and not _trusting:  # a classifier, where its backbone is wanted
        state = read_state_dict(content, name=repr(filename))
        return dict(state_dict={k[len('backbone.') :]: v for k, v in state.items() if k.startswith('backbone.')})
    return content


def read_state_dict(
    checkpoint: Union[str, os.PathLike, dict], trust: Optional[bool] = None, name: Optional[str] = None
) -> StateDict:
    """The weights in a checkpoint, whether at its top or inside ``state_dict``, ``model`` or ``state_dict_ema``.

    A ``module.`` prefix, which DistributedDataParallel adds, is removed. Beside weights at the top may be what else a training
    saves ('epoch', 'optimizer'): entries that are no tensors and have no dot in their names. ``name`` is what errors call the
    checkpoint, by default its path.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If it cannot be read, holds no tensors, or something among them is no tensor of finite numbers under a name.
    """
    name = name or ('the given dict' if isinstance(checkpoint, dict) else repr(str(checkpoint)))
    content = checkpoint if isinstance(checkpoint, dict) else load_file(checkpoint, trust)
    inside = next((k for k in _CONTAINERS if isinstance(content, dict) and isinstance(content.get(k), dict)), None)
    state = content if inside is None else content[inside]
    if not isinstance(state, dict) or not any(isinstance(v, Tensor) for v in state.values()):
        raise ValueError(
            f'checkpoint {name} holds no tensors, neither at its top nor in {", ".join(_CONTAINERS)}. Give a file of weights.'
        )
    if inside is None:
        state = {k: v for k, v in state.items() if isinstance(v, Tensor) or '.' in str(k)}
    for key, value in state.items():
        wrong = _wrong(key, value)
        if wrong:
            raise ValueError(f'checkpoint {name} has {wrong}')
    if all(k.startswith('module.') for k in state):
        state = {k[len('module.') :]: v for k, v in state.items()}
    return dict(state)


def _wrong(key: Any, value: Any) -> Optional[str]:
    """What is wrong with an entry of a state dict, with the remedy; None if nothing is."""
    at = f'in {key!r}'
    if type(key) is not str:
        return f'{key!r} as the name of a weight, which must be a string. Save it under the name that the model has for it.'
    if not isinstance(value, Tensor):
        return f'{"None" if value is None else f"a {type(value).__name__}"} {at}, which is no tensor. Leave it out.'
    if value.is_meta:
        return f'a meta tensor, without values, {at}. Save it from a device.'
    if value.is_nested:
        return f'a nested tensor {at}. Save its parts as tensors.'
    if value.is_quantized:
        return f'a quantized tensor {at}. Save .dequantize() of it.'
    if value.layout != torch.strided:
        return f'a sparse tensor {at}, where weights are dense. Save .to_dense() of it.'
    if value.dtype not in _WEIGHT_DTYPES:
        return f'numbers of {value.dtype} {at}, which no weights are. Save .float() of it, or what is real in it.'
    if value.is_floating_point() and not torch.isfinite(value).all():
        return f'NaN or infinite values {at}. Use an earlier checkpoint.'
    return None
