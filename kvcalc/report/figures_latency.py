"""The pictures of one request; time per token and tokens per second over the batch, of one deployment or several."""

from collections.abc import Callable, Sequence
from itertools import product

import msgspec

from kvcalc.errors import few
from kvcalc.report.chart import Axis, Chart, Series, joined, tokens_tick, whole_tick
from kvcalc.report.figures import no_cache
from kvcalc.report.looks import telling
from kvcalc.report.memory_text import batches_within, curve_note, within_memory
from kvcalc.report.multiples import MOST
from kvcalc.report.speculation import speculation_chart
from kvcalc.report.tables import seconds, time_note
from kvcalc.serving.request_record import LatencyOptions, latency_records, request_memory
from kvcalc.timing.deployment import Deployment

BATCHES = tuple(1 << n for n in range(9))


TITLES: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("Time per token over the batch", "TPOT", "tpot_s", seconds),
    ("Tokens per second", "tokens/s", "output_tokens_per_s", whole_tick),
)


def latency_chart(deployments: Sequence[Deployment], asked: Sequence[LatencyOptions]) -> Chart:
    """Of requests with a draft what it gains, of those without a cache their work, else `latency_curve`."""
    if asked[0].no_cache and not asked[0].draft:
        return _without_cache(deployments, max(asked[-1].context, 64))
    drawn, undrawn = timed_alike(deployments)
    draw = _speculation if asked[0].draft else latency_curve
    chart = draw(drawn, asked)
    return chart._replace(subtitle=f"{chart.subtitle}{undrawn}")


def _speculation(deployments: Sequence[Deployment], asked: Sequence[LatencyOptions]) -> Chart:
    return speculation_chart(deployments, told_apart(deployments), _whose(deployments), asked)


def _without_cache(deployments: Sequence[Deployment], last: int) -> Chart:
    """The work of each token with and without a cache, a chart for each model."""
    models = [*{d.model.name: d for d in reversed(deployments)}.values()][::-1]
    charts = [no_cache(d.model, last, d.precision, d.parallelism) for d in models]
    if len(charts) == 1:
        return charts[0]
    over = "The work of each token, without a KV cache and with it", charts[0].subtitle.partition("; ")[2]
    named = zip(models, charts, strict=True)
    charts = [c._replace(title=d.model.name, subtitle=c.title.replace("Without a KV cache", "without it")) for d, c in named]
    return joined([charts[0]._replace(over=over), *charts[1:]])


def latency_curve(deployments: Sequence[Deployment], asked: Sequence[LatencyOptions]) -> Chart:
    """Left TPOT, right output tokens per second of all sequences together, for batches of 1 to 256 and those asked for.

    Of one deployment a curve for each pair of lengths asked for, up to as many as are told apart; of several for the first pair.
    A curve ends at the largest batch that fits.
    """
    first, every = asked[0], [*{(one.input_len, one.output_len): one for one in reversed(asked)}.values()][::-1]
    drawn = every[: MOST if len(deployments) == 1 else 1]
    batches = sorted({*BATCHES, *(one.batch_size for one in asked)})
    names = told_apart(deployments) if len(drawn) == 1 else [_lengths(one) for one in drawn]
    found, most = [], []
    for deployment, one in product(deployments, drawn):
        held = request_memory(deployment, msgspec.structs.replace(one, batch_size=1))["max_num_seqs"]
        sizes = batches_within(batches, held)
        asks = [(deployment, msgspec.structs.replace(one, batch_size=b)) for b in sizes]
        found.append(latency_records(asks))
        most.append(held)
    notes = time_note([r for records in found for r in records])
    away = f"; {first.cpu_offload_gb:g} GiB of each GPU's weights in the host's memory" if first.cpu_offload_gb else ""
    which = [_lengths(first)] * (len(drawn) == 1) + [f"{len(drawn)} of {len(every)} lengths asked for"] * (
        len(drawn) < len(every)
    )
    whose = ", ".join([_whose(deployments), *which]) + away
    over = (whose, notes) if len(deployments) > MOST else ("", "")
    charts = []
    for title, unit, key, tick in TITLES:
        series = []
        for name, records, held in zip(names, found, most, strict=True):
            xs = tuple(float(r["batch_size"]) for r in records)
            series.append(within_memory(Series(name, xs, tuple(r[key] for r in records)), held))
        axes = Axis("sequences at once", tick=tokens_tick), Axis(unit, tick=tick)
        charts.append(Chart(title, "" if over[0] else f"{whose}; {notes}", *axes, tuple(series)))
    left, right = charts
    ends = curve_note(left.series, batches)
    return left._replace(over=over, beside=right._replace(subtitle=f"output tokens of all sequences together{ends}"))


def _lengths(asked: LatencyOptions) -> str:
    return f"{asked.input_len:,} tokens in and {asked.output_len:,} out"


def _whose(deployments: Sequence[Deployment]) -> str:
    """The model, or how many there are, and the GPUs where they are the same."""
    models, cards = ([*dict.fromkeys(names)] for names in zip(*((d.model.name, _cards(d)) for d in deployments), strict=True))
    whose = models[0] if len(models) == 1 else f"{len(models)} models"
    return whose + f" on {cards[0]}" * (len(cards) == 1)


def _cards(deployment: Deployment) -> str:
    return f"{deployment.parallelism.gpus}× {deployment.gpu.name}"


def timed_alike(deployments: Sequence[Deployment]) -> tuple[list[Deployment], str]:
    """Return the deployments whose times one picture compares, and what its subtitle says of the others.

    Predictions are not drawn beside bounds. The second item is '' if all deployments are drawn.
    """
    predicted = [d for d in deployments if d.calibration]
    if not predicted or len(predicted) == len(deployments):
        return [*deployments], ""
    bounds = dict.fromkeys(d.gpu.name for d in deployments if not d.calibration)
    return predicted, f"; not drawn, as only bounds are known: {few([*bounds])}"


def told_apart(deployments: Sequence[Deployment]) -> list[str]:
    """What tells each deployment from the others, and no more: a dtype that follows from the model is left out."""
    parts = [
        (
            d.model.name,
            _cards(d),
            d.formats.weights_label,
            f"cache {d.formats.kv_cache_dtype}",
            d.basis,
        )
        for d in deployments
    ]
    return [" ".join(words) or part[0] for words, part in zip(telling(parts), parts, strict=True)]
