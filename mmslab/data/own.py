"""Data of one's own in COCO's format: where it lies in a folder, and what it is like."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from mmengine.config import Config

from .checks import check_datasets
from .classes import class_names

SPLITS = dict(train='training', val='validation')
# of COCO itself and of most tools that export to its format; {} is 'train' or 'val', so that train2017/ and valid/ are found
LAYOUTS = (
    'annotations/instances_{}*.json',
    'annotations/{}*.json',
    '{}*/_annotations.coco.json',
    '{}*/annotations.json',
    '{}*/annotations/*.json',
    'instances_{}*.json',
    '{}*.json',
)
_IMAGES = ('{}*', 'images/{}*', '{}*/images', 'images', '.')


class Split(NamedTuple):
    """An annotation file, what it holds, and the folder that its images' names begin in."""

    ann_file: Path
    images: Path
    content: Dict[str, Any]


class Figures(NamedTuple):
    """What a set is like. Crowds, and boxes less than a pixel wide or high, which mmdet leaves out, are not counted.

    ``classes``: instances of each category, in the file's order. ``sizes``: heights and widths of the images, ``(N, 2)``.
    ``boxes``: widths and heights, ``(M, 2)``; ``of``: the image that each is in, an index. ``masks``: how many have a mask.
    """

    classes: Dict[str, int]
    sizes: np.ndarray
    boxes: np.ndarray
    of: np.ndarray
    masks: int

    @property
    def learnable(self) -> Tuple[str, ...]:
        """The classes that have an instance."""
        return tuple(name for name, count in self.classes.items() if count)

    @property
    def per_image(self) -> np.ndarray:
        """Instances in each image, ``(N, )``."""
        return np.bincount(self.of, minlength=len(self.sizes))


def find_split(
    folder: Path,
    split: str,
    ann_file: Optional[Path] = None,
    images: Optional[Path] = None,
    classes: Optional[Sequence[str]] = None,
) -> Split:
    """Finds and reads the annotations of a split, 'train' or 'val', and finds its images.

    Args:
        folder (Path): The folder of the data set.
        split (str): Its name.
        ann_file, images (Path, optional): Where they are, if not where :data:`LAYOUTS` or COCO have them.
        classes (Sequence[str], optional): What its categories must be among others, in this order.

    Raises:
        FileNotFoundError, ValueError: For a file or folder that is not there or not the only one, no COCO file, or images
            that are not there; see :func:`mmslab.data.checks.check_datasets`.
    """
    ann_file = ann_file or _find_annotations(folder, split)
    if not ann_file.is_file():
        raise FileNotFoundError(f"--{split}-ann {str(ann_file)!r} does not exist. Give a JSON file in COCO's format.")
    try:
        content = json.loads(ann_file.read_text(encoding='utf-8'))
        names = [image['file_name'] for image in content['images']]
    except (ValueError, KeyError, TypeError):
        content, names = {}, []  # what is wrong with it is said below
    folders = [images] if images else _image_folders(folder, split, ann_file)
    sample = names[:: max(1, len(names) // 3)]
    found = next((f for f in folders if f.is_dir() and all((f / name).is_file() for name in sample)), None)
    if found is None:
        missing = next((name for name in sample if not (folders[0] / name).is_file()), None)
        raise FileNotFoundError(
            f'the {SPLITS[split]} image {missing!r}, which {str(ann_file)!r} names, is not in '
            f'{" or ".join(repr(str(f)) for f in folders)}. Give the folder that has it with --{split}-images.'
        )
    dataset = dict(ann_file=str(ann_file.resolve()), data_prefix=dict(img=str(found.resolve())))
    if classes:
        dataset['metainfo'] = dict(classes=list(classes))
    check_datasets(Config({f'{split}_dataloader': dict(dataset=dataset)}), (split,))
    return Split(ann_file, found, content)


def _find_annotations(folder: Path, split: str) -> Path:
    for layout in LAYOUTS:
        found = sorted(folder.glob(layout.format(split)))
        if len(found) > 1:
            raise ValueError(
                f'{str(folder)!r} has several annotation files of a {SPLITS[split]} set: '
                f'{", ".join(repr(str(p)) for p in found)}. Choose one with --{split}-ann.'
            )
        if found:
            return found[0]
    remedy = f'Give its annotation file with --{split}-ann FILE'
    if split == 'val':
        remedy += ', or hold a part of the training images out for it: --hold-out 0.2'
    else:
        others = [p for pattern in ('*.json', 'annotations/*.json') for p in sorted(folder.glob(pattern))]
        if others:
            remedy += f' ({", ".join(repr(str(p)) for p in others[:5])}?)'
    looked = ', '.join(layout.format(split) for layout in LAYOUTS)
    raise FileNotFoundError(
        f'{str(folder)!r} has no {SPLITS[split]} set in a place that is known ({looked}). {remedy}.'
    )


def _image_folders(folder: Path, split: str, ann_file: Path) -> List[Path]:
    found = [ann_file.parent]
    for pattern in _IMAGES:
        found += [folder] if pattern == '.' else sorted(p for p in folder.glob(pattern.format(split)) if p.is_dir())
    return list(dict.fromkeys(found))


def hold_out(content: Dict[str, Any], fraction: float, seed: int = 0) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Parts the images of a COCO file at random, with their annotations: a training set, and ``fraction`` of them held out.

    Raises:
        ValueError: If one of the two would have no image.
    """
    images = sorted(content['images'], key=lambda image: str(image['id']))
    number = round(len(images) * fraction)
    if not 0 < number < len(images):
        raise ValueError(
            f'--hold-out {fraction} of {len(images)} images is {number}, and training and validation need one each at least. '
            'Give a fraction such as 0.2.'
        )
    random.Random(seed).shuffle(images)
    held = {image['id'] for image in images[:number]}
    return tuple(
        {
            **content,
            'images': [i for i in content['images'] if (i['id'] in held) == wanted],
            'annotations': [a for a in content['annotations'] if (a['image_id'] in held) == wanted],
        }
        for wanted in (False, True)
    )


def measure(split: Split) -> Figures:
    """Counts and measures what a split has.

    Raises:
        ValueError: For category names that are not all different, images without a size, annotations without an area, which
            mmdet reads, or a set without an instance to learn.
    """
    where, content = str(split.ann_file), split.content
    categories = {c['id']: c['name'] for c in content['categories']}
    names = class_names(dict(metainfo=dict(classes=list(categories.values()))), None, repr(where))
    sizes = np.array([(i['height'], i['width']) for i in content['images']], dtype=float)
    if not (sizes > 0).all():
        wrong = content['images'][int(np.argmin((sizes > 0).all(1)))]
        raise ValueError(
            f'{where!r}: the image {wrong["file_name"]!r} has no positive height and width. Write its size there.'
        )
    index = {image['id']: n for n, image in enumerate(content['images'])}
    counts, boxes, of, masks = Counter(), [], [], 0
    for number, a in enumerate(content['annotations']):
        if 'area' not in a:
            raise ValueError(
                f'{where!r}: annotations[{number}] has no area, which mmdet and pycocotools read. Write one into every '
                "annotation: where there is no mask, its bbox's width times height."
            )
        width, height = a['bbox'][2:]
        if a.get('iscrowd') or a.get('ignore') or a['area'] <= 0 or width < 1 or height < 1:
            continue
        counts[categories[a['category_id']]] += 1
        boxes.append((width, height))
        of.append(index[a['image_id']])
        masks += bool(a.get('segmentation'))
    if not boxes:
        raise ValueError(f'{where!r} has no instance with a box of a pixel or more, so there is nothing to learn.')
    return Figures({name: counts[name] for name in names}, sizes, np.array(boxes, float), np.array(of), masks)
