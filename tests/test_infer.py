"""Inference on folders as people have them, and on videos."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as coco_mask

from mmslab.data.shapes import CLASSES, draw
from mmslab.infer import _Detector, infer

from .conftest import ROOT

THRESHOLD = 0.2


def picture(seed, size=64):
    return draw(np.random.default_rng(seed), size, 4)[0]


def truncated(image):
    data = cv2.imencode('.jpg', image)[1].tobytes()
    return data[: len(data) // 2]


@pytest.fixture(scope='module')
def reference(untrained_detector):
    """What mmdet's other interface finds in a file or an array."""
    from mmdet.apis import inference_detector, init_detector

    model = init_detector(*map(str, untrained_detector), device='cpu')

    def find(image):
        found = inference_detector(model, image).pred_instances
        return found[found.scores >= THRESHOLD]

    return find


def assert_same(entry, found):
    assert len(found) > 0
    np.testing.assert_allclose(entry['bboxes'], found.bboxes.numpy(), atol=1e-3)
    np.testing.assert_allclose(entry['scores'], found.scores.numpy(), atol=1e-5)
    assert entry['labels'] == found.labels.tolist()
    assert entry['names'] == [CLASSES[label] for label in found.labels]
    assert all(isinstance(rle['counts'], str) for rle in entry['masks'])
    masks = np.stack([coco_mask.decode(rle) for rle in entry['masks']])
    assert np.array_equal(masks.astype(bool), found.masks.numpy())


@pytest.fixture(scope='module')
def photos(tmp_path_factory, untrained_detector):
    """A folder of all kinds, with ``out`` inside of it, and what was made of it."""
    root = tmp_path_factory.mktemp('photos') / 'photos'
    for folder in ('day one/raw', 'broken', 'drawn', '.thumbnails'):
        (root / folder).mkdir(parents=True)
    cv2.imwrite(str(root / 'a.jpg'), picture(1))
    cv2.imwrite(str(root / 'day one' / 'a.jpg'), picture(2))
    cv2.imwrite(str(root / 'day one' / 'B.JPG'), picture(3, 96))
    cv2.imwrite(str(root / 'day one' / 'raw' / 'Übung 図.png'), picture(4))
    cv2.imwrite(str(root / 'grey.png'), picture(5)[..., 0])
    cv2.imwrite(str(root / 'deep.png'), picture(6).astype(np.uint16) * 257)
    cv2.imwrite(str(root / 'alpha.png'), np.dstack([picture(7), np.full((64, 64), 9, np.uint8)]))
    turned = Image.fromarray(picture(8, 96)[:64, :, ::-1].copy())
    turned.getexif()[0x0112] = 6  # to be turned by 90 degrees: 64 wide, 96 high
    turned.save(root / 'turned.jpg', exif=turned.getexif())
    (root / 'broken' / 'cut.jpg').write_bytes(truncated(picture(9)))
    (root / 'broken' / 'empty.png').touch()
    (root / 'broken' / 'gone.jpg').symlink_to('nowhere.jpg')
    (root / 'notes.txt').write_text('no image')
    cv2.imwrite(str(root / '.thumbnails' / 'a.jpg'), picture(1))
    (root / '._a.jpg').write_text('what a file system leaves')
    cv2.imwrite(str(root / 'drawn' / 'mine.jpg'), picture(10))
    (root / 'day one' / 'up').symlink_to(root.parent)
    (root / 'day one' / 'again').symlink_to(root / 'day one')
    (root.parent / 'elsewhere').mkdir()
    cv2.imwrite(str(root.parent / 'elsewhere' / 'a.jpg'), picture(11))
    (root / 'linked').symlink_to(root.parent / 'elsewhere')
    (root / 'closed').mkdir()
    iterdir = Path.iterdir

    def closed(self):  # as the system would have it, but for its administrator
        if self == root / 'closed':
            raise PermissionError(13, 'Permission denied')
        return iterdir(self)

    before = {p: p.read_bytes() for p in root.rglob('*') if p.is_file()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, 'iterdir', closed)
        result = infer(root, *untrained_detector, root / 'drawn', score_thr=THRESHOLD, device='cpu')
    assert all(p.read_bytes() == content for p, content in before.items())
    return root, result


GOOD = [
    'a.jpg',
    'alpha.png',
    'day one/B.JPG',
    'day one/a.jpg',
    'day one/raw/Übung 図.png',
    'deep.png',
    'grey.png',
    'linked/a.jpg',
    'turned.jpg',
]
BAD = {
    'broken/cut.jpg': 'truncated',
    'broken/empty.png': 'empty',
    'broken/gone.jpg': 'no file',
    'closed': 'cannot be listed (Permission denied)',
}


def test_a_folder_is_mirrored_and_what_cannot_be_read_is_skipped(photos):
    root, result = photos
    assert [p.relative_to(root / 'drawn').as_posix() for p in result.drawn] == GOOD
    assert {p.relative_to(root).as_posix() for p in result.skipped} == set(BAD)
    assert all(BAD[p.relative_to(root).as_posix()] in why for p, why in result.skipped.items())
    written = {p.relative_to(root / 'drawn').as_posix() for p in (root / 'drawn').rglob('*') if p.is_file()}
    assert written == {*GOOD, 'predictions.json', 'mine.jpg'}
    for name in GOOD:
        image, drawn = (cv2.imread(str(folder / name)) for folder in (root, root / 'drawn'))
        assert drawn.shape == image.shape and abs(drawn.astype(int) - image).max() > 30, name


def test_the_file_of_predictions(photos, reference):
    root, result = photos
    content = json.loads(result.predictions.read_text())
    assert content['score_thr'] == THRESHOLD and content['classes'] == list(CLASSES)
    entries = {entry['file']: entry for entry in content['images']}
    assert list(entries) == sorted([*GOOD, *BAD], key=lambda name: Path(name).parts)
    assert (result.images, result.unit) == (len(GOOD), 'images')
    assert result.detections == sum(len(entries[name]['scores']) for name in GOOD)
    for name, why in BAD.items():
        assert entries[name].keys() == {'file', 'error'} and why in entries[name]['error']
    assert (entries['turned.jpg']['width'], entries['turned.jpg']['height']) == (64, 96)
    for name in ('day one/B.JPG', 'turned.jpg'):
        assert_same(entries[name], reference(str(root / name)))


def test_drawings_hold_what_the_file_holds(tmp_path, untrained_detector, reference):
    """Just the threshold's own score is in both; above it an image stays as it was."""
    cv2.imwrite(str(tmp_path / 'a.png'), picture(1))
    best = reference(str(tmp_path / 'a.png')).scores.max().item()
    one = infer(tmp_path / 'a.png', *untrained_detector, tmp_path / 'one', score_thr=best, device='cpu')
    none = infer(tmp_path / 'a.png', *untrained_detector, tmp_path / 'none', score_thr=1.0, device='cpu')
    assert (one.detections, none.detections) == (1, 0)
    assert abs(cv2.imread(str(one.drawn[0])).astype(int) - picture(1)).max() > 30
    assert np.array_equal(cv2.imread(str(none.drawn[0])), picture(1))
    (entry,) = json.loads(none.predictions.read_text())['images']
    assert entry['bboxes'] == entry['masks'] == entry['names'] == []


def test_the_command_line_lists_what_it_skipped(tmp_path, untrained_detector):
    (tmp_path / 'in').mkdir()
    cv2.imwrite(str(tmp_path / 'in' / 'a.jpg'), picture(1))
    (tmp_path / 'in' / 'b.jpg').write_bytes(truncated(picture(2)))
    cv2.imwrite(str(tmp_path / 'in' / 'c.jpg'), picture(3))
    config, checkpoint = untrained_detector
    run = subprocess.run(
        [
            sys.executable,
            ROOT / 'tools' / 'infer.py',
            'in',
            '--config',
            config,
            '--checkpoint',
            checkpoint,
            '--out',
            'o',
        ],
        cwd=tmp_path,
        env={**os.environ, 'PYTHONPATH': str(ROOT), 'CUDA_VISIBLE_DEVICES': ''},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1 and 'Traceback' not in run.stderr, run.stderr
    assert run.stderr.splitlines()[-1].startswith("skipped: 'in/b.jpg' is no image that can be read (truncated")
    assert '2 images drawn into o' in run.stdout
    assert '0 detections with a score of at least 0.3 in o/predictions.json' in run.stdout


def test_nothing_is_overwritten(tmp_path, untrained_detector):
    source = tmp_path / 'in'
    (source / 'sub').mkdir(parents=True)
    cv2.imwrite(str(source / 'sub' / 'a.png'), picture(1))
    (tmp_path / 'link').symlink_to(source)
    (tmp_path / 'part').mkdir()
    (tmp_path / 'part' / 'sub').symlink_to(source / 'sub')
    for out in (source, tmp_path / 'link', tmp_path / 'part'):
        with pytest.raises(ValueError, match='is where the images are, which would be overwritten'):
            infer(source, *untrained_detector, out, force=True)
    for name in ('sub/a.png', 'predictions.json'):
        kept = tmp_path / 'out' / name
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text('mine')
        with pytest.raises(FileExistsError, match=f'out: .*{name}.* exists. .*--force'):
            infer(source, *untrained_detector, tmp_path / 'out')
        assert kept.read_text() == 'mine'
        kept.unlink()
    (tmp_path / 'out' / 'predictions.json').mkdir()
    with pytest.raises(FileExistsError, match='predictions.json.* exists'):
        infer(source, *untrained_detector, tmp_path / 'out', force=True)


def test_images_of_which_none_can_be_read(tmp_path, untrained_detector):
    for name in ('a.jpg', 'b.jpg'):
        (tmp_path / name).write_bytes(truncated(picture(1)))
    with pytest.raises(ValueError, match='a.jpg.* is no image that can be read .truncated.* so it is with 1 more'):
        infer(tmp_path, *untrained_detector, tmp_path / 'out')
    (tmp_path / 'notes.txt').write_text('no image')
    with pytest.raises(ValueError, match="notes.txt' has the name of neither an image, .* nor a video"):
        infer(tmp_path / 'notes.txt', *untrained_detector, tmp_path / 'out')
    assert not (tmp_path / 'out').exists()


def test_a_classifier_is_named(tmp_path, untrained_detector):
    config = ROOT / 'configs' / 'demo' / 'slab_pvt_shapes_classes.py'
    cv2.imwrite(str(tmp_path / 'a.png'), picture(1))
    with pytest.raises(ValueError, match='is of ImageClassifier, which is no detector.*ImageClassificationInferencer'):
        infer(tmp_path / 'a.png', config, untrained_detector[1], tmp_path / 'out')
    assert not (tmp_path / 'out').exists()


def test_a_detector_of_boxes_alone(tmp_path, untrained_detector):
    """Weights without the names of classes, too: the config's are taken, not COCO's."""
    config, checkpoint = untrained_detector
    boxes = tmp_path / 'boxes.py'
    boxes.write_text(
        f'_base_ = {str(config)!r}\n'
        'model = dict(roi_head=dict(mask_roi_extractor=None, mask_head=None))\n'
        "test_evaluator = dict(metric='bbox')\n"
    )
    state = torch.load(checkpoint, weights_only=True)['state_dict']
    torch.save({k: v for k, v in state.items() if 'mask_head' not in k}, tmp_path / 'boxes.pth')
    cv2.imwrite(str(tmp_path / 'a.png'), picture(1))
    infer(tmp_path / 'a.png', boxes, tmp_path / 'boxes.pth', tmp_path / 'out', score_thr=THRESHOLD, device='cpu')
    content = json.loads((tmp_path / 'out' / 'predictions.json').read_text())
    assert content['classes'] == list(CLASSES)
    (entry,) = content['images']
    assert len(entry['bboxes']) == len(entry['names']) > 0 and 'masks' not in entry


def test_a_detector_of_masks_alone():
    """It gives boxes of zeros; the file has those of its masks."""
    from mmengine.structures import InstanceData

    masks = torch.zeros(2, 40, 50, dtype=torch.bool)
    masks[0, 3:10, 5:30] = True
    masks[1, 20, 7] = True
    found = InstanceData(masks=masks, bboxes=torch.zeros(2, 4), scores=torch.ones(2), labels=torch.tensor([0, 1]))
    entry = _Detector._entry(SimpleNamespace(classes=CLASSES), found, 40, 50)
    assert entry['bboxes'] == [[5, 3, 30, 10], [7, 20, 8, 21]] and entry['names'] == ['disc', 'rectangle']


def write_video(path, codec, frames, fps=12):
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*codec), fps, frames[0].shape[1::-1])
    for frame in frames:
        writer.write(frame)
    writer.release()


def read_video(path):
    capture = cv2.VideoCapture(str(path))
    frames = []
    while (frame := capture.read()[1]) is not None:
        frames.append(frame)
    return frames, capture.get(cv2.CAP_PROP_FPS)


@pytest.mark.parametrize('source,drawn', [('clip.avi', 'clip.avi'), ('Clip.MOV', 'Clip.mp4')])
def test_a_video(tmp_path, untrained_detector, reference, source, drawn):
    video = tmp_path / source
    write_video(video, 'MJPG' if drawn.endswith('avi') else 'mp4v', [picture(seed) for seed in range(3)])
    result = infer(video, *untrained_detector, tmp_path / 'out', score_thr=THRESHOLD, device='cpu')
    assert result.drawn == [tmp_path / 'out' / drawn] and not result.skipped
    assert (result.images, result.unit) == (3, 'frames')
    assert {p.name for p in (tmp_path / 'out').iterdir()} == {drawn, 'predictions.json'}
    content = json.loads(result.predictions.read_text())
    assert (content['video'], content['fps']) == (source, 12.0)
    assert [entry['frame'] for entry in content['frames']] == [0, 1, 2]
    frames, fps = read_video(result.drawn[0])
    assert len(frames) == 3 and fps == 12 and frames[0].shape == (64, 64, 3)
    (_, frame, _), _ = read_video(video)
    assert abs(frames[1].astype(int) - frame).max() > 60
    assert_same(content['frames'][1], reference(frame))
    with pytest.raises(FileExistsError, match=f'{drawn}.* exists'):
        infer(video, *untrained_detector, tmp_path / 'out')
    with pytest.raises(ValueError, match='which would be overwritten'):
        infer(result.drawn[0], *untrained_detector, tmp_path / 'out', force=True)


def test_a_video_that_breaks_off(tmp_path, untrained_detector):
    video = tmp_path / 'clip.avi'
    write_video(video, 'MJPG', [picture(seed) for seed in range(8)], fps=2)
    data = video.read_bytes()
    video.write_bytes(data[: len(data) * 2 // 5])
    result = infer(video, *untrained_detector, tmp_path / 'out', device='cpu')
    assert 0 < result.images < 6
    assert result.skipped == {video: f'ends after {result.images} of its 8 frames'}
    content = json.loads(result.predictions.read_text())
    assert content['error'] == result.skipped[video] and len(content['frames']) == result.images


def test_a_stream_that_changes_its_size(tmp_path, untrained_detector, monkeypatch):
    """The video keeps its size and all frames; the file has each frame's own pixels."""
    (tmp_path / 'clip.webm').touch()
    frames = [picture(1), picture(2, 96)[:64]]

    class Capture:
        def __init__(self, path):
            self.left = iter(frames)

        def read(self):
            frame = next(self.left, None)
            return frame is not None, frame

        def get(self, key):
            return {cv2.CAP_PROP_FPS: float('nan'), cv2.CAP_PROP_FRAME_COUNT: -1.0}[key]

    with monkeypatch.context() as patched:
        patched.setattr(cv2, 'VideoCapture', Capture)
        result = infer(tmp_path / 'clip.webm', *untrained_detector, tmp_path / 'out', device='cpu')
    drawn, fps = read_video(result.drawn[0])
    assert [frame.shape for frame in drawn] == [(64, 64, 3)] * 2 and fps == 25
    content = json.loads(result.predictions.read_text())
    assert content['fps'] == 25 and not result.skipped
    assert [(entry['width'], entry['height']) for entry in content['frames']] == [(64, 64), (96, 64)]


def test_videos_that_cannot_be_read_or_written(tmp_path, untrained_detector, monkeypatch):
    (tmp_path / 'text.mp4').write_text('no video')
    with pytest.raises(ValueError, match="text.mp4' is no video that can be read"):
        infer(tmp_path / 'text.mp4', *untrained_detector, tmp_path / 'out')
    write_video(tmp_path / 'clip.avi', 'MJPG', [picture(1)])
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'clip.avi').write_text('mine')
    monkeypatch.setattr(cv2, 'VideoWriter_fourcc', lambda *codec: 0x20202020)  # one that no OpenCV has
    monkeypatch.setattr('mmdet.apis.DetInferencer', lambda *args, **kwargs: pytest.fail('computed before the check'))
    with pytest.raises(OSError, match='clip.avi.* cannot be written, since this OpenCV has no MJPG encoder'):
        infer(tmp_path / 'clip.avi', *untrained_detector, tmp_path / 'out', force=True)
    assert [p.name for p in (tmp_path / 'out').iterdir()] == ['clip.avi']
    assert (tmp_path / 'out' / 'clip.avi').read_text() == 'mine'
