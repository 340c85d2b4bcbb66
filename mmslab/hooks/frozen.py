"""Which norms a training leaves as they are."""

from typing import Set

import torch.nn as nn

from ..layers.norm import RepBN


def frozen_repbn(model: nn.Module) -> Set[str]:
    """Names of the RepBN layers whose statistics stay as they are while ``model`` trains (``frozen_stages``, ``norm_eval``).

    ``model``, not wrapped, is asked: it is put into training mode for a moment, which models override to freeze
    their layers. Every mode is then what it was.
    """
    modes = [(m, m.training) for m in model.modules()]
    try:
        model.train()
        return {name for name, m in model.named_modules() if isinstance(m, RepBN) and not m.bn.training}
    finally:
        for m, mode in modes:
            m.training = mode
