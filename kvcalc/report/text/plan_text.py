"""Printed answers of `plan` and `diagnose`."""

import re
from collections.abc import Sequence
from typing import Annotated

from kvcalc.capacity.suggested_fixes import join_with_or
from kvcalc.diagnosis.log_verdict import DiagnosisSummary
from kvcalc.planning.best_configs import BestConfigs, candidate_record, reason
from kvcalc.planning.grid import Candidate
from kvcalc.planning.search import SearchResult, changes_that_help
from kvcalc.planning.search_space import SearchSpace
from kvcalc.question.plan_options import Requirement
from kvcalc.records import JsonObject, Record
from kvcalc.records.plan import DiagnoseRecord, PlanRecord
from kvcalc.report.row_names import shared_words, split_words
from kvcalc.report.text.fit_text import FORMAT_WORDING, is_measured_on
from kvcalc.report.text.table_layout import Table
from kvcalc.report.text.tables import (
    BOUND,
    MAX_WORDS,
    answer_sentence,
    columns,
    distinct_values,
    footnotes,
    pass_details,
    price,
    seconds,
    time_footnotes,
)

MAX_PRINTED_COMMANDS = 12


class PlanRow(PlanRecord):
    """A row of the table that `plan` prints: a record with two further values.

    Attributes:
        split: Parallelism of each replica in words, such as `tp 2`.
        max_users: Number of requests that fit in all replicas together, by the low estimate of
            memory; None if unknown.
    """

    split: Annotated[str, "parallelism of each replica", "split"]
    max_users: Annotated[int | None, "requests that fit on all GPUs, at least", "max users"]


PLAN_COLUMNS = columns(
    PlanRow,
    "model users rate context gpu total_gpus split replicas prefill_replicas draft "
    "num_speculative_tokens dtype kv_cache_dtype cost_per_hour cost_per_million_tokens tpot_s "
    "ttft_s max_users energy_per_token_j tokens_per_s_per_gpu reason | max_num_seqs "
    "total_tokens_per_s nodes pareto *",
    inputs="model users rate context replicas prefill_replicas draft num_speculative_tokens "
    "dtype kv_cache_dtype",
    hidden="gpus tensor_parallel_size",
)


def plan_table(plan: SearchResult, records: Sequence[Sequence[PlanRecord]]) -> Table:
    """Return the table that `plan` prints.

    For one load with its targets, the rows are its best deployments. For several loads, each row is
    the best deployment for a load.

    Args:
        plan: The search result.
        records: Records for each load: the ranked deployments, then deployments that have only
            datasheet bounds.
    """
    if len(plan.answers) > 1:
        return _several(plan, records)
    answer, rows = plan.answers[0], [_row(record) for record in records[0]]
    title = sentence(answer, plan.space)
    tried = f"{answer.num_tried:,} configurations tried, {answer.num_met:,} meet the targets"
    if not rows:
        return Table(rows, PLAN_COLUMNS, title, ["", tried])
    first = rows[answer.lead]
    formats = shared_words(rows, FORMAT_WORDING)
    formats += ["ranked by cost/hour in the unit of --price-per-hour"] if answer.prices else []
    formats += ["TTFT of an idle replica"] if answer.need.max_ttft else []
    basis, accuracy, *reasons = time_footnotes(rows)
    if answer.bounds_only:
        accuracy = "Only GPUs with datasheet bounds meet the targets."
    notes = [", ".join(formats), basis, accuracy]
    details = [tried, *reasons, *pass_details(rows), *distinct_values(rows, "fallback")]
    commands: Sequence[str] = ()
    if first["meets"]:
        commands, about = _commands(first)
        quality = "; ".join(row["quality"] for row in rows if row["quality"]).split("; ")
        details += about
        details += [q for q in dict.fromkeys(quality) if is_measured_on(first["model"], q)]
    elif fixes := changes_that_help(answer, plan.space):
        options = join_with_or([f"`{fix}`" for fix in fixes])
        goal = f"The {'targets are met' if answer.need.has_targets else 'load is served'} with"
        notes = [basis, accuracy or notes[0], f"{goal} {options}."]
    if (below := answer.cheaper) and not answer.lead:
        size = f"{'cheaper' if answer.prices else 'smaller'} deployment"
        notes.append(f"The closest {size} is {deployment_words(below)}: {reason(below)}.")
    return Table(
        rows, PLAN_COLUMNS, title, footnotes(*notes), details=details, commands=commands
    )


def _row(record: Record) -> JsonObject:
    """Return a record with its split in words, and the users that fit in all replicas."""
    capacity = record["capacity_sequences"]
    return {
        **record,
        "prefill_replicas": record["prefill_replicas"] or None,
        "split": split_words(record) or "one GPU",
        "max_users": None if capacity is None else capacity * record["replicas"],
    }


def requirement_words(need: Requirement) -> str:
    """Return a load and its targets in words: 64 users of 4,096 + 500 tokens within 30 ms TPOT.

    Args:
        need: The load and the targets.
    """
    lengths = need.lengths
    tokens = f"{lengths.context:,}"
    if need.output_len:
        tokens = f"{need.input_len:,} + {need.output_len:,}"
    load = "requests"
    if need.users:
        load = f"{need.users:,} user{'s' * (need.users > 1)}"
    elif need.rate:
        load = f"{need.rate:g} requests/s"
    limits = [f"{seconds(limit)} {time.upper()}" for time, limit in need.time_limits.items()]
    within = f" within {' and '.join(limits)}" if limits else ""
    cached = f", {lengths.cached:,} cached" if lengths.cached else ""
    rate = f" at {need.min_throughput:,.0f} tokens/s" if need.min_throughput else ""
    return f"{load} of {tokens} tokens{cached}{within}{rate}"


def deployment_words(candidate: Candidate) -> str:
    """Return GPUs, replicas and parallelism in words: 4× h200 in 2 replicas with tp 2.

    Args:
        candidate: A deployment that `plan` tried. The number of GPUs is of all replicas.
    """
    replicas, prefill = candidate.replicas, candidate.prefill_replicas
    words = [f"{candidate.gpus:,}× {candidate.gpu}"]
    if replicas > 1 or prefill:
        words.append(f"in {replicas:,} replica{'s' * (replicas > 1)}")
    if prefill:
        words.append(f"and {prefill:,} for prefill")
    format_ = candidate.deployment.precision.quantization
    parts = [split_words(candidate_record(candidate)), f"{format_} weights" * bool(format_)]
    if candidate.speculation:
        parts.append(f"draft {candidate.speculation.draft}")
    return f"{' '.join(words)} with {' and '.join(filter(None, parts))}".removesuffix(" with ")


def sentence(answer: BestConfigs, space: SearchSpace | None = None) -> str:
    """Return a sentence on the best deployment for one load, the title of `plan`.

    If no deployment meets the targets, the sentence is on the deployment that misses them least.

    Args:
        answer: The search result for one load with its targets.
        space: The limits of the search. If given, a sentence on a miss states the maximum number of
            GPUs.
    """
    limit = ""
    if space:
        limit = f" with up to {space.max_gpus:,} GPU{'s' * (space.max_gpus > 1)}"
    goal = "meets the targets" if answer.need.has_targets else "serves this load"
    if not answer.best:
        if answer.answers:
            near = answer.answers[0]
            closest = f"the closest is {deployment_words(near)}: {reason(near)}."
            return f"No deployment{limit} {goal}, {closest}"
        return f"No configuration{limit} can serve {requirement_words(answer.need)}."
    first, best, serves = answer.listed[answer.lead], answer.best[0], "for"
    size, cost = "smallest", ""
    if answer.prices:
        size, cost = "cheapest", f", at {price(answer.cost(first))} per hour"
    if _is_unproven(answer):
        serves = "that may serve"
        goal = "may " + goal.replace("s ", " ", 1)
    start = f"{deployment_words(first)} is the {size} deployment"
    if answer.lead:
        cost += f", {best.gpus:,}× {best.gpu} the {size} with predicted times"
    elif min(map(answer.cost, answer.listed)) < answer.cost(best):
        start += " with predicted times"
    text = f"{start} {serves} {requirement_words(answer.need)}{cost}."
    if len(text.split()) <= MAX_WORDS:
        return text
    return f"{start} that {goal}{cost}."


def _is_unproven(answer: BestConfigs) -> bool:
    """Return whether the first deployment serves its load only by datasheet bounds."""
    first = answer.listed[answer.lead]
    has_target = answer.need.has_targets or answer.need.rate
    return first.deployment.time_basis == BOUND and bool(has_target)


def _commands(row: Record) -> tuple[list[str], list[str]]:
    """Return the command lines of a deployment, and a note on the replicas that they start."""
    lines = row["commands"]
    if len(lines) < 2:
        return lines, []
    replicas, prefill = row["replicas"], row["prefill_replicas"]
    shared = {line.rpartition(" --port ")[0] for line in lines}
    if len(shared) == 1:
        return [f"# for each of the {replicas:,} replicas, on separate servers", *shared], []
    parts = f"{prefill:,} prefill and {replicas:,} decode" if prefill else f"{replicas:,}"
    about = [f"The commands start {parts} replicas on {row['total_gpus']:,}× {row['gpu']}"]
    if len(lines) > MAX_PRINTED_COMMANDS:
        about.append(f"`--format json` has the other {len(lines) - 1:,} commands")
        lines = lines[:1]
    return lines, about


def _several(plan: SearchResult, records: Sequence[Sequence[PlanRecord]]) -> Table:
    """Return a table with the deployment to try first for each requirement."""
    rows = [_row(part[answer.lead]) for answer, part in zip(plan.answers, records) if part]
    met = [row for row in rows if row["meets"]]
    tried = sum(answer.num_tried for answer in plan.answers)
    limit = f"up to {plan.space.max_gpus:,} GPUs"
    verb = "may be" if any(_is_unproven(part) for part in plan.answers if part.best) else "is"
    title = (
        f"{len(met)} of {len(plan.answers)} requirements {verb.replace('is', 'are')} met "
        f"with {limit}."
    )
    names = distinct_values(rows, "model")
    if len(met) == len(plan.answers) and len(names) in (1, len(rows)):
        if len(names) == 1:
            names = [requirement_words(answer.need) for answer in plan.answers]
        start, end = (
            f"{rows[index]['total_gpus']:,}× {rows[index]['gpu']} for {names[index]}"
            for index in (0, -1)
        )
        best = [answer.best[0].deployment.precision.quantization for answer in plan.answers]
        weights = f" with {best[0]} weights" * (len({*best}) == 1 and best[0] != "")
        text = answer_sentence(
            f"The {'cheapest' if plan.answers[0].prices else 'smallest'} deployment"
            f"{weights} {verb} {start}",
            f", and {end}",
        )
        title = text if end in text else title
    notes = (
        footnotes(", ".join(shared_words(rows, FORMAT_WORDING)), *time_footnotes(rows))
        if rows
        else []
    )
    details = ["Each row is the deployment to try first", f"{tried:,} configurations tried"]
    commands, about = _commands(met[0]) if met else ([], [])
    details += ["The command is of the first row that meets its targets", *about]
    return Table(rows, PLAN_COLUMNS, title, notes, details=details, commands=commands)


FULL = "Its KV cache is full: use more GPUs or an 8-bit cache."
DIAGNOSIS_COLUMNS = columns(
    DiagnoseRecord, "term logged_bytes predicted_bytes difference_bytes"
)


def diagnosis_table(summary: DiagnosisSummary, log: str, number: int, boots: int) -> Table:
    """Return the table that `diagnose` prints: each item of memory, as logged and as predicted.

    Args:
        summary: Diagnosis of one engine start.
        log: Name of the log file.
        number: Number of the start in its log, from 1 on.
        boots: Number of starts in the log. If there are several, a note says which one the table
            explains.
    """
    records = summary.records(log, number)
    remedy = summary.remedy or FULL * summary.boot.is_full
    advice = f"; {remedy[:1].lower()}{remedy[1:-1]}" * bool(remedy)
    notes = [summary.basis, summary.capacity]
    if boots > 1:
        first, last = summary.boot.lines
        notes[0] = f"boot {number} of {boots}, lines {first:,} to {last:,}: {notes[0]}"
    details = [
        f"{change['flags']}: {change['cost']}".removesuffix(": ") for change in summary.changes
    ]
    return Table(
        records[:-1],
        DIAGNOSIS_COLUMNS,
        answer_sentence(summary.outcome[:-1], *re.split("(?= or )", advice)),
        [*[""] * bool(summary.items), *notes],
        details=details,
        commands=[change["command"] for change in summary.changes[:1] if change["command"]],
    )
