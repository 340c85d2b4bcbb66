import json

import cv2
import numpy as np

from mmslab.plots import draw_curves, draw_sheet, read_scalars


def scalars(folder):
    lines = [dict(loss=3.0 - i / 10, gamma=1 - i / 10, iter=i, step=i, epoch=1 + i // 5) for i in range(1, 11)]
    for step, ap, prefix in ((1, 0.2, ''), (2, 0.9, 'before_recalibration/'), (2, 0.4, '')):
        lines.append({f'{prefix}coco/bbox_mAP_50': ap, f'{prefix}coco/segm_mAP_50': ap / 2, 'step': step})
    path = folder / 'scalars.json'
    path.write_text('\n'.join(map(json.dumps, lines)))
    return path


def test_scalars_are_read(tmp_path):
    curves = read_scalars(scalars(tmp_path))
    assert curves['gamma'] == (list(range(1, 11)), [1 - i / 10 for i in range(1, 11)])
    assert curves['coco/bbox_mAP_50'] == ([1, 2], [0.2, 0.4])
    ap = {f'{prefix}coco/{kind}_mAP_50' for prefix in ('', 'before_recalibration/') for kind in ('bbox', 'segm')}
    assert set(curves) == {'loss', 'gamma', *ap}


def test_curves_have_a_point_for_each_epoch(tmp_path, monkeypatch):
    import matplotlib.axes

    drawn = []
    plot = matplotlib.axes.Axes.plot
    monkeypatch.setattr(matplotlib.axes.Axes, 'plot', lambda self, *a, **k: drawn.append((a, k)) or plot(self, *a, **k))
    draw_curves(scalars(tmp_path), tmp_path / 'curves.png', 5)
    by_label = {k.get('label'): a for a, k in drawn}
    assert by_label['bbox AP50'][:2] == ([5, 10], [0.2, 0.4])
    assert by_label['segm, before recalibration'][:2] == ([10], [0.45])
    assert cv2.imread(str(tmp_path / 'curves.png')).std() > 10


def test_a_sheet_holds_every_image(tmp_path):
    files = []
    for i in range(5):
        files.append(tmp_path / f'{i}.png')
        cv2.imwrite(str(files[-1]), np.full((32, 32, 3), 40 * i, np.uint8))
    draw_sheet(files, tmp_path / 'sheet.png', columns=3, side=20)
    sheet = cv2.imread(str(tmp_path / 'sheet.png'))
    cells = sheet.reshape(2, 20, 3, 20, 3).mean((1, 3, 4)).ravel()
    assert sheet.shape == (40, 60, 3) and cells.tolist() == [0, 40, 80, 120, 160, 255]
