import json
import runpy
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from mmslab.benchmark.models import Settings, Subject
from mmslab.benchmark.report import (
    Report,
    check_drawable,
    check_output,
    draw,
    machine,
    machine_line,
    settings_line,
    table,
    write_json,
)

from ..conftest import ROOT

CLASSIFIER = ROOT / 'configs' / 'demo' / 'slab_pvt_shapes_classes.py'
AP = dict(accuracy=43.1, metric='box AP', latency=51.0, throughput=100)


def report(mode='latency', **changes):
    settings = Settings(mode=mode, device='cpu', rounds=5, warmup=1)
    kinds = dict(kind='detector', image=(800, 1333), padded=(800, 1344), call=lambda: None)
    first = Subject(
        'maskrcnn_swin_t_1x',
        'a.py',
        False,
        params=47_790_000,
        flops=267_100_000_000,
        peak_memory=3 << 20,
        paper=AP,
        **kinds,
    )
    second = Subject(
        'maskrcnn_slab_swin_t_1x (folded)',
        'b.py',
        True,
        params=1_000_000,
        peak_memory=1 << 19,
        notes=['b: not counted.'],
        detections=[100],
        **kinds,
    )
    seconds = np.array([[1.0, 2.0, 3.0, 4.0, 10.0], [0.5, 1.0, 1.5, 2.0, 5.0]])
    made = Report(settings, [first, second], None if mode == 'flops' else seconds, machine(settings))
    for name, value in changes.items():
        setattr(made.subjects[1], name, value)
    return made


def printed(made, width):
    console = Console(width=width, record=True, file=open('/dev/null', 'w'))
    console.print(table(made))
    return console.export_text()


@pytest.mark.parametrize('width', [120, 160])
def test_the_table_is_whole_at_common_widths(width):
    text = printed(report(), width)
    assert all(len(line) <= width for line in text.splitlines())
    for column in ('mean', 'median', 'p90', 'std', 'ratio', 'params', 'GFLOPs', 'peak', 'V100'):
        assert column in text.splitlines()[2]
    first, second = (line.split() for line in text.splitlines() if line.strip().startswith('maskrcnn'))
    assert first == ['maskrcnn_swin_t_1x', '4000', '3000', '7600', '3536', '1', '47.79', '267.1', '3.0', '51']
    assert second[-10:] == ['2000', '1500', '3800', '1768', '0.500', '(0.500-0.500)', '1.00', '-', '0.5', '-']


def test_what_is_said_around_the_table():
    made = report()
    assert settings_line(made) == (
        'latency of the whole model, 800x1333 padded to 800x1344, fp32, cpu, 5 rounds after 1, interleaved'
    )
    notes = made.notes()
    assert notes[0] == 'b: not counted.' and 'detections in an image, row by row: 100 (random weights' in notes[1]
    assert any('95% bootstrap interval' in n for n in notes) and "V100: the paper's figure" in notes[-1]
    line = machine_line(made.machine)
    assert all(name in line for name in ('cores', 'torch', 'mmcv', 'mmdet', 'mmslab')) and 'CUDA' not in line
    made.machine.update(gpu='H200', cuda='13.0')
    assert machine_line(made.machine).startswith('H200, CUDA 13.0; ')


def test_throughput_and_flops():
    made = report('throughput')
    assert made.rows()[0]['images_per_second'] == 64 / 4.0 and made.rows()[1]['images_per_second'] == 64 / 2.0
    text = printed(made, 160)
    assert 'images' in text and '16.0' in text and ' 100 ' in text
    made = report('flops')
    assert 'ms' not in made.rows()[0] and 'median' not in printed(made, 120) and 'V100' not in printed(made, 120)


def test_json_has_every_time(tmp_path):
    write_json(report(), tmp_path / 'a.json')
    content = json.loads((tmp_path / 'a.json').read_text())
    assert content['settings']['rounds'] == 5 and content['machine']['torch'] and content['notes']
    row = content['rows'][1]
    assert row['rounds_ms'] == [500, 1000, 1500, 2000, 5000] and row['ms']['median'] == 1500
    assert row['ratio'] == 0.5 and row['ratio_interval'] == [0.5, 0.5] and row['folded'] and row['detections'] == [100]
    assert content['rows'][0]['paper'] == AP and content['rows'][0]['flops'] == 267_100_000_000


def test_drawing_marks_the_papers_accuracies(tmp_path, monkeypatch):
    import matplotlib.axes

    said = {}
    monkeypatch.setattr(matplotlib.axes.Axes, 'set', lambda self, **kw: said.update(kw))
    assert draw(report(), tmp_path / 'a.png') == ['maskrcnn_slab_swin_t_1x (folded)']
    assert np.asarray(Image.open(tmp_path / 'a.png').convert('L')).std() > 0
    assert said['ylabel'] == "COCO box AP: the paper's, not ours"
    assert said['xlabel'].startswith('median latency in ms, whole model, measured here: ')
    assert draw(report('throughput', paper=AP), tmp_path / 'b.svg') == []
    assert said['xlabel'].startswith('images per second at batch size 64')


def test_what_cannot_be_drawn():
    check_drawable([AP, {}])
    with pytest.raises(ValueError, match='the paper, which has none for these configs'):
        check_drawable([{}, dict(latency=1.0)])
    with pytest.raises(ValueError, match='--plot has one axis for Top 1 Accuracy and box AP'):
        check_drawable([AP, dict(accuracy=80.0, metric='Top 1 Accuracy')])


def test_files_that_will_be_written_are_checked(tmp_path):
    (tmp_path / 'a.json').write_text('mine')
    check_output(None, '--json', ('.json',))
    check_output(tmp_path / 'a.json', '--json', ('.json',), force=True)
    for path, error, message in (
        ('a.json', FileExistsError, '--json .* exists. Choose another name, or pass --force'),
        ('b.txt', ValueError, '--json must name a file that ends in .json'),
        ('no/b.json', OSError, '--json .* cannot be written'),
    ):
        with pytest.raises(error, match=message):
            check_output(tmp_path / path, '--json', ('.json',))
    (tmp_path / 'c.json').mkdir()
    with pytest.raises(OSError, match='is a folder'):
        check_output(tmp_path / 'c.json', '--json', ('.json',), force=True)
    assert (tmp_path / 'a.json').read_text() == 'mine'


def test_the_command_line(tmp_path, monkeypatch):
    """Options before, between and after the configs, as the README has them."""
    tool = [sys.executable, str(ROOT / 'tools' / 'benchmark.py')]
    args = '--latency --scope backbone --image 64 64 CONFIG --no-fold --rounds 5 --warmup 1 --threads 1 --device cpu'
    args = [str(CLASSIFIER) if a == 'CONFIG' else a for a in args.split()] + ['--json', 'out.json']
    run = subprocess.run([*tool, *args], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for text in (
        'slab_pvt_shapes_classes (folded)',
        'measuring',
        'latency of the backbone, 64x64',
        'measured on',
        '1 threads',
    ):
        assert text in run.stdout
    rows = json.loads((tmp_path / 'out.json').read_text())['rows']
    assert [(r['name'], len(r['rounds_ms'])) for r in rows] == [
        ('slab_pvt_shapes_classes (folded)', 5),
        ('slab_pvt_shapes_classes', 5),
    ]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'argv', ['benchmark.py', *args])
    with pytest.raises(SystemExit, match="^error: --json 'out.json' exists"):
        runpy.run_path(tool[1], run_name='__main__')
