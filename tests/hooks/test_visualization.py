import json
from pathlib import Path

import cv2
import numpy as np
import pytest
from mmdet.visualization import DetLocalVisualizer
from mmengine.visualization import Visualizer

from mmslab.apis import build_tester
from mmslab.data.shapes import make_shapes

from ..conftest import ROOT


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Shapes whose test images are val/{a,b/c}/same.jpg and val/b/000003.jpg."""
    make_shapes(tmp_path / 'shapes', num_train=1, num_val=3, size=64, progress=False)
    monkeypatch.setenv('SHAPES_ROOT', str(tmp_path / 'shapes'))
    monkeypatch.chdir(tmp_path)
    annotations = tmp_path / 'shapes' / 'annotations' / 'instances_val.json'
    content = json.loads(annotations.read_text())
    for image, name in zip(content['images'], ('a/same.jpg', 'b/c/same.jpg', 'b/000003.jpg')):
        moved = tmp_path / 'shapes' / 'val' / name
        moved.parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / 'shapes' / 'val' / image['file_name']).rename(moved)
        image['file_name'] = name
    annotations.write_text(json.dumps(content))
    return tmp_path


@pytest.fixture
def another_tasks_visualizer():
    """What the process made last, after the one of the detectors' configs."""
    DetLocalVisualizer.get_instance('visualizer')
    yield Visualizer.get_instance('another task')
    del Visualizer._instance_dict['another task']


def build(detector, show_dir):
    return build_tester(*detector, 'out', show_dir=show_dir, options={'test_dataloader.batch_size': 2})


def test_images_of_one_name_are_all_there(folders, untrained_detector, another_tasks_visualizer):
    build(untrained_detector, 'shown').test()
    (shown,) = Path('out').glob('*/shown')
    assert {p.relative_to(shown).as_posix() for p in shown.rglob('*.jpg')} == {
        'a/same.jpg',
        'b/c/same.jpg',
        'b/000003.jpg',
    }
    assert len(list(folders.rglob('same.jpg'))) == 4  # those of the data set, and these
    sources = {n: cv2.imread(str(folders / 'shapes' / 'val' / n)).astype(int) for n in ('a/same.jpg', 'b/c/same.jpg')}
    for name in sources:  # the drawing is of its own image: the border of either has no shape
        drawn = cv2.imread(str(shown / name))[:, :64].astype(int)
        nearest = min(sources, key=lambda each: np.median(abs(drawn - sources[each])))
        assert nearest == name


def test_a_folder_with_files_is_left_alone(folders, untrained_detector):
    (folders / 'mine').mkdir()
    (folders / 'mine' / 'same.jpg').write_text('mine')
    for show_dir in (folders / 'mine', '../../mine'):
        with pytest.raises(FileExistsError, match='--show-dir .*mine.* has files in it. Choose another folder'):
            build(untrained_detector, show_dir)
    assert (folders / 'mine' / 'same.jpg').read_text() == 'mine' and not (folders / 'out').exists()


def test_a_classifier_has_no_detections_to_show(folders, untrained_detector):
    config = ROOT / 'configs' / 'demo' / 'slab_pvt_shapes_classes.py'
    with pytest.raises(ValueError, match='--show-dir draw detections.*default_hooks.visualization.out_dir=DIR'):
        build((config, untrained_detector[1]), 'shown')
