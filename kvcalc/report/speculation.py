"""Speculative decoding as a picture: the speed-up over the acceptance rate, and the batch from which on it costs more."""

from collections.abc import Sequence

from kvcalc.report.chart import Axis, Chart, Series, tokens_tick
from kvcalc.report.figures import powers
from kvcalc.serving.request_record import LatencyOptions, drafting
from kvcalc.serving.speculation import MOST_BATCH, StepTimes, first_loss, float_array, step_times
from kvcalc.timing.deployment import Deployment

USUAL_DRAFTED = (1, 2, 4, 8)
RATES = tuple(n / 50 for n in range(51))


def speculation_chart(deployment: Deployment, asked: Sequence[LatencyOptions]) -> Chart:
    """A curve for each number of drafted tokens asked for, else for 1, 2, 4 and 8; at mid length of the first request.

    Left the speed-up at the first batch size, right the first batch size at which it is below 1, where there is one.
    """
    first = asked[0]
    draft = drafting(deployment, first)
    assert draft is not None
    counts = dict.fromkeys(one.num_speculative_tokens for one in asked if one.num_speculative_tokens) or USUAL_DRAFTED
    batches, left, right = powers(1, MOST_BATCH, 8), [], []
    for number, drafted in enumerate(counts):
        label = f"{drafted} token{'s' * (drafted > 1)} drafted"
        times = step_times(deployment, draft, first.mid_length, first.batch_size, drafted)
        left.append(Series(label, RATES, tuple(float(times.speedup(rate)) for rate in RATES), colour=number))
        loads = step_times(deployment, draft, first.mid_length, float_array(batches), drafted)
        right.append(Series(label, *_losses(batches, loads), colour=number))
    basis = f"times: {deployment.basis}"
    where = f"{deployment.model.name} on {deployment.parallelism.gpus} × {deployment.gpu.name}, draft {draft.model.name}"
    rate = Axis("acceptance rate of a drafted token", log=False, tick=lambda v: f"{v:.0%}")
    level = Series("plain decode", (), (1.0,), "limit")
    pays = Chart(
        "Where speculation stops paying",
        f"the batch from which on a step costs more than it saves; a curve ends where it pays at any batch to {MOST_BATCH:,}",
        rate,
        Axis("sequences", tick=tokens_tick),
        tuple(s for s in right if s.xs),
    )
    title = f"{where}; batch {first.batch_size:,}, {first.mid_length:,} tokens; {basis}"
    gain = Axis("speed-up", log=False, tick=lambda v: f"{v:.3g}×")
    return Chart("Speed-up by speculative decoding", title, rate, gain, (*left, level), beside=pays if pays.series else None)


def _losses(batches: Sequence[int], times: StepTimes) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Acceptance rates at which there is a batch that it no longer pays at, and those batches."""
    found = [(rate, float(batch)) for rate in RATES if (batch := first_loss(batches, times, rate))]
    return tuple(rate for rate, _ in found), tuple(batch for _, batch in found)
