"""Rules for every mixer and feed-forward part in the code, drawn from the part's fields."""

from typing import Annotated

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import FEED_FORWARD, HIDDEN, MIXERS, all_parts, feed_forward, groups, mixers, of

from kvcalc import Batch, Parallelism, Sequences
from kvcalc.layers.attention import Grouped
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.cost import Cost, Role
from kvcalc.layers.part import Size, Sublayer
from kvcalc.layers.passes import Pass
from kvcalc.layers.weights import Formats, WeightKind

PLAIN = Formats("bf16", "bf16")
ranks = st.sampled_from([2, 4, 8])


def test_every_part_of_the_code_can_stand_in_a_layer_and_is_drawn() -> None:
    """A class that is in no list could not be tested or read from a file."""
    assert set(all_parts()) == {*MIXERS, *FEED_FORWARD}
    assert len({c.__struct_config__.tag for c in all_parts()}) == len(all_parts())


class Novel(Grouped, frozen=True, kw_only=True, tag="novel"):
    """A variant that is in no list: keys of every `stride`-th token in addition to a window."""

    stride: Size
    shape: Annotated[int, msgspec.Meta(ge=1, le=100)] | None = None

    def problem(self) -> str:
        return super().problem() or ("stride is odd" if self.stride % 2 else "")

    def cache(self) -> tuple[CacheEntry, ...]:
        return (*super().cache(), CacheEntry("k", self.num_key_value_heads, self.head_dim, ratio=self.stride))


@given(of(Novel))
def test_a_new_variant_is_drawn_from_its_fields_and_its_problem(part: Novel) -> None:
    assert not part.problem() and part.stride % 2 == 0
    assert part.num_attention_heads % part.num_key_value_heads == 0
    assert msgspec.convert(msgspec.to_builtins(part), Novel) == part


@pytest.mark.parametrize("part", [*MIXERS, *FEED_FORWARD])
@given(st.data())
def test_a_part_reads_back_from_its_own_fields(part: type[Sublayer], data: st.DataObject) -> None:
    drawn = data.draw(of(part))
    assert msgspec.convert(msgspec.to_builtins(drawn), part) == drawn


def cost_of(part: Sublayer, batch: Batch, tp: int = 1, form: str = "auto") -> Cost:
    p = Pass(HIDDEN, batch, PLAIN, Parallelism(tp=tp), form)
    return sum((o.total for o in part.operators(p)), Cost())


@given(mixers | feed_forward, groups)
def test_matrices_of_one_name_are_one_matrix(part: Sublayer, group: Sequences) -> None:
    """Parts find weights by name. Two weights with one name would be counted as parameters but multiplied as one."""
    names = [w.name for w in part.weights(HIDDEN)]
    assert len(names) == len(set(names))
    assert all(w.elements > 0 for w in part.weights(HIDDEN) if w.kind is not WeightKind.VECTOR and w.inputs and w.outputs)
    assert min(cost_of(part, Batch((group,)))) >= 0


@given(mixers | feed_forward, ranks)
def test_shards_of_a_weight_add_up_to_the_whole(part: Sublayer, tp: int) -> None:
    """This holds if the ranks divide the units. A weight with one unit is on every rank, and so is a row-parallel bias."""
    for weight in part.weights(HIDDEN):
        shard = weight.local(Parallelism(tp=tp))
        if weight.shards == 1 and not weight.expert:
            assert shard == weight
        elif weight.shards % tp == 0:
            assert tp * (shard.elements - shard.copies * shard.bias) == weight.elements - weight.copies * weight.bias
            assert shard.copies * shard.bias * (1 if weight.rows_in else tp) == weight.copies * weight.bias


@given(mixers, ranks)
def test_shards_of_a_cache_add_up_to_the_whole_or_to_copies(part: Sublayer, tp: int) -> None:
    for entry in part.cache():
        share = Parallelism(tp=tp).share(entry.heads)
        assert tp * share == max(tp, entry.heads) if entry.heads % tp == 0 or tp % entry.heads == 0 else tp * share > entry.heads


@given(mixers, groups)
def test_what_a_part_writes_is_what_it_then_holds_more(part: Sublayer, group: Sequences) -> None:
    """This covers entries that grow without a limit."""
    for entry in part.cache():
        if entry.grows and not entry.limit:
            before, after = (entry.stored_rows(n) for n in (group.past, group.past + group.new))
            assert entry.written_rows(group.new, group.past) == after - before


@given(mixers, st.integers(1, 300), st.integers(1, 5000), st.integers(1, 64))
def test_whole_blocks_hold_the_rows_and_less_than_one_more(part: Sublayer, tokens: int, more: int, block: int) -> None:
    for entry in part.cache():
        rows, held = entry.stored_rows(tokens + more), entry.allocated_rows(tokens + more, block)
        assert rows <= held < rows + max(1, block // entry.ratio)
        assert held == rows or entry.grows
        full = entry.full_from()
        assert full == 0 or not entry.limit or entry.stored_rows(full) == entry.limit == entry.stored_rows(full + more)
        assert full <= 0 or entry.stored_rows(full - 1) < entry.limit


@given(mixers | feed_forward, groups)
def test_role_and_dtype_of_every_operator(part: Sublayer, group: Sequences) -> None:
    """Matrix products have a dtype and a role, collectives have none, and one GPU has no collectives."""
    for o in part.operators(Pass(HIDDEN, Batch((group,)), PLAIN, Parallelism())):
        assert o.kind in ("gemm", "experts", "attention", "scan", "vector")
        assert (o.dtype in ("bf16", "fp8" if o.name == "indexer" else "bf16")) == (o.kind != "vector")
        assert o.cost.flops == 0 or o.dtype
        assert o.cost.network_bytes == 0


@pytest.mark.parametrize("mixer", MIXERS)
@given(st.data())
def test_what_grows_with_the_tokens_cached_is_told_by_its_role(mixer: type[Sublayer], data: st.DataObject) -> None:
    """A server adds up the time of a pass from operators that depend only on new tokens, and operators that
    depend on cached tokens.

    An operator with the wrong role would be timed without its context. The form of MLA is fixed here, because
    its choice depends on the context.
    """
    part, form = data.draw(of(mixer)), data.draw(st.sampled_from(["absorbed", "expanded"]))
    block = max((e.ratio for e in part.cache()), default=1)
    near, far = (
        part.operators(Pass(HIDDEN, Batch((Sequences(1, block, n * block),)), PLAIN, Parallelism(), form)) for n in (9, 99)
    )
    work = [{(o.name, o.form): o.cost.flops + o.cost.vector_flops for o in found} for found in (near, far)]
    for o in far:
        if work[0].get((o.name, o.form), 0) != work[1][o.name, o.form]:
            assert o.role is Role.CORE, o.name
