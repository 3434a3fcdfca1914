"""`plan --explain`: each figure of the chosen point with its numbers put in, and the command that says how it comes about."""

import shlex

from kvcalc.planning.best import Answer
from kvcalc.planning.reasons import Point, reason
from kvcalc.planning.records import command, point_record
from kvcalc.planning.space import Space
from kvcalc.report.export import Record
from kvcalc.report.plans import sentence, where
from kvcalc.report.tables import seconds
from kvcalc.timing.deployment import Deployment


def explain_plan(answer: Answer, space: Space) -> str:
    """The point that an answer names first, or what comes nearest: its figures from those of `fit` and of passes."""
    point = answer.best[0] if answer.best else answer.nearest
    lines = [sentence(answer, space), ""]
    if point is None:
        return "\n".join(lines)
    price = answer.prices.get(point.gpu, 0.0)
    record = point_record(point, price)
    lines += [f"{where(point)}, {record['dtype']} weights, a cache in {record['kv_cache_dtype']}:"]
    found = [*_load(point, record), *_fits(point, record, space), *_times(point, record), *_rates(point, record, price)]
    lines += [f"  {line}" for line in found]
    failing = reason(point)
    return "\n".join([*lines, *([f"  fails: {failing}"] if failing else []), ""])


def _load(point: Point, r: Record) -> list[str]:
    """Replicas, GPUs and sequences of a replica."""
    need, replicas = point.block.need, _several(r["replicas"])
    apart = f" + {r['gpus']} · {r['prefill_replicas']} for prompts" if r["prefill_replicas"] else ""
    gpus = f"GPUs = {r['gpus']} of a replica · {replicas}{apart} = {r['total_gpus']}"
    if need.users:
        return [gpus, f"at once = ⌈{need.users:,} users / {replicas}⌉ = {r['max_num_seqs']:,}"]
    asked = max(need.rate * need.output_len, need.min_throughput)
    rate = f"{r['tokens_per_s']:,.6g}" if r["tokens_per_s"] else "unknown"
    carried = f"replicas = ⌈{asked:,g} tokens/s asked / {rate} of one⌉ = {r['replicas']}"
    return [f"at once = {r['max_num_seqs']:,}, one of those tried", carried, gpus]


def _several(replicas: int) -> str:
    return f"{replicas:,} replica{'s' * (replicas > 1)}"


def _timed(point: Point, value: float) -> str:
    """A time with its mark: a bound, or scaled from another GPU."""
    mark = {"bound": "≥ ", "scaled": "~ "}.get(point.deployment.time_basis, "")
    return mark + seconds(value)


def _fits(point: Point, r: Record, space: Space) -> list[str]:
    line = f"fit = {r['capacity_sequences']:,} sequences of {r['context']:,} tokens, at the low end of the engine's range"
    written = command(point, space)
    if written is None:
        return [line]
    beside = shlex.join(["--gpu", point.gpu, *written.beside])
    return [line, f"  kvcalc fit {beside} --explain -- {written.line}"]


def _times(point: Point, r: Record) -> list[str]:
    need, deployment, count = point.block.need, point.deployment, r["max_num_seqs"]
    if r["ttft_s"] is None and r["tpot_s"] is None:
        return []
    prompt, cached = need.lengths.prompt, need.lengths.cached
    behind = f" behind {cached:,} cached ones" if cached else ""
    found = []
    if r["ttft_s"] is not None:
        found = [f"TTFT = the pass of one prompt of {prompt - cached:,} tokens{behind} = {_timed(point, r['ttft_s'])}"]
        found += [_pass(deployment, "prefill", 1, prompt)] if not cached else []
    if r["tpot_s"] is None:
        return found
    value = _timed(point, r["tpot_s"])
    if r["draft"]:
        return [*found, f"TPOT = a speculative step of {count:,} sequences / tokens it yields = {value} (`latency --draft`)"]
    if not need.output_len:
        found.append(f"TPOT = a step of {count:,} sequences at {r['context']:,} tokens = {value}")
        return [*found, _pass(deployment, "decode", count, r["context"])]
    found.append(
        f"TPOT = mean of the {need.output_len - 1:,} steps of {count:,} sequences to {r['context'] - 1:,} tokens = {value}"
    )
    found.append(f"{_pass(deployment, 'decode', count, r['context'] - 1)}  (the last of them)")
    if r["e2e_s"] is not None:
        apart = "one prompt, its cache over the link" if r["prefill_replicas"] else f"{count:,} prompts at once"
        found.append(f"end to end = {apart}, then {need.output_len - 1:,} · {value} = {_timed(point, r['e2e_s'])}")
    return found


def _pass(deployment: Deployment, phase: str, count: int, context: int) -> str:
    """The command that walks through a pass; of pipeline stages the slowest."""
    ranks, precision = deployment.parallelism, deployment.precision
    sizes = {"--tp": ranks.tp, "--pp": ranks.pp, "--dp": ranks.dp, "--ep": ranks.ep, "--nodes": deployment.nodes}
    formats = {"--dtype": precision.dtype, "-q": precision.quantization, "--kv-cache-dtype": precision.kv_cache_dtype}
    words = ["--gpu", deployment.gpu.name, "--phase", phase, "--batch-size", str(count), "--context", str(context)]
    words += [word for name, size in sizes.items() if size > (name != "--nodes") for word in (name, str(size))]
    words += [word for name, value in formats.items() if value not in ("", "auto") for word in (name, value)]
    words += ["--engine", deployment.engine] if deployment.engine != "vllm" else []
    if not deployment.calibration:
        words += ["--bounds"] if deployment.engine != "none" else []
    elif deployment.calibration.stack != deployment.engine:
        words += ["--calibration", deployment.calibration.stack]
    stages = f"  (the slowest of {ranks.pp} stages)" if ranks.pp > 1 else ""
    return f"  kvcalc roofline {deployment.model.name} {shlex.join(words)} --explain{stages}"


def _rates(point: Point, r: Record, price: float) -> list[str]:
    need, rate, total = point.block.need, r["tokens_per_s"], r["total_tokens_per_s"]
    if rate is None:
        return []
    count, tpot, e2e = r["max_num_seqs"], seconds(r["tpot_s"]), r["e2e_s"]
    each = f"{count:,} / {tpot}" if e2e is None else f"{count:,} · {need.output_len:,} tokens / {seconds(e2e)}"
    if r["prefill_replicas"]:
        each = f"{count:,} · {need.output_len:,} tokens / ({need.output_len - 1:,} · {tpot})"
    found = [f"tokens/s of a replica = {each} = {rate:,.6g}"]
    found.append(
        f"tokens/s/GPU = {rate:,.6g} · {_several(r['replicas'])} / {r['total_gpus']} GPUs = {r['tokens_per_s_per_gpu']:,.6g}"
    )
    if total is None:
        return found
    found.append(f"tokens/s at the asked load = {total:,.6g}")
    if price:
        found.append(f"an hour = {price:g} · {r['total_gpus']} GPUs = {r['cost_per_hour']:,.2f}")
        worked = f"{r['cost_per_hour']:,.2f} / 3600 s / {total:,.6g} tokens/s · 10^6"
        found.append(f"per 1M tokens = {worked} = {r['cost_per_million_tokens']:,.4g}")
    if r["energy_per_token_j"] is not None:
        power = point.deployment.gpu.power_w
        found.append(f"J/token = {power:g} W · {r['total_gpus']} GPUs / {total:,.6g} tokens/s = {r['energy_per_token_j']:.4g}")
    return found
