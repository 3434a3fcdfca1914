"""Measure the ceilings of this machine: memory bandwidth, matrix rates, launches.

A time is the median of repeats after a warm-up. On a GPU, events time a CUDA graph if the step can
be captured. On a CPU with several threads the clock is the wall clock; with one thread it is the
CPU time of that thread, which stops while other programs use the core.

- Bandwidth: the higher rate of a large copy (bytes read plus bytes written) and of only reading (a
  sum, a matrix-vector product), over a tensor much larger than the last-level cache.
- Matrix rate: the best of square products, which double in size until one takes 0.1 s.

`--save-gpu` saves the ceilings as a GPU preset.
"""

import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from datetime import date
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from kvcalc import __version__
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.library import presets as catalog
from kvcalc.library.files import make_folder, read_text, write_text
from kvcalc.library.huggingface.notes import to_yaml
from kvcalc.measure.layers.base_layer import DTYPES
from kvcalc.model.model import Source
from kvcalc.records import Record

CACHE_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")
USUAL_CACHE = 32 << 20  # bytes, if the system does not say
USUAL_MEMORY = 8 << 30
MAX_COPIES = 64
PAST_CACHE = 4  # size of all rotating inputs ÷ last-level cache
PROBE_SECONDS = 0.2  # of work that measures which share of the cores is free
MIN_SHARE = 0.75  # one other process on two cores leaves two thirds


class Machine(NamedTuple):
    """The GPU or CPU on which kvcalc measures times.

    Attributes:
        device: Torch device.
        name: The vendor's name of the GPU or CPU.
        memory_bytes: Size of the GPU's memory, or of the system's memory for a CPU.
        cache_bytes: Size of the last-level cache (the L2 of a GPU).
        threads: CPU threads; 0 on a GPU.
        sms: Number of the GPU's streaming multiprocessors, or of the CPU's threads; None if
            unknown.
        share: Share of the CPU time of all cores, from 0 to 1, that this process can get.
    """

    device: torch.device
    name: str
    memory_bytes: int
    cache_bytes: int
    threads: int
    sms: int | None = None
    share: float = 1.0

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def clock(self) -> str:
        """Return the name of the clock that measures times: `events`, `cpu` or `wall`.

        `events` is CUDA events on a GPU. `cpu` is the CPU time of one thread, which other programs
        do not affect. `wall` is the wall clock, for several CPU threads.
        """
        return "events" if self.cuda else "cpu" if self.threads == 1 else "wall"

    @property
    def columns(self) -> Record:
        """Return the columns that describe the machine in a record of results.

        They are `device` (name), `threads` (None on a GPU), `clock` and `core_share`. `core_share`
        is the share of the CPU time of all cores, from 0 to 1, that this process can get. On a GPU
        it is None.
        """
        return {
            "device": self.name,
            "threads": self.threads or None,
            "clock": self.clock,
            "core_share": None if self.cuda else self.share,
        }

    def now(self) -> float:
        """Return the current time in seconds: CPU time if `clock` is `cpu`, otherwise wall time."""
        return time.thread_time() if self.clock == "cpu" else time.perf_counter()

    def free_bytes(self) -> int:
        """Return the bytes that a measurement may use: 90% of the device's free memory."""
        if self.cuda:
            return int(torch.cuda.mem_get_info(self.device)[0] * 0.9)
        return int(_system_memory("MemAvailable", self.memory_bytes) * 0.9)

    def copies(self, read_bytes: int, needed_bytes: int) -> int:
        """Return how many copies of its data a call needs so that it never reads from a cache.

        The calls use the copies in turn. All copies together are four times as large as the
        last-level cache, so each call reads from memory. They take at most half of the free memory,
        and there are at most 64.

        Args:
            read_bytes: Bytes of data that one call reads.
            needed_bytes: Bytes of memory that one copy takes.
        """
        copies = -(-PAST_CACHE * self.cache_bytes // max(1, read_bytes))
        return max(1, min(copies, MAX_COPIES, self.free_bytes() // (2 * needed_bytes)))

    def synchronize(self) -> None:
        """Wait until all launched GPU kernels have finished; return at once on a CPU."""
        if self.cuda:
            torch.cuda.synchronize(self.device)


def find_machine(device: str, threads: int = 0) -> Machine:
    """Return the GPU or CPU on which kvcalc measures, with its name and sizes.

    Args:
        device: `cpu`, `cuda`, or `auto` for a GPU if there is one and otherwise the CPU.
        threads: Number of CPU threads of torch; 0 for all cores, or for one thread if other
            programs use the cores.

    Raises:
        UserError: There is no such GPU, or `threads` is more than four times the number of cores.
    """
    if device == "cuda" and not torch.cuda.is_available():
        hint = "Use the CPU, or a CUDA build of torch"
        raise UserError("torch sees no CUDA GPU on this machine", hint)
    if device != "cpu" and torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        memory = gpu.total_memory, gpu.L2_cache_size
        return Machine(torch.device("cuda"), gpu.name, *memory, 0, gpu.multi_processor_count)
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    if threads > cores * 4:
        raise UserError(f"threads {threads} is far more than the {cores} cores there are")
    share = core_share(cores)
    threads = threads or (cores if share >= MIN_SHARE else 1)
    torch.set_num_threads(threads)
    name = _first_match(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo"))
    memory = _system_memory("MemTotal", USUAL_MEMORY), _cache_bytes()
    name = name.strip() or platform.processor() or platform.machine()
    return Machine(torch.device("cpu"), name, *memory, threads, threads, share)


@cache
def core_share(cores: int) -> float:
    """Return the share of all CPU cores, from 0 to 1, that this process gets; 1 if it runs alone.

    It is measured once, with matrix products on all cores: CPU seconds ÷ (wall seconds · cores). If
    it is well below 1, several threads are slower than one, because each product waits for its
    slowest thread.

    Args:
        cores: Number of cores.
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(cores)
    x = torch.randn(4 * cores, 256, 256)
    torch.bmm(x, x)  # starts the threads
    begun, worked = time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < PROBE_SECONDS:
        torch.bmm(x, x)
    share = (time.process_time() - worked) / (time.perf_counter() - begun) / cores
    torch.set_num_threads(threads_before)
    return min(1.0, share)


def seed_random(seed: int) -> None:
    """Set the seed of torch's random weights and inputs, so that runs are repeatable.

    Args:
        seed: Any whole number.
    """
    torch.manual_seed(seed)


def load_note(machine: Machine) -> str:
    """Return a warning for the user if other programs use the CPU so much that times vary.

    The result is '' if they do not, or on a GPU.

    Args:
        machine: The machine to measure on.
    """
    if machine.cuda or machine.share >= MIN_SHARE:
        return ""
    return (
        f"other work takes {1 - machine.share:.0%} of this machine's cores; times by the "
        f"{machine.clock} clock vary more than ratios"
    )


def _first_match(pattern: str, path: Path) -> str:
    """Return the first group of the pattern in a system file, or ''."""
    try:
        match = re.search(pattern, read_text(path, 1 << 24))
    except UserError:
        return ""
    return match[1] if match else ""


def _system_memory(key: str, otherwise: int) -> int:
    kib = _first_match(rf"{key}:\s+(\d+) kB", Path("/proc/meminfo"))
    return int(kib) * 1024 if kib else otherwise


def _cache_bytes() -> int:
    kib = [_first_match(r"^(\d+)K", folder / "size") for folder in CACHE_FOLDER.glob("index*")]
    return max((int(size) << 10 for size in kib if size), default=USUAL_CACHE)


MIN_REPEATS, MIN_SLOW_REPEATS, MAX_REPEATS = 5, 3, 100
SLOW_PRODUCT = 0.1  # seconds of one product, above which no larger one is measured
SMALLEST_PRODUCT, LARGEST_PRODUCT = 256, {"cpu": 2048, "cuda": 8192}
Step = Callable[[], object]


class Timing(NamedTuple):
    """Measured time of one call.

    Attributes:
        median: Median seconds over all repeats.
        spread: (90th − 10th percentile) / median of the repeats; 0.05 is 5%.
        graph: Whether a CUDA graph was replayed, so that the time has no launches by the host.
    """

    median: float
    spread: float
    graph: bool


def time_calls(calls: Sequence[Step], machine: Machine, seconds: float) -> Timing:
    """Return the time of one call, measured over several repeats.

    Each repeat runs all calls one after the other. The result is the median time of a repeat ÷ the
    number of calls. If the calls use different inputs, no call finds its data in the last-level
    cache. On a GPU the calls are captured in a CUDA graph if possible. There are at least five
    repeats, or three if they take longer than three times `seconds`.

    Args:
        calls: Functions that do equal work.
        machine: The machine to measure on.
        seconds: Approximate time to spend on all repeats.
    """

    def step() -> None:
        for call in calls:
            call()

    replay, is_captured = _capture_graph(step, machine) if machine.cuda else (step, False)
    replay()
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < MAX_REPEATS:
        elapsed_s = time.perf_counter() - begun
        min_repeats = MIN_REPEATS if elapsed_s < 3 * seconds else MIN_SLOW_REPEATS
        if len(times) >= min_repeats and elapsed_s >= seconds:
            break
        times.append(_device_seconds(replay) if machine.cuda else time_once(replay, machine))
    times.sort()
    low, high = (times[round((len(times) - 1) * share)] for share in (0.1, 0.9))
    middle = median(times)
    return Timing(middle / len(calls), (high - low) / middle, is_captured)


def time_once(step: Step, machine: Machine) -> float:
    """Return the seconds of one call without a warm-up, including the wait for the GPU.

    Args:
        step: The call.
        machine: The machine to measure on.
    """
    machine.synchronize()
    begun = machine.now()
    step()
    machine.synchronize()
    return machine.now() - begun


def _device_seconds(step: Step) -> float:
    """Return the seconds between CUDA events before and after `step`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def _capture_graph(step: Step, machine: Machine) -> tuple[Step, bool]:
    """Return a replay of the step's CUDA graph and True, or the step and False."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    machine.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    except RuntimeError:
        machine.synchronize()
        return step, False
    return graph.replay, True


class Ceilings(NamedTuple):
    """The highest rates that simple operations reach on a machine, as the limits of its roofline.

    Attributes:
        copy_bytes_per_s: Bytes read plus bytes written by a copy, per second.
        read_bytes_per_s: Bytes per second if data is only read.
        flops_per_s: Highest FLOP/s of a square matrix product, by dtype.
        launch_s: Seconds of an operation on one element, which are mostly its launch.
    """

    copy_bytes_per_s: float
    read_bytes_per_s: float
    flops_per_s: dict[str, float]
    launch_s: float

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """Return the memory bandwidth in bytes per second: the higher of copy and read rate."""
        return max(self.copy_bytes_per_s, self.read_bytes_per_s)


def measure_ceilings(
    machine: Machine, dtypes: Sequence[str], progress: Callable[[str], None], seconds: float
) -> Ceilings:
    """Measure the machine's memory bandwidth, matrix FLOP/s and launch time, and return them.

    Args:
        machine: The machine to measure on.
        dtypes: Dtypes whose matrix FLOP/s are measured, such as `bf16`.
        progress: Receives the name of each measurement before it starts.
        seconds: Approximate time to spend on each measurement.
    """
    progress("bandwidth")
    copy, read = bandwidth(machine, seconds)
    rates = {}
    for dtype in dtypes:
        progress(f"{dtype} products")
        rates[dtype] = matrix_rate(machine, dtype, seconds)
    element = torch.zeros(1, device=machine.device)
    launch = time_calls([lambda: element.add_(1)] * 200, machine, seconds / 4)
    return Ceilings(copy, read, rates, launch.median)


def bandwidth(machine: Machine, seconds: float) -> tuple[float, float]:
    """Return the measured memory bandwidth in bytes per second: (of a copy, of a pure read).

    The bytes of a copy are counted twice, as read and as written.

    Args:
        machine: The machine to measure on.
        seconds: Approximate time to spend on each of the two.
    """
    size = min(max(256 << 20, 8 * machine.cache_bytes), machine.free_bytes() // 4, 4 << 30)
    source = torch.ones(size // 4096 // 4, 4096, device=machine.device)
    target, vector = torch.empty_like(source), torch.ones(4096, device=machine.device)
    source_bytes = source.numel() * 4
    copy = time_calls([lambda: target.copy_(source)], machine, seconds).median
    reads = (source.sum, lambda: source @ vector)
    read = min(time_calls([step], machine, seconds / 2).median for step in reads)
    return 2 * source_bytes / copy, source_bytes / read


def matrix_rate(machine: Machine, dtype: str, seconds: float) -> float:
    """Return the highest measured FLOP/s of a square matrix product, over several sizes.

    Args:
        machine: The machine to measure on.
        dtype: Data type of the product: fp64, fp32, bf16 or fp16.
        seconds: Approximate time to spend on each size.
    """
    best = 0.0
    size = SMALLEST_PRODUCT
    elapsed_s = 0.0
    while size <= LARGEST_PRODUCT[machine.device.type] and elapsed_s <= SLOW_PRODUCT:
        a = torch.randn(size, size, device=machine.device).to(DTYPES[dtype])
        flops = 2 * size**3
        square = partial(torch.matmul, a, a)
        elapsed_s = time_once(square, machine)
        if elapsed_s > 4 * seconds:  # emulated on this machine: one product says enough
            return max(best, flops / elapsed_s)
        product = time_calls([square], machine, seconds / 2)
        best = max(best, flops / product.median)
        size *= 2
    return best


def as_gpu(machine: Machine, ceilings: Ceilings, name: str = "measured") -> Gpu:
    """Return this machine as a GPU preset, with its measured bandwidth and FLOP/s.

    A GPU preset has the same form as the presets of known GPUs, so predictions can be made for the
    machine. On a CPU, elementwise work has the fp32 rate, because the same units run vectors and
    matrix products.

    Args:
        machine: The measured machine.
        ceilings: The measured rates of the machine.
        name: Name of the preset.
    """
    source = Source(
        document=f"kvcalc {__version__} measure, torch {torch.__version__}, {machine.name}",
        url="",
        read=date.today().isoformat(),
        figures="bandwidth: the better of a large copy and a large read; "
        "matrix rates: the best square product",
    )
    rates = ceilings.flops_per_s
    return Gpu(
        name=name,
        vendor=machine.name.partition(" ")[0],
        memory_bytes=machine.memory_bytes,
        bandwidth_bytes_per_s=ceilings.bandwidth_bytes_per_s,
        flops_per_s=rates,
        vector_flops_per_s={} if machine.cuda else {k: rates[k] for k in rates if k == "fp32"},
        l2_bytes=machine.cache_bytes,
        sms=machine.sms,
        per="card" if machine.cuda else "machine",
        source=(source,),
    )


def preset_path(name: str) -> Path:
    """Return the path of the file to which a new GPU preset is saved.

    Args:
        name: Name of the new preset.

    Raises:
        UserError: The name is invalid, or a preset with this name exists.
    """
    path = catalog.new_path("gpus", name)
    try:
        existing = catalog.find(name, "gpus")
    except UserError:
        return path
    hint = "Use another name, or remove that file"
    raise UserError(f"a preset named {name!r} exists already", hint, str(existing))


def save(gpu: Gpu, path: Path) -> None:
    """Write a GPU preset to a YAML file, and create its folder.

    Args:
        gpu: The preset.
        path: Path of the file.

    Raises:
        UserError: The file cannot be written.
    """
    make_folder(path.parent)
    write_text(path, to_yaml(gpu))
