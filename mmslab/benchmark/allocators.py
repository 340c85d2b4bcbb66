"""The C allocator that a CPU's tensors come from: which one a process has, and how to start one with another.

glibc's malloc asks the kernel for each block above a threshold (32 MiB at most) and returns it when it is freed. Feature maps of
a detector are larger, so every forward gets fresh pages, and the kernel clears each at its first touch: a minor page fault for
every 4 KiB. jemalloc and tcmalloc keep freed blocks. PyTorch advises them:
https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html
"""

import ctypes.util
import os
import re
import sysconfig
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Tuple


@dataclass(frozen=True)
class Allocator:
    """What is known of one: its libraries' names, Debian's package, the variables that it reads, and what we set of them."""

    libraries: Tuple[str, ...]
    package: str
    variables: Tuple[str, ...]
    defaults: Tuple[Tuple[str, str], ...] = ()


ALLOCATORS = {
    'glibc': Allocator((), 'libc6', ('GLIBC_TUNABLES', 'MALLOC_ARENA_*', 'MALLOC_*_')),
    'jemalloc': Allocator(
        ('jemalloc',),
        'libjemalloc2',
        ('MALLOC_CONF',),
        (('MALLOC_CONF', 'dirty_decay_ms:-1,muzzy_decay_ms:-1'),),  # freed pages are kept for ever
    ),
    'tcmalloc': Allocator(
        ('tcmalloc', 'tcmalloc_minimal', 'tcmalloc_and_profiler'), 'libgoogle-perftools4', ('TCMALLOC_*',)
    ),
    'mimalloc': Allocator(('mimalloc',), 'libmimalloc2.0', ('MIMALLOC_*',)),
}
_OF_LIBRARY = {library: name for name, known in ALLOCATORS.items() for library in known.libraries}
_LIBRARY = re.compile(r'(?:.*/)?lib(\w+)\.so[\d.]*')


def allocator_of(path: str) -> Optional[str]:
    """The name in :data:`ALLOCATORS` of the allocator whose library ``path`` is, None for any other file.

    Copies that Python packages bring along for themselves have a hash in their names and are none.
    """
    match = _LIBRARY.fullmatch(path)
    return _OF_LIBRARY.get(match.group(1)) if match else None


def current_allocator(maps: Optional[str] = None, env: Mapping[str, str] = os.environ) -> Dict[str, Any]:
    """The allocator of this process: its 'name' (None if unknown), 'library' (a path) and 'variables' that are set for it.

    Args:
        maps (str, optional): The text of /proc/self/maps, which is read by default. Where there is none, nothing is known.
        env (mapping): The environment of the process.
    """
    if maps is None:
        source = Path('/proc/self/maps')
        maps = source.read_text() if source.is_file() else ''
    fields = (line.split(maxsplit=5) for line in maps.splitlines())
    files = [f[5] for f in fields if len(f) == 6]
    libc = next((f for f in files if re.fullmatch(r'libc(\.so\.6|-2\.\d+\.so)', os.path.basename(f))), None)
    library = next((f for f in files if allocator_of(f)), libc)
    if library is None:
        return dict(name=None, library=None, variables={})
    name = allocator_of(library) or 'glibc'
    patterns = ALLOCATORS[name].variables
    variables = {k: v for k, v in sorted(env.items()) if any(fnmatch(k, p) for p in patterns)}
    return dict(name=name, library=library, variables=variables)


def find_library(name: str, env: Mapping[str, str] = os.environ, folders: Optional[List[str]] = None) -> Optional[str]:
    """The library of an allocator, to be preloaded; None for 'glibc', which is there without one.

    Args:
        name (str): Of :data:`ALLOCATORS`.
        env (mapping): Whose LD_LIBRARY_PATH is searched first.
        folders (list[str], optional): Searched next. By default those of the system and of the Python installation; then what
            the dynamic linker knows.

    Raises:
        FileNotFoundError: If it is nowhere, naming the package to install.
    """
    known = ALLOCATORS[name]
    if not known.libraries:
        return None
    own = [folder for folder in env.get('LD_LIBRARY_PATH', '').split(os.pathsep) if folder]
    for library in known.libraries:
        for folder in own + (_system_folders() if folders is None else folders):
            found = sorted(p for p in Path(folder).glob(f'lib{library}.so*') if p.is_file() and allocator_of(str(p)))
            if found:
                return str(found[0].absolute())
        linked = ctypes.util.find_library(library) if folders is None else None
        if linked:
            return linked
    raise FileNotFoundError(
        f'allocator {name!r}: there is no lib{known.libraries[0]}.so here. Install it (Debian, Ubuntu: apt-get install '
        f'{known.package}), put its folder into LD_LIBRARY_PATH, or give another --allocator.'
    )


def _system_folders() -> List[str]:
    triplet = sysconfig.get_config_var('MULTIARCH') or ''
    system = [f'/usr/local/lib/{triplet}', f'/usr/lib/{triplet}', f'/lib/{triplet}'] if triplet else []
    return [*system, '/usr/local/lib', '/usr/lib64', '/usr/lib', '/lib64', f'{sysconfig.get_config_var("prefix")}/lib']


def preloading(name: Optional[str], library: Optional[str], env: Mapping[str, str]) -> Dict[str, str]:
    """``env`` for a process with that allocator: any other is taken out of LD_PRELOAD; None leaves it as it is.

    jemalloc is told to keep freed pages, unless ``env`` configures it.
    """
    env = dict(env)
    if name is None:
        return env
    kept = [entry for entry in re.split(r'[:\s]+', env.pop('LD_PRELOAD', '')) if entry and not allocator_of(entry)]
    if library:
        kept.insert(0, library)
    if kept:
        env['LD_PRELOAD'] = ':'.join(kept)
    for variable, value in ALLOCATORS[name].defaults:
        env.setdefault(variable, value)
    return env


def advice() -> str:
    """What to do about the page faults of glibc's malloc."""
    jemalloc = ALLOCATORS['jemalloc']
    try:
        library, install = find_library('jemalloc'), ''
    except FileNotFoundError:
        library, install = f'lib{jemalloc.libraries[0]}.so.2', f'apt-get install {jemalloc.package}, then '
    variables = ' '.join(f'{k}={v}' for k, v in jemalloc.defaults)
    return (
        "glibc's malloc returns large blocks to the kernel, and each forward takes page faults for them anew; jemalloc keeps "
        f"them, and PyTorch's tuning guide advises it: {install}--allocator jemalloc here, and elsewhere "
        f'LD_PRELOAD={library} {variables}.'
    )
