"""`kvcalc serve`."""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcalc.cli import options as o
from kvcalc.cli.common import calibration, emit, note, parallelism
from kvcalc.model.precision import Precision

if TYPE_CHECKING:
    from kvcalc.serving.requests import Requests
    from kvcalc.timing.deployment import Deployment

MOST_RUNS = 1000


def _option(panel: str, *names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel)


def _load(*names: str, help: str) -> Any:
    return _option("Load", *names, help=help)


def _server(*names: str, help: str) -> Any:
    return _option("Server", *names, help=help)


def run(
    model: o.OneModel,
    gpu: o.Gpus = "h100",
    requests: Annotated[str, _load("--requests", help="A CSV of arrival_s, input_len, output_len, or an Azure trace.")] = "",
    rate: Annotated[str, _load("--rate", help="Requests per second; a list makes more rows; inf: all at once.")] = "inf",
    burstiness: Annotated[float, _load("--burstiness", help="1: Poisson; below 1: bursts; above: more regular.")] = 1.0,
    max_concurrency: Annotated[int, _load("--max-concurrency", help="Clients in a closed loop; 0: no limit.")] = 0,
    num_prompts: Annotated[int, _load("--num-prompts", help="Requests; 0: 1000, or all of a file.")] = 0,
    input_len: Annotated[str, _load("--input-len", "--isl", help="1000, uniform:100,2000 or lognormal:MEAN,P99.")] = "1000",
    output_len: Annotated[str, _load("--output-len", "--osl", help="Likewise.")] = "200",
    seed: Annotated[int, _load("--seed", help="Of arrivals and lengths.")] = 0,
    policy: Annotated[str, _server("--policy", help="continuous, static or both.")] = "continuous",
    cache: Annotated[str, _server("--cache", help="paged, contiguous or both.")] = "paged",
    max_num_seqs: Annotated[int, _server("--max-num-seqs", help="Sequences at once, of the whole replica.")] = 256,
    max_num_batched_tokens: Annotated[int, _server("--max-num-batched-tokens", help="Of one pass; 0: by GPU.")] = 0,
    max_model_len: Annotated[str, _server("--max-model-len", help="Tokens of a request; what contiguous reserves.")] = "",
    preemption: Annotated[str, _server("--preemption", help="recompute or swap.")] = "recompute",
    batch_timeout: Annotated[float, _server("--batch-timeout", help="Seconds a static batch waits to be full.")] = 0.0,
    block_size: o.BlockSize = 16,
    gpu_memory_utilization: Annotated[float, _server("--gpu-memory-utilization", help="Share of the memory.")] = 0.92,
    kv_cache_memory_bytes: Annotated[str, _server("--kv-cache-memory-bytes", help="The cache's memory itself.")] = "",
    slo_ttft: Annotated[float, typer.Option("--slo-ttft", help="Seconds to the first token that are good; 0: any.")] = 0.0,
    slo_tpot: Annotated[float, typer.Option("--slo-tpot", help="Seconds per further token that are good; 0: any.")] = 0.0,
    price_per_hour: Annotated[float, typer.Option("--price-per-hour", help="Of one GPU; adds cost per million tokens.")] = 0.0,
    timeline: Annotated[str, typer.Option("--timeline", help="Write the passes to a CSV file.")] = "",
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
    """A server under load, simulated pass by pass."""
    from kvcalc.errors import UserError
    from kvcalc.library.edit import edited
    from kvcalc.library.load import load_gpu, load_model
    from kvcalc.serving.metrics import Goals
    from kvcalc.serving.run import Load, ServerSettings, serve
    from kvcalc.timing.deployment import Deployment
    from kvcalc.units import parse_bytes, parse_tokens

    chosen = edited(load_model(model), set_)
    cards = [load_gpu(name.strip()) for name in gpu.split(",")]
    ranks = parallelism(tp, pp, dp, ep, enable_expert_parallel, dcp)
    precision = Precision(dtype, kv_cache_dtype, quantization)
    settings = ServerSettings(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=parse_tokens(max_model_len, "max-model-len") if max_model_len else 0,
        preemption=preemption,
        batch_timeout=batch_timeout,
        block_size=block_size,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_memory_bytes=parse_bytes(kv_cache_memory_bytes, "kv-cache-memory-bytes") if kv_cache_memory_bytes else 0,
        price_per_hour=price_per_hour,
        goals=Goals(slo_ttft, slo_tpot),
    )
    loads = [
        Load(requests, _rate(word), burstiness, max_concurrency, num_prompts, input_len, output_len, seed)
        for word in rate.split(",")
    ]
    policies, caches = ([word.strip() for word in text.split(",")] for text in (policy, cache))
    points = list(product(cards, policies, caches, loads))
    if len(points) > MOST_RUNS:
        raise UserError(f"more than {MOST_RUNS:,} runs asked for")
    _check_files(timeline, plot, len(points))
    laws = {card.name: calibration(card, stack, calibration_from) for card in cards}
    drawn = {load: load.requests() for load in loads}
    runs = []
    with _progress(sum(len(drawn[load]) for *_, load in points)) as told:
        for card, p, c, load in points:
            deployment = Deployment(chosen, card, precision, ranks, mla_form, calibration=laws[card.name])
            runs.append(serve(deployment, drawn[load], load, settings, p, c, told))
    records = [r.record for r in runs]
    _remarks(deployment, list(drawn.values()), records)
    if timeline:
        from kvcalc.library.files import write_text
        from kvcalc.report.export import to_csv
        from kvcalc.serving.log import PassRow

        rows = [row._asdict() for log in runs[0].served.logs for row in log.rows]
        write_text(Path(timeline), to_csv(rows) if rows else ",".join(PassRow._fields) + "\n")
        print(f"wrote {timeline}", file=sys.stderr)
    if plot:
        from kvcalc.report.figures_serving import load_curve, occupancy
        from kvcalc.report.plots import save

        save(occupancy(runs[0]) if len(runs) == 1 else load_curve(records), plot, style)
    if not emit(records, output) and plot != "-":
        from kvcalc.report.serving import show_serve

        show_serve(records)


def _rate(text: str) -> float:
    from kvcalc.errors import UserError

    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise UserError(f"--rate {text!r} is not a number of requests per second above 0")
    return value


def _check_files(timeline: str, plot: str, runs: int) -> None:
    """Refuse what could not be written before the simulation rather than after it."""
    from kvcalc.errors import UserError
    from kvcalc.report.plots import SUFFIXES

    if timeline and runs > 1:
        raise UserError("--timeline is of one run", hint="Give one --gpu, --policy, --cache and --rate")
    if timeline and not Path(timeline).absolute().parent.is_dir():
        raise UserError("cannot be written: no such folder", timeline)
    if plot and plot != "-" and Path(plot).suffix.lower() not in SUFFIXES:
        raise UserError(f"--plot {plot!r} should end in one of {', '.join(SUFFIXES)}, or be - for the terminal")


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on stderr where that is a terminal; yields what is told of each request that is done."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda count: bar.advance(task, count)


def _remarks(deployment: "Deployment", drawn: "list[Requests]", records: list[dict[str, Any]]) -> None:
    for text in deployment.model.notes:
        note(f"{deployment.model.name}: {text}")
    longest = max(int((r.input_len + r.output_len).max()) for r in drawn)
    if deployment.model.max_context and longest > deployment.model.max_context:
        note(
            f"requests of {longest:,} tokens are beyond the {deployment.model.max_context:,} that {deployment.model.name} is made for"
        )
    for r in records:
        where = f"{r['gpu']}, {r['policy']}, {r['cache']}" + (f", rate {r['rate']:g}" if r["rate"] else "")
        if r["rejected"]:
            note(f"{where}: {r['rejected']:,} requests can never fit and are rejected")
        if r["diverges"]:
            note(f"{where}: the queue diverges: the load is beyond capacity, and waiting grows as long as requests come")
