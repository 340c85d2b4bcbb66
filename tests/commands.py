"""Command lines in processes of their own, forked from one that has imported what they import: that takes them seconds."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, Optional

ROOT = Path(__file__).resolve().parent.parent
FORKS = multiprocessing.get_context('forkserver')
FORKS.set_forkserver_preload(['mmslab.apis', 'mmdet.apis', 'mmpretrain.models'])


def tool(
    name: str, *args: Any, cwd: Path, env: Optional[Dict[str, str]] = None, fork: bool = True
) -> subprocess.CompletedProcess:
    """Runs ``tools/<name>.py`` with ``args`` in ``cwd``; with ``fork=False`` in a Python that begins with nothing."""
    script, args = str(ROOT / 'tools' / f'{name}.py'), [str(arg) for arg in args]
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'CUDA_VISIBLE_DEVICES': '', **(env or {})}
    if not fork:
        return subprocess.run([sys.executable, script, *args], cwd=cwd, env=env, capture_output=True, text=True)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / 'stdout', Path(folder) / 'stderr']
        process = FORKS.Process(target=_run, args=(script, args, str(cwd), env, files))
        process.start()
        process.join()
        return subprocess.CompletedProcess([script, *args], process.exitcode, *(file.read_text() for file in files))


def _run(script: str, args: list, cwd: str, env: Dict[str, str], files: list) -> None:
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = [script, *args]
    runpy.run_path(script, run_name='__main__')
