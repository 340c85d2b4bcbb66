"""Published weights by name."""

import difflib
import os
from pathlib import Path
from typing import Dict, NamedTuple, Optional, Union


class Release(NamedTuple):
    """Weights that someone published.

    Attributes:
        address (str): Where the file is.
        family (str): The backbone that it is for.
        source (str): The page of those who published it.
    """

    address: str
    family: str
    source: str


# (who published it, where its files are, names of the files by backbone: {name} or {name}-{hash})
_SOURCES = (
    (
        'github.com/xinghaochen/SLAB',
        'https://github.com/xinghaochen/SLAB/releases/download/ckpts/',
        {
            'SLABDeiT': 'deit_tiny_prepbn deit_small_prepbn slab_deit_tiny slab_deit_small',
            'SLABPVT': 'pvt_tiny_prepbn pvt_small_prepbn pvt_medium_prepbn slab_pvt_tiny',
            'SLABSwin': 'swin_tiny_prepbn slab_swin_tiny slab_swin_small',
            'SLABCSWin': 'slab_cswin_tiny',
        },
    ),
    (
        'github.com/microsoft/Swin-Transformer',
        'https://github.com/SwinTransformer/storage/releases/download/v1.0.0/',
        {
            'SLABSwin': 'swin_tiny_patch4_window7_224 swin_small_patch4_window7_224 '
            'swin_base_patch4_window7_224 swin_base_patch4_window7_224_22k swin_base_patch4_window7_224_22kto1k '
            'swin_base_patch4_window12_384 swin_base_patch4_window12_384_22k swin_base_patch4_window12_384_22kto1k '
            'swin_large_patch4_window7_224_22k swin_large_patch4_window7_224_22kto1k '
            'swin_large_patch4_window12_384_22k swin_large_patch4_window12_384_22kto1k'
        },
    ),
    (
        'github.com/microsoft/CSWin-Transformer',
        'https://github.com/microsoft/CSWin-Transformer/releases/download/v0.1.0/',
        {'SLABCSWin': 'cswin_tiny_224 cswin_small_224 cswin_base_224 cswin_large_224'},
    ),
    (
        'github.com/whai362/PVT',
        'https://github.com/whai362/PVT/releases/download/v2/',
        {'SLABPVT': 'pvt_tiny pvt_small pvt_medium pvt_large'},
    ),
    (
        'github.com/facebookresearch/deit',
        'https://dl.fbaipublicfiles.com/deit/',
        {
            'SLABDeiT': 'deit_tiny_patch16_224-a1311bcf deit_small_patch16_224-cd65a155 deit_base_patch16_224-b5f2ef4d '
            'deit_tiny_distilled_patch16_224-b40b3cf7 deit_small_distilled_patch16_224-649709d9 '
            'deit_base_distilled_patch16_224-df68dfff'
        },
    ),
)
RELEASES: Dict[str, Release] = {
    file.partition('-')[0]: Release(f'{at}{file}.pth', family, source)
    for source, at, files in _SOURCES
    for family, names in files.items()
    for file in names.split()
}


def check_known(checkpoint: Union[str, os.PathLike], what: str = 'checkpoint') -> Optional[Release]:
    """What is published under the name ``checkpoint``; None for a local file, which wins over a name, and for an address.

    Raises:
        FileNotFoundError: If it is neither, calling it ``what``, with the names that are near.
    """
    path = str(checkpoint)
    if '://' in path or os.path.isfile(os.path.expanduser(path)):
        return None
    if path in RELEASES:
        return RELEASES[path]
    near = difflib.get_close_matches(Path(path).stem, RELEASES, 3, 0.75)
    names = f' Is it the name {" or ".join(map(repr, near))}?' if near else ''
    raise FileNotFoundError(
        f'{what} {path!r} does not exist, and no published weights have that name.{names} Give the path of a .pth file, or a '
        'name that `mmslab convert --list` prints.'
    )
