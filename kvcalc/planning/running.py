"""A running server's metrics beside what `serve` predicts for that load: as many clients as it has, of its mean lengths."""

from typing import Any, NamedTuple

from kvcalc.capacity import FitOptions, fit
from kvcalc.errors import UserError
from kvcalc.planning.metrics_text import Metrics
from kvcalc.serving.load import Load
from kvcalc.serving.run import serve
from kvcalc.serving.settings import ServerSettings
from kvcalc.timing.deployment import Deployment

PROMPTS, MOST_CLIENTS = 200, 10_000
PERCENTS = (50, 90, 99)
FULL = 0.95  # of the cache, from which on the next sequence may have to wait


class Figure(NamedTuple):
    """One figure as the server says it and as it is predicted, in its unit; None where one of them does not say."""

    name: str
    measured: float | None
    predicted: float | None
    unit: str


class Running(NamedTuple):
    deployment: Deployment
    metrics: Metrics
    clients: int
    input_len: int
    output_len: int
    figures: tuple[Figure, ...]
    record: dict[str, Any]
    sentence: str


def beside_served(metrics: Metrics, deployment: Deployment, clients: int = 0, lengths: tuple[int, int] = (0, 0)) -> Running:
    """The server beside a simulated one. clients: 0 for those that it runs and lets wait now, at least one. lengths: of input
    and output, 0 for the means of all requests so far. Raises UserError as `serve` does.
    """
    values = metrics.values
    done = values.get("requests", 0)
    now = int(values.get("running", 0) + values.get("waiting", 0))
    count = clients or max(1, now)
    if count > MOST_CLIENTS:
        raise UserError(
            f"{count:,} requests at once are more than {MOST_CLIENTS:,}, which are not simulated", hint="Give --users"
        )
    prompt = lengths[0] or max(1, round(values.get("prompt_tokens", 0) / done) if done else 1000)
    output = lengths[1] or max(1, round(values.get("output_tokens", 0) / done) if done else 200)
    load = Load(max_concurrency=count, num_prompts=max(PROMPTS, 2 * count), input_len=str(prompt), output_len=str(output))
    settings = ServerSettings(max_num_seqs=max(256, count), kv_cache_memory_bytes=_cache(metrics, deployment))
    record = serve(deployment, load.drawn(), load, settings).record
    figures = tuple(f for f in _figures(metrics, record, prompt, output, count) if (f.measured, f.predicted) != (None, None))
    return Running(deployment, metrics, count, prompt, output, figures, record, _sentence(metrics, deployment, figures))


def _cache(metrics: Metrics, deployment: Deployment) -> int | None:
    """Bytes of the cache that its blocks are, where it says how many; None for what `fit` finds."""
    if not metrics.blocks or metrics.engine != "vllm":
        return None
    options = FitOptions(engine="vllm", block_size=metrics.block_size, num_gpu_blocks_override=metrics.blocks)
    return fit(deployment, options).kv_budget


def _figures(metrics: Metrics, record: dict[str, Any], prompt: int, output: int, clients: int) -> list[Figure]:
    values, histograms = metrics.values, metrics.histograms
    queries = values.get("queries")
    hits = values.get("hits", 0) / queries if queries else values.get("hit_rate")
    found = [
        Figure("running", values.get("running"), record["mean_batch_size"], "requests"),
        Figure("waiting", values.get("waiting"), max(0.0, record["mean_in_system"] - record["mean_batch_size"]), "requests"),
        Figure("cache used", values.get("cache_usage"), record["kv_peak"], "share"),
        Figure("preemptions", values.get("preemptions"), record["preemptions"], "times"),
        Figure("prefix hits", hits, None, "share"),
    ]
    for name, said in (("ttft", "TTFT"), ("tpot", "TPOT")):
        histogram = histograms.get(name)
        found.append(Figure(f"{said} mean", histogram.mean if histogram else None, record[f"{name}_mean_s"], "s"))
        found += [
            Figure(f"{said} p{p}", histogram.quantile(p / 100) if histogram else None, record[f"{name}_p{p}_s"], "s")
            for p in PERCENTS
        ]
    return found


def _sentence(metrics: Metrics, deployment: Deployment, figures: tuple[Figure, ...]) -> str:
    """What the server does now, and what that means."""
    values = metrics.values
    usage, waiting, preempted = (values.get(n, 0.0) for n in ("cache_usage", "waiting", "preemptions"))
    told = (("running", "{:,.0f} running"), ("waiting", "{:,.0f} waiting"), ("cache_usage", "cache {:.0%} used"))
    known = (*told, ("preemptions", "{:,.0f} preemptions"))
    parts = [said.format(values[name]) for name, said in known if name in values]
    hits = next((f.measured for f in figures if f.name == "prefix hits"), None)
    parts += [f"{hits:.0%} of prompt tokens found in the cache"] if hits is not None else []
    if preempted and usage >= FULL:
        verdict = "the cache is too small for this load"
    elif waiting and usage >= FULL:
        verdict = "requests wait for the cache"
    elif waiting:
        verdict = "requests wait for a seat (--max-num-seqs) or for the pass, not for the cache"
    else:
        verdict = "nothing waits"
    where = f"{deployment.model.name} on {deployment.parallelism.gpus}× {deployment.gpu.name}, {metrics.engine}"
    return f"{where}: {', '.join(parts)}; {verdict}"


def running_records(found: Running) -> list[dict[str, Any]]:
    """A record a figure, and last the sentence."""
    common = {
        "engine": found.metrics.engine,
        "model": found.deployment.model.name,
        "gpu": found.deployment.gpu.name,
        "gpus": found.deployment.parallelism.gpus,
        "max_concurrency": found.clients,
        "input_len": found.input_len,
        "output_len": found.output_len,
        "time_basis": found.deployment.time_basis,
    }
    rows = [
        common | {"figure": f.name, "measured": f.measured, "predicted": f.predicted, "unit": f.unit, "said": None}
        for f in found.figures
    ]
    return [*rows, common | {"figure": "verdict", "measured": None, "predicted": None, "unit": None, "said": found.sentence}]
