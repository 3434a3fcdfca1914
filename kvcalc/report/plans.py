"""What `plan` shows: the answer in a sentence, the five best in a table, the command line of the first."""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvcalc.errors import few
from kvcalc.planning.best import FIVE, Answer
from kvcalc.planning.loosening import changes_that_help
from kvcalc.planning.need import Need
from kvcalc.planning.precisions import below_published, paid
from kvcalc.planning.reasons import Point, reason
from kvcalc.planning.search import Plan
from kvcalc.planning.space import Space
from kvcalc.report.export import Record
from kvcalc.report.layout import Column, Table
from kvcalc.report.shell import CommandLine
from kvcalc.report.tables import BOUND, fallback_notes, integer, seconds, time_note

_money = "{:,.2f}".format
MAX_PRINTED_COMMANDS = 12
MAX_NAMED_KINDS = 10  # kinds of GPU in a line below a table
PLAN = (
    Column("model", "model", right=False, given=True),
    Column("users", "users", integer, given=True),
    Column("rate", "req/s", lambda v: f"{v:g}", given=True),
    Column("context", "context", integer, given=True),
    Column("gpu", "GPU", right=False),
    Column("total_gpus", "GPUs", integer, about="of all replicas"),
    Column("split", "split", right=False, about="of each replica"),
    Column("replicas", "replicas", integer, given=True),
    Column("prefill_replicas", "for prompts", integer, given=True, about="replicas that process prompts alone"),
    Column("draft", "draft", right=False, given=True),
    Column("num_speculative_tokens", "drafted", integer, given=True),
    Column("dtype", "weights", right=False, given=True),
    Column("kv_cache_dtype", "cache", right=False, given=True),
    Column("cost_per_hour", "an hour", _money, about="in the money of --price-per-hour"),
    Column("tpot_s", "TPOT", seconds, rests="time", about="of all sequences of a replica at once"),
    Column("ttft_s", "TTFT", seconds, rests="time", about="of one prompt by itself"),
    Column("max_num_seqs", "at once", integer, about="sequences that a replica is set up for"),
    Column("capacity_sequences", "fit", integer, about="sequences that it holds at the low end of the engine's range"),
    Column("tokens_per_s_per_gpu", "tokens/s/GPU", lambda v: f"{v:,.0f}", rests="rate"),
    Column("cost_per_million_tokens", "per 1M tokens", _money, rests="time", about="output tokens at the asked load"),
    Column("reason", "why not", right=False),
    Column("energy_per_token_j", "J/token", lambda v: f"{v:.3g}", about="all GPUs at full power", wide=True),
    Column("total_tokens_per_s", "tokens/s", lambda v: f"{v:,.0f}", rests="rate", wide=True),
    Column("nodes", "servers", integer, wide=True),
    Column("pareto", "on the front", lambda v: "yes" if v else "no", wide=True),
)


def plan_tables(plan: Plan, records: Sequence[Sequence[Record]]) -> list[Table]:
    """One answer as its five best and what is to be said of it; several as the first of each. records: of each answer."""
    if len(plan.answers) > 1:
        return [_several(plan, [found[0] for found in records if found])]
    answer, rows = plan.answers[0], [_row(record) for record in records[0]]
    count = len(rows) - len(answer.unranked[:FIVE])
    tables = [Table(rows[:count], PLAN, sentence(answer, plan.space), ["", *_notes(plan, answer, rows[:count])])]
    return [*tables, _unranked_table(answer, rows[count:])] if answer.unranked else tables


def _unranked_table(answer: Answer, rows: Sequence[Record]) -> Table:
    """Return the table of the GPUs whose bounds meet the need, which are not ranked against predictions."""
    title = "\nNo measured kernel model exists for these GPUs. By their bounds, not ranked, at least:"
    keys = ("gpu", "total_gpus", "split", "replicas", "cost_per_hour", "tpot_s", "ttft_s")
    columns = [msgspec.structs.replace(c, about="", given=False) for c in PLAN if c.key in keys]
    more = [f"{p.gpus}×{p.gpu}" for p in answer.unranked[len(rows) :]]
    also = [f"also: {', '.join(more[:MAX_NAMED_KINDS])}"] if more else []
    also = [f"{also[0]} and {len(more) - MAX_NAMED_KINDS} more kinds"] if len(more) > MAX_NAMED_KINDS else also
    return Table(rows, columns, title, ["", *also])


def _row(record: Record) -> dict[str, Any]:
    sizes = {"tp": "tensor", "pp": "pipeline", "dp": "data", "ep": "expert"}
    words = [f"{short} {record[f'{name}_parallel_size']}" for short, name in sizes.items()]
    return {
        **record,
        "prefill_replicas": record["prefill_replicas"] or None,
        "split": " ".join(word for word in words if not word.endswith(" 1")) or "one GPU",
    }


def asked(need: Need) -> str:
    """A need as a person would say it."""
    lengths = need.lengths
    tokens = f"{need.input_len:,} tokens in and {need.output_len:,} out" if need.output_len else f"{lengths.context:,} tokens"
    load = (
        f"{need.users:,} user{'s' * (need.users > 1)}"
        if need.users
        else f"{need.rate:g} requests a second"
        if need.rate
        else "requests"
    )
    limits = [f"{seconds(need.max_tpot)} a token"] if need.max_tpot else []
    limits += [f"{seconds(need.max_ttft)} to the first"] if need.max_ttft else []
    cached = f", {lengths.cached:,} of each prompt cached already" if lengths.cached else ""
    within = f", within {' and '.join(limits)}" if limits else ""
    made = f", {need.min_throughput:,.0f} tokens a second or more" if need.min_throughput else ""
    return f"{load} of {tokens}{cached}{within}{made}"


def where(point: Point) -> str:
    """A deployment in a few words: how many GPUs of what kind, and how they are split."""
    ranks, replicas = point.deployment.parallelism, int(point.block.replicas[point.at])
    sizes = {"tp": ranks.tp, "pp": ranks.pp, "dp": ranks.dp, "ep": ranks.ep}
    split = " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    prompts, draft = int(point.block.prefill[point.at]), point.block.speculated
    words = [f"{replicas} replica{'s' * (replicas > 1)}"] * (replicas > 1 or prompts > 0) + [f"{prompts} for prompts"] * (
        prompts > 0
    )
    words += [split] * bool(split)
    if draft:
        words.append(f"draft {draft.draft}, {draft.drafted} token{'s' * (draft.drafted > 1)}, {draft.acceptance:g} accepted")
    return f"{point.gpus}× {point.gpu}" + (f" ({', '.join(words)})" if words else "")


def sentence(answer: Answer, space: Space | None = None) -> str:
    """What meets the need; or what comes nearest. space: adds which changes make it meet."""
    what = asked(answer.need)
    if answer.bounds_only:
        what = f"no GPU with a measured kernel model serves {what}; of the others"
    bound = " by its bounds" * (answer.basis == BOUND)
    if not answer.best:
        near = answer.nearest
        if not near:
            return f"Nothing that was looked at serves {what}"
        ways = changes_that_help(answer, space) if space else []
        loosen = f". To loosen: {', or '.join(ways)}" if ways else ""
        return f"Nothing serves {what}; nearest is {where(near)}: {reason(near)}{loosen}"
    first, others = answer.best[0], len(answer.kinds) - 1
    if answer.prices:
        cost = answer.prices[first.gpu] * first.gpus
        found = f"{what}: {where(first)} at {cost:,.2f} an hour is the cheapest{bound}"
    elif others:
        kinds = "other kinds of GPU" if others > 1 else "another kind of GPU"
        found = f"{what}: {where(first)} will do{bound}, and so will {kinds}, the fewest of each below"
    else:
        found = f"{what}: {where(first)} will do{bound}, the fewest"
    deployment = first.deployment
    lower = below_published(deployment.model, deployment.precision)
    return found + (f" ({'; '.join(map(paid, lower))})" if lower else "")


def _notes(plan: Plan, answer: Answer, rows: Sequence[Record]) -> list[str]:
    if not rows:
        return [f"{answer.looked:,} points looked at"]
    notes = [f"{answer.looked:,} points looked at, {answer.met:,} meet the need"]
    if below := answer.cheaper:
        cheaper = "cheaper" if answer.prices else "fewer"
        notes.append(f"of {cheaper}, {where(below)} comes nearest: {reason(below)}")
    more = answer.kinds[len({row["gpu"] for row in rows if row["meets"]}) :]
    if more and not answer.prices:
        notes.append(f"also: {', '.join(f'{p.gpus}×{p.gpu}' for p in more)}")
    if len(answer.kinds) > 1 and not answer.prices:
        notes.append("kinds of GPU stand by how many it takes, and are not ranked against each other without --price-per-hour")
    lower = dict.fromkeys(row["quality"] for row in rows[1:] if row["quality"] not in (None, rows[0]["quality"]))
    notes += [time_note(rows), *fallback_notes(rows), *lower, *_hopeless(answer)]
    apart = next((row for row in rows if row["prefill_replicas"]), rows[0])
    for row in (rows[0], apart) if apart is not rows[0] else rows[:1]:
        notes += ["", *_commands(row)] if row["commands"] and row["meets"] else []
    return notes


def _commands(row: Record) -> list[str]:
    """Return the command lines of a deployment; if it has several replicas, after what they start."""
    lines: list[str] = [CommandLine(line) for line in row["commands"]]
    if len(lines) == 1:
        return lines
    replicas, prefill = row["replicas"], row["prefill_replicas"]
    what = f"{prefill:,} for prompts, {replicas:,} for decode, and their proxy" if prefill else f"{replicas:,} replicas"
    if len(lines) > MAX_PRINTED_COMMANDS:
        what += f", of which --format json has the other {len(lines) - 1:,} lines"
        lines = lines[:1]
    hosts = "; HOST1 and further are the hosts' addresses" if "${HOST1}" in lines[-1] else ""
    return [f"{row['total_gpus']:,}× {row['gpu']}, {what}{hosts}:", *lines]


def _hopeless(answer: Answer) -> list[str]:
    names = answer.hopeless
    return [f"{few(names)}: no measured kernel model exists, and even by the bounds the targets are missed"] if names else []


def _several(plan: Plan, firsts: Sequence[Record]) -> Table:
    """The first of each answer, a line each."""
    rows = [_row(record) for record in firsts]
    met = sum(row["meets"] for row in rows)
    looked = sum(answer.looked for answer in plan.answers)
    remark = "of each need the cheapest" if plan.answers[0].prices else "of each need the fewest GPUs"
    if any(answer.unranked for answer in plan.answers):
        remark += " with a measured kernel model"
    notes = ["", f"{looked:,} points looked at; {remark}", time_note(rows)] if rows else [""]
    return Table(rows, PLAN, f"{met} of {len(plan.answers)} needs are met with up to {plan.space.max_gpus} GPUs", notes)
