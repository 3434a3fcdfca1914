"""Predict the time of a pass on this machine from measured rates, and explain differences.

Each operator of `forward` is timed at its measured rate, one after the other:

- A matrix product takes the time measured for that number of rows.
- Attention is two products and a softmax. All other operators take their FLOPs or their bytes.
- The host needs a fixed time for each torch operation. A CPU runs host and kernels in turn. A GPU
  runs its kernels while the host launches the next ones.

The rates are measured between the steps of a generation, so other load affects both equally.
"""

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from kvcalc.gpu.gpu import Gpu
from kvcalc.gpu.roof import roofline, total_bound, total_seconds
from kvcalc.layers.attention import Grouped
from kvcalc.layers.cost import SOFTMAX_FLOPS, AttentionShape, GemmShape, Operator
from kvcalc.layers.feed_forward import Dense
from kvcalc.layers.passes import ACTIVATION_FLOPS
from kvcalc.measure.ceilings import Ceilings, once
from kvcalc.measure.layers.decoder import Decoder
from kvcalc.measure.machine import Machine
from kvcalc.measure.torch_cache import DTYPES
from kvcalc.model.forward_pass import total
from kvcalc.model.model import Layer, Model
from kvcalc.units import format_bytes

GATHERS = ("index", "index_select", "gather", "embedding")
SCATTERS = ("index_put_", "_index_put_impl_", "index_copy_", "scatter_", "copy_")
ACTIVATION_ELEMENTS = 1 << 18
MIN_MATRIX_SIDE = 16  # convolutions and vectors are narrower
KEY_BLOCK = 512  # keys per block of torch's fused attention on a CPU
CLOSE = 1.5  # a time within this factor of its bound needs no other reason


class Bound(NamedTuple):
    """Bound of some operators on the measured ceilings.

    Attributes:
        limit: The limiting resource: memory or compute.
    """

    seconds: float
    limit: str
    bytes: int
    flops: int


def bound_of(operators: Sequence[Operator], gpu: Gpu) -> Bound:
    """Return the sum of the operators' bounds."""
    points = roofline(operators, gpu)
    cost = total(operators)
    return Bound(total_seconds(points), total_bound(points), int(cost.bytes), int(cost.flops))


class Traffic(NamedTuple):
    """Work of one step as torch runs it.

    Attributes:
        calls: Number of torch operations, including views.
        launches: Number of operations that read or write memory.
        bytes: Bytes that these operations read and write.
    """

    calls: int
    launches: int
    bytes: int


class _OperationCounter(TorchDispatchMode):
    calls = launches = bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        read = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        wrote = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
        name = func._overloadpacket.__name__
        storages = {t.untyped_storage()._cdata for t in read}
        is_view = all(t.untyped_storage()._cdata in storages for t in wrote)
        if is_view and not name.endswith("_"):
            return out
        self.launches += 1
        moved = [*read, *wrote]
        if name in GATHERS:  # reads only the gathered rows
            moved = 2 * wrote
        elif name in SCATTERS:  # the last input is the written rows
            moved = 2 * read[-1:]
        self.bytes += sum(_stored_bytes(tensor) for tensor in moved)
        return out


def traffic_of(step: Callable[[], object]) -> Traffic:
    """Run `step` once and return its traffic."""
    with torch.no_grad(), _OperationCounter() as counter:
        step()
    return Traffic(counter.calls, counter.launches, counter.bytes)


def _stored_bytes(tensor: Tensor) -> int:
    """Return the stored bytes of a tensor; an expanded dimension counts once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()


def difference(
    bound: Bound,
    measured_s: float,
    traffic: Traffic,
    launch_s: float,
    unfused_s: float,
    is_resident: bool,
) -> tuple[str, str]:
    """Return why a time differs from its bound, and a sentence with the numbers.

    Args:
        bound: The bound on the measured ceilings.
        measured_s: Measured seconds.
        traffic: Traffic of the step as torch ran it.
        launch_s: Seconds to launch one operation.
        unfused_s: Seconds of the traffic at the measured bandwidth.
        is_resident: Whether the data fits the last-level cache.
    """
    ratio = measured_s / bound.seconds
    launching = traffic.launches * launch_s / measured_s
    if launching >= 0.5:
        share = min(1.0, launching)
        text = f"{traffic.launches} operations to launch take about {share:.0%} of the time"
        return "launch-bound", text
    if is_resident:
        return (
            "cache-resident",
            f"its {format_bytes(bound.bytes)} stay in the last-level cache",
        )
    if ratio < 1 / CLOSE:
        text = f"faster than the bound ({ratio:.2f}×): part of the data was in the last-level cache"
        return "cache-resident", text
    if ratio <= CLOSE:
        return f"{bound.limit}-bound", f"within {CLOSE}× of its {bound.limit} bound"
    if unfused_s >= CLOSE * bound.seconds:
        factor = traffic.bytes / bound.bytes
        return "unfused", f"plain torch moves {factor:.1f}× the bytes of one fused pass"
    return (
        "kernel",
        f"torch's kernels reach {1 / ratio:.0%} of the {bound.limit} ceiling here",
    )


class ProductTimes(NamedTuple):
    """Seconds per weight element of x [rows, k] · W [k, n], at ascending numbers of rows."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def product_seconds(self, rows: float, elements: float) -> float:
        """Return the seconds of a product whose weights have `elements` elements.

        Between measured numbers of rows the time is linear. Above the largest it grows with the
        rows. Below the smallest it is constant.
        """
        per_element = float(np.interp(rows, self.rows, self.seconds))
        return per_element * elements * max(1.0, rows / self.rows[-1])


class MachineRates(NamedTuple):
    """Rates of this machine during a generation.

    Attributes:
        products: Times of products with few rows.
        vector_s: Seconds per vector FLOP of an activation function.
        host_s: Seconds of the host per torch operation.
        copy_bytes_per_s: Bytes read plus bytes written by a copy, per second.
        gpu: The measured ceilings as a preset.
        is_cuda: Whether the host launches kernels ahead of the device.
    """

    products: ProductTimes
    vector_s: float
    host_s: float
    copy_bytes_per_s: float
    gpu: Gpu
    is_cuda: bool

    def pass_seconds(
        self,
        operators: Sequence[Operator],
        calls: int,
        extra_bytes: int = 0,
    ) -> float:
        """Return the predicted seconds of a pass.

        Args:
            operators: Operators of the pass.
            calls: Number of torch operations of the pass.
            extra_bytes: Bytes that are copied in addition to the operators.
        """
        work = extra_bytes / self.copy_bytes_per_s
        for operator in operators:
            work += operator.count * self._operator_seconds(operator)
        host = calls * self.host_s
        return max(work, host) if self.is_cuda else work + host

    def _operator_seconds(self, operator: Operator) -> float:
        shape, cost = operator.shape, operator.cost
        if isinstance(shape, GemmShape):
            return self.products.product_seconds(float(shape.m), float(shape.n * shape.k))
        if isinstance(shape, AttentionShape):
            return self._attention_seconds(shape, operator.form == "absorbed")
        seconds = cost.vector_flops * self.vector_s
        if cost.flops:
            seconds += cost.flops / self.gpu.peak(operator.dtype)[0]
        return float(max(seconds, cost.bytes / self.gpu.bandwidth_bytes_per_s))

    def _attention_seconds(self, shape: AttentionShape, absorbed: bool) -> float:
        """Return the seconds of scores, softmax and values of all heads.

        Heads that share keys are rows of one product, except with several new tokens. Torch's fused
        kernel then skips blocks of keys that no query of a block attends to.
        """
        shared = shape.heads if absorbed else 1
        if shape.kv_heads:
            shared = shape.heads // shape.kv_heads
        seconds = 0.0
        for group in shape.groups:
            count, new, past = (int(value) for value in group[:3])
            keys: float = new + past
            heads = shared
            if new > 1:
                keys = min(keys, past + (new + KEY_BLOCK) / 2)
                heads = 1
            rows = new * heads
            products = self.products.product_seconds(rows, keys * (shape.key + shape.value))
            softmax = rows * keys * SOFTMAX_FLOPS * self.vector_s
            seconds += count * shape.heads / heads * (products + softmax)
        return seconds


class RateSampler:
    """Samples of the machine's rates, taken between the steps of a generation.

    Products use the matrices of one decoder layer after the other, so each use reads its weights
    from memory.
    """

    def __init__(
        self, decoder: Decoder, machine: Machine, dtype: str, rows: Sequence[int]
    ) -> None:
        """Prepare the samples; `rows` are the numbers of rows of the products."""
        self.machine = machine
        self.rows = tuple(sorted(set(rows)))
        self.layers = []
        for block in decoder.blocks:
            matrices = [w for w in block.parameters() if w.dim() == 2]
            wide = [w for w in matrices if min(w.shape) >= MIN_MATRIX_SIDE]
            self.layers.append(wide or matrices)
        self.turn = 0
        self.x = torch.randn(ACTIVATION_ELEMENTS, device=machine.device).to(DTYPES[dtype])
        parts = [part for layer in decoder.model.kinds.values() for part in layer.parts]
        self.is_gated = any(isinstance(part, Dense) and part.gated for part in parts)
        self.narrow_step = _narrow_step(machine, dtype)
        self.narrow_calls = traffic_of(self.narrow_step).calls
        self.samples: list[list[float]] = []

    def sample(self) -> None:
        """Take one sample of each rate."""
        with torch.no_grad():
            activation = once(self._activate, self.machine)
            vector_s = activation / (ACTIVATION_ELEMENTS * ACTIVATION_FLOPS)
            products, hosts = [], []
            for rows in self.rows:
                products.append(self._product_seconds(rows))
                # after a large product, because real weights also evict code from the caches
                hosts.append(once(self.narrow_step, self.machine) / self.narrow_calls)
        self.samples.append([vector_s, statistics.median(hosts), *products])

    def rates(self, ceilings: Ceilings, gpu: Gpu) -> MachineRates:
        """Return the medians of all samples."""
        columns = zip(*self.samples, strict=True)
        vector_s, host_s, *products = (statistics.median(column) for column in columns)
        times = ProductTimes(self.rows, tuple(products))
        is_cuda = self.machine.cuda
        return MachineRates(times, vector_s, host_s, ceilings.copy_bytes_per_s, gpu, is_cuda)

    def _activate(self) -> Tensor:
        if self.is_gated:
            return F.silu(self.x) * self.x
        return F.gelu(self.x, approximate="tanh")

    def _product_seconds(self, rows: int) -> float:
        """Return the seconds per weight element of products of `rows` rows with the next layer."""
        layer = self.layers[self.turn]
        self.turn = (self.turn + 1) % len(self.layers)
        inputs = [weight.new_ones(rows, weight.shape[1]) for weight in layer]
        seconds = once(lambda: [*map(F.linear, inputs, layer)], self.machine)
        return seconds / sum(weight.numel() for weight in layer)


def _narrow_step(machine: Machine, dtype: str) -> Callable[[], Tensor]:
    """Return a decode step of one layer of width 8, whose time is that of the host."""
    mixer = Grouped(
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=4,
        q_bias=True,
        k_bias=True,
        v_bias=True,
        o_bias=True,
    )
    layer = Layer(parts=(mixer, Dense(intermediate_size=8, bias=True, gated=False)))
    model = Model(
        name="narrow",
        hidden_size=8,
        vocab_size=8,
        layers=1,
        kinds={"full": layer},
        norm="layer",
        position_embeddings=8,
    )
    decoder = Decoder(model).to(machine.device, DTYPES[dtype])
    caches = decoder.caches(1, 8)
    token = torch.zeros(1, 1, dtype=torch.long, device=machine.device)
    return lambda: decoder(token, caches, 4)
