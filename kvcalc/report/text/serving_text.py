"""Printed answers of `latency` and `serve`."""

from collections.abc import Callable

from msgspec.structs import replace

from kvcalc.errors import list_few
from kvcalc.records import Record, Records
from kvcalc.records.serving import LatencyRecord, NoCacheRecord, ServeRecord, SpeculationRecord
from kvcalc.report.row_names import (
    DEPLOYMENT,
    SERVER,
    WORDING,
    equal_records,
    sides,
    texts_by_name,
)
from kvcalc.report.text.fit_text import placement_lines
from kvcalc.report.text.table_layout import Table
from kvcalc.report.text.tables import (
    BOUND,
    FITS,
    answer_sentence,
    columns,
    comparable_records,
    digits,
    distinct_values,
    footnotes,
    marked_columns,
    memory_sentences,
    misfit_words,
    pass_details,
    pass_notes,
    plural,
    predictions_first,
    ratio,
    records_that_fit,
    seconds,
    time_footnotes,
    without_named_engine,
)
from kvcalc.units import format_bytes

GROWTH = (
    "Full attention for n tokens: O(n³) in total without a cache, O(n²) with it.",
    "Attention of a step at n tokens: O(n²) without a cache, O(n) with it.",
)
NO_CACHE = columns(
    NoCacheRecord,
    "gpu batch_size input_len output_len no_cache_head no_cache_ttft_s no_cache_tpot_last_s "
    "tpot_last_s no_cache_e2e_s speedup no_cache_flops no_cache_redundant_flops_share "
    "| no_cache_token_projections no_cache_redundant_projections",
    inputs="gpu batch_size input_len output_len",
)


VARIANTS = "gpus tensor_parallel_size dtype kv_cache_dtype engine basis"  # of a deployment
LENGTHS = "batch_size input_len output_len"
LATENCY = columns(
    LatencyRecord,
    f"model gpu {VARIANTS} {LENGTHS} ttft_s uncached_ttft_s tpot_s e2e_s decode_tokens_per_s "
    "sequences_per_s cost_per_million_tokens decode_cost_per_million_tokens flops bytes | "
    "tpot_first_s tpot_last_s output_tokens_per_s energy_per_token_j *",
    inputs=f"model gpu {LENGTHS}",
    optional=VARIANTS,
    hidden="fits max_num_seqs speedup",
)
SPECULATION = (
    *columns(LatencyRecord, f"gpu {LENGTHS}", inputs=f"gpu {LENGTHS}"),
    *columns(
        SpeculationRecord,
        "draft num_speculative_tokens acceptance_rate tokens_per_step speculative_tpot_s "
        "speculative_e2e_s speculative_speedup stops_paying_at_batch draft_s verify_s "
        "draft_weight_bytes draft_cache_bytes",
        inputs="draft",
    ),
)


LOAD_WORDING = texts_by_name("""
    batch_size: batch {:,}
    input_len: {:,} input tokens
    output_len: {:,} output tokens
""")


def latency_tables(records: Records) -> list[Table]:
    """Return the tables that `latency` prints, one to three.

    The first table has the times of each request. With `--no-cache`, the next table compares them
    with generation without a KV cache. With `--draft`, the last table shows speculative decoding.

    Args:
        records: Records of `latency`, one per deployment and request.
    """
    records = predictions_first(records)
    keys = [c.key for c in (*LATENCY, FITS)]
    rows = list({tuple(r.get(key) for key in keys): r for r in records}.values())
    short = memory_sentences(records)
    fitting_records = records_that_fit(records)
    no_cache = [r for r in rows if r.get("no_cache_head")]
    notes = pass_notes(
        records,
        *([] if fitting_records else short[:1]),
        "No TTFT: the GPU's compute peak is unknown."
        * any(r["ttft_s"] is None for r in records),
    )
    if any(r["gpus"] > 1 for r in records):
        notes.append("FLOP and bytes are of one GPU, or with pp of one GPU per stage.")
    drafted = records[0].get("draft")
    title = (_draft_sentence if drafted else _latency_sentence)(fitting_records or records)
    if rate := records[0].get("output_throughput"):
        cost = records[0]["cost_per_million_tokens"]
        title = (
            f"One million output tokens of {_server_words(records[0])} cost {cost:,.3f} at "
            f"{rate:,.0f} tokens/s and {cost * rate * 0.0036:,.2f} per hour."
        )
        notes.append("Costs are price ÷ the measured rate. Times are predictions.")
    elif records[0]["max_tpot_s"] and records[0]["tpot_s"]:
        title = _largest_batch_sentence(records)
    elif any(r.get("cost_per_million_tokens") for r in records):
        notes.append("Costs are price ÷ end-to-end tokens/s with prompts, without idle time.")
    details = [
        *short,
        *pass_details(records),
        *_per_server(records, lambda record: "; ".join(placement_lines(record))),
    ]
    columns = marked_columns(records, LATENCY)
    tables = [Table(rows, columns, title, footnotes(*notes), details=details)]
    if no_cache:
        notes = footnotes(*GROWTH[:1])
        tables.append(Table(rows, NO_CACHE, "Without a cache", notes, details=GROWTH[1:]))
    if drafted:
        notes = [
            "",
            "`--acceptance-rate` is the chance per draft token, or tokens/step such as 3.1.",
        ]
        title = "With the draft, at mid length"
        tables.append(Table(records, SPECULATION, title, notes))
    return tables


def _per_server(records: Records, describe: Callable[[Record], str]) -> list[str]:
    """Return a line per distinct text. If texts differ, a line names its server, or its load if all
    records are of one deployment."""
    texts = [*map(describe, records)]
    if len(set(texts)) == 1:
        return [*filter(None, texts[:1])]
    names = sides(records, WORDING).names
    return list(dict.fromkeys(f"{name}: {text}" for name, text in zip(names, texts) if text))


def _latency_sentence(records: Records) -> str:
    """Return a sentence on the fastest deployment for the first request, with further figures."""
    first = records[0]
    timed = [r for r in comparable_records(records) if r["e2e_s"]]
    equal = equal_records(timed, first, *LOAD_WORDING)
    at_least, at_most = _bound_words(first)
    if not equal:
        return _generation_sentence(records)
    names = sides(equal).names
    times = [r["e2e_s"] for r in equal]
    prices = [r.get("cost_per_million_tokens") for r in equal]
    if all(prices):
        times = prices
    fast, slow = (times.index(choose(times)) for choose in (min, max))
    best = equal[fast]
    requests = f"{best['batch_size']:,} requests of " * (best["batch_size"] > 1)
    work = (
        f"{requests}{best['input_len']:,} input + {plural(best['output_len'], 'output token')}"
    )
    if requests and names[fast] != names[slow]:
        work = requests.removesuffix(" of ")
    loads = equal_records(timed, best, *DEPLOYMENT)
    load_names = sides(loads, LOAD_WORDING, LOAD_WORDING).names
    load = load_names[-1]
    costs = _cost_clauses(best, timed)
    clauses = costs[1:]
    gains = [] if costs else _gain_clauses(best, equal[slow], names[slow])
    if gains and load:
        work = load_names[loads.index(best)]
    clauses += gains
    ttft = f"{'≥ ' * bool(at_least)}{seconds(best['ttft_s'])}"
    if uncached := best.get("uncached_ttft_s"):
        clauses.append(f", with TTFT {ttft} instead of {seconds(uncached)}")
    if best.get("speedup"):
        clauses.append(f", and {ratio(best['speedup'])} as long without a KV cache")
    is_plain = best["tpot_s"] and not best.get("speedup")
    if is_plain and not costs:
        mark = "≤ " * bool(at_most)
        clauses.append(f", decoding {mark}{best['decode_tokens_per_s']:,.1f} tokens/s")
        if load:
            clauses.append(
                f" and {mark}{loads[-1]['decode_tokens_per_s'] or 0:,.1f} with {load}"
            )
    if is_plain and not uncached:
        tpot = f", TPOT {'≥ ' * bool(at_least)}{seconds(best['tpot_s'])}"
        clauses += [tpot, f", last TTFT {ttft}"] if requests else [f", TTFT {ttft}", tpot]
    if rate := best.get("sequences_per_s"):
        rates = f"{at_most}{rate:,.1f} sequences of {best['input_len']:,} tokens per second"
        return f"{_server_words(best)}{misfit_words(best)} embeds {rates}."
    verb = f" takes {at_least}{'about ' * (best['time_basis'] == 'scaled')}{seconds(best['e2e_s'])}"
    if costs:
        verb = costs[0].replace(", costing", " costs")
    others = [] if costs else equal_records(records, first, *LOAD_WORDING)
    # datasheet bounds are not ranked against a prediction
    if quicker := {r["gpu"]: 0 for r in others if (r["e2e_s"] or times[fast]) < times[fast]}:
        clauses = [*clauses[:1], f"; {list_few(quicker)} may be faster"]
    server = _server_name(best, equal) + misfit_words(best)
    return answer_sentence(f"{server}{verb} for {work}", *clauses)


def _gain_clauses(best: Record, slowest: Record, name: str) -> list[str]:
    """Return clauses that compare the fastest deployment with the slowest, which has a name; none
    if their times look equal."""
    slow_s = slowest["e2e_s"]
    if not name or slow_s <= MIN_VISIBLE_RATIO * best["e2e_s"]:
        return []
    name = name.replace(", ", " with ", 1)
    if best["time_basis"] == BOUND:
        return [f", and ≥ {seconds(slow_s)} with {name}"]
    clauses = [f", {ratio(slow_s / best['e2e_s'])} as fast as {name}"]
    if best["tpot_s"]:
        clauses.append(f", TPOT {seconds(best['tpot_s'])} against {seconds(slowest['tpot_s'])}")
    return clauses


def _largest_batch_sentence(records: Records) -> str:
    """Return a sentence on the largest batch whose TPOT is at most `--max-tpot`."""
    best = max(records, key=lambda r: r["batch_size"])
    server = f"{_server_words(best)}{misfit_words(best)}"
    if best["tpot_s"] > best["max_tpot_s"]:
        reached = f": one request has {seconds(best['tpot_s'])}."
        return f"{server} exceeds a TPOT of {seconds(best['max_tpot_s'])}{reached}"
    return answer_sentence(
        f"Within a TPOT of {seconds(best['max_tpot_s'])}, {server} serves "
        f"{_bound_words(best)[1]}{plural(best['batch_size'], 'request')} at once",
        ", as many as fit" * (best["batch_size"] == best["max_num_seqs"]),
        f", together {best['decode_tokens_per_s']:,.1f} tokens/s",
    )


def _draft_sentence(records: Records) -> str:
    """Return a sentence on the gain by the fastest draft under the first and the last load, and on
    TPOT under the first."""
    best = min(
        equal_records(records, records[0], *LOAD_WORDING), key=lambda r: r["speculative_tpot_s"]
    )
    loads = equal_records(records, best, *DEPLOYMENT, "draft", "acceptance_rate")
    names = sides(loads, LOAD_WORDING, LOAD_WORDING).names
    gains = [
        f"{ratio(record['speculative_speedup'])} as fast{f' with {name}' * bool(name)}"
        for record, name in zip(loads, names)
    ]
    more = f" and {gains[-1].replace(' as fast', '')}" * bool(names[0])
    mark = "≥ " * (best["time_basis"] == BOUND)
    plain_s = best["tpot_s"] or best["speculative_tpot_s"] * best["speculative_speedup"]
    return answer_sentence(
        f"With {plural(best['num_speculative_tokens'], 'draft token')} of {best['draft']}, "
        f"{_server_words(best)}{misfit_words(best)} is "
        f"{gains[0]}{more}",
        f", TPOT {mark}{seconds(best['speculative_tpot_s'])} instead of {mark}{seconds(plain_s)}",
        f", at {best['tokens_per_step']:.2f} tokens/step",
    )


def _generation_sentence(records: Records) -> str:
    """Return a sentence on the highest tokens per second of records without a predicted TTFT."""
    best = max(records, key=lambda r: r["decode_tokens_per_s"] or 0.0)
    rate = "generates no further tokens"  # a request for one token has no decode step
    if best["decode_tokens_per_s"]:
        rate = f"generates {_bound_words(best)[1]}{best['decode_tokens_per_s']:,.1f} tokens/s"
    return answer_sentence(
        f"{_server_name(best, records)}{misfit_words(best)} {rate}", "; TTFT is unknown"
    )


def _bound_words(record: Record) -> tuple[str, str]:
    """Return the words before a time and before a rate that are bounds, such as `at least` and `at
    most`."""
    return ("at least ", "at most ") if record["time_basis"] == BOUND else ("", "")


def _server_words(record: Record) -> str:
    """Return the model and all GPUs, including the GPUs of prefill replicas."""
    return f"{record['model']} on {record.get('total_gpus', record['gpus'])}× {record['gpu']}"


LIMITS = "max_num_seqs max_num_batched_tokens"
LOAD = f"policy cache {LIMITS} rate max_concurrency prefix_hit_rate"
SERVE = columns(
    ServeRecord,
    f"model gpu {VARIANTS} {LOAD} requests_per_s throughput_tokens_per_s slo_attainment diverges "
    "cost_per_million_tokens ttft_p50_s ttft_p99_s tpot_p50_s tpot_p99_s completed rejected "
    "preemptions mean_batch_size tokens_per_step kv_peak kv_waste padding_waste "
    "queueing_mean_s | e2e_p50_s *",
    inputs=f"model gpu {LOAD}",
    optional=f"{VARIANTS} {LIMITS}",
    hidden="draft num_speculative_tokens",
)
SERVER_LIMITS = (
    "max_num_seqs {max_num_seqs:,}, "
    "max_num_batched_tokens {max_num_batched_tokens:,}, seed {seed}"
)
# ratio of two rates that count as equal: simulated capacities vary by up to 10 %
EQUAL_RATE_RATIO = 1.1
MIN_VISIBLE_RATIO = 1.005  # ratio of two figures that do not read as equal


def serve_table(records: Records, lengths_note: str) -> Table:
    """Return the table that `serve` prints, with a row per simulated server and load.

    Columns are latencies, throughput and use of the KV cache. Each tried rate has a row.

    Args:
        records: Records of `serve`.
        lengths_note: Footnote on the lengths of the requests; '' for none.
    """
    summaries = predictions_first([r for r in records if r.get("found_rate") is not None])
    is_sweep = 0 < len(summaries) < len(records)
    rows = predictions_first(_tried(records) if is_sweep else records)
    first = rows[0]
    basis, *other_notes = time_footnotes([{**r, "time_p90_error": None} for r in rows])
    details = [
        *pass_details(rows),
        *_per_server(rows, _accuracy),
        *_per_server(rows, SERVER_LIMITS.format_map),
        *_per_server(rows, lambda r: f"KV cache {format_bytes(r['kv_budget_bytes'])} per GPU"),
    ]
    # so that requests/s is lower than the rate, even if the server keeps up with it
    details.append(
        f"req/s, tokens/s: of {first['requests']:,} requests per run, start and end included"
    )
    if first["draft"]:
        details.append(
            f"speculative decoding: {first['num_speculative_tokens']} draft tokens of"
            f" {first['draft']} per step, {first['acceptance_rate']:.0%} accepted"
        )
        if source := first.get("num_speculative_tokens_from"):
            details[-1] += f"; the number of draft tokens is {source}"
    if is_sweep:
        details.append(
            "sustained: targets met, else no growing queue; at most 95% of saturation"
        )
    accuracy = dict.fromkeys(map(_accuracy, rows))
    columns = without_named_engine(rows, SERVE)
    # a finite run answers fewer requests/s than a rate that its server keeps up with
    if summaries or all(r["diverges"] is False for r in rows):
        columns = [
            replace(c, is_input=c.is_input and c.key != "rate")
            for c in columns
            if c.key != "requests_per_s"
        ]
    return Table(
        rows,
        columns,
        _sustained(summaries) if summaries else _served(rows),
        footnotes(
            basis,
            *distinct_values(rows, "fallback"),
            next(iter(accuracy)) if len(accuracy) == 1 else "",
            lengths_note,
            *other_notes,
        ),
        details=details,
    )


def _tried(records: Records) -> list[Record]:
    """Return the rows of a sweep, one per rate that was tried. The sustained rate is marked."""
    rows = []
    sustained = None
    for r in records:
        if r["found_rate"] is not None:
            sustained = r["rate"]
        else:
            rows.append({**r, "diverges": "sustained"} if r["rate"] == sustained else r)
    return rows


def _sustained(summaries: Records) -> str:
    """Return a sentence with the highest sustained rate, its median TTFT and the lowest other rate.

    Of servers with similar rates, the one with the shortest TTFT is named.
    """
    equal = comparable_records(summaries)
    highest = max(r["found_rate"] for r in equal)
    close = [r for r in equal if r["found_rate"] * EQUAL_RATE_RATIO >= highest]
    best = min(close, key=lambda r: r["ttft_p50_s"] or 0.0)
    server, goals = _server_name(best, equal), _goals(best)
    if not best["completed"]:
        return f"{server} serves none of these requests."
    if not best["found_rate"]:
        return f"{server} misses {goals}, even for one request at a time."
    at_least, at_most = _bound_words(best)
    rate = f"{server} sustains {at_most}{digits(best['found_rate'])} requests/s"
    wait = f", with a median TTFT of {at_least}{seconds(best['ttft_p50_s'])}"
    costs = _cost_clauses(best, equal)
    if goals:
        rate, wait = f"{rate} with {goals}", " for 99% of requests" * (not costs)
    slowest = min(equal, key=lambda r: r["found_rate"])
    rival = ""
    if not costs and slowest["found_rate"] * EQUAL_RATE_RATIO < best["found_rate"]:
        names = sides([slowest, best], SERVER).names
        rival = (
            f", and {digits(slowest['found_rate'])} "
            f"{f'with {names[0]}' if names[0] else 'without'}"
        )
    return answer_sentence(rate, *costs, wait, rival)


def _cost_clauses(record: Record, records: Records) -> list[str]:
    """Return a clause with the cost of output tokens, and one with the cost of the cheapest other
    record, if possible of another GPU under this load; without a price, none."""
    if not (cost := record.get("cost_per_million_tokens")):
        return []
    keys, wording = (*DEPLOYMENT, *LOAD_WORDING), WORDING | LOAD_WORDING
    names = sides(records, keys, wording).names
    others = [
        (
            any(other[key] != record[key] for key in LOAD_WORDING),
            other["gpu"] == record["gpu"],
            other["cost_per_million_tokens"],
            f" with {name}",
        )
        for other, name in zip(records, names)
        if other is not record and other.get("cost_per_million_tokens") and name
    ]
    mark = "≥ " * (record["time_basis"] == BOUND)
    clauses = [f", costing {mark}{cost:,.2f} per million output tokens"]
    if others:
        *_, cost, name = min(others)
        clauses.append(f" and {mark}{cost:,.2f}{name}")
    elif decoding := record.get("decode_cost_per_million_tokens"):
        clauses.append(f", {mark}{decoding:,.2f} without prefill")
    return clauses


def _server_name(record: Record, records: Records) -> str:
    """Return model and GPUs, and other values that distinguish a record from the other records."""
    same = equal_records(records, record, "model", "gpu")
    name = sides(same, SERVER[2:]).names[same.index(record)]
    words = f"{_server_words(record)} with {name}".removesuffix(
        f" with {record['gpus']:,} GPUs"
    )
    return words.removesuffix(" with ")


def _accuracy(record: Record) -> str:
    """Return a line on the errors of simulated servers against measured servers; '' if unknown."""
    titles = {"tpot": "TPOT", "ttft": "mean TTFT", "throughput": "tokens/s"}
    errors = {title: record.get(f"{name}_p90_error") for name, title in titles.items()}
    if None in errors.values():
        return ""
    listed = ", ".join(f"{title} {error:.0%}" for title, error in errors.items())
    return f"Errors in 90% of measured servers: {listed}."


def _goals(record: Record) -> str:
    """Return the requested latency targets in words; '' without a target."""
    limits = (("TTFT", record.get("slo_ttft")), ("TPOT", record.get("slo_tpot")))
    return " and ".join(f"{name} within {seconds(limit)}" for name, limit in limits if limit)


def _served(records: Records) -> str:
    """Return a sentence on the figures of the best server under the first load.

    At a rate that all sustain, the best has the shortest median latency, else the most tokens/s.
    """
    first = records[0]
    equal = equal_records(comparable_records(records), first, "rate", "max_concurrency")
    equal = [r for r in equal if r["completed"]]
    if not equal:
        return f"{_server_words(first)} serves none of these requests."
    key, sign, faster = "throughput_tokens_per_s", -1, "the tokens/s of"
    if first["rate"] and not any(r["diverges"] for r in equal):
        key, sign, faster = "e2e_p50_s", 1, "as fast as"
    ranked = sorted(equal, key=lambda r: sign * r[key])
    best, names = ranked[0], sides(ranked, SERVER).names
    factor = (ranked[-1][key] / best[key]) ** sign
    is_best = names[0] != names[-1] and factor > MIN_VISIBLE_RATIO
    at_least, at_most = _bound_words(best)
    server, goals = _server_name(best, equal), _goals(best)
    last = [r for r in equal_records(records, best, *SERVER) if r["completed"]][-1]
    if _load(last) not in ("", _load(best)):
        server += ", the fastest," * is_best
        work, unit = "serves", "tokens/s"
        figures = [f"{r['throughput_tokens_per_s']:,.0f}" for r in (best, last)]
        if goals:
            work, unit = "keeps", "of requests within the targets"
            figures = [f"{r['slo_attainment']:.1%}" for r in (best, last)]
        start = f"{server} {work} {at_most}{figures[0]} {unit} {_load(best)}"
        clauses = [f", and {figures[1]} {_load(last)}"]
        costs = [r["cost_per_million_tokens"] for r in (best, last)]
        if all(costs):
            clauses.append(
                f", costing {at_least}{max(costs):,.2f} to {min(costs):,.2f} per million output "
                "tokens"
            )
    else:
        start = f"{server} {_throughput(best)}{''.join(_cost_clauses(best, equal))}"
        clauses = [f", {ratio(factor)} {faster} {names[-1]}"] * (is_best and bool(names[-1]))
        if is_best and not names[-1]:  # without prefix hits, for example
            clauses = [
                f", with TTFT p50 {seconds(best['ttft_p50_s'])} instead of "
                f"{seconds(ranked[-1]['ttft_p50_s'])}"
            ]
        if goals:
            share = f"{at_most}{best['slo_attainment']:.1%} of"
            if best["slo_attainment"] == 1 and not at_most:
                share = "all"
            clauses.append(f", and {share} requests meet the targets")
        # if the queue grows, or all requests arrive together, TTFT is only their queue
        if best["max_concurrency"] or best["diverges"] is False:
            clauses.append(
                f", TTFT p50 {at_least}{seconds(best['ttft_p50_s'])} and p99 "
                f"{at_least}{seconds(best['ttft_p99_s'])}"
            )
        tpot_s, transfer_s = best["tpot_p50_s"] or 0, best.get("transfer_s") or 0
        clauses.append(f", TPOT p50 {at_least}{seconds(tpot_s)}" * bool(tpot_s))
        clauses.append(f", KV transfer {seconds(transfer_s)}" * bool(transfer_s))
    if best["preemptions"]:
        clauses.append(f", and preempts {best['preemptions']:,} times")
    return answer_sentence(start, *clauses)


def _throughput(record: Record) -> str:
    """Return whether a server keeps up with the offered rate. If not, also what it serves."""
    at_most, rate = _bound_words(record)[1], f"{record['rate'] or record['requests_per_s']:.4g}"
    if record["diverges"] is False:
        return f"{'may keep' if at_most else 'keeps'} up with {rate} requests/s"
    served = f"serves {at_most}{digits(record['requests_per_s'])} requests/s and"
    served += f" {record['throughput_tokens_per_s']:,.0f} tokens/s"
    beyond = f"does not keep up with {rate} requests/s, "
    return f"{beyond * bool(record['diverges'] and record['rate'])}{served}"


def _load(record: Record) -> str:
    """Return the load in words; '' if all requests arrive together."""
    if record.get("max_concurrency"):
        return f"with {plural(record['max_concurrency'], 'client')}"
    return f"at a rate of {record['rate']:.4g}" if record.get("rate") else ""
