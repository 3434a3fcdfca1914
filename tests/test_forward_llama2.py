"""Every operator of Llama-2-7B by hand: 32 layers, D = 4096, 32 heads of 128, F = 11008, V = 32000, two bytes."""

import pytest

from kvcalc import Batch, Cost, Operator, forward, load_model, total

L, D, H, d, F, V = 32, 4096, 32, 128, 11008, 32_000
E = 2  # bytes of an element in fp16


def operators(batch: Batch) -> dict[str, Operator]:
    return {o.name: o for o in forward(load_model("llama-2-7b"), batch)}


def worked(tokens: int, pairs: int, rows_read: int, sequences: int) -> dict[str, tuple[int, Cost]]:
    """name → (count, cost of one), for so many new tokens, (query, key) pairs, and cached rows that the pass reads."""
    gemm = {
        "qkv": (L, tokens, D, 3 * D),
        "o": (L, tokens, D, D),
        "gate_up": (L, tokens, D, 2 * F),
        "down": (L, tokens, F, D),
        "lm_head": (1, sequences, D, V),
    }
    found = {
        name: (n, Cost(2 * rows * i * o, weight_bytes=i * o * E, activation_bytes=rows * (i + o) * E))
        for name, (n, rows, i, o) in gemm.items()
    }
    t = tokens
    found["embedding"] = (1, Cost(weight_bytes=t * D * E, activation_bytes=t * D * E))  # one row each, written out
    found["norm"] = (2 * L, Cost(0, 4 * t * D, D * E, activation_bytes=2 * t * D * E))
    found["rope"] = (L, Cost(0, 3 * t * 2 * H * d, activation_bytes=2 * t * 2 * H * d * E))
    found["attention"] = (
        L,
        Cost(
            flops=2 * 2 * pairs * H * d,
            vector_flops=5 * pairs * H,
            cache_read_bytes=rows_read * 2 * H * d * E,
            cache_write_bytes=t * 2 * H * d * E,
            activation_bytes=t * 2 * H * d * E,  # queries in, values out
        ),
    )
    found["activation"] = (L, Cost(0, 8 * t * F, activation_bytes=3 * t * F * E))
    s = sequences
    found["final_norm"] = (1, Cost(0, 4 * s * D, D * E, activation_bytes=2 * s * D * E))
    found["sampling"] = (1, Cost(0, 5 * s * V, activation_bytes=s * (V + 1) * E))
    return found


@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("context", [1, 4096])
def test_decode(context: int, batch_size: int) -> None:
    found = operators(Batch.decode(context, batch_size))
    by_hand = worked(batch_size, batch_size * context, batch_size * context, batch_size)
    assert {n: (o.count, o.cost) for n, o in found.items()} == by_hand


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("context", [1, 2, 4096])
def test_prefill(context: int, batch_size: int) -> None:
    found = operators(Batch.prefill(context, batch_size))
    pairs = batch_size * context * (context + 1) // 2
    by_hand = worked(batch_size * context, pairs, batch_size * context, batch_size)
    assert {n: (o.count, o.cost) for n, o in found.items()} == by_hand


def test_one_layer_in_figures() -> None:
    """The same once more as plain numbers: a decode step at 4096 tokens, batch 1."""
    found = operators(Batch.decode(4096))
    assert {n: (o.cost.flops, o.cost.weight_bytes, o.cost.cache_bytes, o.cost.activation_bytes) for n, o in found.items()} == {
        "embedding": (0, 8_192, 0, 8_192),
        "norm": (0, 8_192, 0, 16_384),
        "qkv": (100_663_296, 100_663_296, 0, 32_768),
        "rope": (0, 0, 0, 32_768),
        "attention": (67_108_864, 0, 67_108_864 + 16_384, 16_384),
        "o": (33_554_432, 33_554_432, 0, 16_384),
        "gate_up": (180_355_072, 180_355_072, 0, 52_224),
        "activation": (0, 0, 0, 66_048),
        "down": (90_177_536, 90_177_536, 0, 30_208),
        "final_norm": (0, 8_192, 0, 16_384),
        "lm_head": (262_144_000, 262_144_000, 0, 72_192),
        "sampling": (0, 0, 0, 64_002),
    }


def test_prefill_of_4096_in_figures() -> None:
    found = operators(Batch.prefill(4096))
    assert {n: o.cost.flops for n, o in found.items() if o.cost.flops} == {
        "qkv": 412_316_860_416,
        "attention": 137_472_507_904,  # 4 · 4096·4097/2 · 4096
        "o": 137_438_953_472,
        "gate_up": 738_734_374_912,
        "down": 369_367_187_456,
        "lm_head": 262_144_000,
    }


def test_kinds_dtypes_and_parts() -> None:
    found = operators(Batch.decode(4096))
    kinds = {n: o.kind for n, o in found.items()}
    assert {n for n, kind in kinds.items() if kind == "gemm"} == {"qkv", "o", "gate_up", "down", "lm_head"}
    assert kinds["attention"] == "attention"
    assert all(o.dtype == ("fp16" if o.cost.flops else "") for o in found.values())
    assert all(o.layer == ("full" if o.count > 1 else "") for o in found.values())
    parts = dict(found["attention"].parts)
    assert list(parts) == ["qk", "softmax", "av"]
    assert parts["qk"] == parts["av"] == Cost(2 * 4096 * H * d)  # FLOPs alone: the cache is read once, by the whole
    assert parts["softmax"] == Cost(vector_flops=5 * 4096 * H)


def test_a_decode_step_reads_every_weight_once_and_the_whole_cache() -> None:
    whole = total(forward(load_model("llama-2-7b"), Batch.decode(4096, 64)))
    assert whole.weight_bytes == 2 * 6_738_415_616 - V * D * E + 64 * D * E  # rows of the embedding, not the table
    assert whole.cache_read_bytes == 64 * 2 * L * H * d * E * 4096


def test_prefill_is_two_flops_a_parameter_and_token_plus_attention() -> None:
    """N: the matrices of the layers, 32·(4·D² + 3·D·F); the head runs once for the last position."""
    n = L * (4 * D * D + 3 * D * F)
    assert n == 6_476_005_376
    whole = total(forward(load_model("llama-2-7b"), Batch.prefill(2048, 4)))
    assert whole.flops == 2 * n * 2048 * 4 + 4 * L * H * d * 4 * (2048 * 2049 // 2) + 2 * D * V * 4
    everywhere = total(forward(load_model("llama-2-7b"), Batch.prefill(2048, 4), all_positions=True))
    assert everywhere.flops - whole.flops == 2 * D * V * 4 * 2047
