"""`fit --explain`: the whole budget as a worked exercise, from the GPU's memory to sequences."""

from typing import Any

from kvcalc.capacity import Fit
from kvcalc.report.fit import cost_lines, memory_line, sequences_of
from kvcalc.report.tables import seconds
from kvcalc.units import format_bytes


def explain_fit(found: Fit, record: dict[str, Any]) -> str:
    """The whole budget as a worked exercise, from the GPU's memory to sequences."""
    b, plan, length = found.end_budget, found.plan, found.length
    lines = [f"{record['model']} on {record['gpus']}× {record['gpu']}, engine {record['engine']}"]
    if found.ranks.pp > 1:
        lines.append(f"pipeline stage {found.stage} of {found.ranks.pp} decides")
    lines += ["", "1. What the process may use"]
    lines += _share(found)
    lines += _terms(found, record)
    lines += ["", "3. The budget for the cache"]
    margin = f" − {found.margin:,}" if found.margin > 0 else f" + {-found.margin:,}" if found.margin else ""
    if margin:
        lines.append(f"   margin of the {found.end} end, for what differs between starts: {_b(found.margin)}")
    inside = "" if b.outside else f" − {b.activation:,} − {b.overhead:,}"
    if b.outside:
        lines.append("   activations and CUDA graphs lie in the rest of the memory, outside this share")
    lines.append(f"   {b.share:,} − {b.weights:,}{inside}{margin} = {_b(found.left[found.end])}")
    if found.engine.ranged and not found.given:
        ends = " to ".join(format_bytes(found.budget_at(end)) for end in ("low", "high"))
        lines.append(f"   the range of its terms: {ends}; the {found.end} answers")
    if found.kv_budget != found.left[found.end]:
        lines.append(f"   {'given' if found.given else 'bounded'} instead: {_b(found.kv_budget)}")
    lines.append(f"   {memory_line(found)}")
    lines += ["", f"4. What the engine makes of it (cache in {record['kv_cache_dtype']})"]
    lines += [f"   {line}" for line in plan.describe(length)]
    lines += _capacity(found, record)
    return "\n".join(lines) + "\n"


def _share(found: Fit) -> list[str]:
    """What the process may use: a share of the memory, of what is free before the weights, or of what all terms leave."""
    b, part = found.end_budget, f"{found.utilization:g}"
    if found.of == "total":
        return [f"   {part} of the total memory of {b.memory:,} B ({format_bytes(b.memory)}) = {_b(b.share)}"]
    startup, free = found.end_terms.startup, b.memory - found.end_terms.taken
    terms = "".join(f" − {size:,} ({name})" for name, size in startup.items())
    lines = [f"   of {b.memory:,} B ({format_bytes(b.memory)}) free before the weights: {b.memory:,}{terms} = {_b(free)}"]
    if found.of == "free":
        return [*lines, f"   {part} of the free memory = {_b(b.share)}"]
    below = b.weights + (0 if b.outside else b.activation + b.overhead)
    if below >= free:
        return [*lines, f"   nothing of it remains beside the terms below, {_b(below)}"]
    return [*lines, f"   the terms below, {below:,}, and {part} of the remaining {free - below:,} = {_b(b.share)}"]


def _terms(found: Fit, record: dict[str, Any]) -> list[str]:
    """What stands beside the cache, name by name."""
    terms = found.end_terms
    peak = f", of the {terms.peak}" if terms.peak else ""
    lines = ["", "2. What stands beside the cache", f"   weights of the language model ({record['dtype']}): {_b(terms.language)}"]
    lines += [f"   in the host's memory instead: {_b(terms.host)}"] if terms.host else []
    lines += [f"   {name}: {_b(size)}" for name, size in terms.extra.items()]
    lines.append(f"   activations of a pass of {found.settings.max_num_batched_tokens:,} tokens{peak}: {_b(terms.activation)}")
    return [*lines, *(f"   {name}: {_b(size)}" for name, size in terms.overhead.items())]


def _capacity(found: Fit, record: dict[str, Any]) -> list[str]:
    plan, length, cache = found.plan, found.length, found.kv_budget
    lines = []
    if record["num_blocks"] is not None:
        lines.append(f"   num_blocks = {cache:,} ÷ {plan.bytes_per_block:,} = {record['num_blocks']:,}")
        lines.append(f"   blocks_per_request at {length:,} tokens = {record['blocks_per_request']:,}")
    lines.append(f"   max_concurrency = {record['max_concurrency']:.4f}; kv_tokens = {record['kv_tokens']:,}")
    lines += ["", "5. One sequence"]
    lines += [f"   {line}" for line in cost_lines(record)]
    stored, sequences = found.content.needed(1, length), found.capacity // found.ranks.dp
    there = plan.parts(1, length).get("host_cache_bytes", 0)
    beside = f", and {_b(there)} in the host's memory" if there else ""
    lines.append(f"   content at {length:,} tokens: {_b(stored)}; the engine holds {_b(plan.needed(1, length))} for it{beside}")
    lines.append(f"   a decode step reads {_b(found.content.step_read(length))} of it")
    lines += ["", "6. What fits"]
    ends = ((sequences, "within"), (sequences + 1, "over"))
    for count, word in ends:
        need = plan.needed(count, length, found.options.shared_prefix)
        lines.append(f"   {sequences_of(count)} of {length:,} tokens need {need:,} B, {word} {plan.pool(cache):,} B")
    if found.sequences < found.capacity:
        lines.append(
            f"   of the replica's {found.capacity:,}, {found.sequences:,} hold with as many --max-num-seqs, which take more"
        )
    longest = found.longest
    asked = sequences_of(found.options.wanted)
    lines.append(f"   longest context of {asked} at once: " + ("no limit" if longest is None else f"{longest:,} tokens"))
    if found.longest_context is not None and found.longest_context != longest:
        lines.append(f"   the model is made for {found.longest_context:,} tokens")
    least = record["needed_utilization"]
    share = "no share of the memory" if least is None else f"a share of {least:g}"
    lines.append(f"   {asked} of {length:,} tokens: {_b(record['needed_kv_cache_memory_bytes'])} for the cache, {share}")
    sent, time = record["transfer_bytes"], record["transfer_s"]
    lines += ["", "7. Links"]
    lines.append(
        f"   prefill and decode on separate GPUs: {_b(sent)} per sequence" + (f", {seconds(time)} at least" if time else "")
    )
    if record.get("offload_num_seqs") is not None:
        step = record["offload_step_s"]
        lines.append(
            f"   in host memory {sequences_of(record['offload_num_seqs'])} more; a step over them moves "
            f"{_b(record['offload_step_bytes'])}" + (f", {seconds(step)} at least" if step else "")
        )
    return lines


def _b(size: int) -> str:
    return f"{size:,} B ({format_bytes(size)})"
