import copy
from pathlib import Path

import mmdet
import pytest
from mmengine.config import Config

from mmslab.data.classes import check_classes, check_trained_classes
from mmslab.data.shapes import make_shape_classes

SHAPES = ('disc', 'rectangle', 'triangle', 'star', 'ring')


def detector(classes=SHAPES, val_classes=SHAPES, **model):
    """A config as mmdet's are, of the parts that have to do with classes."""

    def loader(names):
        metainfo = {} if names is None else dict(metainfo=dict(classes=names))
        return dict(dataset=dict(type='CocoDataset', ann_file='a.json', **metainfo))

    return Config(
        dict(
            default_scope='mmdet',
            model=model,
            train_dataloader=loader(classes),
            val_dataloader=loader(val_classes),
            test_dataloader=loader(val_classes),
        )
    )


def head(num_classes, type='Shared2FCBBoxHead', **kwargs):
    return dict(type=type, num_classes=num_classes, **kwargs)


@pytest.mark.parametrize(
    'model, keys',
    [
        (dict(bbox_head=head(80, 'RetinaHead')), ['model.bbox_head.num_classes']),
        (
            dict(roi_head=dict(bbox_head=head(80), mask_head=head(80, 'FCNMaskHead'))),
            ['model.roi_head.bbox_head.num_classes', 'model.roi_head.mask_head.num_classes'],
        ),
        (
            dict(roi_head=dict(bbox_head=[head(5), head(80), head(80)])),
            ['model.roi_head.bbox_head.1.num_classes', 'model.roi_head.bbox_head.2.num_classes'],
        ),
        (dict(detector=dict(bbox_head=head(80, 'RetinaHead'))), ['model.detector.bbox_head.num_classes']),
        (dict(panoptic_head=dict(num_things_classes=80, num_stuff_classes=0)), ['panoptic_head.num_things_classes']),
        (dict(panoptic_head=dict(num_things_classes=5, num_stuff_classes=53)), ['panoptic_head.num_stuff_classes']),
    ],
)
def test_another_number_of_classes_is_named(model, keys):
    with pytest.raises(ValueError) as e:
        check_classes(detector(**model))
    message = str(e.value)
    assert "train_dataloader.dataset has the 5 classes ('disc', 'rectangle'" in message
    right = 0 if 'stuff' in keys[0] else 5
    wrong = 53 if 'stuff' in keys[0] else 80
    assert all(f'{key}={wrong}' in message and f'{key}={right}' in message for key in keys), message
    assert message.count('num_classes') in (0, 2 * len(keys)) and '--cfg-options' in message
    named = Config(dict(model=copy.deepcopy(model)))
    named.merge_from_dict({key if key.startswith('model.') else f'model.{key}': right for key in keys})
    check_classes(detector(**named.model))


def test_a_number_left_to_the_heads_default_is_named():
    with pytest.raises(ValueError, match=r'model.roi_head.bbox_head.num_classes=80, but .* 5 classes'):
        check_classes(detector(roi_head=dict(bbox_head=dict(type='Shared2FCBBoxHead'))))


def test_what_counts_something_else_is_let_pass():
    check_classes(
        detector(
            backbone=dict(num_classes=1000),
            rpn_head=head(1, 'RPNHead'),
            roi_head=dict(
                bbox_head=head(5),
                mask_head=head(80, 'FCNMaskHead', class_agnostic=True),
                semantic_head=head(183, 'FusedSemanticHead'),
            ),
            reid=dict(head=head(380, 'LinearReIDHead')),
        )
    )


def test_a_data_set_without_metainfo_has_the_classes_of_its_own():
    check_classes(detector(None, None, bbox_head=head(80, 'RetinaHead')))
    with pytest.raises(
        ValueError, match="the 80 classes of CocoDataset itself .'person', .*'toothbrush'.*metainfo=dict"
    ):
        check_classes(detector(None, None, bbox_head=head(5, 'RetinaHead')))


def test_a_panoptic_set_has_things_and_stuff():
    cfg = detector(
        None, None, roi_head=dict(bbox_head=head(80)), semantic_head=dict(num_things_classes=80, num_stuff_classes=53)
    )
    for split in ('train', 'val'):
        cfg[f'{split}_dataloader'].dataset.type = 'CocoPanopticDataset'
    check_classes(cfg)
    cfg.model.roi_head.bbox_head.num_classes = 133
    with pytest.raises(ValueError, match=r'bbox_head.num_classes=133, but .* 133 classes .*80 things and 53 of stuff'):
        check_classes(cfg)


@pytest.mark.parametrize('wrapped', [False, True])
def test_classes_in_another_order_are_named(wrapped):
    swapped = ('disc', 'triangle', 'rectangle', 'star', 'ring')
    cfg = detector(SHAPES, swapped, bbox_head=head(5, 'RetinaHead'))
    path = 'val_dataloader.dataset'
    if wrapped:
        inner = dict(type='ConcatDataset', datasets=[cfg.train_dataloader.dataset, cfg.val_dataloader.dataset])
        cfg.val_dataloader.dataset = dict(type='RepeatDataset', times=2, dataset=inner)
        path += '.dataset.datasets.1'
    message = f"label 1 is 'triangle' in {path} and 'rectangle' in train_dataloader.dataset.*same order.*metainfo"
    with pytest.raises(ValueError, match=message):
        check_classes(cfg)


def test_other_classes_are_named_but_other_names_are_let_pass():
    with pytest.raises(ValueError, match='val_dataloader.dataset has 4 classes.*train_dataloader.dataset 5.*same'):
        check_classes(detector(SHAPES, SHAPES[:4], bbox_head=head(5, 'RetinaHead')))
    check_classes(detector(('person',), ('pedestrian',), bbox_head=head(1, 'RetinaHead')))
    # classes given as text have no numbers
    cfg = detector(SHAPES, SHAPES[:4], bbox_head=head(256, 'RetinaHead'))
    for split in ('train', 'val'):
        cfg[f'{split}_dataloader'].dataset.return_classes = True
    check_classes(cfg)


@pytest.mark.parametrize(
    'classes, message',
    [
        ('disc', r"train_dataloader.dataset: classes='disc' must be a sequence of names.*\('name', \)"),
        ((1, 2), r'classes=\(1, 2\) must be a sequence of names'),
        (('disc', 'star', 'disc'), r"has \('disc',\) more than once"),
    ],
)
def test_names_that_are_none_are_named(classes, message):
    with pytest.raises(ValueError, match=message):
        check_classes(detector(classes, bbox_head=head(3, 'RetinaHead')))


def test_names_may_be_in_a_file(tmp_path):
    (tmp_path / 'classes.txt').write_text('\n'.join(SHAPES))
    check_classes(detector(str(tmp_path / 'classes.txt'), bbox_head=head(5, 'RetinaHead')))


def classifier(root, num_classes=5, type='CustomDataset', **dataset):
    loaders = {
        f'{split}_dataloader': dict(dataset=dict(type=type, data_root=str(root), data_prefix=split, **dataset))
        for split in ('train', 'val')
    }
    model = dict(type='ImageClassifier', head=dict(type='LinearClsHead', num_classes=num_classes))
    return Config(dict(default_scope='mmpretrain', model=model, **loaders))


def test_a_classifiers_classes_are_its_folders(tmp_path):
    make_shape_classes(tmp_path, num_train=5, num_val=5, size=32, progress=False)
    check_classes(classifier(tmp_path))
    with pytest.raises(
        ValueError, match=r'model.head.num_classes=1000, but train_dataloader.dataset has the 5 classes'
    ):
        check_classes(classifier(tmp_path, 1000))
    mixup = classifier(tmp_path)
    mixup.data_preprocessor = dict(num_classes=1000)
    with pytest.raises(ValueError, match=r'data_preprocessor.num_classes=1000, but'):
        check_classes(mixup)
    with pytest.raises(ValueError, match=r'has 1000 classes, .* but 5 folders, .*from which it takes its labels'):
        check_classes(classifier(tmp_path, 1000, 'ImageNet'))
    check_classes(classifier(tmp_path, classes=['a', 'b', 'c', 'd', 'e']))
    # the label of a folder is its place among those that are there
    (tmp_path / 'val' / 'ring').rename(tmp_path / 'val' / 'circle')
    for more in ({}, dict(classes=['a', 'b', 'c', 'd', 'e'])):
        with pytest.raises(ValueError, match="label 0 is 'circle' in val_dataloader.dataset and 'disc' in"):
            check_classes(classifier(tmp_path, **more))


@pytest.mark.parametrize('meta', ['dataset_meta', 'CLASSES'])
def test_a_checkpoint_of_another_order_is_named(meta):
    cfg = detector(val_classes=('disc', 'triangle', 'rectangle', 'star', 'ring'))

    def trained(classes):
        return dict(meta={meta: dict(classes=classes, palette=None) if meta == 'dataset_meta' else classes})

    check_trained_classes(trained(('disc', 'triangle', 'rectangle', 'star', 'ring')), 'a.pth', cfg)
    with pytest.raises(ValueError, match="label 1 is 'triangle' in test_dataloader.* of checkpoint a.pth"):
        check_trained_classes(trained(SHAPES), 'a.pth', cfg)
    with pytest.raises(ValueError, match='test_dataloader.dataset has 5 classes.*checkpoint a.pth 2'):
        check_trained_classes(trained(['a', 'b']), 'a.pth', cfg)
    for unknown in (dict(state_dict={}), dict(meta={}), dict(meta=dict(dataset_meta=[{}])), []):
        check_trained_classes(unknown, 'a.pth', cfg)


# what mmdet itself ships, of every kind that counts classes in a way of its own
@pytest.mark.parametrize(
    'name',
    [
        'htc/htc_r50_fpn_1x_coco.py',
        'panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco.py',
        'mask2former/mask2former_r50_8xb2-lsj-50e_coco.py',
        'yolact/yolact_r50_1xb8-55e_coco.py',
        'rpn/rpn_r50_fpn_1x_coco.py',
        'soft_teacher/soft-teacher_faster-rcnn_r50-caffe_fpn_180k_semi-0.1-coco.py',
        'pascal_voc/faster-rcnn_r50_fpn_1x_voc0712.py',
        'lvis/mask-rcnn_r50_fpn_sample1e-3_ms-1x_lvis-v1.py',
        'openimages/faster-rcnn_r50_fpn_32xb2-1x_openimages.py',
        'grounding_dino/grounding_dino_swin-t_finetune_16xb2_1x_coco.py',
        'strongsort/strongsort_yolox_x_8xb4-80e_crowdhuman-mot17halftrain_test-mot17halfval.py',
        'mask2former_vis/mask2former_r50_8xb2-8e_youtubevis2019.py',
    ],
)
def test_configs_of_mmdet_are_let_pass(name):
    cfg = Config.fromfile(Path(mmdet.__file__).parent / '.mim' / 'configs' / name)
    check_classes(cfg, ('train', 'val'))
    check_classes(cfg, ('test',))
