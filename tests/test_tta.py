"""Test-time augmentation, against predictions merged by hand."""

import pickle

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope

from mmslab.apis import build_tester
from mmslab.data.shapes import make_shape_classes, make_shapes
from mmslab.tta import use_tta

from .conftest import ROOT

CLASSIFIER = ROOT / 'configs' / 'demo' / 'slab_pvt_shapes_classes.py'


@pytest.fixture
def at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def iou(box, others):
    low, high = np.maximum(box[:2], others[:, :2]), np.minimum(box[2:], others[:, 2:])
    inside = np.clip(high - low, 0, None).prod(1)
    areas = [(b[..., 2] - b[..., 0]) * (b[..., 3] - b[..., 1]) for b in (box, others)]
    return inside / (areas[0] + areas[1] - inside)


def merged_by_hand(boxes, scores, labels):
    """Greedy non-maximum suppression within each class at IoU 0.5."""
    left, kept = list(np.argsort(-scores, kind='stable')), []
    while left:
        i = left.pop(0)
        kept.append(i)
        overlap = dict(zip(left, iou(boxes[i], boxes[left]))) if left else {}
        left = [j for j in left if labels[j] != labels[i] or overlap[j] <= 0.5]
    return boxes[kept], scores[kept], labels[kept]


def test_a_detector_finds_what_it_finds_in_image_and_mirror_image(at, monkeypatch, untrained_detector):
    config, checkpoint = untrained_detector
    make_shapes(at / 'shapes', num_train=2, num_val=3, size=64, progress=False)
    monkeypatch.setenv('SHAPES_ROOT', str(at / 'shapes'))
    tester = build_tester(config, checkpoint, work_dir='tta', out='tta.pkl', tta=True)
    metrics = tester.test()
    assert 'coco/bbox_mAP' in metrics and 'coco/segm_mAP' not in metrics
    log = next((at / 'tta').glob('*/*.log')).read_text()
    assert "WARNING - --tta: mmdet's DetTTAModel merges boxes alone, so the mask head is left out" in log
    found = pickle.loads((at / 'tta.pkl').read_bytes())

    plain = build_tester(config, checkpoint, work_dir='plain')
    plain.load_or_resume()
    plain.model.eval()
    assert len(found) == 3
    for data, got in zip(plain.test_dataloader.dataset, found):
        all_of = []
        for flip in (False, True):
            inputs = data['inputs'].flip(-1) if flip else data['inputs']
            with torch.no_grad():
                (sample,) = plain.model.test_step(dict(inputs=[inputs], data_samples=[data['data_samples'].clone()]))
            p = sample.pred_instances.numpy()
            boxes = p.bboxes.copy()
            if flip:
                boxes[:, 0], boxes[:, 2] = 64 - p.bboxes[:, 2], 64 - p.bboxes[:, 0]
            all_of.append((boxes, p.scores, p.labels))
        want = merged_by_hand(*(np.concatenate(each) for each in zip(*all_of)))
        mine = [got['pred_instances'][name].numpy() for name in ('bboxes', 'scores', 'labels')]
        assert len(mine[0]) == len(want[0]) > 0
        for a, b in zip(mine, want):
            assert np.allclose(a, b, atol=1e-3), (a, b)


def test_a_classifier_gives_the_mean_of_its_scores(at, monkeypatch):
    make_shape_classes(at / 'classes', num_train=5, num_val=5, size=64, progress=False)
    monkeypatch.setenv('SHAPE_CLASSES_ROOT', str(at / 'classes'))
    cfg = Config.fromfile(CLASSIFIER)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(
            {**cfg.model, 'data_preprocessor': {'type': 'ClsDataPreprocessor', **cfg.data_preprocessor}}
        )
    torch.nn.init.normal_(model.head.fc.weight)
    torch.save(dict(state_dict=model.state_dict()), 'c.pth')
    tester = build_tester(CLASSIFIER, 'c.pth', work_dir='tta', tta=True)
    given = []
    monkeypatch.setattr(tester.test_evaluator, 'process', lambda data_samples, data_batch: given.extend(data_samples))
    monkeypatch.setattr(tester.test_evaluator, 'evaluate', lambda size: {})
    tester.test()
    plain = build_tester(CLASSIFIER, 'c.pth', work_dir='plain')
    plain.load_or_resume()
    plain.model.eval()
    for data, got in zip(plain.test_dataloader.dataset, given):
        scores = []
        for inputs in (data['inputs'], data['inputs'].flip(-1)):
            with torch.no_grad():
                (sample,) = plain.model.test_step(dict(inputs=[inputs], data_samples=[data['data_samples'].clone()]))
            scores.append(sample.pred_score)
        assert torch.allclose(got.pred_score, (scores[0] + scores[1]) / 2, atol=1e-6)
        assert not torch.allclose(scores[0], scores[1], atol=1e-4)
    assert len(given) == 5


def config(**other):
    pipeline = [dict(type='LoadImageFromFile'), dict(type='PackDetInputs', meta_keys=('img_id',))]
    return Config(
        {
            **dict(default_scope='mmdet', model=dict(type='FasterRCNN', roi_head=dict(type='StandardRoIHead'))),
            **dict(test_dataloader=dict(dataset=dict(type='ConcatDataset', datasets=[dict(pipeline=pipeline)]))),
            **dict(test_evaluator=dict(type='CocoMetric', metric='bbox')),
            **other,
        }
    )


def test_what_the_config_says_is_used():
    cfg = config()
    assert use_tta(cfg) is None
    flips = cfg.test_dataloader.dataset.datasets[0].pipeline[-1]
    assert flips.transforms[1][0].meta_keys == ('img_id', 'flip', 'flip_direction') and cfg.model.type == 'DetTTAModel'
    own = [dict(type='TestTimeAug', transforms=[])]
    cfg = config(tta_model=dict(type='Mine', weights=2), tta_pipeline=own, test_evaluator=dict(type='M', metric='segm'))
    assert use_tta(cfg) is None
    assert cfg.model.weights == 2 and cfg.model.module.type == 'FasterRCNN'
    assert cfg.test_dataloader.dataset.datasets[0].pipeline == own


@pytest.mark.parametrize(
    'other, message',
    [
        (dict(default_scope='mmseg'), "default_scope is 'mmseg'. Set tta_model and tta_pipeline"),
        (dict(tta_pipeline=[dict(type='PackDetInputs')]), 'tta_pipeline in the config has no TestTimeAug'),
        (
            dict(test_dataloader=dict(dataset=dict(pipeline=[dict(type='Resize')]))),
            r"last step .* but got \['Resize'\]",
        ),
        (
            dict(test_evaluator=dict(type='CocoMetric', metric=['bbox', 'segm'])),
            'asks for masks, which this model cannot',
        ),
        (
            dict(test_evaluator=[dict(type='CocoPanopticMetric')]),
            'merges boxes alone, and test_evaluator asks for masks',
        ),
    ],
)
def test_bad_use_is_named(other, message):
    cfg = config(**other)
    before = str(cfg)
    with pytest.raises(ValueError, match=f'--tta.*{message}'):
        use_tta(cfg)
    assert str(cfg) == before
