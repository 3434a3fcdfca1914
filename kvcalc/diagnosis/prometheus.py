"""Read the Prometheus metrics of a running server and compare them with a prediction.

The metrics come from a file or an address. Their names are in `vllm/v1/metrics/loggers.py`, in V0's
`engine/metrics.py`, and in SGLang's `metrics/collector.py`. Values of a name are summed
over its labels, shares are averaged. The prediction is `serve` with the same number of clients and
the mean lengths.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from kvcalc.capacity import FitOptions, fit
from kvcalc.errors import UserError
from kvcalc.library.files import read_text
from kvcalc.question.serving_options import ServerSettings, Workload
from kvcalc.records import Record
from kvcalc.records.plan import RunningRecord
from kvcalc.serving.server import serve
from kvcalc.timing.deployment import TimedDeployment

MAX_BYTES, MAX_LINE, MAX_VALUE = 8 << 20, 4096, 1e18
TIMEOUT_S = 10.0
_NUMBER = r"\d{1,40}\.?\d{0,40}(?:e[+-]?\d{1,3})?"
_LINE = re.compile(
    rf"(vllm|sglang)[:_]([a-zA-Z_]{{1,100}})(?:\{{(.{{0,3000}})\}})? ({_NUMBER})(?: \d{{1,20}})?$"
)
_LABEL = re.compile(r'([a-z_]{1,60})="([^"]{0,300})"')
_BOUND = re.compile(rf'\ble="(\+Inf|{_NUMBER})"')
# Names of the engines by our name, newer ones first. The first that a server has counts.
ENGINE_NAMES = {
    "running": "num_requests_running num_running_reqs",
    "waiting": "num_requests_waiting num_queue_reqs",
    "cache_usage": "kv_cache_usage_perc gpu_cache_usage_perc token_usage",
    "hit_rate": "cache_hit_rate gpu_prefix_cache_hit_rate",
    "preemptions": "num_preemptions_total num_preemptions",
    "queries": "prefix_cache_queries_total prefix_cache_queries "
    "gpu_prefix_cache_queries_total gpu_prefix_cache_queries",
    "hits": "prefix_cache_hits_total prefix_cache_hits "
    "gpu_prefix_cache_hits_total gpu_prefix_cache_hits",
    "requests": "request_success_total num_requests_total",
    "prompt_tokens": "prompt_tokens_total",
    "output_tokens": "generation_tokens_total",
}
HISTOGRAM_NAMES = {
    "ttft": "time_to_first_token_seconds",
    "tpot": "request_time_per_output_token_seconds time_per_output_token_seconds "
    "inter_token_latency_seconds",
}
SHARES = ("cache_usage", "hit_rate")
MIN_REQUESTS, MAX_CLIENTS = 200, 10_000
FULL_USAGE = 0.95  # share of the cache from which the next sequence may have to wait


class Histogram(NamedTuple):
    """A histogram of events.

    Attributes:
        buckets: Upper bound of each bucket, and the number of events up to it.
        total: Sum of the events' values.
        events: Number of events.
    """

    buckets: tuple[tuple[float, float], ...] = ()
    total: float = 0.0
    events: float = 0.0

    @property
    def mean(self) -> float | None:
        return self.total / self.events if self.events else None

    def quantile(self, share: float) -> float | None:
        """Return a quantile, linear within its bucket as Prometheus' histogram_quantile.

        None in the last bucket, which has no upper bound.
        """
        rank = share * self.events
        lower_bound = lower_count = 0.0
        for bound, count in self.buckets if self.events else ():
            if count >= rank and count > lower_count:
                part = (rank - lower_count) / (count - lower_count)
                width = bound - lower_bound
                return None if bound == float("inf") else lower_bound + width * part
            lower_bound, lower_count = bound, count
        return None


class Metrics(NamedTuple):
    """The metrics of a server.

    Attributes:
        model: The server's name of its model.
        values: Gauges and counters by our names.
        blocks: Number of cache blocks; 0 if unknown.
        block_size: Tokens of a block; 0 if unknown.
    """

    engine: str
    model: str
    values: dict[str, float]
    histograms: dict[str, Histogram]
    blocks: int = 0
    block_size: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that the server found in its cache."""
        queries = self.values.get("queries")
        return self.values.get("hits", 0) / queries if queries else self.values.get("hit_rate")

    def mean_tokens(self, name: str, default: int) -> int:
        """Return the mean tokens of a request; the default before the first request ends."""
        requests = self.values.get("requests", 0)
        return max(1, round(self.values.get(name, 0) / requests)) if requests else default


def read_metrics(source: str) -> Metrics:
    """Return the metrics in a file or at an address. Raises UserError if there are none of vLLM or
    SGLang."""
    is_address = re.match(r"https?://", source)
    text = _download(source) if is_address else read_text(Path(source), MAX_BYTES)
    samples: dict[str, list[float]] = {}
    buckets: dict[str, dict[float, float]] = {}
    labels: dict[str, str] = {}
    engine = ""
    for line in text.splitlines():
        match = _LINE.match(line) if len(line) <= MAX_LINE else None
        if match is None:
            continue
        engine, name, label_text, number = match.groups(default="")
        value, bound = float(number), _BOUND.search(label_text)
        if value >= MAX_VALUE:
            continue  # nothing that a server counts
        if name.endswith("_bucket") and bound:
            counts = buckets.setdefault(name.removesuffix("_bucket"), {})
            counts[float(bound[1])] = counts.get(float(bound[1]), 0.0) + value
            continue
        samples.setdefault(name, []).append(value)
        labels |= {key: label for key, label in _LABEL.findall(label_text) if label}
    if not engine:
        hint = "Give the text of their /metrics"
        raise UserError("has no metrics of vLLM or SGLang", hint, source)
    values = {}
    for name, engine_names in ENGINE_NAMES.items():
        if sampled := next(
            (samples[key] for key in engine_names.split() if key in samples), []
        ):
            values[name] = sum(sampled) / (len(sampled) if name in SHARES else 1)
    histograms = {}
    for name, engine_names in HISTOGRAM_NAMES.items():
        if key := next((key for key in engine_names.split() if f"{key}_count" in samples), ""):
            histograms[name] = Histogram(
                tuple(sorted(buckets.get(key, {}).items())),
                sum(samples.get(f"{key}_sum", [])),
                sum(samples[f"{key}_count"]),
            )
    sizes = (labels.get(name, "") for name in ("num_gpu_blocks", "block_size"))
    blocks = [int(size) if size.isdigit() else 0 for size in sizes]
    return Metrics(engine, labels.get("model_name", ""), values, histograms, *blocks)


def _download(address: str) -> str:
    """Return the text at an address. Raises UserError if there is none."""
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import urlopen

    try:
        host = urlsplit(address)
        if not host.hostname or host.username:
            raise UserError("is not an address", "Write http://host:8000/metrics", address)
        url = address if host.path not in ("", "/") else f"{address.rstrip('/')}/metrics"
        with urlopen(url, timeout=TIMEOUT_S) as answer:
            data = answer.read(MAX_BYTES + 1)
    except HTTPError as error:
        raise UserError(f"answers with status {error.code}", where=address) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(f"cannot be reached: {str(reason).lower()}", where=address) from None
    if len(data) > MAX_BYTES:
        raise UserError(f"sends more than {MAX_BYTES:,} bytes", where=address)
    return str(data.decode("utf-8", errors="replace"))


def running_records(
    metrics: Metrics, deployment: TimedDeployment, clients: int = 0
) -> list[RunningRecord]:
    """Compare a server with a simulated one, for the mean lengths of all requests so far.

    Args:
        clients: Number of clients; 0 for the requests that run or wait now, at least one.

    Returns:
        One record per figure, and last the sentence.

    Raises:
        UserError: As `serve`.
    """
    values = metrics.values
    clients = clients or max(1, int(values.get("running", 0) + values.get("waiting", 0)))
    if clients > MAX_CLIENTS:
        message = f"{clients:,} concurrent requests are more than {MAX_CLIENTS:,}"
        raise UserError(message, "Give --users")
    input_len = metrics.mean_tokens("prompt_tokens", default=1000)
    output_len = metrics.mean_tokens("output_tokens", default=200)
    load = Workload(
        max_concurrency=clients,
        num_prompts=max(MIN_REQUESTS, 2 * clients),
        input_len=str(input_len),
        output_len=str(output_len),
    )
    cache_bytes = None
    if metrics.blocks and metrics.engine == "vllm":
        options = FitOptions(
            block_size=metrics.block_size, num_gpu_blocks_override=metrics.blocks
        )
        cache_bytes = fit(deployment, options).kv_budget
    settings = ServerSettings(max_num_seqs=max(256, clients), kv_cache_memory_bytes=cache_bytes)
    served = serve(deployment, load, settings).record
    return [
        {
            "engine": metrics.engine,
            "model": deployment.model.name,
            "gpu": deployment.gpu.name,
            "gpus": deployment.parallelism.gpus,
            "max_concurrency": clients,
            "input_len": input_len,
            "output_len": output_len,
            "time_basis": deployment.time_basis,
            "figure": name,
            "measured": measured,
            "predicted": predicted,
            "unit": unit,
            "said": None if unit else _sentence(metrics, deployment),
        }
        for name, measured, predicted, unit in _figures(metrics, served)
        if not unit or (measured, predicted) != (None, None)
    ]


def _figures(
    metrics: Metrics, served: Record
) -> Iterator[tuple[str, float | None, float | None, str | None]]:
    """Yield name, measured and predicted value, and unit of each figure; last the verdict."""
    measured, batch_size = metrics.values.get, served["mean_batch_size"]
    queue = max(0.0, served["mean_in_system"] - batch_size)
    yield "running", measured("running"), batch_size, "requests"
    yield "waiting", measured("waiting"), queue, "requests"
    yield "cache used", measured("cache_usage"), served["kv_peak"], "share"
    yield "preemptions", measured("preemptions"), served["preemptions"], "times"
    yield "prefix hits", metrics.hit_rate, None, "share"
    for name in HISTOGRAM_NAMES:
        histogram, label = metrics.histograms.get(name, Histogram()), name.upper()
        yield f"{label} mean", histogram.mean, served[f"{name}_mean_s"], "s"
        for percent in (50, 90, 99):
            quantile = histogram.quantile(percent / 100)
            yield f"{label} p{percent}", quantile, served[f"{name}_p{percent}_s"], "s"
    yield "verdict", None, None, None


def _sentence(metrics: Metrics, deployment: TimedDeployment) -> str:
    """Return a sentence on the state of the server, and its reason."""
    values = metrics.values
    templates = {
        "running": "{:,.0f} running",
        "waiting": "{:,.0f} waiting",
        "cache_usage": "cache {:.0%} used",
        "preemptions": "{:,.0f} preemptions",
    }
    parts = [text.format(values[name]) for name, text in templates.items() if name in values]
    if metrics.hit_rate is not None:
        parts.append(f"{metrics.hit_rate:.0%} of prompt tokens found in the cache")
    is_full = values.get("cache_usage", 0.0) >= FULL_USAGE
    verdict = "nothing waits"
    if values.get("preemptions") and is_full:
        verdict = "the cache is too small for this load"
    elif values.get("waiting"):
        verdict = "requests wait for --max-num-seqs or for the pass, not for the cache"
        if is_full:
            verdict = "requests wait for the cache"
    server = f"{deployment.model.name} on {deployment.parallelism.gpus}× {deployment.gpu.name}"
    return f"{server}, {metrics.engine}: {', '.join(parts)}; {verdict}"
