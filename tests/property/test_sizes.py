"""What must hold for any model: drawn specs of every kind of attention, any context, batch, block and cache dtype."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from specs import of_kinds
from strategies import (
    batches,
    block_sparse,
    blocks,
    cache_dtypes,
    compressed,
    contexts,
    grouped,
    growing,
    latent,
    models,
    recurrent,
    sparse,
    widths,
)

from kvcalc import Layer, Model, Precision, cache_size
from kvcalc.layers.attention import BlockSparse, Grouped, Latent, Sparse
from kvcalc.layers.cache import Span
from kvcalc.layers.part import Part
from kvcalc.library.files import parse_yaml
from kvcalc.library.huggingface.preset import to_yaml
from kvcalc.planning.variants import variant

anything = growing | recurrent | compressed


def one(part: Part, layers: int = 1) -> Model:
    return of_kinds({"k": Layer(parts=(part,))}, layers=layers)  # type: ignore[arg-type]


@given(models(anything), contexts, batches, blocks, cache_dtypes)
def test_linear_in_batch(model: Model, context: int, batch: int, block: int, dtype: str) -> None:
    precision = Precision(kv_cache_dtype=dtype)
    single, many = (cache_size(model, context, b, precision, block) for b in (1, batch))
    assert (many.stored, many.read, many.allocated) == (batch * single.stored, batch * single.read, batch * single.allocated)
    assert (many.fixed, many.slope) == (single.fixed, single.slope)


@given(models(anything), contexts, blocks, cache_dtypes)
def test_figures_are_whole_and_none_is_negative(model: Model, context: int, block: int, dtype: str) -> None:
    size = cache_size(model, context, 3, Precision(kv_cache_dtype=dtype), block)
    assert all(type(figure) is int and figure >= 0 for figure in (size.stored, size.read, size.allocated, size.fixed))
    assert size.slope >= 0


@given(models(), contexts, st.integers(1, 5000), blocks)
def test_monotone_in_context(model: Model, context: int, more: int, block: int) -> None:
    """Compressed attention is not: closing a block drops its buffer."""
    before, after = (cache_size(model, s, block_size=block) for s in (context, context + more))
    assert before.stored <= after.stored
    assert before.allocated <= after.allocated
    assert before.fixed <= after.fixed
    assert before.slope >= after.slope


@given(models(), contexts)
def test_slope_is_what_one_more_token_adds(model: Model, context: int) -> None:
    """Exactly, where every row stands for one token."""
    before, after = cache_size(model, context), cache_size(model, context + 1)
    assert after.stored - before.stored == before.slope


@given(models(compressed), st.integers(100_000, 200_000))
def test_slope_of_compressed_attention_is_the_average_over_whole_blocks(model: Model, context: int) -> None:
    before, after = cache_size(model, context), cache_size(model, context + 128)
    assert after.stored - before.stored == 128 * before.slope


@given(models(anything), contexts, st.integers(1, 1000), blocks)
def test_fixed_part_and_growth_make_the_whole(model: Model, context: int, batch: int, block: int) -> None:
    size = cache_size(model, context, batch, block_size=block)
    assert size.fixed * batch <= size.stored <= size.allocated


@given(grouped(), contexts, st.integers(1, 20), cache_dtypes)
def test_gqa_with_as_many_groups_as_heads_is_mha(part: Grouped, context: int, layers: int, dtype: str) -> None:
    plain = one(msgspec.structs.replace(part, sliding_window=None, attention_chunk_size=None, cache_budget=None), layers)
    precision = Precision(kv_cache_dtype=dtype)
    as_gqa, as_mha = (variant(plain, text).model for text in (f"gqa:{part.num_attention_heads}", "mha"))
    assert as_gqa == as_mha
    one_group = cache_size(variant(plain, "mqa").model, context, precision=precision).stored
    assert cache_size(as_gqa, context, precision=precision).stored == part.num_attention_heads * one_group
    assert cache_size(plain, context, precision=precision).stored == part.num_key_value_heads * one_group


@given(grouped(limits=False), contexts, st.integers(0, 10**6), blocks, st.sampled_from(["window", "evict"]))
def test_limit_beyond_the_context_is_no_limit(part: Grouped, context: int, beyond: int, block: int, kind: str) -> None:
    plain = one(part)
    limited = variant(plain, f"{kind}:{context + beyond}").model
    full, held = cache_size(plain, context, block_size=block), cache_size(limited, context, block_size=block)
    assert (full.stored, full.read, full.allocated) == (held.stored, held.read, held.allocated)


@given(latent, contexts, st.integers(0, 10**6))
def test_latent_window_beyond_the_context_is_no_limit(part: Latent, context: int, beyond: int) -> None:
    limited = msgspec.structs.replace(part, sliding_window=context + beyond)
    full = msgspec.structs.replace(part, sliding_window=None)
    assert cache_size(one(limited), context).stored == cache_size(one(full), context).stored
    assert cache_size(one(limited), context).read == cache_size(one(full), context).read


@given(sparse, contexts, st.integers(0, 1000), cache_dtypes)
def test_top_k_beyond_the_context_reads_every_latent_and_the_index(part: Sparse, context: int, beyond: int, dtype: str) -> None:
    precision = Precision(kv_cache_dtype=dtype)
    wide = cache_size(one(msgspec.structs.replace(part, index_topk=context + beyond)), context, precision=precision)
    narrow = cache_size(one(part), context, precision=precision)
    plain = Latent(**{f: getattr(part, f) for f in Latent.__struct_fields__})
    mla = cache_size(one(plain), context, precision=precision)
    assert wide.read == wide.stored == narrow.stored
    assert narrow.read <= wide.read
    index = wide.stored - mla.stored
    assert (index > 0) == part.indexer
    assert narrow.read - index == mla.stored // context * min(context, part.index_topk)


@given(block_sparse, contexts)
def test_all_blocks_chosen_read_every_key(part: BlockSparse, context: int) -> None:
    chosen = -(-context // part.index_block_size)
    size = cache_size(one(msgspec.structs.replace(part, index_topk_blocks=chosen)), context)
    assert size.read == size.stored


@given(grouped(), st.integers(1, 12), st.integers(1, 8), contexts, batches)
def test_sharing_divides_the_cache_where_it_divides_the_layers(
    part: Grouped, share: int, times: int, context: int, batch: int
) -> None:
    plain = one(part, layers=share * times)
    shared = variant(plain, f"cla:{share}").model
    whole, part_of_it = cache_size(plain, context, batch), cache_size(shared, context, batch)
    assert share * part_of_it.stored == whole.stored
    assert share * part_of_it.allocated == whole.allocated
    assert part_of_it.read == whole.read


@given(models(anything), contexts, st.integers(1, 1000), st.sampled_from([1, 8, 16, 64, 256]))
def test_blocks_waste_less_than_one_block_per_sequence_and_layer(model: Model, context: int, batch: int, block: int) -> None:
    size = cache_size(model, context, batch, block_size=block)
    one_block = 0
    for kind, count in model.counts.items():
        for entry in model.kinds[kind].entries:
            if entry.grows:
                row = entry.heads * entry.width * {"bf16": 2, "fp16": 2, "fp32": 4}[model.dtype]
                one_block += count * row * (max(1, block // entry.ratio) - 1)  # a row less than a block of them
    assert 0 <= size.allocated - size.stored <= batch * one_block


@given(models(anything), st.lists(contexts, min_size=1, max_size=50), blocks)
def test_arrays_count_the_same_rows_as_whole_numbers(model: Model, lengths: list[int], block: int) -> None:
    import numpy as np

    tokens = np.array(lengths, dtype=float)
    for layer in model.kinds.values():
        for entry in layer.entries:
            ones = np.ones_like(tokens)  # a state has as many rows whatever the length
            assert list(entry.stored_rows(tokens) * ones) == [entry.stored_rows(s) for s in lengths]
            assert list(entry.allocated_rows(tokens, block) * ones) == [entry.allocated_rows(s, block) for s in lengths]
            assert list(entry.read_rows(1, tokens - 1) * ones) == [entry.read_rows(1, s - 1) for s in lengths]


@given(models(anything), st.integers(0, 10_000), st.integers(1, 500))
def test_a_pass_reads_at_most_what_its_tokens_read_one_by_one(model: Model, past: int, new: int) -> None:
    for layer in model.kinds.values():
        for entry in layer.entries:
            together = entry.read_rows(new, past)
            alone = [entry.read_rows(1, past + i) for i in range(new)]
            assert together <= sum(alone)
            if entry.span is not Span.CHUNK:
                assert together >= alone[-1] or not entry.grows


@given(models(anything))
def test_yaml_reads_back_as_the_same_model(model: Model) -> None:
    data, _ = parse_yaml(to_yaml(model), "round trip")
    again = msgspec.convert(data, Model)
    assert again == model
    assert again.problem() == ("", "")


@given(models(anything))
def test_active_parameters_leave_out_experts_alone(model: Model) -> None:
    assert 0 < model.active_parameters <= model.parameters
    routed = any(part.__struct_config__.tag == "moe" for layer in model.kinds.values() for part in layer.parts)
    if not routed:
        assert model.active_parameters == model.parameters


@given(models(anything), widths)
def test_parameters_are_linear_in_the_vocabulary(model: Model, more: int) -> None:
    wider = msgspec.structs.replace(model, vocab_size=model.vocab_size + more)
    tables = 1 if model.tie_word_embeddings else 2
    assert wider.parameters - model.parameters == tables * more * model.hidden_size
