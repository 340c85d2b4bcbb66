"""Kills a training with SIGKILL at random moments, resumes it each time, and compares its end with that of one left alone.

    python -m tests.kill_and_resume --kills 20 configs/demo/maskrcnn_slab_swin_shapes.py work_dirs/killed \
        --cfg-options train_cfg.max_epochs=1 default_hooks.checkpoint.interval=10 default_hooks.checkpoint.by_epoch=False

Both runs are left in the folder given, which must be empty. The last line says whether weights, averaged weights,
optimizer, schedulers and losses are bit for bit the same; the exit status is 0 if they are.
"""

import argparse
import os
import random
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, Callable, List, Tuple

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from .commands import FORKS


@HOOKS.register_module(name='_TestKilledOnce', force=True)
class KilledOnce(Hook):
    """Kills the process of the last rank with SIGKILL before ``iteration``, unless ``flag`` says that it was done."""

    def __init__(self, iteration: int, flag: str) -> None:
        self.iteration = iteration
        self.flag = Path(flag)

    def before_train_iter(self, runner, batch_idx, data_batch=None) -> None:
        if runner.iter == self.iteration and runner.rank == runner.world_size - 1 and not self.flag.exists():
            self.flag.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)


class Begun(Hook):
    """Tells another process that the training begins."""

    priority = 100

    def __init__(self, event: Any) -> None:
        self.event = event

    def before_train(self, runner) -> None:
        self.event.set()


def kill_and_resume(
    train: Callable[..., None], args: tuple, kills: int, processes: int = 1, seed: int = 0, latest: float = 1.0
) -> Tuple[int, int]:
    """Runs ``train(work_dir, *args, begun)`` to its end, killing it on the way.

    ``args[0]`` is a folder; the run that is left alone goes into its ``whole``, the other into its ``killed``. Most kills
    come while the training runs, one in eight while it starts.

    Args:
        train: Trains in a folder, from its latest checkpoint if there is one; registers the hook ``begun``.
        kills (int): How often to kill.
        processes (int): Ranks of a gloo group that are started and killed together.
        seed (int): Of the moments.
        latest (float): Moments are within this share of the time that the whole training takes.

    Returns:
        tuple[int, int]: How often it was killed before its end, and how often started.

    Raises:
        RuntimeError: If a run fails.
    """
    folder, *rest = args
    moments = random.Random(seed)
    begun = FORKS.Event()
    start = time.perf_counter()
    run = _start(train, (os.path.join(folder, 'whole'), *rest), processes, begun)
    begun.wait()
    starting = time.perf_counter() - start
    _finish(run)
    training = time.perf_counter() - start - starting
    killed = started = 0
    ended = False
    while not ended:
        begun.clear()
        run = _start(train, (os.path.join(folder, 'killed'), *rest), processes, begun)
        started += 1
        if killed < kills:
            if moments.random() < 1 / 8:
                time.sleep(moments.uniform(0, starting))
            else:
                while not begun.wait(0.1) and all(p.is_alive() for p in run):
                    pass
                time.sleep(moments.uniform(0, latest * training))
            if any(p.is_alive() for p in run):
                _kill(run, moments)
                killed += 1
                continue
        _finish(run)
        ended = True
    return killed, started


def _start(train: Callable[..., None], args: tuple, processes: int, begun: Any) -> list:
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    run = [FORKS.Process(target=_rank, args=(train, args, rank, processes, port, begun)) for rank in range(processes)]
    for process in run:
        process.start()
    return run


def _rank(train: Callable[..., None], args: tuple, rank: int, processes: int, port: int, begun: Any) -> None:
    os.setsid()  # data loaders' workers are killed with it
    torch.set_num_threads(1)
    with open(os.devnull, 'w') as nowhere:
        os.dup2(nowhere.fileno(), 1)
    if processes > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
        os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
        torch.distributed.init_process_group('gloo')
    train(*args, begun=Begun(begun))


def _kill(run: list, moments: random.Random) -> None:
    for process in moments.sample(run, len(run)):
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has not come to setsid yet
            process.kill()
    for process in run:
        process.join()


def _finish(run: list) -> None:
    for process in run:
        process.join()
    if any(p.exitcode for p in run):
        raise RuntimeError(f'a run ended with {[p.exitcode for p in run]}')


def differences(a: Any, b: Any, name: str = '') -> List[str]:
    """Where two nested containers of tensors and numbers are not bit for bit the same."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [d for k in a for d in differences(a[k], b[k], f'{name}/{k}')]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        return [d for i in range(len(a)) for d in differences(a[i], b[i], f'{name}/{i}')]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    else:
        same = type(a) is type(b) and a == b
    return [] if same else [name]


def compare(whole: Path, killed: Path) -> List[str]:
    """What differs between the last checkpoints of two folders: everything in them but times and names."""
    contents = []
    for folder in (whole, killed):
        last = Path((folder / 'last_checkpoint').read_text()).name
        content = torch.load(folder / last, map_location='cpu', weights_only=False)
        hub = content.pop('message_hub')['log_scalars']
        meta = content.pop('meta')
        content['losses'] = {k: v.data[0].tolist() for k, v in hub.items() if 'loss' in k and k.startswith('train')}
        contents.append({**content, 'file': last, 'epoch': meta['epoch'], 'iter': meta['iter']})
    return differences(*contents)


def train_config(work_dir: str, config: str, options: dict, begun: Hook) -> None:
    """A training as ``tools/train.py CONFIG --work-dir WORK_DIR --resume`` does it."""
    from mmslab.apis import build_trainer

    launcher = 'pytorch' if torch.distributed.is_initialized() else 'none'
    runner = build_trainer(config, work_dir=work_dir, resume='auto', options=options, launcher=launcher)
    runner.register_hook(begun)
    runner.train()


def main() -> int:
    from mmengine.config import DictAction

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('config')
    parser.add_argument('folder', type=Path)
    parser.add_argument('--kills', type=int, default=20)
    parser.add_argument('--processes', type=int, default=1, help='ranks, on CPUs')
    parser.add_argument('--seed', type=int, default=0, help='of the moments')
    parser.add_argument(
        '--latest', type=float, default=0.1, help='kill within this share of the training after a start'
    )
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, default={})
    args = parser.parse_args()
    if args.folder.exists() and any(args.folder.iterdir()):
        parser.error(f'{str(args.folder)!r} is not empty. Name another folder.')
    killed, started = kill_and_resume(
        train_config,
        (str(args.folder), args.config, args.cfg_options),
        args.kills,
        args.processes,
        args.seed,
        args.latest,
    )
    found = compare(args.folder / 'whole', args.folder / 'killed')
    print(f'killed {killed} times, started {started} times: ', end='')
    print(f'{len(found)} differences, {", ".join(found[:5])}' if found else 'bit for bit the same')
    return bool(found)


if __name__ == '__main__':
    sys.exit(main())
