"""Detections, drawn into copies of images or of a video and written as JSON."""

import json
import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Tuple, Union

import cv2
import numpy as np
from mmengine.config import Config
from pycocotools import mask as coco_mask
from rich.progress import track

from . import checkpoints
from .data.checks import check_writable
from .versions import check_detection

PathLike = Union[str, os.PathLike]
IMAGE_SUFFIXES = ('.jpg', '.jpeg', '.png', '.bmp', '.tif', '.tiff', '.webp')
VIDEO_SUFFIXES = ('.mp4', '.m4v', '.mov', '.avi', '.mkv', '.webm', '.mpg', '.mpeg', '.wmv')
PREDICTIONS = 'predictions.json'
_CODECS = {'.avi': 'MJPG', '.mp4': 'mp4v'}  # the containers that drawn videos are written in; both codecs are free


@dataclass
class Inference:
    """What :func:`infer` did.

    Attributes:
        drawn (list[Path]): The images written, or the one video.
        predictions (Path): The JSON file.
        images (int): Images or frames that went through the detector.
        unit (str): 'images' or 'frames', whichever these are.
        detections (int): Detections in all of them, those below the threshold left out.
        skipped (dict[Path, str]): What could not be read, or read to its end, and why.
    """

    predictions: Path
    drawn: List[Path] = field(default_factory=list)
    images: int = 0
    unit: str = 'images'
    detections: int = 0
    skipped: Dict[Path, str] = field(default_factory=dict)


def infer(
    images: PathLike,
    config: PathLike,
    checkpoint: PathLike,
    out: PathLike,
    score_thr: float = 0.3,
    device: Optional[str] = None,
    force: bool = False,
    trust_checkpoint: bool = False,
) -> Inference:
    """Draws the boxes and masks that a detector finds into copies of images or of a video, and writes them as JSON.

    A folder is walked with all of its subfolders, which ``out`` mirrors. Hidden entries and ``out`` itself are left out,
    links to folders are followed unless they lead back up, and videos are taken one by one only. Images are decoded as
    mmdet does: 8 bits, three channels, turned as their EXIF entry says. One that cannot be read is skipped.

    ``out/predictions.json`` holds just the detections that are drawn, ``{'score_thr', 'classes', 'images': [...]}``, with
    an entry for each image, in the order of their paths::

        {'file': 'sub/name.jpg', 'width': 640, 'height': 480,  # pixels
         'bboxes': [[x1, y1, x2, y2], ...],  # pixels
         'scores': [...], 'labels': [...],  # indices into classes
         'names': [...],  # of the classes
         'masks': [{'size': [480, 640], 'counts': '...'}, ...]}  # COCO's compressed RLE; only if the detector has masks

    One that was skipped has ``file`` and ``error`` alone. For a video ``'images'`` is replaced by ``'video'``, its name,
    ``'fps'`` (25 if it does not say), and ``'frames'``, whose entries have ``frame``, counted from 0, in place of ``file``;
    a video that ends early has an ``error``. The drawn video is MPEG-4 in .mp4, or Motion JPEG in .avi if it is an .avi
    already, without sound; MPEG-4 leaves out the last row or column of an odd size.

    Args:
        images (str | Path): An image, a folder of images, or a video.
        out (str | Path): A folder for drawings and predictions.
        score_thr (float): Detections of at least this score are drawn and written, in [0, 1]. Those below the
            ``score_thr`` of the config's ``test_cfg`` are not there in the first place.
        device (str, optional): 'cpu', 'cuda:0', ... By default a GPU if there is one.
        force (bool): Whether to replace files of the same name in ``out``.
        trust_checkpoint (bool): See :func:`mmslab.checkpoints.load_file`.

    Returns:
        Inference: The files written, numbers, and what was skipped.

    Raises:
        FileNotFoundError: If there are no images, config or checkpoint.
        FileExistsError: If ``out`` has a file of the same name and ``force`` is not set.
        ValueError: For a score threshold outside [0, 1], images of which none can be read, an unreadable video, an
            ``out`` in which images would be overwritten, a config that is no detector's.
        OSError: If ``out`` cannot be written, or no video of the codec.
    """
    from .apis import check_checkpoint, check_device, load_config, without_init_cfg  # apis hands infer on

    check_detection()
    if not 0 <= score_thr <= 1:
        raise ValueError(f'score_thr must lie in [0, 1], but got {score_thr}.')
    source, out = Path(images), Path(out)
    result = Inference(out / PREDICTIONS)
    video = _Video(source) if source.suffix.lower() in VIDEO_SUFFIXES and os.path.isfile(source) else None
    if video is not None:
        targets = {source: out / f'{source.stem}{".avi" if source.suffix.lower() == ".avi" else ".mp4"}'}
    else:
        root = source if os.path.isdir(source) else source.parent
        files, result.skipped = _find_images(source, out)
        targets = {file: out / file.relative_to(root) for file in files}
    _check_targets(targets, out, force)
    check_device(device)
    check_checkpoint(checkpoint, 'checkpoint')
    cfg = load_config(config)
    _check_detector(cfg, config)
    without_init_cfg(cfg.model)
    for folder in sorted({out, *(target.parent for target in targets.values())}):
        check_writable(folder, 'out')
    with ExitStack() as stack:
        # before the model is built, since the codec may be missing
        writer = None if video is None else stack.enter_context(_video_writer(targets[source], video))
        detector = _Detector(cfg, checkpoint, device, score_thr, trust_checkpoint)
        if video is None:
            found = _draw_images(detector, root, targets, result)
        else:
            found = _draw_video(detector, video, writer, result)
            result.drawn, result.unit = list(targets.values()), 'frames'
    _write(result.predictions, json.dumps(dict(score_thr=score_thr, classes=detector.classes, **found)).encode())
    return result


class _Detector:
    """A detector that is called with an image and gives it back drawn, with the detections as they are in the JSON."""

    def __init__(
        self, cfg: Config, checkpoint: PathLike, device: Optional[str], score_thr: float, trust_checkpoint: bool
    ) -> None:
        from mmdet.apis import DetInferencer
        from mmdet.registry import DATASETS

        content = checkpoints.load_file(checkpoint, trust_checkpoint)
        checkpoints.read_state_dict(content, name=repr(str(checkpoint)))
        with checkpoints.use_safe_loading(trust_checkpoint):
            self.inferencer = DetInferencer(cfg, str(checkpoint), device=device, show_progress=False)
        checkpoints.check_fits(self.inferencer.model, content, repr(str(checkpoint)))
        meta = self.inferencer.model.dataset_meta  # the visualizer's too
        if (
            not {'dataset_meta', 'CLASSES'} & (content.get('meta') or {}).keys()
        ):  # weights alone: mmdet takes COCO's names
            meta['classes'] = DATASETS.build({**cfg.test_dataloader.dataset, 'lazy_init': True}).metainfo['classes']
        self.score_thr = score_thr
        self.classes = list(meta['classes'])

    def __call__(self, image: np.ndarray, path: Optional[Path] = None) -> Tuple[np.ndarray, dict]:
        """``image`` (H, W, 3), BGR, is drawn into; ``path`` is the file that the config's pipeline may load it from."""
        (sample,) = self.inferencer(image if path is None else str(path), return_datasamples=True)['predictions']
        sample = sample.cpu()
        found = sample.pred_instances
        sample.pred_instances = found = found[found.scores >= self.score_thr]
        entry = self._entry(found, *image.shape[:2])
        if not len(found):
            return image, entry  # as it is: matplotlib before 3.11 resamples what it draws on
        visualizer = self.inferencer.visualizer
        # it draws what is above its own threshold, not at it
        visualizer.add_datasample('image', image[..., ::-1], sample, draw_gt=False, pred_score_thr=-1)
        return np.ascontiguousarray(visualizer.get_image()[..., ::-1]), entry

    def _entry(self, found, height: int, width: int) -> dict:
        entry = dict(
            width=width,
            height=height,
            bboxes=found.bboxes.tolist(),
            scores=found.scores.tolist(),
            labels=found.labels.tolist(),
            names=[self.classes[label] for label in found.labels],
        )
        if 'masks' in found:
            masks = found.masks.numpy().astype(np.uint8)
            rles = coco_mask.encode(np.asfortranarray(masks.transpose(1, 2, 0)))
            entry['masks'] = [dict(size=[height, width], counts=rle['counts'].decode()) for rle in rles]
            if not found.bboxes.any():  # a detector of masks alone gives zeros
                entry['bboxes'] = [[x, y, x + w, y + h] for x, y, w, h in coco_mask.toBbox(rles).tolist()]
        return entry


class _Video:
    """A video that is read once, frame by frame, each (H, W, 3), BGR."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.capture = cv2.VideoCapture(str(path))
        _, self.first = self.capture.read()
        if self.first is None:
            raise ValueError(
                f'{str(path)!r} is no video that can be read: it is damaged, or of a codec that OpenCV lacks. Convert it, or '
                'give its frames as a folder of images.'
            )
        fps, length = (self.capture.get(key) for key in (cv2.CAP_PROP_FPS, cv2.CAP_PROP_FRAME_COUNT))
        self.fps = fps if 0 < fps < float('inf') else 25.0
        self.length = int(length) if length > 0 else None  # as its header says, which may be an estimate

    def __iter__(self) -> Iterator[np.ndarray]:
        frame = self.first
        while frame is not None:
            yield frame
            _, frame = self.capture.read()


@contextmanager
def _video_writer(target: Path, video: _Video) -> Iterator[cv2.VideoWriter]:
    """A writer of drawn frames; ``target`` is there once all are."""
    partial = target.with_name(f'.{os.getpid()}.partial{target.suffix}')
    codec = _CODECS[target.suffix]
    writer = cv2.VideoWriter(str(partial), cv2.VideoWriter_fourcc(*codec), video.fps, video.first.shape[1::-1])
    try:
        if not writer.isOpened():
            raise OSError(
                f'out: {str(target)!r} cannot be written, since this OpenCV has no {codec} encoder. Install '
                'opencv-python-headless from PyPI, or give the frames as a folder of images.'
            )
        yield writer
        writer.release()
        os.replace(partial, target)
    finally:
        writer.release()
        partial.unlink(missing_ok=True)


def _draw_images(detector: _Detector, root: Path, targets: Dict[Path, Path], result: Inference) -> dict:
    entries = {}
    for path, target in track(list(targets.items()), description='drawing', disable=len(targets) == 1):
        try:
            image = _read(path)
        except ValueError as e:
            result.skipped[path] = str(e)
            continue
        drawn, entries[path] = detector(image, path)
        _write(target, cv2.imencode(target.suffix, drawn)[1].tobytes())
        result.drawn.append(target)
        result.images += 1
        result.detections += len(entries[path]['scores'])
    entries.update({path: dict(error=why) for path, why in result.skipped.items()})
    return dict(images=[dict(file=p.relative_to(root).as_posix(), **entry) for p, entry in sorted(entries.items())])


def _draw_video(detector: _Detector, video: _Video, writer: cv2.VideoWriter, result: Inference) -> dict:
    height, width = video.first.shape[:2]
    frames = []
    for frame in track(video, description='drawing', total=video.length):
        drawn, entry = detector(frame)
        if drawn.shape[:2] != (height, width):  # a stream may change its size; the writer would leave the frame out
            drawn = cv2.resize(drawn, (width, height))
        writer.write(drawn)
        frames.append(dict(frame=result.images, **entry))
        result.images += 1
        result.detections += len(entry['scores'])
    content = dict(video=video.path.name, fps=video.fps, frames=frames)
    if video.length and video.length - len(frames) > video.fps:  # more than a second: no mere estimate
        content['error'] = result.skipped[video.path] = f'ends after {len(frames)} of its {video.length} frames'
    return content


def _find_images(source: Path, out: Path) -> Tuple[List[Path], Dict[Path, str]]:
    """The image ``source``, or those below it; and what there cannot be read, with the reason.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If there are some, and none can be read.
    """
    if os.path.isfile(source) and source.suffix.lower() not in IMAGE_SUFFIXES:
        raise ValueError(
            f'{str(source)!r} has the name of neither an image, {IMAGE_SUFFIXES}, nor a video, {VIDEO_SUFFIXES}. Give one, '
            'or a folder of images.'
        )
    found = {source: ''} if os.path.isfile(source) else {}
    if os.path.isdir(source):
        found = dict(_walk(source, out.resolve()))
    if not found:
        raise FileNotFoundError(
            f'no image at {str(source)!r}. Give an image, a folder with some of {IMAGE_SUFFIXES}, or a video.'
        )
    problems = {}
    for path, problem in found.items():
        try:
            if not problem:
                _read(path)
                break
        except ValueError as e:
            problem = str(e)
        problems[path] = problem
    else:
        path, problem = next(iter(problems.items()))
        others = f', and so it is with {len(found) - 1} more' if len(found) > 1 else ''
        raise ValueError(f'{str(path)!r} {problem}{others}. Give an image that can be read, or another folder.')
    return [p for p, problem in found.items() if not problem], {p: problem for p, problem in found.items() if problem}


def _walk(folder: Path, out: Path, above: Tuple[Path, ...] = ()) -> Iterator[Tuple[Path, str]]:
    """The images below ``folder``, in order, each with what is wrong with it, if anything.

    ``out`` is not entered, nor hidden folders, nor a link to one of the folders ``above`` or to what is above them.
    """
    above = (*above, folder.resolve())
    try:
        entries = sorted(folder.iterdir())
    except OSError as e:
        yield folder, f'cannot be listed ({e.strerror})'
        return
    for path in entries:
        if path.name.startswith('.'):
            continue
        if os.path.isdir(path):
            target = path.resolve()
            if target != out and not any(target in (each, *each.parents) for each in above):
                yield from _walk(path, out, above)
        elif path.suffix.lower() in IMAGE_SUFFIXES:
            yield path, '' if os.path.isfile(path) else 'is no file that can be read'


def _read(path: Path) -> np.ndarray:
    """An image (H, W, 3), BGR, 8 bits, turned as its EXIF entry says; ValueError, without its name, if it is none."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise ValueError(f'cannot be read ({e.strerror})') from e
    if not data:
        raise ValueError('is no image that can be read (the file is empty)')
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    except cv2.error as e:  # of more pixels than OpenCV takes
        raise ValueError(f'is no image that can be read ({e.err})') from e
    if image is None:
        raise ValueError('is no image that can be read (truncated, damaged, or of an unknown format)')
    return image


def _check_targets(targets: Dict[Path, Path], out: Path, force: bool) -> None:
    """Raises ValueError if an input would be overwritten, even through links, FileExistsError if another file would."""

    def identity(path: Path) -> Tuple[int, int]:
        status = os.stat(path)
        return status.st_dev, status.st_ino

    inputs = {identity(path) for path in targets}
    for target in (*targets.values(), out / PREDICTIONS):
        if target.exists() and identity(target) in inputs:
            raise ValueError(
                f'out={str(out)!r} is where the images are, which would be overwritten ({str(target)!r}). Choose another folder.'
            )
        if os.path.lexists(target) and (not force or target.is_dir()):
            raise FileExistsError(f'out: {str(target)!r} exists. Choose another folder, or pass --force.')


def _check_detector(cfg: Config, config: PathLike) -> None:
    """Raises ValueError unless ``cfg`` is of a detector, and has what inference takes from it."""
    from mmdet.models.detectors.base import BaseDetector
    from mmdet.registry import MODELS

    kind = (cfg.get('model') or {}).get('type')
    model = MODELS.get(kind) if isinstance(kind, str) else kind
    if not (isinstance(model, type) and issubclass(model, BaseDetector)):
        raise ValueError(
            f'config {str(config)!r} is of {kind or "no model"}, which is no detector. For the classes of whole images use '
            "mmpretrain's ImageClassificationInferencer(config, checkpoint)."
        )
    for key in ('test_dataloader', 'visualizer'):
        if not cfg.get(key):
            raise ValueError(
                f"config {str(config)!r} has no {key}. Inherit it from mmdet's base configs, as configs/ do."
            )


def _write(path: Path, data: bytes) -> None:
    """Writes ``path`` whole or not at all."""
    partial = path.with_name(f'.{os.getpid()}.partial')  # hidden, and short whatever the name
    try:
        partial.write_bytes(data)
        os.replace(partial, path)
    except OSError as e:
        partial.unlink(missing_ok=True)
        raise OSError(f'out: {str(path)!r} cannot be written ({e.strerror}).') from e
