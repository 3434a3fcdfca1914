"""Pictures of GPU memory: its parts, its use by allocators, and the memories of GPUs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcalc.gpu.gpu import Gpu
from kvcalc.records import Record
from kvcalc.report.charts.chart import (
    Axis,
    Chart,
    Series,
    bar_chart,
    bytes_tick,
    limit,
    si_tick,
    whole_tick,
)
from kvcalc.report.charts.series_styles import GREY
from kvcalc.report.row_names import keep_distinguishing_columns, shared_words
from kvcalc.report.text.fit_text import NAMES, assumptions_line
from kvcalc.report.text.roofline_text import levels
from kvcalc.report.text.tables import plural, seconds
from kvcalc.units import format_bytes

if TYPE_CHECKING:
    from kvcalc.capacity.allocations import AllocationRun

PARTS = {
    "weights": "weight_bytes",
    "activations": "activation_bytes",
    "overhead": "overhead_bytes",
    "KV cache": "kv_budget_bytes",
}
# values that distinguish configurations, the weightiest first
WORDING = {
    "model": "{}",
    "place": "{}",
    "engine": "engine {}",
    "dtype": "weights {}",
    "kv_cache_dtype": "cache {}",
    "requested_model_len": "{:,} tokens",
    "requested_num_seqs": "{:,} concurrent",
}


def memory_chart(records: Sequence[Record]) -> Chart:
    """Return bars of one GPU's memory: weights, activations, overhead, cache and the rest."""
    deployed = [{**r, "place": f"{r['gpus']}× {r['gpu']}"} for r in records]
    rows = keep_distinguishing_columns(
        [tuple(text.format(r[key]) for key, text in WORDING.items()) for r in deployed]
    )
    names = [", ".join(row) or r["place"] for row, r in zip(rows, deployed, strict=True)]
    parts = {name: [record[key] for record in records] for name, key in PARTS.items()}
    sizes = [record["memory_bytes"] for record in records]
    used = [sum(column) for column in zip(*parts.values(), strict=True)]
    parts["unused"] = [max(0, size - part) for size, part in zip(sizes, used, strict=True)]
    limits = {}
    if len(set(sizes)) == 1:
        limits = {f"memory of one GPU: {format_bytes(sizes[0])}": sizes[0]}
    about = [assumptions_line(records)]
    about += shared_words(records, {key: WORDING[key] for key in ("dtype", "kv_cache_dtype")})
    host = {r.get("host_weight_bytes") or r.get("cpu_offload_bytes") or 0 for r in records}
    if len(host) == 1 and any(host):
        size = format_bytes(host.pop())
        about.append(f"{size} more of each GPU's weights in the host's memory")
    keys = ["model", "place", "engine"] if len(records) > 1 else ["model", "engine"]
    common = shared_words(deployed, {key: WORDING[key] for key in keys})
    texts = [
        _users(record, "" if limits else format_bytes(record["memory_bytes"], 1))
        for record in records
    ]
    return bar_chart(
        f"Memory of one GPU: {', '.join(common)}",
        ", ".join(about),
        names,
        parts,
        bytes_tick,
        texts,
        limits,
    )


def _users(record: Record, size: str) -> str:
    """Return the users of the requested length that fit, and the memory if sizes differ."""
    users = record.get("max_num_seqs")
    offloaded = record.get("offload_num_seqs")
    if not record.get("weights_fit", True):
        return "the weights do not fit" + (f" in {size}" if size else "")
    if users is None:
        return size
    more = f", {offloaded:,} more on the host" if offloaded else ""
    return plural(users, "user") + (f" in {size}" if size else "") + more


def allocations_chart(run: "AllocationRun") -> Chart:
    """Return bars of the memory, in tokens, at the end of a script, under three allocators.

    Out of reach are rests that make no complete slot or page, and all holes but the largest.
    """
    last = run.records[-1]
    memory, slots, pages = last["memory_tokens"], run.slots, run.pages
    used = [waste.used for waste in run.wastes]
    reserved = [waste.slots for waste in run.wastes]
    free = [
        min(slots.block, last["contiguous_free_tokens"]),
        last["first_fit_largest_hole"],
        last["paged_free_tokens"],
    ]
    requests = [record for record in run.records if record["tokens"] is not None]
    texts = []
    if requests:
        answers = requests[-1]
        texts = [f"{answers['request']}: {'yes' if answers[name] else 'no'}" for name in NAMES]
    chart = bar_chart(
        "Three allocators with the same requests",
        f"{memory:,} tokens of memory after {last['request']!r}, and each allocator's answer to "
        "the last request",
        [f"slots of {slots.block:,}", "pieces, first fit", f"pages of {pages.block:,}"],
        {
            "stores tokens": used,
            "reserved, stores nothing": [r - u for r, u in zip(reserved, used, strict=True)],
            "free for one request": free,
            "free, out of reach": [memory - r - f for r, f in zip(reserved, free, strict=True)],
        },
        whole_tick,
        texts,
    )
    return chart._replace(y=chart.y._replace(title="tokens"))


RATE_AXIS = Axis("bytes per second", tick=si_tick("B/s"))


def hierarchy_chart(gpu: Gpu) -> Chart:
    """Return the rates of a GPU's memories over their sizes; links without a size are levels."""
    points: list[Series] = []
    links = []
    for memory in levels(gpu):
        size, rate = memory["bytes"], memory["bytes_per_s"]
        name = memory["level"] + " memory" * memory["level"].endswith("'s")
        if size and rate:
            text = f"{name}: {bytes_tick(size)} at {RATE_AXIS.tick(rate)}"
            number = len(points)
            points.append(Series("", [size], [rate], "points", labels=[text], colour=number))
        elif rate:
            links.append(limit(f"{name}: {RATE_AXIS.tick(rate)}", rate))
    path = Series(
        "", [p.xs[0] for p in points], [p.ys[0] for p in points], "solid", colour=GREY
    )
    time = seconds(gpu.memory_bytes / gpu.bandwidth_bytes_per_s)
    about = [f"rates in one direction; reading its memory once takes {time}"]
    if gpu.host:
        about.append(f"host and disk of {gpu.host.name}: shared by {gpu.host.gpus} GPUs")
    x = Axis("size", tick=bytes_tick)
    title = f"{gpu.name}: rates and sizes of its memories"
    return Chart(title, "; ".join(about), x, RATE_AXIS, [path, *points, *links])
