"""What a request and a server look like as tables."""

from collections.abc import Callable, Sequence
from typing import Any

from kvcalc.report.export import Record
from kvcalc.report.layout import Column, Table, alike_by_gpu
from kvcalc.report.redundancy import no_cache_table
from kvcalc.report.tables import DEPLOYED, fallback_notes, integer, node_notes, ratio, seconds, time_note
from kvcalc.units import format_bytes, format_si


def _rate(value: float) -> str:
    """Requests a second: 1.86, 27.5, 5,580."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


MONEY = "what a million output tokens cost, in the money of --price-per-hour"
LATENCY = (
    *DEPLOYED,
    Column("batch_size", "batch", integer, given=True),
    Column("input_len", "in", integer, given=True),
    Column("output_len", "out", integer, given=True),
    Column("ttft_s", "TTFT", seconds, rests="time", about="until the first token"),
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

SERVE = (
    *DEPLOYED,
    Column("policy", "policy", right=False, given=True),
    Column("cache", "cache", right=False, given=True),
    Column("rate", "req/s in", lambda v: f"{v:.4g}", given=True),
    Column("max_concurrency", "clients", integer, given=True),
    Column("requests_per_s", "req/s", _rate, rests="rate"),
    Column("throughput_tokens_per_s", "tokens/s", lambda v: f"{v:,.0f}", rests="rate", about="output tokens"),
    Column("ttft_p50_s", "TTFT p50", seconds, rests="time", about="until the first token, for half of the requests"),
    Column("ttft_p99_s", "TTFT p99", seconds, rests="time"),
    Column("tpot_p50_s", "TPOT p50", seconds, rests="time", about="from one token to the next"),
    Column("tpot_p99_s", "TPOT p99", seconds, rests="time"),
    Column("slo_attainment", "within SLO", lambda v: f"{v:.1%}", rests="rate"),
    Column("cost_per_million_tokens", "per 1M tokens", lambda v: f"{v:,.2f}", rests="time", about=MONEY),
    Column("diverges", "queue", lambda v: "diverges" if v else "stable", right=False),
    Column("completed", "done", integer),
    Column("rejected", "rejected", integer),
    Column("preemptions", "preempted", integer),
    Column("mean_batch_size", "batch", lambda v: f"{v:.1f}"),
    Column("tokens_per_step", "tokens/step", lambda v: f"{v:.2f}"),
    Column("kv_peak", "KV peak", lambda v: f"{v:.1%}"),
    Column("kv_waste", "KV waste", lambda v: f"{v:.1%}", about="allocated, but no token in it"),
    Column("padding_waste", "padding", lambda v: f"{v:.1%}"),
    Column("queueing_mean_s", "queueing", seconds, rests="time", about="mean until work begins"),
)


def latency_tables(records: Sequence[Record]) -> list[Table]:
    """The requests, and below them what they take without a cache and what speculation does."""
    notes = ["", time_note(records), *node_notes(records), *fallback_notes(records), *_offloaded(records)]
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
        step = f"a token every {seconds(first['tpot_s'])} at the least" if first["tpot_s"] else "no time"
        return f"{where}: {step}; when the first comes rests on matrix peaks, which {first['gpu']} does not give"
    about = "at the earliest " if first["time_basis"] == "bound" else ""
    later = f", then one every {seconds(first['tpot_s'])}" if first["tpot_s"] else ""
    tokens = f"{first['input_len']:,} token{'s' * (first['input_len'] != 1)} in and {first['output_len']:,} out"
    whole = f"{seconds(first['e2e_s'])} for {tokens}"
    users = f", {first['batch_size']:,} at once" if first["batch_size"] > 1 else ""
    told = f"{where}: the first token comes {about}after {seconds(first['ttft_s'])}{later}; {whole}{users}{_speculated(records)}"
    return "; ".join([told, *_beside(first), *_fastest(records)])


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
    alike = [r for r in records if r["e2e_s"] and all(r[key] == first[key] for key in asked)]
    best, worst = (choose(alike, key=lambda r: r["e2e_s"]) for choose in (min, max))
    if best["e2e_s"] == worst["e2e_s"]:
        return []
    name = _names(alike)
    return [f"{name(best)} is {ratio(worst['e2e_s'] / best['e2e_s'])} as fast as {name(worst)}"]


def _names(records: Sequence[Record], columns: Sequence[Column] = DEPLOYED) -> Callable[[Record], str]:
    """What sets the deployment of each of these records apart from the others'."""
    apart = [c for c in columns if len({r[c.key] for r in records}) > 1 and not (c.apart and alike_by_gpu(records, c.key))]
    return lambda r: ", ".join(f"{c.title} {c.show(r[c.key])}" if c.right else c.show(r[c.key]) for c in apart)


def _speculated(records: Sequence[Record]) -> str:
    """What speculation makes of it, at its best where several drafts or rates are asked for; '' without one."""
    drafted = [r for r in records if r.get("draft")]
    if not drafted:
        return ""
    best = max(drafted, key=lambda r: r["speculative_speedup"])
    most = "at best " if len(drafted) > 1 else ""
    users = f" at batch {best['batch_size']:,}" if len({r["batch_size"] for r in drafted}) > 1 else ""
    drafts = (
        f"{best['num_speculative_tokens']} tokens of {best['draft']} a step and {best['acceptance_rate']:.0%} of them accepted"
    )
    return f"; with {drafts} {most}{best['speculative_speedup']:.2f}× as fast{users}"


def serve_table(records: Sequence[Record]) -> Table:
    """What servers made of their load, a line each."""
    quiet = {c.key for c in SERVE if c.key in ("rejected", "preemptions", "padding_waste") and not any(r[c.key] for r in records)}
    first = records[0]
    plain: list[Record] = [{**r, "time_p90_error": None} for r in records]
    notes = ["", time_note(plain), *_server_errors(records), *_limits(records), *node_notes(records)]
    notes += [*fallback_notes(records), *_front_ends(records), *_apart(records), *_saturated(records)]
    padded = [r for r in records if r["padding_waste"]]
    if len(padded) == 1:
        (r,) = padded
        slots = f"{r['padded_slots']:,} of {r['token_slots']:,} token slots hold padding, {r['padding_waste']:.1%}"
        notes.append(f"{r['policy']} batches: {slots}")
    if any(r["cache"] == "contiguous" for r in records):
        wasted = dict.fromkeys(f"{r['cache']} {r['kv_waste']:.1%}" for r in records if r["kv_waste"] is not None)
        notes.append(f"of what is allocated, over time, holds no token: {', '.join(wasted)}")
    if first["draft"]:
        drafted = f"{first['num_speculative_tokens']} tokens of {first['draft']} a step"
        came = f": {first['tokens_per_step']:.2f}" if len(records) == 1 and first["tokens_per_step"] else ""
        rate = f"{first['acceptance_rate']:.0%} of them accepted"
        notes.append(f"speculation: {drafted}, {rate}; tokens/step, what came of it{came}")
    return Table(records, [c for c in SERVE if c.key not in quiet], "; ".join([_served(first), *_best(records)]), notes)


def _limits(records: Sequence[Record]) -> list[str]:
    """What servers were held to, and the memory of their cache, a line each of those that differ."""
    found: dict[str, list[Record]] = {}
    for r in records:
        limits = f"{r['max_num_seqs']:,} sequences and {r['max_num_batched_tokens']:,} tokens a pass at most"
        room = f"cache {format_bytes(r['kv_budget_bytes'])} a GPU, {r['gpus']} GPU{'s' * (r['gpus'] > 1)}"
        found.setdefault(f"{limits}; {room}; seed {r['seed']}", []).append(r)
    if len(found) == 1:
        return list(found)
    by_gpu = sum(len({r["gpu"] for r in some}) for some in found.values()) == len({r["gpu"] for r in records})
    name = _names(records, [c for c in DEPLOYED if c.key == "gpu"] if by_gpu else DEPLOYED)
    return [f"{', '.join(dict.fromkeys(map(name, some)))}: {said}" for said, some in found.items()]


def _server_errors(records: Sequence[Record]) -> list[str]:
    """How far nine of ten measured servers lie from each figure, a line each of what is not alike."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for r in records:
        each = tuple(r.get(f"{name}_p90_error") for name in ("tpot", "ttft", "throughput"))
        known = tuple(error for error in each if error is not None)
        if len(known) == len(each):
            found.setdefault(known, []).append(f"{r['gpu']} under {r['basis'].removesuffix(' calibration')}")
    said = []
    for (tpot, ttft, rate), names in found.items():
        of = f" of {', '.join(dict.fromkeys(names))}" if len(found) > 1 or len({*names}) < len(records) else ""
        said.append(
            f"nine of ten measured servers{of} lie within {tpot:.0%} (TPOT), {ttft:.0%} (mean TTFT), {rate:.0%} (tokens/s)"
        )
    return said


def _front_ends(records: Sequence[Record]) -> list[str]:
    """What the way to the engine adds to each first token, and what a prefix cache holds of the prompts."""
    paths = sorted(r["front_end_s"] for r in records if r.get("front_end_s"))
    hits = dict.fromkeys(r["prefix_hit_share"] for r in records if r.get("prefix_hit_share"))
    path = " to ".join(dict.fromkeys(seconds(each) for each in (paths[0], paths[-1]))) if paths else ""
    said = [f"client {records[0]['client']}: network, HTTP and tokenising add {path} to a first token"] if path else []
    return said + [f"a prefix cache holds {share:.0%} of the prompts' tokens" for share in hits]


def _saturated(records: Sequence[Record]) -> list[str]:
    """Of a sweep of rates, the one that no longer run could keep up with, a line each of servers that differ."""
    found: dict[str, set[float]] = {}
    for r in records:
        if r.get("rate") and r.get("capacity_requests_per_s"):
            found.setdefault(_rate(r["capacity_requests_per_s"]), set()).add(r["rate"])
    return [f"saturated at about {most} requests a second" for most, rates in found.items() if len(rates) > 1]


def _apart(records: Sequence[Record]) -> list[str]:
    """What replicas for prompts alone do, a line each of those that differ."""
    said = dict[str, None]()
    for r in records:
        if not r.get("prefill_replicas"):
            continue
        many = f"{r['prefill_replicas']:,} replica{'s' * (r['prefill_replicas'] > 1)} of their own"
        link = f"their caches take {seconds(r['transfer_s'])} on the link to the one that decodes"
        said[f"prompts on {many}, {r['total_gpus']:,} GPUs in all; {link}; no measured server of this kind is known"] = None
    return list(said)


def _found(record: Record) -> str:
    """The highest rate that keeps the goals, as a person would say it."""
    where = f"{record['model']} on {record.get('total_gpus', record['gpus'])}× {record['gpu']}"
    goals = [f"the first token within {seconds(record['slo_ttft'])}"] if record["slo_ttft"] else []
    goals += [f"each further one within {seconds(record['slo_tpot'])}"] if record["slo_tpot"] else []
    if not record["found_rate"]:
        return f"{where} keeps no promise of {', '.join(goals)}, not even to one request at a time"
    most = "at most " if record["time_basis"] == "bound" else ""
    return f"{where} takes {most}{record['found_rate']:.3g} requests a second with {', '.join(goals)}, for 99 of 100 requests"


def _best(records: Sequence[Record]) -> list[str]:
    """Of several servers under the load of the first, the one that does best: by the rate found, else by tokens a second where
    clients wait for answers, else by how long half of the requests take at most.
    """
    first = records[0]
    if len(records) < 2:
        return []
    key, word, choose = next(
        found
        for told, found in (
            (first.get("found_rate") is not None, ("found_rate", "takes the most, {:.3g} a second", max)),
            (not first["rate"], ("throughput_tokens_per_s", "serves the most, {:,.0f} tokens a second", max)),
            (True, ("e2e_p50_s", "answers soonest, within {} at the median", min)),
        )
        if told
    )
    alike = [r for r in records if r[key] and (key == "found_rate" or all(r[k] == first[k] for k in ("rate", "max_concurrency")))]
    name = _names(alike, (*DEPLOYED, *(c for c in SERVE if c.key in ("policy", "cache"))))
    if len({*map(name, alike)}) < 2 or len({r[key] for r in alike}) < 2:
        return []
    best = choose(alike, key=lambda r: r[key])
    return [f"{name(best)} {word.format(seconds(best[key]) if key == 'e2e_p50_s' else best[key])}"]


def _served(record: Record) -> str:
    """What the server did with its load, as a person would say it."""
    if record.get("found_rate") is not None:
        return _found(record)
    where = f"{record['model']} on {record.get('total_gpus', record['gpus'])}× {record['gpu']}"
    if not record["completed"]:
        return f"{where} serves none of these requests"
    rate = f"{_rate(record['requests_per_s'])} requests and {record['throughput_tokens_per_s']:,.0f} tokens a second"
    most = "at most " if record["time_basis"] == "bound" else ""
    half = f"half of the requests see their first token within {seconds(record['ttft_p50_s'])}"
    cost = record.get("cost_per_million_tokens")
    paid = f"; a million tokens cost {cost:,.2f}" if cost else ""
    chosen = record.get("num_speculative_tokens_from")
    drafted = f"; {record['num_speculative_tokens']} drafted tokens a step, {chosen}" if chosen else ""
    return f"{where} serves {most}{rate}; {half}{paid}{drafted}"
