"""Every operator of Llama-2-7B by hand: 32 layers, D = 4096, 32 heads of 128, F = 11008, V = 32000, two bytes."""

import pytest

from kvcalc import Batch, Cost, Operator, forward, load_model
from kvcalc.layers.cost import unfused

L, D, H, d, F, V = 32, 4096, 32, 128, 11008, 32_000
E = 2  # bytes of an element in fp16


def operators(batch: Batch) -> dict[str, Operator]:
    return {o.name: o for o in forward(load_model("llama-2-7b"), batch)}


def worked(tokens: int, pairs: int, rows_read: int, sequences: int) -> dict[str, tuple[int, Cost]]:
    """Return (count, cost of one run) by operator name, for new tokens, (query, key) pairs, and cached rows that it reads."""
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


def test_kinds_dtypes_and_parts() -> None:
    found = operators(Batch.decode(4096))
    kinds = {n: o.kind for n, o in found.items()}
    assert {n for n, kind in kinds.items() if kind == "gemm"} == {"qkv", "o", "gate_up", "down", "lm_head"}
    assert kinds["attention"] == "attention"
    assert all(o.dtype == ("fp16" if o.cost.flops else "") for o in found.values())
    assert all(o.layer == ("full" if o.count > 1 else "") for o in found.values())
    parts = dict(unfused(found["attention"], 2))
    read, scores, query = 4096 * H * d * 2, 4096 * H * 2, H * d * 2  # bytes of K or V, of the scores, of a query
    assert parts["qk"] == parts["av"] == Cost(2 * 4096 * H * d, cache_read_bytes=read, activation_bytes=scores + query)
    assert parts["softmax"] == Cost(vector_flops=5 * 4096 * H, activation_bytes=2 * scores)
    gate = dict(unfused(found["gate_up"], 2))["gate"]
    assert gate == Cost(2 * D * F, weight_bytes=2 * D * F, activation_bytes=2 * (D + F))
