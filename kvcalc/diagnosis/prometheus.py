"""Read the Prometheus metrics of a running server and compare them with a prediction.

The metrics come from a file or an address. Their names are those of `vllm/v1/metrics/loggers.py`,
of V0's `engine/metrics.py`, and of SGLang's `metrics/collector.py`. Values of a name are summed
over
its labels, shares are averaged. The prediction is `serve` with the same number of clients and the
mean lengths.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from kvcalc.capacity import FitOptions, fit
from kvcalc.errors import UserError
from kvcalc.library.files import read_text
from kvcalc.records import Record
from kvcalc.serving.arrivals import Workload
from kvcalc.serving.server import serve
from kvcalc.serving.server_settings import ServerSettings
from kvcalc.timing.deployment import TimedDeployment

MAX_BYTES, MAX_LINE, MAX_VALUE = 8 << 20, 4096, 1e18
TIMEOUT_S = 10.0
_LINE = re.compile(
    r"(vllm|sglang)[:_]([a-zA-Z_]{1,100})(?:\{(.{0,3000})\})? "
    r"(-?[\d.]{1,40}(?:e[+-]?\d{1,3})?)(?: \d{1,20})?$"
)
_LABEL = re.compile(r'([a-z_]{1,60})="([^"]{0,300})"')
# Our name → the engines' names, newer ones first; the first that exists counts.
GAUGES = {
    "running": ("num_requests_running", "num_running_reqs"),
    "waiting": ("num_requests_waiting", "num_queue_reqs"),
    "cache_usage": ("kv_cache_usage_perc", "gpu_cache_usage_perc", "token_usage"),
    "hit_rate": ("cache_hit_rate", "gpu_prefix_cache_hit_rate"),
}
COUNTERS = {
    "preemptions": ("num_preemptions_total", "num_preemptions"),
    "queries": (
        "prefix_cache_queries_total",
        "prefix_cache_queries",
        "gpu_prefix_cache_queries_total",
        "gpu_prefix_cache_queries",
    ),
    "hits": (
        "prefix_cache_hits_total",
        "prefix_cache_hits",
        "gpu_prefix_cache_hits_total",
        "gpu_prefix_cache_hits",
    ),
    "requests": ("request_success_total", "num_requests_total"),
    "prompt_tokens": ("prompt_tokens_total",),
    "output_tokens": ("generation_tokens_total",),
}
HISTOGRAMS = {
    "ttft": ("time_to_first_token_seconds",),
    "tpot": (
        "request_time_per_output_token_seconds",
        "time_per_output_token_seconds",
        "inter_token_latency_seconds",
    ),
}
SHARES = ("cache_usage", "hit_rate")


class Histogram(NamedTuple):
    """A histogram: (upper bound, events up to it) of each bucket, the sum, and the number of
    events."""

    buckets: tuple[tuple[float, float], ...]
    total: float
    events: float

    @property
    def mean(self) -> float | None:
        return self.total / self.events if self.events else None

    def quantile(self, share: float) -> float | None:
        """Return a quantile, linear within its bucket as Prometheus' histogram_quantile.

        None in the last bucket, which has no upper bound.
        """
        wanted, below, before = share * self.events, 0.0, 0.0
        if not self.events:
            return None
        for bound, count in self.buckets:
            if count >= wanted and count > before:
                if bound == float("inf"):
                    return None
                return below + (bound - below) * (wanted - before) / (count - before)
            below, before = bound, count
        return None


class Metrics(NamedTuple):
    """The metrics of a server.

    Attributes:
        model: The server's name of its model.
        values: Gauges and counters by our names.
        blocks: Number of cache blocks; 0 if unknown.
    """

    engine: str
    model: str
    values: dict[str, float]
    histograms: dict[str, Histogram]
    blocks: int = 0
    block_size: int = 0


def read_metrics(where: str) -> Metrics:
    """Return the metrics in a file or at an address. Raises UserError if there are none of vLLM or
    SGLang."""
    text = (
        _download(where) if re.match(r"https?://", where) else read_text(Path(where), MAX_BYTES)
    )
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    buckets: dict[str, dict[float, float]] = {}
    labels: dict[str, str] = {}
    engine = ""
    for line in text.splitlines():
        match = _LINE.match(line) if len(line) <= MAX_LINE else None
        if match is None:
            continue
        engine, name, result = match[1], match[2], dict(_LABEL.findall(match[3] or ""))
        value = _number(match[4])
        if not 0 <= value < MAX_VALUE:
            continue  # nothing that a server counts
        if name.endswith("_bucket") and "le" in result:
            bounds = buckets.setdefault(name.removesuffix("_bucket"), {})
            bound = float("inf") if result["le"] == "+Inf" else _number(result["le"])
            bounds[bound] = bounds.get(bound, 0.0) + value
            continue
        sums[name], counts[name] = sums.get(name, 0.0) + value, counts.get(name, 0) + 1
        labels |= {
            n: v
            for n, v in result.items()
            if n in ("model_name", "num_gpu_blocks", "block_size") and v
        }
    if not engine:
        raise UserError(
            "has no metrics of vLLM or SGLang", where, "Give the text of their /metrics"
        )
    values = {
        name: sums[first]
        for name, theirs in (GAUGES | COUNTERS).items()
        if (first := _first(theirs, sums))
    }
    values |= {n: values[n] / counts[_first(GAUGES[n], sums)] for n in SHARES if n in values}
    histograms = {
        name: Histogram(
            tuple(sorted(buckets.get(first, {}).items())),
            sums.get(f"{first}_sum", 0.0),
            sums.get(f"{first}_count", 0.0),
        )
        for name, theirs in HISTOGRAMS.items()
        if (first := next((t for t in theirs if f"{t}_count" in sums), ""))
    }
    blocks = [
        int(labels[n]) if labels.get(n, "").isdigit() else 0
        for n in ("num_gpu_blocks", "block_size")
    ]
    return Metrics(engine, labels.get("model_name", ""), values, histograms, *blocks)


def _first(names: Iterable[str], known: dict[str, float]) -> str:
    return next((name for name in names if name in known), "")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _download(address: str) -> str:
    """Return the text at an address. Raises UserError if there is none."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import urlopen

    try:
        host = urlsplit(address)
        if not host.hostname or host.username:
            raise UserError("is not an address", address, "Write http://host:8000/metrics")
        url = address if host.path not in ("", "/") else f"{address.rstrip('/')}/metrics"
        with urlopen(url, timeout=TIMEOUT_S) as answer:
            data = answer.read(MAX_BYTES + 1)
    except HTTPError as error:
        raise UserError(f"answers with status {error.code}", address) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(f"cannot be reached: {str(reason).lower()}", address) from None
    if len(data) > MAX_BYTES:
        raise UserError(f"sends more than {MAX_BYTES:,} bytes", address)
    return str(data.decode("utf-8", errors="replace"))


MIN_REQUESTS, MAX_CLIENTS = 200, 10_000
PERCENTS = (50, 90, 99)
FULL = 0.95  # share of the cache from which the next sequence may have to wait


class LiveFigure(NamedTuple):
    """A figure of the server and its prediction; None if one of them is unknown."""

    name: str
    measured: float | None
    predicted: float | None
    unit: str


class LiveServer(NamedTuple):
    """A running server compared with its prediction."""

    deployment: TimedDeployment
    metrics: Metrics
    clients: int
    input_len: int
    output_len: int
    figures: tuple[LiveFigure, ...]
    record: Record
    sentence: str


def beside_served(
    metrics: Metrics,
    deployment: TimedDeployment,
    clients: int = 0,
    lengths: tuple[int, int] = (0, 0),
) -> LiveServer:
    """Compare the server with a simulated one.

    Args:
        clients: Number of clients; 0 for the requests that run or wait now, at least one.
        lengths: Input and output tokens; 0 for the means of all requests so far.

    Raises:
        UserError: As `serve`.
    """
    values = metrics.values
    done = values.get("requests", 0)
    now = int(values.get("running", 0) + values.get("waiting", 0))
    count = clients or max(1, now)
    if count > MAX_CLIENTS:
        raise UserError(
            f"{count:,} concurrent requests are more than {MAX_CLIENTS:,}",
            hint="Give --users",
        )
    prompt = lengths[0] or max(
        1, round(values.get("prompt_tokens", 0) / done) if done else 1000
    )
    output = lengths[1] or max(1, round(values.get("output_tokens", 0) / done) if done else 200)
    load = Workload(
        max_concurrency=count,
        num_prompts=max(MIN_REQUESTS, 2 * count),
        input_len=str(prompt),
        output_len=str(output),
    )
    settings = ServerSettings(
        max_num_seqs=max(256, count), kv_cache_memory_bytes=_cache(metrics, deployment)
    )
    record = serve(deployment, load, settings).record
    figures = tuple(
        f
        for f in _figures(metrics, record, prompt, output, count)
        if (f.measured, f.predicted) != (None, None)
    )
    return LiveServer(
        deployment,
        metrics,
        count,
        prompt,
        output,
        figures,
        record,
        _sentence(metrics, deployment, figures),
    )


def _cache(metrics: Metrics, deployment: TimedDeployment) -> int | None:
    """Return the bytes of the server's cache blocks; None for the budget of `fit`."""
    if not metrics.blocks or metrics.engine != "vllm":
        return None
    options = FitOptions(
        engine="vllm",
        block_size=metrics.block_size,
        num_gpu_blocks_override=metrics.blocks,
    )
    return fit(deployment, options).kv_budget


def _figures(
    metrics: Metrics, record: Record, prompt: int, output: int, clients: int
) -> list[LiveFigure]:
    values, histograms = metrics.values, metrics.histograms
    queries = values.get("queries")
    hits = values.get("hits", 0) / queries if queries else values.get("hit_rate")
    results = [
        LiveFigure("running", values.get("running"), record["mean_batch_size"], "requests"),
        LiveFigure(
            "waiting",
            values.get("waiting"),
            max(0.0, record["mean_in_system"] - record["mean_batch_size"]),
            "requests",
        ),
        LiveFigure("cache used", values.get("cache_usage"), record["kv_peak"], "share"),
        LiveFigure("preemptions", values.get("preemptions"), record["preemptions"], "times"),
        LiveFigure("prefix hits", hits, None, "share"),
    ]
    for name, label in (("ttft", "TTFT"), ("tpot", "TPOT")):
        histogram = histograms.get(name, Histogram((), 0.0, 0.0))
        results.append(
            LiveFigure(f"{label} mean", histogram.mean, record[f"{name}_mean_s"], "s")
        )
        for percent in PERCENTS:
            measured = histogram.quantile(percent / 100)
            predicted = record[f"{name}_p{percent}_s"]
            results.append(LiveFigure(f"{label} p{percent}", measured, predicted, "s"))
    return results


def _sentence(
    metrics: Metrics, deployment: TimedDeployment, figures: tuple[LiveFigure, ...]
) -> str:
    """Return a sentence on what the server does now, and what that means."""
    values = metrics.values
    usage, waiting, preempted = (
        values.get(n, 0.0) for n in ("cache_usage", "waiting", "preemptions")
    )
    stated = (
        ("running", "{:,.0f} running"),
        ("waiting", "{:,.0f} waiting"),
        ("cache_usage", "cache {:.0%} used"),
    )
    known = (*stated, ("preemptions", "{:,.0f} preemptions"))
    parts = [said.format(values[name]) for name, said in known if name in values]
    hits = next((f.measured for f in figures if f.name == "prefix hits"), None)
    parts += [f"{hits:.0%} of prompt tokens found in the cache"] if hits is not None else []
    if preempted and usage >= FULL:
        verdict = "the cache is too small for this load"
    elif waiting and usage >= FULL:
        verdict = "requests wait for the cache"
    elif waiting:
        verdict = "requests wait for --max-num-seqs or for the pass, not for the cache"
    else:
        verdict = "nothing waits"
    where = (
        f"{deployment.model.name} on {deployment.parallelism.gpus}× {deployment.gpu.name}, "
        f"{metrics.engine}"
    )
    return f"{where}: {', '.join(parts)}; {verdict}"


def running_records(found: LiveServer) -> list[Record]:
    """Return one record per figure, and last the sentence."""
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
    names = ("figure", "measured", "predicted", "unit", "said")
    rows: list[tuple[object, ...]] = [(*figure, None) for figure in found.figures]
    rows.append(("verdict", None, None, None, found.sentence))
    return [common | dict(zip(names, row, strict=True)) for row in rows]
