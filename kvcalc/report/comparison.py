"""What `compare` shows: the variants' figures, then what was held equal and what is known of their quality."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from kvcalc.model.memory import cache_size
from kvcalc.model.size import assumptions
from kvcalc.planning.heads import over_heads
from kvcalc.planning.variants import Variant
from kvcalc.report.chart import Axis, Chart, Series, bar_chart, bytes_tick, joined, tokens_tick
from kvcalc.report.figures import cache_vs_context
from kvcalc.report.figures_latency import told_apart
from kvcalc.report.layout import Table
from kvcalc.report.tables import COMPARE_COLUMNS, GPU_COLUMNS, fallback_notes, node_notes, ratio, seconds, time_note
from kvcalc.timing.deployment import Deployment
from kvcalc.units import format_bytes, format_count, format_si

SHARING = ("mha", "gqa", "mqa")
SIDES = (
    ("KV cache stored", "kv_cache_bytes", bytes_tick),
    ("Read by a decode step", "kv_cache_read_bytes", bytes_tick),
    ("Attention's FLOP per byte read", "attention_intensity", lambda v: f"{v:,.3g}"),
    ("Decode step", "time_s", lambda v: seconds(v) if v else "0"),
)


def compare_chart(
    deployments: Sequence[Deployment], chosen: Sequence[tuple[str, Variant]], records: Sequence[dict[str, Any]], last: int
) -> Chart:
    """What the first records of each variant say, side by side: cache, bytes read, FLOP/B of attention, decode step.

    Then the stored cache over context up to `last` tokens and, where heads are shared, `heads_chart`. Of several deployments,
    whose records follow each other, a figure that is the same of all stands once.
    """
    first, each = records[0], len(records) // len(deployments)
    timed = first["weight_bytes"] is not None  # else the dimensions alone are known
    about = f"{deployments[0].model.name}, {first['batch_size']:,} × {first['context']:,} tokens"
    names = told_apart(deployments) if len(deployments) > 1 else [deployments[0].gpu.name]
    rows = [_firsts(records[n * each : (n + 1) * each], chosen) for n in range(len(deployments))]
    charts: list[Chart] = []
    for title, key, tick in SIDES if timed else SIDES[:-1]:
        found = [_side(title, about, mine, key, tick) for mine in rows]
        same = key != "time_s" and all(chart.series == found[0].series for chart in found)
        longest = (max(y for chart in found for y in chart.series[0].ys),)
        each_own = [
            c._replace(title=f"{title}: {name}", y=c.y._replace(shown=longest)) for c, name in zip(found, names, strict=True)
        ]
        charts += found[:1] if same else each_own
    curves = [_curve(d, chosen, first["batch_size"], last, deployments if timed else ()) for d in deployments]
    charts += {str(curve.series): curve for curve in curves}.values()
    if timed and any(name.lower().startswith(SHARING) for name, _ in chosen):
        heads = [heads_chart(d, first["context"], first["batch_size"]) for d in deployments]
        charts += [chart for chart in heads if chart]
    return joined(charts)


def _firsts(records: Sequence[dict[str, Any]], chosen: Sequence[tuple[str, Variant]]) -> list[dict[str, Any]]:
    """Of one deployment's records those of each variant at the first batch and context."""
    first = records[0]
    alike = {r["variant"]: r for r in reversed(records) if all(r[key] == first[key] for key in ("batch_size", "context"))}
    return [alike[name] for name, _ in chosen]


def _curve(
    deployment: Deployment, chosen: Sequence[tuple[str, Variant]], batch_size: int, last: int, beside: Sequence[Deployment]
) -> Chart:
    """The stored cache of every variant over context, beside the memories of these deployments' GPUs."""
    precision, named = deployment.precision, []
    for name, variant in chosen:
        dtype = variant.kv_cache_dtype or precision.kv_cache_dtype
        stored = msgspec.structs.replace(precision, kv_cache_dtype=dtype)
        named.append((_called(name, variant.model.attention), variant.model, stored))
    return cache_vs_context(named, list({d.gpu.name: d.gpu for d in beside}.values()), batch_size, last)


def _side(title: str, about: str, rows: Sequence[dict[str, Any]], key: str, tick: Any) -> Chart:
    """One figure of every variant as bars; a step is as predicted, else its bound."""
    values = tuple(float((r["roofline_s"] if r[key] is None and key == "time_s" else r[key]) or 0) for r in rows)
    names = [_called(r["variant"], r["attention"]) for r in rows]
    return bar_chart(title, about, names, values, tick)


def _called(variant: str, attention: str) -> str:
    """A variant as it was typed; the model's own by what that is."""
    return f"{attention} as it is" if variant == "none" else variant


def heads_chart(deployment: Deployment, context: int, batch_size: int) -> Chart | None:
    """Cache, step and published scores over the number of KV heads, each as a share of MHA's; None where there is no curve."""
    found = over_heads(deployment, context, batch_size)
    if not found:
        return None
    heads = tuple(map(float, found.heads))
    series = [Series("KV cache", heads, tuple(found.cache)), Series("decode step", heads, tuple(found.step))]
    for what, counts, scores in found.published:
        series.append(Series(what, tuple(map(float, counts)), tuple(scores), "points"))
    subtitle = f"{deployment.model.name} on {deployment.gpu.name}, {batch_size:,} × {context:,} tokens; times: {deployment.basis}"
    share = Axis("share of MHA's", log=False, tick=lambda v: f"{v:.0%}")
    return Chart("Fewer KV heads", subtitle, Axis("KV heads", tick=tokens_tick), share, tuple(series))


def compare_tables(deployments: Sequence[Deployment], records: Sequence[dict[str, Any]], block_size: int) -> list[Table]:
    """Every record, and below them what is known of every variant."""
    model, gpus = deployments[0].model, [*dict.fromkeys(d.gpu.name for d in deployments)]
    timed = records[0]["weight_bytes"] is not None  # else the dimensions alone are known
    held = dict.fromkeys(assumptions(model, d.precision, block_size, d.parallelism, timed) for d in deployments)
    once = {record["variant"]: record for record in records}
    lines = [
        f"less: against {records[0]['reference']}" + (f"; one decode step on {', '.join(gpus)}" if timed else ""),
        "; ".join([*held, time_note(records)] if timed else held),
        *_sight(once),
        *(node_notes(records) + fallback_notes(records) + _too_heavy(deployments, records) if timed else ()),
        "",
        *_known_of(once.values()),
    ]
    rows = [r | {"step_s": r["roofline_s"] if r["time_s"] is None else r["time_s"]} for r in records] if timed else records
    columns = COMPARE_COLUMNS if len(gpus) == 1 else (COMPARE_COLUMNS[0], GPU_COLUMNS[0], *COMPARE_COLUMNS[1:])
    return [
        Table(
            rows,
            columns,
            _sentence(model.name, records[: len(records) // len(deployments)], _own_bytes(deployments[0], records[0])),
            ["", *lines],
        )
    ]


def _too_heavy(deployments: Sequence[Deployment], records: Sequence[dict[str, Any]]) -> list[str]:
    """Why no sequence fits, where the weights alone take all that a GPU has."""
    least = min(record["weight_bytes"] for record in records)
    small = {d.gpu.name: d.gpu.usable_bytes for d in deployments if d.gpu.usable_bytes <= least}
    each = ", ".join(f"{format_bytes(room)} of {name}" for name, room in small.items())
    held = f"users 0: the weights alone, {format_bytes(least)} on each GPU, leave nothing of the {each}; --tp shares them"
    return [held] if small else []


def _sight(once: dict[str, dict[str, Any]]) -> list[str]:
    """What windows reach, and what eviction keeps to choose by."""
    reach = [f"{name} {r['receptive_field']:,} tokens" for name, r in once.items() if r["receptive_field"]]
    scores = [
        f"{name} {format_bytes(r['eviction_score_bytes'])} and {format_si(r['eviction_flops'], 'FLOP')} a step"
        for name, r in once.items()
        if r["eviction_score_bytes"]
    ]
    found = [f"receptive field, layers × window: {', '.join(reach)}"] if reach else []
    if scores:
        found.append(f"beside the cache, a score per token kept and KV head, by which eviction chooses: {', '.join(scores)}")
    return found


def _own_bytes(deployment: Deployment, first: dict[str, Any]) -> int:
    """What the model's own attention keeps where a first record's variant is; 0 where that is its own."""
    if first["variant"].lower() == "none" or not first["kv_cache_bytes"]:
        return 0
    model, precision, ranks = deployment.model, deployment.precision, deployment.parallelism
    return int(cache_size(model, first["context"], first["batch_size"], precision, parallelism=ranks).stored)


def _sentence(model: str, records: Sequence[dict[str, Any]], own: int) -> str:
    """The variant that keeps least against the reference, at the first context and batch asked for; of one variant alone
    against `own`, the bytes of the model's own attention, unless they are 0."""
    first = records[0]
    alike = [r for r in records if all(r[key] == first[key] for key in ("context", "batch_size"))]
    best = min(alike, key=lambda r: r["kv_cache_bytes"])
    keep = "keep" if first["weight_bytes"] is None else "keeps"  # layers whose dimensions alone are known
    users = f"{first['batch_size']:,} × " if first["batch_size"] > 1 else ""
    kept = f"{format_bytes(best['kv_cache_bytes'])} for {users}{first['context']:,} tokens"
    read = max(alike, key=lambda r: r["read_reduction"] or 0)
    if len(alike) == 1 and own:
        times = best["kv_cache_bytes"] / own
        less = "as much as" if times == 1 else f"{ratio(max(times, 1 / times))} {'more' if times > 1 else 'less'} than"
        return f"{model} with {_named(first)} {keep} {kept}, {less} with its own attention, {format_bytes(own)}"
    if best is first:
        also = f", {read['variant']} reads {ratio(read['read_reduction'])} less" if read is not first else ""
        return f"{model} with {_named(first)} {keep} {kept}; no other variant asked for keeps less{also}"
    also = f"; {read['variant']} reads the least, {ratio(read['read_reduction'])} less" if read is not best else ""
    less = f"{ratio(best['stored_reduction'])} less than with {_named(first)}"
    return f"{model} with {_named(best)} {keep} {kept}, {less}{also}"


def _named(record: dict[str, Any]) -> str:
    """A variant in a sentence: what it was called, or that nothing was swapped."""
    return "its own attention" if record["variant"].lower() == "none" else str(record["variant"])


def _known_of(records: Iterable[dict[str, Any]]) -> list[str]:
    """What is known of each variant, once of those of which the same is."""
    names: dict[str, list[str]] = {}
    for record in records:
        names.setdefault(_known(record), []).append(record["variant"])
    return [f"{', '.join(map(_told, those))} — {text}" for text, those in names.items()]


def _told(variant: str) -> str:
    return f"{variant} (as it is)" if variant.lower() == "none" else variant


def _known(record: dict[str, Any]) -> str:
    """What was held equal in a variant, and what is known of its quality."""
    words = [f"held equal: {record['held_equal']}"]
    words += [f"heads {record['head_diversity']}, trades {record['trades']}"] if record["head_diversity"] else []
    own, plain = record["parameters"], record.get("mha_parameters")
    if own and plain and record["attention"].startswith(("MLA", "DSA")) and own != plain:
        than = f"{'fewer' if own < plain else 'more'} than the {format_count(plain)} with the MHA that it replaces"
        words.append(f"{format_count(own)} parameters, {than}")
    words += [f"published: {record['quality']}"] if record["quality"] else []
    return "; ".join(words)
