"""Predict the time of a pass on this machine from its measured rates, and explain differences.

Each operator of `forward` is timed at its measured rate, one after the other:

- A matrix product takes the time measured for that number of rows, with weights read from memory.
- Attention is two products (with keys and with values) and a softmax.
- A mixer without a fused torch kernel runs as separate operations. Its products and activations are
  counted on torch's `meta` device; all other bytes take the time of a copy.
- The host needs a fixed time for each torch operation. A CPU runs host and kernels in turn. A GPU
  runs its kernels while the host launches the next ones.

`host_s` is the time of one operation in a decode step of a very narrow layer, measured between the
steps of the run with the same threads, dtype and clock. A product with large weights runs before it,
because weights of a real decoder also evict the code and data of the operations from the caches.

`difference` names the first reason that explains why a time differs from its bound:

- launch-bound: launching operations takes at least half of the time.
- cache-resident: the data fits the last-level cache, or the step was faster than memory allows.
- unfused: plain torch writes and reads intermediate results that the bound counts as fused, and the
  bounds of its operations add up to at least 1.5 times the bound.
- few-rows: the same sum reaches 1.5 times the bound at the rates measured for few rows.
- compute-bound, memory-bound: the time is within 1.5 times that bound.
- kernel: no other reason applies; the kernels do not reach the ceilings.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from kvcalc.gpu.spec import Gpu
from kvcalc.layers.attention import Grouped
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import SOFTMAX_FLOPS, AttentionShape, GemmShape, Operator
from kvcalc.layers.ffn import Dense
from kvcalc.layers.passes import ACTIVATION_FLOPS
from kvcalc.measure.ceilings import Ceilings, Products, Weights, once
from kvcalc.measure.layers import build_mixer, is_fused
from kvcalc.measure.layers.base_layer import Mixer
from kvcalc.measure.layers.decoder import Decoder
from kvcalc.measure.machine import Machine
from kvcalc.measure.torch_cache import DTYPES, LayerCache
from kvcalc.model.spec import Layer, Model
from kvcalc.units import format_bytes

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
_GATHERS = ("index", "index_select", "gather", "embedding")
_MADE = ("zeros_like", "ones_like", "new_zeros", "new_ones")
_ACTIVATIONS = ("exp", "silu", "sigmoid", "softplus")
_SCATTERS = ("index_put_", "_index_put_impl_", "index_copy_", "scatter_")


class Traffic(NamedTuple):
    """Work of one step, counted operation by operation.

    Attributes:
        launches: Number of operations.
        bytes: Bytes that the operations read and write.
        flops: FLOPs of matrix products.
        seconds: Sum over operations of max(bytes ÷ bandwidth, FLOPs ÷ peak).
        reached_s: The same sum with the measured times of products with few rows.
    """

    launches: int
    bytes: int
    flops: int
    seconds: float
    reached_s: float


class Plain(NamedTuple):
    """Work of a mixer without a fused kernel, except products with weights.

    Attributes:
        moved_bytes: Bytes that elementwise operations read and write.
        activations: Elements that activation functions compute.
        products: Products of activations, as (rows, elements of the other factor). A triangular system
            counts as one product.
    """

    moved_bytes: int
    activations: int
    products: tuple[tuple[int, int], ...]


class _Calls(TorchDispatchMode):
    """Count every operation, including views."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls(step: Any) -> int:
    """Run `step` once and return its number of torch operations, including views."""
    with torch.no_grad(), _Calls() as counter:
        step()
    return counter.count


class _Counter(TorchDispatchMode):
    def __init__(self, ceilings: Ceilings, peak: float) -> None:
        super().__init__()
        self.bandwidth, self.products, self.peak = ceilings.bandwidth_bytes_per_s, ceilings.products, peak
        self.launches = self.bytes = self.flops = 0
        self.seconds = self.reached_s = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        wrote = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
        name = func._overloadpacket.__name__
        if not wrote or (_aliases(read, wrote) and not name.endswith("_")):
            return out
        counter = flop_registry.get(func._overloadpacket)
        flops = int(counter(*args, **(kwargs or {}), out_val=out)) if counter else 0
        moved = _moved(name, read, wrote)
        self.launches += 1
        self.bytes += moved
        self.flops += flops
        least = max(moved / self.bandwidth, flops / self.peak)
        self.seconds += least
        self.reached_s += max(least, self.products.taken(*_product(read))) if name in _PRODUCTS else least
        return out


class _Plain(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.moved = self.activations = 0
        self.products: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        wrote = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
        name = func._overloadpacket.__name__
        if not wrote or name in ("mm", "addmm") or (_aliases(read, wrote) and not name.endswith("_")):
            return out
        if name in (*_PRODUCTS, "linalg_solve_triangular"):
            self.products.append(_product(read))
        elif name in _ACTIVATIONS:
            self.activations += sum(t.numel() for t in wrote)
        else:
            self.moved += _moved(name, read, wrote)
        return out


def plain_of(step: Any) -> Plain:
    """Run `step` once and return its work. Tensors on the `meta` device count like real tensors."""
    with torch.no_grad(), _Plain() as counter:
        step()
    return Plain(counter.moved, counter.activations, tuple(counter.products))


def traffic_of(step: Any, ceilings: Ceilings, dtype: str) -> Traffic:
    """Run `step` once and return its traffic."""
    with torch.no_grad(), _Counter(ceilings, ceilings.flops_per_s[dtype]) as counter:
        step()
    return Traffic(counter.launches, counter.bytes, counter.flops, counter.seconds, counter.reached_s)


def _aliases(read: list[Tensor], wrote: list[Tensor]) -> bool:
    """Return whether all outputs are views of inputs."""
    held = {t.untyped_storage()._cdata for t in read}
    return all(t.untyped_storage()._cdata in held for t in wrote)


def _product(read: list[Tensor]) -> tuple[int, int]:
    """Return (rows, elements of the larger factor) of the product of the last two inputs."""
    a, b = read[-2:]
    rows, columns = a.shape[-2], b.shape[-1]
    return min(rows, columns), a.numel() if columns < rows else b.numel()


def _moved(name: str, read: list[Tensor], wrote: list[Tensor]) -> int:
    results = sum(_size(t) for t in wrote)
    if name in _GATHERS:  # reads only the gathered rows
        return 2 * results
    if name in _SCATTERS:  # the last input is the written rows
        return 2 * _size(read[-1])
    if name in _MADE:
        return results
    if name in ("copy_", "fill_", "zero_"):
        return results + sum(_size(t) for t in read[1:])
    return results + sum(_size(t) for t in read)


def _size(tensor: Tensor) -> int:
    """Return the stored bytes of a tensor; an expanded dimension counts once."""
    held = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return min(held * tensor.element_size(), tensor.untyped_storage().nbytes())


ACTIVATION_ELEMENTS = 1 << 18


class Rates(NamedTuple):
    """Rates of this machine during a generation.

    Attributes:
        products: Times of products with few rows.
        vector_s: Seconds per vector FLOP of an activation function.
        host_s: Seconds of the host per torch operation.
    """

    products: Products
    vector_s: float
    host_s: float


class Sampling:
    """Samples of the rates, taken between the steps of a generation, so that load affects both equally.

    Products use the matrices of one decoder layer after the other.
    """

    def __init__(self, decoder: Decoder, machine: Machine, dtype: str, rows: Sequence[int]) -> None:
        """Prepare the samples; `rows` are the numbers of rows of the products."""
        model = decoder.model
        self.machine, self.rows = machine, tuple(sorted(set(rows)))
        self.weights = Weights(machine, [list(block.parameters()) for block in decoder.blocks])
        self.activation, self.x = _activation(model), torch.randn(ACTIVATION_ELEMENTS, device=machine.device).to(DTYPES[dtype])
        self.host, self.calls = _narrow(machine, dtype)
        self.found: list[list[float]] = []

    def sample(self) -> None:
        """Take one sample of each rate."""
        with torch.no_grad():
            vector = once(lambda: self.activation(self.x), self.machine) / (ACTIVATION_ELEMENTS * ACTIVATION_FLOPS)
            products, hosts = [], []
            for rows in self.rows:
                products.append(self.weights.seconds(rows))
                hosts.append(once(self.host, self.machine) / self.calls)
            self.found.append([vector, statistics.median(hosts), *products])

    def rates(self) -> Rates:
        """Return the medians of all samples."""
        vector, host, *products = (statistics.median(column) for column in zip(*self.found, strict=True))
        return Rates(Products(self.rows, tuple(products)), vector, host)


def _activation(model: Model) -> Callable[[Tensor], Tensor]:
    """Return the activation function of the model's FFNs."""
    dense = [part for layer in model.kinds.values() for part in layer.parts if isinstance(part, Dense)]
    if any(part.gated for part in dense):
        return lambda x: F.silu(x) * x
    return lambda x: F.gelu(x, approximate="tanh")


def _narrow(machine: Machine, dtype: str) -> tuple[Callable[[], Tensor], int]:
    """Return a decode step of one layer of width 8, and its number of torch operations."""
    mixer = Grouped(num_attention_heads=2, num_key_value_heads=2, head_dim=4, q_bias=True, k_bias=True, v_bias=True, o_bias=True)
    kinds = {"full": Layer(parts=(mixer, Dense(intermediate_size=8, bias=True, gated=False)))}
    model = Model(name="narrow", hidden_size=8, vocab_size=8, layers=1, kinds=kinds, norm="layer", position_embeddings=8)
    decoder = Decoder(model).to(machine.device, DTYPES[dtype])
    caches, token = decoder.caches(1, 8), torch.zeros(1, 1, dtype=torch.long, device=machine.device)

    def step() -> Tensor:
        return decoder(token, caches, 4)

    return step, calls(step)


class Scans:
    """Mixers of a model that have no fused kernel, on the `meta` device.

    Their states have a fixed size, so the work of a pass depends only on its new tokens.
    """

    def __init__(self, model: Model, dtype: str) -> None:
        self.width, self.dtype = model.hidden_size, DTYPES[dtype]
        self.mixers: list[tuple[int, Mixer]] = []
        self.found: dict[tuple[int, int], tuple[tuple[int, Plain], ...]] = {}
        for kind, layers in Counter(model.order).items():
            for part in model.kinds[kind].mixers:
                if not is_fused(part):
                    with torch.device("meta"):
                        self.mixers.append((layers, build_mixer(part, model.hidden_size).to(self.dtype)))

    def of(self, batch: Batch, cached: bool) -> tuple[tuple[int, Plain], ...]:
        """Return (number of layers, work of one layer) for each mixer in a pass of one group."""
        sequences, new = int(batch.groups[0].count), int(batch.groups[0].new)
        if (new, cached) not in self.found:
            self.found[new, cached] = tuple((layers, self._run(mixer, sequences, new, cached)) for layers, mixer in self.mixers)
        return self.found[new, cached]

    def _run(self, mixer: Mixer, sequences: int, new: int, cached: bool) -> Plain:
        x = torch.empty(sequences, new, self.width, dtype=self.dtype, device="meta")
        cache = LayerCache(mixer.entries, sequences, new, self.dtype, "meta") if cached else None
        return plain_of(lambda: mixer(x, cache, 0))


# Blocks of torch's fused attention on a CPU: keys, and (minimum queries, queries per block).
KEY_BLOCK = 512
QUERY_BLOCKS = ((768, 256), (192, 64), (0, 32))  # pytorch aten/src/ATen/native/cpu/FlashAttentionKernel.cpp


class Step(NamedTuple):
    """Facts of a pass that its operators do not include.

    Attributes:
        calls: Number of torch operations.
        extra_bytes: Bytes that the mode moves in addition to the operators.
        fused: Whether attention is a fused kernel.
        plain: (number of layers, work of one layer) of mixers without a fused kernel.
    """

    calls: int
    extra_bytes: int = 0
    fused: bool = True
    plain: tuple[tuple[int, Plain], ...] = ()


def expected_seconds(operators: Sequence[Operator], step: Step, rates: Rates, ceilings: Ceilings, gpu: Gpu, cuda: bool) -> float:
    """Return the predicted seconds of a pass.

    Args:
        operators: Operators of the pass.
        step: Facts that the operators do not include.
        rates: Measured rates.
        ceilings: Measured ceilings.
        gpu: The ceilings as a preset.
        cuda: Whether the host launches kernels ahead of the device.
    """
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
    """Return the seconds of products and activation functions of one layer without a fused kernel."""
    products = sum(rates.products.taken(rows, elements) for rows, elements in plain.products)
    return products + plain.activations * ACTIVATION_FLOPS * rates.vector_s


def _attention(shape: AttentionShape, absorbed: bool, fused: bool, rates: Rates) -> float:
    """Return the seconds of scores, softmax and values of all heads.

    Heads that share keys are rows of one product if there is one new token, or if nothing is fused.
    """
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
    """Return (queries, keys) of each block of torch's fused causal attention.

    Keys are read in whole blocks, up to the last position that a query of the block attends to.
    """
    size = next(block for least, block in QUERY_BLOCKS if new >= least)
    found = []
    for start in range(0, new, size):
        end = min(start + size, new)
        found.append((end - start, min(-(-(past + end) // KEY_BLOCK) * KEY_BLOCK, past + new)))
    return found


CLOSE = 1.5


class Facts(NamedTuple):
    """Facts of one measurement for `difference`.

    Attributes:
        predicted_s: Bound in seconds.
        measured_s: Measured seconds.
        bound: Resource that limits the bound: memory or compute.
        bytes: Bytes of the bound.
        resident: Whether the data fits the last-level cache.
        launch_s: Seconds to launch one operation.
        done: Traffic of the step as torch ran it.
    """

    predicted_s: float
    measured_s: float
    bound: str
    bytes: int
    resident: bool
    launch_s: float
    done: Traffic


def difference(facts: Facts) -> tuple[str, str]:
    """Return the reason for the difference, and a sentence with its numbers."""
    ratio = facts.measured_s / facts.predicted_s
    launching = facts.done.launches * facts.launch_s
    if launching >= facts.measured_s / 2:
        share = min(1.0, launching / facts.measured_s)
        return "launch-bound", f"{facts.done.launches} operations to launch take about {share:.0%} of the time"
    if facts.resident:
        return "cache-resident", f"its {format_bytes(facts.bytes)} stay in the last-level cache"
    if ratio < 1 / CLOSE:
        return "cache-resident", f"faster than the bound ({ratio:.2f}×): part of the data was in the last-level cache"
    if ratio <= CLOSE:
        return f"{facts.bound}-bound", f"within {CLOSE}× of its {facts.bound} bound"
    alone, reached = facts.done.seconds / facts.predicted_s, facts.done.reached_s / facts.predicted_s
    few = f"{reached:.1f}× with products of few rows at the rates measured for them"
    if alone >= CLOSE:
        factor = facts.done.bytes / facts.bytes
        moves = f"plain torch moves {factor:.1f}× the bytes of one fused pass"
        return "unfused", f"{moves}; operation by operation its bound is {alone:.1f}×, {few}"
    if reached >= CLOSE:
        return "few-rows", f"operation by operation its bound is {alone:.1f}×, {few}"
    return "kernel", f"torch's kernels reach {1 / ratio:.0%} of the {facts.bound} ceiling here"
