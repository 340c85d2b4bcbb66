import hashlib
import json

import cv2
import numpy as np
import pytest
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from mmslab.data.shapes import CLASSES, draw, make_shape_classes, make_shapes

SMALL = dict(num_train=6, num_val=4, size=64, progress=False)


def digest(folder):
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.rglob('*') if p.is_file()
    }


def test_the_same_bytes_every_time(tmp_path):
    for name in 'ab':
        make_shapes(tmp_path / name, **SMALL)
    assert digest(tmp_path / 'a') == digest(tmp_path / 'b') and len(digest(tmp_path / 'a')) == 12
    make_shapes(tmp_path / 'c', **SMALL, seed=1)
    a, c = digest(tmp_path / 'a'), digest(tmp_path / 'c')
    assert all(a[k] != c[k] for k in a)


def test_annotations_beside_the_images(tmp_path):
    for layout in ('coco', 'folders'):
        make_shapes(tmp_path / layout, layout=layout, **SMALL)
    for split in ('train', 'val'):
        plain = tmp_path / 'coco' / 'annotations' / f'instances_{split}.json'
        beside = tmp_path / 'folders' / split / '_annotations.coco.json'
        assert beside.read_text() == plain.read_text()
    assert not (tmp_path / 'folders' / 'annotations').exists()
    with pytest.raises(FileExistsError, match='holds a data set already'):
        make_shapes(tmp_path / 'folders', layout='folders', **SMALL)


@pytest.mark.parametrize('masks', ['polygon', 'rle', 'mixed'])
def test_annotations_say_what_is_in_the_images(tmp_path, masks):
    make_shapes(tmp_path, **{**SMALL, 'num_train': 12}, masks=masks)
    coco = COCO(tmp_path / 'annotations' / 'instances_train.json')
    assert [c['name'] for c in coco.loadCats(coco.getCatIds())] == list(CLASSES)
    kinds = set()
    for image in coco.loadImgs(coco.getImgIds()):
        picture = cv2.imread(str(tmp_path / 'train' / image['file_name']))
        assert picture.shape == (64, 64, 3)
        _, instances = draw(np.random.default_rng([0, 0, image['id']]), 64, 6)
        annotations = coco.loadAnns(coco.getAnnIds(image['id']))
        assert [a['category_id'] - 1 for a in annotations] == [label for label, _ in instances]
        union = np.zeros((64, 64), int)
        for annotation, (_, mask) in zip(annotations, instances):
            kinds.add(type(annotation['segmentation']))
            rebuilt = coco.annToMask(annotation).astype(bool)
            ys, xs = np.nonzero(mask)
            box = [xs.min(), ys.min(), xs.max() + 1 - xs.min(), ys.max() + 1 - ys.min()]
            assert annotation['bbox'] == box and annotation['area'] == mask.sum()
            if isinstance(annotation['segmentation'], dict):
                assert (rebuilt == mask).all()
            else:
                assert (rebuilt & mask).sum() / (rebuilt | mask).sum() > 0.9
            union += mask
        assert union.max() <= 1  # visible parts do not overlap
    assert kinds == ({dict} if masks == 'rle' else {dict, list})


def test_shapes_of_all_classes_and_sizes():
    labels, areas, covered = [], [], 0
    for i in range(150):
        _, instances = draw(np.random.default_rng([1, i]), 128, 6)
        labels += [label for label, _ in instances]
        areas += [m.sum() for _, m in instances]
        covered += any(cv2.connectedComponents(m.astype(np.uint8))[0] > 2 for _, m in instances)
    counts = np.bincount(labels, minlength=len(CLASSES))
    assert counts.min() > 0.12 * counts.sum()
    assert np.percentile(areas, 5) < 16**2 and np.percentile(areas, 95) > 44**2
    assert covered  # some are cut in two by others


@pytest.mark.parametrize(
    'kwargs, message',
    [
        (dict(num_train=0), 'num_train must be at least 1'),
        (dict(size=16), 'size must be at least 32'),
        (dict(max_shapes=0), 'max_shapes must be at least 1'),
        (dict(masks='bitmap'), "masks must be one of .*'bitmap'"),
        (dict(layout='flat'), "layout must be one of .*'folders'.*'flat'"),
    ],
)
def test_bad_arguments_are_named(tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make_shapes(tmp_path / 'out', **{**SMALL, **kwargs})
    assert not (tmp_path / 'out').exists()


def test_a_data_set_is_not_overwritten(tmp_path):
    make_shapes(tmp_path, **SMALL)
    before = digest(tmp_path)
    with pytest.raises(FileExistsError, match='holds a data set already.*--force'):
        make_shapes(tmp_path, **SMALL, seed=2)
    assert digest(tmp_path) == before
    make_shapes(tmp_path, **SMALL, seed=2, force=True)
    assert json.loads((tmp_path / 'annotations' / 'instances_val.json').read_text())['info']['seed'] == 2


def test_an_interrupted_run_leaves_no_annotations(tmp_path, monkeypatch):
    calls = []

    def failing(path, image, *args):
        calls.append(path)
        return len(calls) < 8

    monkeypatch.setattr('mmslab.data.shapes.cv2.imwrite', failing)
    with pytest.raises(OSError, match='cannot be written'):
        make_shapes(tmp_path / 'out', **SMALL)
    assert not list((tmp_path / 'out' / 'annotations').iterdir())
    (tmp_path / 'file').write_text('mine')
    with pytest.raises(OSError, match='out=.*cannot be written'):
        make_shapes(tmp_path / 'file' / 'sub', **SMALL)


def test_rle_counts_are_text(tmp_path):
    make_shapes(tmp_path, **SMALL, masks='rle')
    content = json.loads((tmp_path / 'annotations' / 'instances_train.json').read_text())
    rle = content['annotations'][0]['segmentation']
    assert coco_mask.decode(rle).sum() == content['annotations'][0]['area']


def test_classes_are_laid_out_as_imagenet_is(tmp_path):
    numbers = dict(num_train=10, num_val=5, size=48, progress=False)
    for name in 'ab':
        assert make_shape_classes(tmp_path / name, **numbers) == dict(train=10, val=5)
    assert digest(tmp_path / 'a') == digest(tmp_path / 'b')
    for name in CLASSES:
        files = sorted((tmp_path / 'a' / 'train' / name).iterdir())
        assert len(files) == 2 and cv2.imread(str(files[0])).shape == (48, 48, 3)
    with pytest.raises(FileExistsError, match='holds a data set already'):
        make_shape_classes(tmp_path / 'a', **numbers)
    with pytest.raises(ValueError, match='num_val must be at least 5'):
        make_shape_classes(tmp_path / 'c', num_val=4, progress=False)
