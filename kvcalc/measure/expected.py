"""Predict the time of a pass on this machine from measured rates.

Each operator of `forward` is timed at its measured rate, one after the other:

- A matrix product takes the time that was measured for its number of rows.
- Attention is two products and a softmax. All other operators take their FLOPs or their bytes.
- The host needs a fixed time for each torch operation. A CPU runs host and kernels in turn. A GPU
  runs its kernels while the host launches the next ones.

The rates are measured before each layer, and between the steps of a generation, so other load
affects both equally.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from kvcalc.gpu.gpu import Gpu, roofline, total_bound, total_seconds
from kvcalc.layers.cost import SOFTMAX_FLOPS, AttentionShape, GemmShape, Operator
from kvcalc.layers.passes import ACTIVATION_FLOPS
from kvcalc.measure.ceilings import Machine, time_once
from kvcalc.measure.layers.base_layer import DTYPES, join_heads, split_heads
from kvcalc.model.forward_pass import total

ACTIVATION_ELEMENTS = 1 << 18
KEYS_SHAPE = (16, 2048, 128)  # heads, tokens and width of a sample of keys
MIN_KEY_COPIES = 2
KEY_BLOCK = 512  # keys per block of torch's fused attention on a CPU


class Bound(NamedTuple):
    """Minimum time of several operators by the measured roofline of the machine.

    Attributes:
        seconds: Sum of the operators' minimum times, in seconds.
        limit: `memory` or `compute`, whichever limits operators with the larger part of this time.
        bytes: Bytes that all operators together read and write.
        flops: Matrix FLOPs of all operators together.
    """

    seconds: float
    limit: str
    bytes: int
    flops: int


def bound_of(operators: Sequence[Operator], gpu: Gpu) -> Bound:
    """Return the minimum time of operators that run one after the other, by the roofline.

    Args:
        operators: The operators, such as those of one forward pass.
        gpu: This machine as a GPU preset, with its measured bandwidth and FLOP/s.
    """
    points = roofline(operators, gpu)
    cost = total(operators)
    return Bound(total_seconds(points), total_bound(points), int(cost.bytes), int(cost.flops))


class OperationCount(TorchDispatchMode):
    """Context manager that counts the torch operations that run inside it, including views.

    The host needs a fixed time for each operation, so the count gives the host's time.

    Attributes:
        calls: Number of operations so far.
    """

    calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def count_operations(step: Callable[[], object]) -> int:
    """Run a function once, and return the number of torch operations that it runs, including views.

    The count gives the time that the host needs to launch them.

    Args:
        step: Function without arguments, such as one decode step.
    """
    with torch.no_grad(), OperationCount() as count:
        step()
    return count.calls


class MachineRates(NamedTuple):
    """Times of basic operations on this machine, from which a forward pass's time is predicted.

    They are measured together with the passes, so that other load affects both equally.

    Attributes:
        rows: Ascending numbers of rows of the timed matrix products x [rows, k] · W [k, n].
        product_s: Seconds of a product per element of W, for each of `rows`.
        attention_s: Seconds per element of keys and values in attention of one new token, by the
            number of query heads per KV head.
        vector_s: Seconds per vector FLOP of an activation function.
        host_s: Seconds that the host needs per torch operation, to launch it.
        gpu: This machine as a GPU preset, with its measured bandwidth and FLOP/s.
        is_cuda: Whether the host launches kernels ahead of the device.
    """

    rows: tuple[int, ...]
    product_s: tuple[float, ...]
    attention_s: dict[int, float]
    vector_s: float
    host_s: float
    gpu: Gpu
    is_cuda: bool

    def product_seconds(self, rows: float, elements: float) -> float:
        """Return the predicted seconds of one matrix product x · W.

        They are interpolated between the measured numbers of rows. Above the largest number they
        grow in proportion to the rows. Below the smallest they are constant.

        Args:
            rows: Number of rows of x.
            elements: Number of elements of W.
        """
        per_element = float(np.interp(rows, self.rows, self.product_s))
        return per_element * elements * max(1.0, rows / self.rows[-1])

    def pass_seconds(self, operators: Sequence[Operator], calls: int) -> float:
        """Return the predicted seconds of a forward pass through the torch layers of this package.

        On a CPU, the times of the host and of the kernels add up. On a GPU the longer of the two
        counts, because the host launches kernels ahead.

        Args:
            operators: Operators of the pass.
            calls: Number of torch operations of the pass that the host launches; 0 if a CUDA graph
                is replayed.
        """
        work = sum(op.count * self._operator_seconds(op) for op in operators)
        host = calls * self.host_s
        return max(work, host) if self.is_cuda else work + host

    def _operator_seconds(self, operator: Operator) -> float:
        shape, cost = operator.shape, operator.cost
        if isinstance(shape, GemmShape):
            return self.product_seconds(float(shape.m), float(shape.n * shape.k))
        if isinstance(shape, AttentionShape):
            return self._attention_seconds(shape, operator.form == "absorbed")
        seconds = cost.vector_flops * self.vector_s
        if cost.flops:
            seconds += cost.flops / self.gpu.peak(operator.dtype)[0]
        return float(max(seconds, cost.bytes / self.gpu.bandwidth_bytes_per_s))

    def _attention_seconds(self, shape: AttentionShape, absorbed: bool) -> float:
        """Return the seconds of scores, softmax and values of all heads.

        For one new token, heads that share keys are rows of one product. For several new tokens,
        torch's fused kernel skips blocks of keys that no query of a block attends to.
        """
        shared = heads_per_key(shape, absorbed)
        seconds = 0.0
        for group in shape.groups:
            count, new, past, pairs = (int(value) for value in group)
            keys: float = new + past
            heads = shared
            width = shape.key + shape.value
            if new > 1:
                keys = min(keys, past + (new + KEY_BLOCK) / 2)
                heads = 1
                products = self.product_seconds(new, keys * width)
            else:
                keys = pairs / count  # within the window and the top-k
                products = keys * width * self.attention_s[heads]
            softmax = new * heads * keys * SOFTMAX_FLOPS * self.vector_s
            seconds += count * shape.heads / heads * (products + softmax)
        return seconds


def heads_per_key(shape: AttentionShape, absorbed: bool) -> int:
    """Return the number of query heads that read one cached key: 4 for 32 query and 8 KV heads.

    Args:
        shape: Shape of the attention.
        absorbed: Whether latent attention (MLA) runs in the absorbed form, in which all heads read
            one latent. In the expanded form each head has its own key.
    """
    if shape.kv_heads:
        return shape.heads // shape.kv_heads
    return shape.heads if absorbed else 1


def all_heads_per_key(operators: Iterable[Operator]) -> set[int]:
    """Return the distinct numbers of query heads that read one cached key, over all operators.

    `RateSampler` times attention for each of these numbers.

    Args:
        operators: Operators of one or several passes. Only attention operators count.
    """
    return {
        heads_per_key(operator.shape, operator.form == "absorbed")
        for operator in operators
        if isinstance(operator.shape, AttentionShape)
    }


class RateSampler:
    """Times basic operations on this machine, between the steps that are measured.

    A sample has one time for each operation. The medians over all samples predict the time of the
    steps. Matrix products x [rows, k] · W use the matrices of one layer after the other, so each
    product reads its weights from memory.

    Attributes:
        machine: The machine to measure on.
        rows: Numbers of rows of x for which products are timed, ascending.
        layers: Weight matrices W of each layer.
        heads: Numbers of query heads per key for which attention is timed.
        samples: One list of times for each sample: seconds per vector FLOP, host seconds per torch
            operation, seconds per element of W for each of `rows`, and seconds per element of keys
            and values for each of `heads`.
    """

    def __init__(
        self,
        layers: Iterable[nn.Module],
        machine: Machine,
        dtype: str,
        rows: Iterable[int],
        heads: Iterable[int],
    ) -> None:
        """Prepare the tensors that are timed in each sample.

        Args:
            layers: Torch layers whose weight matrices are multiplied.
            machine: The machine to measure on.
            dtype: Data type of the products: fp64, fp32, bf16 or fp16.
            rows: Numbers of rows of the input x for which products are timed.
            heads: Numbers of query heads per key for which attention of one token is timed.
        """
        self.machine = machine
        self.rows = tuple(sorted(rows))
        self.layers = [[w for w in block.parameters() if w.dim() == 2] for block in layers]
        self.turn = 0
        self.x = torch.randn(ACTIVATION_ELEMENTS, device=machine.device).to(DTYPES[dtype])
        self.narrow = torch.ones(1, 8, 8, device=machine.device).to(DTYPES[dtype])
        self.narrow_calls = count_operations(self._narrow_step)
        self.heads = tuple(heads)
        keys = torch.ones(KEYS_SHAPE, device=machine.device).to(DTYPES[dtype])
        copies = MIN_KEY_COPIES + machine.cache_bytes // keys.nbytes
        self.key_copies = cycle(keys.repeat(copies, 1, 1, 1))
        self.samples: list[list[float]] = []

    def sample(self) -> None:
        """Time each basic operation once, and append the times in seconds to `samples`.

        The operations are an activation function, small operations that show the host's time,
        matrix products, and attention of one new token.
        """
        with torch.no_grad():
            activation = time_once(lambda: F.gelu(self.x, approximate="tanh"), self.machine)
            vector_s = activation / (ACTIVATION_ELEMENTS * ACTIVATION_FLOPS)
            products, hosts = [], []
            for rows in self.rows:
                products.append(self._product_seconds(rows))
                # after a large product, because real weights also evict code from the caches
                hosts.append(time_once(self._narrow_step, self.machine) / self.narrow_calls)
            products += [self._attention_seconds(heads) for heads in self.heads]
        self.samples.append([vector_s, statistics.median(hosts), *products])

    def rates(self, gpu: Gpu) -> MachineRates:
        """Return the median of each time over all samples, for the prediction of step times.

        Args:
            gpu: This machine as a GPU preset, with its measured bandwidth and FLOP/s.
        """
        vector_s, host_s, *products = (
            statistics.median(column) for column in zip(*self.samples)
        )
        attention_s = dict(zip(self.heads, products[len(self.rows) :]))
        product_s = tuple(products[: len(self.rows)])
        is_cuda = self.machine.cuda
        return MachineRates(self.rows, product_s, attention_s, vector_s, host_s, gpu, is_cuda)

    def _narrow_step(self) -> None:
        """Run two layers of width 8, whose time is only host time. The first of them runs code that
        is not in the CPU's cache."""
        x = self.narrow
        for _ in range(2):
            heads = split_heads(F.linear(F.layer_norm(x, (8,)), x[0]), 2)
            mixed = join_heads(F.scaled_dot_product_attention(heads, heads, heads))
            x = x + F.linear(F.gelu(F.linear(mixed, x[0])), x[0])

    def _product_seconds(self, rows: int) -> float:
        """Return the seconds per weight element of products of `rows` rows with the next layer."""
        layer = self.layers[self.turn]
        self.turn = (self.turn + 1) % len(self.layers)
        inputs = [weight.new_ones(rows, weight.shape[1]) for weight in layer]
        seconds = time_once(lambda: [*map(F.linear, inputs, layer)], self.machine)
        return seconds / sum(weight.numel() for weight in layer)

    def _attention_seconds(self, heads: int) -> float:
        """Return the seconds per element of keys and values that `heads` queries attend to."""
        keys = next(self.key_copies)
        values = next(self.key_copies)
        queries = keys.new_ones(len(keys), heads, keys.shape[2])
        shares = keys.new_ones(len(keys), heads, keys.shape[1])
        seconds = time_once(lambda: (keys @ queries.mT, shares @ values), self.machine)
        return seconds / (keys.numel() + values.numel())
