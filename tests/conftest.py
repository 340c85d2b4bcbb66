import functools
import http.server
import itertools
import os
import sys
from pathlib import Path
from typing import Callable, Dict, Sequence, Tuple

import numpy as np
import pytest
import torch

import mmslab  # noqa: F401  (registers its names)
from mmslab.layers import PRepBN, RepBN

os.environ.setdefault('OMP_NUM_THREADS', '2')
ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).parent / 'data' / 'golden'


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def _unformatted_configs(monkeypatch):
    """The text of a config as it is before yapf formats it, which takes longer than a training here; other processes do."""
    for module in ('yapf.yapflib.yapf_api', 'mmengine.config.config'):  # mmengine 0.10.7 has imported it already
        monkeypatch.setattr(f'{module}.FormatCode', lambda text, **kwargs: (text, True), raising=False)


INITIALIZERS = ('trunc_normal_', 'kaiming_uniform_', 'kaiming_normal_', 'xavier_uniform_', 'normal_', 'uniform_')


@pytest.fixture
def undrawn_weights(monkeypatch):
    """Models keep what is in memory for weights, where their shapes alone matter: drawing those of a large one takes seconds."""
    for name in INITIALIZERS:
        monkeypatch.setattr(torch.nn.init, name, lambda tensor, *args, **kwargs: tensor)


@pytest.fixture
def quick_weights(monkeypatch):
    """Random weights of about the right size: the same million again and again."""
    numbers = torch.empty(1_000_003).uniform_(-0.03, 0.03)

    def fill(tensor, *args, **kwargs):
        for part in tensor.detach().view(-1).split(len(numbers)):
            part.copy_(numbers[: len(part)])
        return tensor

    for name in INITIALIZERS:
        monkeypatch.setattr(torch.nn.init, name, fill)


def needs_torch(lowest: str) -> Callable[[Callable], Callable]:
    """For a test of what needs a newer torch: on an older one it must end in the error that says so.

    The error may come by itself, or where the test compares: with another message, or the output of a command line.
    """

    def decorate(test: Callable) -> Callable:
        @functools.wraps(test)
        def run(*args, **kwargs):
            if torch.__version__ >= lowest:
                return test(*args, **kwargs)
            message = rf'needs torch >= {lowest}, but this is {torch.__version__}\. '
            with pytest.raises((ValueError, AssertionError), match=message.replace('+', r'\+')):
                test(*args, **kwargs)

        return run

    return decorate


class LocalServer(http.server.ThreadingHTTPServer):
    """A server on this machine that says nothing of clients which break off, as the downloads do that are tested."""

    def __init__(self, handler: Callable) -> None:
        super().__init__(('127.0.0.1', 0), handler)

    def handle_error(self, request, client_address) -> None:
        if not isinstance(sys.exc_info()[1], (ConnectionResetError, BrokenPipeError)):
            super().handle_error(request, client_address)


def golden(name: str) -> Tuple[Dict[str, torch.Tensor], Dict[str, torch.Tensor]]:
    """The arrays of a golden file and the weights in it."""
    with np.load(GOLDEN / f'{name}.npz') as f:
        arrays = {k: torch.from_numpy(f[k]) for k in f.files}
    state = {k[len('state/') :]: v for k, v in arrays.items() if k.startswith('state/')}
    return {k: v for k, v in arrays.items() if not k.startswith('state/')}, state


def assert_relative(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Largest difference over largest magnitude; a zero reference must be met exactly."""
    assert actual.shape == expected.shape
    scale = expected.detach().abs().max().item()
    error = (actual.detach() - expected.detach()).abs().max().item()
    assert error <= tolerance * scale, f'relative error {error / max(scale, 1e-300):.2e} over {tolerance:.0e}'


def randomize(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Weights and BN statistics that no initialization has: everything matters to the output."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            scale = 0.3 / max(p[0].numel(), 1) ** 0.5 * 3 if p.dim() > 1 else 0.3
            p.copy_(torch.randn(p.shape, generator=generator) * scale + (1.0 if _is_norm_weight(name, p) else 0.0))
        for name, b in model.named_buffers():
            if name.endswith('running_mean'):
                b.copy_(torch.randn(b.shape, generator=generator) * 0.3)
            elif name.endswith('running_var'):
                b.copy_(torch.rand(b.shape, generator=generator) + 0.5)
    return model


def randomize_gently(
    model: torch.nn.Module, etas: Sequence[float] = (-0.7, 0.0, 0.4), std: float = 0.05
) -> torch.nn.Module:
    """As :func:`randomize`, at gamma 0 and with weights that keep a deep network well conditioned.

    Under :func:`randomize` it amplifies rounding until a float32 model differs from its own float64 by as much as the
    outputs themselves, so that no tolerance would mean anything. ``etas`` take turns; ``std`` is of linear weights.
    """
    etas = itertools.cycle(etas)
    generator = torch.Generator().manual_seed(0)

    def uniform(p: torch.Tensor, std: float, mean: float = 0.0) -> None:
        p.uniform_(mean - std * 3**0.5, mean + std * 3**0.5, generator=generator)

    with torch.no_grad():
        for module in model.modules():
            for name, p in module.named_parameters(recurse=False):
                if isinstance(module, torch.nn.Linear) and name == 'weight':
                    uniform(p, std)
                elif isinstance(module, torch.nn.modules.conv._ConvNd) and name == 'weight':
                    uniform(p, 0.6 * p[0].numel() ** -0.5)
                else:  # biases, positions, and what a norm multiplies by
                    uniform(p, 0.3, float(name == 'weight' and p.dim() == 1))
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                uniform(module.running_mean, 0.3)
                module.running_var.uniform_(0.5, 1.5, generator=generator)
            if isinstance(module, RepBN):
                module.eta.fill_(next(etas))
            if isinstance(module, PRepBN):
                module.set_gamma(0.0)
    return model


def _is_norm_weight(name: str, p: torch.Tensor) -> bool:
    return p.dim() == 1 and name.endswith('weight')


@pytest.fixture(scope='session')
def untrained_detector(tmp_path_factory) -> Tuple[Path, Path]:
    """Config and checkpoint of the demo's detector as it is initialized: it finds six things in any image, scores around 0.25."""
    from mmdet.registry import MODELS
    from mmengine.config import Config
    from mmengine.registry import DefaultScope

    folder = tmp_path_factory.mktemp('untrained')
    config, checkpoint = folder / 'untrained.py', folder / 'untrained.pth'
    base = ROOT / 'configs' / 'demo' / 'maskrcnn_slab_swin_shapes.py'
    config.write_text(f'_base_ = {str(base)!r}\nmodel = dict(test_cfg=dict(rcnn=dict(max_per_img=6)))\n')
    cfg = Config.fromfile(config)
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmdet'):
        model = MODELS.build(cfg.model)
    model.init_weights()
    torch.save(dict(state_dict=model.state_dict(), meta=dict(dataset_meta=dict(classes=cfg.classes))), checkpoint)
    return config, checkpoint
