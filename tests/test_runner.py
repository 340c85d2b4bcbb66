"""A checkpoint of data alone, resumed from: what mmengine would do at its word."""

import copy
import pickle

import pytest
import torch
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS, MODELS
from mmengine.visualization import Visualizer

from mmslab.runner import SafeRunner, TextOnce

from .hooks import toy  # noqa: F401  (registers its data and model)

NORM = ('ln.weight', 'ln.bias', 'repbn.eta', 'repbn.bn.weight', 'repbn.bn.bias')


@METRICS.register_module(name='_TestRising', force=True)
class Rising(BaseMetric):
    """Better at each validation, so that CheckpointHook replaces the best checkpoint."""

    def process(self, data_batch, data_samples):
        self.results.append(1)

    def compute_metrics(self, results):
        return dict(score=1e6 + torch.rand(1).item())


def config(work_dir, resume, epochs=2):
    loader = dict(
        batch_size=8,
        dataset=dict(type='_TestItems'),
        sampler=dict(type='DefaultSampler', shuffle=False),
        collate_fn=dict(type='default_collate'),
    )
    checkpoint = dict(
        type='CheckpointHook', save_best='score', rule='greater', max_keep_ckpts=1, filename_tmpl='{}.pth'
    )
    return Config(
        dict(
            default_scope='mmengine',
            model=dict(type='_TestToy'),
            work_dir=str(work_dir),
            train_dataloader=loader,
            train_cfg=dict(by_epoch=True, max_epochs=epochs),
            val_dataloader=loader,
            val_cfg=dict(),
            val_evaluator=dict(type='_TestRising'),
            optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)),
            default_hooks=dict(checkpoint=checkpoint),
            load_from=str(resume),
            resume=True,
            log_level='ERROR',
            experiment_name=f'{work_dir.name}-{epochs}',
        )
    )


@pytest.fixture
def armed(tmp_path):
    """A checkpoint that no reader finds anything in but strings and numbers, and what it is after."""
    (tmp_path / 'precious').mkdir()
    (tmp_path / 'precious' / 'thesis').write_text('years of work')
    (tmp_path / 'other.pth').write_text('another run')
    info = dict(
        best_ckpt=str(tmp_path / 'precious'),
        last_ckpt=str(tmp_path / 'other.pth'),
        keep_ckpt_ids=['../other', '../other', 1],
        best_score=0.0,
    )
    hub = dict(log_scalars={}, runtime_info=info, resumed_keys=dict.fromkeys(info, True))
    meta = dict(epoch=1, iter=2, config=f'open({str(tmp_path / "ran")!r}, "w")\na = 1')
    state = MODELS.build(dict(type='_TestToy')).state_dict()
    torch.save(dict(state_dict=state, meta=meta, message_hub=hub), tmp_path / 'armed.pth')
    return tmp_path


def test_resuming_runs_and_deletes_nothing_at_a_checkpoints_word(armed):
    runner = SafeRunner.build(config(armed / 'out', armed / 'armed.pth'))
    runner.train()
    assert runner.epoch == 2 and (armed / 'out' / '2.pth').exists()
    assert not (armed / 'ran').exists()
    assert (armed / 'precious' / 'thesis').read_text() == 'years of work'
    assert (armed / 'other.pth').exists()


def test_a_trusted_one_is_resumed_as_mmengine_does(armed):
    """So the test above is of a checkpoint that does harm."""
    SafeRunner.build(config(armed / 'out', armed / 'armed.pth'), trust_checkpoint=True).train()
    assert (armed / 'ran').exists() and not (armed / 'precious').exists() and not (armed / 'other.pth').exists()


def test_checkpoints_of_the_run_itself_are_still_replaced(armed):
    """What the hook knows of its own folder survives resuming: the best and the last checkpoint, and which to remove."""
    SafeRunner.build(config(armed / 'out', armed / 'armed.pth')).train()
    (best,) = (armed / 'out').glob('best_*')
    resumed = config(armed / 'out', armed / 'out' / '2.pth', epochs=3)
    known = SafeRunner.build(resumed).load_checkpoint(resumed.load_from)['message_hub']['runtime_info']
    assert known['best_ckpt'] == str(best) and known['keep_ckpt_ids'] == [2] and known['last_ckpt'].endswith('2.pth')
    SafeRunner.build(resumed).train()
    assert not (armed / 'out' / '2.pth').exists() and (armed / 'out' / '3.pth').exists()


def test_scalars_are_in_the_folder_of_their_run(tmp_path):
    """With the name that all of mmdet's configs give their visualizers; another one is made between."""
    backends = [dict(type='LocalVisBackend')]
    for i in range(2):
        cfg = config(tmp_path / f'run{i}', resume=None, epochs=1)
        cfg.resume, cfg.load_from, cfg.visualizer = (
            False,
            None,
            dict(type='Visualizer', name='v', vis_backends=backends),
        )
        runner = SafeRunner.build(cfg)
        assert Visualizer.get_current_instance() is runner.visualizer
        Visualizer.get_instance(f'{tmp_path.name}-{i}')
        runner.train()
        assert len(list((tmp_path / f'run{i}').glob('*/vis_data/scalars.json'))) == 1
        assert len(list(tmp_path.glob('*/*/vis_data/scalars.json'))) == i + 1


def test_the_text_of_a_config_is_made_once(monkeypatch, tmp_path):
    made = []
    text = Config.pretty_text.fget
    monkeypatch.setattr(Config, 'pretty_text', property(lambda self: made.append(self) or text(self)))
    cfg = TextOnce.of(Config(dict(a=1, b=dict(c=[2, 3]))))
    assert cfg.pretty_text == cfg.pretty_text == text(Config(dict(a=1, b=dict(c=[2, 3])))) and len(made) == 1
    cfg.b.c.append(4)
    cfg.dump(tmp_path / 'written.py')
    copied = pickle.loads(pickle.dumps(copy.deepcopy(cfg)))
    assert Config.fromfile(tmp_path / 'written.py').b.c == copied.b.c == [2, 3, 4]
    assert copied.pretty_text == cfg.pretty_text and len(made) <= 3


def test_the_log_has_a_line_for_a_group_of_parameters(tmp_path):
    cfg = config(tmp_path, resume=None)
    cfg.resume, cfg.load_from, cfg.log_level = False, None, 'INFO'
    cfg.model = dict(type='_TestFrozen', how='requires_grad')
    cfg.optim_wrapper.optimizer = dict(type='SGD', lr=0.01, weight_decay=0.1)
    cfg.optim_wrapper.paramwise_cfg = dict(custom_keys=dict(fc1=dict(lr_mult=0.5), fc2=dict(decay_mult=0.0)))
    for level in ('INFO', 'DEBUG'):
        cfg.log_level, cfg.work_dir, cfg.experiment_name = level, str(tmp_path / level), f'{tmp_path.name}-{level}'
        runner = SafeRunner.build(cfg)
        runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
        log = next((tmp_path / level).glob('*/*.log')).read_text().splitlines()
        said = [line.split(' - ')[-1] for line in log if 'paramwise options' in line or 'not trained' in line]
        assert said == [
            'paramwise options lr=0.005, weight_decay=0.1, lr_mult=0.5: 2 parameters, backbone.fc1.weight, '
            'backbone.fc1.bias',
            'paramwise options lr=0.01, weight_decay=0.0, decay_mult=0.0: 2 parameters, backbone.fc2.weight, '
            'backbone.fc2.bias',
            'not trained (requires_grad=False): 10 parameters, '
            + ', '.join(f'backbone.norm{i}.{n}' for i in (1, 2) for n in NORM),
        ]
        single = [line for line in log if 'paramwise_options --' in line or 'is skipped' in line]
        assert len(single) == (0 if level == 'INFO' else 22) and all('DEBUG' in line for line in single)
    groups = runner.optim_wrapper.optimizer.param_groups
    assert [(g['lr'], g['weight_decay']) for g in groups] == [(0.005, 0.1)] * 2 + [(0.01, 0.0)] * 2


def test_a_key_that_a_loop_does_not_take_is_named_before_anything_is_written(tmp_path):
    cfg = config(tmp_path / 'out', resume=None)
    cfg.train_cfg.max_epoch = 2
    with pytest.raises(
        ValueError, match="train_cfg.max_epoch=2: EpochBasedTrainLoop has no .*Did you mean 'max_epochs'"
    ):
        SafeRunner.build(cfg)
    del cfg.train_cfg['max_epoch']
    cfg.test_cfg = dict(fp17=True)
    with pytest.raises(ValueError, match="test_cfg.fp17=True: TestLoop has no such argument. Did you mean 'fp16'"):
        SafeRunner.build(cfg)
    assert not (tmp_path / 'out').exists()
