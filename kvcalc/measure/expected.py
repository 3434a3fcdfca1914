"""How long this machine should take for a pass: the operators of `forward` one after the other, at its measured rates.

A product takes what one of so many rows takes with weights from memory. Attention is products whose weights are keys and
values, and a softmax. A mixer that torch has no fused kernel for is what it runs, operation by operation: products of
activations, activation functions, and the bytes that every other operation reads and writes, in the time of a copy. Anything
else takes its vector FLOPs at the rate of the activation, or its bytes. Bytes that a way of generating moves beside these take
the time of a copy. The host takes its time for each of torch's operations: a CPU does one after the other, a GPU computes
meanwhile.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvcalc.gpu.spec import Gpu
from kvcalc.layers.cost import SOFTMAX_FLOPS, AttentionShape, GemmShape, Operator
from kvcalc.layers.passes import ACTIVATION_FLOPS
from kvcalc.measure.ceilings import Ceilings
from kvcalc.measure.rates import Rates
from kvcalc.measure.traffic import Plain

KEY_BLOCK = 512  # of torch's fused attention on a CPU, and its blocks of queries from so many queries on:
QUERY_BLOCKS = ((768, 256), (192, 64), (0, 32))  # pytorch aten/src/ATen/native/cpu/FlashAttentionKernel.cpp


class Step(NamedTuple):
    """What a pass runs beside its operators: `calls` of torch's operations, `extra_bytes`, and whether attention is fused.

    plain: what stands for the scans, (layers, what each of them runs).
    """

    calls: int
    extra_bytes: int = 0
    fused: bool = True
    plain: tuple[tuple[int, Plain], ...] = ()


def expected_seconds(operators: Sequence[Operator], step: Step, rates: Rates, ceilings: Ceilings, gpu: Gpu, cuda: bool) -> float:
    """Seconds of a pass; gpu: the machine's ceilings as a preset. cuda: whether the host runs ahead."""
    counted = [operator for operator in operators if operator.kind != "scan"] if step.plain else operators
    work = sum(operator.count * _seconds(operator, step.fused, rates, gpu) for operator in counted)
    moved = step.extra_bytes + sum(layers * plain.moved_bytes for layers, plain in step.plain)
    work += moved / ceilings.copy_bytes_per_s + sum(layers * _plain(plain, rates) for layers, plain in step.plain)
    host = step.calls * rates.host_s
    return max(work, host) if cuda else work + host


def _seconds(operator: Operator, fused: bool, rates: Rates, gpu: Gpu) -> float:
    shape, cost = operator.shape, operator.cost
    if isinstance(shape, GemmShape):
        return rates.products.taken(float(shape.m), float(shape.n * shape.k))
    if isinstance(shape, AttentionShape):
        return _attention(shape, operator.form == "absorbed", fused, rates)
    products = cost.flops / gpu.peak(operator.dtype)[0] if cost.flops else 0.0
    return float(max(products + cost.vector_flops * rates.vector_s, cost.bytes / gpu.bandwidth_bytes_per_s))


def _plain(plain: Plain, rates: Rates) -> float:
    """Seconds of a layer's products of activations, and of its activation functions."""
    products = sum(rates.products.taken(rows, elements) for rows, elements in plain.products)
    return products + plain.activations * ACTIVATION_FLOPS * rates.vector_s


def _attention(shape: AttentionShape, absorbed: bool, fused: bool, rates: Rates) -> float:
    """Scores, softmax and values of all heads. Heads that share keys are rows of one product where a single token asks, and
    where nothing is fused."""
    shared = shape.heads // shape.kv_heads if shape.kv_heads else shape.heads if absorbed else 1
    seconds = 0.0
    for count, new, past in ((int(count), int(new), int(past)) for count, new, past, _ in shape.groups):
        blocks = [(new, new + past)] if new == 1 or not fused else query_blocks(new, past)
        together = shared if new == 1 or not fused else 1
        heads = count * shape.heads // together
        for rows, keys in blocks:
            seconds += heads * rates.products.taken(rows * together, keys * (shape.key + shape.value))
            seconds += count * shape.heads * rows * keys * SOFTMAX_FLOPS * rates.vector_s
    return seconds


def query_blocks(new: int, past: int) -> list[tuple[int, int]]:
    """(queries, keys) of each block of torch's fused causal attention: keys in whole blocks, as far as the last query sees."""
    size = next(block for least, block in QUERY_BLOCKS if new >= least)
    found = []
    for start in range(0, new, size):
        end = min(start + size, new)
        found.append((end - start, min(-(-(past + end) // KEY_BLOCK) * KEY_BLOCK, past + new)))
    return found
