"""The GPUs of this machine and their memory, from the tools of the drivers.

The tools are nvidia-smi, amd-smi, and sysctl on macOS. Their units MB and MiB are both 2^20 bytes.
"""

import re
import subprocess
from typing import Any, NamedTuple

import msgspec

from kvcalc.errors import UserError
from kvcalc.library.presets import lookup

TIMEOUT_S = 30
UNIT_BYTES = {"B": 1, "KB": 1 << 10, "GB": 1 << 30}


class MachineGpu(NamedTuple):
    """One GPU of this machine.

    Attributes:
        number: Its place in the tool's list.
        name: The driver's name.
        memory_bytes, used_bytes: Total memory, and memory in use; 0 if unknown.
    """

    number: int
    name: str
    memory_bytes: int
    used_bytes: int = 0


def read_machine() -> list[MachineGpu]:
    """Return the GPUs of this machine. Raises UserError if no tool lists one."""
    for read_tool in (_read_nvidia, _read_amd, _read_apple):
        if gpus := read_tool():
            return gpus
    raise UserError(
        "no GPU is known of this machine: nvidia-smi and amd-smi list none",
        "Name it, as in --gpu h100",
    )


def _output(*words: str) -> str:
    """Return the output of a program; "" if it is missing or fails."""
    try:
        done = subprocess.run(
            words, capture_output=True, check=True, errors="replace", timeout=TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def _json(*words: str) -> Any:
    """Return the JSON in a program's output, which warnings may precede; {} without JSON."""
    match = re.search(r"^\s*[\[{].*", _output(*words), re.MULTILINE | re.DOTALL)
    try:
        return msgspec.json.decode(match[0]) if match else {}
    except msgspec.DecodeError:
        return {}


def _whole(value: Any) -> int:
    """Return the whole number that begins a value; 0 if there is none, as in N/A."""
    match = re.match(r"\s*(\d+)", str(value))
    return int(match[1]) if match else 0


def _read_nvidia() -> list[MachineGpu]:
    """Return the GPUs that nvidia-smi lists."""
    query = "--query-gpu=name,memory.total,memory.used"
    text = _output("nvidia-smi", query, "--format=csv,noheader,nounits")
    rows = [line.split(",") for line in text.splitlines()]
    return [
        MachineGpu(index, row[0].strip(), _whole(row[1]) << 20, _whole(row[2]) << 20)
        for index, row in enumerate(row for row in rows if len(row) == 3)
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

    static = rows("static", "--asic")
    gpus = []
    for index, row in rows("metric", "--mem-usage").items():
        name = lookup(static.get(index), ("asic", "market_name")) or ""
        memory, used = (size(row, "mem_usage", f"{kind}_vram") for kind in ("total", "used"))
        gpus.append(MachineGpu(index, name, memory, used))
    return gpus


def _read_apple() -> list[MachineGpu]:
    """Return the GPU of a Mac, whose memory is the machine's."""
    lines = _output("sysctl", "-n", "hw.memsize", "machdep.cpu.brand_string").splitlines()
    return [MachineGpu(0, lines[1], _whole(lines[0]))] if len(lines) == 2 else []
