"""Metrics of a simulated server as one flat record: rates, waiting times, waste and cost.

TTFT: from arrival to the first token. TPOT: (end − first token)/(out − 1), for requests with more
than one token. Queueing: from arrival to the first pass that works on the request. Rates are over
the time from the first arrival to the last token.

padding_waste: padded slots divided by all token slots of the passes run. kv_waste: share of the
allocated byte·seconds that stores no token. kv_peak: maximum of the allocated bytes as a share of
the budget.

By Little's law, the mean number of requests in the system equals arrivals per second times the
mean time in the system. The number is integrated over the passes; the other two come from the
requests.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvcalc.serving.log import Log
from kvcalc.serving.simulation import Served

PERCENTILES = (50, 90, 99)


class Goals(msgspec.Struct, frozen=True):
    """Latency targets in seconds; 0 sets no target."""

    ttft: float = 0.0
    tpot: float = 0.0


def summary(served: Served, budget: int, goals: Goals) -> dict[str, Any]:
    """Return the metrics of a run. `budget` is the bytes of the KV cache budget."""
    logs, requests, all_logs = served.logs, served.requests, (*served.logs, *served.prefill)
    arrived, scheduled, first, finished = (gathered(served, name) for name in ("arrived", "scheduled", "first", "finished"))
    done = finished == finished
    out = requests.output_len[done]
    arrived, scheduled, first, finished = (times[done] for times in (arrived, scheduled, first, finished))
    many, tokens = int(done.sum()), int(out.sum())
    span = float(finished.max() - arrived.min()) if many else 0.0
    ttft, e2e, longer = first - arrived, finished - arrived, out > 1
    tpot = (finished - first)[longer] / (out[longer] - 1)
    busy, slots = sum(log.busy_s for log in logs), sum(log.slots for log in all_logs)
    allocated = sum(log.allocated_byte_s for log in logs)
    record: dict[str, Any] = {"requests": len(requests), "completed": many}
    record["rejected"] = sum(int(log.rejected.sum()) for log in logs)
    record |= {"input_tokens": int(requests.input_len[done].sum()), "output_tokens": tokens, "duration_s": span}
    record |= {
        "throughput_tokens_per_s": tokens / span if span else None,
        "total_tokens_per_s": (tokens + record["input_tokens"]) / span if span else None,
        "requests_per_s": many / span if span else None,
    }
    for name, values in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e)):
        record |= spread(name, values)
    record["queueing_mean_s"] = mean(scheduled - arrived)
    record |= _prompts_apart(served, span)
    record |= _goodput(goals, ttft, (finished - first) / (out - 1).clip(1), span)
    record |= {
        "padding_waste": sum(log.padded for log in all_logs) / slots if slots else None,
        "padded_slots": sum(log.padded for log in all_logs),
        "token_slots": slots,
        "kv_waste": 1 - sum(log.stored_byte_s for log in logs) / allocated if allocated else None,
        "kv_peak": max((log.peak for log in logs), default=0) / budget if budget else None,
        "kv_peak_bytes": max((log.peak for log in logs), default=0),
        "kv_budget_bytes": budget,
        "preemptions": sum(log.preemptions for log in all_logs),
        "recomputed_tokens": sum(log.recomputed_tokens for log in all_logs),
        "swapped_bytes": sum(log.swapped_bytes for log in all_logs),
        "passes": sum(log.passes for log in all_logs),
        "mean_batch_size": sum(log.sequences_s for log in logs) / busy if busy else None,
        "utilization": min(1.0, busy / (span * len(logs))) if span else None,
        "mean_in_system": sum(log.in_system_s for log in logs) / span if span else None,
    }
    return record


def gathered(served: Served, name: str) -> Any:
    """Return a column of all ranks' logs, in the order of the requests.

    With disaggregated prefill, `scheduled` comes from the prefill ranks.
    """
    return _of_ranks(served.prefill if name == "scheduled" and served.prefill else served.logs, name, len(served.requests))


def _of_ranks(logs: Sequence[Log], name: str, count: int) -> Any:
    import numpy as np

    found = np.full(count, np.nan)
    for rank, log in enumerate(logs):
        found[rank :: len(logs)] = getattr(log, name)
    return found


def _prompts_apart(served: Served, span: float) -> dict[str, float | None]:
    """Return the metrics of disaggregated prefill.

    They are the share of time in which prefill replicas work, and the mean seconds from a first token
    to the first decode.
    """
    if not served.prefill:
        return {"prefill_utilization": None, "decode_queueing_mean_s": None}
    went_on = _of_ranks(served.logs, "scheduled", len(served.requests)) - gathered(served, "first")
    busy = sum(log.busy_s for log in served.prefill)
    return {
        "prefill_utilization": min(1.0, busy / (span * len(served.prefill))) if span else None,
        "decode_queueing_mean_s": mean(went_on[went_on == went_on]),
    }


def mean(values: Any) -> float | None:
    """Return the mean of an array; None if it is empty."""
    return float(values.mean()) if values.size else None


def spread(name: str, values: Any) -> dict[str, float | None]:
    """Return mean and percentiles (linear between ranks) of seconds, with keys that begin with `name`."""
    import numpy as np

    found = {f"{name}_mean_s": mean(values)}
    points = np.percentile(values, PERCENTILES).tolist() if values.size else [None] * len(PERCENTILES)
    return found | {f"{name}_p{p}_s": v for p, v in zip(PERCENTILES, points, strict=True)}


def _goodput(goals: Goals, ttft: Any, tpot: Any, span: float) -> dict[str, float | None]:
    """Return the requests that meet every target, per second and as a share.

    A request with a single token has no TPOT, so it cannot miss a TPOT target.
    """
    if not (goals.ttft or goals.tpot) or not span:
        return {"goodput_requests_per_s": None, "slo_attainment": None}
    good = (ttft <= goals.ttft) if goals.ttft else ttft == ttft
    good &= (tpot <= goals.tpot) if goals.tpot else tpot == tpot
    return {"goodput_requests_per_s": int(good.sum()) / span, "slo_attainment": float(good.mean())}
