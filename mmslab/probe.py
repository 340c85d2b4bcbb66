"""What :mod:`mmslab.doctor` imports and runs, in a process of its own, as any of it may crash.

``python -m mmslab.probe RESULT NAME...`` adds a line of JSON to the file RESULT before each, and one after it.
"""

import json
import sys
from importlib import import_module
from typing import Any, Callable, Dict


def _version(name: str) -> Callable[[], Any]:
    return lambda: str(import_module(name).__version__)


def _torch() -> dict:
    torch = import_module('torch')
    gpus = []
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            known = torch.cuda.get_device_properties(i)
            gpus.append(dict(name=known.name, gib=known.total_memory / 2**30, capability=[known.major, known.minor]))
    return dict(
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        gpus=gpus,
        archs=torch.cuda.get_arch_list() if gpus else [],
        threads=torch.get_num_threads(),
    )


def _numpy_with_torch() -> str:
    import_module('torch').zeros(1).numpy()
    return 'tensors become arrays'


def _ops() -> str:
    """Non-maximum suppression, on every kind of device that is there."""
    torch, ops = import_module('torch'), import_module('mmcv.ops')
    devices = ['cpu'] + ['cuda'] * torch.cuda.is_available()
    for device in devices:
        boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 10, 10], [20, 20, 30, 30]], device=device)
        kept = ops.nms(boxes, torch.tensor([0.9, 0.8, 0.7], device=device), 0.5)[1].tolist()
        if kept != [0, 2]:
            raise RuntimeError(f'nms on {device} keeps {kept} of three boxes, not [0, 2]')
    return f'nms runs on {" and ".join(devices)}'


def _ours() -> str:
    import_module('mmslab.versions').check_versions()
    for part in ('layers', 'backbones', 'necks', 'hooks'):
        import_module(f'mmslab.{part}')
    return 'registered'


def _detection() -> str:
    import_module('mmslab.versions').check_detection()
    import_module('mmdet.models')
    return str(import_module('mmdet').__version__)


PROBES: Dict[str, Callable[[], Any]] = {
    'numpy': _version('numpy'),
    'torch': _torch,
    'numpy with torch': _numpy_with_torch,
    'torchvision': _version('torchvision'),
    'opencv': _version('cv2'),
    'mmengine': _version('mmengine'),
    'mmcv': _version('mmcv'),
    'mmcv ops': _ops,
    'mmdet': _detection,
    'mmpretrain': _version('mmpretrain'),
    'mmslab': _ours,
}


def main(result: str, *names: str) -> None:
    with open(result, 'a', buffering=1) as lines:
        for name in names:
            print(json.dumps(dict(begun=name)), file=lines)
            try:
                done = dict(value=PROBES[name]())
            except BaseException as e:  # an import may raise anything, SystemExit too
                said = str(e).strip().splitlines()
                done = dict(error=f'{type(e).__name__}: {said[0]}' if said else type(e).__name__)
            print(json.dumps(dict(name=name, **done)), file=lines)


if __name__ == '__main__':
    main(*sys.argv[1:])
