import pytest
import torch
import torch.nn.functional as F
from mmcv.cnn.bricks.transformer import BaseTransformerLayer

from mmslab.checkpoints import canonical
from mmslab.layers import FocusedLinearAttention, SimplifiedLinearAttention, SoftmaxAttention, SoftmaxWindowAttention
from mmslab.layers.attention import linear_attention

from ..conftest import assert_relative, golden, randomize


@pytest.mark.parametrize(
    'name, cls, args',
    [
        ('sla_window', SimplifiedLinearAttention, (24, 3, 6)),
        ('sla_window_small', SimplifiedLinearAttention, (48, 2, 3)),
        ('focused_window', FocusedLinearAttention, (24, 3, 6)),
    ],
)
def test_linear_attention_matches_the_authors(name, cls, args):
    arrays, state = golden(name)
    attn = cls(*args)
    attn.load_state_dict(canonical(state))
    assert_relative(attn(arrays['x']), arrays['y'])


@pytest.mark.parametrize('sr_ratio', [1, 2])
def test_spatially_reduced_linear_attention_matches_the_authors(sr_ratio):
    arrays, state = golden(f'sla_pvt_sr{sr_ratio}')
    attn = SimplifiedLinearAttention(24, 3, 8, sr_ratio=sr_ratio)
    state = canonical({f'attn.{k}': v for k, v in state.items()})
    attn.load_state_dict({k[len('attn.') :]: v for k, v in state.items()})
    assert_relative(attn(arrays['x'], hw_shape=(8, 8)), arrays['y'])


def eq_9(attn, x, hw):
    """Eq. 9 to the letter in float64: sums over pairs of tokens, a loop over the taps of the convolution."""
    p = {k: v.double() for k, v in attn.state_dict().items()}
    B, N, C = x.shape
    (h, w), heads, d = hw, attn.num_heads, C // attn.num_heads
    q, k, v = (x.double() @ p['qkv.weight'].t() + p['qkv.bias']).split(C, dim=-1)
    q, k = q.clamp(min=0), (k + p['positional_encoding']).clamp(min=0)
    out = torch.zeros(B, N, C, dtype=torch.float64)
    for head in range(heads):
        c = slice(head * d, head * d + d)
        for i in range(N):
            similarity = torch.stack([(q[:, i, c] * k[:, j, c]).sum(-1) for j in range(N)], dim=1)
            weights = similarity / (similarity.sum(1, keepdim=True) + 1e-6)
            out[:, i, c] = sum(weights[:, j, None] * v[:, j, c] for j in range(N))
    grid = v.view(B, h, w, heads, d)
    for dy in range(-2, 3):
        for dx in range(-2, 3):
            tap = p['dwc.weight'][:, 0, dy + 2, dx + 2]
            for y in range(max(0, -dy), min(h, h - dy)):
                for z in range(max(0, -dx), min(w, w - dx)):
                    out.view(B, h, w, heads, d)[:, y, z] += tap * grid[:, y + dy, z + dx]
    out += p['dwc.bias'].repeat(heads)
    return out @ p['proj.weight'].t() + p['proj.bias']


# 4 and 15 tokens against 8 dimensions of a head: one case for each order of evaluation, and rectangular windows
@pytest.mark.parametrize('hw', [(2, 2), (3, 5), (5, 3)])
def test_sla_is_eq_9(hw):
    attn = randomize(SimplifiedLinearAttention(16, 2, hw))
    x = torch.randn(2, hw[0] * hw[1], 16)
    want = eq_9(attn, x, hw)
    assert_relative(attn(x).double(), want, 1e-5)
    assert_relative(attn.double()(x.double()), want, 1e-12)


def test_both_orders_agree():
    q, k = torch.rand(2, 12, 16, dtype=torch.float64), torch.rand(2, 12, 16, dtype=torch.float64)
    v = torch.randn(2, 12, 16, dtype=torch.float64)
    # 12 tokens: more than the 4 dimensions of one of 4 heads, fewer than the 16 of a single head
    for heads in (1, 4):
        split = [t.view(2, 12, heads, -1).transpose(1, 2) for t in (q, k, v)]
        similarity = split[0] @ split[1].transpose(-2, -1)
        want = similarity / (similarity.sum(-1, keepdim=True) + 1e-6) @ split[2]
        assert_relative(linear_attention(q, k, v, heads), want.transpose(1, 2).reshape(2, 12, 16), 1e-12)


@pytest.mark.parametrize('tokens', [(12, 3), (3, 12), (2, 2)])
def test_other_numbers_of_keys_than_queries(tokens):
    n, m = tokens
    q, k = torch.rand(2, n, 16, dtype=torch.float64), torch.rand(2, m, 16, dtype=torch.float64)
    v = torch.randn(2, m, 16, dtype=torch.float64)
    for heads in (1, 4):
        split = [t.view(2, -1, heads, 16 // heads).transpose(1, 2) for t in (q, k, v)]
        similarity = split[0] @ split[1].transpose(-2, -1)
        want = similarity / (similarity.sum(-1, keepdim=True) + 1e-6) @ split[2]
        assert_relative(linear_attention(q, k, v, heads), want.transpose(1, 2).reshape(2, n, 16), 1e-12)


@pytest.mark.parametrize('hw', [(2, 2), (7, 5)])
def test_sums_are_in_float32_under_autocast(hw):
    attn = randomize(SimplifiedLinearAttention(16, 2, hw))
    x = torch.randn(2, hw[0] * hw[1], 16)
    want = eq_9(attn, x, hw).float()
    with torch.autocast('cpu', torch.bfloat16):
        y = attn(x)
    assert_relative(y.float(), want, 0.03)
    # large enough that float16 sums overflow, while its inputs and outputs do not
    q = torch.full((1, 4096, 8), 30.0, dtype=torch.float16)
    with torch.autocast('cpu', torch.bfloat16):
        out = linear_attention(q, q, q, 1)
    assert out.dtype == torch.float32
    assert_relative(out, torch.full_like(out, 30.0), 1e-4)


@pytest.mark.parametrize('kind', [SimplifiedLinearAttention, FocusedLinearAttention])
def test_a_model_in_half_precision_stays_in_it(kind):
    attn = randomize(kind(16, 2, (7, 5)))
    x = torch.randn(2, 35, 16)
    want = attn(x)
    y = attn.bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert_relative(y.float(), want, 0.05)


def test_focused_features_keep_their_norm():
    attn = randomize(FocusedLinearAttention(16, 2, 4)).double()
    x = torch.randn(1, 16, 16, dtype=torch.float64)
    q, _ = attn.features(x, x)
    scaled = (F.relu(x) + 1e-6) / F.softplus(attn.scale)
    assert_relative(q.norm(dim=-1), scaled.norm(dim=-1), 1e-12)
    ratio = scaled**3 / q
    assert_relative(ratio, ratio[..., :1].expand_as(ratio), 1e-9)


def test_another_window_gets_the_encoding_resized():
    attn = randomize(SimplifiedLinearAttention(8, 2, 6))
    other = SimplifiedLinearAttention(8, 2, (3, 4))
    state = attn.state_dict()
    grid = state['positional_encoding'].view(1, 6, 6, 8).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, (3, 4), mode='bicubic', align_corners=False)
    state['positional_encoding'] = grid.permute(0, 2, 3, 1).reshape(1, 12, 8)
    other.load_state_dict(state)
    x = torch.randn(2, 12, 8)
    assert_relative(attn(x, hw_shape=(3, 4)), other(x), 1e-6)


def test_softmax_attention_bias_of_a_smaller_window():
    attn = randomize(SoftmaxWindowAttention(8, 2, (3, 4)))
    table = attn.relative_position_bias_table
    bias = attn.position_bias((2, 3))
    for i in range(6):
        for j in range(6):
            dy, dx = i // 3 - j // 3, i % 3 - j % 3
            assert torch.equal(bias[:, i, j], table[(dy + 2) * 7 + dx + 3])


# 9x11 has a remainder that the reduction drops, 8x8 has none
@pytest.mark.parametrize('sr_ratio, hw', [(1, (9, 11)), (2, (9, 11)), (4, (8, 8)), (8, (9, 11))])
def test_softmax_attention_equals_mmdets(sr_ratio, hw):
    from mmdet.models.backbones.pvt import SpatialReductionAttention

    theirs = randomize(SpatialReductionAttention(16, 2, sr_ratio=sr_ratio, norm_cfg=dict(type='LN'))).eval()
    state = theirs.state_dict()
    ours = SoftmaxAttention(16, 2, sr_ratio=sr_ratio)
    weights = {'proj.weight': state['attn.out_proj.weight'], 'proj.bias': state['attn.out_proj.bias']}
    for part in ('weight', 'bias'):
        qkv = state[f'attn.in_proj_{part}']
        weights.update({f'qkv.{part}': qkv} if sr_ratio == 1 else {f'q.{part}': qkv[:16], f'kv.{part}': qkv[16:]})
    weights.update({k: v for k, v in state.items() if k.startswith(('sr.', 'norm.'))})
    ours.load_state_dict(weights)
    x = torch.randn(2, hw[0] * hw[1], 16)
    want = theirs(x, hw, identity=torch.zeros_like(x))
    assert_relative(ours(x, hw_shape=hw), want, 1e-5)


@pytest.mark.parametrize('cls', [SimplifiedLinearAttention, SoftmaxAttention])
def test_a_map_smaller_than_the_reduction_is_padded(cls):
    attn = randomize(cls(8, 2, 8, sr_ratio=4))
    x = torch.randn(1, 6, 8)
    grid = torch.zeros(1, 4, 4, 8)  # zeros at the bottom and right, one reduced token
    grid[:, :2, :3] = x.view(1, 2, 3, 8)
    token = attn.norm(torch.einsum('bhwc,ochw->bo', grid, attn.sr.weight) + attn.sr.bias)
    k, v = attn.kv(token).chunk(2, dim=-1)
    got = attn.project(x, (2, 3))
    for a, b in zip(got, (attn.q(x), k[:, None], v[:, None])):
        assert_relative(a, b, 1e-5)
    assert attn(x, hw_shape=(2, 3)).shape == (1, 6, 8)


@pytest.mark.parametrize('batch_first', [True, False])
def test_sla_in_mmcvs_transformer_layer(batch_first):
    layer = BaseTransformerLayer(
        attn_cfgs=dict(type='SLA', embed_dims=16, num_heads=2, window_size=(3, 4)),
        ffn_cfgs=dict(type='FFN', embed_dims=16, feedforward_channels=32, num_fcs=2, ffn_drop=0.0),
        operation_order=('self_attn', 'norm', 'ffn', 'norm'),
        batch_first=batch_first,
    )
    attn = layer.attentions[0]
    assert isinstance(attn, SimplifiedLinearAttention) and attn.batch_first == batch_first
    tokens, pos = torch.randn(2, 12, 16), torch.randn(2, 12, 16)
    reference = SimplifiedLinearAttention(16, 2, (3, 4))
    reference.load_state_dict(attn.state_dict())
    order = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    want = layer.norms[0](tokens + reference(tokens))
    want = layer.norms[1](layer.ffns[0](want))
    assert_relative(order(layer(order(tokens))), want, 1e-5)
    # positions enter queries and keys, not values
    x = order(tokens)
    v_only = order(attn(x, x, x, query_pos=order(pos)))
    q, k, _ = reference.qkv(tokens + pos).chunk(3, -1)
    v = reference.qkv(tokens).chunk(3, -1)[2]
    q, k = q.relu(), (k + reference.positional_encoding).relu()
    out = linear_attention(q, k, v, 2) + reference.local(v, (3, 4))
    assert_relative(v_only, tokens + reference.proj(out), 1e-5)


def test_bad_input_is_named():
    with pytest.raises(ValueError, match='num_heads=3, embed_dims=16'):
        SimplifiedLinearAttention(16, 3, 4)
    with pytest.raises(ValueError, match='num_heads=3, embed_dims=16'):
        SoftmaxWindowAttention(16, 3, 4)
    with pytest.raises(ValueError, match='kernel_size must be odd.*4'):
        SimplifiedLinearAttention(16, 2, 4, kernel_size=4)
    with pytest.raises(ValueError, match='window_size must be a positive integer'):
        SimplifiedLinearAttention(16, 2, 0)
    with pytest.raises(ValueError, match='focusing_factor must be positive'):
        FocusedLinearAttention(16, 2, 4, focusing_factor=0)
    for cls in (SimplifiedLinearAttention, SoftmaxAttention):
        with pytest.raises(ValueError, match='sr_ratio must be a positive integer.*0'):
            cls(16, 2, 4, sr_ratio=0)
    attn = SimplifiedLinearAttention(16, 2, 4)
    x = torch.randn(1, 15, 16)
    with pytest.raises(ValueError, match='15 tokens.*Pass hw_shape'):
        attn(x)
    x = torch.randn(1, 16, 16)
    with pytest.raises(ValueError, match='key is not query'):
        attn(x, x + 1, x)
    with pytest.raises(ValueError, match='no key_padding_mask'):
        attn(x, x, x, key_padding_mask=torch.zeros(1, 16, dtype=torch.bool))
