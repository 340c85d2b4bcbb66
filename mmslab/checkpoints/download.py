"""Files from the web, into torch's cache: whole or not at all."""

import os
import re
from http.client import HTTPException
from pathlib import Path
from typing import Callable
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen
from zlib import crc32

import torch
from filelock import FileLock
from mmengine.logging import print_log
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_TIMEOUT = 30  # seconds without a byte
_ATTEMPTS = 3  # in a row that bring nothing new
_PIECE = 1 << 20


class _Broken(Exception):
    """A transfer that may go on where it ended."""


def cached(address: str) -> Path:
    """Where in torch's cache, ``$TORCH_HOME/hub/checkpoints``, the file of an http(s) address is, or is to be."""
    return Path(torch.hub.get_dir()) / 'checkpoints' / os.path.basename(urlsplit(address).path)


def download(address: str, name: str) -> Path:
    """The local copy of the file at ``address``, which is fetched if torch's cache has none.

    It arrives under another name, ``.part``, and gets its own when it has all the bytes that the server announced. What a
    connection that broke has left is completed, by a Range request, in this run or a later one; where the server knows no
    ranges it is fetched anew. Of several processes that want the same file, those of a distributed run too, one fetches it;
    the others wait. A progress bar is shown.

    Args:
        name (str): What errors call it.

    Raises:
        OSError: If it cannot be fetched. It says where the file is and where to put it by hand.
    """
    target = cached(address)
    if target.exists():
        return target
    # of two addresses with the same file name none must complete what the other has begun
    part = target.with_name(f'{target.name}.{crc32(address.encode()):08x}.part')
    try:
        locks = target.parent.with_name('locks')
        for folder in (target.parent, locks):
            folder.mkdir(parents=True, exist_ok=True)
        with FileLock(locks / f'{target.name}.lock'):
            if not target.exists():
                print_log(f'{address} -> {target}', logger='current')
                _fetch(address, part)
                os.replace(part, target)
    except (OSError, ValueError, HTTPException, _Broken) as e:
        begun = ' What has come so far is kept, and completed next time.' if part.exists() else ''
        raise OSError(
            f'checkpoint {name!r} cannot be downloaded from {address} ({e}). Download it and give its path, or put it at '
            f'{str(target)!r}.{begun}'
        ) from e
    return target


def _fetch(address: str, part: Path) -> None:
    """Completes ``part``, however often the connection breaks, as long as this brings something."""
    columns = (
        TextColumn('{task.description}'),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(os.path.basename(urlsplit(address).path), total=None)
        most, failed = _size(part), 0
        begun = most
        while True:
            try:
                return _continue(address, part, lambda done, total: progress.update(task, completed=done, total=total))
            except HTTPError:
                raise  # the server has answered, and would answer the same
            except (OSError, HTTPException, _Broken):
                failed = 0 if _size(part) > most else failed + 1
                most = max(most, _size(part))
                if failed == _ATTEMPTS or most == begun:
                    raise


def _continue(address: str, part: Path, show: Callable[[int, int], None]) -> None:
    """Fetches what ``part`` lacks, in one request; raises :class:`_Broken` if it is not all there afterwards."""
    begun = _size(part)
    request = Request(address, headers={'User-Agent': 'mmslab', **({'Range': f'bytes={begun}-'} if begun else {})})
    try:
        response = urlopen(request, timeout=_TIMEOUT)
    except HTTPError as e:
        if not begun or e.code != 416:  # there is nothing from that byte on: it is all there, or of another file
            raise
        if e.headers.get('Content-Range') == f'bytes */{begun}':
            return
        part.unlink()
        return _continue(address, part, show)
    with response:
        if response.length is None:
            raise ValueError('the server does not say how long it is, so that a half one could not be told')
        if response.status == 206:
            span = re.fullmatch(r'bytes (\d+)-\d+/(\d+)', response.headers.get('Content-Range', ''))
            if span is None or int(span[1]) != begun:
                raise ValueError('the server sends another part than it was asked for')
            total = int(span[2])
        else:
            begun, total = 0, response.length
        with open(part, 'ab' if begun else 'wb') as file:
            done = begun
            show(done, total)
            while piece := response.read(_PIECE):
                file.write(piece)
                done += len(piece)
                show(done, total)
    if done > total:
        part.unlink()
        raise ValueError(f'the server sent {done:,} bytes of a file that it says has {total:,}')
    if done < total:
        raise _Broken(f'it ended after {done:,} of {total:,} bytes')


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
