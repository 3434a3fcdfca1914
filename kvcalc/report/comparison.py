"""What `compare` shows: the variants' figures, then what was held equal and what is known of their quality."""

from collections.abc import Iterable, Sequence
from typing import Any

from kvcalc.model.memory import cache_size
from kvcalc.model.size import assumptions
from kvcalc.report.layout import Table
from kvcalc.report.memory_text import marked_columns, memory_notes, memory_sentences
from kvcalc.report.tables import (
    COMPARE_COLUMNS,
    GPU_COLUMNS,
    fallback_notes,
    node_notes,
    percent,
    predictions_first,
    ratio,
    time_note,
)
from kvcalc.timing.deployment import Deployment
from kvcalc.units import format_bytes, format_count, format_si


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
        *(node_notes(records) + fallback_notes(records) + memory_notes(records) if timed else ()),
        "",
        *_known_of(once.values()),
    ]
    rows = [r | {"step_s": r["roofline_s"] if r["time_s"] is None else r["time_s"]} for r in records] if timed else records
    columns = COMPARE_COLUMNS if len(gpus) == 1 else (COMPARE_COLUMNS[0], GPU_COLUMNS[0], *COMPARE_COLUMNS[1:])
    title = "\n".join([*memory_sentences(records), compared(deployments, records)])
    ranked = predictions_first(rows) if timed else rows
    return [Table(ranked, marked_columns(records, columns), title, ["", *lines])]


def compared(deployments: Sequence[Deployment], records: Sequence[dict[str, Any]]) -> str:
    """What the records of the first deployment say in a sentence."""
    first = records[: len(records) // len(deployments)]
    return _sentence(deployments[0].model.name, first, _own_bytes(deployments[0], records[0]))


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
    kept += " a GPU" * (first["gpus"] > 1)
    read = max(alike, key=_read_less)
    reads_less = _read_less(read) > max(1.0, _read_less(best))
    if len(alike) == 1 and own:
        times = best["kv_cache_bytes"] / own
        less = "as much as" if times == 1 else f"{ratio(max(times, 1 / times))} {'more' if times > 1 else 'less'} than"
        return f"{model} with {_named(first)} {keep} {kept}, {less} with its own attention, {format_bytes(own)}"
    if best is first:
        also = f", {read['variant']} reads {_less(_read_less(read))}" if reads_less else ""
        return f"{model} with {_named(first)} {keep} {kept}; no other variant asked for keeps less{also}"
    also = f"; {read['variant']} reads the least, {_less(_read_less(read))}" if reads_less else ""
    less = f"{_less(best['stored_reduction'])} than with {_named(first)}"
    return f"{model} with {_named(best)} {keep} {kept}, {less}{also}"


def _read_less(record: dict[str, Any]) -> float:
    """Return how many times fewer bytes a variant reads than the reference; 0 if it reads none."""
    return float(record["read_reduction"] or 0)


def _less(reduction: float) -> str:
    """Return a reduction in words: `8× less`, or in percent if it rounds to 1×."""
    text = ratio(reduction)
    return f"{percent(1 - 1 / reduction)} less" if text == "1×" else f"{text} less"


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
