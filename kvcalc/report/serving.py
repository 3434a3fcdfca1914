"""What requests look like as tables."""

from collections.abc import Callable, Sequence

from kvcalc.report.export import Record
from kvcalc.report.layout import Column, Table, alike_by_gpu
from kvcalc.report.memory_text import FITS, marked_columns, memory_notes, memory_sentences
from kvcalc.report.redundancy import no_cache_table
from kvcalc.report.tables import (
    DEPLOYED,
    comparable,
    fallback_notes,
    integer,
    node_notes,
    predictions_first,
    ratio,
    seconds,
    time_note,
    without_named_engine,
)  # fmt: skip
from kvcalc.units import format_bytes, format_si

MONEY = "what a million output tokens cost, in the money of --price-per-hour"
LATENCY = (
    *DEPLOYED,
    Column("batch_size", "batch", integer, given=True),
    Column("input_len", "in", integer, given=True),
    Column("output_len", "out", integer, given=True),
    Column("ttft_s", "TTFT", seconds, rests="time", about="until the first token"),
    Column("uncached_ttft_s", "TTFT uncached", seconds, rests="time", about="without the cached prefix"),
    Column("tpot_s", "TPOT", seconds, rests="time", about="from one token to the next"),
    Column("e2e_s", "end to end", seconds, rests="time", about="TTFT + (out − 1) · TPOT"),
    Column("output_tokens_per_s", "tokens/s", lambda v: f"{v:,.1f}", rests="rate"),
    Column("cost_per_million_tokens", "per 1M tokens", lambda v: f"{v:,.2f}", rests="time", about=MONEY),
    Column("flops", "FLOP", lambda v: format_si(v)),
    Column("bytes", "bytes", lambda v: format_si(v, "B")),
    Column("tpot_first_s", "TPOT first", seconds, wide=True, rests="time", about="after the shortest cache"),
    Column("tpot_last_s", "TPOT last", seconds, wide=True, rests="time", about="after the longest"),
    Column("energy_per_token_j", "J/token", lambda v: f"{v:.3g}", wide=True, about="all GPUs at full power all the time"),
)
SPECULATION = (
    Column("batch_size", "batch", integer, given=True),
    Column("draft", "draft", right=False, given=True),
    Column("num_speculative_tokens", "drafted", integer),
    Column("acceptance_rate", "accepted", lambda v: f"{v:.0%}"),
    Column("tokens_per_step", "tokens/step", lambda v: f"{v:.4f}"),
    Column("speculative_tpot_s", "TPOT", seconds, rests="time"),
    Column("speculative_speedup", "speed-up", lambda v: f"{v:.2f}×"),
    Column("stops_paying_at_batch", "stops paying at batch", integer),
    Column("draft_s", "drafting", seconds, rests="time"),
    Column("verify_s", "verifying", seconds, rests="time"),
    Column("draft_weight_bytes", "draft weights", format_bytes),
    Column("draft_cache_bytes", "draft cache", format_bytes),
)


def latency_tables(records: Sequence[Record]) -> list[Table]:
    """The requests, and below them what they take without a cache and what speculation does."""
    records = predictions_first(records)
    notes = ["", time_note(records), *node_notes(records), *fallback_notes(records), *_offloaded(records)]
    notes += memory_notes(records)
    plain = {tuple(r.get(c.key) for c in (*LATENCY, FITS)): r for r in records}
    title = "\n".join([*memory_sentences(records), _sentence(records)])
    tables = [Table(list(plain.values()), marked_columns(records, LATENCY), title, notes)]
    if any(r.get("no_cache_head") for r in records):
        tables.append(no_cache_table(list(plain.values())))
    if any(r.get("draft") for r in records):
        lengths = [c for c in LATENCY if c.key in ("input_len", "output_len") and len({r[c.key] for r in records}) > 1]
        columns = [*SPECULATION[:2], *lengths, *SPECULATION[2:]]
        remark = "below 1× it costs more than it saves"
        tables.append(Table(records, columns, "\nSpeculation at mid length", ["", remark]))
    return tables


def _offloaded(records: Sequence[Record]) -> list[str]:
    """What weights in the host's memory cost, of each GPU."""
    found = {r["gpu"]: (r["cpu_offload_bytes"], r["cpu_offload_s"]) for r in records if r["cpu_offload_bytes"]}
    overlap = "beside the rest" if records[0]["basis"] == "datasheet" else "after the rest"
    cost = {gpu: f"take {seconds(time)} of each pass on its link, {overlap}" for gpu, (_, time) in found.items()}
    return [f"{gpu}: {format_bytes(held)} of the weights in the host's memory {cost[gpu]}" for gpu, (held, _) in found.items()]


def _sentence(records: Sequence[Record]) -> str:
    """The first request asked for, as a person would say it."""
    first = records[0]
    where = f"{first['model']} on {first['gpus']}× {first['gpu']}"
    if first["ttft_s"] is None:
        step = f"{_every(first)} at the most" if first["tpot_s"] else "no time"
        return f"{where}: {step}; when the first comes rests on matrix peaks, which {first['gpu']} does not give"
    about = "at the earliest " if first["time_basis"] == "bound" else ""
    later = f", then one every {seconds(first['tpot_s'])}" if first["tpot_s"] else ""
    tokens = f"{first['input_len']:,} token{'s' * (first['input_len'] != 1)} in and {first['output_len']:,} out"
    whole = f"{seconds(first['e2e_s'])} for {tokens}"
    users = f", {first['batch_size']:,} at once" if first["batch_size"] > 1 else ""
    most = "at most " if first["time_basis"] == "bound" else ""
    rate = f", {most}{first['output_tokens_per_s']:,.1f} tokens a second" if first["tpot_s"] else ""
    after = f"{about}after {seconds(first['ttft_s'])}{later}"
    told = f"{where}: the first token comes {after}; {whole}{users}{rate}{_speculated(records)}"
    return "; ".join([told, *_beside(first), *_fastest(records)])


def _every(first: Record) -> str:
    return f"a token every {seconds(first['tpot_s'])} at the least, {first['batch_size'] / first['tpot_s']:,.1f} a second"


def _beside(first: Record) -> list[str]:
    """What was asked for beside the request: its cost, and the lack of a cache."""
    words = []
    if first["uncached_ttft_s"]:
        words.append(f"{seconds(first['uncached_ttft_s'])} to the first without the {first['prefix_len']:,} cached tokens")
    if first.get("cost_per_million_tokens"):
        words.append(f"a million tokens cost {first['cost_per_million_tokens']:,.2f}")
    if first.get("speedup"):
        words.append(f"without the cache {ratio(first['speedup'])} as long")
    return words


def _fastest(records: Sequence[Record]) -> list[str]:
    """Of several that take the same request, the one that is through first, against the slowest."""
    first = records[0]
    asked = ("batch_size", "input_len", "output_len")
    alike = [r for r in comparable(records) if r["e2e_s"] and all(r[key] == first[key] for key in asked)]
    if not alike:
        return []
    best, worst = (choose(alike, key=lambda r: r["e2e_s"]) for choose in (min, max))
    if best["e2e_s"] == worst["e2e_s"]:
        return []
    name = names_of(alike)
    return [f"{name(best)} is {ratio(worst['e2e_s'] / best['e2e_s'])} as fast as {name(worst)}"]


def names_of(records: Sequence[Record], columns: Sequence[Column] = DEPLOYED) -> Callable[[Record], str]:
    """What sets the deployment of each of these records apart from the others'."""
    columns = without_named_engine(records, columns)
    apart = [c for c in columns if len({r[c.key] for r in records}) > 1 and not (c.apart and alike_by_gpu(records, c.key))]
    return lambda r: ", ".join(f"{c.title} {c.show(r[c.key])}" if c.right else c.show(r[c.key]) for c in apart)


def _speculated(records: Sequence[Record]) -> str:
    """What speculation makes of it, at its best where several drafts or rates are asked for; '' without one."""
    drafted = [r for r in comparable(records) if r.get("draft")]
    if not drafted:
        return ""
    best = max(drafted, key=lambda r: r["speculative_speedup"])
    most = "at best " if len(drafted) > 1 else ""
    users = f" at batch {best['batch_size']:,}" if len({r["batch_size"] for r in drafted}) > 1 else ""
    drafts = (
        f"{best['num_speculative_tokens']} tokens of {best['draft']} a step and {best['acceptance_rate']:.0%} of them accepted"
    )
    return f"; with {drafts} {most}{best['speculative_speedup']:.2f}× as fast{users}"
