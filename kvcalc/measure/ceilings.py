"""Measure the ceilings of this machine: memory bandwidth, matrix rates, small products, launches.

A time is the median of repeats after a warm-up. On a GPU, events time a CUDA graph if the step can
be captured. On a CPU with several threads the clock is the wall clock; with one thread it is the CPU
time of that thread, which stops while other programs use the core.

A step runs `copies` equal calls on different inputs, so that no call finds its data in the last-level
cache. The time of a call is the time of the step divided by `copies`.

- Bandwidth: the better of a large copy (bytes read plus bytes written) and of reading only (a sum, a
  matrix-vector product), over a tensor much larger than the last-level cache.
- Matrix rate: the best of square products, which double in size until one takes 0.1 s.
- Products with few rows: seconds per weight element, measured at some numbers of rows and
  interpolated linearly. They must read their weights, and libraries reorder the weights first.

`--save-gpu` saves the ceilings as a GPU preset.
"""

import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F

from kvcalc import __version__
from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.library import catalog
from kvcalc.library.writing import make_folder, write_text
from kvcalc.measure.machine import Machine
from kvcalc.measure.torch_cache import DTYPES
from kvcalc.model.spec import Source

MIN_REPEATS, MIN_SLOW_REPEATS, MAX_REPEATS = 5, 3, 100


class Timing(NamedTuple):
    """Seconds of one call: the median, the 10th and the 90th percentile.

    Attributes:
        repeats: Number of repeats.
        graph: Whether a CUDA graph was replayed.
    """

    median: float
    low: float
    high: float
    repeats: int
    graph: bool = False

    @property
    def spread(self) -> float:
        """(90th − 10th percentile) / median."""
        return (self.high - self.low) / self.median


def timed(step: Callable[[], object], machine: Machine, copies: int = 1, seconds: float = 1.0, graphs: bool = True) -> Timing:
    """Return the time of one call in `step`, measured for about `seconds`.

    There are at least five repeats, or three if they take longer than three times `seconds`.
    """
    if machine.cuda:
        return _on_gpu(step, machine, copies, seconds, graphs)
    step()
    found: list[float] = []
    begun = time.perf_counter()
    while not _enough(len(found), time.perf_counter() - begun, seconds):
        start = machine.now()
        step()
        found.append((machine.now() - start) / copies)
    return summary(found)


def once(step: Callable[[], object], machine: Machine) -> float:
    """Return the seconds of one call without a warm-up, including the wait for the GPU."""
    machine.synchronize()
    begun = machine.now()
    step()
    machine.synchronize()
    return machine.now() - begun


def _enough(repeats: int, taken: float, seconds: float) -> bool:
    min_repeats = MIN_REPEATS if taken < 3 * seconds else MIN_SLOW_REPEATS
    return repeats >= MAX_REPEATS or (repeats >= min_repeats and taken >= seconds)


def summary(times: list[float], graph: bool = False) -> Timing:
    """Return the median and the 10th and 90th percentiles of times in seconds."""
    ordered = sorted(times)
    last = len(ordered) - 1
    middle = (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
    return Timing(middle, ordered[round(last * 0.1)], ordered[round(last * 0.9)], len(ordered), graph)


def _on_gpu(step: Callable[[], object], machine: Machine, copies: int, seconds: float, graphs: bool) -> Timing:
    """Return the time between CUDA events, with a CUDA graph of the step if it can be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    machine.synchronize()
    replay, captured = step, False
    if graphs:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            replay, captured = graph.replay, True
        except RuntimeError:
            machine.synchronize()
    replay()
    machine.synchronize()
    found: list[float] = []
    begun = time.perf_counter()
    while not _enough(len(found), time.perf_counter() - begun, seconds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1000 / copies)
    return summary(found, captured)


WIDTH = 1024  # of square weights
WEIGHTS_PER_LAYER = 4
SMALLEST = 16  # side of a matrix that counts as one: convolutions and vectors are none
PAST_CACHE = 4  # size of all rotating weights ÷ last-level cache
REPEATS = 9


class Products(NamedTuple):
    """Seconds per weight element of x [rows, k] · W [k, n], at ascending numbers of rows."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def taken(self, rows: float, elements: float) -> float:
        """Return the seconds of a product whose weights have `elements` elements.

        Between measured numbers of rows the time is linear. Above the largest it grows with the rows. Below
        the smallest it is constant.
        """
        if rows >= self.rows[-1]:
            return self.seconds[-1] * elements * rows / self.rows[-1]
        if rows <= self.rows[0]:
            return self.seconds[0] * elements
        at = next(i for i, measured in enumerate(self.rows) if rows < measured)
        share = (rows - self.rows[at - 1]) / (self.rows[at] - self.rows[at - 1])
        return elements * (self.seconds[at - 1] + share * (self.seconds[at] - self.seconds[at - 1]))


class Weights:
    """Layers of weights [outputs, inputs], used in turn, so that each use reads them from memory."""

    def __init__(self, machine: Machine, layers: Sequence[Sequence[Tensor]]) -> None:
        self.machine, self.turn = machine, 0
        matrices = [[w for w in layer if w.dim() == 2] for layer in layers]
        self.layers = [[w for w in layer if min(w.shape) >= SMALLEST] or layer for layer in matrices]

    def seconds(self, rows: int) -> float:
        """Return the seconds per weight element of products of `rows` rows with the next layer."""
        layer = self.layers[self.turn]
        self.turn = (self.turn + 1) % len(self.layers)
        inputs = {width: layer[0].new_ones(rows, width) for width in {w.shape[1] for w in layer}}
        taken = once(lambda: [F.linear(inputs[w.shape[1]], w) for w in layer], self.machine)
        return taken / sum(w.numel() for w in layer)


def measured_products(machine: Machine, dtype: str, rows: Sequence[int], size: int) -> Products:
    """Return the median times at each number of rows, with at most `size` bytes of square weights."""
    one = torch.randn(WIDTH, WIDTH, device=machine.device).mul_(WIDTH**-0.5).to(DTYPES[dtype])
    room = min(size, PAST_CACHE * machine.cache_bytes, machine.free_bytes() // 4)
    count = max(1, room // (WEIGHTS_PER_LAYER * one.untyped_storage().nbytes()))
    weights = Weights(machine, [[one.clone() for _ in range(WEIGHTS_PER_LAYER)] for _ in range(count)])
    found = [[weights.seconds(number) for number in rows] for _ in range(REPEATS)]
    return Products(tuple(rows), tuple(statistics.median(column) for column in zip(*found, strict=True)))


ENOUGH = 0.1  # seconds of one product
LARGEST = {"cpu": 2048, "cuda": 8192}
FEW_ROWS, FEW_BYTES = (1, 4, 16, 64, 256), 512 << 20


class Ceilings(NamedTuple):
    """Measured ceilings of a machine.

    Attributes:
        copy_bytes_per_s: Bytes read plus bytes written by a copy, per second.
        read_bytes_per_s: Bytes per second if data is only read.
        flops_per_s: FLOP/s of the best square product, by dtype.
        launch_s: Seconds of the smallest operation.
        products: Times of products with few rows, in the first dtype.
    """

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
    """Measure the ceilings; `progress` receives the name of each next step."""
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
    """Return bytes per second of a copy and of a pure read."""
    size = min(max(256 << 20, 8 * machine.cache_bytes), machine.free_bytes() // 4, 4 << 30)
    source = torch.ones(size // 4096 // 4, 4096, device=machine.device)
    target, vector = torch.empty_like(source), torch.ones(4096, device=machine.device)
    moved = source.numel() * 4
    copy = timed(lambda: target.copy_(source), machine, 1, seconds).median
    reads = [timed(step, machine, 1, seconds / 2).median for step in (source.sum, lambda: source @ vector)]
    return 2 * moved / copy, moved / min(reads)


def matrix_rate(machine: Machine, dtype: str, seconds: float = 0.4) -> float:
    """Return the FLOP/s of the best square product."""
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
    """Return this machine as a GPU preset with the measured ceilings.

    On a CPU, vector work has the fp32 rate, because the same units run vectors and products.
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


def preset_path(name: str) -> Path:
    """Return the path for a new preset in the user's first preset folder.

    Raises UserError if the name is invalid or in use.
    """
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,60}", name):
        raise UserError(f"{name!r} is no preset name", hint="Use lower-case letters, digits, . _ and -")
    try:
        taken = catalog.find(name, "gpus")
    except UserError:
        folders = catalog.user_folders()
        if not folders:
            raise UserError("there is no folder for presets of your own", hint="Name one in $KVCALC_PRESETS") from None
        return folders[0] / "gpus" / f"{name}.yaml"
    raise UserError(f"{name!r} is the name of a preset already", str(taken), "Take another name, or remove that file")


def save(gpu: Gpu, path: Path) -> None:
    """Write the preset and create its folder. Raises UserError if writing fails."""
    import yaml

    defaults = {f.name: f.default for f in msgspec.structs.fields(Gpu)}
    data = {key: value for key, value in msgspec.to_builtins(gpu).items() if value not in (defaults[key], {}, [], None)}
    make_folder(path.parent)
    write_text(path, yaml.safe_dump(data, sort_keys=False, allow_unicode=True))
