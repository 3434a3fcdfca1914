"""Find the device to measure on: its name, memory, last-level cache, threads and clock."""

import os
import platform
import re
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from kvcalc.errors import UserError
from kvcalc.library.files import read_text
from kvcalc.records import Record

CACHE_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")
USUAL_CACHE = 32 << 20  # bytes, if the system does not say
USUAL_MEMORY = 8 << 30
PROBE_SECONDS = 0.2  # of work that measures which share of the cores is free
MIN_SHARE = 0.75  # one other process on two cores leaves two thirds


class Machine(NamedTuple):
    """The device to measure on.

    Attributes:
        device: Torch device.
        name: The vendor's name.
        cache_bytes: Size of the last-level cache (the L2 of a GPU).
        threads: CPU threads; 0 on a GPU.
        share: Share of the cores that other programs leave to this process.
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
    def vendor(self) -> str:
        if self.cuda and not torch.version.hip:
            return "NVIDIA"
        return "AMD" if self.cuda or "AMD" in self.name else "CPU"

    @property
    def clock(self) -> str:
        """Clock of the times: events (GPU), cpu (one thread) or wall."""
        return "events" if self.cuda else "cpu" if self.threads == 1 else "wall"

    @property
    def columns(self) -> Record:
        """The columns of a record that name the machine."""
        return {
            "device": self.name,
            "threads": self.threads or None,
            "clock": self.clock,
            "core_share": None if self.cuda else self.share,
        }

    def now(self) -> float:
        """Return seconds of the clock; of the wall clock if times come from events."""
        return time.thread_time() if self.clock == "cpu" else time.perf_counter()

    def free_bytes(self) -> int:
        """Return the memory to use: 90 % of the free memory of the device or system."""
        if self.cuda:
            free = torch.cuda.mem_get_info(self.device)[0]
        else:
            free = _system_memory("MemAvailable", self.memory_bytes)
        return int(free * 0.9)

    def synchronize(self) -> None:
        """Wait until all launched kernels have finished."""
        if self.cuda:
            torch.cuda.synchronize(self.device)


def find_machine(device: str = "auto", threads: int = 0) -> Machine:
    """Return the machine for `--device`. Raises UserError for a missing GPU."""
    if device == "cuda" and not torch.cuda.is_available():
        hint = "Use the CPU, or a CUDA build of torch"
        raise UserError("torch sees no CUDA GPU on this machine", hint=hint)
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
    return Machine(torch.device("cpu"), name, *memory, threads, share=share)


@cache
def core_share(cores: int) -> float:
    """Return the share of all cores that this process gets; 1 if no other program runs.

    It is CPU seconds ÷ (wall seconds · cores) of matrix products on all cores, measured once. If
    the share is well below 1, several threads are slower than one, because each product waits for
    its slowest thread.
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
    """Set the seed of all random weights and inputs."""
    torch.manual_seed(seed)


def torch_version() -> str:
    """Return the version of torch with its build, such as 2.13.0+cpu."""
    return str(torch.__version__)


def load_note(machine: Machine) -> str:
    """Return a warning if other programs are likely to disturb the times, otherwise ''."""
    if machine.cuda or machine.share >= MIN_SHARE:
        return ""
    reason = "one thread is timed by its own CPU time"
    if machine.clock == "wall":
        reason = "the wall clock includes waits"
    return (
        f"other work takes {1 - machine.share:.0%} of this machine's cores: {reason}; "
        "times vary, ratios less so"
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
