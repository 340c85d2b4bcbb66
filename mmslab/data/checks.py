"""Checks of what a run will read and write, made before it starts."""

import json
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any, List, Mapping, Optional, Sequence, Tuple, Union

from mmengine.config import Config
from mmengine.registry import DATASETS

from .classes import class_names, datasets, find_class, shown, type_name

_REMEDIES = {
    'CocoDataset': 'For COCO, download 2017 train, val and annotations from cocodataset.org, unpack them into one folder and set '
    'COCO_ROOT to it (default data/coco). Without COCO, `mmslab demo` trains on a data set that it makes.',
    'ImageNet': 'Set IMAGENET_ROOT to the folder that has train/<class>/ and val/<class>/ (default data/imagenet), which '
    'image-net.org gives out.',
}
_OTHERWISE = (
    'Put the data there, or set data_root, ann_file and data_prefix of the data set to its place. Shapes: `mmslab make-shapes` '
    '(with --classes to classify).'
)

# Of files above this only both ends and the categories are looked at: parsing COCO's takes seconds, and is done once anyway
_PARSE_UP_TO = 64 << 20
_CATEGORIES_UP_TO = 16 << 20


def check_writable(folder: Union[str, os.PathLike], name: str) -> None:
    """Makes ``folder`` if missing; raises OSError, naming ``name``, unless files can be written there."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as e:
        raise OSError(f'{name}={str(folder)!r} cannot be written ({e.strerror}). Choose a folder of your own.') from e


def check_datasets(cfg: Config, splits: Tuple[str, ...] = ('train', 'val')) -> None:
    """Checks that the annotation files and image folders of ``cfg``'s data loaders and evaluators are there and make sense.

    Raises:
        FileNotFoundError: For a missing file or folder, saying where the data comes from.
        ValueError: For an annotation file that is no COCO file, or names no image or no category; one whose categories
            are not the classes of the data set, or are in another order, by which mmdet numbers the labels.
    """
    scope = cfg.get('default_scope')
    for split in splits:
        loader = cfg.get(f'{split}_dataloader')
        found = [each for _, each in datasets(loader.get('dataset') if loader else None, split)]
        for dataset in found:
            _check_dataset(dataset, f'{split}_dataloader', scope)
        evaluators = cfg.get(f'{split}_evaluator') if found else None
        for evaluator in evaluators if isinstance(evaluators, (list, tuple)) else [evaluators or {}]:
            if isinstance(evaluator, dict) and isinstance(evaluator.get('ann_file'), str):
                _check_evaluator(evaluator, f'{split}_evaluator', found, scope)


def _check_dataset(dataset: Mapping, where: str, scope: Optional[str]) -> None:
    root = Path(dataset.get('data_root') or '')
    prefix = dataset.get('data_prefix') or {}
    if dataset.get('type') == 'ImageNet' and dataset.get('split') and not prefix:
        prefix = dataset['split']
    folders = [root / p for p in (prefix.values() if isinstance(prefix, dict) else [prefix]) if isinstance(p, str)]
    files = [root / f for f in [dataset.get('ann_file')] if f]
    for path in files + folders:
        if not path.exists():
            if (dataset.get('metainfo') or {}).get('classes') and 'coco' not in str(root).lower():  # not COCO itself
                raise FileNotFoundError(f'{where}: {str(path)!r} does not exist. {_OTHERWISE}')
            raise FileNotFoundError(
                f'{where}: {str(path)!r} does not exist. {_REMEDIES.get(dataset.get("type"), _OTHERWISE)}'
            )
    for folder in folders:
        if next(os.scandir(folder), None) is None:
            raise FileNotFoundError(f'{where}: the image folder {str(folder)!r} is empty. Put the images there.')
    for path in files:
        if path.suffix == '.json' and (dataset.get('type') is None or _is_coco(dataset, scope)):
            _check_coco(path, where, dataset, class_names(dataset, scope, where))


def _is_coco(dataset: Mapping, scope: Optional[str]) -> bool:
    """Whether a data set reads its annotations as mmdet's CocoDataset does."""
    if type_name(dataset) == 'CocoDataset':
        return True
    load = getattr(find_class(DATASETS, dataset, scope), 'load_data_list', None)
    return getattr(load, '__qualname__', '') == 'CocoDataset.load_data_list'


def _check_evaluator(evaluator: Mapping, where: str, found: List[Mapping], scope: Optional[str]) -> None:
    path = Path(evaluator['ann_file'])
    if not path.is_file() and '://' not in evaluator['ann_file']:
        raise FileNotFoundError(
            f'{where}: ann_file={str(path)!r} does not exist. Give that of the data set, with its data_root before it.'
        )
    if type_name(evaluator) not in ('CocoMetric', 'FasterCocoMetric') or len(found) != 1:
        return
    (dataset,) = found
    own = Path(dataset.get('data_root') or '') / (dataset.get('ann_file') or '')
    if not _is_coco(dataset, scope) or not own.is_file() or own.samefile(path):
        return
    names = class_names(dataset, scope, where)
    if path.stat().st_size > _PARSE_UP_TO or own.stat().st_size > _PARSE_UP_TO:
        _check_categories(_categories(path), names, path, where)
        return
    content, images = _parsed(path, where), _parsed(own, where)['images']
    _check_categories(content.get('categories'), names, path, where)
    missing = {i['id'] for i in images} - {i.get('id') for i in content.get('images') or []}
    if missing:
        raise ValueError(
            f'{where}: ann_file={str(path)!r} lacks {len(missing)} of the {len(images)} images that {str(own)!r} has, first id '
            f'{min(missing, key=str)!r}. Evaluate with the annotation file of the data set.'
        )


def _parsed(path: Path, where: str) -> Any:
    try:
        return json.loads(path.read_text(encoding='utf-8'))
    except ValueError as e:
        raise ValueError(
            f'{where}: the annotation file {str(path)!r} is no JSON file ({e}). Download or make it again.'
        ) from e


def _categories(path: Path) -> Optional[list]:
    """The list of categories in a COCO file, found by its key without parsing the rest; None if there is none."""
    key = b'"categories"'
    with path.open('rb') as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.rfind(key)  # COCO's own files end with them
        while at >= 0:
            text = data[at + len(key) : at + len(key) + _CATEGORIES_UP_TO].decode('utf-8', errors='replace')
            try:
                found, _ = json.JSONDecoder().raw_decode(text.lstrip().removeprefix(':').lstrip())
            except ValueError:
                found = None
            if isinstance(found, list) and all(isinstance(c, dict) and 'name' in c for c in found):
                return found
            at = data.rfind(key, 0, at)
    return None


def _check_categories(categories: Optional[list], names: Optional[Sequence[str]], path: Path, where: str) -> None:
    if categories is None or names is None:
        return
    present = [c.get('name') for c in categories if isinstance(c, dict)]
    order = [name for name in present if name in names]
    missing = [name for name in names if name not in present]
    if missing:
        raise ValueError(
            f'{where}: the classes {shown(missing)} are not among the categories of {str(path)!r}, {shown(present)}, and the '
            'labels of all classes after them would shift. Name those of the file, metainfo=dict(classes=(...)) in the data '
            'set of every data loader, or add the categories to the file.'
        )
    if tuple(order) != tuple(names):
        i = next(i for i, name in enumerate(order) if i >= len(names) or name != names[i])
        raise ValueError(
            f'{where}: the classes {shown(names)} have another order than the categories of {str(path)!r}, {shown(order)}, '
            f'which numbers the labels: label {i} would be learned as {order[i]!r}. Give metainfo=dict(classes=(...)) and the '
            'categories of every annotation file the same order.'
        )


def _check_coco(path: Path, where: str, dataset: Mapping, names: Optional[Sequence[str]]) -> None:
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
        _check_categories(_categories(path), names, path, where)
        return
    content = _parsed(path, where)
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
    _check_categories(content['categories'], names, path, where)
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
