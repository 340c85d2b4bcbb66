"""Whether the OpenMMLab packages are there, and in versions that this package works with."""

import importlib
import re
from typing import Tuple

# import name: (lowest, below, the maintained distribution, the original one)
REQUIRED = {
    'mmengine': ('0.8.0', '1.0.0', 'onedl-mmengine', 'mmengine'),
    'mmcv': ('2.0.0', '3.0.0', 'onedl-mmcv', 'mmcv'),
}
DETECTION = {'mmdet': ('3.0.0', '4.0.0', 'onedl-mmdetection', 'mmdet')}


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
    """The same for mmdet and for mmcv's compiled ops, which a detector needs and a backbone does not."""
    _check(DETECTION)
    try:
        importlib.import_module('mmcv._ext')
    except ImportError as e:
        raise ImportError(
            f'mmcv has no compiled ops ({e}), which a detector needs. With torch installed first, rebuild it: '
            'pip install --no-build-isolation --force-reinstall --no-deps onedl-mmcv'
        ) from e
