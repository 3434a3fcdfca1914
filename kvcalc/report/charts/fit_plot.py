"""Pictures of GPU memory: what fits, what allocators make of it, and the memories of GPUs."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.report.charts.chart import (
    FLOPS_AXIS,
    Axis,
    Chart,
    Series,
    bar_chart,
    bytes_tick,
    limit,
    share_tick,
    si_tick,
    whole_tick,
)
from kvcalc.report.charts.series_styles import GREY
from kvcalc.report.export import Record
from kvcalc.report.row_names import keep_distinguishing_columns
from kvcalc.report.text.fit_text import NAMES, assumptions_line, varied
from kvcalc.report.text.roofline_text import levels
from kvcalc.report.text.tables import seconds
from kvcalc.units import format_bytes

if TYPE_CHECKING:
    from kvcalc.capacity.allocations import AllocationRun

PARTS = {
    "weights": "weight_bytes",
    "activations": "activation_bytes",
    "overhead": "overhead_bytes",
    "KV cache": "kv_budget_bytes",
}
WASTES = {
    "contiguous slots": "contiguous_waste",
    "pieces of exact size": "external_waste",
    "pages": "paged_waste",
}


def memory_chart(records: Sequence[Record]) -> Chart:
    """Return bars of one GPU's memory: weights, activations, overhead, cache and the rest."""
    first = records[0]
    sizes = {record["memory_bytes"] for record in records}
    parts = {name: [record[key] for record in records] for name, key in PARTS.items()}
    used = [sum(column) for column in zip(*parts.values(), strict=True)]
    parts["left"] = [
        max(0, record["memory_bytes"] - size)
        for record, size in zip(records, used, strict=True)
    ]
    limits = {f"memory of one GPU: {format_bytes(size)}": size for size in sizes}
    subtitle = [assumptions_line(records)]
    if not varied(records, "dtype"):
        subtitle.append(f"weights {first['dtype']}")
    if not varied(records, "kv_cache_dtype"):
        subtitle.append(f"cache {first['kv_cache_dtype']}")
    host = {r.get("host_weight_bytes") or r.get("cpu_offload_bytes") or 0 for r in records}
    if len(host) == 1 and any(host):
        size = format_bytes(host.pop())
        subtitle.append(f"{size} more of each GPU's weights in the host's memory")
    title = _count(records, "model")
    if len({_gpus(record) for record in records}) == 1 < len(records):
        title += f" on {_gpus(first)}"
    engine = _count(records, "engine")
    title += (
        f": memory of one GPU, {engine if varied(records, 'engine') else f'engine {engine}'}"
    )
    names = _names(records)
    chart = bar_chart(
        title,
        ", ".join(subtitle),
        names,
        parts,
        bytes_tick,
        [_users(record, len(sizes) > 1) for record in records],
        limits if len(sizes) == 1 else None,
    )
    return chart._replace(
        beside=_waste_chart(first, f"{names[0]}: " if len(records) > 1 else "")
    )


def _waste_chart(record: Record, name: str) -> Chart | None:
    """Return bars of the waste of allocators for sampled lengths; None without them."""
    wastes = {
        label: record[key] for label, key in WASTES.items() if record.get(key) is not None
    }
    if not wastes:
        return None
    about = (
        f"{name}of the tokens that are allocated; pieces: free and out of reach when one does "
        "not fit"
    )
    return bar_chart(
        "Cache that holds nothing",
        about,
        wastes,
        [*wastes.values()],
        share_tick,
    )


def _count(records: Sequence[Record], key: str) -> str:
    """Return the only value of a key, or the number of values."""
    values = {record[key] for record in records}
    return str(values.pop()) if len(values) == 1 else f"{len(values)} {key}s"


def _gpus(record: Record) -> str:
    return f"{record['gpus']}× {record['gpu']}"


def _names(records: Sequence[Record]) -> list[str]:
    """Return what distinguishes each configuration, else its GPUs."""
    parts = [
        (
            record["model"],
            _gpus(record),
            f"engine {record['engine']}",
            record["dtype"],
            f"cache {record['kv_cache_dtype']}",
            f"{record['requested_model_len']:,} tokens",
            f"{record['requested_num_seqs']:,} at once",
        )
        for record in records
    ]
    rows = keep_distinguishing_columns(parts)
    return [", ".join(row) or part[1] for row, part in zip(rows, parts, strict=True)]


def _users(record: Record, has_sizes: bool) -> str:
    """Return the users of the requested length that fit, and the memory if sizes differ."""
    users = record.get("max_num_seqs")
    offloaded = record.get("offload_num_seqs")
    size = f" in {format_bytes(record['memory_bytes'], 1)}" if has_sizes else ""
    if not record.get("weights_fit", True):
        return f"the weights do not fit{size}"
    if users is None:
        return size.removeprefix(" in ")
    more = f", {offloaded:,} more on the host" if offloaded else ""
    return f"{users:,} user{'s' * (users != 1)}{size}{more}"


def allocations_chart(played: "AllocationRun") -> Chart:
    """Return bars of the memory, in tokens, at the end of a script, under three allocators.

    Out of reach are rests that make no whole slot or page, and all holes but the largest.
    """
    last = played.records[-1]
    memory, slots, pages = last["memory_tokens"], played.slots, played.pages
    pieces = memory - last["first_fit_free_tokens"]
    reserved = {
        "contiguous": slots.waste.slots,
        "first_fit": pieces,
        "paged": pages.waste.slots,
    }
    used = {
        "contiguous": slots.waste.used,
        "first_fit": pieces,
        "paged": pages.waste.used,
    }
    free = {
        "contiguous": min(slots.block, last["contiguous_free_tokens"]),
        "first_fit": last["first_fit_largest_hole"],
        "paged": last["paged_free_tokens"],
    }
    requests = [record for record in played.records if record["tokens"] is not None]
    texts = []
    if requests:
        answers = requests[-1]
        texts = [f"{answers['request']}: {'yes' if answers[name] else 'no'}" for name in NAMES]
    return bar_chart(
        "What three allocators make of the same requests",
        f"{memory:,} tokens of memory after {last['request']!r}, and what each allocator says to "
        "the last request",
        (f"slots of {slots.block:,}", "pieces, first fit", f"pages of {pages.block:,}"),
        {
            "holds tokens": [used[name] for name in NAMES],
            "reserved, holds nothing": [reserved[name] - used[name] for name in NAMES],
            "free for one request": [free[name] for name in NAMES],
            "free, out of its reach": [memory - reserved[name] - free[name] for name in NAMES],
        },
        whole_tick,
        texts,
    )._replace(y=Axis("tokens", log=False, tick=whole_tick))


RATE_AXIS = Axis("bytes per second", tick=si_tick("B/s"))
MAX_POINTS = 8  # GPUs with a marker of their own; more have one per vendor
MAX_NAMES = 24  # GPUs that are named
KNEES = (25, 50, 100, 200, 400)  # FLOP per byte of the diagonals
MAX_TITLE = 90  # letters of a title that names GPUs


def hierarchy_chart(gpu: Gpu) -> Chart:
    """Return the rates of a GPU's memories over their sizes; links without a size are levels."""
    memories = list(levels(gpu))
    points: list[Series] = []
    links = []
    slow = []
    for memory in memories:
        size, rate = memory["bytes"], memory["bytes_per_s"]
        name = memory["level"] + " memory" * memory["level"].endswith("'s")
        if size and rate:
            text = f"{name}: {bytes_tick(size)} at {RATE_AXIS.tick(rate)}"
            point = (float(size),), (float(rate),)
            points.append(
                Series(
                    "",
                    *point,
                    "points",
                    labels=(text,),
                    colour=len(points),
                )
            )
        elif rate:
            links.append(limit(f"{name}: {RATE_AXIS.tick(rate)}", rate))
        elif size:
            slow.append(f"{name} ({bytes_tick(size)})")
    xs = tuple(x for point in points for x in point.xs)
    ys = tuple(y for point in points for y in point.ys)
    path = Series(
        "",
        xs,
        ys,
        "solid",
        colour=GREY,
    )
    time = seconds(gpu.memory_bytes / gpu.bandwidth_bytes_per_s)
    about = [f"rates in one direction; one reading of its memory takes {time}"]
    if slow:
        about.append(f"without a rate: {', '.join(slow)}")
    if gpu.host:
        about.append(f"host and disk: of one {gpu.host.name}, which {gpu.host.gpus} GPUs share")
    x = Axis("size", tick=bytes_tick)
    title = f"{gpu.name}: rates and sizes of its memories"
    return Chart(
        title,
        "; ".join(about),
        x,
        RATE_AXIS,
        (path, *points, *links),
    )


def peaks_chart(gpus: Sequence[Gpu]) -> Chart:
    """Return bf16 (else fp16) peaks over bandwidths, with diagonals of equal ridge points.

    Raises:
        UserError: No GPU has such a peak.
    """
    cards = {gpu.name: gpu for gpu in gpus}.values()
    knees = {gpu.name: gpu.knee for gpu in cards if gpu.knee}
    ranked = sorted((gpu for gpu in cards if gpu.knee), key=lambda gpu: knees[gpu.name])
    if not ranked:
        raise UserError(
            "there is no matrix peak in bf16 or fp16 to draw",
            hint="`kvcalc gpus` lists the GPUs that have one",
        )
    bandwidths = [gpu.bandwidth_bytes_per_s for gpu in ranked]
    ends = (min(bandwidths) / 1.3, max(bandwidths) * 1.3)
    first, last = ranked[0].name, ranked[-1].name
    low, high = knees[first], knees[last]
    series = [
        Series(f"knee {knee} FLOP/B", ends, (knee * ends[0], knee * ends[1]), "quiet")
        for knee in KNEES
        if low / 2 < knee < 2 * high
    ]
    series += _peak_points(ranked)
    about = "dense datasheet peaks in bf16, else fp16; knee: where products turn compute-bound"
    if len(cards) > len(ranked):
        about += f"; {len(cards) - len(ranked)} without such a peak are left out"
    title = "Peak over bandwidth"
    if high > low:
        names = f"{title}: knees from {low:.0f} ({first}) to {high:.0f} ({last}) FLOP/B"
        title = f"{title}: knees from {low:.0f} to {high:.0f} FLOP/B"
        title = names if len(names) <= MAX_TITLE else title
    bandwidth_axis = Axis("memory bandwidth", tick=RATE_AXIS.tick)
    return Chart(
        title,
        about,
        bandwidth_axis,
        FLOPS_AXIS,
        tuple(series),
    )


def _peak_points(gpus: Sequence[Gpu]) -> list[Series]:
    """Return a marker per GPU, or per vendor if there are many. GPUs at one place have one name."""
    series = []
    places: dict[tuple[float, float], list[Gpu]] = {}
    for gpu in gpus:
        bandwidth = gpu.bandwidth_bytes_per_s
        places.setdefault((bandwidth, (gpu.knee or 0.0) * bandwidth), []).append(gpu)
    groups: dict[str, list[tuple[float, float, str]]] = {}
    for (x, y), same in places.items():
        text = ", ".join(gpu.name for gpu in same)
        key = same[0].vendor
        if len(places) <= MAX_POINTS:
            key = text = f"{text}: knee {same[0].knee:.0f}"
        groups.setdefault(key, []).append((x, y, text if len(places) <= MAX_NAMES else ""))
    for number, (key, points) in enumerate(groups.items()):
        xs, ys, texts = zip(*points, strict=True)
        labels = texts if any(texts) else ()
        series.append(
            Series(
                key,
                xs,
                ys,
                "points",
                labels=labels,
                colour=number,
            )
        )
    return series
