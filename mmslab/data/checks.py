"""Checks of what a run will read and write, made before it starts."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any, Iterator, Tuple, Union

from mmengine.config import Config, ConfigDict

# Files above this are looked at from both ends only: parsing COCO's takes seconds, and is done once anyway
_PARSE_UP_TO = 64 << 20


def check_writable(folder: Union[str, os.PathLike], name: str) -> None:
    """Makes ``folder`` if missing; raises OSError, naming ``name``, unless files can be written there."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise OSError(f'{name}={str(folder)!r} cannot be written ({e.strerror}). Choose a folder of your own.') from e


def check_datasets(cfg: Config, splits: Tuple[str, ...] = ('train', 'val')) -> None:
    """Checks that the annotation files and image folders of ``cfg``'s data loaders are there and make sense.

    Raises:
        FileNotFoundError: For a missing file or folder, saying where the data comes from.
        ValueError: For an annotation file that is no COCO file, or names no image or no category.
    """
    for split in splits:
        loader = cfg.get(f'{split}_dataloader')
        for dataset in _datasets(loader.get('dataset') if loader else None):
            _check_dataset(dataset, f'{split}_dataloader')


def _datasets(node: Any) -> Iterator[ConfigDict]:
    """The data sets in a config node, those inside wrappers (RepeatDataset, ConcatDataset...) too."""
    if isinstance(node, dict):
        if node.get('ann_file') or node.get('data_root'):
            yield node
        else:
            yield from _datasets(node.get('dataset'))
            yield from _datasets(node.get('datasets'))
    elif isinstance(node, (list, tuple)):
        for each in node:
            yield from _datasets(each)


def _check_dataset(dataset: ConfigDict, where: str) -> None:
    root = Path(dataset.get('data_root') or '')
    prefix = dataset.get('data_prefix') or {}
    folders = [root / p for p in (prefix.values() if isinstance(prefix, dict) else [prefix]) if isinstance(p, str)]
    files = [root / f for f in [dataset.get('ann_file')] if f]
    for path in files + folders:
        if not path.exists():
            raise FileNotFoundError(
                f'{where}: {str(path)!r} does not exist. For COCO, download 2017 train, val and annotations from '
                'cocodataset.org, unpack them into one folder and set COCO_ROOT to it (default data/coco). Without '
                'COCO, `make demo` trains on a data set that it makes.'
            )
    for path in files:
        if path.suffix == '.json':
            _check_coco(path, where)
    for folder in folders:
        if next(os.scandir(folder), None) is None:
            raise FileNotFoundError(f'{where}: the image folder {str(folder)!r} is empty. Put the images there.')


def _check_coco(path: Path, where: str) -> None:
    remedy = 'Download or make it again.'
    if path.stat().st_size > _PARSE_UP_TO:
        with path.open('rb') as f:
            start = f.read(1)
            f.seek(-64, os.SEEK_END)
            whole = start == b'{' and f.read().rstrip().endswith(b'}')
        if not whole:
            raise ValueError(f'{where}: the annotation file {str(path)!r} is no complete JSON file. {remedy}')
        return
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
    except ValueError as e:
        raise ValueError(f'{where}: the annotation file {str(path)!r} is no JSON file ({e}). {remedy}') from e
    for key in ('images', 'annotations', 'categories'):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise ValueError(
                f'{where}: the annotation file {str(path)!r} has no list {key!r}, which every COCO file has. {remedy}'
            )
        if not content[key]:
            raise ValueError(f'{where}: the annotation file {str(path)!r} has no {key}, so there is nothing to learn.')
    images = {i.get('id') for i in content['images'] if isinstance(i, dict)}
    categories = {c.get('id') for c in content['categories'] if isinstance(c, dict)}
    for number, a in enumerate(content['annotations']):
        if not isinstance(a, dict) or not {'id', 'image_id', 'category_id', 'bbox'} <= set(a):
            raise ValueError(
                f'{where}: annotations[{number}] of {str(path)!r} lacks one of id, image_id, category_id, bbox. {remedy}'
            )
        if a['image_id'] not in images or a['category_id'] not in categories:
            raise ValueError(
                f'{where}: annotations[{number}] of {str(path)!r} has image_id {a["image_id"]!r} and category_id '
                f'{a["category_id"]!r}, of which one is not in the file. {remedy}'
            )
