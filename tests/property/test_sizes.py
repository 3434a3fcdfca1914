"""Rules for sizes of any model: random parts of every kind of attention, context, batch, block and cache dtype."""

import math

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from specs import of_kinds
from strategies import (
    MIXERS,
    attention,
    batches,
    blocks,
    cache_dtypes,
    contexts,
    grouped,
    mixers,
    models,
    of,
    rows_are_tokens,
    tokens,
)

from kvcalc import Layer, Model, Precision, cache_size
from kvcalc.layers.attention import Grouped
from kvcalc.layers.cache import Span
from kvcalc.layers.part import Sublayer, Tokens
from kvcalc.library.files import parse_yaml
from kvcalc.library.huggingface.notes import to_yaml
from kvcalc.planning.variants import variant

plain_rows = models(mixers.filter(rows_are_tokens))


def one(part: Sublayer, layers: int = 1) -> Model:
    return of_kinds({"k": Layer(parts=(part,))}, layers=layers)  # type: ignore[arg-type]


@given(models(), contexts, batches, blocks, cache_dtypes)
def test_linear_in_batch(model: Model, context: int, batch: int, block: int, dtype: str) -> None:
    precision = Precision(kv_cache_dtype=dtype)
    single, many = (cache_size(model, context, b, precision, block) for b in (1, batch))
    assert (many.stored, many.read, many.allocated) == (batch * single.stored, batch * single.read, batch * single.allocated)
    assert (many.fixed, many.slope) == (single.fixed, single.slope)


@given(models(), contexts, blocks, cache_dtypes)
def test_figures_are_whole_and_none_is_negative(model: Model, context: int, block: int, dtype: str) -> None:
    size = cache_size(model, context, 3, Precision(kv_cache_dtype=dtype), block)
    assert all(type(figure) is int and figure >= 0 for figure in (size.stored, size.read, size.allocated, size.fixed))
    assert size.slope >= 0


@given(plain_rows, contexts, st.integers(1, 5000), blocks)
def test_monotone_in_context(model: Model, context: int, more: int, block: int) -> None:
    """Compressed attention is an exception: a finished block drops its buffer."""
    before, after = (cache_size(model, s, block_size=block) for s in (context, context + more))
    assert before.stored <= after.stored
    assert before.allocated <= after.allocated
    assert before.fixed <= after.fixed
    assert before.slope >= after.slope


@given(plain_rows, contexts)
def test_slope_is_what_one_more_token_adds(model: Model, context: int) -> None:
    """The equality is exact if every row belongs to one token."""
    before, after = cache_size(model, context), cache_size(model, context + 1)
    assert after.stored - before.stored == before.slope


@given(models(), st.integers(100_000, 200_000))
def test_slope_is_the_average_over_whole_blocks(model: Model, context: int) -> None:
    """A compressed row belongs to several tokens. The least common multiple of their numbers adds whole rows of all entries."""
    ratio = math.lcm(*(e.ratio for kind in model.order for e in model.kinds[kind].entries))
    before, after = (cache_size(model, (context // ratio + n) * ratio) for n in (0, 1))
    assert after.stored - before.stored == ratio * before.slope


@given(models(), contexts, st.integers(1, 1000), blocks)
def test_fixed_part_and_growth_make_the_whole(model: Model, context: int, batch: int, block: int) -> None:
    size = cache_size(model, context, batch, block_size=block)
    assert size.fixed * batch <= size.stored <= size.allocated


@given(attention, contexts, st.integers(1, 20), cache_dtypes)
def test_gqa_with_as_many_groups_as_heads_is_mha(part: Sublayer, context: int, layers: int, dtype: str) -> None:
    (heads, key, value), model = part.as_mha(), one(part, layers)
    assume(key == value)  # as MHA keys get the width of values
    as_gqa, as_mha, as_mqa = (variant(model, text).model for text in (f"gqa:{heads}", "mha", "mqa"))
    assert as_gqa == as_mha
    single, every = (cache_size(m, context, precision=Precision(kv_cache_dtype=dtype)).stored for m in (as_mqa, as_mha))
    assert every == heads * single


def optional_limits() -> list[tuple[type[Sublayer], str]]:
    """Return every field of a mixer that limits tokens if it is given."""
    found = []
    for part in MIXERS:
        for f in msgspec.structs.fields(part):
            if f.type == Tokens | None:
                found.append((part, f.name))
    assert len(found) >= 5
    return found


@pytest.mark.parametrize(("part", "field"), optional_limits())
@given(st.data(), contexts, st.integers(0, 10**6), blocks)
def test_a_limit_beyond_the_context_is_no_limit(
    part: type[Sublayer], field: str, data: st.DataObject, context: int, beyond: int, block: int
) -> None:
    full = data.draw(of(part, **{field: st.none()}))
    limited = msgspec.structs.replace(full, **{field: context + beyond})
    if limited.problem():
        return
    without, within = (cache_size(one(p), context, block_size=block) for p in (full, limited))
    assert (without.stored, without.read, without.allocated) == (within.stored, within.read, within.allocated)


@given(mixers, st.integers(1, 5000), st.integers(0, 5000))
def test_rows_within_a_limit_or_a_top_k_are_those_without(part: Sublayer, new: int, past: int) -> None:
    for entry in part.cache():
        if entry.span is Span.TOKENS:
            free = msgspec.structs.replace(entry, limit=0, max_rows_per_query=0)
            held, read = free.stored_rows(past + new), free.read_rows(new, past)
            assert entry.stored_rows(past + new) == (min(held, entry.limit) if entry.limit else held)
            if (not entry.limit or past < entry.limit) and (
                not entry.max_rows_per_query or new * entry.max_rows_per_query >= read
            ):
                assert entry.read_rows(new, past) == read
            assert entry.read_rows(new, past) <= read


TOP_K = [(part, f.name) for part in MIXERS for f in msgspec.structs.fields(part) if "topk" in f.name]


@pytest.mark.parametrize(("part", "field"), TOP_K)
@given(st.data(), contexts, st.integers(0, 1000))
def test_a_top_k_beyond_the_context_reads_every_row(
    part: type[Sublayer], field: str, data: st.DataObject, context: int, beyond: int
) -> None:
    """This covers entries that a top-k reads in part. The number of stored rows never depends on the top-k."""
    narrow = data.draw(of(part, **{field: tokens}))
    wide = msgspec.structs.replace(narrow, **{field: context + beyond})
    for thin, all_of_it in zip(narrow.cache(), wide.cache(), strict=True):
        assert thin.stored_rows(context) == all_of_it.stored_rows(context)
        if all_of_it.max_rows_per_query >= context and not thin.limit:
            assert all_of_it.read_rows(1, context - 1) == all_of_it.stored_rows(context)


@given(grouped, st.integers(1, 12), st.integers(1, 8), contexts, batches)
def test_sharing_divides_the_cache_where_it_divides_the_layers(
    part: Grouped, share: int, times: int, context: int, batch: int
) -> None:
    plain = one(part, layers=share * times)
    shared = variant(plain, f"cla:{share}").model
    whole, part_of_it = cache_size(plain, context, batch), cache_size(shared, context, batch)
    assert share * part_of_it.stored == whole.stored
    assert share * part_of_it.allocated == whole.allocated
    assert part_of_it.read == whole.read


@given(models(), contexts, st.integers(1, 1000), st.sampled_from([1, 8, 16, 64, 256]))
def test_blocks_waste_less_than_one_block_per_sequence_and_layer(model: Model, context: int, batch: int, block: int) -> None:
    size = cache_size(model, context, batch, block_size=block)
    one_block = 0
    for kind, count in model.counts.items():
        for entry in model.kinds[kind].entries:
            if entry.grows:
                row = entry.heads * entry.width * {"bf16": 2, "fp16": 2, "fp32": 4}[model.dtype]
                one_block += count * row * (max(1, block // entry.ratio) - 1)  # a row less than a block of them
    assert 0 <= size.allocated - size.stored <= batch * one_block


@given(models(), st.lists(contexts, min_size=1, max_size=50), blocks)
def test_arrays_count_the_same_rows_as_whole_numbers(model: Model, lengths: list[int], block: int) -> None:
    import numpy as np

    tokens = np.array(lengths, dtype=float)
    for layer in model.kinds.values():
        for entry in layer.entries:
            ones = np.ones_like(tokens)  # a state has as many rows whatever the length
            assert list(entry.stored_rows(tokens) * ones) == [entry.stored_rows(s) for s in lengths]
            assert list(entry.allocated_rows(tokens, block) * ones) == [entry.allocated_rows(s, block) for s in lengths]
            assert list(entry.read_rows(1, tokens - 1) * ones) == [entry.read_rows(1, s - 1) for s in lengths]


@given(models(), st.integers(0, 10_000), st.integers(1, 500))
def test_a_pass_reads_at_most_what_its_tokens_read_one_by_one(model: Model, past: int, new: int) -> None:
    for layer in model.kinds.values():
        for entry in layer.entries:
            together = entry.read_rows(new, past)
            alone = [entry.read_rows(1, past + i) for i in range(new)]
            assert together <= sum(alone)
            if entry.span is not Span.CHUNK:
                assert together >= alone[-1] or not entry.grows


@given(models())
def test_yaml_reads_back_as_the_same_model(model: Model) -> None:
    data, _ = parse_yaml(to_yaml(model), "round trip")
    again = msgspec.convert(data, Model)
    assert again == model
    assert again.problem() == ("", "")


@given(models())
def test_active_parameters_leave_out_experts_alone(model: Model) -> None:
    assert 0 < model.active_parameters <= model.parameters
    routed = any(part.__struct_config__.tag == "moe" for layer in model.kinds.values() for part in layer.parts)
    if not routed:
        assert model.active_parameters == model.parameters
