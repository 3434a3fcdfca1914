"""`kvcalc latency`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcalc.cli import options as o
from kvcalc.cli.common import calibration, emit, lengths, note, parallelism, remarks
from kvcalc.layers.batch import Batch
from kvcalc.model.precision import Precision

if TYPE_CHECKING:
    from kvcalc.timing.deployment import Deployment


def run(
    model: o.OneModel,
    gpu: o.Gpus = "h100",
    input_len: Annotated[str, typer.Option("--input-len", "--isl", help="Prompt tokens; a list makes more rows.")] = "2000",
    output_len: Annotated[str, typer.Option("--output-len", "--osl", help="Generated tokens; a list makes more rows.")] = "500",
    batch_size: o.Batches = "1",
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Also the same generation without a KV cache.")] = False,
    prefix_len: Annotated[int, typer.Option("--prefix-len", help="Leading prompt tokens that are cached already.")] = 0,
    max_num_batched_tokens: Annotated[int, typer.Option("--max-num-batched-tokens", help="Chunk of the prefill; 0: whole.")] = 0,
    draft: Annotated[str, typer.Option("--draft", help="Speculate with a model, layers=N of this one, or mtp.")] = "",
    num_speculative_tokens: Annotated[int, typer.Option("--num-speculative-tokens", help="Drafted per step; 0: the best.")] = 0,
    acceptance_rate: Annotated[float, typer.Option("--acceptance-rate", help="Of a drafted token, 0 to 1.")] = 0.8,
    price_per_hour: Annotated[float, typer.Option("--price-per-hour", help="Of one GPU; adds cost per million tokens.")] = 0.0,
    dtype: o.Dtype = "auto",
    kv_cache_dtype: o.CacheDtype = "auto",
    quantization: o.Quant = "",
    mla_form: o.MlaForm = "auto",
    stack: o.Stack = "",
    calibration_from: o.CalibrationFrom = "",
    set_: o.Sets = [],  # noqa: B006 (typer copies it)
    tp: o.Tp = 1,
    pp: o.Pp = 1,
    dp: o.Dp = 1,
    ep: o.Ep = 1,
    enable_expert_parallel: o.ExpertParallel = False,
    dcp: o.Dcp = 1,
    plot: o.Plot = "",
    style: o.Style = "light",
    output: o.Output = o.OutputFormat.table,
) -> None:
    """One request: time to first token, time per token, end to end."""
    from kvcalc.errors import UserError
    from kvcalc.library.edit import edited
    from kvcalc.library.load import load_gpu, load_model
    from kvcalc.timing.deployment import Deployment

    for name, value, least in (("--prefix-len", prefix_len, 0), ("--max-num-batched-tokens", max_num_batched_tokens, 0)):
        if value < least:
            raise UserError(f"{name} {value} is below {least}")
    if not 0 <= num_speculative_tokens <= 1024 or not 0 <= price_per_hour < 1e9:
        raise UserError("--num-speculative-tokens should be 0 to 1024 and --price-per-hour 0 or more")
    chosen = edited(load_model(model), set_)
    precision = Precision(dtype, kv_cache_dtype, quantization)
    ranks = parallelism(tp, pp, dp, ep, enable_expert_parallel, dcp)
    records = []
    for card in [load_gpu(name.strip()) for name in gpu.split(",")]:
        deployment = Deployment(chosen, card, precision, ranks, mla_form, calibration=calibration(card, stack, calibration_from))
        for b in lengths(batch_size, "batch size"):
            for isl in lengths(input_len, "input length"):
                for osl in lengths(output_len, "output length"):
                    record = _record(deployment, isl, osl, b, prefix_len, max_num_batched_tokens, no_cache, price_per_hour)
                    if draft:
                        record |= _speculative(deployment, draft, isl, osl, b, num_speculative_tokens, acceptance_rate)
                    records.append(record)
                    _warn(deployment, isl + osl, b)
    remarks(chosen, max(lengths(input_len, "input length")) + max(lengths(output_len, "output length")))
    if plot:
        from kvcalc.report.figures import no_cache as figure
        from kvcalc.report.plots import save

        save(figure(chosen, max(lengths(input_len, "")[-1] + lengths(output_len, "")[-1], 64), precision), plot, style)
    if not emit(records, output) and plot != "-":
        from kvcalc.report.serving import show_latency

        show_latency(records)


def _warn(deployment: "Deployment", context: int, batch_size: int) -> None:
    """A remark where weights and cache alone exceed the GPU's memory: the times are then of a machine that does not exist."""
    from kvcalc.model.memory import cache_size, weight_bytes
    from kvcalc.units import format_bytes

    cache = cache_size(deployment.model, context, batch_size, deployment.precision, parallelism=deployment.parallelism).stored
    held = weight_bytes(deployment.model, deployment.precision, deployment.parallelism) + cache
    if held > deployment.gpu.memory_bytes:
        need, has = format_bytes(held), format_bytes(deployment.gpu.memory_bytes)
        note(
            f"{deployment.model.name}, batch {batch_size:,}: weights and cache take {need} of the {has} of {deployment.gpu.name}; see `fit`"
        )


def _record(
    deployment: "Deployment", isl: int, osl: int, b: int, prefix: int, chunk: int, no_cache: bool, price: float
) -> dict[str, Any]:
    from kvcalc.serving.latency import cost_per_million, request, token_projections, without_cache

    found = request(deployment, isl, osl, b, prefix, chunk)
    per_gpu = deployment.parallelism.gpus
    record = {
        "model": deployment.model.name,
        "gpu": deployment.gpu.name,
        "gpus": per_gpu,
        "basis": deployment.basis,
        "batch_size": b,
    }
    record |= {"input_len": isl, "output_len": osl, **found._asdict(), "speedup": None, "tokens_per_step": 1.0}
    record["time_p90_error"] = deployment.p90_error(Batch.decode(isl + osl, b))
    record["output_tokens_per_s"] = b * osl / found.e2e_s
    if price:
        record["cost_per_million_tokens"] = cost_per_million(price, per_gpu, found.e2e_s, b * osl)
    if no_cache:
        plain = without_cache(deployment, isl, osl, b)
        record |= {f"no_cache_{k}": v for k, v in plain._asdict().items()}
        record["speedup"] = plain.e2e_s / found.e2e_s
        needed, processed = token_projections(isl, osl)
        record["no_cache_token_projections"] = b * processed
        record["no_cache_redundant_projections"] = b * (processed - needed)
    return record


def _speculative(
    deployment: "Deployment", draft: str, isl: int, osl: int, b: int, drafted: int, acceptance: float
) -> dict[str, Any]:
    import msgspec

    from kvcalc.model.memory import cache_size, weight_bytes
    from kvcalc.serving.speculation import best_drafted, draft_model, speculate, stops_paying

    small = draft_model(deployment.model, draft)
    other = msgspec.structs.replace(deployment, model=small)
    context = isl + max(1, osl // 2)
    found = (
        speculate(deployment, other, context, b, drafted, acceptance)
        if drafted
        else best_drafted(deployment, other, context, b, acceptance)
    )
    return {
        "draft": small.name,
        "num_speculative_tokens": found.drafted,
        "acceptance_rate": acceptance,
        "tokens_per_step": found.tokens_per_step,
        "draft_s": found.draft_s,
        "verify_s": found.verify_s,
        "speculative_tpot_s": found.tpot_s,
        "speculative_speedup": found.speedup,
        "stops_paying_at_batch": stops_paying(deployment, other, context, found.drafted, acceptance),
        "draft_weight_bytes": weight_bytes(small, deployment.precision, deployment.parallelism),
        "draft_cache_bytes": cache_size(small, isl + osl, b, deployment.precision, parallelism=deployment.parallelism).stored,
    }
