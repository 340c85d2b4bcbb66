"""Whether the OpenMMLab packages are there, and in versions that this package works with; and torch, for what needs a new one."""

import importlib
import importlib.util
import re
from importlib import metadata
from typing import Optional, Tuple

import torch

# import name: (lowest, below, the maintained distribution, the original one); the lowest and highest are what the tests run with
REQUIRED = {
    'mmengine': ('0.10.7', '0.11.0', 'onedl-mmengine', 'mmengine'),
    'mmcv': ('2.1.0', '2.4.0', 'onedl-mmcv', 'mmcv'),
}
DETECTION = {'mmdet': ('3.3.0', '3.6.0', 'onedl-mmdetection', 'mmdet')}


def _parse(version: str) -> Tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r'\d+', version)[:3])


def _check(required: dict) -> None:
    for name, (lowest, below, maintained, original) in required.items():
        remedy = f'Install it: pip install "{maintained}>={lowest},<{below}" (or the original {original}).'
        try:
            version = importlib.import_module(name).__version__
        except ImportError as e:
            raise ImportError(f'mmslab needs {name}, which cannot be imported ({e}). {remedy}') from e
        if not _parse(lowest) <= _parse(version) < _parse(below):
            raise ImportError(f'mmslab needs {name}>={lowest},<{below}, but found {version}. {remedy}')


def check_versions() -> None:
    """Raises ImportError, saying what to install, unless mmengine and mmcv are there in a known version."""
    _check(REQUIRED)


def check_detection() -> None:
    """The same for mmdet, for mmcv's compiled ops, which a detector needs and a backbone does not, and for transformers."""
    check_transformers()
    _check(DETECTION)
    try:
        importlib.import_module('mmcv._ext')
    except ImportError as e:
        mmcv = next((name for name in ('onedl-mmcv', 'mmcv') if _installed(name)), 'onedl-mmcv')
        raise ImportError(
            f'mmcv has no compiled ops ({e}), which a detector needs. With torch installed first, rebuild it: '
            f'MMCV_WITH_OPS=1 pip install --no-build-isolation --force-reinstall --no-deps --no-cache-dir {mmcv}'
        ) from e


def transformers_trouble() -> Optional[str]:
    """What is wrong with the installed transformers, with the remedy; None if nothing is, or mmpretrain is not there.

    Where transformers is installed mmpretrain defines classes on top of its; of version 5, which has not all that it imports,
    on top of None ("NoneType takes no arguments"). mmdet's models import mmpretrain.
    """
    version = _installed('transformers')
    if version is None or _parse(version) < (5,) or importlib.util.find_spec('mmpretrain') is None:
        return None
    return (
        f'mmpretrain, which mmdet imports, cannot be imported beside transformers {version} ("NoneType takes no arguments"). '
        'Install an older one: pip install "transformers<5". Or none, mmslab needs none: pip uninstall transformers.'
    )


def check_transformers() -> None:
    """Raises ImportError for :func:`transformers_trouble`."""
    trouble = transformers_trouble()
    if trouble is not None:
        raise ImportError(trouble)


def check_torch(what: str, lowest: str, remedy: str) -> None:
    """Raises ValueError, saying what it is and the remedy, unless torch has at least the version that ``what`` needs."""
    if _parse(torch.__version__) < _parse(lowest):
        raise ValueError(f'{what} needs torch >= {lowest}, but this is {torch.__version__}. {remedy}')


def _installed(distribution: str) -> Optional[str]:
    """The version of a distribution, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
