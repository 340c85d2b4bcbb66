"""Models of other libraries converted and folded: how many of their norms, how exactly, how much faster."""

import copy
import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from mmengine.registry import MODELS

from ..errors import reason
from ..folding import fold
from ..handover import convert_norms
from ..layers import RepBN, set_gamma
from .allocators import find_library, preloading
from .latency import measure, ratio

COLUMNS = (
    'model',
    'converted',
    'same',
    'folded',
    'norms',
    'difference',
    'examples',
    'over_converted',
    'over_original',
    'why',
)
Built = Tuple[nn.Module, Any]  # a model and an example of its input


def _timm(name: str) -> Built:
    import timm

    model = timm.create_model(name)
    return model, torch.randn(1, *model.default_cfg['input_size'])


def _hugging_face(config: str, model: str, **small: Any) -> Callable[[], Built]:
    def build() -> Built:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**small))
        size = small.get('image_size')
        example = torch.randn(1, 3, size, size) if size else torch.randint(0, 100, (1, 24))
        return made, dict(
            {'pixel_values' if size else 'input_ids': example}, return_dict=False, **_NO_CACHE[size is None]
        )

    return build


_NO_CACHE = {True: dict(use_cache=False), False: {}}
_TEXT = dict(vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4)
_IMAGES = dict(image_size=224, hidden_size=192, num_hidden_layers=6, num_attention_heads=3, intermediate_size=768)


def _registered(cfg: dict) -> Callable[[], Built]:
    def build() -> Built:
        __import__(cfg['type'].split('.')[0])
        return MODELS.build(cfg), torch.randn(1, 3, 224, 224)

    return build


ARCHITECTURES: Dict[str, Callable[[], Built]] = {
    **{
        f'timm {name}': (lambda name=name: _timm(name))
        for name in """
        vit_tiny_patch16_224 deit3_small_patch16_224 swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 convnext_atto
        convnextv2_atto cait_xxs24_224 tnt_s_legacy_patch16_224 twins_svt_small twins_pcpvt_small mvitv2_tiny davit_tiny
        volo_d1_224 edgenext_xx_small xcit_nano_12_p16_224 pvt_v2_b0 focalnet_tiny_srf mobilevit_xxs pit_ti_224 nest_tiny
        gcvit_xxtiny maxvit_rmlp_pico_rw_256 beit_base_patch16_224 eva02_tiny_patch14_224 convit_tiny crossvit_9_240
        coat_lite_mini mixer_b32_224 hiera_tiny_224 caformer_s18 inception_next_atto
        """.split()
    },
    'mmpretrain PCPVT': _registered(dict(type='mmpretrain.PCPVT', arch='small')),
    'mmpretrain HiViT': _registered(dict(type='mmpretrain.HiViT', arch='tiny', ape=True, rpe=False)),
    'mmpretrain TinyViT': _registered(dict(type='mmpretrain.TinyViT', arch='5m')),
    'mmdet Swin': _registered(dict(type='mmdet.SwinTransformer')),
    'mmdet PVTv2': _registered(dict(type='mmdet.PyramidVisionTransformerV2', embed_dims=32, num_layers=[2, 2, 2, 2])),
    'transformers LLaMA': _hugging_face('LlamaConfig', 'LlamaModel', **_TEXT),
    'transformers Qwen2': _hugging_face('Qwen2Config', 'Qwen2Model', **_TEXT),
    'transformers DINOv2': _hugging_face('Dinov2Config', 'Dinov2Model', **_IMAGES),
}


def learn(model: nn.Module) -> None:
    """Gives every RepBN random statistics and weights, gamma 0: as a handover might have left it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, RepBN):
                m.eta.uniform_(0, 1, generator=generator)
                m.bn.running_mean.normal_(generator=generator)
                m.bn.running_var.uniform_(0.5, 2, generator=generator)
                m.bn.weight.uniform_(0.5, 1.5, generator=generator)
                m.bn.bias.normal_(generator=generator)
    set_gamma(model, 0)


def examine(name: str, rounds: int, warmup: int = 2) -> Dict[str, Any]:
    """Converts and folds a model of :data:`ARCHITECTURES`, and times it: a row of the table."""
    torch.manual_seed(0)
    model, example = ARCHITECTURES[name]()
    model.eval()
    run = (lambda m: m(**example)) if isinstance(example, dict) else (lambda m: m(example))
    original = copy.deepcopy(model)
    with torch.no_grad():
        report = convert_norms(model)
        same = all(torch.equal(a, b) for a, b in zip(_tensors(run(model)), _tensors(run(original))))
    learn(model)
    converted = copy.deepcopy(model)
    examples = [example]
    if isinstance(example, dict):  # of another length, or size; twice the batch
        key, x = next((k, v) for k, v in example.items() if isinstance(v, torch.Tensor))
        examples += [
            {**example, key: torch.cat([x, x.flip(-1)])},
            *([{**example, key: x[:, :-3]}] if x.dim() == 2 else []),
        ]
    folded = fold(model, *examples)
    why = {row.detail.split(' in ')[0] for row in folded.rows if row.fate != 'folded'}
    why |= {row.reason for row in report.rows if row.fate != 'converted'}
    row = dict(
        model=name,
        converted=report.count('converted'),
        same=same,
        folded=folded.count('folded'),
        norms=len(report.rows),
        difference=folded.difference,
        examples='; '.join(folded.examples if isinstance(example, torch.Tensor) else ['as given']),
        why='; '.join(sorted(why)),
    )
    with torch.inference_mode():
        times = measure([lambda m=m: run(m) for m in (model, converted, original)], rounds, warmup).seconds
    row['over_converted'], row['over_original'] = (ratio(times[0], other)[0] for other in times[1:])
    return row


def table(
    names: Sequence[str], processes: int, rounds: int, allocator: Optional[str], advance: Callable[[str], Any]
) -> List[Dict[str, Any]]:
    """Rows of :func:`examine`, each the median over fresh processes, with the lowest and highest of the ratios."""
    rows = []
    for name in names:
        done = []
        for _ in range(processes):
            advance(name)
            command = [sys.executable, '-m', __name__, name, str(rounds)]
            ran = subprocess.run(command, capture_output=True, text=True, env=_environment(allocator))
            if ran.returncode:
                raise ValueError(f'{name} failed: {reason(RuntimeError(ran.stderr.strip().splitlines()[-1]))}')
            done.append(json.loads(ran.stdout.splitlines()[-1]))
        row = done[0]
        for column in ('over_converted', 'over_original'):
            values = sorted(each[column] for each in done)
            row[column] = f'{values[len(values) // 2]:.2f} ({values[0]:.2f}-{values[-1]:.2f})'
        rows.append(row)
    return rows


def write(rows: Sequence[Dict[str, Any]], path: Path) -> None:
    """As CSV."""
    with open(path, 'w', newline='') as f:
        writer = csv.DictWriter(f, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def _environment(allocator: Optional[str]) -> Dict[str, str]:
    return preloading(allocator, find_library(allocator) if allocator else None, os.environ)


def _tensors(node: Any) -> List[torch.Tensor]:
    if isinstance(node, torch.Tensor):
        return [node]
    children = node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ()
    return [t for child in children for t in _tensors(child)]


if __name__ == '__main__':
    print(json.dumps(examine(sys.argv[1], int(sys.argv[2]))))
