"""Rules for a pass over any batch of any model: additivity, causality, shards, arrays, and agreement with sizes."""

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specs import of_kinds, stack
from strategies import cache_dtypes, contexts, groups, latent, mixers, models, projects_each_token_once, sparse, unlimited, widths

from kvcalc import Batch, Cost, Layer, Model, Parallelism, Precision, Sequences, cache_size, forward, total
from kvcalc.layers.attention import Grouped, Latent
from kvcalc.layers.cost import AttentionShape, unfused
from kvcalc.layers.feed_forward import Dense, Moe
from kvcalc.layers.part import Sublayer
from kvcalc.planning.variants import variant

once_projected = models(mixers.filter(projects_each_token_once))
batches = st.lists(groups, min_size=1, max_size=3).map(lambda g: Batch(tuple(g)))
ADDS = ("flops", "vector_flops", "cache_read_bytes", "cache_write_bytes", "activation_bytes")


def figures(cost: Cost, names: tuple[str, ...] = ADDS) -> list[Any]:
    return [getattr(cost, name) for name in names]


def without_experts(model: Model) -> Model:
    def plain(layer: Layer) -> Layer:
        return msgspec.structs.replace(layer, parts=tuple(p for p in layer.parts if not isinstance(p, Moe)))

    return msgspec.structs.replace(model, kinds={k: plain(layer) for k, layer in model.kinds.items()})


@given(models(), batches, batches)
def test_groups_add_up(model: Model, one: Batch, two: Batch) -> None:
    both = total(forward(model, Batch(one.groups + two.groups)))
    assert figures(both) == figures(total(forward(model, one)) + total(forward(model, two)))


@given(models(), batches, batches)
def test_weights_are_read_once_whatever_the_batch(model: Model, one: Batch, two: Batch) -> None:
    """Exceptions are rows of tables, and experts: more tokens read more experts, but never more than both passes together."""
    together, plain = Batch(one.groups + two.groups), without_experts(model)
    first, second = (total(forward(plain, Batch.prefill(n))).weight_bytes for n in (1, 2))
    for batch in (one, two, together):
        assert total(forward(plain, batch)).weight_bytes == first + (batch.tokens - 1) * (second - first)
    row = {"bf16": 2, "fp16": 2, "fp32": 4}[model.dtype] * sum(w.outputs for w in model.outer_weights if w.kind == "table")
    looked_up = any(w.kind == "table" for kind in model.order for w in model.layer_weights(kind))
    assert second - first > row if looked_up else second - first == row
    each = [total(forward(model, b)).weight_bytes for b in (one, two, together)]
    assert max(each[:2]) <= each[2] <= each[0] + each[1]


@given(models(), groups, st.integers(1, 1000))
def test_linear_in_sequences(model: Model, group: Sequences, times: int) -> None:
    many = msgspec.structs.replace(group, count=group.count * times)
    one, all_of_them = (total(forward(model, Batch((g,)))) for g in (group, many))
    assert figures(all_of_them) == [times * f for f in figures(one)]


@given(once_projected, st.integers(0, 2000), st.integers(1, 12))
def test_token_by_token_is_prefill_in_flops(model: Model, past: int, new: int) -> None:
    """The form of MLA is fixed, and the LM head runs at every position."""

    def flops(new: int, past: int) -> Any:
        batch = Batch((Sequences(1, new, past),))
        return total(forward(model, batch, mla_form="absorbed", all_positions=True)).flops

    assert flops(new, past) == sum(flops(1, past + i) for i in range(new))


@given(once_projected, st.integers(1, 500), st.integers(1, 500))
def test_chunked_prefill_is_prefill_in_flops_and_cache_writes_no_less(model: Model, first: int, second: int) -> None:
    """Eviction selects once per pass. All other work is per token."""
    batches = [Batch.prefill(first + second), Batch.prefill(first), Batch.prefill(second, past=first)]
    passes = [forward(model, b, mla_form="absorbed", all_positions=True) for b in batches]
    whole, *chunks = (total(operators) for operators in passes)
    assert whole.flops == sum(c.flops for c in chunks)
    assert whole.vector_flops <= sum(c.vector_flops for c in chunks)
    each = [sum(o.total.vector_flops for o in operators if o.name != "eviction") for operators in passes]
    assert each[0] == each[1] + each[2]
    assert whole.cache_write_bytes <= sum(c.cache_write_bytes for c in chunks)


@given(unlimited, st.integers(1, 20), st.integers(1, 3000))
def test_decode_steps_add_up_to_triangular_sums(part: Grouped, layers: int, n: int) -> None:
    """Steps 1 … n have n(n + 1)/2 pairs, the same number of row reads, n row writes, and n times every projection."""
    ops = forward(stack(part, layers=layers), Batch.decode(np.arange(1, n + 1, dtype=float)))
    (attention,) = [o for o in ops if o.name == "attention"]
    heads, kv, key, value = part.num_attention_heads, part.num_key_value_heads, part.head_dim, part.value_width
    triangle = n * (n + 1) // 2
    assert attention.count == layers
    assert attention.cost.flops.sum() == 2 * triangle * heads * (key + value)
    assert attention.cost.cache_read_bytes.sum() == triangle * kv * (key + value) * 2
    (qkv,) = [o for o in ops if o.name == "qkv"]
    assert qkv.cost.flops * n == 2 * n * 64 * (heads * key + kv * (key + value))


@given(unlimited, contexts, st.integers(0, 10**6), st.integers(1, 500))
def test_a_window_beyond_the_context_is_no_window(part: Grouped, context: int, beyond: int, new: int) -> None:
    plain = stack(part)
    windowed = variant(plain, f"window:{context + new + beyond}").model
    batch = Batch((Sequences(2, new, context),))
    costs = [[(o.name, o.cost) for o in forward(m, batch)] for m in (plain, windowed)]
    assert costs[0] == costs[1]


@given(latent | sparse, groups)
def test_mla_form_is_the_cheaper_by_flops_then_bytes(part: Latent, group: Sequences) -> None:
    auto, *forms = (total(forward(stack(part), Batch((group,)), mla_form=f)) for f in ("auto", "absorbed", "expanded"))
    assert (auto.flops, auto.bytes) == min((c.flops, c.bytes) for c in forms)


ranks = st.sampled_from([1, 2, 4, 8])


@given(ranks, st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 3), widths, groups, st.booleans())
def test_tensor_parallel_shards_are_the_whole_and_copies_of_kv_heads(
    tp: int, kv: int, times: int, width: int, group: Sequences, gated: bool
) -> None:
    part = Grouped(num_attention_heads=16 * times, num_key_value_heads=kv, head_dim=width)
    model = of_kinds({"k": Layer(parts=(part, Dense(intermediate_size=64, gated=gated)))}, layers=3, hidden_size=64)
    batch = Batch((group,))
    whole, shard = (total(forward(model, batch, parallelism=Parallelism(tp=n))) for n in (1, tp))
    copies, tokens = max(tp // kv, 1), batch.tokens
    kv_matrices = 64 * 2 * kv * width
    assert tp * shard.flops == whole.flops + 3 * 2 * tokens * (copies - 1) * kv_matrices
    assert tp * shard.cache_bytes == copies * whole.cache_bytes
    rows_and_norms = tokens * 64 * 2 * (tp - 1) + (tp - 1) * 7 * 64 * 2  # a fullest rank looks up every row
    assert tp * shard.weight_bytes == whole.weight_bytes + 3 * (copies - 1) * kv_matrices * 2 + rows_and_norms


@given(ranks, latent, groups)
def test_tensor_parallel_shards_of_mla_repeat_the_down_projections(tp: int, part: Latent, group: Sequences) -> None:
    part = msgspec.structs.replace(part, num_attention_heads=8 * part.num_attention_heads)
    model, batch = stack(part), Batch((group,))
    whole, shard = (total(forward(model, batch, parallelism=Parallelism(tp=n), mla_form="absorbed")) for n in (1, tp))
    down = 64 * ((part.q_lora_rank or 0) + part.kv_projection * (part.kv_lora_rank + part.qk_rope_head_dim))
    assert tp * shard.flops == whole.flops + (tp - 1) * 2 * batch.tokens * down
    assert shard.cache_bytes == whole.cache_bytes


@given(ranks, st.integers(1, 4), batches)
def test_expert_shards_are_the_whole_and_a_router_each(tp: int, top: int, batch: Batch) -> None:
    moe = Moe(num_experts=8, num_experts_per_tok=top, moe_intermediate_size=16, shared_expert_intermediate_size=8)
    model = of_kinds({"k": Layer(parts=(moe,))}, layers=1, lm_head=False)
    whole, shard = (total(forward(model, batch, parallelism=Parallelism(tp=n))) for n in (1, tp))
    assert tp * shard.flops == whole.flops + (tp - 1) * 2 * batch.tokens * 64 * 8


points = st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 400), st.integers(0, 100_000)), min_size=1, max_size=12)


@given(models(), points, st.sampled_from(["auto", "absorbed", "expanded"]))
def test_arrays_are_many_scalars(model: Model, each: list[tuple[int, int, int]], form: str) -> None:
    count, new, past = (np.array(column, dtype=float) for column in zip(*each, strict=True))
    swept = total(forward(model, Batch((Sequences(count, new, past),)), mla_form=form))
    for i, point in enumerate(each):
        scalar = total(forward(model, Batch((Sequences(*point),)), mla_form=form))
        at = [figure[i] if hasattr(figure, "shape") else figure for figure in swept]
        assert at == pytest.approx(list(scalar), rel=1e-12)


@given(models(), contexts, st.integers(1, 1000), cache_dtypes)
def test_a_decode_step_reads_what_size_says(model: Model, context: int, batch_size: int, dtype: str) -> None:
    precision = Precision(kv_cache_dtype=dtype)
    size = cache_size(model, context, batch_size, precision)
    assert total(forward(model, Batch.decode(context, batch_size), precision)).cache_read_bytes == size.read


@given(latent | sparse, contexts, st.integers(1, 100), ranks, ranks)
def test_and_on_several_gpus_too(part: Sublayer, context: int, batch_size: int, dp: int, dcp: int) -> None:
    model = stack(msgspec.structs.replace(part, num_attention_heads=8), layers=3)  # type: ignore[call-arg]
    parallelism = Parallelism(tp=8, dp=dp, dcp=dcp)
    size = cache_size(model, context, batch_size, parallelism=parallelism)
    found = total(forward(model, Batch.decode(context, batch_size), parallelism=parallelism))
    assert found.cache_read_bytes == size.read


@given(models(), st.integers(1, 2000), st.integers(1, 20))
def test_prefill_is_two_flops_for_each_active_matrix_element_and_token(model: Model, context: int, batch_size: int) -> None:
    """Attention, indexers, scans and index keys of compressed rows are left out. The LM head counts for the last positions."""
    ops = forward(model, Batch.prefill(context, batch_size), mla_form="absorbed")
    products = sum(o.total.flops for o in ops if o.kind in ("gemm", "experts") and o.layer and o.name != "row_index_k")
    elements = sum(
        count * (w.active or w.copies) * w.inputs * w.outputs
        for kind, count in model.counts.items()
        for w in model.layer_weights(kind)
        if w.kind == "matrix" and w.name != "row_index_k"
    )
    assert products == 2 * elements * context * batch_size
    (head,) = [o for o in ops if o.name == "lm_head"]
    assert head.cost.flops == 2 * batch_size * 64 * 1000


@given(models(), contexts, st.integers(1, 8))
def test_pipeline_stages_add_up_to_the_whole(model: Model, context: int, pp: int) -> None:
    pp, batch = min(pp, model.layers), Batch.decode(context, 3)
    stages = [total(forward(model, batch, parallelism=Parallelism(pp=pp), stage=n)) for n in range(pp)]
    whole = total(forward(model, batch))
    assert sum(stages, Cost())._replace(network_bytes=0) == whole
    assert sum(s.network_bytes for s in stages) == (pp - 1) * 3 * 64 * {"bf16": 2, "fp16": 2, "fp32": 4}[model.dtype]


@given(models(), batches)
def test_separate_kernels_do_the_same_products_and_move_more(model: Model, batch: Batch) -> None:
    for o in forward(model, batch):
        if parts := unfused(o, 2):
            whole = sum((c for _, c in parts), Cost())
            assert (whole.flops, whole.vector_flops) == (o.cost.flops, o.cost.vector_flops)
            if o.kind == "attention":  # the scores are written and read twice
                assert whole.bytes >= o.cost.bytes - o.cost.cache_write_bytes - 2


@given(models(), groups, groups)
def test_the_shapes_of_a_batch_are_its_groups_side_by_side(model: Model, one: Sequences, two: Sequences) -> None:
    """For every mixer and each form of latent attention, each group has its own pairs."""

    def seen(*parts: Sequences) -> dict[tuple[str, str, str, int], list[tuple[int, ...]]]:
        found: dict[tuple[str, str, str, int], list[tuple[int, ...]]] = {}
        for o in forward(model, Batch(parts)):
            if isinstance(o.shape, AttentionShape):
                found.setdefault((o.layer, o.name, o.form, o.shape.heads), []).extend(o.shape.groups)  # type: ignore[arg-type]
        return found

    both, first, second = seen(one, two), seen(one), seen(two)
    assert both == {key: first.get(key, []) + second.get(key, []) for key in {**first, **second}}
