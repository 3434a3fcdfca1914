"""Differences of stored, read and allocated bytes: windows, chunks, top-k, compression, eviction, sharing, paging."""

import pytest
from conftest import Run
from specs import compressed, csa, grouped, hca, of_kinds, sparse, stack, v4_flash

from kvcalc import CacheSize, Layer, cache_size, load_model
from kvcalc.layers.attention import BlockSparse
from kvcalc.layers.cache import CacheEntry, Span
from kvcalc.planning.variants import variant

ROW = 2 * 2 * 16 * 2  # bytes of a token in a layer of `grouped()`: K and V, 2 heads of 16, bf16


def test_full_attention_reads_what_it_stores_and_pays_for_whole_blocks() -> None:
    assert cache_size(stack(grouped(), layers=3), 17) == CacheSize(3 * 17 * ROW, 3 * 17 * ROW, 3 * 32 * ROW, 0, 3 * ROW)
    assert cache_size(stack(grouped()), 16).allocated == 16 * ROW
    assert cache_size(stack(grouped()), 17, block_size=1).allocated == 17 * ROW
    assert cache_size(stack(grouped()), 17, batch_size=5).allocated == 5 * 32 * ROW


@pytest.mark.parametrize(("context", "held"), [(1, 1), (99, 99), (100, 100), (101, 100), (10**9, 100)])
def test_window_bounds_what_is_stored_and_read(context: int, held: int) -> None:
    size = cache_size(stack(grouped(sliding_window=100)), context)
    blocks = -(-held // 16) * 16
    grows = context < 100
    expected = CacheSize(held * ROW, held * ROW, blocks * ROW, 0 if grows else held * ROW, ROW if grows else 0)
    assert size == expected


def test_sink_tokens_are_rows_beside_the_window() -> None:
    assert cache_size(stack(grouped(sliding_window=100, sink_tokens=4)), 1000).stored == 104 * ROW


def test_chunk_holds_one_chunk_and_reads_the_tokens_since_its_start() -> None:
    model = stack(grouped(attention_chunk_size=64))
    # tokens → rows held, rows read by the step that makes them
    for tokens, held, read in [(1, 1, 1), (64, 64, 64), (65, 64, 1), (100, 64, 36), (128, 64, 64), (129, 64, 1)]:
        size = cache_size(model, tokens)
        assert (size.stored, size.read) == (held * ROW, read * ROW), tokens


def test_eviction_keeps_the_budget() -> None:
    size = cache_size(variant(stack(grouped()), "evict:40").model, 1000)
    assert (size.stored, size.read, size.allocated) == (40 * ROW, 40 * ROW, 48 * ROW)


def test_hybrid_sums_its_layer_kinds() -> None:
    """5 local layers of window 100 for each full layer, in 12 layers."""
    kinds = {"local": Layer(parts=(grouped(sliding_window=100),)), "full": Layer(parts=(grouped(),))}
    model = of_kinds(kinds, layers=12, pattern=("5 local", "full"))
    assert cache_size(model, 1000) == CacheSize(
        stored=(10 * 100 + 2 * 1000) * ROW,
        read=(10 * 100 + 2 * 1000) * ROW,
        allocated=(10 * 112 + 2 * 1008) * ROW,
        fixed=10 * 100 * ROW,
        slope=2 * ROW,
    )


def test_gemma_3_27b_stacks_ten_full_layers_of_62(kvcalc: Run) -> None:
    """(5 local + 1 full) · 10 + 2 local: 52 layers of window 1024, 10 full; 16 KV heads of 128."""
    (record,) = kvcalc("size gemma-3-27b --context 128k --format json").records
    assert record["kv_cache_bytes"] == 2 * 16 * 128 * 2 * (52 * 1024 + 10 * 131_072)
    assert (record["bytes_per_token"], record["fixed_bytes"]) == (2 * 16 * 128 * 2 * 10, 2 * 16 * 128 * 2 * 52 * 1024)


def test_dsa_stores_more_than_mla_and_reads_less(kvcalc: Run) -> None:
    """Per layer at 131,072 tokens in bf16: 33.6 MB of index keys and 2.4 MB of latents, compared with MLA's 151.0 MB."""
    index, latents, mla = 131_072 * 128 * 2, 2048 * 576 * 2, 131_072 * 576 * 2
    assert (index, latents, mla) == (33_554_432, 2_359_296, 150_994_944)
    (dsa,) = kvcalc("size deepseek-v3.2 --context 128k --format json").records
    (plain,) = kvcalc("size deepseek-v3 --context 128k --format json").records
    assert dsa["kv_cache_read_bytes"] == 61 * (index + latents)
    assert dsa["kv_cache_bytes"] == 61 * (index + mla)
    assert plain["kv_cache_read_bytes"] == plain["kv_cache_bytes"] == 61 * mla


def test_shared_indexers_store_no_index_keys() -> None:
    """GLM-5.2: 21 of 78 layers have an indexer, 57 reuse its selection. MLA rows have 576 elements, index keys 128."""
    size = cache_size(load_model("glm-5.2"), 4096)
    assert size.stored == (78 * 576 + 21 * 128) * 2 * 4096 == 390_070_272
    assert size.read == 78 * 576 * 2 * 2048 + 21 * 128 * 2 * 4096


def test_pooled_index_keeps_a_gate_and_a_flag_beside_each_key() -> None:
    plain, pooled = (cache_size(stack(sparse(index_pool=pool)), 10).stored for pool in (0, 4))
    assert pooled - plain == (16 + 1) * 2 * 10


def test_block_sparse_reads_the_chosen_blocks_and_every_index_key() -> None:
    part = BlockSparse(
        num_attention_heads=8, num_key_value_heads=2, head_dim=16,
        index_block_size=32, index_topk_blocks=4, index_n_heads=4, index_head_dim=8,
    )  # fmt: skip
    size = cache_size(stack(part), 1000)
    assert (size.stored, size.read) == (1000 * (ROW + 16), 4 * 32 * ROW + 1000 * 16)


def test_compressed_layer_of_v4_flash_at_17_tokens() -> None:
    """37,888 bytes: a window of 17 rows, 4 entries with index keys, 1 token of the unfinished block, one overlap block."""
    window, entries, keys = 17 * 512 * 2, (17 // 4) * 512 * 2, (17 // 4) * 128 * 2
    wide = 512 + 128  # the compressor's and the indexer's columns, each as key-value and as gate
    unfinished, overlap = (17 % 4) * 2 * 2 * wide * 2, 4 * 2 * wide * 2  # the unfinished block has two series of them
    assert window + entries + keys + unfinished + overlap == 37_888
    assert cache_size(stack(csa()), 17).stored == 37_888
    assert cache_size(stack(hca()), 17).stored == 17 * 512 * 2 + 17 * 2 * 512 * 2  # 17 tokens short of a block of 128
    assert cache_size(stack(compressed()), 17).stored == 17 * 512 * 2


def test_v4_flash_grows_by_6880_bytes_a_token() -> None:
    model = v4_flash()
    assert 21 * (512 * 2 + 128 * 2) // 4 + 20 * 512 * 2 // 128 == 6880
    assert cache_size(model, 100_000).slope == 6880
    assert cache_size(model, 100_000 + 128).stored - cache_size(model, 100_000).stored == 128 * 6880
    assert cache_size(model, 100_000).fixed == 43 * 128 * 512 * 2


@pytest.mark.parametrize(("share", "storing"), [(1, 12), (2, 6), (3, 4), (5, 3), (12, 1), (50, 1)])
def test_cross_layer_sharing_stores_every_nth_layer(share: int, storing: int) -> None:
    """⌈12/n⌉ layers store, and all 12 read. Layers without a cache project no keys and values."""
    plain = stack(grouped(), layers=12)
    shared = variant(plain, f"cla:{share}").model
    size = cache_size(shared, 100)
    assert (size.stored, size.read) == (storing * 100 * ROW, 12 * 100 * ROW)
    assert plain.parameters - shared.parameters == (12 - storing) * 2 * 64 * 32


@pytest.mark.parametrize(
    ("entry", "new", "past", "rows"),
    [
        (CacheEntry("k", 1, 8), 5, 10, 15),
        (CacheEntry("k", 1, 8, limit=8), 1, 100, 8),
        (CacheEntry("k", 1, 8, limit=8), 5, 100, 7 + 5),  # five queries, each with a window of its own
        (CacheEntry("k", 1, 8, limit=8), 5, 0, 5),
        (CacheEntry("latent", 1, 8, max_rows_per_query=4), 1, 100, 4),
        (CacheEntry("latent", 1, 8, max_rows_per_query=4), 3, 100, 12),
        (CacheEntry("latent", 1, 8, max_rows_per_query=400), 3, 100, 103),
        (CacheEntry("k", 1, 8, limit=64, span=Span.CHUNK), 4, 63, 67),  # the end of one chunk and the start of the next
        (CacheEntry("recurrent_state", 1, 8, limit=8, span=Span.STATE), 100, 100, 8),
        (CacheEntry("latent", 1, 8, ratio=4), 1, 100, 25),
    ],
)
def test_rows_that_a_pass_reads(entry: CacheEntry, new: int, past: int, rows: int) -> None:
    assert entry.read_rows(new, past) == rows


@pytest.mark.parametrize(
    ("entry", "new", "past", "rows"),
    [
        (CacheEntry("k", 1, 8), 5, 10, 5),
        (CacheEntry("k", 1, 8, limit=8), 1, 100, 1),
        (CacheEntry("k", 1, 8, limit=8), 20, 100, 20),  # 12 of them fall out again, and were read before
        (CacheEntry("k", 1, 8, limit=8, span=Span.CHUNK), 20, 3, 20),
        (CacheEntry("latent", 1, 8, ratio=4), 10, 3, 3),  # tokens 4, 8 and 12 finish a block
        (CacheEntry("recurrent_state", 1, 8, limit=8, span=Span.STATE), 100, 100, 8),
    ],
)
def test_rows_that_a_pass_writes(entry: CacheEntry, new: int, past: int, rows: int) -> None:
    assert entry.written_rows(new, past) == rows


def test_compressed_entries_fill_blocks_of_their_own() -> None:
    """A block of 16 tokens stores 4 entries of ratio 4. A block shorter than the ratio stores one."""
    entry = CacheEntry("latent", 1, 8, ratio=4)
    assert [entry.allocated_rows(s, 16) for s in (3, 4, 16, 20, 68)] == [0, 4, 4, 8, 20]
    assert [entry.allocated_rows(s, 2) for s in (4, 8)] == [1, 2]
