"""Parameters and FLOPs of every row, computed, beside the paper's."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, List, Optional, Tuple, Union

import torch
import torch.nn as nn
import yaml
from mmengine.analysis import FlopAnalyzer
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import Tensor

from ..configs import INDEX

FLOPS_KEY = 'GFLOPs (paper)'
TOLERANCE = 0.05  # the paper rounds to one digit, which alone is up to 4.5%


@dataclass
class Row:
    """One config: its parameters in millions and FLOPs (multiply-adds, as the paper counts) in billions.

    For a detector ``gflops`` is that of its backbone; the paper gives none.
    """

    name: str
    config: str
    params: float
    gflops: float
    paper_gflops: Optional[float] = None

    @property
    def off(self) -> Optional[float]:
        """How far the computed FLOPs are from the paper's, as a fraction of the paper's."""
        return None if self.paper_gflops is None else self.gflops / self.paper_gflops - 1

    @property
    def marked(self) -> bool:
        """Whether they are further apart than 5%."""
        return self.off is not None and abs(self.off) > TOLERANCE


def read_metafile(index: Union[str, os.PathLike] = INDEX) -> List[dict]:
    """The models that a ``model-index.yml`` names.

    Raises:
        FileNotFoundError: If it, or a file that it imports, does not exist.
    """
    index = Path(index)
    if not index.is_file():
        raise FileNotFoundError(f'index {str(index)!r} does not exist. Leave it out for that of this package.')
    models: List[dict] = []
    for name in yaml.safe_load(index.read_text())['Import']:
        models += yaml.safe_load((index.parent / name).read_text())['Models']
    return models


def count(model: nn.Module, image: Union[Tuple[int, int, int], Tensor]) -> Tuple[float, float]:
    """FLOPs (multiply-adds) of one ``image``, a (channels, height, width) or a tensor (1, ...) of them, and parameters.

    By mmengine's counter, which follows the operations of a forward: those of SLA are the matrix products that were
    taken, ``q (k^T v)`` or ``(q k^T) v``, whichever is cheaper, and its convolution.
    """
    logging.disable(logging.WARNING)  # norms are operations that the counter does not know, and says so each time
    try:
        model.eval()  # which returns nothing for mmdet's Swin
        inputs = image if isinstance(image, Tensor) else torch.zeros(1, *image, device=next(model.parameters()).device)
        with torch.no_grad():
            flops = FlopAnalyzer(model, inputs).total()
    finally:
        logging.disable(logging.NOTSET)
    return flops, sum(p.numel() for p in model.parameters())


def rows(
    index: Union[str, os.PathLike] = INDEX,
    image: Tuple[int, int] = (800, 1333),
    only: str = '',
) -> Iterator[Row]:
    """Builds each model of ``index`` whose config's path contains ``only`` and counts it, one after the other.

    Classifiers at 224x224 (Table 1), backbones of detectors at ``image`` pixels, height and width.

    Raises:
        ValueError: If ``image`` is no pair of positive integers, or no config's path contains ``only``.
    """
    if len(image) != 2 or min(image) < 1:
        raise ValueError(f'image must be a height and a width in pixels, but got {image!r}.')
    models = [m for m in read_metafile(index) if only in m['Config']]
    if not models:
        raise ValueError(f'only={only!r}: no model of {str(index)!r} has it in the path of its config.')
    for entry in models:
        cfg = Config.fromfile(str(Path(index).parent / entry['Config']))
        cfg.model.backbone.init_cfg = None
        init_default_scope(cfg.default_scope)
        model = MODELS.build(cfg.model)
        params = sum(p.numel() for p in model.parameters())
        classifier = cfg.default_scope == 'mmpretrain'
        flops, _ = count(model if classifier else model.backbone, (3, 224, 224) if classifier else (3, *image))
        paper = entry.get('Metadata', {}).get(FLOPS_KEY)
        yield Row(entry['Name'], entry['Config'], params / 1e6, flops / 1e9, paper)
