"""`fit` as a picture: a stacked bar of one GPU's memory for each configuration, and how many users that is."""

from collections.abc import Sequence
from typing import Any

from kvcalc.report.chart import Axis, Chart, Series, bar_chart, bytes_tick, share_tick
from kvcalc.report.fit import assumptions_line, varied
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
    series.append(Series("left", (), left, "bar", labels=tuple(map(_users, records))))
    limits = [
        Series(f"memory of one GPU: {format_bytes(size)}", (), (float(size),), "limit") for size in sizes if len(sizes) == 1
    ]
    first = records[0]
    engines, models = (", ".join(dict.fromkeys(r[key] for r in records)) for key in ("engine", "model"))
    same = [f"weights {first['dtype']}"] * (not varied(records, "dtype"))
    same += [f"cache {first['kv_cache_dtype']}"] * (not varied(records, "kv_cache_dtype"))
    title = f"{models}: memory of one GPU, engine {engines}"
    subtitle = ", ".join([assumptions_line(records), *same])
    axis = Axis("", log=False, tick=bytes_tick)
    chart = Chart(title, subtitle, axis, axis, (*series, *limits), tuple(_names(records)))
    return chart._replace(beside=_wasted(first))


def _wasted(record: dict[str, Any]) -> Chart | None:
    """What allocators make of drawn lengths; None where none were drawn."""
    found = {name: record[key] for name, key in WASTES.items() if record.get(key) is not None}
    about = "of the tokens that are allocated; pieces: free and out of reach when one does not fit"
    return bar_chart("Cache that holds nothing", about, [*found], [*found.values()], share_tick) if found else None


def _names(records: Sequence[dict[str, Any]]) -> list[str]:
    """The GPUs of each configuration, and what else tells it from the others."""
    models, engines, memories = (varied(records, key) for key in ("model", "engine", "memory_bytes"))
    weights, caches = varied(records, "dtype"), varied(records, "kv_cache_dtype")
    lengths, several = varied(records, "requested_model_len"), varied(records, "requested_num_seqs")
    return [
        f"{r['model']} on " * models
        + f"{r['gpus']}× {r['gpu']}"
        + f" of {format_bytes(r['memory_bytes'], 1)}" * memories
        + f", {r['engine']}" * engines
        + f", {r['dtype']}" * weights
        + f", cache {r['kv_cache_dtype']}" * caches
        + f", {r['requested_model_len']:,} tokens" * lengths
        + f", {r['requested_num_seqs']:,} at once" * several
        for r in records
    ]


def _users(record: dict[str, Any]) -> str:
    """How many whole sequences of the length asked for that is."""
    users = record.get("max_num_seqs")
    if not record.get("weights_fit", True):
        return "the weights do not fit"
    return "" if users is None else f"{users:,} user{'s' * (users != 1)}"
