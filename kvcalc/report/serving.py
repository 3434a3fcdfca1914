"""What a request and a server look like as tables."""

from collections.abc import Sequence

from kvcalc.report.export import Record
from kvcalc.report.tables import Column, integer, ratio, seconds, show
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
    Column("no_cache_e2e_s", "no cache", seconds),
    Column("speedup", "cache saves", ratio),
)
SPECULATION = (
    Column("draft", "draft", right=False),
    Column("num_speculative_tokens", "drafted", integer),
    Column("acceptance_rate", "accepted", lambda v: f"{v:.0%}"),
    Column("tokens_per_step", "tokens/step", lambda v: f"{v:.4f}"),
    Column("draft_s", "drafting", seconds),
    Column("verify_s", "verifying", seconds),
    Column("speculative_tpot_s", "TPOT", seconds),
    Column("speculative_speedup", "speed-up", lambda v: f"{v:.2f}×"),
    Column("stops_paying_at_batch", "stops paying at batch", integer),
    Column("draft_weight_bytes", "draft weights", format_bytes),
    Column("draft_cache_bytes", "draft cache", format_bytes),
)


def show_latency(records: Sequence[Record]) -> None:
    """The requests, and below them what speculation does."""
    bases = ", ".join(dict.fromkeys(str(r["basis"]) for r in records))
    word = "datasheet bounds: at least so long" if bases == "datasheet" else f"basis: {bases}"
    show(records, LATENCY, notes=["", f"times: {word}; end to end = TTFT + (out − 1) · TPOT"])
    if any(r.get("draft") for r in records):
        show(records, SPECULATION, title="\nSpeculation at mid length", notes=["", "below 1× it costs more than it saves"])
