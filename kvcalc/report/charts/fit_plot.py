"""Pictures of GPU memory: its parts, and its use by allocators."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcalc.arithmetic import grouped
from kvcalc.records import Record, Records
from kvcalc.report.charts.chart import Axis, Chart, Series, bar_chart, bytes_tick, whole_tick
from kvcalc.report.row_names import shared_words, sides, texts_by_name
from kvcalc.report.text.fit_text import NAMES, context_name, placement_words
from kvcalc.report.text.tables import digits, plural
from kvcalc.units import format_bytes, scale_of

if TYPE_CHECKING:
    from kvcalc.capacity.allocations import AllocationRun

PARTS = texts_by_name("""
    weights: weight_bytes
    activations: activation_bytes
    overhead: overhead_bytes
    KV cache: kv_budget_bytes
""")
# values that distinguish configurations, the weightiest first
WORDING = texts_by_name("""
    model: {}
    place: {}
    engine: engine {}
    dtype: weights {}
    kv_cache_dtype: cache {}
    requested_model_len: {:,} tokens
    requested_num_seqs: required users: {:,}
    gpu_memory_utilization: gpu_memory_utilization {:g}
    max_num_batched_tokens: max_num_batched_tokens {:,}
""")


def memory_chart(records: Records) -> Chart:
    """Return a chart with one bar per configuration: how the memory of one GPU is used.

    The parts of a bar are weights, activations, overhead, KV cache and unused memory, in bytes.

    Args:
        records: Records of `fit`, one per configuration.
    """
    deployed = [{**r, "place": f"{r['gpus']}× {r['gpu']}"} for r in records]
    parts = {name: [record[key] for record in records] for name, key in PARTS.items()}
    sizes = [record["memory_bytes"] for record in records]
    used = [sum(column) for column in zip(*parts.values())]
    parts["unused"] = [max(0, size - part) for size, part in zip(sizes, used)]
    limits = {}
    if len(set(sizes)) == 1:
        limits = {f"memory of one GPU: {format_bytes(sizes[0])}": sizes[0]}
    names = sides(deployed, WORDING, WORDING).names
    return bar_chart(
        "Memory of one GPU",
        ", ".join(shared_words(deployed, WORDING)),
        [name or r["place"] for name, r in zip(names, deployed)],
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
    """Return a chart of the tokens in memory after a script of requests, one bar per allocator.

    The allocators are contiguous slots of the maximum length, first-fit pieces of exact size, and
    pages. "Free, out of reach" is free memory that the next single request cannot use, such as all
    holes except the largest.

    Args:
        run: Result of the same requests in all three allocators.
    """
    last = run.records[-1]
    memory = last["memory_tokens"]
    used = [waste.used for waste in run.wastes]
    reserved = [waste.slots for waste in run.wastes]
    free = [
        min(run.slots.block, last["contiguous_free_tokens"]),
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
        [f"slots of {run.slots.block:,}", "pieces, first fit", f"pages of {run.pages.block:,}"],
        {
            "stores tokens": used,
            "reserved, stores nothing": [r - u for r, u in zip(reserved, used)],
            "free for one request": free,
            "free, out of reach": [memory - r - f for r, f in zip(reserved, free)],
        },
        whole_tick,
        texts,
    )
    return chart._replace(y=chart.y._replace(title="tokens"))


def matrix_charts(matrices: Sequence[Records]) -> list[Chart]:
    """Return a heat map of free KV cache bytes for each deployment. A deeper colour is more memory.

    Rows are numbers of users, and columns are contexts. Bytes are of one GPU. A combination that
    does not fit has another colour and the missing bytes.

    Args:
        matrices: Records of `fit --matrix` for each deployment.
    """
    size, unit = scale_of(max((r["headroom_bytes"] for rs in matrices for r in rs), default=0))
    about = (
        f"{unit} of free KV cache per GPU, or missing (−), engine {matrices[0][0]['engine']}"
    )
    first, *others = (_heat_map(records, size) for records in matrices)
    if not others:
        return [first._replace(title=f"{first.title}: what fits", subtitle=about)]
    return [first._replace(picture_head=("What fits", about)), *others]


def _heat_map(records: Records, size: int) -> Chart:
    """Return a heat map with users on the vertical axis and contexts on the horizontal axis.

    Args:
        records: The cells. Their texts are free or missing memory.
        size: Bytes of the unit of the texts.
    """
    max_bytes = max((r["headroom_bytes"] for r in records), default=1) or 1
    depths = grouped(
        (r["users"], max(0.0, r["headroom_bytes"] / max_bytes) if r["fits"] else -1.0)
        for r in records
    )
    labels = grouped(
        (r["users"], f"{'−' * (not r['fits'])}{digits(abs(r['headroom_bytes']) / size)}")
        for r in records
    )
    series = [
        Series(f"{users:,}", (), row, "cells", labels=labels[users])
        for users, row in depths.items()
    ]
    contexts = [*dict.fromkeys(context_name(r["context"]) for r in records)]
    title = f"{records[0]['model']} on {placement_words(records[0])}"
    return Chart(title, "", Axis("context, tokens"), Axis("users"), series, contexts)
