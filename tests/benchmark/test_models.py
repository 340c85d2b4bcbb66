from dataclasses import replace

import pytest
import torch
import yaml
from mmengine.registry import MODELS, init_default_scope

from mmslab.benchmark.complexity import count
from mmslab.benchmark.models import INDEX, Settings, check_inputs, names_of, paper_figures, prepare, read_config
from mmslab.benchmark.run import run
from mmslab.layers import set_gamma

from ..conftest import ROOT

DETECTOR = ROOT / 'configs' / 'demo' / 'maskrcnn_slab_swin_shapes.py'
CLASSIFIER = ROOT / 'configs' / 'demo' / 'slab_pvt_shapes_classes.py'
SWIN_LN = ROOT / 'configs' / 'maskrcnn_swin_t_1x.py'


def prepared(config, **settings):
    settings = Settings(device='cpu', image=settings.pop('image', (64, 64)), **settings)
    return prepare('name', config, read_config(config), settings)


@pytest.fixture(scope='module')
def detector():
    return prepared(DETECTOR, image=(60, 50), no_fold=True)


def test_a_detector_is_folded_with_its_unfolded_twin_beside(detector):
    assert [(s.name, s.folded) for s in detector] == [('name (folded)', True), ('name', False)]
    assert detector[0].params < detector[1].params
    assert detector[0].image == (60, 50) and detector[0].padded == (64, 64)
    assert {s.group for s in detector} == {'SLAB: SLA and PRepBN'}


def test_a_detector_with_random_weights_has_a_full_image(detector):
    """50 boxes with masks is what the config lets through, and of its size before padding, as mmdet's test makes them."""
    for s in detector:
        assert s.detections == [50] and s.peak_memory > 0
        found = s.call()[0].pred_instances
        assert len(found) == 50 and found.masks.shape == (50, 60, 50)


def test_folded_and_unfolded_find_the_same(detector):
    a, b = (s.call()[0].pred_instances for s in detector)
    assert torch.allclose(a.scores, b.scores, atol=1e-4)


def test_a_row_is_reproducible():
    a, b, other = (prepared(CLASSIFIER, seed=seed)[0].call() for seed in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, other)


def test_flops_are_those_of_one_image_unfolded():
    subjects = prepared(CLASSIFIER, mode='throughput', batch_size=3, no_fold=True)
    backbones = prepared(CLASSIFIER, scope='backbone')
    model = MODELS.build(read_config(CLASSIFIER).model)
    set_gamma(model, 0)
    assert {s.flops for s in subjects} == {count(model, (3, 64, 64))[0]}
    assert backbones[0].flops == count(model.backbone, (3, 64, 64))[0] < subjects[0].flops
    assert subjects[1].params == sum(p.numel() for p in model.parameters())
    assert subjects[0].call().shape == (3, 5) and backbones[0].call()[0].shape == (1, 256, 2, 2)


def test_precision_and_format():
    (want,) = prepared(CLASSIFIER, scope='backbone')[0].call()
    for settings in (dict(dtype='bf16'), dict(dtype='amp'), dict(channels_last=True)):
        (got,) = prepared(CLASSIFIER, scope='backbone', **settings)[0].call()
        assert (got.float() - want).abs().max() < (1e-5 if 'channels_last' in settings else 0.1) * want.abs().max()
        assert 'dtype' not in settings or not torch.equal(got.float(), want)
        assert (got.dtype == torch.bfloat16) == (settings.get('dtype') == 'bf16')


def test_layer_norm_has_nothing_to_fold_and_nothing_is_downloaded():
    """A backbone of ours and one of mmdet's, whose config names weights on the web."""
    subjects = prepared(SWIN_LN, scope='backbone', no_fold=True)
    subjects += prepared('mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py', scope='backbone', no_fold=True)
    assert not any(s.folded for s in subjects) and {s.group for s in subjects} == {'LayerNorm'}
    inference, ours, mmdets = subjects
    assert inference.name == f'{ours.name} (inference form)'
    assert ours.params == mmdets.params  # Swin-T both
    assert inference.params == pytest.approx(ours.params, rel=0.001)  # position biases are no parameters any more
    assert ours.flops == pytest.approx(mmdets.flops, rel=0.01)


def test_a_checkpoint_is_loaded_before_folding(tmp_path):
    cfg = read_config(CLASSIFIER)
    init_default_scope(cfg.default_scope)
    torch.manual_seed(5)
    model = MODELS.build(cfg.model).eval()
    set_gamma(model, 0)
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'a.pth')
    settings = Settings(device='cpu', image=(64, 64))
    (subject,) = prepare('a', CLASSIFIER, cfg, settings, tmp_path / 'a.pth')
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(subject.call(), model(x), atol=1e-4)
    assert subject.folded and subject.checkpoint == str(tmp_path / 'a.pth')

    set_gamma(model, 0.5)  # in the middle of the handover: not to be folded, and not silently made so
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'half.pth')
    with pytest.raises(ValueError, match='^a: .*gamma'):
        prepare('a', CLASSIFIER, cfg, settings, tmp_path / 'half.pth')
    torch.save(dict(state_dict={'conv.weight': torch.zeros(1)}), tmp_path / 'other.pth')
    with pytest.raises(ValueError, match="checkpoint '.*other.pth' is not of this config: it lacks"):
        prepare('a', CLASSIFIER, cfg, settings, tmp_path / 'other.pth')


def test_figures_of_the_paper():
    swin = paper_figures(ROOT / 'configs' / 'maskrcnn_swin_t_1x.py')
    assert swin == dict(latency=51.0, accuracy=43.1, metric='box AP')
    deit = paper_figures(ROOT / 'configs' / 'imagenet' / 'deit_t.py')
    assert deit == dict(throughput=3432, accuracy=72.2, metric='Top 1 Accuracy')
    for without in (DETECTOR, 'mmdet::swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py', 'configs/maskrcnn_slab_pvt_t_1x.py'):
        assert paper_figures(without) == {}
    assert paper_figures(DETECTOR, 'nowhere.yml') == {} and INDEX.is_file()


@pytest.mark.parametrize(
    'scope, image, has', [('model', (224, 224), True), ('model', (64, 64), False), ('backbone', (224, 224), False)]
)
def test_the_papers_speed_is_shown_beside_what_it_measured(tmp_path, monkeypatch, scope, image, has):
    entry = dict(
        Config=str(CLASSIFIER),
        Metadata={'Latency on a V100 in ms (paper)': 8.0},
        Results=[dict(Metrics={'Top 1 Accuracy': 76.5})],
    )
    (tmp_path / 'metafile.yml').write_text(yaml.safe_dump(dict(Models=[entry])))
    (tmp_path / 'model-index.yml').write_text('Import: [metafile.yml]')
    monkeypatch.setattr(paper_figures, '__defaults__', (tmp_path / 'model-index.yml',))
    (subject,) = prepared(CLASSIFIER, scope=scope, image=image)
    accuracy = dict(accuracy=76.5, metric='Top 1 Accuracy')
    assert subject.paper == (dict(accuracy, latency=8.0) if has else accuracy)


def test_names():
    assert names_of(['configs/a.py', 'mmdet::swin/b.py']) == ['a', 'b']
    assert names_of(['x/a.py', 'y/a.py', 'b.py', 'b.py']) == ['x/a', 'y/a', 'b #1', 'b #2']


@pytest.mark.parametrize(
    'wrong, message',
    [
        (dict(mode='speed'), "mode must be one of .*, but got 'speed'"),
        (dict(scope='neck'), "scope must be one of .*, but got 'neck'"),
        (dict(dtype='fp8'), "dtype must be one of .*, but got 'fp8'"),
        (dict(image=(0, 32)), r'image must be a height and a width in pixels, but got \(0, 32\)'),
        (dict(batch_size=2), 'batch_size=2 is for --throughput'),
        (dict(mode='throughput', batch_size=0), 'batch_size must be at least 1, but got 0'),
        (dict(rounds=4), 'rounds must be at least 5, but got 4'),
        (dict(warmup=-1), 'warmup must be at least 0, but got -1'),
        (dict(threads=0), 'threads must be at least 1, but got 0'),
        (dict(processes=-1), 'processes must be at least 0, but got -1'),
        (dict(processes=1, allocator='tbb'), "allocator must be one of .*'jemalloc'.* or None, but got 'tbb'"),
        (dict(allocator='jemalloc'), "allocator='jemalloc' takes a process that is started with it.*, but got 0"),
        (dict(mode='flops', processes=2), 'processes=2 and allocator=None are for --latency and --throughput'),
        (dict(protocol='ours'), "protocol must be one of .*, but got 'ours'"),
        (dict(protocol='paper', scope='backbone'), "protocol='paper' has scope='model', but got 'backbone'"),
        (dict(protocol='paper', rounds=20), "protocol='paper' has rounds=100, but got 20"),
        (dict(protocol='paper', image=(800, 1344)), r"'paper' has image=\(800, 1333\), but got \(800, 1344\)"),
        (dict(protocol='paper', processes=5), "protocol='paper' is of one process, but got processes=5"),
        (dict(device='gpu'), "device 'gpu' is none that torch knows"),
        (dict(device='meta'), "device 'meta' cannot be timed"),
        (dict(device='cpu', cuda_graph=True), "cuda_graph needs a GPU, but device is 'cpu'"),
    ],
)
def test_settings_that_make_no_sense(wrong, message):
    with pytest.raises(ValueError, match=message):
        Settings(**wrong)


def test_the_papers_protocol():
    settings = Settings(protocol='paper', processes=1, device='cpu', scales=[1])
    assert (settings.mode, settings.scope, settings.image, settings.rounds) == ('latency', 'model', (800, 1333), 100)
    assert settings.batch_size == 1 and settings == replace(settings)
    with pytest.raises(ValueError, match="slab_pvt_shapes_classes.py: protocol='paper' is of whole detectors"):
        check_inputs([CLASSIFIER], None, settings)


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(ValueError, match="device 'cuda:0': there is no GPU here"):
        Settings(device='cuda:0')
    assert Settings().device == 'cpu'
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    with pytest.raises(ValueError, match="device 'cuda:3': the GPUs here are cuda:0 to cuda:0"):
        Settings(device='cuda:3')
    with pytest.raises(ValueError, match='a CUDA graph cannot hold a whole detector'):
        check_inputs([DETECTOR], None, Settings(device='cuda:0', cuda_graph=True))


@pytest.mark.parametrize(
    'configs, saved, error, message',
    [
        ([], None, ValueError, 'no config given'),
        (['no.py'], None, FileNotFoundError, "config 'no.py' does not exist"),
        (['mmdet::no.py'], None, FileNotFoundError, "'mmdet::no.py' does not exist: mmdet has no configs/no.py"),
        (['mmnone::a.py'], None, ValueError, "no package 'mmnone' is installed"),
        ([ROOT / 'configs/_base_/coco_1x.py'], None, ValueError, 'has no model with a backbone'),
        (
            [CLASSIFIER],
            ['a', 'b'],
            ValueError,
            '--checkpoint must name one file for each config, in their order, but got 2 for 1',
        ),
        ([CLASSIFIER], ['a.pth'], FileNotFoundError, "checkpoint 'a.pth' does not exist"),
    ],
)
def test_input_that_is_missing(configs, saved, error, message):
    with pytest.raises(error, match=message):
        check_inputs(configs, saved, Settings(device='cpu'))


def test_what_cannot_run_is_named_before_anything_is_measured(monkeypatch):
    import mmslab.benchmark.run as module

    monkeypatch.setattr(module, 'measure', lambda *_: pytest.fail('measured'))
    message = (
        r'slab_pvt_shapes_classes \(folded\): cannot run on 1 x 2x3 pixels in fp32 on cpu .*smaller than one patch'
    )
    with pytest.raises(ValueError, match=message):
        run([CLASSIFIER], Settings(device='cpu', image=(2, 3)), show_progress=False)
    message = r'maskrcnn_slab_swin_shapes \(folded\): cannot run on 1 x 64x64 pixels in fp16 on cpu \(.*Error'
    with pytest.raises(ValueError, match=message):
        run([DETECTOR], Settings(device='cpu', image=(64, 64), dtype='fp16'), show_progress=False)
