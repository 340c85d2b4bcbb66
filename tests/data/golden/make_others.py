"""Writes timm_swin.npz, timm_deit_distilled.npz and hf_swin.npz here, with the packages that others take weights from.

    python -m venv --system-site-packages /tmp/others
    /tmp/others/bin/pip install timm==1.0.31 transformers==4.57.6
    PYTHONPATH=. /tmp/others/bin/python tests/data/golden/make_others.py

``state/<key>`` is a weight under the package's own key, all of them random; the rest is input and outputs. Tests read the files,
and need neither package.
"""

from pathlib import Path

import numpy as np
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer
from transformers import SwinBackbone, SwinConfig, SwinForImageClassification

from tests.conftest import randomize

HERE = Path(__file__).parent
ARCH = dict(embed_dim=12, depths=(2, 2, 2, 1), num_heads=(1, 2, 2, 4), window_size=2)


def write(name: str, state: dict, **arrays: torch.Tensor) -> None:
    arrays.update({f'state/{k}': v for k, v in state.items()})
    np.savez_compressed(HERE / f'{name}.npz', **{k: v.detach().numpy() for k, v in arrays.items()})


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 64, 64)
    swin = randomize(SwinTransformer(img_size=64, num_classes=5, **ARCH)).eval()
    write('timm_swin', swin.state_dict(), x=x, logits=swin(x))

    deit = VisionTransformerDistilled(img_size=64, embed_dim=24, depth=3, num_heads=3, num_classes=5)
    deit = randomize(deit).eval()
    write('timm_deit_distilled', deit.state_dict(), x=x, tokens=deit.forward_features(x), logits=deit(x))

    config = SwinConfig(image_size=64, num_labels=5, **ARCH)
    classifier = randomize(SwinForImageClassification(config)).eval()
    config.out_features = [f'stage{i}' for i in range(1, 5)]
    backbone = SwinBackbone(config).eval()
    of_backbone = {k[len('swin.') :]: v for k, v in classifier.state_dict().items() if k.startswith('swin.')}
    left = backbone.load_state_dict(of_backbone, strict=False)
    assert all(k.startswith('hidden_states_norms.') for k in left.missing_keys), left
    randomize(backbone.hidden_states_norms)
    odd = torch.randn(1, 3, 50, 70)  # windows do not divide it, and merging pads it
    outs = {f'out{i}': y for i, y in enumerate(backbone(odd).feature_maps)}
    norms = {f'backbone/{k}': v for k, v in backbone.state_dict().items() if k.startswith('hidden_states_norms.')}
    write('hf_swin', classifier.state_dict(), x=x, logits=classifier(x).logits, odd=odd, **outs, **norms)


if __name__ == '__main__':
    main()
