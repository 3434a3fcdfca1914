"""The machine's own two ceilings: bytes per second from memory, and products per second by dtype.

Bandwidth: the better of a large copy (read and written bytes both counted) and of reading alone (a sum, a matrix-vector
product), over a tensor many times the last-level cache. Matrix rate: the best of square products that double until one
takes a tenth of a second. Each is the median of its repeats, as the layers' times are. Beside them: the time of an operation
on one element, and what products of few rows reach.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from typing import NamedTuple

import torch

from kvcalc import __version__
from kvcalc.gpu.spec import Gpu
from kvcalc.measure.cache import DTYPES
from kvcalc.measure.device import Machine
from kvcalc.measure.products import Products, measured_products
from kvcalc.measure.timing import timed
from kvcalc.model.spec import Source

ENOUGH = 0.1  # seconds of one product
LARGEST = {"cpu": 2048, "cuda": 8192}
FEW_ROWS, FEW_BYTES = (1, 4, 16, 64, 256), 512 << 20


class Ceilings(NamedTuple):
    """Bytes per second by kind of access, FLOP/s by dtype, seconds of the smallest operation, and products of few rows in the
    first of the dtypes."""

    copy_bytes_per_s: float
    read_bytes_per_s: float
    flops_per_s: dict[str, float]
    launch_s: float
    products: Products

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """The better of copying and reading."""
        return max(self.copy_bytes_per_s, self.read_bytes_per_s)


def measured_ceilings(
    machine: Machine, dtypes: Sequence[str], progress: Callable[[str], None] = lambda _: None, seconds: float = 0.4
) -> Ceilings:
    """Measures them. `progress` is told what comes next."""
    progress("bandwidth")
    copy, read = bandwidth(machine, seconds)
    rates = {}
    for dtype in dtypes:
        progress(f"{dtype} products")
        rates[dtype] = matrix_rate(machine, dtype, seconds)
    progress("products of few rows")
    products = measured_products(machine, dtypes[0], FEW_ROWS, FEW_BYTES)
    one = torch.zeros(1, device=machine.device)

    def many() -> None:
        for _ in range(200):
            one.add_(1)

    return Ceilings(copy, read, rates, timed(many, machine, 200, seconds / 4).median, products)


def bandwidth(machine: Machine, seconds: float = 0.4) -> tuple[float, float]:
    """(bytes per second of a copy, of reading alone)."""
    size = min(max(256 << 20, 8 * machine.cache_bytes), machine.free_bytes() // 4, 4 << 30)
    source = torch.ones(size // 4096 // 4, 4096, device=machine.device)
    target, vector = torch.empty_like(source), torch.ones(4096, device=machine.device)
    moved = source.numel() * 4
    copy = timed(lambda: target.copy_(source), machine, 1, seconds).median
    reads = [timed(step, machine, 1, seconds / 2).median for step in (source.sum, lambda: source @ vector)]
    return 2 * moved / copy, moved / min(reads)


def matrix_rate(machine: Machine, dtype: str, seconds: float = 0.4) -> float:
    """FLOP/s of a square product."""
    best = 0.0
    for size in _sizes(LARGEST[machine.device.type]):
        a = torch.randn(size, size, device=machine.device).to(DTYPES[dtype])
        begun = time.perf_counter()
        a @ a
        machine.synchronize()
        taken = time.perf_counter() - begun
        if taken > 4 * seconds:  # emulated on this machine: one product says enough
            return max(best, 2 * size**3 / taken)
        best = max(best, 2 * size**3 / timed(lambda a=a: a @ a, machine, 1, seconds / 2).median)  # type: ignore[misc]
        if taken > ENOUGH:
            break
    return best


def _sizes(largest: int) -> Iterator[int]:
    size = 256
    while size <= largest:
        yield size
        size *= 2


def as_gpu(machine: Machine, ceilings: Ceilings, name: str = "measured") -> Gpu:
    """This machine as a GPU preset whose figures are the measured ceilings.

    On a CPU the same units run vectors and products, so that elementwise work is held against the fp32 rate.
    """
    source = Source(
        document=f"kvcalc {__version__} measure, torch {torch.__version__}, {machine.name}",
        url="",
        read=date.today().isoformat(),
        figures="bandwidth: the better of a large copy and a large read; matrix rates: the best square product",
    )
    vector = {"fp32": ceilings.flops_per_s["fp32"]} if not machine.cuda and "fp32" in ceilings.flops_per_s else {}
    return Gpu(
        name=name,
        vendor=machine.vendor,
        memory_bytes=machine.memory_bytes,
        bandwidth_bytes_per_s=ceilings.bandwidth_bytes_per_s,
        flops_per_s=ceilings.flops_per_s,
        vector_flops_per_s=vector,
        l2_bytes=machine.cache_bytes,
        sms=machine.sms,
        per="card" if machine.cuda else "machine",
        source=(source,),
    )
