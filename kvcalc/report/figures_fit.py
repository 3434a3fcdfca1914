"""`fit` as a picture: a stacked bar of one GPU's memory for each configuration, and how many users that is."""

from collections.abc import Sequence
from typing import Any

from kvcalc.report.chart import Axis, Chart, Series, bar_chart, bytes_tick, share_tick
from kvcalc.report.fit import assumptions_line, varied
from kvcalc.report.looks import telling
from kvcalc.units import format_bytes

PARTS = (
    ("weights", "weight_bytes"),
    ("activations", "activation_bytes"),
    ("overhead", "overhead_bytes"),
    ("KV cache", "kv_budget_bytes"),
)


WASTES = {"contiguous slots": "contiguous_waste", "pieces of exact size": "external_waste", "pages": "paged_waste"}


def memory_chart(records: Sequence[dict[str, Any]]) -> Chart:
    """One stacked bar a configuration: weights, activations, overhead, cache, and what is left of the memory."""
    sizes = dict.fromkeys(r["memory_bytes"] for r in records)
    series = [Series(label, (), tuple(float(r[key]) for r in records), "bar") for label, key in PARTS]
    left = tuple(float(max(0, r["memory_bytes"] - sum(r[key] for _, key in PARTS))) for r in records)
    series.append(Series("left", (), left, "bar", labels=tuple(_users(r, len(sizes) > 1) for r in records)))
    limits = [
        Series(f"memory of one GPU: {format_bytes(size)}", (), (float(size),), "limit") for size in sizes if len(sizes) == 1
    ]
    first = records[0]
    same = [f"weights {first['dtype']}"] * (not varied(records, "dtype"))
    same += [f"cache {first['kv_cache_dtype']}"] * (not varied(records, "kv_cache_dtype"))
    away = {r.get("host_weight_bytes") or r.get("cpu_offload_bytes") or 0 for r in records}
    same += [f"{format_bytes(size)} more of each GPU's weights in the host's memory" for size in away if size and len(away) == 1]
    title = f"{_whose(records)}: memory of one GPU, {_counted(records, 'engine', 'engine ')}"
    subtitle = ", ".join([assumptions_line(records), *same])
    axis = Axis("", log=False, tick=bytes_tick)
    chart = Chart(title, subtitle, axis, axis, (*series, *limits), tuple(_names(records)))
    return chart._replace(beside=_wasted(first, chart.categories[0] if len(records) > 1 else ""))


def _wasted(record: dict[str, Any], name: str) -> Chart | None:
    """What allocators make of drawn lengths, on the first of several configurations; None where none were drawn."""
    found = {name: record[key] for name, key in WASTES.items() if record.get(key) is not None}
    about = f"{name}: of" if name else "of"
    about += " the tokens that are allocated; pieces: free and out of reach when one does not fit"
    return bar_chart("Cache that holds nothing", about, [*found], [*found.values()], share_tick) if found else None


def _whose(records: Sequence[dict[str, Any]]) -> str:
    """The model, or how many there are; with the GPUs where something else tells the bars apart."""
    cards = {_cards(r) for r in records}
    return _counted(records, "model") + f" on {min(cards)}" * (len(cards) == 1 < len(records))


def _counted(records: Sequence[dict[str, Any]], key: str, before: str = "") -> str:
    """The only value of a key, or how many there are."""
    found = dict.fromkeys(r[key] for r in records)
    return f"{before}{next(iter(found))}" if len(found) == 1 else f"{len(found)} {key}s"


def _cards(record: dict[str, Any]) -> str:
    return f"{record['gpus']}× {record['gpu']}"


def _names(records: Sequence[dict[str, Any]]) -> list[str]:
    """What tells each configuration from the others, and no more; the GPUs of one alone."""
    parts = [
        (
            r["model"],
            _cards(r),
            f"engine {r['engine']}",
            r["dtype"],
            f"cache {r['kv_cache_dtype']}",
            f"{r['requested_model_len']:,} tokens",
            f"{r['requested_num_seqs']:,} at once",
        )
        for r in records
    ]
    return [", ".join(words) or _cards(r) for words, r in zip(telling(parts), records, strict=True)]


def _users(record: dict[str, Any], memory: bool) -> str:
    """How many whole sequences of the length asked for that is, and of how much memory where that differs."""
    users, more = record.get("max_num_seqs"), record.get("offload_num_seqs")
    size = format_bytes(record["memory_bytes"], 1)
    if not record.get("weights_fit", True):
        return "the weights do not fit" + f" in {size}" * memory
    if users is None:
        return size * memory
    return f"{users:,} user{'s' * (users != 1)}" + f" in {size}" * memory + (f", {more:,} more on the host" if more else "")
