"""What is installed, whether it works, and what to do about what does not. Nothing that may be broken is imported here."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from .benchmark.allocators import advice, current_allocator
from .configs import CONFIGS
from .version import __version__

GIB = 2**30
PATIENCE = 300  # seconds for all that is tried
OK, NOTE, WRONG = 'ok', 'note', 'wrong'
PROBED = (
    *('numpy', 'torch', 'numpy with torch', 'torchvision', 'opencv', 'mmengine'),
    *('mmcv', 'mmcv ops', 'mmdet', 'mmpretrain', 'mmslab'),
)
# the distributions that a name may come from, the one to install first
DISTRIBUTIONS = {
    'torch': ('torch',),
    'torchvision': ('torchvision',),
    'numpy': ('numpy',),
    'opencv': (
        *('opencv-python-headless', 'opencv-python'),
        *('opencv-contrib-python-headless', 'opencv-contrib-python'),
    ),
    'mmengine': ('onedl-mmengine', 'mmengine', 'mmengine-lite'),
    'mmcv': ('onedl-mmcv', 'mmcv', 'mmcv-lite', 'mmcv-full'),
    'mmdet': ('onedl-mmdetection', 'mmdet'),
    'mmpretrain': ('onedl-mmpretrain', 'mmpretrain'),
    'transformers': ('transformers',),
    'setuptools': ('setuptools',),
}
EXPORT = ('onnx', 'onnxruntime', 'onnxscript')
_REBUILD = (
    'MMCV_WITH_OPS=1 pip install --no-build-isolation --force-reinstall --no-deps --no-cache-dir onedl-mmcv (or mmcv).'
)
# what an error says, and its remedy
REMEDIES = (
    (
        r'NoneType takes no arguments|beside transformers',
        'transformers 5 has not all that mmpretrain imports: pip install "transformers<5", or pip uninstall transformers.',
    ),
    (
        r'libGL\.so|libgthread',
        'OpenCV wants a display: pip uninstall opencv-python, then pip install opencv-python-headless.',
    ),
    (
        r'NumPy 1\.x|multiarray failed to import|_ARRAY_API|Numpy is not available',
        'a package was compiled for numpy 1: pip install "numpy<2".',
    ),
    (r"No module named 'pkg_resources'", 'newer setuptools has no pkg_resources: pip install setuptools==69.5.1.'),
    (
        r'MMCV==\S+ is used but incompatible',
        'this mmdet or mmpretrain wants another mmcv, as the message says: with mmdet 3.3.0, mmcv 2.1.0.',
    ),
    (r'torchvision::nms', 'torchvision is of another torch: install the pair that pytorch.org lists together.'),
    (r'undefined symbol|mmcv\._ext|no compiled ops', f'with torch installed first, rebuild mmcv: {_REBUILD}'),
)


@dataclass(frozen=True)
class Finding:
    """One line: ``verdict`` is 'ok', 'note' (works, but may matter) or 'wrong'."""

    name: str
    found: str
    verdict: str = OK
    remedy: str = ''


def examine() -> List[Finding]:
    """All findings; those of this machine hold for the working folder and the environment variables of this process."""
    installed = distributions()
    probed = probe()
    return [*versions(installed, probed), *troubles(installed, probed), *gpus(probed), *machine(probed), *data_roots()]


def distributions() -> Dict[str, Dict[str, str]]:
    """Of each name in :data:`DISTRIBUTIONS`, and of those for export, what is installed: ``{distribution: version}``."""
    found: Dict[str, Dict[str, str]] = {}
    for name, candidates in {**DISTRIBUTIONS, **{n: (n,) for n in EXPORT}}.items():
        found[name] = {}
        for each in candidates:
            try:
                found[name][each] = metadata.version(each)
            except metadata.PackageNotFoundError:
                continue
    return found


def probe(names: Sequence[str] = PROBED) -> Dict[str, Dict[str, Any]]:
    """What each import and try gives, 'value' or 'error'. One that crashes its process is an error; the next go on in another."""
    done: Dict[str, Dict[str, Any]] = {}
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(os.path.abspath(p) for p in sys.path)}
    with tempfile.TemporaryDirectory() as folder:  # an empty one, as -m looks for packages in it
        result = Path(folder) / 'result'
        while len(done) < len(names):
            left = [name for name in names if name not in done]
            command = [sys.executable, '-m', 'mmslab.probe', str(result), *left]
            try:
                run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE)
                how = f'crashed (exit code {run.returncode})'
            except subprocess.TimeoutExpired:
                how = f'took more than {PATIENCE} s'
            lines = [json.loads(line) for line in result.read_text().splitlines()] if result.exists() else []
            done.update({line.pop('name'): line for line in lines if 'name' in line})
            begun = lines[-1].get('begun') if lines else left[0]
            if begun and begun not in done:
                done[begun] = dict(error=how)
                result.write_text('')
    return done


def remedy_of(error: str) -> str:
    """The remedy of :data:`REMEDIES` for what an error says."""
    return next((remedy for pattern, remedy in REMEDIES if re.search(pattern, error)), '')


def versions(installed: Dict[str, Dict[str, str]], probed: Dict[str, Dict[str, Any]]) -> List[Finding]:
    """A line for Python, for this package, and for all that was tried."""
    found = [Finding('Python', f'{platform.python_version()} ({sys.executable})')]
    for name in PROBED:
        said = probed[name]
        known = installed.get(name, {})
        label = ', '.join(f'{d} {v}' for d, v in known.items())
        if 'value' in said:
            value = said['value']['version'] if name == 'torch' else said['value']
            shown = f'{__version__}, {value} ({Path(__file__).parent})' if name == 'mmslab' else value
            found.append(Finding(name, f'{shown} ({label})' if label else shown))
            continue
        error = said['error']
        missing = name in DISTRIBUTIONS and not known
        install = f'pip install {DISTRIBUTIONS[name][0]}' if name in DISTRIBUTIONS else ''
        if missing and name == 'mmpretrain':
            found.append(Finding(name, 'not installed', NOTE, f'the configs in imagenet/ need it: {install}'))
        else:
            remedy = remedy_of(error) or (install if missing else 'mend what is wrong above it, or install it anew.')
            found.append(Finding(name, f'{error} ({label})' if label else error, WRONG, remedy))
    absent = [name for name in EXPORT if not installed[name]]
    if absent:
        found.append(
            Finding(
                'ONNX',
                f'not installed: {", ".join(absent)}',
                NOTE,
                f'mmslab export to .onnx needs torch >= 2.11 and these: pip install {" ".join(EXPORT)}',
            )
        )
    else:
        found.append(Finding('ONNX', ', '.join(f'{n} {installed[n][n]}' for n in EXPORT)))
    return found


def _number(version: str) -> tuple:
    return tuple(int(part) for part in re.findall(r'\d+', version)[:2])


def troubles(
    installed: Dict[str, Dict[str, str]], probed: Dict[str, Dict[str, Any]], pkg_resources: Optional[bool] = None
) -> List[Finding]:
    """What is known to go wrong with these distributions together.

    Args:
        pkg_resources (bool, optional): Whether there is one. By default it is looked for.
    """
    found = []

    def version(name: str) -> tuple:
        return _number(next(iter(installed[name].values()), ''))

    for name in ('mmengine', 'mmcv', 'mmdet', 'mmpretrain'):
        several = installed[name]
        if len(several) > 1:
            names = ' '.join(several)
            found.append(
                Finding(
                    f'two of {name}',
                    ' and '.join(f'{d} {v}' for d, v in several.items()),
                    WRONG,
                    f'they overwrite each other: pip uninstall {names}, then install one of them.',
                )
            )
    if len(set(installed['opencv'].values())) > 1:
        names = ' '.join(installed['opencv'])
        found.append(
            Finding(
                'two of OpenCV',
                ' and '.join(f'{d} {v}' for d, v in installed['opencv'].items()),
                WRONG,
                f'they overwrite each other: pip uninstall {names}, then pip install opencv-python-headless.',
            )
        )
    if version('torch') and version('torch') < (2, 3) and version('numpy') >= (2,):
        found.append(
            Finding(
                'numpy 2', 'torch before 2.3 was compiled for numpy 1', WRONG, 'pip install "numpy<2" (tested: 1.26.4).'
            )
        )
    if version('torch') >= (2, 14) and 'error' in probed['mmcv ops']:
        found.append(
            Finding(
                'torch for mmcv',
                'torch from 2.14 on wants C++20, and mmcv compiles its ops as C++17',
                WRONG,
                f'pip install torch==2.11.0 torchvision==0.26.0, then rebuild mmcv: {_REBUILD}',
            )
        )
    if version('transformers') >= (5,) and installed['mmpretrain']:
        found.append(
            Finding('transformers 5', 'mmpretrain, which mmdet imports, wants an older one', WRONG, REMEDIES[0][1])
        )
    there = util.find_spec('pkg_resources') is not None if pkg_resources is None else pkg_resources
    if not there and {'mmengine', 'mmcv'} & {*installed['mmengine'], *installed['mmcv']}:
        found.append(
            Finding(
                'setuptools',
                'has no pkg_resources, which the original mmengine and mmcv import',
                WRONG,
                'pip install setuptools==69.5.1.',
            )
        )
    return found


def gpus(probed: Dict[str, Dict[str, Any]], driver: Optional[bool] = None) -> List[Finding]:
    """The GPUs that torch sees, and whether it was compiled for them."""
    torch = probed['torch'].get('value')
    if torch is None:
        return []
    if not torch['gpus']:
        driver = Path('/proc/driver/nvidia/version').exists() if driver is None else driver
        hidden = os.environ.get('CUDA_VISIBLE_DEVICES')
        if not driver or hidden in ('', '-1'):
            return [Finding('GPU', 'none' + (', by CUDA_VISIBLE_DEVICES' if driver else ''))]
        how = f'which is for CUDA {torch["cuda"]}' if torch['cuda'] else 'which is for CPUs alone'
        remedy = 'install the torch that pytorch.org lists for the CUDA version of the driver (nvidia-smi shows it).'
        return [Finding('GPU', f'there is a driver, but torch {torch["version"]}, {how}, sees no GPU', WRONG, remedy)]
    found = []
    compiled = [
        tuple(map(int, re.fullmatch(r'sm_(\d+)(\d)a?', a).groups()))
        for a in torch['archs']
        if re.fullmatch(r'sm_\d+a?', a)
    ]
    for i, gpu in enumerate(torch['gpus']):
        major, minor = gpu['capability']
        fits = not compiled or any(a == major and b <= minor for a, b in compiled)
        text = f'{gpu["name"]}, {gpu["gib"]:.0f} GiB, capability {major}.{minor}'
        remedy = f'this torch is compiled for {", ".join(torch["archs"])}: install one for this GPU.'
        found.append(Finding(f'GPU cuda:{i}', text) if fits else Finding(f'GPU cuda:{i}', text, WRONG, remedy))
    return found


def machine(
    probed: Dict[str, Dict[str, Any]], folder: str = '.', shared: str = '/dev/shm', allocator: Optional[Dict] = None
) -> List[Finding]:
    """Cores and threads, the allocator, free space for checkpoints, and shared memory for data loaders' workers."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    threads = (probed['torch'].get('value') or {}).get('threads')
    text = f'{cores} cores' + (f', {threads} threads of torch' if threads else '')
    found = [Finding('cores', text)]
    if threads and threads > cores:
        found = [Finding('cores', text, NOTE, f'more threads than cores slow each other: OMP_NUM_THREADS={cores}.')]
    used = current_allocator() if allocator is None else allocator
    glibc = used['name'] == 'glibc'
    found.append(
        Finding(
            'allocator',
            used['name'] or 'unknown',
            NOTE if glibc else OK,
            f'mmslab benchmark on a CPU: {advice()}' if glibc else '',
        )
    )
    free = shutil.disk_usage(folder).free / GIB
    verdict = WRONG if free < 1 else NOTE if free < 10 else OK
    remedy = 'a checkpoint of Mask R-CNN takes half a GiB: make room, or use --work-dir on another disk.'
    found.append(Finding('free space here', f'{free:.1f} GiB', verdict, remedy if verdict != OK else ''))
    if os.path.isdir(shared):
        size = shutil.disk_usage(shared).total / GIB
        remedy = 'workers that load images may end with "Bus error": docker run --shm-size=8g, or num_workers=0.'
        found.append(Finding('shared memory', f'{size:.2f} GiB', NOTE if size < 1 else OK, remedy if size < 1 else ''))
    return found


def data_roots(configs: Path = CONFIGS) -> List[Finding]:
    """The data folders that our configs name, and the variable that each is set by."""
    named: Dict[str, str] = {}
    for path in sorted(configs.rglob('*.py')):
        named.update(
            re.findall(r"^data_root = '\{\{\$(\w+):(.+?)\}\}'", path.read_text(encoding='utf-8'), re.MULTILINE)
        )
    found = []
    for variable, default in sorted(named.items()):
        root = os.environ.get(variable, default)
        there = os.path.isdir(root)
        remedy = '' if there else f'where a config needs it: export {variable}=FOLDER'
        found.append(Finding(variable, root if there else f'{root} is not there', OK if there else NOTE, remedy))
    return found


def to_json(findings: Sequence[Finding]) -> str:
    """``{'ok', 'findings': [{'name', 'found', 'verdict', 'remedy'}]}``."""
    ok = all(f.verdict != WRONG for f in findings)
    return json.dumps(dict(ok=ok, findings=[asdict(f) for f in findings]), indent=2)
