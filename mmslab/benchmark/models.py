"""What is measured: models built from configs, folded, on their device, with an input that fits, tried once."""

import copy
import gc
import logging
import os
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import MODELS, init_default_scope

from .. import checkpoints
from ..apis import check_checkpoint, check_device, load_config, without_init_cfg
from ..backbones.base import SLABBackbone
from ..configs import INDEX, SUFFIXES, find_config
from ..deploy import fold
from ..errors import reason
from ..layers import FocusedLinearAttention, PRepBN, RepBN, SimplifiedLinearAttention, set_gamma
from ..layers.norm import TokenBN
from ..versions import check_detection, check_transformers
from .allocators import ALLOCATORS
from .complexity import count, read_metafile
from .memory import peak_memory

PathLike = Union[str, os.PathLike]
MODES = ('latency', 'throughput', 'flops')
SCOPES = ('model', 'backbone')
DTYPES = {'fp32': torch.float32, 'fp16': torch.float16, 'bf16': torch.bfloat16, 'amp': torch.float32}
MIN_ROUNDS = 5
# What the paper times for Table 3; a Settings with protocol='paper' has these
PAPER_PROTOCOL = dict(
    mode='latency',
    scope='model',
    image=(800, 1333),
    scales=(1,),
    batch_size=1,
    rounds=100,
    dtype='fp32',
    compile=False,
    cuda_graph=False,
    channels_last=False,
)
DETECTION_SIZE, CLASSIFICATION_SIZE = (800, 1333), (224, 224)
PAPER_KEYS = {'latency': 'Latency on a V100 in ms (paper)', 'throughput': 'Images/s on a V100 (paper)'}
ACCURACIES = ('box AP', 'Top 1 Accuracy')
GROUPS = ('SLAB: SLA and PRepBN', 'SLA', 'focused linear attention', 'PRepBN', 'BatchNorm', 'LayerNorm', 'other')


@dataclass
class Settings:
    """How to measure.

    Args:
        mode (str): 'latency', of one image; 'throughput', images per second; or 'flops', nothing timed.
        scope (str): 'model', the whole detector with its NMS and masks or the whole classifier; or 'backbone'.
        image (tuple, optional): Height and width in pixels, before the detector's data preprocessor pads them. Defaults to
            800x1333 for the latency of a detector, 224x224 else.
        scales (sequence[int]): Measures each model at so many times these sides, in rows of their own.
        batch_size (int, optional): Images at a time, for 'throughput' alone. Defaults to 64 there.
        rounds, warmup (int): Rounds that are timed (at least 5), and rounds before them.
        dtype (str): 'fp32'; 'fp16' or 'bf16', weights and input; 'amp', autocast to fp16 on a GPU, to bf16 on a CPU.
        device (str, optional): 'cpu', 'cuda:0', ... By default a GPU if there is one.
        compile (bool): ``torch.compile``; of a whole detector, its backbone and neck.
        cuda_graph (bool): Replay a CUDA graph; not for a whole detector, whose shapes depend on what it finds.
        channels_last (bool): The memory format of weights and input.
        threads (int, optional): Of torch on the CPU.
        no_fold (bool): Measure each model that folding changes also as it was, in a row of its own.
        seed (int): Of the random weights and the input, for each config anew.
        processes (int): Measures in so many fresh processes, one after the other; 0, in this one as it is.
        allocator (str, optional): 'glibc', 'jemalloc', 'tcmalloc' or 'mimalloc', the C allocator of these processes. By default
            that of this one.
        pin (bool): Keep each thread of these processes on one core; for a CPU.
        protocol (str, optional): 'paper', that of its Table 3: a whole detector, one image of 800x1333 in fp32, the mean of 100
            rounds, in one process; ratios are then of means.

    Raises:
        ValueError: For a value out of range, a device that is not there, or values that exclude each other.
    """

    mode: str = 'latency'
    scope: str = 'model'
    image: Optional[Tuple[int, int]] = None
    scales: Sequence[int] = (1,)
    batch_size: Optional[int] = None
    rounds: int = 100
    warmup: int = 10
    dtype: str = 'fp32'
    device: Optional[str] = None
    compile: bool = False
    cuda_graph: bool = False
    channels_last: bool = False
    threads: Optional[int] = None
    no_fold: bool = False
    seed: int = 0
    processes: int = 0
    allocator: Optional[str] = None
    pin: bool = True
    protocol: Optional[str] = None

    def __post_init__(self) -> None:
        for name, known in (('mode', MODES), ('scope', SCOPES), ('dtype', tuple(DTYPES))):
            if getattr(self, name) not in known:
                raise ValueError(f'{name} must be one of {known}, but got {getattr(self, name)!r}.')
        for name, known in (('allocator', tuple(ALLOCATORS)), ('protocol', ('paper',))):
            if getattr(self, name) not in (None, *known):
                raise ValueError(f'{name} must be one of {known} or None, but got {getattr(self, name)!r}.')
        if self.protocol is not None:
            self._follow_the_paper()
        if self.image is not None and (len(self.image) != 2 or min(self.image) < 1):
            raise ValueError(f'image must be a height and a width in pixels, but got {self.image!r}.')
        if not self.scales or min(self.scales) < 1 or len(set(self.scales)) < len(self.scales):
            raise ValueError(f'scales must be different positive integers, but got {tuple(self.scales)}.')
        if self.batch_size not in (None, 1) and self.mode != 'throughput':
            raise ValueError(f'batch_size={self.batch_size} is for --throughput: {self.mode} is of one image.')
        if self.batch_size is None:
            self.batch_size = 64 if self.mode == 'throughput' else 1
        limits = dict(batch_size=1, rounds=MIN_ROUNDS, warmup=0, threads=1, seed=0, processes=0)
        for name, lowest in limits.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f'{name} must be at least {lowest}, but got {value}.')
        if self.mode == 'flops' and (self.processes > 1 or self.allocator is not None):
            raise ValueError(
                f'processes={self.processes} and allocator={self.allocator!r} are for --latency and --throughput: --flops '
                'measures no time. Leave them out.'
            )
        if self.allocator is not None and self.processes < 1:
            raise ValueError(
                f'allocator={self.allocator!r} takes a process that is started with it: processes must be at least 1, but got '
                f'{self.processes}.'
            )
        check_device(self.device)
        self.device = self.device or ('cuda:0' if torch.cuda.is_available() else 'cpu')
        if self.torch_device.type not in ('cpu', 'cuda'):
            raise ValueError(f"device {self.device!r} cannot be timed. Use 'cpu' or 'cuda:0'.")
        if self.cuda_graph and self.torch_device.type != 'cuda':
            raise ValueError(f'cuda_graph needs a GPU, but device is {self.device!r}. Leave --cuda-graph out.')

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    def _follow_the_paper(self) -> None:
        defaults = {f.name: f.default for f in fields(self)}
        for name, value in PAPER_PROTOCOL.items():
            given = getattr(self, name)
            given = tuple(given) if isinstance(given, list) else given
            if given not in (value, defaults[name]):
                raise ValueError(f"protocol='paper' has {name}={value!r}, but got {given!r}. Leave one of the two out.")
            setattr(self, name, value)
        if self.processes > 1:
            raise ValueError(
                f"protocol='paper' is of one process, but got processes={self.processes}. Leave one of the two out."
            )


@dataclass
class Subject:
    """One row: a model ready to be called, and what is known of it without a clock.

    ``image`` and ``padded`` are heights and widths; ``params`` counts those of what is measured, folded or not; ``flops``
    are multiply-adds of one image, None where ``notes`` says why; ``peak_memory`` is in bytes, see
    :func:`mmslab.benchmark.memory.peak_memory`, None where it was not asked for; ``group`` is one of :data:`GROUPS`;
    ``detections`` has their number in each image; ``paper`` see :func:`paper_figures`; ``call`` is None for a model of another
    process.
    """

    name: str
    config: str
    folded: bool
    kind: str
    image: Tuple[int, int]
    padded: Tuple[int, int]
    params: int
    peak_memory: Optional[int]
    call: Optional[Callable[[], Any]] = field(default=None, repr=False)
    flops: Optional[int] = None
    checkpoint: Optional[str] = None
    group: str = 'other'
    detections: Optional[List[int]] = None
    paper: Dict[str, Any] = field(default_factory=dict)
    notes: List[str] = field(default_factory=list)


def check_inputs(configs: Sequence[PathLike], saved: Optional[Sequence[PathLike]], settings: Settings) -> List[Config]:
    """Reads the configs.

    Raises:
        FileNotFoundError: If a config or checkpoint does not exist.
        ValueError: If there are no configs, as many checkpoints as configs are not given, or a config has no such model.
    """
    if not configs:
        raise ValueError('no config given. Give a file, or a name as maskrcnn_slab_swin_t_1x.')
    if saved and len(saved) != len(configs):
        raise ValueError(
            f'--checkpoint must name one file for each config, in their order, but got {len(saved)} for {len(configs)} configs.'
        )
    for path in saved or ():
        check_checkpoint(path, 'checkpoint')
    found = [read_config(c) for c in configs]
    for path, cfg in zip(configs, found):
        if settings.cuda_graph and settings.scope == 'model' and not _is_classifier(cfg):
            raise ValueError(
                f'{path}: a CUDA graph cannot hold a whole detector, whose shapes depend on what it finds. '
                'Add --scope backbone, or leave --cuda-graph out.'
            )
        if settings.protocol is not None and _is_classifier(cfg):
            raise ValueError(
                f"{path}: protocol='paper' is of whole detectors, and this is a classifier. Use --throughput."
            )
    return found


def read_config(config: PathLike) -> Config:
    """A config by its path or name, see :func:`mmslab.configs.find_config`.

    Raises:
        FileNotFoundError, ValueError: If there is none, or it has no model with a backbone.
    """
    cfg = load_config(config)
    if not cfg.get('model', {}).get('backbone'):
        raise ValueError(f'config {str(config)!r} has no model with a backbone. Give one of a detector or classifier.')
    return cfg


def paper_figures(config: PathLike, index: PathLike = INDEX) -> Dict[str, Any]:
    """What the paper says of a config: 'latency' (ms), 'throughput' (images/s), 'accuracy' and its 'metric'.

    Keys without a figure are left out; a config that ``index`` does not name has none.
    """
    if not Path(index).is_file():
        return {}
    path = Path(find_config(config)).resolve()
    for entry in read_metafile(index):
        if (Path(index).parent / entry['Config']).resolve() != path:
            continue
        metadata = entry.get('Metadata', {})
        found = {k: metadata[name] for k, name in PAPER_KEYS.items() if name in metadata}
        metrics = {k: v for result in entry.get('Results', ()) for k, v in result['Metrics'].items()}
        for metric in ACCURACIES:
            if metric in metrics:
                found.update(accuracy=metrics[metric], metric=metric)
                break
        return found
    return {}


def names_of(configs: Sequence[PathLike]) -> List[str]:
    """A name for each config: its file's without the ending, longer or with a number where that is not one of a kind."""
    paths = [Path(str(c).replace('::', '/')) for c in configs]
    paths = [p.with_suffix('') if p.suffix in SUFFIXES else p for p in paths]
    names = [
        p.name if sum(q.name == p.name for q in paths) == 1 else f'{p.parent.name}/{p.name}'.strip('/') for p in paths
    ]
    return [n if names.count(n) == 1 else f'{n} #{names[: i + 1].count(n)}' for i, n in enumerate(names)]


def prepare(
    name: str,
    config: PathLike,
    cfg: Config,
    settings: Settings,
    checkpoint: Optional[PathLike] = None,
    scale: int = 1,
    counts: bool = True,
) -> List[Subject]:
    """Builds the model of a config, and with ``settings.no_fold`` also its unfolded twin, and runs each once.

    A backbone of ours without a norm to fold takes its inference form too, so that norms are all that it differs in from a
    folded one. A model of others, in which there is nothing to fold, has one row in any case.

    Random weights are what training from scratch starts from, but with gamma 0, where the handover ends. With them a detector's
    score threshold is set to what the weakest of its ``max_per_img`` best boxes passes, so that each has the work of a full
    image; at the config's threshold a few boxes would be left, another number in each model, or none and the mask head idle.

    Without ``counts``, FLOPs and memory are left out: counting them takes longer than a few rounds of timing do.

    Raises:
        ValueError: If the checkpoint is of another model, or if the model cannot take the image, the dtype or the device.
    """
    device, dtype = settings.torch_device, DTYPES[settings.dtype]
    if device.type == 'cuda':
        torch.cuda.set_device(device)
    model = _build(cfg, settings.seed, checkpoint)
    kind = 'classifier' if _is_classifier(cfg) else 'detector'
    large = kind == 'detector' and settings.mode != 'throughput'
    image = tuple(scale * side for side in settings.image or (DETECTION_SIZE if large else CLASSIFICATION_SIZE))
    divisor = getattr(getattr(model, 'data_preprocessor', None), 'pad_size_divisor', 1) or 1
    padded = tuple(-(-side // divisor) * divisor for side in image)
    try:
        variants = [fold(copy.deepcopy(model), check=False)]  # what ran before changes what glibc's malloc does later
    except ValueError as e:
        raise ValueError(f'{name}: {e}') from e
    folded = _norms(variants[0]) < _norms(model)
    ours = isinstance(model.backbone, SLABBackbone)
    changed = folded or (ours and not model.backbone.deploy)
    if settings.no_fold and changed:
        variants.append(copy.deepcopy(model))

    subjects: List[Subject] = []
    for number, variant in enumerate(variants):
        is_folded = folded and number == 0
        label = name
        if number == 0 and (changed or ours):
            label += ' (folded)' if folded else ' (inference form)'
        if len(settings.scales) > 1:
            label += f', {image[0]}x{image[1]}'
        layout = torch.channels_last if settings.channels_last else torch.contiguous_format
        variant = variant.to(device=device, dtype=dtype, memory_format=layout)
        x = _input(settings, padded).to(device=device, dtype=dtype, memory_format=layout)
        with _named(label, image, settings):
            call = _call(variant, x, kind, image, settings)
            whole = kind == 'detector' and settings.scope == 'model'
            if whole and checkpoint is None:
                _fill_image(variant, call)
            result = call()
            if settings.compile:
                call = _call(_compiled(variant, kind, settings), x, kind, image, settings)
                result = call()
            found = [len(r.pred_instances) for r in result] if whole else None
            del result
            memory = peak_memory(call, device) if counts else None
            if settings.cuda_graph:
                call = _graphed(call)
                call()
        part = variant.backbone if settings.scope == 'backbone' else variant
        params = sum(p.numel() for p in part.parameters())
        subjects.append(
            Subject(label, str(config), is_folded, kind, image, padded, params, memory, call, detections=found)
        )
    flops, notes = _flops(name, model.to(device), kind, padded, settings) if counts else (None, [])
    paper = paper_figures(config)
    if settings.scope != 'model' or image != (DETECTION_SIZE if kind == 'detector' else CLASSIFICATION_SIZE):
        paper = {k: v for k, v in paper.items() if k in ('accuracy', 'metric')}  # the rest is of the whole model
    group = _group(model.backbone)
    for subject in subjects:
        subject.flops, subject.notes, subject.paper, subject.group = flops, notes, paper, group
        subject.checkpoint = None if checkpoint is None else str(checkpoint)
    del model
    gc.collect()
    return subjects


def _is_classifier(cfg: Config) -> bool:
    return cfg.get('default_scope') == 'mmpretrain'


def _norms(model: nn.Module) -> int:
    """How many norms it has that folding takes away."""
    return sum(isinstance(m, (PRepBN, RepBN, TokenBN)) for m in model.modules())


def _group(backbone: nn.Module) -> str:
    """Which of the paper's kinds it is."""

    def has(*kinds: type) -> bool:
        return any(isinstance(m, kinds) for m in backbone.modules())

    if has(SimplifiedLinearAttention):
        return GROUPS[0] if has(PRepBN) else GROUPS[1]
    kinds = (
        (FocusedLinearAttention,),
        (PRepBN,),
        (RepBN, nn.modules.batchnorm._BatchNorm),
        (nn.LayerNorm,),
        (nn.Module,),
    )
    return next(group for group, kind in zip(GROUPS[2:], kinds) if has(*kind))


def _build(cfg: Config, seed: int, checkpoint: Optional[PathLike]) -> nn.Module:
    check_transformers() if _is_classifier(cfg) else check_detection()
    without_init_cfg(cfg.model)
    with quiet():
        init_default_scope(cfg.get('default_scope', 'mmdet'))
    torch.manual_seed(seed)
    with quiet():
        model = MODELS.build(cfg.model)
    if checkpoint is None:
        with quiet():
            model.init_weights()
        if any(isinstance(m, PRepBN) for m in model.modules()):
            set_gamma(model, 0)
    else:
        state = checkpoints.read_state_dict(checkpoint)
        checkpoints.check_fits(model, state, repr(str(checkpoint)))
        model.load_state_dict(state, strict=False)
    model.eval()
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """Without the log lines of mmengine, one for each parameter, and the warnings of tracing and of mmdet's heads."""
    logger = MMLogger.get_current_instance()  # no logger of logging's own, which logging.disable() would reach
    level = logger.level
    logger.setLevel(logging.ERROR)
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    finally:
        logging.disable(logging.NOTSET)
        logger.setLevel(level)


@contextmanager
def _named(label: str, image: Tuple[int, ...], settings: Settings) -> Iterator[None]:
    """Names the model, its input and what it ran on in whatever it raises."""
    try:
        with quiet():
            yield
    except Exception as e:  # of torch, mmcv, mmdet...
        how = ', compiled' * settings.compile + ', as a CUDA graph' * settings.cuda_graph
        raise ValueError(
            f'{label}: cannot run on {settings.batch_size} x {image[0]}x{image[1]} pixels in {settings.dtype} on '
            f'{settings.device}{how} ({reason(e)}). Give another --image, --batch-size, --dtype or --device, or leave it out.'
        ) from e


def _input(settings: Settings, padded: Tuple[int, ...]) -> torch.Tensor:
    """A batch of normal noise, as normalized images are: (batch, 3, height, width)."""
    generator = torch.Generator().manual_seed(settings.seed)
    return torch.randn(settings.batch_size, 3, *padded, generator=generator)


def _samples(x: torch.Tensor, image: Tuple[int, ...]) -> list:
    """What mmdet's preprocessor says of each image of a padded batch; new ones, as predictions are put into them."""
    from mmdet.structures import DetDataSample

    shape = tuple(x.shape[2:])
    meta = dict(img_shape=image, ori_shape=image, pad_shape=shape, batch_input_shape=shape, scale_factor=(1.0, 1.0))
    return [DetDataSample(metainfo=dict(img_id=i, **meta)) for i in range(len(x))]


def _call(model: nn.Module, x: torch.Tensor, kind: str, image: Tuple[int, ...], settings: Settings) -> Callable:
    """One forward: of the backbone, to a classifier's scores, or to a detector's boxes and masks."""

    def call() -> Any:
        with torch.inference_mode(), autocast():
            if settings.scope == 'backbone':
                return model.backbone(x)
            if kind == 'classifier':
                return model(x)
            return model.predict(x, _samples(x, image), rescale=False)

    autocast: Callable = nullcontext
    if settings.dtype == 'amp':
        low = torch.float16 if settings.torch_device.type == 'cuda' else torch.bfloat16
        autocast = partial(torch.autocast, settings.torch_device.type, dtype=low)
    return call


def _fill_image(model: nn.Module, call: Callable) -> None:
    """Sets the score threshold so that each image has as many detections as the config lets through."""
    tests = [getattr(m, 'test_cfg', None) for m in model.modules()]
    tests = [t for t in tests if isinstance(t, dict) and 'score_thr' in t]
    for test in tests:
        test['score_thr'] = 0.0
    scores = [r.pred_instances.scores for r in call()] if tests else []
    if scores and all(len(s) for s in scores):
        for test in tests:
            test['score_thr'] = 0.999 * min(float(s.min()) for s in scores)


def _compiled(model: nn.Module, kind: str, settings: Settings) -> nn.Module:
    if kind == 'classifier' and settings.scope == 'model':
        return torch.compile(model)
    model.backbone = torch.compile(model.backbone)
    if settings.scope == 'model' and getattr(model, 'neck', None) is not None:
        model.neck = torch.compile(model.neck)
    return model


def _graphed(call: Callable) -> Callable:
    """``call``, recorded once and replayed as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # lazy initializations must not be recorded
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()

    def replay() -> Any:
        graph.replay()
        return output

    return replay


def _flops(
    name: str, model: nn.Module, kind: str, padded: Tuple[int, ...], settings: Settings
) -> Tuple[Optional[int], List[str]]:
    """Multiply-adds of one image, unfolded in fp32; of a whole detector without its post-processing."""
    x = _input(settings, padded)[:1].to(settings.torch_device)
    try:
        with quiet(), torch.no_grad():
            if settings.scope == 'backbone':
                return count(model.backbone, (3, *padded))[0], []
            if kind == 'detector':
                model.forward = partial(model.forward, data_samples=_samples(x, padded))
            return count(model, x)[0], []
    except Exception as e:  # tracing fails in as many ways as there are detectors
        return None, [f"{name}: mmengine's counter of FLOPs cannot trace it ({reason(e)})."]
