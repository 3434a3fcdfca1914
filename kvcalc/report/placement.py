"""Where a deployment's bytes lie, in words: what is sent, what waits in the host's memory, what stands more than once."""

from collections.abc import Mapping
from typing import Any

from kvcalc.capacity import Fit
from kvcalc.capacity.placement import replicas
from kvcalc.report.tables import seconds
from kvcalc.units import format_bytes

NAMED = 4  # replicated weights that are told by name


def placement_lines(found: Fit, record: Mapping[str, Any]) -> list[str]:
    """Below the table of `fit`: of its first configuration."""
    return [*_host(found, record), *_sent(record), *_replicated(found), *_loaded(found, record)]


def _least(time: float | None, words: str = "at least") -> str:
    return f", {seconds(time)} {words}" if time else ""


def _host(found: Fit, record: Mapping[str, Any]) -> list[str]:
    lines = []
    if record["cpu_offload_bytes"]:
        size = format_bytes(record["cpu_offload_bytes"])
        lines.append(
            f"weights in the host's memory: {size}, over its link in every pass{_least(record['cpu_offload_s'], 'each')}"
        )
    if record.get("offload_num_seqs") is not None:
        moved = f"a step over them moves {format_bytes(record['offload_step_bytes'])}{_least(record['offload_step_s'])}"
        host = format_bytes(found.options.kv_offloading_bytes)
        lines.append(f"cache in the host's memory: {host} hold {record['offload_num_seqs']:,} users more; {moved}")
        lines += _warm(record)
    return lines


def _warm(record: Mapping[str, Any]) -> list[str]:
    """Conversations that wait: what is kept of them, and what it takes to go on with one."""
    back, again = record["offload_return_s"], record["recompute_s"]
    kept = f"{record['offload_num_seqs']:,} conversations of {record['requested_model_len']:,} tokens stay warm there"
    times = (
        f"bringing one back takes {seconds(back)} at least" if back else "",
        f"computing it again {seconds(again)}" if again else "",
    )
    return ["; ".join([f"{kept}, {record['offload_tokens']:,} tokens", *filter(None, times)])]


def _sent(record: Mapping[str, Any]) -> list[str]:
    sent = f"{format_bytes(record['transfer_bytes'])} of {record['requested_model_len']:,} tokens cross once"
    return [f"prefill and decode on separate GPUs: {sent}{_least(record['transfer_s'])}"]


def _replicated(found: Fit) -> list[str]:
    ranks = found.ranks
    if ranks.tp == 1:
        return []
    twice = replicas(found.model, found.formats, ranks)
    names = [f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in list(twice.weights.items())[:NAMED]]
    rest = len(twice.weights) - NAMED
    more = f" and {rest} more" if rest > 0 else ""
    by_copies: dict[int, list[str]] = {}
    for role, _, copies in twice.cache:
        by_copies.setdefault(copies, []).append(role.replace("_", " "))
    rows = [f"{', '.join(roles)} rows on {copies} GPUs each" for copies, roles in by_copies.items()]
    cache = "; ".join(rows) if rows else "no row of the cache"
    weights = f"; of the weights {', '.join(names)}{more} on each" if names else ""
    return [f"replicated: {cache}{weights}; embedding and head: 1/{ranks.tp} of the vocabulary on each"]


def _loaded(found: Fit, record: Mapping[str, Any]) -> list[str]:
    parts = []
    if record["load_disk_s"]:
        parts.append(f"{seconds(record['load_disk_s'])} from disk to host")
    if record["load_link_s"]:
        parts.append(f"{seconds(record['load_link_s'])} from host to GPU")
    if not parts:
        return []
    host = found.gpu.host
    known = f": {host.disk_bytes_per_s / 1e9:g}GB/s in an {host.name}" if host and host.disk_bytes_per_s else ""
    unknown = "" if record["load_disk_s"] else f" (--disk-bandwidth adds the disk{known})"
    return [f"loading {format_bytes(record['checkpoint_bytes'])} of weights: {', '.join(parts)} at least{unknown}"]
