"""What a request and a server look like as tables."""

from collections.abc import Sequence

from kvcalc.report.export import Record
from kvcalc.report.layout import Column, Table
from kvcalc.report.redundancy import no_cache_table
from kvcalc.report.tables import error_bar, fallback_notes, integer, seconds
from kvcalc.units import format_bytes, format_si

LATENCY = (
    Column("model", "model", right=False),
    Column("gpu", "GPU", right=False),
    Column("batch_size", "batch", integer),
    Column("input_len", "in", integer),
    Column("output_len", "out", integer),
    Column("ttft_s", "TTFT", seconds),
    Column("tpot_s", "TPOT", seconds),
    Column("tpot_first_s", "first", seconds),
    Column("tpot_last_s", "last", seconds),
    Column("e2e_s", "end to end", seconds),
    Column("output_tokens_per_s", "tokens/s", lambda v: f"{v:,.1f}"),
    Column("flops", "FLOP", lambda v: format_si(v)),
    Column("bytes", "moved", lambda v: format_si(v, "B")),
    Column("cost_per_million_tokens", "per 10^6 out", lambda v: f"{v:,.2f}"),
)
SPECULATION = (
    Column("batch_size", "batch", integer, given=True),
    Column("draft", "draft", right=False, given=True),
    Column("num_speculative_tokens", "drafted", integer),
    Column("acceptance_rate", "accepted", lambda v: f"{v:.0%}"),
    Column("tokens_per_step", "tokens/step", lambda v: f"{v:.4f}"),
    Column("speculative_tpot_s", "TPOT", seconds),
    Column("speculative_speedup", "speed-up", lambda v: f"{v:.2f}×"),
    Column("stops_paying_at_batch", "stops paying at batch", integer),
    Column("draft_s", "drafting", seconds),
    Column("verify_s", "verifying", seconds),
    Column("draft_weight_bytes", "draft weights", format_bytes),
    Column("draft_cache_bytes", "draft cache", format_bytes),
)

SERVE = (
    Column("model", "model", right=False),
    Column("gpu", "GPU", right=False),
    Column("policy", "policy", right=False),
    Column("cache", "cache", right=False),
    Column("rate", "req/s in", lambda v: f"{v:g}"),
    Column("max_concurrency", "clients", integer),
    Column("completed", "done", integer),
    Column("rejected", "rejected", integer),
    Column("requests_per_s", "req/s", lambda v: f"{v:.3g}"),
    Column("throughput_tokens_per_s", "tokens/s", lambda v: f"{v:,.0f}"),
    Column("ttft_p50_s", "TTFT p50", seconds),
    Column("ttft_p99_s", "p99", seconds),
    Column("tpot_p50_s", "TPOT p50", seconds),
    Column("tpot_p99_s", "p99", seconds),
    Column("queueing_mean_s", "queueing", seconds),
    Column("mean_batch_size", "batch", lambda v: f"{v:.1f}"),
    Column("tokens_per_step", "tokens/step", lambda v: f"{v:.2f}"),
    Column("padding_waste", "padding", lambda v: f"{v:.1%}"),
    Column("kv_waste", "KV waste", lambda v: f"{v:.1%}"),
    Column("kv_peak", "KV peak", lambda v: f"{v:.1%}"),
    Column("preemptions", "preempted", integer),
    Column("slo_attainment", "within SLO", lambda v: f"{v:.1%}"),
    Column("cost_per_million_tokens", "per 10^6 out", lambda v: f"{v:,.2f}"),
    Column("diverges", "queue", lambda v: "diverges" if v else "stable", right=False),
)


def latency_tables(records: Sequence[Record]) -> list[Table]:
    """The requests, and below them what they take without a cache and what speculation does."""
    bases = ", ".join(dict.fromkeys(str(r["basis"]) for r in records))
    word = "datasheet bounds: at least so long" if bases == "datasheet" else f"predicted by the {bases}"
    notes = ["", f"times: {word}{error_bar(records)}; end to end = TTFT + (out − 1) · TPOT", *fallback_notes(records)]
    plain = {tuple(r.get(c.key) for c in LATENCY): r for r in records}
    tables = [Table(list(plain.values()), LATENCY, _sentence(records), notes)]
    if any(r.get("no_cache_head") for r in records):
        tables.append(no_cache_table(list(plain.values())))
    if any(r.get("draft") for r in records):
        lengths = [c for c in LATENCY if c.key in ("input_len", "output_len") and len({r[c.key] for r in records}) > 1]
        columns = [*SPECULATION[:2], *lengths, *SPECULATION[2:]]
        remark = "below 1× it costs more than it saves"
        tables.append(Table(records, columns, "\nSpeculation at mid length", ["", remark]))
    return tables


def _sentence(records: Sequence[Record]) -> str:
    """The first request asked for, as a person would say it."""
    first = records[0]
    about = "" if first["basis"] != "datasheet" else "at the earliest "
    later = f", then one every {seconds(first['tpot_s'])}" if first["tpot_s"] else ""
    whole = f"{seconds(first['e2e_s'])} for {first['input_len']:,} tokens in and {first['output_len']:,} out"
    users = f", {first['batch_size']:,} at once" if first["batch_size"] > 1 else ""
    where = f"{first['model']} on {first['gpus']}× {first['gpu']}"
    return f"{where}: the first token comes {about}after {seconds(first['ttft_s'])}{later}; {whole}{users}"


def serve_table(records: Sequence[Record]) -> Table:
    """What servers made of their load, a line each."""
    quiet = {c.key for c in SERVE if c.key in ("rejected", "preemptions", "padding_waste") and not any(r[c.key] for r in records)}
    bases = ", ".join(dict.fromkeys(str(r["basis"]) for r in records))
    word = "datasheet bounds, so rates are at most these" if bases == "datasheet" else f"predicted by the {bases}"
    first = records[0]
    limits = f"{first['max_num_seqs']:,} sequences and {first['max_num_batched_tokens']:,} tokens a pass at most"
    room = f"cache {format_bytes(first['kv_budget_bytes'])} a GPU, {first['gpus']} GPU{'s' * (first['gpus'] > 1)}"
    notes = ["", f"times: {word}; {limits}; {room}; seed {first['seed']}", *fallback_notes(records)]
    if first["draft"]:
        drafted = f"{first['num_speculative_tokens']} tokens of {first['draft']} a step"
        notes.append(f"speculation: {drafted}, {first['acceptance_rate']:.0%} of them accepted; tokens/step: what came of it")
    notes.append("tokens/s: output tokens; KV waste: allocated, but no token in it; queueing: mean until work begins")
    half = f"half of the requests see their first token within {seconds(first['ttft_p50_s'])}" if first.get("ttft_p50_s") else ""
    rate = f"{first['requests_per_s']:.3g} requests and {first['throughput_tokens_per_s']:,.0f} tokens a second"
    title = f"{first['model']} on {first['gpus']}× {first['gpu']} serves {rate}; {half}".rstrip("; ")
    return Table(records, [c for c in SERVE if c.key not in quiet], title, notes)
