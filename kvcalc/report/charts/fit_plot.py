"""Pictures of GPU memory: its parts, and its use by allocators."""

from typing import TYPE_CHECKING

from kvcalc.records import Record, Records
from kvcalc.report.charts.chart import (
    Chart,
    bar_chart,
    bytes_tick,
    whole_tick,
)
from kvcalc.report.row_names import shared_words, sides
from kvcalc.report.text.fit_text import NAMES
from kvcalc.report.text.tables import plural
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
    "requested_num_seqs": "required users: {:,}",
    "gpu_memory_utilization": "gpu_memory_utilization {:g}",
    "max_num_batched_tokens": "max_num_batched_tokens {:,}",
}


def memory_chart(records: Records) -> Chart:
    """Return a chart with one bar per configuration: how the memory of one GPU is used.

    The parts of a bar are weights, activations, overhead, KV cache and unused memory, in bytes.

    Args:
        records: Records of `fit`, one per configuration.
    """
    deployed = [{**r, "place": f"{r['gpus']}× {r['gpu']}"} for r in records]
    parts = {name: [record[key] for record in records] for name, key in PARTS.items()}
    sizes = [record["memory_bytes"] for record in records]
    used = [sum(column) for column in zip(*parts.values(), strict=True)]
    parts["unused"] = [max(0, size - part) for size, part in zip(sizes, used, strict=True)]
    limits = {}
    if len(set(sizes)) == 1:
        limits = {f"memory of one GPU: {format_bytes(sizes[0])}": sizes[0]}
    names = sides(deployed, WORDING, WORDING).names
    return bar_chart(
        "Memory of one GPU",
        ", ".join(shared_words(deployed, WORDING)),
        [name or r["place"] for name, r in zip(names, deployed, strict=True)],
        parts,
        bytes_tick,
        [*map(_users, records)],
        limits,
    )


def _users(record: Record) -> str:
    """Return the label of a bar: the users of the requested length that fit in the memory."""
    memory = format_bytes(record["memory_bytes"], 1)
    if not record["weights_fit"]:
        return f"the weights do not fit in {memory}"
    offloaded = record.get("offload_num_seqs")
    more = f", {offloaded:,} more on the host" if offloaded else ""
    return f"{plural(record['max_num_seqs'] or 0, 'user')} in {memory}{more}"


def allocations_chart(run: "AllocationRun") -> Chart:
    """Return a chart with one bar per KV cache allocator, in tokens, after the last request.

    The allocators are contiguous slots, first-fit pieces and pages. "Free, out of reach" is free
    memory that the next single request cannot use. Examples are holes other than the largest hole.

    Args:
        run: Result of the same requests in all three allocators.
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
