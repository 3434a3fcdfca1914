"""Speculative decoding as a picture: the speed-up over the acceptance rate, and the rate from which on it pays over the batch."""

from collections.abc import Sequence

from kvcalc.report.chart import Axis, Chart, Series, tokens_tick
from kvcalc.report.figures import powers
from kvcalc.serving.request_record import LatencyOptions, drafting
from kvcalc.serving.speculation import MOST_BATCH, StepTimes, expected_tokens, float_array, step_times
from kvcalc.timing.deployment import Deployment

USUAL_DRAFTED = (1, 2, 4, 8)
RATES = tuple(n / 50 for n in range(51))
FINE = 1000  # parts of a rate, between which the least that pays is taken on a line


def speculation_chart(deployment: Deployment, asked: Sequence[LatencyOptions]) -> Chart:
    """A curve for each number of drafted tokens asked for, else for 1, 2, 4 and 8; at mid length of the first request.

    Left the speed-up at the first batch size, right the least acceptance rate at which it is 1, of batches where there is one.
    """
    first = asked[0]
    draft = drafting(deployment, first)
    assert draft is not None
    counts = dict.fromkeys(one.num_speculative_tokens for one in asked if one.num_speculative_tokens) or USUAL_DRAFTED
    batches, left, right = powers(1, MOST_BATCH, 2), [], []
    for number, drafted in enumerate(counts):
        label = f"{drafted} token{'s' * (drafted > 1)} drafted"
        times = step_times(deployment, draft, first.mid_length, first.batch_size, drafted)
        left.append(Series(label, RATES, tuple(float(times.speedup(rate)) for rate in RATES), colour=number))
        loads = step_times(deployment, draft, first.mid_length, float_array(batches), drafted)
        right.append(Series(label, *_least(batches, loads), colour=number))
    where = f"{deployment.model.name} on {deployment.parallelism.gpus}× {deployment.gpu.name}, draft {draft.model.name}"
    rate = Axis("acceptance rate of a drafted token", log=False, tick=_percent)
    level = Series("plain decode", (), (1.0,), "limit")
    ends = "; a curve ends where none is enough" if any(len(s.xs) < len(batches) for s in right) else ""
    pays = Chart(
        "Where speculation pays",
        f"the acceptance rate from which on a step saves more than it costs{ends}",
        Axis("sequences at once", tick=tokens_tick),
        Axis("acceptance rate", log=False, tick=_percent, shown=(0.0, 1.0)),
        tuple(s for s in right if s.xs),
    )
    load = f"{first.batch_size:,} sequence{'s' * (first.batch_size > 1)} of {first.mid_length:,} tokens"
    about = f"{where}; {load}; times: {deployment.basis}"
    gain = Axis("speed-up", log=False, tick=lambda v: f"{v:.3g}×")
    return Chart("Speed-up by speculative decoding", about, rate, gain, (*left, level), beside=pays if pays.series else None)


def _least(batches: Sequence[int], times: StepTimes) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The batches at which some acceptance rate makes good what a step costs, and the least such rate of each."""
    import numpy as np

    rates = [n / FINE for n in range(FINE + 1)]
    tokens = [expected_tokens(rate, times.drafted) for rate in rates]
    wanted = (times.draft_s + times.verify_s) / times.plain_s  # tokens that a step has to yield
    least = np.interp(wanted, tokens, rates)
    found = [(float(n), float(rate)) for n, rate, need in zip(batches, least, wanted, strict=True) if need <= tokens[-1]]
    return tuple(n for n, _ in found), tuple(rate for _, rate in found)


def _percent(value: float) -> str:
    return f"{value:.0%}"
