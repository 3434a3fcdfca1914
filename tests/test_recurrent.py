"""Recurrent mixers: parameters and states by hand. A short convolution stores kernel − 1 columns, a state is in fp32."""

import pytest
from specs import stack

from kvcalc import Batch, Parallelism, Precision, cache_size
from kvcalc.layers.cache import CacheEntry, Span
from kvcalc.layers.part import Sublayer
from kvcalc.layers.passes import Pass
from kvcalc.layers.recurrent import (
    Convolutions,
    GatedDeltaNet,
    KimiDeltaAttention,
    Lightning,
    Mamba,
    Mamba2,
    NgramMemory,
    RgLru,
    ShortConv,
)
from kvcalc.layers.recurrent.convolution import ngram_rows
from kvcalc.layers.weights import Formats, Weight, matrix

DELTA = GatedDeltaNet(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=16)

# mixer; parameters on a width of 64; elements of the convolution's columns (bf16), and of the state (fp32)
RECURRENT = [
    # in [64, 2·128], conv [128, 4] + bias, x [128, 4 + 2·16], dt [4, 128] + bias, A [128, 16], D, out [128, 64]
    (Mamba(intermediate_size=128, state_size=16, time_step_rank=4),
        64 * 256 + 128 * 5 + 128 * 36 + 4 * 128 + 128 + 128 * 16 + 128 + 128 * 64, 3 * 128, 128 * 16),
    (Mamba(intermediate_size=128, state_size=16, time_step_rank=4, conv_kernel=8, conv_bias=False, inner_norms=True),
        64 * 256 + 128 * 8 + 128 * 36 + 4 * 128 + 128 + 128 * 16 + 128 + 128 * 64 + 4 + 16 + 16, 7 * 128, 128 * 16),
    # Zamba: two groups of 64 channels with projections of their own
    (Mamba(intermediate_size=128, state_size=16, time_step_rank=4, n_mamba_heads=2, proj_bias=True),
        65 * 256 + 128 * 5 + 2 * 64 * 36 + 2 * (4 * 64 + 64) + 128 * 16 + 128 + 128 * 64 + 64, 3 * 128, 128 * 16),
    # in [64, 2·128 + 2·2·16 + 8], conv over 128 + 64 channels, A, D and step bias per head, norm, out
    (Mamba2(num_heads=8, head_dim=16, state_size=16, n_groups=2),
        64 * (256 + 64 + 8) + (128 + 64) * 5 + 3 * 8 + 128 + 128 * 64, 3 * (128 + 64), 8 * 16 * 16),
    (Mamba2(num_heads=8, head_dim=16, state_size=16, n_groups=2, gate_norm=False, proj_bias=True, conv_bias=False),
        65 * (256 + 64 + 8) + (128 + 64) * 4 + 3 * 8 + 128 * 64 + 64, 3 * (128 + 64), 8 * 16 * 16),
    # q, k [64, 2·16], v and gate [64, 2·64], step and decay [64, 8], conv [96, 4], A and step bias, norm 16, out [64, 64]
    (DELTA, 64 * 32 + 64 * 128 + 64 * 8 + 96 * 4 + 8 + 16 + 64 * 64, 3 * (16 + 16 + 64), 4 * 8 * 16),
    (GatedDeltaNet(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=16,
        linear_conv_kernel_dim=3, conv_bias=True), 64 * 32 + 64 * 128 + 64 * 8 + 96 * (3 + 1) + 8 + 16 + 64 * 64,
        2 * (16 + 16 + 64), 4 * 8 * 16),
    # q, k, v [64, 32], conv [96, 4], decay and gate through 8, step [64, 4], A and bias, norm, out
    (KimiDeltaAttention(num_heads=4, head_dim=8),
        3 * 64 * 32 + 96 * 4 + 2 * (64 * 8 + 8 * 32) + 64 * 4 + 4 + 32 + 8 + 32 * 64, 3 * 96, 4 * 8 * 8),
    (KimiDeltaAttention(num_heads=4, head_dim=8, factored=False, gate_bias=True),
        3 * 64 * 32 + 96 * 4 + 2 * 64 * 32 + 32 + 64 * 4 + 4 + 32 + 8 + 32 * 64, 3 * 96, 4 * 8 * 8),
    (Lightning(num_attention_heads=4, head_dim=16), 64 * 192 + 64 * 64 + 64 + 64 * 64, 0, 4 * 16 * 16),
    # x and y [64, 96] + bias, conv [96, 4] + bias, two gates of 4 blocks [24, 24] + bias, decay, out + bias
    (RgLru(lru_width=96, num_heads=4), 2 * 65 * 96 + 96 * 5 + 4 * (24 * 48 + 48) + 96 + 96 * 64 + 64, 3 * 96, 96),
    (ShortConv(width=64), 64 * 192 + 64 * 3 + 64 * 64, 2 * 64, 0),
    (ShortConv(width=64, conv_kernel=5, bias=True), 65 * 192 + 64 * 6 + 65 * 64, 4 * 64, 0),
    (Convolutions(channels={"k": 32, "v": 48}, conv_kernel=4, bias=True), (32 + 48) * 5, 3 * (32 + 48), 0),
    (Convolutions(channels={"v": 48}, conv_kernel=2, weighted=False), 0, 48, 0),
    (Convolutions(channels={"v": 48}, conv_kernel=2, columns=5), 48 * 2, 5 * 48, 0),
    # a table of 50 rows of 8, of which 3 are read; 2 streams of 64; key and value from 24, three norms, a dilated conv
    (NgramMemory(table_rows=50, table_width=8, hashes=3, streams=2, hidden_size=64, conv_kernel=4, dilation=3),
        50 * 8 + 24 * 128 + 24 * 64 + 3 * 128 + 128 * 4, 3 * 3 * 128, 0),
]  # fmt: skip
IDS = [f"{type(part).__name__}-{i}" for i, (part, *_) in enumerate(RECURRENT)]


@pytest.mark.parametrize(("part", "parameters", "columns", "state"), RECURRENT, ids=IDS)
def test_parameters_and_state(part: Sublayer, parameters: int, columns: int, state: int) -> None:
    assert sum(w.elements for w in part.weights(64)) == parameters
    model = stack(part, layers=3)
    size = cache_size(model, 5, batch_size=2)
    assert size.stored == size.read == size.allocated == 2 * 3 * (2 * columns + 4 * state)
    assert (size.fixed, size.slope) == (3 * (2 * columns + 4 * state), 0)
    assert cache_size(model, 10**9, batch_size=2) == size


def test_a_kernel_of_one_keeps_nothing() -> None:
    """Only the current column has a weight, so no state is stored in addition to the rows of tokens."""
    assert Convolutions(channels={"k": 32}, conv_kernel=1).cache() == ()
    assert [e.limit for e in Convolutions(channels={"k": 32}, conv_kernel=2).cache()] == [1]


def test_ngram_tables_take_the_next_primes() -> None:
    """From 10 on: 11, 13 | 17, 19 | 23, 29; padded to multiples of 8."""
    assert [ngram_rows(10, 2, index, 1) for index in range(3)] == [11 + 13, 17 + 19, 23 + 29]
    assert [ngram_rows(10, 2, index, 8) for index in range(3)] == [24, 40, 56]


def test_state_keeps_its_dtype_and_columns_follow_the_models() -> None:
    model = stack(DELTA)
    columns, state = 3 * (16 + 16 + 64), 4 * 8 * 16
    assert cache_size(model, 1, precision=Precision(kv_cache_dtype="fp8")).stored == 2 * columns + 4 * state
    assert cache_size(model, 1, precision=Precision(dtype="fp32")).stored == 4 * columns + 4 * state
    assert cache_size(stack(DELTA, dtype="fp32"), 1).stored == 4 * columns + 4 * state
    half = GatedDeltaNet(
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=16, state_dtype="bf16"
    )
    assert cache_size(stack(half), 1).stored == 2 * columns + 2 * state


def test_hybrid_grows_by_its_attention_layers_alone(kvcalc_qwen3_next: dict[str, int]) -> None:
    """Qwen3-Next: 12 of 48 layers attend with 2 KV heads of 256. 36 store 32 states of 128 × 128 and 3 columns of 8192."""
    assert kvcalc_qwen3_next["bytes_per_token"] == 12 * 2 * 2 * 256 * 2
    assert kvcalc_qwen3_next["fixed_bytes"] == 36 * (32 * 128 * 128 * 4 + 3 * (2 * 16 * 128 + 32 * 128) * 2)


@pytest.fixture
def kvcalc_qwen3_next(kvcalc) -> dict[str, int]:  # type: ignore[no-untyped-def]
    record: dict[str, int] = kvcalc("size qwen3-next-80b-a3b --format json").records[0]
    return record


class Memory(Sublayer, frozen=True, tag="memory"):
    """A mixer that is in no list: a state of 8 rows of 16 for each of 2 heads with a new role, or rows of tokens."""

    span: Span = Span.STATE

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        return matrix("qkv", hidden_size, 96, shards=2), matrix("out", 32, hidden_size, shards=2, rows_in=True)

    def cache(self) -> tuple[CacheEntry, ...]:
        return (CacheEntry("memory", 2, 16, limit=8, span=self.span),)


def test_a_state_of_any_role_is_scanned() -> None:
    """2·8·16 = 256 elements with 4 FLOPs per token and 2 of decay, read and written once for each of 3 sequences in bf16."""
    (_, scan, _) = Memory().operators(Pass(64, Batch.decode(100, 3), Formats("bf16", "bf16"), Parallelism()))
    assert (scan.cost.flops, scan.cost.vector_flops) == (3 * 4 * 256, 3 * 2 * 256)
    assert scan.cost.cache_read_bytes == scan.cost.cache_write_bytes == 3 * 2 * 256


def test_rows_of_tokens_have_no_scan() -> None:
    """An attention class without its own operators is an error. It must not count as 0 FLOPs."""
    with pytest.raises(TypeError, match="Memory lists no operators over the rows of tokens that it caches"):
        Memory(span=Span.TOKENS).operators(Pass(64, Batch.decode(100, 3), Formats("bf16", "bf16"), Parallelism()))
