"""What a server under load looks like as a table."""

from collections.abc import Sequence
from typing import Any

from kvcalc.report.export import Record
from kvcalc.report.layout import Column, Table
from kvcalc.report.serving import MONEY, names_of
from kvcalc.report.tables import (
    DEPLOYED,
    comparable,
    fallback_notes,
    integer,
    node_notes,
    predictions_first,
    seconds,
    time_note,
    without_named_engine,
)
from kvcalc.units import format_bytes


def _rate(value: float) -> str:
    """Requests a second: 1.86, 27.5, 5,580."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


SERVE = (
    *DEPLOYED,
    Column("policy", "policy", right=False, given=True),
    Column("cache", "cache", right=False, given=True),
    Column("rate", "req/s in", lambda v: f"{v:.4g}", given=True),
    Column("max_concurrency", "clients", integer, given=True),
    Column("prefix_hit_rate", "prefix hits", lambda v: f"{v or 0:.3g}", given=True),
    Column("requests_per_s", "req/s", _rate, rests="rate"),
    Column("throughput_tokens_per_s", "tokens/s", lambda v: f"{v:,.0f}", rests="rate", about="output tokens"),
    Column("ttft_p50_s", "TTFT p50", seconds, rests="time", about="until the first token, for half of the requests"),
    Column("ttft_p99_s", "TTFT p99", seconds, rests="time"),
    Column("tpot_p50_s", "TPOT p50", seconds, rests="time", about="from one token to the next"),
    Column("tpot_p99_s", "TPOT p99", seconds, rests="time"),
    Column("slo_attainment", "within SLO", lambda v: f"{v:.1%}", rests="rate"),
    Column("cost_per_million_tokens", "per 1M tokens", lambda v: f"{v:,.2f}", rests="time", about=MONEY),
    Column("diverges", "queue", lambda v: v if isinstance(v, str) else "diverges" if v else "stable", right=False),
    Column("completed", "done", integer),
    Column("rejected", "rejected", integer),
    Column("preemptions", "preempted", integer),
    Column("mean_batch_size", "batch", lambda v: f"{v:.1f}"),
    Column("tokens_per_step", "tokens/step", lambda v: f"{v:.2f}"),
    Column("kv_peak", "KV peak", lambda v: f"{v:.1%}"),
    Column("kv_waste", "KV waste", lambda v: f"{v:.1%}", about="allocated, but no token in it"),
    Column("padding_waste", "padding", lambda v: f"{v:.1%}"),
    Column("queueing_mean_s", "queueing", seconds, rests="time", about="mean until work begins"),
    Column(
        "e2e_p50_s", "end to end p50", seconds, rests="time", wide=True, about="until the last token, for half of the requests"
    ),
)


SUSTAINED = "sustained"
CLOSE = 1.1  # ratio of two rates that count as equal: simulated capacities vary by up to 10 %
SERVER = (*DEPLOYED, *(c for c in SERVE if c.key in ("policy", "cache", "prefix_hit_rate")))  # what sets servers apart


def serve_table(records: Sequence[Record]) -> Table:
    """What servers made of their load, a line each; of a sweep of rates, a line for each rate that was tried."""
    summaries = predictions_first([r for r in records if r.get("found_rate") is not None])
    is_sweep = 0 < len(summaries) < len(records)
    records = predictions_first(_tried(records) if is_sweep else records)
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
    if any(r.get("cache") == "contiguous" for r in records):
        wasted = dict.fromkeys(f"{r['cache']} {r['kv_waste']:.1%}" for r in records if r["kv_waste"] is not None)
        notes.append(f"of what is allocated, over time, holds no token: {', '.join(wasted)}")
    if first["draft"]:
        drafted = f"{first['num_speculative_tokens']} tokens of {first['draft']} a step"
        came = f": {first['tokens_per_step']:.2f}" if len(records) == 1 and first["tokens_per_step"] else ""
        rate = f"{first['acceptance_rate']:.0%} of them accepted"
        notes.append(f"speculation: {drafted}, {rate}; tokens/step, what came of it{came}")
    columns = without_named_engine(records, SERVE)
    if is_sweep:
        quiet.add("requests_per_s")
        highest = f"the highest rate with {_goals(first)}, at most" if _goals(first) else "the queue does not grow,"
        notes.append(f"{SUSTAINED}: {highest} 95% of saturation")
        notes.append(f"tokens/s: of {first['requests']:,} requests at each rate, their start and end included")
        return Table(records, [c for c in columns if c.key not in quiet], _sustained(summaries), notes)
    said = _sustained(summaries) if summaries else "; ".join([_served(first, *_sweep(records)), *_best(records)])
    return Table(records, [c for c in columns if c.key not in quiet], said, notes)


def _tried(records: Sequence[Record]) -> list[Record]:
    """Return a sweep's rows for each rate that was tried. The row of the sustained rate says so in place of its queue."""
    rows: list[Record] = []
    sustained = None
    for r in records:
        if r["found_rate"] is not None:
            sustained = r["rate"]
        else:
            rows.append({**r, "diverges": SUSTAINED} if r["rate"] == sustained else r)
    return rows


def _sustained(summaries: Sequence[Record]) -> str:
    """Return how many requests per second a server sustains and how long half of them wait.

    Of several servers it is the one with the highest rate, or of rates that are hardly lower the one with the shortest wait.
    """
    alike = comparable(summaries)
    close = [r for r in alike if r["found_rate"] * CLOSE >= max(r["found_rate"] for r in alike)]
    best = min(close, key=lambda r: r["ttft_p50_s"] or 0.0)
    columns = [c for c in SERVER if c.key not in ("model", "gpu")]
    name = names_of(alike, columns)(best)
    where = f"{_where(best)}{' with ' * bool(name)}{name}"
    if not best["completed"]:
        return f"{where} serves none of these requests"
    if not best["found_rate"]:
        return f"{where} keeps no promise of {_goals(best)}, not even to one request at a time"
    bound = best["time_basis"] == "bound"
    rate = f"{where} sustains {'at most ' * bound}{_rate(best['found_rate'])} requests/s"
    if _goals(best):
        return f"{rate} with {_goals(best)}, for 99 of 100 requests"
    wait = f"at {'least' if bound else 'most'} {seconds(best['ttft_p50_s'])}"
    return f"{rate}, and half of the requests wait {wait} for the first token"


def _where(record: Record) -> str:
    """Return the model and the GPUs, those for prompts alone included."""
    return f"{record['model']} on {record.get('total_gpus', record['gpus'])}× {record['gpu']}"


def _limits(records: Sequence[Record]) -> list[str]:
    """What servers were held to, and the memory of their cache, a line each of those that differ."""
    found: dict[str, list[Record]] = {}
    for r in records:
        seats = f"{r['max_num_seqs']:,} sequence{'s' * (r['max_num_seqs'] > 1)}"
        limits = f"{seats} and {r['max_num_batched_tokens']:,} tokens a pass at most"
        room = f"cache {format_bytes(r['kv_budget_bytes'])} a GPU, {r['gpus']} GPU{'s' * (r['gpus'] > 1)}"
        found.setdefault(f"{limits}; {room}; seed {r['seed']}", []).append(r)
    if len(found) == 1:
        return list(found)
    by_gpu = sum(len({r["gpu"] for r in some}) for some in found.values()) == len({r["gpu"] for r in records})
    name = names_of(records, [c for c in DEPLOYED if c.key == "gpu"] if by_gpu else DEPLOYED)
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
    hits = dict.fromkeys((r["prefix_hit_share"], bool(r["prefix_hit_rate"])) for r in records if r.get("prefix_hit_share"))
    path = " to ".join(dict.fromkeys(seconds(each) for each in (paths[0], paths[-1]))) if paths else ""
    said = [f"client {records[0]['client']}: network, HTTP and tokenising add {path} to a first token"] if path else []
    stored = {True: ", one prefix of all requests, stored once", False: ""}
    return said + [f"a prefix cache holds {share:.0%} of the prompts' tokens{stored[one]}" for share, one in hits]


def _saturated(records: Sequence[Record]) -> list[str]:
    """Return the rate at which each server of a sweep of rates saturates."""
    swept = [r for r in records if r.get("rate") and r.get("capacity_requests_per_s")]
    if len({r["rate"] for r in swept}) < 2:
        return []
    name = names_of(swept, SERVER)
    found = dict.fromkeys((name(r), _rate(r["capacity_requests_per_s"])) for r in swept)
    return [f"{server}{': ' * bool(server)}saturated at about {most} requests a second" for server, most in found]


def _apart(records: Sequence[Record]) -> list[str]:
    """What replicas for prompts alone do, a line each of those that differ."""
    said: dict[str, dict[str, None]] = {}
    for r in records:
        if not r.get("prefill_replicas"):
            continue
        many = f"{r['prefill_replicas']:,} replica{'s' * (r['prefill_replicas'] > 1)} of their own"
        link = f"their caches take {seconds(r['transfer_s'])} on the link to the one that decodes"
        about = f"prompts on {many}, {r['total_gpus']:,} GPUs in all; {link}; no measured server of this kind is known"
        said.setdefault(about, {})[names_of(records)(r)] = None
    return [f"{', '.join(names)}: {about}" for about, names in said.items()] if len(said) > 1 else list(said)


def _goals(record: Record) -> str:
    """The limits on times that were asked for, '' where none was."""
    goals = [f"the first token within {seconds(record['slo_ttft'])}"] if record.get("slo_ttft") else []
    goals += [f"each further one within {seconds(record['slo_tpot'])}"] if record.get("slo_tpot") else []
    return ", ".join(goals)


def _best(records: Sequence[Record]) -> list[str]:
    """Of several servers under the load of the first, whose times can be compared, the one that does best: by tokens a second
    where clients wait for answers, else by how long half of the requests take at most.
    """
    first = records[0]
    if len(records) < 2:
        return []
    if first["rate"]:
        key, word, choose = "e2e_p50_s", "answers soonest at the median", min
    else:
        key, word, choose = "throughput_tokens_per_s", "serves the most, {:,.0f} tokens a second", max
    same = ("rate", "max_concurrency")
    alike = [r for r in comparable(records) if r[key] and all(r[k] == first[k] for k in same)]
    name = names_of(alike, SERVER)
    if len({*map(name, alike)}) < 2 or len({r[key] for r in alike}) < 2:
        return []
    best = choose(alike, key=lambda r: r[key])
    bound = " by its bound" if best["time_basis"] == "bound" else ""
    return [f"{name(best)} {word.format(best[key])}{bound}"]


def _sweep(records: Sequence[Record]) -> tuple[str, str, str]:
    """Words where clients or rates alone differ: the first load; tokens, and a first token, under the last on the same server."""
    first = records[0]
    swept = [key for key in ("max_concurrency", "rate") if len({r.get(key) for r in records}) > 1]
    alike = [r for r in records if all(r.get(c.key) == first.get(c.key) for c in SERVE[: len(DEPLOYED) + 2])]
    last = next((r for r in reversed(alike) if r["completed"]), first)
    if len(swept) != 1 or last is first or not all(r[swept[0]] for r in alike):
        return "", "", ""
    mine, theirs = (_load(r, swept[0]) for r in (first, last))
    tokens, half = f"{last['throughput_tokens_per_s']:,.0f} tokens", seconds(last["ttft_p50_s"])
    return f" {mine}", f", {tokens} {theirs}", f", {theirs} within {half}"


def _load(record: Record, key: str) -> str:
    """With so many clients, or at such a rate."""
    many = record[key]
    return f"at a rate of {many:.4g}" if key == "rate" else f"with {many:,} client{'s' * (many > 1)}"


def _served(record: Record, load: str, tokens: str, first_token: str) -> str:
    """What the server did with its load, as a person would say it, with the words of `_sweep`."""
    where = _where(record)
    if not record["completed"]:
        return f"{where} serves none of these requests"
    rate = f"{_rate(record['requests_per_s'])} requests and {record['throughput_tokens_per_s']:,.0f} tokens a second"
    most = "at most " if record["time_basis"] == "bound" else ""
    half = f"half of the requests see their first token within {seconds(record['ttft_p50_s'])}"
    cost = record.get("cost_per_million_tokens")
    paid = f"; a million tokens cost {cost:,.2f}" if cost else ""
    chosen = record.get("num_speculative_tokens_from")
    drafted = f"; {record['num_speculative_tokens']} drafted tokens a step, {chosen}" if chosen else ""
    goals = _goals(record)
    kept = f"; {record['slo_attainment']:.1%} have {goals}" if goals else ""
    return f"{where} serves {most}{rate}{load}{tokens}; {half}{first_token}{kept}{paid}{drafted}"
