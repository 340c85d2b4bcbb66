"""Configs by path or by name: ours, wherever this package is installed, and those of other OpenMMLab packages.

A wheel has ours in mmslab/.mim, where OpenMMLab's packages have theirs; in a checkout they are beside the package.
"""

import importlib.util
import os
from difflib import get_close_matches
from pathlib import Path, PurePosixPath
from typing import Dict, Optional, Tuple, Union

PathLike = Union[str, os.PathLike]
_PACKAGE = Path(__file__).resolve().parent
_ROOT = _PACKAGE / '.mim' if (_PACKAGE / '.mim').is_dir() else _PACKAGE.parent
CONFIGS = (_ROOT / 'configs').resolve()
INDEX = (_ROOT / 'model-index.yml').resolve()
SUFFIXES = ('.py', '.yml', '.yaml', '.json')


def find_config(config: PathLike) -> str:
    """The path of a config file.

    Args:
        config (str | Path): A path; a name of ours, as ``maskrcnn_slab_swin_t_1x`` or ``imagenet/slab_swin_t``, with or without
            ``.py``; or ``package::name`` of ours (``mmslab::...``) or of an installed OpenMMLab package. A file goes first.

    Raises:
        FileNotFoundError: If there is none; says which names are near.
        ValueError: If the file has not the name of a config, or there is no such package.
    """
    given = os.fspath(config)
    if os.path.isfile(given):
        if not given.endswith(SUFFIXES):
            raise ValueError(f'config {given!r} is no config file (.py, .yml, .yaml or .json). The config comes first.')
        return given
    package, separator, name = given.partition('::')
    if not separator:
        package, name = 'mmslab', given
    folder = CONFIGS if package == 'mmslab' else _folder_of(package, given)
    files = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob('*.py'))}
    path = files.get(name) or files.get(f'{name}.py')
    if path is not None:
        return str(path)
    what = f': {package} has no configs/{name}' if separator else ', neither as a file nor by name'
    raise FileNotFoundError(f'config {given!r} does not exist{what}. {_hint(name, files, package, separator)}')


def _hint(name: str, files: Dict[str, Path], package: str, separator: str) -> str:
    names = {PurePosixPath(n).stem: n[: -len('.py')] for n in files if '_base_' not in PurePosixPath(n).parts}
    prefix = f'{package}::' if separator else ''
    suffix = '.py' if separator else ''
    near = [repr(prefix + names[stem] + suffix) for stem in get_close_matches(PurePosixPath(name).stem, names)]
    if near:
        return f'Did you mean {" or ".join(near)}?'
    where = 'The configs are in configs/ of the repository; by name they are as' if package == 'mmslab' else 'One is'
    return f'{where} {prefix + next(iter(names.values())) + suffix!r}.' if names else 'Give a file.'


def _folder_of(package: str, given: str) -> Path:
    """Where an installed package has its configs."""
    folder = _installed(package)
    if folder is None:
        raise ValueError(f'config {given!r}: no package {package!r} is installed. Install it, or give a file.')
    return folder


def _installed(package: str) -> Optional[Path]:
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / '.mim' / 'configs'


def register_configs() -> None:
    """Lets ``_base_ = 'mmslab::name.py'`` stand in every config that mmengine reads from now on.

    mmengine finds bases of the packages in its table MODULE2PACKAGE alone, wants a folder in their path, and takes the package
    for the scope of what it finds, to search registries by that name. Ours have no registries of their own, and most no folder.
    So its method that finds bases is asked for all but ours, and for all but what lies where the name says: it reads a hundred
    YAML files for each base first, which takes half a second. The entry in the table is for ``mmengine.hub.get_config``.
    """
    from mmengine.config import Config
    from mmengine.config.utils import MODULE2PACKAGE

    MODULE2PACKAGE.setdefault('mmslab', 'mmslab')
    theirs = Config._get_cfg_path
    if getattr(theirs, 'finds_mmslab', False):
        return

    def _get_cfg_path(cfg_path: str, filename: str) -> Tuple[str, Optional[str]]:
        package, separator, name = cfg_path.partition('::')
        if separator and package == 'mmslab':
            return find_config(cfg_path), None
        folder = _installed(package) if separator and package in MODULE2PACKAGE else None
        if folder is not None and (folder / name).is_file():
            return str(folder / name), package
        return theirs(cfg_path, filename)

    _get_cfg_path.finds_mmslab = True
    Config._get_cfg_path = staticmethod(_get_cfg_path)
