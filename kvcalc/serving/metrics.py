"""Metrics of a simulated server as one flat record: rates, waiting times, waste and cost.

TTFT: from arrival to the first token. TPOT: (end − first token)/(out − 1), for requests with more
than one token. Queueing: from arrival to the first pass that works on the request. Rates are over
the time from the first arrival to the last token.

padding_waste: padded slots divided by all token slots of the passes run. kv_waste: share of the
allocated byte·seconds that stores no token. kv_peak: maximum of the allocated bytes as a share of
the budget.

mean_in_system: the time of all completed requests in the system, divided by the time of the run. By
Little's law, this is the mean number of requests in the system.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvcalc.records import Record
from kvcalc.serving.cache_accounting import Log
from kvcalc.serving.simulation import Served

PERCENTILES = (50, 90, 99)
PASS_TOTALS = ("preemptions", "recomputed_tokens", "passes")


def summary(
    served: Served, budget: int, slo_ttft: float = 0.0, slo_tpot: float = 0.0
) -> Record:
    """Return the metrics of a run.

    Args:
        budget: KV cache budget in bytes.
        slo_ttft: Latency target in seconds; 0 sets no target.
        slo_tpot: Latency target in seconds per token; 0 sets no target.
    """
    requests, logs, times = served.requests, served.logs, served.times

    def total(name: str, logs: Sequence[Log] = (*logs, *served.prefill)) -> Any:
        return sum(getattr(log, name) for log in logs)

    is_done = ~np.isnan(times.finished)
    columns = times.arrived, times.scheduled, times.first, times.finished
    arrived, scheduled, first, finished = (column[is_done] for column in columns)
    out = requests.output_len[is_done]
    completed, out_tokens = len(out), int(out.sum())
    in_tokens = int(requests.input_len[is_done].sum())
    span = float(finished.max() - arrived.min()) if completed else 0.0
    ttft, e2e = first - arrived, finished - arrived
    # a request with a single token has no TPOT, so it cannot miss a TPOT target
    tpot = (finished - first) / (out - 1).clip(1)
    meets = (ttft <= (slo_ttft or np.inf)) & (tpot <= (slo_tpot or np.inf))
    has_target = bool(span and (slo_ttft or slo_tpot))
    decode_wait = times.decode_scheduled - times.first
    stored_share = _ratio(total("stored_byte_s", logs), total("allocated_byte_s", logs))
    peak = max(log.peak for log in logs)
    return {
        "requests": len(requests),
        "completed": completed,
        "rejected": int(times.rejected.sum()),
        "input_tokens": in_tokens,
        "output_tokens": out_tokens,
        "duration_s": span,
        "throughput_tokens_per_s": _ratio(out_tokens, span),
        "total_tokens_per_s": _ratio(out_tokens + in_tokens, span),
        "requests_per_s": _ratio(completed, span),
        **spread("ttft", ttft),
        **spread("tpot", tpot[out > 1]),
        **spread("e2e", e2e),
        "queueing_mean_s": mean(scheduled - arrived),
        "prefill_utilization": _utilization(served.prefill, span),
        "decode_queueing_mean_s": mean(decode_wait[~np.isnan(decode_wait)]),
        "goodput_requests_per_s": int(meets.sum()) / span if has_target else None,
        "slo_attainment": float(meets.mean()) if has_target else None,
        "padding_waste": _ratio(total("padded"), total("slots")),
        "padded_slots": total("padded"),
        "token_slots": total("slots"),
        "kv_waste": None if stored_share is None else 1 - stored_share,
        "kv_peak": _ratio(peak, budget),
        "kv_peak_bytes": peak,
        "kv_budget_bytes": budget,
        **{name: total(name) for name in PASS_TOTALS},
        "mean_batch_size": _ratio(total("sequences_s", logs), total("busy_s", logs)),
        "utilization": _utilization(logs, span),
        "mean_in_system": _ratio(float(e2e.sum()), span),
    }


def _ratio(part: float, total: float) -> float | None:
    return part / total if total else None


def _utilization(logs: Sequence[Log], span: float) -> float | None:
    """Return the share of `span` seconds in which the ranks work, at most 1; None without them."""
    busy_share = _ratio(sum(log.busy_s for log in logs), span * len(logs))
    return None if busy_share is None else min(1.0, busy_share)


def mean(values: Any) -> float | None:
    """Return the mean of an array; None if it is empty."""
    return float(values.mean()) if values.size else None


def spread(name: str, values: Any) -> dict[str, float | None]:
    """Return mean and percentiles (linear between ranks) of seconds, with keys that begin with
    `name`."""
    figures = {f"{name}_mean_s": mean(values)}
    for percentile in PERCENTILES:
        value = float(np.percentile(values, percentile)) if values.size else None
        figures[f"{name}_p{percentile}_s"] = value
    return figures
