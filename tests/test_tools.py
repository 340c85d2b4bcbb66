"""The command lines, as a user types them, each once in a Python of its own."""

import os
import subprocess
import sys
from pathlib import Path

import cv2
import pytest
import torch

from mmslab.apis import build_tester, build_trainer, infer
from mmslab.data.shapes import make_shapes
from mmslab.deploy.export import TORCH

from .commands import tool
from .conftest import ROOT, needs_torch

CONFIG = ROOT / 'configs' / 'demo' / 'maskrcnn_slab_swin_shapes.py'
COCO = ROOT / 'configs' / 'maskrcnn_slab_swin_t_1x.py'
# the demo's model in minutes' stead: two epochs of four iterations on 64 pixels
SHORT = [
    'train_dataloader.batch_size=4',
    'train_cfg.max_epochs=2',
    'train_cfg.val_interval=2',
    'default_hooks.checkpoint.interval=1',
    'custom_hooks.0.T=1.0',
    'custom_hooks.0.hold=0.0',
]


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """Shapes, and a run of tools/train.py on them that was stopped after one epoch and resumed."""
    root = tmp_path_factory.mktemp('run')
    made = tool('make_shapes', 'shapes', '--num-train', 16, '--num-val', 4, '--size', 64, cwd=root, fork=False)
    assert made.returncode == 0 and 'instances to train on' in made.stdout, made.stderr
    env = dict(SHAPES_ROOT='shapes')
    first = tool(
        'train',
        CONFIG,
        '--work-dir',
        'out',
        '--cfg-options',
        *SHORT,
        'train_cfg.max_epochs=1',
        cwd=root,
        env=env,
        fork=False,
    )
    assert first.returncode == 0, first.stderr
    second = tool('train', CONFIG, '--work-dir', 'out', '--resume', '--cfg-options', *SHORT, cwd=root, env=env)
    assert second.returncode == 0, second.stderr
    return root, second.stdout


def test_train_resumes_recalibrates_and_shows_progress(trained):
    root, output = trained
    checkpoint = torch.load(root / 'out' / 'epoch_2.pth', weights_only=False)
    gammas = {float(v) for k, v in checkpoint['state_dict'].items() if k.endswith('gamma')}
    assert gammas == {0.0} and checkpoint['meta']['iter'] == 8
    log = sorted(root.glob('out/*/*.log'))[-1].read_text()
    assert 'resumed epoch: 1, iter: 4' in log
    assert 'BN statistics of 20 layers of the model recalibrated over 4 batches' in log
    assert output.count('validation after iteration 8') == 2 and 'bbox_mAP_50' in output


def test_test_evaluates_and_writes_predictions(trained):
    root, _ = trained
    args = (CONFIG, 'out/epoch_2.pth', '--work-dir', 'eval', '--out', 'eval.pkl', '--show-dir', 'shown')
    run = tool('test', *args, cwd=root, env=dict(SHAPES_ROOT='shapes'))
    assert run.returncode == 0, run.stderr
    assert 'coco/segm_mAP_50' in run.stdout and (root / 'eval.pkl').stat().st_size > 0
    assert len(list((root / 'eval').glob('*/shown/*'))) == 4
    again = tool('test', *args, cwd=root, env=dict(SHAPES_ROOT='shapes'), fork=False)
    assert again.returncode != 0 and "error: --out 'eval.pkl' exists" in again.stderr


@pytest.mark.parametrize('kind', ['foreign', 'another arch', 'nan', 'code'])
def test_a_checkpoint_that_does_not_fit_is_named(trained, monkeypatch, kind):
    root, _ = trained
    monkeypatch.chdir(root)
    monkeypatch.setenv('SHAPES_ROOT', 'shapes')
    good = torch.load('out/epoch_2.pth', weights_only=False)
    state = dict(good['state_dict'])
    key = 'backbone.layers.0.blocks.0.mlp.fc1.weight'
    if kind == 'foreign':
        state, message = {'conv1.weight': torch.zeros(3)}, 'is not of this config: it lacks'
    elif kind == 'another arch':
        state, message = {**state, key: torch.zeros(8, 8)}, r'is not of this config: .*fc1.weight.* is \(8, 8\) there'
    elif kind == 'nan':
        state, message = {**state, key: state[key] * float('nan')}, 'NaN or infinite values in .*fc1.weight'
    else:
        good, message = {**good, 'extra': Path('.')}, 'Python objects beside tensors.*--trust-checkpoint'
    torch.save({**good, 'state_dict': state}, 'bad.pth')
    with pytest.raises(ValueError, match=message):
        build_tester(CONFIG, 'bad.pth', work_dir='bad')
    with pytest.raises(ValueError, match=message):
        infer('shapes/val', CONFIG, 'bad.pth', 'bad_drawn')
    with pytest.raises(ValueError, match=message):
        build_trainer(CONFIG, work_dir='bad', resume='bad.pth')
    if kind == 'code':
        assert build_tester(CONFIG, 'bad.pth', work_dir='bad', trust_checkpoint=True)
    if kind == 'foreign':
        torch.save(state, 'bare.pth')
        with pytest.raises(ValueError, match='--resume .*bare.pth.* holds weights alone'):
            build_trainer(CONFIG, work_dir='bad', resume='bare.pth')


def test_infer_draws_a_folder_and_an_image(trained):
    root, _ = trained
    args = ('--config', CONFIG, '--checkpoint', 'out/epoch_2.pth', '--out', 'drawn', '--score-thr', 0.0)
    run = tool('infer', 'shapes/val', *args, cwd=root)
    assert run.returncode == 0 and '4 images drawn into drawn' in run.stdout, run.stderr
    assert 'detections with a score of at least 0 in drawn/predictions.json' in run.stdout
    for image in (root / 'shapes' / 'val').iterdir():
        drawn = cv2.imread(str(root / 'drawn' / image.name))
        assert drawn is not None and abs(drawn.astype(int) - cv2.imread(str(image))).max() > 30
    again = tool('infer', 'shapes/val/000001.jpg', *args, cwd=root)
    assert again.returncode != 0 and again.stderr.startswith('error: out: ') and '--force' in again.stderr


def test_demo_trains_evaluates_and_draws(trained):
    """The whole of the demo but its length; and a second one leaves the first alone."""
    root, _ = trained
    (root / 'demo').mkdir()
    (root / 'demo' / 'mine').write_text('kept')
    run = tool('demo', '--out', 'demo', '--data', 'shapes', '--cfg-options', *SHORT, cwd=root, fork=False)
    assert run.returncode == 0, run.stderr
    assert (root / 'demo.1' / 'mine').read_text() == 'kept'
    for said in ('using the shapes in shapes', 'gamma over the iterations', 'before recalibration', 'mask AP50'):
        assert said in run.stdout, run.stdout
    assert 'gamma of the final checkpoint: 0' in run.stdout and 'mmengine - INFO' not in run.stdout
    assert (root / 'demo' / 'slab_swin_shapes.pth').exists() and len(list((root / 'demo' / 'drawn').glob('*.png'))) == 4
    assert len(list((root / 'demo' / 'drawn').iterdir())) == 5  # and predictions.json
    assert 'folded against original' in run.stdout and 'roi_head.mask_head' in run.stdout
    state = torch.load(root / 'demo' / 'deploy' / 'slab_swin_shapes_deploy.pth', weights_only=True)['state_dict']
    assert not any('repbn' in key for key in state)
    assert 'maskrcnn_slab_swin_shapes (folded)' in run.stdout and 'latency of the whole model' in run.stdout
    curves = cv2.imread(str(root / 'demo' / 'curves.png'))
    assert curves.shape[0] > 600 and curves.std() > 10


def test_from_classification_to_detection(trained):
    """Pre-training on classes, gamma from 1 to 0; its checkpoint starts a detector at gamma 0 with frozen statistics."""
    root, _ = trained
    made = tool('make_shapes', 'classes', '--classes', '--num-train', 32, '--num-val', 10, '--size', 64, cwd=root)
    assert made.returncode == 0 and '32 images to train on, 10 held out' in made.stdout, made.stderr
    configs = ROOT / 'configs' / 'demo'
    env = dict(SHAPE_CLASSES_ROOT='classes', SHAPES_ROOT='shapes', SHAPES_CLASSIFIER='classifier/epoch_2.pth')
    options = ('train_cfg.max_epochs=2', 'train_dataloader.batch_size=8')
    run = tool(
        'train',
        configs / 'slab_pvt_shapes_classes.py',
        '--work-dir',
        'classifier',
        '--cfg-options',
        *options,
        cwd=root,
        env=env,
    )
    assert run.returncode == 0 and 'top1' in run.stdout, run.stderr
    classifier = torch.load(root / 'classifier' / 'epoch_2.pth', weights_only=False)['state_dict']
    assert {float(v) for k, v in classifier.items() if k.endswith('gamma')} == {0.0}
    options = ('train_cfg.max_epochs=1', 'train_dataloader.batch_size=8')
    run = tool(
        'train',
        configs / 'maskrcnn_slab_pvt_shapes.py',
        '--work-dir',
        'pvt',
        '--cfg-options',
        *options,
        cwd=root,
        env=env,
    )
    assert run.returncode == 0 and 'bbox_mAP_50' in run.stdout, run.stderr
    log = next(root.glob('pvt/*/*.log')).read_text()
    assert '0 resized, 0 newly initialized, 2 unused' in log and 'unused: head.fc.weight, head.fc.bias' in log
    detector = torch.load(root / 'pvt' / 'epoch_1.pth', weights_only=False)['state_dict']
    for key, value in classifier.items():
        if key.endswith(
            ('running_mean', 'running_var', 'gamma')
        ):  # the statistics are the classifier's; weights move on
            assert torch.equal(detector[key], value), key
    assert not torch.equal(detector['backbone.patch_embed.proj.weight'], classifier['backbone.patch_embed.proj.weight'])


def test_convert_checkpoint(trained):
    root, _ = trained
    run = tool('convert_checkpoint', 'out/epoch_2.pth', 'converted.pth', cwd=root, fork=False)
    assert run.returncode == 0 and '0 renamed' in run.stdout, run.stderr
    state = torch.load(root / 'converted.pth', weights_only=True)['state_dict']
    assert state.keys() == torch.load(root / 'out' / 'epoch_2.pth', weights_only=False)['state_dict'].keys()


def test_deploy_folds_and_the_tester_agrees(trained):
    root, _ = trained
    env = dict(SHAPES_ROOT='shapes')
    run = tool('deploy', CONFIG, 'out/epoch_2.pth', '--out', 'folded', cwd=root, env=env)
    assert run.returncode == 0 and 'roi_head.mask_head' in run.stdout, run.stderr
    config, checkpoint = f'folded/{CONFIG.stem}_deploy.py', 'folded/epoch_2_deploy.pth'
    assert config in run.stdout and checkpoint in run.stdout
    content = torch.load(root / 'out' / 'epoch_2.pth', weights_only=False)
    for key, value in content['state_dict'].items():
        if key.endswith('gamma'):
            value.fill_(0.5)
    torch.save(content, root / 'half.pth')
    half = tool('deploy', CONFIG, 'half.pth', '--out', 'half', cwd=root, env=env, fork=False)
    assert half.returncode != 0 and 'LayerNorm is still in use' in half.stderr and 'Traceback' not in half.stderr
    assert not (root / 'half').exists()
    tested = tool('test', config, checkpoint, '--work-dir', 'folded_eval', cwd=root, env=env)
    assert tested.returncode == 0 and 'coco/segm_mAP_50' in tested.stdout, tested.stderr


@needs_torch(TORCH)
def test_export_writes_a_graph(trained):
    root, _ = trained
    args = ('export', CONFIG, 'out/epoch_2.pth', '--out', 'graph.onnx', '--size', 64, 64)
    run = tool(*args, cwd=root, env=dict(SHAPES_ROOT='shapes'), fork=False)
    assert run.returncode == 0 and 'map3' in run.stdout and 'graph.onnx' in run.stdout, run.stderr
    assert (root / 'graph.onnx').stat().st_size > 1e6


def test_coco_that_is_not_there_is_one_line(tmp_path):
    run = tool('train', COCO, cwd=tmp_path, env=dict(COCO_ROOT='nowhere/coco'))
    assert run.returncode != 0
    (line,) = [text for text in run.stderr.splitlines() if 'error' in text]
    assert line.startswith(
        "error: train_dataloader: 'nowhere/coco/annotations/instances_train2017.json' does not exist."
    )
    assert 'COCO_ROOT' in line and 'make demo' in line and 'Traceback' not in run.stderr
    assert not (tmp_path / 'work_dirs').exists()


@pytest.fixture
def shapes(tmp_path, monkeypatch):
    make_shapes(tmp_path / 'shapes', num_train=4, num_val=2, size=64, progress=False)
    monkeypatch.setenv('SHAPES_ROOT', str(tmp_path / 'shapes'))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_bad_input_to_training_is_named(shapes):
    derived = shapes / 'derived.py'
    init = "model = dict(backbone=dict(init_cfg=dict(_delete_=True, type='Pretrained', checkpoint='no.pth')))"
    derived.write_text(f'_base_ = {str(CONFIG)!r}\n{init}\n')
    unscaled = shapes / 'unscaled.py'
    unscaled.write_text(f'_base_ = {str(CONFIG)!r}\nauto_scale_lr = dict(_delete_=True, enable=False)\n')
    with pytest.raises(FileNotFoundError, match='config .*no.py.* does not exist'):
        build_trainer('no.py')
    with pytest.raises(FileNotFoundError, match='--resume .*no.pth.* does not exist'):
        build_trainer(CONFIG, resume='no.pth')
    with pytest.raises(FileNotFoundError, match='pre-trained weights .*no.pth.*init_cfg=None'):
        build_trainer(derived, work_dir=shapes / 'out')
    assert build_trainer(derived, work_dir=shapes / 'out', options={'model.backbone.init_cfg': None})
    (shapes / 'file').write_text('mine')
    with pytest.raises(OSError, match='work_dir=.*cannot be written'):
        build_trainer(CONFIG, work_dir=shapes / 'file' / 'sub')
    with pytest.raises(ValueError, match='--auto-scale-lr needs'):
        build_trainer(unscaled, auto_scale_lr=True)
    with pytest.raises(ValueError, match='mask_head.num_classes=3, but train_dataloader.dataset has the 5 classes'):
        build_trainer(CONFIG, options={'model.roi_head.mask_head.num_classes': 3})
    swapped = {'val_dataloader.dataset.metainfo.classes': ('rectangle', 'disc', 'triangle', 'star', 'ring')}
    with pytest.raises(ValueError, match='val_dataloader: the classes .* have another order'):
        build_trainer(CONFIG, options=swapped)
    assert not (shapes / 'work_dirs').exists()


def test_bad_input_to_evaluation_and_drawing_is_named(shapes, monkeypatch):
    with pytest.raises(FileNotFoundError, match='checkpoint .*no.pth.* does not exist'):
        build_tester(CONFIG, 'no.pth')
    with pytest.raises(ValueError, match='--out must name a .pkl file'):
        build_tester(CONFIG, 'no.pth', out='a.json')
    with pytest.raises(ValueError, match='bbox_head.num_classes=80, but test_dataloader.dataset has the 5 classes'):
        build_tester(CONFIG, 'no.pth', options={'model.roi_head.bbox_head.num_classes': 80})
    trained = dict(classes=('rectangle', 'disc', 'triangle', 'star', 'ring'))
    torch.save(dict(meta=dict(dataset_meta=trained), state_dict={}), 'swapped.pth')
    with pytest.raises(ValueError, match="label 0 is 'disc' in test_dataloader.* training of checkpoint 'swapped.pth'"):
        build_tester(CONFIG, 'swapped.pth', work_dir='out')
    with pytest.raises(FileNotFoundError, match='no image at .*empty'):
        (shapes / 'empty').mkdir()
        infer(shapes / 'empty', CONFIG, 'no.pth', 'drawn')
    with pytest.raises(FileNotFoundError, match='checkpoint .*no.pth.* does not exist'):
        infer(shapes / 'shapes' / 'val', CONFIG, 'no.pth', 'drawn')
    with pytest.raises(ValueError, match='score_thr must lie in'):
        infer(shapes / 'shapes' / 'val', CONFIG, 'no.pth', 'drawn', score_thr=2)
    assert not Path('drawn').exists()
    (shapes / 'empty' / 'a.jpg').write_text('no image')
    with pytest.raises(ValueError, match='a.jpg.* is no image that can be read'):
        infer(shapes / 'empty', CONFIG, 'no.pth', 'drawn')
    val = shapes / 'shapes' / 'val'
    with pytest.raises(ValueError, match='is where the images are, which would be overwritten'):
        infer(val, CONFIG, 'no.pth', val, force=True)
    with pytest.raises(ValueError, match="device 'gpu' is none that torch knows"):
        infer(val, CONFIG, 'no.pth', 'drawn', device='gpu')
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(ValueError, match="device 'cuda:0': there is no GPU here"):
        infer(val, CONFIG, 'no.pth', 'drawn', device='cuda:0')
    with pytest.raises(ValueError, match='mixed precision .* needs a GPU'):
        build_trainer(CONFIG, work_dir='out', amp=True)


def test_frozen_stages_cannot_hand_over(shapes):
    """The backbone's own freezing, through a whole runner: refused before the first step."""
    options = {'model.backbone.frozen_stages': 1, 'log_level': 'ERROR'}
    run = build_trainer(CONFIG, work_dir=shapes / 'out', options=options)
    message = '6 of 20 PRepBN layers have gamma above 0 and a frozen RepBN.*: backbone.patch_embed.norm, '
    with pytest.raises(ValueError, match=message):
        run.train()
    assert run.iter == 0 and not list((shapes / 'out').glob('*.pth'))


def test_what_this_package_did_not_raise_keeps_its_trace(tmp_path):
    code = "from mmslab.errors import input_errors\nwith input_errors():\n    raise ValueError('a defect')"
    run = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, cwd=ROOT)
    assert 'Traceback' in run.stderr and 'ValueError: a defect' in run.stderr


@pytest.mark.parametrize('name', ['dist_train', 'dist_test'])
def test_distributed_scripts_call_torchrun(name, tmp_path):
    """With a torchrun that prints its arguments; tests/test_distributed.py has a real one."""
    fake = tmp_path / 'torchrun'
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    positional = ['c.py', '4'] if name == 'dist_train' else ['c.py', 'w.pth', '4']
    env = {**os.environ, 'PATH': f'{tmp_path}:{os.environ["PATH"]}', 'NNODES': '2', 'NODE_RANK': '1', 'PORT': '1234'}
    script = ROOT / 'tools' / f'{name}.sh'
    out = subprocess.run([script, *positional, '--amp'], env=env, capture_output=True, text=True).stdout.splitlines()
    assert out[:5] == [
        '--nnodes=2',
        '--node_rank=1',
        '--master_addr=127.0.0.1',
        '--master_port=1234',
        '--nproc_per_node=4',
    ]
    assert out[5].endswith('train.py' if name == 'dist_train' else 'test.py')
    assert out[6:] == [*positional[:-1], '--launcher', 'pytorch', '--amp']
    usage = subprocess.run([script, 'c.py'], env=env, capture_output=True, text=True)
    assert usage.returncode == 2 and 'CONFIG' in usage.stderr
