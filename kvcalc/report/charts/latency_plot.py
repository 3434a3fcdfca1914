"""Pictures of times and costs: over the batch size, over the acceptance rate and over contexts."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvcalc.errors import UserError, few
from kvcalc.report.charts.chart import (
    CONTEXT_AXIS,
    MAX_SERIES,
    Axis,
    Chart,
    Series,
    joined,
    limit,
    plain_tick,
    si_tick,
    times_tick,
    tokens_tick,
    whole_tick,
)
from kvcalc.report.charts.size_plot import generation_work_chart
from kvcalc.report.row_names import keep_distinguishing_columns
from kvcalc.report.text.fit_text import curve_note, within_memory
from kvcalc.report.text.tables import seconds, time_note

if TYPE_CHECKING:
    from kvcalc.planning.sweeps import CostCurve, LatencyCurve, SpeculationCurve
    from kvcalc.question.serving_options import LatencyOptions
    from kvcalc.timing.deployment import TimedDeployment

BATCH_AXIS = Axis("sequences at once", tick=tokens_tick)
TIMES: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
    ("Time per token over the batch", "TPOT", "tpot_s", seconds),
    ("Tokens per second", "tokens/s", "output_tokens_per_s", whole_tick),
)


class HasDeployment(Protocol):
    """Anything that belongs to a deployment."""

    @property
    def deployment(self) -> "TimedDeployment": ...


CurveT = TypeVar("CurveT", bound=HasDeployment)


def latency_chart(curves: Sequence[Any], request: "LatencyOptions") -> Chart:
    """Return the charts of `latency_sweep`, whose kind depends on the request."""
    if request.draft:
        return speculation_chart(curves, request)
    if request.no_cache:
        return generation_work_chart(curves)
    return batch_chart(curves)


def batch_chart(curves: "Sequence[LatencyCurve]") -> Chart:
    """Return charts of TPOT and of output tokens per second over the batch size.

    A curve ends at the largest batch that fits.
    """
    curves, undrawn = comparable_curves(curves)
    request = curves[0].request
    lengths = [_lengths(curve.request) for curve in curves]
    is_single_length = len(set(lengths)) == 1
    deployments = [curve.deployment for curve in curves]
    names = deployment_names(deployments, () if is_single_length else lengths)
    where = ", ".join(
        [deployments_title(deployments), *lengths[: 1 if is_single_length else 0]]
    )
    if request.cpu_offload_gb:
        gib = f"{request.cpu_offload_gb:g} GiB"
        where += f"; {gib} of each GPU's weights in the host's memory"
    notes = time_note([record for curve in curves for record in curve.records]) + undrawn
    sizes = [record["batch_size"] for record in curves[0].records]
    charts = []
    for title, unit, key, tick in TIMES:
        series = []
        for name, curve in zip(names, curves, strict=True):
            xs = tuple(float(record["batch_size"]) for record in curve.records)
            ys = tuple(record[key] for record in curve.records)
            series.append(within_memory(Series(name, xs, ys), curve.max_num_seqs))
        charts.append(
            Chart(
                title,
                "",
                BATCH_AXIS,
                Axis(unit, tick=tick),
                tuple(series),
            )
        )
    left, right = charts
    ends = curve_note(left.series, sizes)
    right = right._replace(subtitle=f"output tokens of all sequences together{ends}")
    if len(curves) > MAX_SERIES:
        left = left._replace(over=(where, notes))
    else:
        left = left._replace(subtitle=f"{where}; {notes}")
    return joined([left, right])


def _lengths(request: "LatencyOptions") -> str:
    return f"{request.input_len:,} tokens in and {request.output_len:,} out"


def speculation_chart(curves: "Sequence[SpeculationCurve]", request: "LatencyOptions") -> Chart:
    """Return charts of the speed-up over the acceptance rate, and of the rate that pays.

    The rate that pays is the smallest at which speculation is no slower, over the batch size.
    """
    curves, undrawn = comparable_curves(curves)
    deployments = [curve.deployment for curve in curves]
    drafted = [_draft_tokens(curve.num_draft_tokens) for curve in curves]
    is_single_count = len(set(drafted)) == 1
    names = deployment_names(deployments, drafted)
    if len({id(d) for d in deployments}) == 1:
        names = drafted
    gains, pays = [], []
    for number, (name, curve) in enumerate(zip(names, curves, strict=True)):
        rates = tuple(n / (len(curve.speedups) - 1) for n in range(len(curve.speedups)))
        gain = Series(name, rates, tuple(curve.speedups), colour=number)
        if curve.can_fit is False:
            gain = gain._replace(kind="dashed", label=f"{name}: does not fit")
        gains.append(gain)
        points = tuple(map(float, curve.batch_sizes)), tuple(curve.min_rates)
        paying = within_memory(Series(name, *points, colour=number), curve.max_num_seqs)
        if paying.xs:
            pays.append(paying)
    drafts = " and ".join(dict.fromkeys(curve.draft for curve in curves))
    words = [deployments_title(deployments), f"draft {drafts}"]
    if is_single_count and len(curves) > 1:
        words.append(drafted[0])
    size = request.batch_size
    load = f"{size:,} sequence{'s' * (size > 1)} of {request.mid_length:,} tokens"
    bases = " and ".join(dict.fromkeys(d.basis for d in deployments))
    speedup = Chart(
        "Speed-up by speculative decoding",
        f"{', '.join(words)}; {load}; times: {bases}{undrawn}",
        Axis("acceptance rate of a drafted token", log=False, tick="{:.0%}".format),
        Axis("speed-up", log=False, tick=times_tick),
        (*gains, limit("plain decode", 1.0)),
    )
    if not pays:
        return speedup
    least = Chart(
        "Where speculation pays",
        "the acceptance rate from which on a step saves more than it costs; a curve ends where "
        "none is enough or the memory is full",
        BATCH_AXIS,
        Axis("acceptance rate", log=False, tick="{:.0%}".format, shown=(0.0, 1.0)),
        tuple(pays),
    )
    return joined([speedup, least])


def _draft_tokens(count: int) -> str:
    return f"{count} token{'s' * (count > 1)} drafted"


def cost_vs_context(curves: "Sequence[CostCurve]", price_per_hour: float = 0.0) -> Chart:
    """Return charts of the cost of a million output tokens over contexts, of decode steps alone.

    Left, with as many users as fit; right, with one user. GPU hours without a price.

    Raises:
        UserError: No deployment holds one user.
    """
    curves, undrawn = comparable_curves(curves)
    fitting = [curve for curve in curves if curve.contexts]
    if not fitting:
        models = ", ".join(dict.fromkeys(curve.deployment.model.name for curve in curves))
        raise UserError(
            f"no GPU asked for holds {models} and one user",
            hint="Give a larger one with --gpu",
        )
    parts = [(curve.deployment.model.name, curve.deployment.gpu.name) for curve in curves]
    distinct = dict(zip(parts, keep_distinguishing_columns(parts), strict=True))
    common = [column[0] for column in zip(*parts, strict=True) if len(set(column)) == 1]
    charts = []
    what = "GPU hours"
    y = Axis("GPU hours per million tokens", tick=si_tick("h"))
    if price_per_hour:
        what = "Cost"
        y = Axis("cost per million tokens", tick=plain_tick)
    for title, key in (
        ("as many users as fit", "full_cost"),
        ("one user alone", "single_cost"),
    ):
        series = []
        for curve in fitting:
            model, gpu = curve.deployment.model.name, curve.deployment.gpu.name
            label = " on ".join(distinct[model, gpu]) or model
            series.append(Series(label, tuple(curve.contexts), tuple(getattr(curve, key))))
        charts.append(
            Chart(
                f"{what} against context: {title}",
                "",
                CONTEXT_AXIS,
                y,
                tuple(series),
            )
        )
    words = [*common, "decode alone", "at most 256 users"]
    if price_per_hour:
        words.append(f"{price_per_hour:g} per GPU hour")
    missing = [
        f"{m} does not fit on {g}"
        for (m, g), c in zip(parts, curves, strict=True)
        if not c.contexts
    ]
    basis = curves[0].deployment.basis
    full, single = charts
    full = full._replace(
        subtitle="; ".join([", ".join(words), f"times: {basis}", *missing]) + undrawn
    )
    single = single._replace(subtitle="every step yields one token", y=y._replace(log=False))
    return joined([full, single])


def comparable_curves(curves: Sequence[CurveT]) -> tuple[list[CurveT], str]:
    """Return the curves that one picture compares, and what its subtitle says of the others.

    Predictions are not drawn beside bounds. The second item is '' if all curves are drawn.
    """
    predicted = [curve for curve in curves if curve.deployment.calibration]
    if not predicted or len(predicted) == len(curves):
        return [*curves], ""
    bounds = [c.deployment.gpu.name for c in curves if not c.deployment.calibration]
    names = few([*dict.fromkeys(bounds)])
    return predicted, f"; not drawn, as only bounds are known: {names}"


def deployments_title(deployments: "Sequence[TimedDeployment]") -> str:
    """Return the model, or the number of models, and the GPUs if they are the same."""
    models = [*dict.fromkeys(d.model.name for d in deployments)]
    title = models[0] if len(models) == 1 else f"{len(models)} models"
    gpus = {_gpus(d) for d in deployments}
    return f"{title} on {gpus.pop()}" if len(gpus) == 1 else title


def _gpus(deployment: "TimedDeployment") -> str:
    return f"{deployment.parallelism.gpus}× {deployment.gpu.name}"


def deployment_names(
    deployments: "Sequence[TimedDeployment]", requests: Sequence[str] = ()
) -> list[str]:
    """Return what distinguishes each deployment, and each request if there are several."""
    parts = []
    for number, deployment in enumerate(deployments):
        formats = deployment.formats
        words = (
            deployment.model.name,
            _gpus(deployment),
            formats.weights_label,
            f"cache {formats.kv_cache_dtype}",
            deployment.basis,
        )
        parts.append((*words, *([f", {requests[number]}"] if requests else [])))
    rows = keep_distinguishing_columns(parts)
    return [
        " ".join(row).replace(" ,", ",").removeprefix(", ") or part[0]
        for row, part in zip(rows, parts, strict=True)
    ]
