"""Small data sets of shapes, made in seconds: instances in COCO's format, and classes laid out as ImageNet is."""

import json
import os
from pathlib import Path
from typing import Dict, List, Optional, Tuple, Union

import cv2
import numpy as np
from pycocotools import mask as coco_mask
from rich.progress import track

from .checks import check_writable

CLASSES = ('disc', 'rectangle', 'triangle', 'star', 'ring')
MASKS = ('mixed', 'polygon', 'rle')
LAYOUTS = dict(coco='annotations/instances_{}.json', folders='{}/_annotations.coco.json')

# An instance counts if at least this many pixels, and this share of it, are left visible by those above it
_MIN_PIXELS, _MIN_VISIBLE = 40, 0.35


def make_shapes(
    out: Union[str, os.PathLike],
    num_train: int = 2000,
    num_val: int = 250,
    size: int = 128,
    max_shapes: int = 6,
    masks: str = 'mixed',
    layout: str = 'coco',
    seed: int = 0,
    force: bool = False,
    progress: bool = True,
) -> Dict[str, int]:
    """Writes ``out/{train,val}/*.jpg``, and ``out/annotations/instances_{train,val}.json`` or another of ``LAYOUTS``.

    Textured backgrounds; discs, rectangles, triangles, stars and rings from an eighth to over a half of the
    image side, textured too, turned at random, covering each other. An instance's mask is what is visible of
    it; its colour says nothing of its class. The same arguments give the same bytes.

    Args:
        out (str | Path): A folder, made if missing.
        num_train, num_val (int): Images in each split.
        size (int): Pixels along a side of the square images, at least 32.
        max_shapes (int): Shapes in an image at the most.
        masks (str): 'polygon', 'rle' (COCO's compressed run lengths), or 'mixed' (image by image). A shape with a
            hole is written as RLE in any case.
        layout (str): Where the annotations are: 'coco' (default), or 'folders', beside the images.
        seed (int): Of the random generator.
        force (bool): Whether to write over a data set that is already in ``out``.
        progress (bool): Whether to show a progress bar.

    Returns:
        dict[str, int]: Instances in each split.

    Raises:
        ValueError: For a number, a kind of masks or a layout out of range.
        FileExistsError: If ``out`` has annotations of this data set and ``force`` is not set.
        OSError: If ``out`` cannot be written.
    """
    _check_numbers(num_train=(num_train, 1), num_val=(num_val, 1), size=(size, 32), max_shapes=(max_shapes, 1))
    if masks not in MASKS:
        raise ValueError(f'masks must be one of {MASKS}, but got {masks!r}.')
    if layout not in LAYOUTS:
        raise ValueError(f'layout must be one of {tuple(LAYOUTS)}, but got {layout!r}.')
    out = Path(out)
    annotations = {split: out / LAYOUTS[layout].format(split) for split in ('train', 'val')}
    if not force and any(p.exists() for p in annotations.values()):
        raise FileExistsError(f'out={str(out)!r} holds a data set already. Choose another folder, or pass --force.')
    check_writable(out, 'out')
    for path in annotations.values():
        path.parent.mkdir(exist_ok=True)
    counts, files = {}, {}
    for split_id, (split, number) in enumerate((('train', num_train), ('val', num_val))):
        (out / split).mkdir(exist_ok=True)
        images: List[dict] = []
        instances: List[dict] = []
        steps = range(1, number + 1)
        for image_id in track(steps, description=f'making {split}', disable=not progress, transient=True):
            # a generator for each image: it stays the same whatever the number of images
            rng = np.random.default_rng([seed, split_id, image_id])
            image, found = draw(rng, size, max_shapes)
            name = f'{image_id:06d}.jpg'
            _write(out / split / name, image)
            images.append(dict(id=image_id, file_name=name, height=size, width=size))
            as_polygon = masks == 'polygon' or (masks == 'mixed' and image_id % 2 == 0)
            for label, mask in found:
                instances.append(
                    dict(
                        id=len(instances) + 1,
                        image_id=image_id,
                        category_id=label + 1,
                        iscrowd=0,
                        **_geometry(mask, as_polygon),
                    )
                )
        content = dict(
            info=dict(description='overlapping shapes', seed=seed),
            categories=[dict(id=i + 1, name=c) for i, c in enumerate(CLASSES)],
            images=images,
            annotations=instances,
        )
        files[annotations[split]] = json.dumps(content, sort_keys=True)
        counts[split] = len(instances)
    for path, text in files.items():  # last, so that a run that was interrupted leaves nothing that looks complete
        path.write_text(text)
    return counts


def make_shape_classes(
    out: Union[str, os.PathLike],
    num_train: int = 2000,
    num_val: int = 250,
    size: int = 64,
    seed: int = 0,
    force: bool = False,
    progress: bool = True,
) -> Dict[str, int]:
    """Writes a classification set, ``out/{train,val}/<class>/*.jpg``, as ImageNet is laid out: one shape in an image.

    Args:
        out (str | Path): A folder, made if missing.
        num_train, num_val (int): Images in each split, the classes in turn.
        size (int): Pixels along a side of the square images, at least 32.
        seed (int): Of the random generator.
        force (bool): Whether to write over a set that is already in ``out``.
        progress (bool): Whether to show a progress bar.

    Returns:
        dict[str, int]: Images in each split.

    Raises:
        ValueError, FileExistsError, OSError: See :func:`make_shapes`.
    """
    _check_numbers(num_train=(num_train, len(CLASSES)), num_val=(num_val, len(CLASSES)), size=(size, 32))
    out = Path(out)
    if not force and any((out / split).exists() for split in ('train', 'val')):
        raise FileExistsError(f'out={str(out)!r} holds a data set already. Choose another folder, or pass --force.')
    check_writable(out, 'out')
    for split_id, (split, number) in enumerate((('train', num_train), ('val', num_val))):
        for name in CLASSES:
            (out / split / name).mkdir(parents=True, exist_ok=True)
        for i in track(range(number), description=f'making {split}', disable=not progress, transient=True):
            rng = np.random.default_rng([seed, 2 + split_id, i])
            label = i % len(CLASSES)
            image = _texture(rng, size, contrast=25)
            mask = _shape(rng, label, size, smallest=4, largest=2.2)
            image[mask] = _texture(rng, size, contrast=12)[mask]
            _write(out / split / CLASSES[label] / f'{i:06d}.jpg', _noisy(rng, image))
    return dict(train=num_train, val=num_val)


def _check_numbers(**numbers: Tuple[int, int]) -> None:
    for name, (value, least) in numbers.items():
        if value < least:
            raise ValueError(f'{name} must be at least {least}, but got {value}.')


def _write(path: Path, image: np.ndarray) -> None:
    if not cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_QUALITY, 92]):
        raise OSError(f'{str(path)!r} cannot be written. Check the folder and the disk.')


def _noisy(rng: np.random.Generator, image: np.ndarray) -> np.ndarray:
    return np.clip(image + rng.normal(0, 5, image.shape), 0, 255).astype(np.uint8)


def draw(rng: np.random.Generator, size: int, max_shapes: int) -> Tuple[np.ndarray, List[Tuple[int, np.ndarray]]]:
    """One image ``(size, size, 3)``, uint8, and the class and visible mask (bool) of each shape in it."""
    image = _texture(rng, size, contrast=25)
    shapes: List[Tuple[int, np.ndarray, int]] = []
    for _ in range(int(rng.integers(1, max_shapes + 1))):
        label = int(rng.integers(len(CLASSES)))
        mask = _shape(rng, label, size)
        full = int(mask.sum())
        if full < _MIN_PIXELS:
            continue
        colour = _texture(rng, size, contrast=12)
        image[mask] = colour[mask]
        shapes = [(lab, m & ~mask, n) for lab, m, n in shapes] + [(label, mask, full)]
    visible = [(lab, m) for lab, m, n in shapes if m.sum() >= max(_MIN_PIXELS, _MIN_VISIBLE * n)]
    return _noisy(rng, image), visible


def _texture(rng: np.random.Generator, size: int, contrast: float) -> np.ndarray:
    """A plane of one colour with waves and blotches over it, float32."""
    y, x = np.mgrid[:size, :size].astype(np.float32) / size
    plane = np.zeros((size, size), np.float32)
    for _ in range(2):
        fy, fx, phase = rng.uniform(-12, 12, 3)
        plane += np.sin(2 * np.pi * (fy * y + fx * x) + phase)
    blotches = rng.normal(0, 1, (8, 8)).astype(np.float32)
    plane += cv2.resize(blotches, (size, size), interpolation=cv2.INTER_LINEAR)
    base = rng.uniform(30, 225, 3).astype(np.float32)
    tint = rng.uniform(0.5, 1, 3).astype(np.float32)
    return base + contrast * plane[..., None] * tint


def _shape(rng: np.random.Generator, label: int, size: int, smallest: float = 13, largest: float = 3.5) -> np.ndarray:
    """The mask (bool) of a shape of class ``label``, its centre inside, its radius a share of ``size``."""
    radius = float(np.exp(rng.uniform(np.log(size / smallest), np.log(size / largest))))
    centre = rng.uniform(0.08, 0.92, 2) * size
    turn = rng.uniform(0, 2 * np.pi)
    stretch = rng.uniform(0.7, 1.0)
    mask = np.zeros((size, size), np.uint8)
    if CLASSES[label] in ('disc', 'ring'):
        axes = (int(round(radius)), int(round(radius * stretch)))
        cv2.ellipse(mask, tuple(np.int32(centre).tolist()), axes, float(np.degrees(turn)), 0, 360, 1, -1)
        if CLASSES[label] == 'ring':
            hole = tuple(max(1, int(round(a * 0.55))) for a in axes)
            cv2.ellipse(mask, tuple(np.int32(centre).tolist()), hole, float(np.degrees(turn)), 0, 360, 0, -1)
        return mask.astype(bool)
    if CLASSES[label] == 'rectangle':
        angles, radii = np.array([0.25, 0.75, 1.25, 1.75]) * np.pi, np.full(4, radius)
    elif CLASSES[label] == 'triangle':
        angles, radii = np.arange(3) * 2 * np.pi / 3, np.full(3, radius)
    else:
        angles, radii = np.arange(10) * np.pi / 5, np.where(np.arange(10) % 2, 0.42 * radius, radius)
    points = np.stack([np.cos(angles) * radii, np.sin(angles) * radii * stretch], 1)
    rotation = np.array([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    cv2.fillPoly(mask, [np.round(points @ rotation.T + centre).astype(np.int32)], 1)
    return mask.astype(bool)


def _geometry(mask: np.ndarray, as_polygon: bool) -> dict:
    """COCO's bbox, area and segmentation of a mask."""
    rle = coco_mask.encode(np.asfortranarray(mask.astype(np.uint8)))
    segmentation: Optional[Union[list, dict]] = _polygon(mask) if as_polygon else None
    if segmentation is None:
        segmentation = dict(size=[int(v) for v in rle['size']], counts=rle['counts'].decode())
    return dict(
        segmentation=segmentation,
        area=int(mask.sum()),
        bbox=[float(v) for v in coco_mask.toBbox(rle)],
    )


def _polygon(mask: np.ndarray) -> Optional[List[List[float]]]:
    """The outlines of a mask, or None if it has a hole.

    Outlines run through the centres of border pixels; on an enlarged mask those are close to the pixels' outer edges.
    """
    scale = 4
    enlarged = np.kron(mask, np.ones((scale, scale))).astype(np.uint8)
    outlines, hierarchy = cv2.findContours(enlarged, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    if (hierarchy[0, :, 3] >= 0).any():
        return None
    return [((o.reshape(-1) + 0.5) / scale).tolist() for o in outlines]
