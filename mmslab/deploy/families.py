"""The detectors that mmdet ships, each with a small SLABSwin in it, folded and compared: a check before a release.

One config stands for a family. Left out are those whose backbone is a part of the model, which no other takes the place
of (CornerNet, CentripetalNet, TridentNet, DetectoRS, SSD), which want a teacher or text beside the image (LD, LAD,
Soft Teacher, GLIP, Grounding DINO), proposals from elsewhere (Fast R-CNN) or a GPU (CARAFE, Guided Anchoring), and
trackers.
"""

import copy
import tempfile
from pathlib import Path
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence

import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import MODELS, init_default_scope
from rich.table import Table

from ..apis import without_init_cfg
from ..errors import reason
from .compare import Difference, Size
from .convert import PathLike, deploy

SIZES = ((96, 128), (100, 140))  # the second padded, where the model wants multiples
EMBED_DIMS = 24
FAMILIES = {
    'ATSS': 'atss/atss_r50_fpn_1x_coco.py',
    'AutoAssign': 'autoassign/autoassign_r50-caffe_fpn_1x_coco.py',
    'BoxInst': 'boxinst/boxinst_r50_fpn_ms-90k_coco.py',
    'Cascade Mask R-CNN': 'cascade_rcnn/cascade-mask-rcnn_r50_fpn_1x_coco.py',
    'Cascade RPN': 'cascade_rpn/cascade-rpn_faster-rcnn_r50-caffe_fpn_1x_coco.py',
    'CenterNet': 'centernet/centernet_r18_8xb16-crop512-140e_coco.py',
    'CenterNet, DCNv2': 'centernet/centernet_r18-dcnv2_8xb16-crop512-140e_coco.py',
    'CenterNet, updated': 'centernet/centernet-update_r50_fpn_8xb8-amp-lsj-200e_coco.py',
    'CondInst': 'condinst/condinst_r50_fpn_ms-poly-90k_coco_instance.py',
    'Conditional DETR': 'conditional_detr/conditional-detr_r50_8xb2-50e_coco.py',
    'CrowdDet': 'crowddet/crowddet-rcnn_r50_fpn_8xb2-30e_crowdhuman.py',
    'DAB-DETR': 'dab_detr/dab-detr_r50_8xb2-50e_coco.py',
    'DDOD': 'ddod/ddod_r50_fpn_1x_coco.py',
    'DDQ': 'ddq/ddq-detr-4scale_r50_8xb2-12e_coco.py',
    'Deformable DETR': 'deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',
    'Deformable DETR, two stages': 'deformable_detr/deformable-detr-refine-twostage_r50_16xb2-50e_coco.py',
    'DETR': 'detr/detr_r50_8xb2-150e_coco.py',
    'DINO': 'dino/dino-4scale_r50_8xb2-12e_coco.py',
    'Double Heads': 'double_heads/dh-faster-rcnn_r50_fpn_1x_coco.py',
    'DyHead': 'dyhead/atss_r50_fpn_dyhead_1x_coco.py',
    'Dynamic R-CNN': 'dynamic_rcnn/dynamic-rcnn_r50_fpn_1x_coco.py',
    'Faster R-CNN': 'faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py',
    'FCOS': 'fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py',
    'FoveaBox': 'foveabox/fovea_r50_fpn_4xb4-1x_coco.py',
    'FPG': 'fpg/faster-rcnn_r50_fpg_crop640-50e_coco.py',
    'FreeAnchor': 'free_anchor/freeanchor_r50_fpn_1x_coco.py',
    'FSAF': 'fsaf/fsaf_r50_fpn_1x_coco.py',
    'GFL': 'gfl/gfl_r50_fpn_1x_coco.py',
    'Grid R-CNN': 'grid_rcnn/grid-rcnn_r50_fpn_gn-head_1x_coco.py',
    'GRoIE': 'groie/mask-rcnn_r50_fpn_groie_1x_coco.py',
    'HTC': 'htc/htc_r50_fpn_1x_coco.py',
    'Libra R-CNN': 'libra_rcnn/libra-faster-rcnn_r50_fpn_1x_coco.py',
    'Mask2Former': 'mask2former/mask2former_r50_8xb2-lsj-50e_coco.py',
    'Mask2Former, panoptic': 'mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic.py',
    'MaskFormer': 'maskformer/maskformer_r50_ms-16xb1-75e_coco.py',
    'Mask R-CNN': 'mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py',
    'Mask Scoring R-CNN': 'ms_rcnn/ms-rcnn_r50_fpn_1x_coco.py',
    'NAS-FCOS': 'nas_fcos/nas-fcos_r50-caffe_fpn_nashead-gn-head_4xb4-1x_coco.py',
    'NAS-FPN': 'nas_fpn/retinanet_r50_nasfpn_crop640-50e_coco.py',
    'PAA': 'paa/paa_r50_fpn_1x_coco.py',
    'PAFPN': 'pafpn/faster-rcnn_r50_pafpn_1x_coco.py',
    'Panoptic FPN': 'panoptic_fpn/panoptic-fpn_r50_fpn_1x_coco.py',
    'PISA': 'pisa/retinanet-r50_fpn_pisa_1x_coco.py',
    'PointRend': 'point_rend/point-rend_r50-caffe_fpn_ms-1x_coco.py',
    'QueryInst': 'queryinst/queryinst_r50_fpn_1x_coco.py',
    'RepPoints': 'reppoints/reppoints-moment_r50_fpn-gn_head-gn_1x_coco.py',
    'RetinaNet': 'retinanet/retinanet_r50_fpn_1x_coco.py',
    'RPN': 'rpn/rpn_r50_fpn_1x_coco.py',
    'RTMDet': 'rtmdet/rtmdet_tiny_8xb32-300e_coco.py',
    'RTMDet-Ins': 'rtmdet/rtmdet-ins_tiny_8xb32-300e_coco.py',
    'SABL': 'sabl/sabl-faster-rcnn_r50_fpn_1x_coco.py',
    'SCNet': 'scnet/scnet_r50_fpn_1x_coco.py',
    'SOLO': 'solo/solo_r50_fpn_1x_coco.py',
    'SOLO, decoupled': 'solo/decoupled-solo_r50_fpn_1x_coco.py',
    'SOLOv2': 'solov2/solov2_r50_fpn_1x_coco.py',
    'Sparse R-CNN': 'sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco.py',
    'TOOD': 'tood/tood_r50_fpn_1x_coco.py',
    'VFNet': 'vfnet/vfnet_r50_fpn_1x_coco.py',
    'YOLACT': 'yolact/yolact_r50_1xb8-55e_coco.py',
    'YOLOF': 'yolof/yolof_r50-c5_8xb8-1x_coco.py',
    'YOLOv3': 'yolo/yolov3_d53_8xb8-ms-608-273e_coco.py',
    'YOLOX': 'yolox/yolox_tiny_8xb8-300e_coco.py',
}


class Checked(NamedTuple):
    """What became of a family: not built, and why; an error of :func:`deploy`; or how far the folded model is."""

    family: str
    differences: List[Difference]
    not_built: str = ''
    error: str = ''

    @property
    def worst(self) -> Optional[Difference]:
        return max(self.differences, key=lambda d: d.relative, default=None)


def with_slab_swin(config: PathLike, **backbone: Any) -> Config:
    """The model of a config of mmdet's, with a small SLABSwin, PRepBN throughout at gamma 0, for its backbone.

    It gives as many of its last maps as the neck, or a head without one, had ``in_channels``.

    Args:
        config (str | Path): A config file.
        backbone (Any): Arguments of SLABSwin that are to be others.

    Raises:
        ValueError: If neither the neck nor the head says what it takes.
    """
    model = Config.fromfile(str(config)).model
    necks = model.get('neck') or model.get('panoptic_head') or {}
    taker = necks[0] if isinstance(necks, list) else necks
    channels = taker.get('in_channels')
    if channels is None:
        raise ValueError(f'no neck or panoptic_head of {str(config)!r} says what channels it takes (in_channels).')
    last = [EMBED_DIMS * 2**i for i in range(4)][-len(channels) if isinstance(channels, (list, tuple)) else -1 :]
    norm = dict(type='PRepBN', gamma=0.0)
    model.backbone = dict(
        type='SLABSwin',
        arch=dict(embed_dims=EMBED_DIMS, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8)),
        attn=('sla', 'sla', 'softmax', 'softmax'),
        window_sizes=(8, 4, 3, 3),
        norm_cfg=norm,
        out_norm_cfg=norm,
        out_indices=tuple(range(4 - len(last), 4)),
    )
    model.backbone.update(backbone)
    if isinstance(channels, (list, tuple)):
        taker['in_channels'] = last[::-1] if channels[0] > channels[-1] else last
    else:
        taker['in_channels'] = last[-1]
    without_init_cfg(model)
    return Config(dict(default_scope='mmdet', custom_imports=dict(imports=['mmslab']), model=model))


def randomized(model: nn.Module) -> nn.Module:
    """Moves all weights and BN statistics of a fresh model, in place, so that none is 0 or 1 and all of them count.

    Regressors of a second stage stay small: six stages of untrained ones (QueryInst) take boxes out of the image, where
    mmdet cannot paste masks.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.02)
            if '.fc_reg.' in name:
                p.mul_(0.01)
        for name, buffer in model.named_buffers():
            if name.endswith('running_mean'):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
            elif name.endswith('running_var'):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    return model


def check_family(family: str, cfg: Config, sizes: Sequence[Size] = SIZES) -> Checked:
    """Builds the model of ``cfg`` with random weights and puts it through :func:`deploy`, in a folder of its own."""
    try:
        init_default_scope('mmdet')
        torch.manual_seed(0)
        MMLogger.get_current_instance().setLevel('ERROR')  # init_weights has a line for each parameter
        model = MODELS.build(copy.deepcopy(cfg.model))
        model.init_weights()
    except Exception as e:  # of mmdet's, in as many ways as there are detectors
        return Checked(family, [], not_built=reason(e))
    with tempfile.TemporaryDirectory(prefix='mmslab-') as folder:
        path, weights = Path(folder) / 'config.py', Path(folder) / 'weights.pth'
        cfg.dump(path)
        torch.save(dict(state_dict=randomized(model).state_dict()), weights)
        del model
        try:
            return Checked(family, deploy(path, weights, Path(folder) / 'folded', sizes=sizes).differences)
        except Exception as e:  # a traceback here is what this check is for
            return Checked(family, [], error=reason(e))


def check_families(families: Sequence[str]) -> Iterator[Checked]:
    """Checks families of :data:`FAMILIES`, with the configs of the installed mmdet.

    Raises:
        ValueError: For a name that is none of them.
    """
    unknown = [family for family in families if family not in FAMILIES]
    if unknown:
        raise ValueError(f'there is no family {unknown[0]!r}. Choose from {", ".join(FAMILIES)}.')
    import mmdet

    root = Path(mmdet.__file__).parent / '.mim' / 'configs'
    for family in families:
        try:
            cfg = with_slab_swin(root / FAMILIES[family])
        except (OSError, ValueError) as e:
            yield Checked(family, [], not_built=reason(e))
            continue
        yield check_family(family, cfg)


def families_table(checked: Sequence[Checked]) -> Table:
    """A family in a row: what was compared, the worst difference, and what it makes of it."""
    made = Table(title="SLABSwin in mmdet's detectors: folded against original")
    for column in ('family', 'config', 'outputs', 'worst difference', ''):
        made.add_column(column, overflow='fold')
    for c in checked:
        outputs = ', '.join(dict.fromkeys(d.output for d in c.differences))
        verdict = f'[yellow]not built: {c.not_built}' if c.not_built else f'[red]{c.error}' if c.error else 'folded'
        worst = f'{c.worst.relative:.1e} in {c.worst.output}' if c.worst else ''
        made.add_row(c.family, FAMILIES.get(c.family, ''), outputs, worst, verdict)
    return made
