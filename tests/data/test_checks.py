import json
import os

import pytest
from mmengine.config import Config

from mmslab.data.checks import check_datasets, check_writable
from mmslab.data.shapes import make_shapes


@pytest.fixture
def shapes(tmp_path):
    make_shapes(tmp_path, num_train=2, num_val=2, size=32, progress=False)
    return tmp_path


def config(root, wrapped=False):
    dataset = dict(
        type='CocoDataset',
        data_root=str(root),
        ann_file='annotations/instances_train.json',
        data_prefix=dict(img='train/'),
        metainfo=dict(classes=('disc', 'star')),
        pipeline=[dict(type='LoadAnnotations', with_mask=True)],
    )
    if wrapped:
        dataset = dict(type='RepeatDataset', times=2, dataset=dict(type='ConcatDataset', datasets=[dataset]))
    return Config(dict(train_dataloader=dict(dataset=dataset)))


def _without(entry, key):
    return {k: v for k, v in entry.items() if k != key}


@pytest.mark.parametrize('wrapped', [False, True])
def test_a_good_set_passes_and_a_missing_one_is_named(shapes, wrapped):
    check_datasets(config(shapes, wrapped))
    with pytest.raises(
        FileNotFoundError,
        match='no/annotations.*does not exist.*set data_root, ann_file and data_prefix of the data set',
    ):
        check_datasets(config(shapes / 'no', wrapped))
    with pytest.raises(
        FileNotFoundError, match='no/coco/annotations.*not exist.*cocodataset.org.*COCO_ROOT.*mmslab demo'
    ):
        check_datasets(config(shapes / 'no' / 'coco', wrapped))


def test_an_empty_image_folder_is_named(shapes):
    for image in (shapes / 'train').iterdir():
        image.unlink()
    with pytest.raises(FileNotFoundError, match='image folder .*train.* is empty'):
        check_datasets(config(shapes))


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda c: '{"images": [', 'is no JSON file'),
        (lambda c: [], "has no list 'images'"),
        (lambda c: {**c, 'annotations': None}, "has no list 'annotations'"),
        (lambda c: {**c, 'images': []}, 'has no images, so there is nothing to learn'),
        (lambda c: {**c, 'annotations': []}, 'has no annotations, so there is nothing to learn'),
        (
            lambda c: {**c, 'annotations': [{'id': 1}]},
            r'annotations\[0\] .*lacks one of bbox, category_id, id, image_id',
        ),
        (lambda c: {**c, 'annotations': [{**c['annotations'][0], 'image_id': 99}]}, 'image_id 99'),
        (
            lambda c: {**c, 'annotations': [{**c['annotations'][0], 'bbox': [1, 2, 3]}]},
            r'bbox \[1, 2, 3\], which must be four',
        ),
        (lambda c: {**c, 'annotations': [{**c['annotations'][0], 'bbox': ['1'] * 4}]}, 'which must be four numbers'),
        (
            lambda c: {**c, 'annotations': [_without(c['annotations'][0], 'segmentation')]},
            'lacks one of .*segmentation',
        ),
        (
            lambda c: {**c, 'images': [_without(i, 'file_name') for i in c['images']]},
            r'images\[0\] .*lacks one of .*file_name',
        ),
        (lambda c: {**c, 'images': [_without(i, 'width') for i in c['images']]}, r'images\[0\] .*lacks one of .*width'),
        (
            lambda c: {**c, 'categories': [{**k, 'name': 'cat'} for k in c['categories']]},
            r"the classes \('disc', 'star'\) are not among the categories",
        ),
        (
            lambda c: {**c, 'categories': [{**k, 'name': k['name'].replace('star', 'sun')} for k in c['categories']]},
            r"the classes \('star',\) are not among the categories .*'ring'\), and the labels .* would shift.*metainfo",
        ),
        (
            lambda c: {**c, 'categories': c['categories'][::-1]},
            r"the classes \('disc', 'star'\) have another order .*\('star', 'disc'\).*label 0 would be learned as 'star'",
        ),
        (
            lambda c: {**c, 'categories': [{**k, 'id': 77 + k['id']} for k in c['categories']]},
            r'annotations\[0\] .*category_id',
        ),
    ],
)
def test_malformed_annotations_are_named(shapes, change, message):
    path = shapes / 'annotations' / 'instances_train.json'
    changed = change(json.loads(path.read_text()))
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.raises(ValueError, match=f'instances_train.json.*{message}|{message}'):
        check_datasets(config(shapes))


def test_a_missing_image_is_named(shapes):
    (shapes / 'train' / '000002.jpg').unlink()
    with pytest.raises(FileNotFoundError, match="the image '000002.jpg', which .* names, is not in 'train/'"):
        check_datasets(config(shapes))


def test_a_set_without_annotations_can_be_tested_on(shapes):
    path = shapes / 'annotations' / 'instances_train.json'
    content = json.loads(path.read_text())
    path.write_text(json.dumps(_without(content, 'annotations')))
    cfg = Config(dict(test_dataloader=config(shapes).train_dataloader))
    check_datasets(cfg, ('test',))


def test_a_large_truncated_file_is_named(shapes, monkeypatch):
    monkeypatch.setattr('mmslab.data.checks._PARSE_UP_TO', 10)
    check_datasets(config(shapes))
    path = shapes / 'annotations' / 'instances_train.json'
    path.write_text(path.read_text()[:-3])
    with pytest.raises(ValueError, match='no complete JSON file'):
        check_datasets(config(shapes))


def test_an_output_folder_that_cannot_be_written_is_named(tmp_path):
    check_writable(tmp_path / 'new' / 'folder', 'work_dir')
    assert os.listdir(tmp_path / 'new' / 'folder') == []
    (tmp_path / 'file').write_text('mine')
    with pytest.raises(OSError, match='work_dir=.*file/sub.* cannot be written.*Choose a folder'):
        check_writable(tmp_path / 'file' / 'sub', 'work_dir')
    assert (tmp_path / 'file').read_text() == 'mine'


@pytest.mark.parametrize(
    'dataset, message',
    [
        (dict(type='ImageNet', data_root='no', split='train'), "'no/train' does not exist. Set IMAGENET_ROOT"),
        (
            dict(type='CustomDataset', data_root='no', data_prefix='train'),
            "'no/train' does not exist.*mmslab make-shapes. .with --classes",
        ),
    ],
)
def test_a_missing_classification_set_is_named(dataset, message):
    with pytest.raises(FileNotFoundError, match=message):
        check_datasets(Config(dict(train_dataloader=dict(dataset=dataset))))


def _rewrite(path, change):
    content = json.loads(path.read_text())
    path.write_text(json.dumps(change(content)))


@pytest.mark.parametrize('category', ['sun', 'star'])
def test_mmdet_numbers_labels_as_the_check_says(shapes, category):
    """What the check is for: with a class that the file has not, the labels of mmdet's data set are not those named."""
    from mmdet.datasets import CocoDataset

    args = dict(
        data_root=str(shapes),
        ann_file='annotations/instances_train.json',
        data_prefix=dict(img='train/'),
        metainfo=dict(classes=('disc', category, 'ring')),
    )
    names = {c['id']: c['name'] for c in json.loads((shapes / args['ann_file']).read_text())['categories']}
    labels = {label: names[i] for i, label in CocoDataset(**args, pipeline=[]).cat2label.items()}
    agree = labels == dict(enumerate(args['metainfo']['classes']))
    assert agree == (category == 'star')
    cfg = Config(dict(train_dataloader=dict(dataset=dict(type='CocoDataset', **args))))
    if agree:
        check_datasets(cfg)
    else:
        with pytest.raises(ValueError, match='labels of all classes after them would shift'):
            check_datasets(cfg)


def test_the_categories_of_a_large_file_are_found_without_parsing_it(shapes, monkeypatch):
    monkeypatch.setattr('mmslab.data.checks._PARSE_UP_TO', 10)
    path = shapes / 'annotations' / 'instances_train.json'
    # wherever they stand, and whatever else is called so
    _rewrite(path, lambda c: {'info': {'categories': 'five'}, **c, 'licenses': [{'categories': [1]}]})
    check_datasets(config(shapes))
    _rewrite(path, lambda c: {**c, 'categories': [{**k, 'name': k['name'].upper()} for k in c['categories']]})
    with pytest.raises(ValueError, match=r"the classes \('disc', 'star'\) are not among .*'DISC', 'RECTANGLE'"):
        check_datasets(config(shapes))


def evaluated(root, ann_file):
    cfg = config(root)
    evaluator = dict(type='CocoMetric', ann_file=str(ann_file))
    return Config(dict(val_dataloader=cfg.train_dataloader, val_evaluator=evaluator))


def test_an_evaluators_file_must_be_of_the_data_set(shapes):
    path = shapes / 'annotations' / 'instances_train.json'
    other = shapes / 'other.json'
    check_datasets(evaluated(shapes, path))
    with pytest.raises(FileNotFoundError, match='val_evaluator: ann_file=.*other.json.* does not exist.*data_root'):
        check_datasets(evaluated(shapes, other))
    other.write_text(path.read_text())
    check_datasets(evaluated(shapes, other))
    _rewrite(other, lambda c: {**c, 'categories': c['categories'][::-1]})
    with pytest.raises(ValueError, match='val_evaluator: the classes .* have another order than .*other.json'):
        check_datasets(evaluated(shapes, other))
    other.write_text(path.read_text())
    _rewrite(other, lambda c: {**c, 'images': c['images'][:1]})
    with pytest.raises(
        ValueError, match='val_evaluator: ann_file=.*other.json.* lacks 1 of the 2 images .* first id 2'
    ):
        check_datasets(evaluated(shapes, other))
