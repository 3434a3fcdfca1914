"""Every layer has the same outputs for all tokens at once, one by one, in chunks, and in either form of attention."""

import math
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from specs import grouped, latent, sparse
from twins import (
    EXACT,
    WIDTH,
    any_spec,
    delta_net,
    delta_specs,
    difference,
    grouped_specs,
    in_pieces,
    inputs,
    new_cache,
    sparse_specs,
    torch,
    twin,
)

from kvcalc import UserError
from kvcalc.layers.part import Sublayer
from kvcalc.layers.recurrent import GatedDeltaNet, Mamba2
from kvcalc.measure.layers import build_mixer
from kvcalc.measure.layers.base_layer import Mixer, rotate, storage_bytes
from kvcalc.measure.layers.grouped_layer import A_RANGE, DT_RANGE, attend, scan
from kvcalc.measure.layers.latent_layer import index_scores, top_tokens

BF16 = 0.05  # bf16 keeps 8 bits: 0.4 % a rounding, some dozen of which stand in a row
pieces = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@settings(max_examples=60)
@given(any_spec(), st.integers(1, 3), st.one_of(pieces, st.integers(1, 20).map(lambda n: [1] * n)))
def test_cached_in_any_pieces_equals_uncached(spec: Sublayer, batch: int, sizes: list[int]) -> None:
    layer = twin(spec)
    x = inputs(batch, sum(sizes))
    whole = layer(x)
    cache = new_cache(layer, batch, sum(sizes))
    assert difference(in_pieces(layer, x, sizes, cache), whole) < EXACT


@given(sparse_specs(top=64), pieces)
def test_top_k_of_everything_is_mla(spec: Any, sizes: list[int]) -> None:
    layer: Any = twin(spec)
    dense: Any = twin(latent(spec.num_attention_heads, spec.kv_lora_rank, spec.qk_rope_head_dim, q_lora_rank=spec.q_lora_rank))
    for name, value in dense.weights.named_parameters():
        value.copy_(layer.weights[name])
    x = inputs(2, sum(sizes))
    sparse_out = in_pieces(layer, x, sizes, new_cache(layer, 2, sum(sizes)))
    assert difference(sparse_out, in_pieces(dense, x, sizes, new_cache(dense, 2, sum(sizes)))) < EXACT


@given(sparse_specs(), st.integers(2, 30))
def test_sparse_attends_to_the_best_scores_alone(spec: Any, tokens: int) -> None:
    """The last token's output equals MLA over the selected tokens, which a sort selects one query at a time."""
    layer: Any = twin(spec)
    x = inputs(1, tokens)
    prepared = layer.prepare(x, 0)
    queries, key, weights = prepared[4:]
    scores = [
        sum(float(weights[0, -1, h]) * max(0.0, float(queries[0, h, -1] @ key[0, 0, s])) for h in range(spec.index_n_heads))
        for s in range(tokens)
    ]
    order = sorted(range(tokens), key=lambda s: -scores[s])
    top = spec.index_topk
    assume(tokens <= top or scores[order[top - 1]] > scores[order[top]])  # ties go either way
    kept = sorted(order[:top])
    q, k, v = layer.expanded(prepared, prepared[2][:, :, kept], prepared[3][:, :, kept])
    mixed = attend(q[:, :, -1:], k, v, scale=layer.scale)
    expected = Mixer.finish(layer, mixed, prepared)[:, 0]
    assert difference(layer(x)[:, -1], expected) < EXACT


def test_top_three_of_a_worked_example() -> None:
    """Scores .115, .78, .725 and .305: the first token is left out. One index head of weight 1 and width 1."""
    keys = torch.tensor([[[0.115], [0.78], [0.725], [0.305]]], dtype=torch.float64)
    scores = index_scores(torch.ones(1, 1, 1, 1, dtype=torch.float64), keys, torch.ones(1, 1, 1, dtype=torch.float64))
    assert scores.flatten().tolist() == [0.115, 0.78, 0.725, 0.305]
    assert sorted(top_tokens(scores, 3).flatten().tolist()) == [1, 2, 3]


def test_index_scores_weigh_each_head_after_its_relu() -> None:
    """Two heads, q = (1, 0) and (0, 1), weights 0.5 and −2: keys (3, 1) → 1.5 − 2, (−3, 1) → 0 − 2, (1, −1) → 0.5 + 0."""
    queries = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]])
    keys = torch.tensor([[[3.0, 1.0], [-3.0, 1.0], [1.0, -1.0]]])
    assert index_scores(queries, keys, torch.tensor([[[0.5, -2.0]]])).tolist() == [[[-0.5, -2.0, 0.5]]]


@settings(max_examples=40)
@given(grouped_specs(), pieces)
def test_window_ring_equals_masked_full_attention(spec: Any, sizes: list[int]) -> None:
    """The reference has no ring and no cache: it computes every score, a mask written with loops, and the softmax."""
    assume(spec.sliding_window)
    layer: Any = twin(spec)
    tokens = sum(sizes)
    x = inputs(2, tokens)
    q, k, v = layer.prepare(x, 0)
    shared = spec.num_attention_heads // spec.num_key_value_heads
    k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    scores = q @ k.transpose(2, 3) / spec.head_dim**0.5
    for i in range(tokens):
        for j in range(tokens):
            if j > i or j <= i - spec.sliding_window:
                scores[:, :, i, j] = float("-inf")
    expected = layer.finish(scores.softmax(-1) @ v, ())
    cache = new_cache(layer, 2, tokens)
    assert difference(in_pieces(layer, x, sizes, cache), expected) < EXACT
    assert cache[0].tensor.shape[2] == min(tokens, spec.sliding_window)  # and the ring holds no more


@given(grouped_specs(sliding_window=None), st.integers(1, 12), st.integers(1, 12))
def test_fused_and_plain_attention_agree(spec: Any, past: int, new: int) -> None:
    """The last token of a complete pass in torch's kernel equals the last token by plain products."""
    x = inputs(2, past + new)
    layer: Any = twin(spec)
    q, k, v = layer.prepare(x, 0)
    assert difference(attend(q, k, v)[:, :, -1:], attend(q[:, :, -1:], k, v)) < EXACT


@settings(max_examples=20)
@given(st.integers(1, 2500), st.integers(1, 1500), st.integers(1, 700))
def test_windows_in_blocks_equal_one_mask(new: int, past: int, window: int) -> None:
    """Long windows run in blocks of queries. A plain mask over all scores gives the same result."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(1, 1, n, 4, dtype=torch.float64) for n in (new, past + new, past + new))
    own = torch.arange(past, past + new)[:, None]
    seen = torch.arange(past + new)[None]
    scores = (q @ k.transpose(2, 3) / 2).masked_fill((seen > own) | (seen <= own - window), float("-inf"))
    assert difference(attend(q, k, v, window), scores.softmax(-1) @ v) < EXACT


@given(delta_specs(), st.integers(1, 200))
def test_chunks_of_the_delta_rule_equal_its_recurrence(spec: Any, tokens: int) -> None:
    torch.manual_seed(5)
    heads, dk, dv = spec.linear_num_value_heads, spec.linear_key_head_dim, spec.linear_value_head_dim
    q, k, v = (torch.randn(2, heads, tokens, w, dtype=torch.float64) for w in (dk, dk, dv))
    k = torch.nn.functional.normalize(k, dim=-1)
    step, decay = torch.rand(2, heads, tokens, dtype=torch.float64), -torch.rand(2, heads, tokens, dtype=torch.float64)
    start = torch.randn(2, heads, dk, dv, dtype=torch.float64)
    outputs, state = [], start
    for i in range(tokens):
        key = k[:, :, i, :, None]
        state = state * decay[:, :, i, None, None].exp()
        state = state + key * step[:, :, i, None, None] * (v[:, :, i, None] - key.transpose(2, 3) @ state)
        outputs.append(q[:, :, i, None] @ state)
    out, end = scan(q, k, v, step, decay, start)
    assert difference(out, torch.cat(outputs, 2)) < EXACT and difference(end, state) < EXACT


def test_one_step_of_the_delta_rule_by_hand() -> None:
    """dk = dv = 1, S = 2, e^g = 1/2, k = 1, β = 1/2, v = 3: the decayed state 1 recalls 1, so S = 1 + 1/2·(3 − 1) = 2."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    half = torch.full((1, 1, 1), 0.5, dtype=torch.float64)
    out, state = scan(3 * one, one, 3 * one, half, half.log(), 2 * one)
    assert (out.item(), state.item()) == (pytest.approx(6, abs=1e-15), pytest.approx(2, abs=1e-15))  # q = 3


def rounded_twins(spec: Sublayer) -> tuple[Any, Any]:
    """Return the layer with bf16 weights, once computing in float64 and once in bf16."""
    exact, rounded = twin(spec), twin(spec, torch.bfloat16)
    for wide, narrow in zip(exact.parameters(), rounded.parameters(), strict=True):
        wide.copy_(narrow.double())
    return exact, rounded


@given(any_spec(), pieces)
@example(delta_net(linear_num_key_heads=1, linear_num_value_heads=3, linear_conv_kernel_dim=3), [1])
def test_bf16_stays_near_float64(spec: Sublayer, sizes: list[int]) -> None:
    """With the same weights and inputs, outputs in bf16 through the cache differ by at most 5 % of their length.

    Sparse attention is left out, because rounded scores may select another token. Tokens of a delta net are
    left out if a head recalls almost nothing (`recalls`). The second sequence of the example has cos(q, k) =
    0.005, and bf16's 2⁻⁹ is two fifths of it.
    """
    assume(not hasattr(spec, "index_topk"))
    exact, rounded = rounded_twins(spec)
    x = inputs(2, sum(sizes)).bfloat16()
    outputs = in_pieces(rounded, x, sizes, new_cache(rounded, 2, sum(sizes), torch.bfloat16))
    expected = exact(x.double())
    if isinstance(spec, GatedDeltaNet):
        recalled = recalls(exact, x.double())
        outputs, expected = outputs[recalled], expected[recalled]
    assert (outputs.double() - expected).norm() <= BF16 * expected.norm()


def recalls(layer: Any, x: Any) -> Any:
    """Return which tokens [B, n] recall at least 1 % of their value’s length in every head. The norm divides by this length."""
    prepared = layer.prepare(x, 0)
    length = [part.norm(dim=-1) for part in (layer.core(prepared, None, 0), layer.convolved("conv_v", prepared[1], None))]
    return (length[0] > 0.01 * length[1]).all(1)


@given(delta_specs(), pieces)
@example(delta_net(linear_num_key_heads=1, linear_num_value_heads=3, linear_conv_kernel_dim=3), [1])
def test_bf16_recall_of_the_delta_rule(spec: Any, sizes: list[int]) -> None:
    """Before the norm, the recalled values in bf16 differ by at most 5 % of the longest value."""
    exact, rounded = rounded_twins(spec)
    x = inputs(2, sum(sizes)).bfloat16()
    layers: list[Any] = [exact, rounded]
    mixed = [layer.core(layer.prepare(part, 0), None, 0).double() for layer, part in zip(layers, (x.double(), x), strict=True)]
    values = exact.convolved("conv_v", exact.prepare(x.double(), 0)[1], None)
    assert (mixed[1] - mixed[0]).norm(dim=-1).max() <= BF16 * values.norm(dim=-1).max()


@settings(max_examples=40)
@given(any_spec(), st.integers(1, 3), st.integers(1, 40), st.sampled_from(["fp32", "bf16"]))
def test_parameters_and_cache_bytes_are_the_prediction(spec: Sublayer, batch: int, tokens: int, dtype: str) -> None:
    layer = twin(spec)
    assert sum(p.numel() for p in layer.parameters()) == sum(w.elements for w in spec.weights(WIDTH))
    element = {"fp32": 4, "bf16": 2}
    predicted = sum(batch * e.heads * e.width * element[e.dtype or dtype] * e.stored_rows(tokens) for e in spec.cache())
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert storage_bytes([new_cache(layer, batch, tokens, torch_dtype)]) == predicted


def test_positions_matter_and_advance() -> None:
    """With RoPE, q·k depends only on the distance: positions (5, 3) equal (105, 103), but not (5, 4)."""
    torch.manual_seed(1)
    q, k = torch.randn(1, 8, dtype=torch.float64), torch.randn(1, 8, dtype=torch.float64)
    near, far, other = (float((rotate(q, a) @ rotate(k, b).T).item()) for a, b in ((5, 3), (105, 103), (5, 4)))
    assert near == pytest.approx(far, abs=1e-12)
    assert abs(near - other) > 1e-3


def test_a_query_sees_the_past_and_not_the_future() -> None:
    layer = twin(grouped(4, 2, 8))
    x = inputs(1, 6)
    changed = x.clone()
    changed[:, 3] += 1
    before, after = layer(x)[0], layer(changed)[0]
    moved = [(before[i] - after[i]).abs().max().item() > 1e-9 for i in range(6)]
    assert moved == [False, False, False, True, True, True]


def test_a_cache_refuses_more_tokens_than_it_holds() -> None:
    layer = twin(grouped())
    with pytest.raises(ValueError, match="cache stores 4 tokens"):
        layer(inputs(1, 5), new_cache(layer, 1, 4))


@pytest.mark.parametrize(
    "spec",
    [
        Mamba2(num_heads=2, head_dim=8, state_size=4),
        grouped(sinks=True),
        grouped(attention_chunk_size=4),
        grouped(kv_projection=False),
        latent(output_gate="full"),
        sparse(indexer=False),
    ],
)
def test_what_has_no_layer_is_refused(spec: Sublayer) -> None:
    with pytest.raises(UserError, match=r"no .* layer"):
        build_mixer(spec, WIDTH)


def test_what_shares_a_cache_must_be_able_to() -> None:
    with pytest.raises(UserError, match="shares a cache"):
        build_mixer(delta_net(), WIDTH, shares_cache=True)


def test_decays_are_those_that_models_start_from() -> None:
    """A is from 1 to 16, and the softplus of steps is from 0.001 to 0.1. In no chunk does the mean head decay to nothing."""
    a_log, bias = build_mixer(delta_net(linear_num_key_heads=64, linear_num_value_heads=64), 48).weights["a_dt"].chunk(2)
    assert A_RANGE[0] <= a_log.exp().min() < 3 and 12 < a_log.exp().max() <= A_RANGE[1] * (1 + 1e-6)
    step = torch.nn.functional.softplus(bias)
    assert DT_RANGE[0] * (1 - 1e-3) <= step.min() < step.max() <= DT_RANGE[1] * (1 + 1e-3)
    assert float((a_log.exp() * step).mean()) * 64 < -math.log(torch.finfo(torch.float32).tiny)
