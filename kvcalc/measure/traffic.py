"""What plain torch really does in a step: operations launched, bytes through memory, products, and the least time of that.

The prediction counts one fused pass. Torch without fused kernels writes scores, masks and gathered rows out and reads them
back; this counts each operation's inputs and outputs, so the report can say how much of a difference that is.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.flop_counter import flop_registry

from kvcalc.measure.ceilings import Ceilings

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")
_GATHERS = ("index", "index_select", "gather", "embedding")
_MADE = ("zeros_like", "ones_like", "new_zeros", "new_ones")
_ACTIVATIONS = ("exp", "silu", "sigmoid", "softplus")
_SCATTERS = ("index_put_", "_index_put_impl_", "index_copy_", "scatter_")


class Traffic(NamedTuple):
    """Of one step: operations, bytes read and written by them one by one, FLOPs, and Σ max(bytes/bandwidth, FLOPs/peak).

    reached_s: the same where products of few rows take what was measured for them.
    """

    launches: int
    bytes: int
    flops: int
    seconds: float
    reached_s: float


class Plain(NamedTuple):
    """What a step runs beside products with weights, operation by operation: bytes through elementwise operations, elements
    through activations, and products of activations as (rows, elements of the other factor).

    A triangular system counts as the product that its inverse would be.
    """

    moved_bytes: int
    activations: int
    products: tuple[tuple[int, int], ...]


class _Calls(TorchDispatchMode):
    """Counts every operation, views among them."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def calls(step: Any) -> int:
    """Runs `step` once: how many of torch's operations it calls, views among them."""
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
    """Runs `step` once and counts it. Tensors of shapes alone, on torch's device `meta`, count as others do."""
    with torch.no_grad(), _Plain() as counter:
        step()
    return Plain(counter.moved, counter.activations, tuple(counter.products))


def traffic_of(step: Any, ceilings: Ceilings, dtype: str) -> Traffic:
    """Runs `step` once and counts it."""
    with torch.no_grad(), _Counter(ceilings, ceilings.flops_per_s[dtype]) as counter:
        step()
    return Traffic(counter.launches, counter.bytes, counter.flops, counter.seconds, counter.reached_s)


def _aliases(read: list[Tensor], wrote: list[Tensor]) -> bool:
    """Whether the outputs are views of the inputs."""
    held = {t.untyped_storage()._cdata for t in read}
    return all(t.untyped_storage()._cdata in held for t in wrote)


def _product(read: list[Tensor]) -> tuple[int, int]:
    """(rows, elements of the larger factor) of a product: the last two of its inputs, [… m, k] and [… k, n]."""
    a, b = read[-2:]
    rows, columns = a.shape[-2], b.shape[-1]
    return min(rows, columns), a.numel() if columns < rows else b.numel()


def _moved(name: str, read: list[Tensor], wrote: list[Tensor]) -> int:
    results = sum(_size(t) for t in wrote)
    if name in _GATHERS:  # reads what it writes, and not the whole source
        return 2 * results
    if name in _SCATTERS:  # reads what it writes, which comes last
        return 2 * _size(read[-1])
    if name in _MADE:
        return results
    if name in ("copy_", "fill_", "zero_"):
        return results + sum(_size(t) for t in read[1:])
    return results + sum(_size(t) for t in read)


def _size(tensor: Tensor) -> int:
    """Bytes of a tensor; of one that is expanded, those that it holds."""
    held = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return min(held * tensor.element_size(), tensor.untyped_storage().nbytes())
