import json
import runpy
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from mmslab.benchmark.latency import Measurement
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


def measurement(factor):
    """The second row takes ``factor`` times the first in every round."""
    seconds = np.array([1.0, 2.0, 3.0, 4.0, 10.0])
    faults = np.array([[480_000] * 4 + [480_005], [0] * 5])
    return Measurement(np.array([seconds, factor * seconds]), faults, np.array([seconds / 4, 0 * seconds]))


def report(mode='latency', factors=(0.5,), given=None, **changes):
    settings = Settings(mode=mode, device='cpu', **(given or dict(rounds=5, warmup=1)))
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
    measured = [] if mode == 'flops' else [measurement(f) for f in factors]
    made = Report(settings, [first, second], measured, machine(settings))
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
    for column in ('mean', 'median', 'p90', 'std', 'sys', 'faults', 'ratio', 'params', 'GFLOPs', 'peak', 'V100'):
        assert column in text.splitlines()[2]
    first, second = (line.split() for line in text.splitlines() if line.strip().startswith('maskrcnn'))
    times = ['4000', '3000', '7600', '3536', '1000', '480001']
    assert first == ['maskrcnn_swin_t_1x', *times, '1', '47.79', '267.1', '3.0', '51']
    times = ['2000', '1500', '3800', '1768', '0.000', '0']
    assert second[-12:] == [*times, '0.500', '(0.500-0.500)', '1.00', '-', '0.5', '-']


def test_what_is_said_around_the_table():
    made = report()
    assert settings_line(made) == (
        'latency of the whole model, 800x1333 padded to 800x1344, fp32, cpu, 5 rounds after 1 in a process, interleaved'
    )
    notes = made.notes()
    assert notes[0] == 'b: not counted.' and 'detections in an image, row by row: 100 (random weights' in notes[1]
    assert any('95% bootstrap interval over the rounds of one process; between processes' in n for n in notes)
    assert (
        any('faults: minor page faults of one forward' in n for n in notes) and "V100: the paper's figure" in notes[-1]
    )
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
    write_json([report()], tmp_path / 'a.json')
    content = json.loads((tmp_path / 'a.json').read_text())
    assert content['settings']['rounds'] == 5 and content['machine']['torch'] and content['notes']
    row = content['rows'][1]
    (process,) = row['processes']
    assert process['rounds_ms'] == [500, 1000, 1500, 2000, 5000] and row['ms']['median'] == 1500
    assert content['rows'][0]['processes'][0]['rounds_faults'] == [480_000] * 4 + [480_005]
    assert content['rows'][0]['processes'][0]['rounds_system_ms'] == [250, 500, 750, 1000, 2500]
    assert (content['rows'][0]['faults'], content['rows'][0]['system_ms']) == (480_001, 1000)
    assert (
        row['ratio_interval_over'] == 'rounds'
        and row['ratio'] == 0.5
        and row['ratio_interval'] == [0.5, 0.5]
        and row['folded']
        and row['detections'] == [100]
    )
    assert content['rows'][0]['paper'] == AP and content['rows'][0]['flops'] == 267_100_000_000


def test_several_processes(tmp_path):
    """Ratios 0.77 ... 1.00 that five processes have measured, without a spread in any of them."""
    factors = (0.77, 0.93, 0.88, 0.86, 1.00)
    made = report(factors=factors)
    text = printed(made, 120)
    assert '(range)' in text and '0.880 (0.770-1.000)' in text
    assert '5 rounds after 1 in each of 5 processes, interleaved' in settings_line(made)
    notes = made.notes()
    assert any('of 5 processes the median and the range' in n for n in notes)
    half = 2.776 * np.std(factors, ddof=1) / 5**0.5
    each = f'0.770, 0.930, 0.880, 0.860, 1.000; 0.888 ({0.888 - half:.3f} to {0.888 + half:.3f})'
    assert f'  maskrcnn_slab_swin_t_1x (folded): {each}' in notes
    write_json([made, report()], tmp_path / 'a.json')
    several, single = json.loads((tmp_path / 'a.json').read_text())['reports']
    row = several['rows'][1]
    assert np.allclose([p['ratio'] for p in row['processes']], factors)
    assert [len(p['rounds_ms']) for p in row['processes']] == [5] * 5
    assert np.allclose(row['ratio_range'], [0.77, 1.0]) and row['ratio_interval_over'] == 'processes'
    assert row['ms']['mean'] == pytest.approx(4000 * np.mean(factors))
    assert single['rows'][1]['ratio_interval_over'] == 'rounds'


def test_the_papers_protocol_compares_means():
    made = report(given=dict(protocol='paper', warmup=1))
    made.measured[0].seconds[1] = [1, 1, 1, 1, 4]  # of 1, 2, 3, 4, 10: medians say 1/3, means 8/20
    assert made.rows()[1]['ratio'] == pytest.approx(0.4)
    title = settings_line(made)
    assert title.startswith(
        "the paper's protocol (one image, mean of 100 rounds): latency of the whole model, 800x1333"
    )
    assert any(
        n.startswith('ratio: mean time of the row over that of the first row, and its 95%') for n in made.notes()
    )


def test_what_the_allocator_is_and_what_to_do_about_it():
    made = report()
    made.machine.update(threads=3, pinned=[0, 2, 3], allocator=dict(name='glibc', library='libc.so.6', variables={}))
    assert any("glibc's malloc returns large blocks" in n and '--allocator jemalloc' in n for n in made.notes())
    assert ', 3 threads on cores 0, 2-3; glibc malloc; torch' in machine_line(made.machine)
    made.measured[0].faults[0] = 999
    assert not any("glibc's malloc" in n for n in made.notes())  # few faults, nothing to gain
    made.measured[0].faults[0] = 480_000
    made.machine['allocator'] = dict(name='jemalloc', library='a.so', variables=dict(MALLOC_CONF='x:-1'))
    assert not any("glibc's malloc" in n for n in made.notes())
    assert '; jemalloc (MALLOC_CONF=x:-1); torch' in machine_line(made.machine)
    made.machine['allocator'] = dict(name=None, library=None, variables={})
    assert '; allocator unknown; ' in machine_line(made.machine)


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
    args = (
        '--latency --scope backbone --image 64 64 CONFIG --no-fold --rounds 5 --warmup 1 --threads 1 --device cpu '
        '--allocator glibc'
    )
    args = [str(CLASSIFIER) if a == 'CONFIG' else a for a in args.split()] + ['--json', 'out.json']
    run = subprocess.run([*tool, *args], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for text in (
        'slab_pvt_shapes_classes (folded)',
        'building',
        'measuring',
        'latency of the backbone, 64x64',
        'over the rounds of one process',
        'measured on',
        '1 threads on cores',
        'glibc malloc',
    ):
        assert text in run.stdout
    content = json.loads((tmp_path / 'out.json').read_text())
    assert [r['name'] for r in content['rows']] == ['slab_pvt_shapes_classes (folded)', 'slab_pvt_shapes_classes']
    assert [[len(p['rounds_ms']) for p in r['processes']] for r in content['rows']] == [[5], [5]]
    assert len(content['machine']['pinned']) == 1 and content['machine']['threads'] == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'argv', ['benchmark.py', *args])
    with pytest.raises(SystemExit, match="^error: --json 'out.json' exists"):
        runpy.run_path(tool[1], run_name='__main__')
