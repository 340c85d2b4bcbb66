"""Checks of what a run will read and write, made before it starts."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any, Iterator, Tuple, Union

from mmengine.config import Config, ConfigDict

_REMEDIES = {
    'CocoDataset': 'For COCO, download 2017 train, val and annotations from cocodataset.org, unpack them into one folder and set '
    'COCO_ROOT to it (default data/coco). For shapes run tools/make_shapes.py. Without COCO, `make demo` trains on a data '
    'set that it makes.',
    'ImageNet': 'Set IMAGENET_ROOT to the folder that has train/<class>/ and val/<class>/ (default data/imagenet), which '
    'image-net.org gives out.',
}
_OTHERWISE = (
    'Put the data there, or set data_root to its place. Shapes: tools/make_shapes.py (with --classes to classify).'
)

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
        if node.get('ann_file') or node.get('data_root') or node.get('data_prefix'):
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
    if dataset.get('type') == 'ImageNet' and dataset.get('split') and not prefix:
        prefix = dataset['split']
    folders = [root / p for p in (prefix.values() if isinstance(prefix, dict) else [prefix]) if isinstance(p, str)]
    files = [root / f for f in [dataset.get('ann_file')] if f]
    for path in files + folders:
        if not path.exists():
            raise FileNotFoundError(
                f'{where}: {str(path)!r} does not exist. {_REMEDIES.get(dataset.get("type"), _OTHERWISE)}'
            )
    for folder in folders:
        if next(os.scandir(folder), None) is None:
            raise FileNotFoundError(f'{where}: the image folder {str(folder)!r} is empty. Put the images there.')
    for path in files:
        if path.suffix == '.json' and dataset.get('type') in (None, 'CocoDataset'):
            _check_coco(path, where, dataset)


def _check_coco(path: Path, where: str, dataset: ConfigDict) -> None:
    remedy = 'Download or make it again.'
    prefix = (dataset.get('data_prefix') or {}).get('img', '')
    testing = where == 'test_dataloader'  # COCO's test-dev has no annotations
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
    for key in ('images', 'categories') if testing else ('images', 'annotations', 'categories'):
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise ValueError(
                f'{where}: the annotation file {str(path)!r} has no list {key!r}, which every COCO file has. {remedy}'
            )
        if not content[key]:
            raise ValueError(f'{where}: the annotation file {str(path)!r} has no {key}, so there is nothing to learn.')
    images = {i.get('id') for i in content['images'] if isinstance(i, dict)}
    categories = {c.get('id') for c in content['categories'] if isinstance(c, dict)}
    present = {e.name for e in os.scandir(Path(dataset.get('data_root') or '') / prefix)}
    for number, image in enumerate(content['images']):
        if not isinstance(image, dict) or not {'id', 'file_name', 'height', 'width'} <= set(image):
            raise ValueError(
                f'{where}: images[{number}] of {str(path)!r} lacks one of id, file_name, height, width. {remedy}'
            )
        if '/' not in image['file_name'] and image['file_name'] not in present:
            raise FileNotFoundError(
                f'{where}: the image {image["file_name"]!r}, which {str(path)!r} names, is not in {prefix!r}. Put it there.'
            )
    classes = (dataset.get('metainfo') or {}).get('classes')
    if classes and not set(classes) & {c.get('name') for c in content['categories'] if isinstance(c, dict)}:
        raise ValueError(
            f'{where}: no category of {str(path)!r} is among the classes of metainfo, {tuple(classes)}. Name those of the file.'
        )
    masks = any(t.get('with_mask') for t in dataset.get('pipeline') or [])
    needed = {'id', 'image_id', 'category_id', 'bbox'} | ({'segmentation'} if masks else set())
    for number, a in enumerate(content.get('annotations') or []):
        if not isinstance(a, dict) or not needed <= set(a):
            raise ValueError(
                f'{where}: annotations[{number}] of {str(path)!r} lacks one of {", ".join(sorted(needed))}. {remedy}'
            )
        if not (
            isinstance(a['bbox'], list) and len(a['bbox']) == 4 and all(isinstance(v, (int, float)) for v in a['bbox'])
        ):
            raise ValueError(
                f'{where}: annotations[{number}] of {str(path)!r} has the bbox {a["bbox"]!r}, which must be four numbers, x, y, '
                f'width, height. {remedy}'
            )
        if a['image_id'] not in images or a['category_id'] not in categories:
            raise ValueError(
                f'{where}: annotations[{number}] of {str(path)!r} has image_id {a["image_id"]!r} and category_id '
                f'{a["category_id"]!r}, of which one is not in the file. {remedy}'
            )
