"""The memories of a GPU from registers to disk: how large, how fast, and how long one reading of all of it takes."""

from collections.abc import Iterator
from typing import Any

from kvcalc.gpu.spec import Gpu, Host
from kvcalc.report.layout import Column, Table
from kvcalc.report.tables import seconds
from kvcalc.units import format_bytes, format_si

OPERANDS = 6  # bytes that an fp32 FLOP reads from registers: three operands of 4 bytes a multiply-add, which is two FLOPs
COLUMNS = (
    Column("level", "memory", right=False),
    Column("each", "of one unit", format_bytes),
    Column("units", "units"),
    Column("bytes", "in all", format_bytes),
    Column("bytes_per_s", "rate", lambda v: format_si(v, "B/s")),
    Column("seconds", "to read it all", seconds),
)


def levels(gpu: Gpu) -> Iterator[dict[str, Any]]:
    """A record a memory, the nearest first; null where the preset gives no figure."""
    peak = gpu.vector_flops_per_s.get("fp32")
    for name, each, rate in (
        ("registers", gpu.register_bytes_per_sm, OPERANDS * peak if peak and gpu.register_bytes_per_sm else None),
        ("shared memory, L1", gpu.shared_memory_bytes_per_sm, gpu.shared_memory_bytes_per_s),
    ):
        yield _level(name, each * gpu.sms if each and gpu.sms else None, rate) | {
            "each": each,
            "units": gpu.sms if each else None,
        }
    yield _level("L2", gpu.l2_bytes, gpu.l2_bytes_per_s)
    yield _level(gpu.memory_type or "memory", gpu.memory_bytes, gpu.bandwidth_bytes_per_s)
    if gpu.link_bytes_per_s:
        yield _level("another GPU's", None, gpu.link_bytes_per_s) | {"units": gpu.link_domain}
    host = gpu.host or Host(name="", gpus=1)
    yield _level("the host's", host.memory_bytes, gpu.host_link_bytes_per_s)
    yield _level("disk", host.disk_bytes, host.disk_bytes_per_s)


def _level(name: str, size: int | None, rate: float | None) -> dict[str, Any]:
    return {"level": name, "bytes": size, "bytes_per_s": rate, "seconds": size / rate if size and rate else None}


def hierarchy_table(gpu: Gpu) -> Table:
    """From registers to disk."""
    slowest = f"one reading of its memory takes {seconds(gpu.memory_bytes / gpu.bandwidth_bytes_per_s)}"
    host = gpu.host
    alone = "" if host else ", or the machine's own, as of host and disk"
    notes = [
        "registers: what the fp32 vector peak reads, three operands of 4 bytes a multiply-add"
        if gpu.register_bytes_per_sm
        else "",
        "L2: as published, or what a benchmark of this GPU reached; the preset says which" if gpu.l2_bytes_per_s else "",
        f"host and disk: of one {host.name}, which {host.gpus} GPUs share; another machine's differ" if host else "",
        f"rates in one direction; –: no figure with a source{alone}",
    ]
    return Table(list(levels(gpu)), COLUMNS, f"{gpu.name}, from registers to disk: {slowest}", ["", *filter(None, notes)])
