"""Prometheus text of vLLM and SGLang, read: bounded, from a file or from one request to one address, never followed elsewhere.

Names of `vllm/v1/metrics/loggers.py` (and of V0's `engine/metrics.py`) and of SGLang's `metrics/collector.py`. Values of one
name are added up over its labels, shares are averaged.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from threading import Thread
from typing import NamedTuple
from urllib.parse import urlsplit

from kvcalc.errors import UserError
from kvcalc.library.files import read_text

MOST_BYTES, MOST_LINE, PATIENCE = 8 << 20, 4096, 10.0  # seconds
MOST_VALUE = 1e18
_LINE = re.compile(r"(vllm|sglang)[:_]([a-zA-Z_]{1,100})(?:\{(.{0,3000})\})? (-?[\d.]{1,40}(?:e[+-]?\d{1,3})?)(?: \d{1,20})?$")
_LABEL = re.compile(r'([a-z_]{1,60})="([^"]{0,300})"')
# Our name → theirs, older spellings behind newer ones; the first that is there counts.
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
    "hits": ("prefix_cache_hits_total", "prefix_cache_hits", "gpu_prefix_cache_hits_total", "gpu_prefix_cache_hits"),
    "requests": ("request_success_total", "num_requests_total"),
    "prompt_tokens": ("prompt_tokens_total",),
    "output_tokens": ("generation_tokens_total",),
}
HISTOGRAMS = {
    "ttft": ("time_to_first_token_seconds",),
    "tpot": ("request_time_per_output_token_seconds", "time_per_output_token_seconds", "inter_token_latency_seconds"),
}
SHARES = ("cache_usage", "hit_rate")


class Histogram(NamedTuple):
    """(upper bound, events up to it) of each bucket, the sum of all and how many they are."""

    buckets: tuple[tuple[float, float], ...]
    total: float
    events: float

    @property
    def mean(self) -> float | None:
        return self.total / self.events if self.events else None

    def quantile(self, share: float) -> float | None:
        """Within its bucket in proportion, as Prometheus' histogram_quantile; None in the last, which has no end."""
        wanted, below, before = share * self.events, 0.0, 0.0
        if not self.events:
            return None
        for bound, count in self.buckets:
            if count >= wanted and count > before:
                return None if bound == float("inf") else below + (bound - below) * (wanted - before) / (count - before)
            below, before = bound, count
        return None


class Metrics(NamedTuple):
    """What a server says of itself: engine, the model as it calls it, values by name, histograms, and its cache's blocks."""

    engine: str
    model: str
    values: dict[str, float]
    histograms: dict[str, Histogram]
    blocks: int = 0
    block_size: int = 0


def read_metrics(where: str) -> Metrics:
    """The metrics in a file, or behind an address. Raises UserError where there are none of an engine that is known."""
    text = _fetched(where) if re.match(r"https?://", where) else read_text(Path(where), MOST_BYTES)
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    buckets: dict[str, dict[float, float]] = {}
    labels: dict[str, str] = {}
    engine = ""
    for line in text.splitlines():
        match = _LINE.match(line) if len(line) <= MOST_LINE else None
        if match is None:
            continue
        engine, name, found = match[1], match[2], dict(_LABEL.findall(match[3] or ""))
        value = _number(match[4])
        if not 0 <= value < MOST_VALUE:
            continue  # nothing that a server counts
        if name.endswith("_bucket") and "le" in found:
            bounds = buckets.setdefault(name.removesuffix("_bucket"), {})
            bound = float("inf") if found["le"] == "+Inf" else _number(found["le"])
            bounds[bound] = bounds.get(bound, 0.0) + value
            continue
        sums[name], counts[name] = sums.get(name, 0.0) + value, counts.get(name, 0) + 1
        labels |= {n: v for n, v in found.items() if n in ("model_name", "num_gpu_blocks", "block_size") and v}
    if not engine:
        raise UserError("holds no metrics of vLLM or SGLang", where, "Give the text of their /metrics")
    values = {name: sums[first] for name, theirs in (GAUGES | COUNTERS).items() if (first := _first(theirs, sums))}
    values |= {n: values[n] / counts[_first(GAUGES[n], sums)] for n in SHARES if n in values}
    histograms = {
        name: Histogram(
            tuple(sorted(buckets.get(first, {}).items())), sums.get(f"{first}_sum", 0.0), sums.get(f"{first}_count", 0.0)
        )
        for name, theirs in HISTOGRAMS.items()
        if (first := next((t for t in theirs if f"{t}_count" in sums), ""))
    }
    blocks = [int(labels[n]) if labels.get(n, "").isdigit() else 0 for n in ("num_gpu_blocks", "block_size")]
    return Metrics(engine, labels.get("model_name", ""), values, histograms, *blocks)


def _first(names: Iterable[str], known: dict[str, float]) -> str:
    return next((name for name in names if name in known), "")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _fetched(address: str) -> str:
    """The text behind an address: one request within PATIENCE in all, MOST_BYTES, no redirects, no proxies.

    Raises UserError for anything else.
    """
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        raise UserError("is not an address", address) from None
    if not host or parts.username:
        raise UserError("is not an address", address, "Write http://host:8000/metrics")
    path = (parts.path if parts.path not in ("", "/") else "/metrics") + (f"?{parts.query}" if parts.query else "")
    found: list[bytes | UserError] = []
    asked = (parts.scheme == "https", host, port, path, address)
    waiting = Thread(target=lambda: found.append(_answered(*asked)), daemon=True)  # what trickles forever ends with the process
    waiting.start()
    waiting.join(PATIENCE)
    if not found:
        raise UserError(f"takes more than {PATIENCE:g} s to answer", address)
    if isinstance(found[0], UserError):
        raise found[0]
    if len(found[0]) > MOST_BYTES:
        raise UserError(f"sends more than {MOST_BYTES:,} bytes", address)
    return found[0].decode("utf-8", errors="replace")


def _answered(secure: bool, host: str, port: int | None, path: str, address: str) -> bytes | UserError:
    """At most a byte more than MOST_BYTES of what a server answers, or why there is none."""
    from http.client import HTTPConnection, HTTPException, HTTPSConnection

    try:
        connection = (HTTPSConnection if secure else HTTPConnection)(host, port, timeout=PATIENCE)
        try:
            connection.request("GET", path, headers={"Accept": "text/plain"})
            answer = connection.getresponse()
            if answer.status != 200:
                said = "points elsewhere, where it is not followed" if 300 <= answer.status < 400 else "answers"
                return UserError(f"{said}: status {answer.status}", address)
            return answer.read(MOST_BYTES + 1)
        finally:
            connection.close()
    except (OSError, HTTPException, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        return UserError(f"cannot be reached: {str(reason).lower()}", address)
