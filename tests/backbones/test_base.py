import pytest
import torch
from mmengine.registry import DefaultScope

from mmslab.backbones import SLABPVT, SLABCSWin, SLABDeiT, SLABSwin
from mmslab.layers import SoftmaxAttention


class InAScope(SoftmaxAttention):
    """What a project registers in its own registry."""


class OfAnother(SoftmaxAttention):
    pass


def registry_of(project):
    if project == 'mmdet':
        from mmdet.registry import MODELS as registry
    else:
        from mmpretrain.registry import MODELS as registry
    return registry


@pytest.fixture
def scope(monkeypatch):
    """Sets the default scope, and leaves the registries and it as they were."""
    monkeypatch.setattr(DefaultScope, '_instance_dict', type(DefaultScope._instance_dict)())
    for project in ('mmdet', 'mmpretrain'):
        monkeypatch.setattr(registry_of(project), '_module_dict', dict(registry_of(project)._module_dict))

    def set_default(name):
        if name is not None:
            DefaultScope.get_instance('test', scope_name=name)

    return set_default


def swin(attn):
    arch = dict(embed_dims=4, depths=(1,), num_heads=(1,))
    return SLABSwin(arch=arch, attn=attn, window_sizes=2, out_indices=(0,))


@pytest.mark.parametrize('default', [None, 'mmengine', 'mmdet', 'mmpretrain'])
@pytest.mark.parametrize('project', ['mmdet', 'mmpretrain'])
def test_an_attention_registered_in_a_project(scope, project, default):
    registry_of(project).register_module(name='_TestInAScope', module=InAScope)
    scope(default)
    for attn in (
        '_TestInAScope',
        f'{project}._TestInAScope',
        dict(type='_TestInAScope', attn_drop=0.5),
        dict(type='_TestInAScope', _scope_=project),
        dict(type=InAScope),
    ):
        model = swin(attn)
        assert type(model.layers[0].blocks[0].attn) is InAScope
    assert model(torch.randn(1, 3, 8, 8))[0].shape == (1, 4, 2, 2)
    assert type(swin('sla').layers[0].blocks[0].attn).__name__ == 'SimplifiedLinearAttention'


def test_every_family_looks_through_the_scopes(scope):
    registry_of('mmdet').register_module(name='_TestInAScope', module=InAScope)
    name = 'mmdet._TestInAScope'
    pvt = dict(embed_dims=(4,), depths=(1,), num_heads=(1,), mlp_ratios=(1,))
    cswin = dict(embed_dims=4, depths=(1,), num_heads=(2,))
    for model in (
        SLABPVT(arch=pvt, attn=name, sr_ratios=1, sla_sr_ratios=1, out_indices=(0,)),
        SLABCSWin(arch=cswin, attn=name, split_sizes=1, sla_split_sizes=1, out_indices=(0,)),
        SLABDeiT(arch=dict(embed_dims=4, depth=1, num_heads=1), attn=name),
    ):
        assert {type(attn) for _, attn in model.attentions()} == {InAScope}


@pytest.mark.parametrize('default, found', [('mmdet', InAScope), ('mmpretrain', OfAnother), (None, None)])
def test_the_default_scope_says_which_of_two(scope, default, found):
    registry_of('mmdet').register_module(name='_TestTwice', module=InAScope)
    registry_of('mmpretrain').register_module(name='_TestTwice', module=OfAnother)
    scope(default)
    assert type(swin('mmpretrain._TestTwice').layers[0].blocks[0].attn) is OfAnother
    if found is None:
        with pytest.raises(ValueError, match="several scopes have.*'mmdet._TestTwice', 'mmpretrain._TestTwice'"):
            swin('_TestTwice')
    else:
        assert type(swin('_TestTwice').layers[0].blocks[0].attn) is found


@pytest.mark.parametrize('default', [None, 'mmdet'])
@pytest.mark.parametrize('name', ['sea', 'mmdet.Sea', 'nowhere.Sea', '.Sea', 'torch'])
def test_an_unknown_name_in_any_scope(scope, name, default):
    scope(default)
    with pytest.raises(ValueError, match=f"attn has the unknown type '{name}'.*focused.*sla.*softmax"):
        swin(name)


def test_attentions_by_name():
    model = SLABCSWin(
        arch=dict(embed_dims=4, depths=(1, 1), num_heads=(2, 2)),
        pretrain_img_size=16,
        split_sizes=1,
        sla_split_sizes=1,
        attn='softmax',
        out_indices=(0, 1),
    )
    names = [f'layers.0.blocks.0.attn.branches.{i}' for i in (0, 1)] + ['layers.1.blocks.0.attn.branches.0']
    assert [name for name, _ in model.attentions()] == names
    assert all(model.get_submodule(name) is attn for name, attn in model.attentions())
