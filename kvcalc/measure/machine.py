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

SYSTEM = Path("/sys/devices/system/cpu/cpu0/cache")
USUAL_CACHE = 32 << 20  # where the system does not say
PROBE = 0.2  # seconds of work that tell whether the cores are ours
OURS = 0.75  # the share from which they are: one other process on two cores leaves two thirds


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
        return "NVIDIA" if self.cuda and not torch.version.hip else "AMD" if self.cuda or "AMD" in self.name else "CPU"

    @property
    def clock(self) -> str:
        """Clock of the times: events (GPU), cpu (one thread) or wall."""
        return "events" if self.cuda else "cpu" if self.threads == 1 else "wall"

    def now(self) -> float:
        """Return seconds of the clock; of the wall clock if times come from events."""
        return time.thread_time() if self.clock == "cpu" else time.perf_counter()

    def free_bytes(self) -> int:
        """Return the memory to use: 90 % of the free memory of the device or system."""
        if self.cuda:
            return int(torch.cuda.mem_get_info(self.device)[0] * 0.9)
        return int(_system_memory("MemAvailable", self.memory_bytes) * 0.9)

    def synchronize(self) -> None:
        """Wait until all launched kernels have finished."""
        if self.cuda:
            torch.cuda.synchronize(self.device)


def find_machine(device: str = "auto", threads: int = 0) -> Machine:
    """Return the machine for `--device`. Raises UserError for a missing GPU or an unknown device."""
    if device not in ("auto", "cuda", "cpu"):
        raise UserError(f"unknown device {device!r}", hint="Known: auto, cuda, cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("torch sees no CUDA GPU on this machine", hint="Use the CPU, or a CUDA build of torch")
    if device != "cpu" and torch.cuda.is_available():
        found = torch.cuda.get_device_properties(0)
        return Machine(torch.device("cuda"), found.name, found.total_memory, found.L2_cache_size, 0, found.multi_processor_count)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if threads > cores * 4:
        raise UserError(f"threads {threads} is far more than the {cores} cores there are")
    share = core_share(cores)
    chosen = threads or (cores if share >= OURS else 1)
    torch.set_num_threads(chosen)
    total = _system_memory("MemTotal", 8 << 30)
    return Machine(torch.device("cpu"), _cpu_name(), total, _cache_bytes(), chosen, share=share)


@cache
def core_share(cores: int) -> float:
    """Return the share of all cores that this process gets; 1 if no other program runs.

    It is CPU seconds ÷ (wall seconds · cores) of matrix products on all cores, measured once. If the share
    is well below 1, several threads are slower than one, because each product waits for its slowest thread.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    x = torch.randn(4 * cores, 256, 256)
    torch.bmm(x, x)  # starts the threads
    begun, worked = time.perf_counter(), time.process_time()
    while time.perf_counter() - begun < PROBE:
        torch.bmm(x, x)
    share = (time.process_time() - worked) / (time.perf_counter() - begun) / cores
    torch.set_num_threads(before)
    return min(1.0, share)


def seeded(seed: int) -> None:
    """Set the seed of all random weights and inputs."""
    torch.manual_seed(seed)


def torch_version() -> str:
    """Return the version of torch with its build, such as 2.13.0+cpu."""
    return str(torch.__version__)


def load_note(machine: Machine) -> str:
    """Return a warning if other programs are likely to disturb the times, otherwise ''."""
    if machine.cuda or machine.share >= OURS:
        return ""
    how = "the wall clock includes waits" if machine.clock == "wall" else "one thread is timed by its own CPU time"
    return f"other work takes {1 - machine.share:.0%} of this machine's cores: {how}; times swing, ratios less so"


def _system_memory(key: str, otherwise: int) -> int:
    try:
        text = read_text(Path("/proc/meminfo"), 1 << 20)
    except UserError:
        return otherwise
    match = re.search(rf"{key}:\s+(\d+) kB", text)
    return int(match[1]) * 1024 if match else otherwise


def _cpu_name() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", read_text(Path("/proc/cpuinfo"), 1 << 24))
    except UserError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def _cache_bytes() -> int:
    sizes = []
    for folder in SYSTEM.glob("index*"):
        try:
            match = re.fullmatch(r"(\d+)([KM])", read_text(folder / "size", 64).strip())
        except UserError:
            continue
        if match:
            sizes.append(int(match[1]) << (10 if match[2] == "K" else 20))
    return max(sizes, default=USUAL_CACHE)
