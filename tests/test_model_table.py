import pytest
import torch.nn as nn
import yaml

from mmslab.benchmark.complexity import Row, count, read_metafile, rows
from mmslab.layers import SimplifiedLinearAttention

from .commands import tool
from .conftest import ROOT

INDEX = ROOT / 'model-index.yml'


def test_the_index_has_every_config_once():
    named = [m['Config'] for m in read_metafile(INDEX)]
    present = [
        str(p.relative_to(ROOT)) for p in (ROOT / 'configs').rglob('*.py') if not {'_base_', 'demo'} & set(p.parts)
    ]
    assert sorted(named) == sorted(present)
    assert all(m['Name'] == m['Config'].split('/')[-1][:-3] for m in read_metafile(INDEX))


def test_figures_are_marked_as_the_papers():
    for model in read_metafile(INDEX):
        assert 'paper' in model['Metadata']['Source']
        assert ('Results' in model) == model['Metadata']['Source'].startswith('the paper')


def test_figures_of_the_paper():
    """Some of each table, typed from the paper."""
    models = {m['Name']: m for m in read_metafile(INDEX)}
    top1 = {n: m['Results'][0]['Metrics'].get('Top 1 Accuracy') for n, m in models.items() if 'Results' in m}
    want = dict(
        deit_s_ffnbn=78.8, pvt_m_prepbn=81.7, swin_b=83.5, flatten_cswin_t=83.1, sla_swin_s=83.4, deit_t_bn=71.9
    )
    assert {n: top1[n] for n in want} == want
    slab = models['maskrcnn_slab_swin_t_1x']
    assert [r['Metrics'] for r in slab['Results']] == [{'box AP': 43.9}, {'mask AP': 40.1}]
    assert slab['Metadata']['Latency on a V100 in ms (paper)'] == 54.1


def test_sla_is_counted_right():
    """The products that linear attention takes, by hand: both orders of evaluation."""

    class Attention(nn.Module):
        def __init__(self, dims, heads, window):
            super().__init__()
            self.attn = SimplifiedLinearAttention(dims, heads, window)

        def forward(self, x):
            return self.attn(x.flatten(2).transpose(1, 2), hw_shape=self.attn.window_size)

    for dims, heads, side in ((16, 4, 6), (64, 2, 4)):
        n, d = side * side, dims // heads
        linear = n * 4 * dims * dims
        triple = 2 * n * d * d if n > d else 2 * n * n * d
        normalizer = n * d
        convolution = n * dims * 25
        flops, params = count(Attention(dims, heads, side), (dims, side, side))
        assert flops == linear + heads * (triple + normalizer) + convolution
        assert params == 4 * (dims * dims + dims) + 26 * d + n * dims


@pytest.mark.parametrize('only', ['imagenet/deit', 'imagenet/pvt', 'imagenet/swin', 'imagenet/flatten', 'imagenet/sla'])
def test_flops_are_the_papers_within_five_percent(only, undrawn_weights):
    found = list(rows(INDEX, only=only))
    assert len(found) >= 6
    for row in found:
        assert row.paper_gflops is None or not row.marked, row


def test_a_row_that_is_off_is_marked():
    assert (
        Row('a', 'b', 1, 1.06, 1.0).marked and not Row('a', 'b', 1, 0.96, 1.0).marked and not Row('a', 'b', 1, 2).marked
    )


def test_the_tool_prints_a_table(tmp_path):
    entry = dict(Name='mine', Config=str(ROOT / 'configs/imagenet/slab_deit_t.py'), Metadata={'GFLOPs (paper)': 0.5})
    (tmp_path / 'metafile.yml').write_text(yaml.safe_dump(dict(Models=[entry])))
    (tmp_path / 'model-index.yml').write_text('Import: [metafile.yml]')
    run = tool('model_table', '--index', 'model-index.yml', cwd=tmp_path, fork=False)
    assert run.returncode == 0, run.stderr
    assert 'mine' in run.stdout and '+129.1% !' in run.stdout and "1 rows more than 5% off the paper's" in run.stdout
    run = tool('model_table', '--only', 'none', cwd=tmp_path)
    assert run.returncode != 0 and "error: only='none'" in run.stderr
    run = tool('model_table', '--index', 'no.yml', cwd=tmp_path)
    assert run.returncode != 0 and "error: index 'no.yml' does not exist" in run.stderr
