"""Detectors of mmdet with a small SLABSwin, through deploy: the short form of tools/check_detectors.py."""

from pathlib import Path

import mmdet
import pytest
from mmengine.registry import MODELS, init_default_scope

from mmslab.deploy import convert, families
from mmslab.deploy.families import FAMILIES, check_families, check_family, families_table, randomized, with_slab_swin

CONFIGS = Path(mmdet.__file__).parent / '.mim' / 'configs'
SMALLER = {
    'RTMDet': {
        'model.neck.out_channels': 16,
        'model.bbox_head.in_channels': 16,
        'model.bbox_head.feat_channels': 16,
        'model.bbox_head.num_classes': 3,
    },
    'DINO': {
        'model.num_queries': 20,
        'model.encoder.num_layers': 1,
        'model.decoder.num_layers': 2,
        'model.bbox_head.num_classes': 3,
        'model.test_cfg.max_per_img': 20,
    },
}


def small(family, **backbone):
    """The config of a family with SLABSwin, with fewer layers and channels in the head too."""
    arch = dict(embed_dims=8, depths=(2, 1, 1, 1), num_heads=(1, 2, 4, 8))
    cfg = with_slab_swin(CONFIGS / FAMILIES[family], arch=arch, **backbone)
    taker = cfg.model.neck
    taker.in_channels = [c * 8 // families.EMBED_DIMS for c in taker.in_channels]
    cfg.merge_from_dict(SMALLER[family])
    return cfg


def detector(family):
    """Its model, in eval mode at gamma 0, with weights and statistics that all count."""
    init_default_scope('mmdet')
    model = MODELS.build(small(family).model)
    model.init_weights()
    return randomized(model).eval()


@pytest.mark.parametrize('family', SMALLER)
def test_detectors_whose_heads_take_more_than_maps_or_whose_necks_take_few_sizes(family):
    checked = check_family(family, small(family), sizes=((64, 96), (75, 70)))
    assert not checked.error and not checked.not_built and checked.worst.relative < 1e-5
    expected = {'backbone', 'neck', 'bbox_head'} | ({'encoder', 'decoder'} if family == 'DINO' else set())
    assert {d.output for d in checked.differences} >= expected


def test_a_wrong_fold_is_an_error_and_a_wrong_config_is_not_built(monkeypatch):
    fold = convert.fold

    def fold_wrongly(model, **kwargs):
        folded = fold(model, **kwargs)
        folded.backbone.norm3.shift.data.add_(1.0)
        return folded

    monkeypatch.setattr(convert, 'fold', fold_wrongly)
    wrong = check_family('RTMDet', small('RTMDet'), sizes=((64, 64),))
    assert 'ValueError: the folded model differs' in wrong.error and wrong.worst is None
    cfg = small('RTMDet')
    cfg.model.neck.type = 'NoSuchNeck'
    unbuilt = check_family('RTMDet', cfg)
    assert 'NoSuchNeck' in unbuilt.not_built and not unbuilt.error
    assert families_table([wrong, unbuilt]).row_count == 2


def test_configs_are_those_of_mmdet(tmp_path):
    for family, path in FAMILIES.items():
        assert (CONFIGS / path).is_file(), family
    yolo = with_slab_swin(CONFIGS / FAMILIES['YOLOv3']).model
    assert yolo.neck.in_channels == [192, 96, 48] and yolo.backbone.out_indices == (1, 2, 3)
    yolof = with_slab_swin(CONFIGS / FAMILIES['YOLOF']).model
    assert yolof.neck.in_channels == 192 and yolof.backbone.out_indices == (3,)
    assert with_slab_swin(CONFIGS / FAMILIES['Mask2Former']).model.panoptic_head.in_channels == [24, 48, 96, 192]
    (tmp_path / 'other.py').write_text("model = dict(type='SSD', backbone=dict(type='SSDVGG'))\n")
    with pytest.raises(ValueError, match='no neck or panoptic_head of .*other.py.* says what channels'):
        with_slab_swin(tmp_path / 'other.py')
    with pytest.raises(ValueError, match="there is no family 'SSD'. Choose from ATSS"):
        next(check_families(['SSD']))
