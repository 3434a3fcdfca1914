"""What a served load amounts to: rates, waiting times, waste and cost, as one flat record.

TTFT: from arrival to the first token. TPOT: (end − first token)/(out − 1) of a request with more than one token. Queueing:
from arrival to the pass that first works on the request. Rates are over the time from the first arrival to the last token.
padding_waste: padded slots over all token slots of the passes run. kv_waste: of the byte·seconds allocated, the share that
holds no token. kv_peak: the most allocated at once, of the budget. Little's law ties the mean number in the system to
arrivals per second times mean time in it; the first is integrated over the passes, the others come from the requests.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from kvcalc.serving.log import Log
from kvcalc.serving.simulation import Served

PERCENTILES = (50, 90, 99)
SPARE = 10  # requests that may wait at the end of the arrivals whatever the load
# (seconds of queueing gained per second, share of all requests left waiting): slow growth over many batches, and fast growth
SLOW, FAST = (0.02, 0.02), (0.25, 0.1)


class Goals(msgspec.Struct, frozen=True):
    """Seconds that a user accepts; 0 sets no goal."""

    ttft: float = 0.0
    tpot: float = 0.0


def summary(served: Served, budget: int, goals: Goals, open_loop: bool) -> dict[str, Any]:
    """The record of a run. `open_loop`: requests come whatever the server does, so that its queue may diverge, which a few
    cannot tell.
    """
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
        "diverges": diverges(served) if open_loop and len(requests) > SPARE else None,
    }
    return record


def gathered(served: Served, name: str) -> Any:
    """A column of all ranks' logs, in the order of the requests. Where prompts are apart work begins with them."""
    return _of_ranks(served.prefill if name == "scheduled" and served.prefill else served.logs, name, len(served.requests))


def _of_ranks(logs: Sequence[Log], name: str, count: int) -> Any:
    import numpy as np

    found = np.full(count, np.nan)
    for rank, log in enumerate(logs):
        found[rank :: len(logs)] = getattr(log, name)
    return found


def _prompts_apart(served: Served, span: float) -> dict[str, float | None]:
    """Of replicas for prompts alone the share of the time that they work, and the mean wait from a first token to its decodes."""
    if not served.prefill:
        return {"prefill_utilization": None, "decode_queueing_mean_s": None}
    went_on = _of_ranks(served.logs, "scheduled", len(served.requests)) - gathered(served, "first")
    busy = sum(log.busy_s for log in served.prefill)
    return {
        "prefill_utilization": min(1.0, busy / (span * len(served.prefill))) if span else None,
        "decode_queueing_mean_s": mean(went_on[went_on == went_on]),
    }


def mean(values: Any) -> float | None:
    """The mean of an array; None of an empty one."""
    return float(values.mean()) if values.size else None


def spread(name: str, values: Any) -> dict[str, float | None]:
    """Mean and percentiles (linear between ranks) of seconds, under `name`."""
    import numpy as np

    found = {f"{name}_mean_s": mean(values)}
    points = np.percentile(values, PERCENTILES).tolist() if values.size else [None] * len(PERCENTILES)
    return found | {f"{name}_p{p}_s": v for p, v in zip(PERCENTILES, points, strict=True)}


def _goodput(goals: Goals, ttft: Any, tpot: Any, span: float) -> dict[str, float | None]:
    """Requests that meet every goal, per second and as a share; a single token has no TPOT to miss."""
    if not (goals.ttft or goals.tpot) or not span:
        return {"goodput_requests_per_s": None, "slo_attainment": None}
    good = (ttft <= goals.ttft) if goals.ttft else ttft == ttft
    good &= (tpot <= goals.tpot) if goals.tpot else tpot == tpot
    return {"goodput_requests_per_s": int(good.sum()) / span, "slo_attainment": float(good.mean())}


def diverges(served: Served) -> bool:
    """Whether the queue grew without end while requests came: in every rank's log, or in any.

    In overload each second of arrivals adds (load − 1) seconds of queueing. Said is yes when over the second half of the
    arrivals queueing grew by more than 2 % of the time that went by, and when the last one came more than 2 % of all requests,
    ten, and as many as the server ever started at once were still waiting; or when it grew by 25 %, and 10 % and ten wait.
    """
    if served.prefill:
        waits = [(log.arrived, log.scheduled) for log in served.prefill] + [(log.first, log.scheduled) for log in served.logs]
        return any(_grows(*each) for each in waits)
    return any(_grows(log.arrived, log.scheduled, log.finished) for log in served.logs)


def _grows(arrived: Any, scheduled: Any, finished: Any = None) -> bool:
    """finished: NaN of those that do not count."""
    import numpy as np

    done = scheduled == scheduled if finished is None else finished == finished
    arrived, scheduled = arrived[done], scheduled[done]
    half = arrived.size // 2
    if half < 2 or arrived[-1] <= arrived[half]:
        return False
    slope = float(np.polyfit(arrived[half:] - arrived[half], (scheduled - arrived)[half:], 1)[0])
    started = np.unique(scheduled, return_counts=True)[1].max()
    waiting = int((scheduled > arrived[-1]).sum())
    slow = slope > SLOW[0] and waiting > SLOW[1] * arrived.size + SPARE + started
    return bool(slow or (slope > FAST[0] and waiting > FAST[1] * arrived.size + SPARE))
