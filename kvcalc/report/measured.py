"""Tables of what was measured."""

from typing import Any

from kvcalc.report.layout import Column, Table
from kvcalc.report.tables import integer, seconds
from kvcalc.units import format_bytes, format_si


def times(value: float) -> str:
    """A ratio: 1.25×."""
    return f"{value:.2f}×"


def percent(value: float) -> str:
    """A share: 37 %."""
    return f"{value:.0%}"


MEASURE_COLUMNS = (
    Column("variant", "variant", right=False),
    Column("phase", "phase", right=False),
    Column("batch_size", "batch", integer, given=True),
    Column("context", "context", integer, given=True),
    Column("attention_predicted_s", "attention: bound", seconds),
    Column("attention_measured_s", "measured", seconds),
    Column("attention_ratio", "ratio", times),
    Column("attention_difference", "because", right=False),
    Column("ratio", "layer: ratio", times),
    Column("predicted_s", "bound", seconds),
    Column("measured_s", "measured", seconds),
    Column("spread", "spread", percent),
    Column("predicted_bytes", "cache predicted", integer),
    Column("allocated_bytes", "in tensors", integer),
    Column("allocator_bytes", "allocator", integer),
    Column("attention_bandwidth_share", "of bandwidth", percent),
    Column("attention_flops_share", "of FLOP/s", percent),
    Column("attention", "attention", right=False),
)
WAYS = {
    "cached": "with",
    "cat": "grown by cat",
    "repeat": "K, V copied to heads",
    "uncached": "without",
    "unfused": "without, n × n scores",
}
GENERATE_COLUMNS = (
    Column("variant", "variant", lambda v: v or "its own", right=False, given=True),
    Column("prompt_len", "prompt", integer, given=True),
    Column("batch_size", "batch", integer, given=True),
    Column("mode", "cache", lambda v: WAYS[v], right=False),
    Column("head", "head on", right=False),
    Column("total_s", "measured", seconds),
    Column("predicted_total_s", "predicted", seconds),
    Column("ratio", "ratio", times),
    Column("speedup", "cache saves", times),
    Column("predicted_speedup", "predicted", times),
    Column("predicted_extra_bytes", "extra bytes", lambda v: format_bytes(v) if v else "none"),
    Column("same_tokens", "same tokens", lambda v: "yes" if v else "no", right=False),
    Column("first_token_s", "first token", seconds),
    Column("last_token_s", "last token", seconds),
    Column("tokens_per_s", "tokens/s", lambda v: f"{v:.1f}"),
    Column("bound_total_s", "bound", seconds),
)
LARGE = 64 << 20  # bytes of a cache that no CPU's last level holds


def measured_table(rows: list[dict[str, Any]], version: str) -> Table:
    """Layers: their attention first, then the whole of them and their bytes."""
    medians = [
        f"{phase} attention takes {times(_middle(ratios))} its bound"
        for phase in dict.fromkeys(r["phase"] for r in rows)
        if (ratios := sorted(r["attention_ratio"] for r in rows if r["phase"] == phase))
    ]
    median = ", the median of each" if len(rows) > len(medians) else ""
    return Table(rows, MEASURE_COLUMNS, f"{', '.join(medians)}{median}", measure_notes(rows, version))


def generated_table(rows: list[dict[str, Any]], version: str) -> Table:
    """Every way of generating, measured beside predicted."""
    first, without = rows[0], next((r for r in rows if r["mode"] == "uncached"), None)
    title = f"{first['model']} makes {first['new_tokens']:,} tokens in {seconds(first['total_s'])} with the cache"
    if without:
        saves = f"it saves {times(without['speedup'])}, predicted {times(without['predicted_speedup'])}"
        title = f"{title} and {seconds(without['total_s'])} without: {saves}"
    return Table(rows, GENERATE_COLUMNS, title, generate_notes(rows, version))


def _middle(ordered: list[float]) -> float:
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def measure_notes(rows: list[dict[str, Any]], version: str) -> list[str]:
    """Ceilings, what decode attention reaches over large caches, and why each row differs from its bound."""
    first = rows[0]
    ceilings = (
        f"ceilings of this machine ({first['device']}): {format_si(first['bandwidth_bytes_per_s'], 'B/s')} (copy "
        f"{format_si(first['copy_bytes_per_s'], 'B/s')}, read {format_si(first['read_bytes_per_s'], 'B/s')}), "
        f"{format_si(first['flops_per_s'], 'FLOP/s')} in {first['dtype']}, {seconds(first['launch_s'])} to launch an operation"
    )
    clock = {"cpu": "one thread, timed by its own CPU time", "wall": f"{first['threads']} threads, wall clock"}
    graphs = "CUDA graphs" if any(r["graph"] for r in rows) else "no graphs"
    how = clock.get(first["clock"], f"CUDA events, {graphs}")
    even = all(r["predicted_bytes"] == r["allocated_bytes"] <= r["allocator_bytes"] for r in rows)
    notes = [
        "",
        ceilings,
        f"torch {version}, {how}; medians; inputs rotate past the last-level cache where memory bounds the time",
    ]
    notes.append(
        "cache bytes: predicted = in the tensors' storage in every row" if even else "cache bytes DIFFER from the prediction"
    )
    if large := sorted(r["attention_ratio"] for r in rows if r["phase"] == "decode" and r["predicted_bytes"] > LARGE):
        notes.append(f"decode attention over caches above {format_bytes(LARGE, 0)}: median {times(_middle(large))} its bound")
    return [*notes, "", *(f"{r['variant']} {r['phase']}: {r['attention_why']}" for r in rows)]


def generate_notes(rows: list[dict[str, Any]], version: str) -> list[str]:
    """What the figures of a generation mean."""
    first = rows[0]
    how = {"cpu": "one thread, its CPU time", "wall": f"{first['threads']} threads"}.get(first["clock"], "CUDA, host included")
    worst = max(abs(r["ratio"] - 1) for r in rows)
    least, most = min(r["ratio_p10"] for r in rows), max(r["ratio_p90"] for r in rows)
    bounds = "bound: the same operators at the measured ceilings, fully overlapped, no launches"
    return [
        "",
        f"{first['model']} with random weights in {first['dtype']} on {first['device']}; torch {version}, {how}; "
        f"{first['new_tokens']:,} tokens, greedy, {first['cache']} cache; head: the LM head, on the last position or on all",
        f"in the cache {format_bytes(first['allocated_bytes'])}, predicted {format_bytes(first['predicted_bytes'])}; 'cache "
        "saves': a run's time over that with the cache; extra bytes: predicted, of all steps, beside those of the operators",
        "predicted: each operator at this machine's rates for products of so few rows and for activations, the extra bytes, and "
        f"the host, {seconds(first['host_s'])} a step; rates sampled between the steps; {bounds}",
        f"measured is within {worst:.0%} of predicted in each run; of single steps 80 % lie within {least:.2f} to {most:.2f}×",
    ]
