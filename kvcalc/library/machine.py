"""The GPUs of this machine, their memory and the processes that use it, from the tools of the
drivers.

The tools are nvidia-smi, amd-smi, and sysctl on macOS. Their units MB and MiB are both
2^20 bytes.
"""

import re
import subprocess
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from kvcalc.errors import UserError
from kvcalc.library.presets import lookup

TIMEOUT_S = 30
UNIT_BYTES = {"B": 1, "KB": 1 << 10, "GB": 1 << 30}


class MachineGpu(NamedTuple):
    """One GPU of this machine, as nvidia-smi or a similar tool lists it.

    Attributes:
        number: Index of the GPU in the tool's list, from 0 on.
        name: The driver's name, such as `NVIDIA H100 80GB HBM3`.
        memory_bytes: Total memory; 0 if unknown.
        used_bytes: Memory in use; 0 if unknown.
        processes: Name of a process → bytes of GPU memory that it uses.
    """

    number: int
    name: str
    memory_bytes: int
    used_bytes: int = 0
    processes: Mapping[str, int] = {}


def read_machine() -> list[MachineGpu]:
    """Return the GPUs of this machine, as nvidia-smi or a similar tool lists them.

    Raises:
        UserError: No tool of a GPU driver lists a GPU.
    """
    for read_tool in (_read_nvidia, _read_amd, _read_apple):
        if gpus := read_tool():
            return gpus
    raise UserError(
        "no GPU was found on this machine: nvidia-smi and amd-smi list none",
        "Name one, as in --gpu h100",
    )


def _output(*words: str) -> str:
    """Return the output of a program; "" if it is missing or fails."""
    try:
        return subprocess.run(
            words, capture_output=True, check=True, errors="replace", timeout=TIMEOUT_S
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _json(*words: str) -> Any:
    """Return the JSON in a program's output, after any warnings; {} without JSON."""
    match = re.search(r"^\s*[\[{].*", _output(*words), re.MULTILINE | re.DOTALL)
    try:
        return msgspec.json.decode(match[0]) if match else {}
    except msgspec.DecodeError:
        return {}


def _whole(value: Any) -> int:
    """Return the whole number at the beginning of a value; 0 if there is none, as in `N/A`."""
    match = re.match(r"\s*(\d+)", str(value))
    return int(match[1]) if match else 0


def _read_nvidia() -> list[MachineGpu]:
    """Return the GPUs that nvidia-smi lists."""

    def rows(query: str) -> list[list[str]]:
        text = _output("nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits")
        return [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]

    gpus = [row for row in rows("gpu=uuid,name,memory.total,memory.used") if len(row) == 4]
    processes: dict[str, Counter[str]] = {uuid: Counter() for uuid, *_ in gpus}
    for uuid, *names, size in rows("compute-apps=gpu_uuid,process_name,used_memory"):
        if uuid in processes:
            processes[uuid][",".join(names)] += _whole(size) << 20
    return [
        MachineGpu(index, name, _whole(total) << 20, _whole(used) << 20, processes[uuid])
        for index, (uuid, name, total, used) in enumerate(gpus)
    ]


def _read_amd() -> list[MachineGpu]:
    """Return the GPUs that amd-smi lists."""

    def rows(*words: str) -> dict[int, Any]:
        report = _json("amd-smi", *words, "--json")
        listed = report.get("gpu_data") if isinstance(report, dict) else report
        return {_whole(lookup(row, ("gpu",))): row for row in listed or ()}

    def size(row: Any, *path: str) -> int:
        value, unit = (lookup(row, (*path, key)) for key in ("value", "unit"))
        return _whole(value) * UNIT_BYTES.get(unit, 1 << 20)

    static, processes = rows("static", "--asic"), rows("process")
    gpus = []
    for index, row in rows("metric", "--mem-usage").items():
        sizes: Counter[str] = Counter()
        for item in lookup(processes.get(index), ("process_list",)) or ():
            name = lookup(item, ("process_info", "name"))
            if name:
                sizes[name] += size(item, "process_info", "memory_usage", "vram_mem")
        name = lookup(static.get(index), ("asic", "market_name")) or ""
        memory, used = (size(row, "mem_usage", f"{kind}_vram") for kind in ("total", "used"))
        gpus.append(MachineGpu(index, name, memory, used, sizes))
    return gpus


def _read_apple() -> list[MachineGpu]:
    """Return the GPU of a Mac, whose memory is the machine's."""
    lines = _output("sysctl", "-n", "hw.memsize", "machdep.cpu.brand_string").splitlines()
    return [MachineGpu(0, lines[1], _whole(lines[0]))] if len(lines) == 2 else []
