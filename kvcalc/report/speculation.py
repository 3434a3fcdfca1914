"""Speculative decoding as a picture: the speed-up over the acceptance rate, and the rate from which on it pays over the batch."""

from collections.abc import Sequence
from itertools import product

from msgspec import structs

from kvcalc.report.chart import Axis, Chart, Series, tokens_tick
from kvcalc.report.figures import powers
from kvcalc.report.memory_text import within_memory
from kvcalc.report.multiples import MOST
from kvcalc.serving.request_record import LatencyOptions, drafting, request_memory
from kvcalc.serving.speculation import MOST_BATCH, StepTimes, expected_tokens, float_array, step_times
from kvcalc.timing.deployment import Deployment

USUAL_DRAFTED = (1, 2, 4, 8)
RATES = tuple(n / 50 for n in range(51))
FINE = 1000  # parts of a rate, between which the least that pays is taken on a line


def speculation_chart(
    deployments: Sequence[Deployment], names: Sequence[str], whose: str, asked: Sequence[LatencyOptions]
) -> Chart:
    """A curve for each number of drafted tokens asked for, else for 1, 2, 4 and 8; at mid length of the first request.

    Left the speed-up at the first batch size, right the least acceptance rate at which it is 1, of batches where there is one.
    Of several deployments, under their names, each has its own curves; for 4 tokens where no number is asked for. whose: what
    all of them are of.
    """
    first, alone = asked[0], len(deployments) == 1
    chosen = dict.fromkeys(one.num_speculative_tokens for one in asked if one.num_speculative_tokens)
    counts = [*chosen] or (USUAL_DRAFTED if alone else USUAL_DRAFTED[2:3])
    batches, left, right = powers(1, MOST_BATCH, 2), [], []
    for number, ((deployment, name), drafted) in enumerate(product(zip(deployments, names, strict=True), counts)):
        draft = drafting(deployment, first)
        assert draft is not None
        words = _drafted(drafted)
        label = words if alone else f"{name}, {words}" if len(counts) > 1 else name
        asks = structs.replace(first, num_speculative_tokens=drafted)
        memory = request_memory(deployment, asks)
        times = step_times(deployment, draft, first.mid_length, first.batch_size, drafted)
        speedup = Series(label, RATES, tuple(float(times.speedup(rate)) for rate in RATES), colour=number)
        if memory["fits"] is False:
            speedup = speedup._replace(kind="dashed", label=f"{label}: does not fit")
        left.append(speedup)
        loads = step_times(deployment, draft, first.mid_length, float_array(batches), drafted)
        least = Series(label, *_least(batches, loads), colour=number)
        held = request_memory(deployment, structs.replace(asks, batch_size=1))["max_num_seqs"]
        right.append(within_memory(least, held))
    if not alone and len(right) <= MOST and any(len(s.xs) < len(batches) for s in right):
        right = [s._replace(label=s.label * (len(s.xs) == len(batches))) for s in right]  # those named on the left alone
    drafts = dict.fromkeys(draft.model.name for d in deployments if (draft := drafting(d, first)))
    where = f"{whose}, draft {' and '.join(drafts)}" + f", {_drafted(counts[0])}" * (not alone and len(counts) == 1)
    rate = Axis("acceptance rate of a drafted token", log=False, tick=_percent)
    level = Series("plain decode", (), (1.0,), "limit")
    ends = "; a curve ends where none is enough or the memory is full" if any(len(s.xs) < len(batches) for s in right) else ""
    ends += "; lines as on the left" * any(not s.label for s in right)
    pays = Chart(
        "Where speculation pays",
        f"the acceptance rate from which on a step saves more than it costs{ends}",
        Axis("sequences at once", tick=tokens_tick),
        Axis("acceptance rate", log=False, tick=_percent, shown=(0.0, 1.0)),
        tuple(s for s in right if s.xs),
    )
    load = f"{first.batch_size:,} sequence{'s' * (first.batch_size > 1)} of {first.mid_length:,} tokens"
    about = f"{where}; {load}; times: {' and '.join(dict.fromkeys(d.basis for d in deployments))}"
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


def _drafted(count: int) -> str:
    return f"{count} token{'s' * (count > 1)} drafted"


def _percent(value: float) -> str:
    return f"{value:.0%}"
