import re

import pytest

from mmslab.benchmark.allocators import (
    ALLOCATORS,
    advice,
    allocator_of,
    current_allocator,
    find_library,
    preloading,
)

MAPS = """\
55d0c0a00000-55d0c0e00000 r-xp 00000000 fe:00 131 /usr/bin/python3.11
7f0000000000-7f0000100000 rw-p 00000000 00:00 0
7f0000200000-7f0000300000 r-xp 00000000 fe:00 77  {}
7f1000000000-7f1000300000 r-xp 00000000 fe:00 999 /usr/lib/x86_64-linux-gnu/libc.so.6
7ffe00000000-7ffe00021000 rw-p 00000000 00:00 0   [stack]
"""


@pytest.mark.parametrize(
    'library, name',
    [
        ('/usr/lib/x86_64-linux-gnu/libjemalloc.so.2', 'jemalloc'),
        ('/opt/conda/my libs/libjemalloc.so', 'jemalloc'),
        ('/usr/lib/libtcmalloc.so.4.5.10', 'tcmalloc'),
        ('/usr/lib/libtcmalloc_minimal.so.4', 'tcmalloc'),
        ('/usr/lib/libmimalloc.so.2.0', 'mimalloc'),
        ('/usr/lib/python3/pkg.libs/libjemalloc-5f2d1b.so.2', 'glibc'),  # of a package, for itself alone
        ('/usr/lib/libm.so.6', 'glibc'),
    ],
)
def test_the_allocator_is_found_in_the_maps(library, name):
    env = dict(MALLOC_CONF='a:1', MALLOC_ARENA_MAX='2', MALLOC_TRIM_THRESHOLD_='3', TCMALLOC_X='4', MIMALLOC_Y='5')
    found = current_allocator(MAPS.format(library), env)
    assert found['name'] == name
    assert found['library'] == ('/usr/lib/x86_64-linux-gnu/libc.so.6' if name == 'glibc' else library)
    assert (
        found['variables']
        == {
            'glibc': dict(MALLOC_ARENA_MAX='2', MALLOC_TRIM_THRESHOLD_='3'),
            'jemalloc': dict(MALLOC_CONF='a:1'),
            'tcmalloc': dict(TCMALLOC_X='4'),
            'mimalloc': dict(MIMALLOC_Y='5'),
        }[name]
    )


def test_where_nothing_is_known():
    assert current_allocator('') == dict(name=None, library=None, variables={})
    assert current_allocator('0-1 r-xp 0 fe:00 1 /lib/ld-musl-x86_64.so.1')['name'] is None
    assert current_allocator('0-1 r-xp 0 fe:00 1 /lib/libc-2.28.so')['name'] == 'glibc'


def test_libraries_are_searched_in_the_users_folders_first(tmp_path):
    mine, system = tmp_path / 'mine', tmp_path / 'system'
    for folder in (mine, system):
        folder.mkdir()
    for path in ('mine/libjemalloc.so.2', 'system/libjemalloc.so.2', 'system/libtcmalloc_minimal.so.4'):
        (tmp_path / path).touch()
    (system / 'libmimalloc-debug.so.2').touch()
    env, folders = dict(LD_LIBRARY_PATH=f'{tmp_path / "none"}:{mine}:'), [str(system)]
    assert find_library('jemalloc', env, folders) == str(mine / 'libjemalloc.so.2')
    assert find_library('jemalloc', {}, folders) == str(system / 'libjemalloc.so.2')
    assert find_library('tcmalloc', env, folders) == str(system / 'libtcmalloc_minimal.so.4')
    assert find_library('glibc', env, folders) is None
    for name, package in (('mimalloc', 'libmimalloc2.0'), ('jemalloc', 'libjemalloc2')):
        message = f"allocator '{name}': there is no lib{name}.so here.*apt-get install {package}"
        with pytest.raises(FileNotFoundError, match=message):
            find_library(name, {}, [str(mine)] if name == 'mimalloc' else [])


def test_a_process_gets_one_allocator_and_keeps_what_else_is_preloaded():
    env = dict(LD_PRELOAD='/a/libtcmalloc.so.4 libiomp5.so:/b/libjemalloc.so.2', PATH='/bin')
    given = preloading('jemalloc', '/c/libjemalloc.so.2', env)
    assert given['LD_PRELOAD'] == '/c/libjemalloc.so.2:libiomp5.so' and given['PATH'] == '/bin'
    assert given['MALLOC_CONF'] == 'dirty_decay_ms:-1,muzzy_decay_ms:-1'
    assert preloading('jemalloc', 'x', dict(MALLOC_CONF='mine'))['MALLOC_CONF'] == 'mine'
    assert preloading('glibc', None, env) == dict(LD_PRELOAD='libiomp5.so', PATH='/bin')
    assert preloading('glibc', None, dict(LD_PRELOAD='libjemalloc.so.2')) == {}
    assert preloading(None, None, env) == env and env['LD_PRELOAD'].startswith('/a')


def test_what_is_advised_is_what_we_set():
    said = advice()
    assert 'MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1' in said and '--allocator jemalloc' in said
    assert allocator_of(re.search(r'LD_PRELOAD=(\S+)', said).group(1)) == 'jemalloc'
    assert set(ALLOCATORS) == {'glibc', 'jemalloc', 'tcmalloc', 'mimalloc'}
