"""The records of `plan`: a point as a flat record, every figure under its own key; and all points of a block, for a file."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvcalc.capacity.commands import Written, command_of
from kvcalc.layers.batch import Batch
from kvcalc.planning.best import Answer, is_bound
from kvcalc.planning.block import Block
from kvcalc.planning.launch import CONSUMER, launch_lines, with_role
from kvcalc.planning.precisions import below_published, paid
from kvcalc.planning.reasons import Point, known, points_of, reason
from kvcalc.planning.space import Space
from kvcalc.timing.deployment import Deployment
from kvcalc.timing.nodes import nodes_of


def point_record(point: Point, price: float = 0.0) -> dict[str, Any]:
    """A point as a record. price: of an hour of one GPU; 0 for no cost.

    Capacity and times are of one replica that is set up for max_num_seqs. total_tokens_per_s: of all replicas at the asked
    load, which cost and energy are of. energy_per_token_j: all GPUs at their full power for that time, no more where the time
    is predicted. reason: what does not hold first; null where all does.
    """
    block, at, deployment = point.block, point.at, point.deployment
    total, rate = known(block.total[at]), known(block.rate[at])
    power = deployment.gpu.power_w
    return {
        **_asked(block),
        **_deployed(deployment),
        **_speculated(block),
        "replicas": int(block.replicas[at]),
        "prefill_replicas": int(block.prefill[at]),
        "total_gpus": point.gpus,
        "max_num_seqs": int(block.counts[at]),
        "capacity_sequences": int(block.capacity[at]),
        "kv_budget_low_bytes": max(0, int(block.left[at])),
        "ttft_s": known(block.ttft[at]),
        "tpot_s": point.tpot,
        "e2e_s": point.e2e,
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": known(block.rate_per_gpu[at]),
        "total_tokens_per_s": total,
        "cost_per_hour": price * point.gpus if price else None,
        "cost_per_million_tokens": price * point.gpus / 3600 / total * 1e6 if price and total else None,
        "energy_per_token_j": power * point.gpus / total if power and total else None,
        "time_basis": deployment.time_basis,
        "meets": point.meets,
        "reason": reason(point),
    }


def _asked(block: Block) -> dict[str, Any]:
    need = block.need
    return {
        "users": need.users or None,
        "rate": need.rate or None,
        "context": need.lengths.context,
        "input_len": need.input_len or None,
        "output_len": need.output_len or None,
    }


def _speculated(block: Block) -> dict[str, Any]:
    """draft: null where none is."""
    found = block.speculated
    names = "draft", "num_speculative_tokens", "acceptance_rate"
    return dict(zip(names, (found.draft, found.drafted, found.acceptance) if found else (None,) * 3, strict=True))


def _deployed(deployment: Deployment) -> dict[str, Any]:
    ranks, precision = deployment.parallelism, deployment.precision
    return {
        "model": deployment.model.name,
        "gpu": deployment.gpu.name,
        "gpus": ranks.gpus,
        "nodes": nodes_of(deployment.ranks, deployment.gpu, deployment.nodes),
        "tensor_parallel_size": ranks.tp,
        "pipeline_parallel_size": ranks.pp,
        "data_parallel_size": ranks.dp,
        "expert_parallel_size": ranks.ep,
        "dtype": deployment.formats.weights_label,
        "quantization": precision.quantization or None,
        "kv_cache_dtype": deployment.formats.kv_cache_dtype,
    }


def answer_records(answer: Answer, space: Space) -> list[dict[str, Any]]:
    """The five best, or what comes nearest where nothing meets the need, then up to five kinds of GPU that are not ranked with
    them, as their times are bounds; what only these are told beside it.

    pareto: on the front of TPOT against tokens per second of a GPU, or of its price, among all points that fit and have times
    of the same kind, predictions or bounds. time_p90_error,
    uncalibrated_share: of its decode step. quality: what is below the published precision, or null.
    """
    return [point_record(p, answer.prices.get(p.gpu, 0.0)) | _beside(p, answer, space) for p in answer.listed]


def _beside(point: Point, answer: Answer, space: Space) -> dict[str, Any]:
    block, at, deployment = point.block, point.at, point.deployment
    step = Batch.decode(block.need.lengths.context, int(block.counts[at]))
    price = answer.prices.get(point.gpu, 1.0)
    speed = block.rate_per_gpu[at] / price
    line, lines = launched(point, space)
    return {
        "pareto": answer.fronts[is_bound(point)].holds(float(block.tpot[at]), float(speed)),
        "basis": deployment.basis,
        "uncalibrated_share": float(deployment.uncalibrated_share(step)),
        "time_p90_error": deployment.p90_error(step),
        "quality": _quality(deployment),
        "engine": space.options.engine,
        "command": line,
        "commands": lines,
    }


def launched(point: Point, space: Space) -> tuple[str | None, list[str]]:
    """Return the line of one replica, and the lines that start the whole deployment.

    The lines of replicas for prompts alone are known of vLLM; of another engine there are none.
    """
    block, written = point.block, command(point, space)
    prefill, decode = int(block.prefill[point.at]), int(block.replicas[point.at])
    if written is None or (prefill and space.options.engine != "vllm"):
        return None, []
    lines = launch_lines(written.line, point.deployment.gpu, point.deployment.parallelism, prefill, decode)
    return with_role(written.line, CONSUMER) if prefill else written.line, lines


def command(point: Point, space: Space) -> Written | None:
    """The engine's command line of one replica; None where no flags of it say the same.

    Seats are of a rank under data parallelism: where its ranks do not share the sequences evenly, all have the fullest one's.
    """
    block, deployment = point.block, point.deployment
    ranks = deployment.parallelism
    options = space.options_of(block.need, ranks.sequences(int(block.counts[point.at])) * ranks.dp)
    return command_of(deployment, block.speculated.options(deployment.model, options) if block.speculated else options)


def _quality(deployment: Deployment) -> str | None:
    lower = below_published(deployment.model, deployment.precision)
    return "; ".join(paid(low, f", published in {low.former}") for low in lower) or None


def block_records(block: Block, prices: Mapping[str, float]) -> Iterator[dict[str, Any]]:
    """Every point of a block."""
    return (point_record(point, prices.get(point.gpu, 0.0)) for point in points_of(block))
