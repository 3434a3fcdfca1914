"""Pictures of times and costs: over the batch size, over the acceptance rate and over contexts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcalc.errors import few
from kvcalc.report.charts.chart import (
    Axis,
    Chart,
    Series,
    joined,
    limit,
    share_tick,
    times_tick,
    tokens_tick,
    whole_tick,
)
from kvcalc.report.charts.size_plot import generation_work_chart
from kvcalc.report.row_names import shared_words, sides
from kvcalc.report.text.fit_text import curve_note, within_memory
from kvcalc.report.text.tables import plural, seconds, time_note

if TYPE_CHECKING:
    from kvcalc.planning.sweeps import LatencyCurve, SpeculationCurve
    from kvcalc.question.serving_options import LatencyOptions
    from kvcalc.timing.deployment import TimedDeployment

BATCH_AXIS = Axis("concurrent sequences", tick=tokens_tick)
RATE_AXIS = Axis("acceptance rate", log=False, tick=share_tick, shown=(0.0, 1.0))


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
    lengths = [
        f"{curve.request.input_len:,} tokens in and {curve.request.output_len:,} out"
        for curve in curves
    ]
    common, names = deployment_names([curve.deployment for curve in curves])
    if len(set(lengths)) == 1:
        common = ", ".join(filter(None, [common, lengths[0]]))
    else:
        names = [", ".join(filter(None, pair)) for pair in zip(names, lengths, strict=True)]
    if gib := curves[0].request.cpu_offload_gb:
        common += f"; {gib:g} GiB of each GPU's weights in the host's memory"
    times, rates = (
        Chart(
            title,
            "",
            BATCH_AXIS,
            axis,
            [
                within_memory(
                    Series(
                        name or curve.deployment.model.name,
                        [record["batch_size"] for record in curve.records],
                        [record[key] for record in curve.records],
                    ),
                    curve.max_num_seqs,
                )
                for name, curve in zip(names, curves, strict=True)
            ],
        )
        for title, axis, key in (
            ("Time per token over the batch", Axis("TPOT", tick=seconds), "tpot_s"),
            ("Tokens per second", Axis("tokens/s", tick=whole_tick), "output_tokens_per_s"),
        )
    )
    notes = time_note([record for curve in curves for record in curve.records]) + undrawn
    times = times._replace(subtitle="; ".join(filter(None, [common, notes])))
    batch_sizes = [record["batch_size"] for record in curves[0].records]
    note = curve_note(times.series, batch_sizes)
    return joined([times, rates._replace(subtitle=f"output tokens of all sequences{note}")])


def speculation_chart(curves: "Sequence[SpeculationCurve]", request: "LatencyOptions") -> Chart:
    """Return charts of the speed-up over the acceptance rate, and of the smallest useful rate.

    The second chart shows the smallest rate at which speculation is no slower, over the batch
    size.
    """
    curves, undrawn = comparable_curves(curves)
    common, names = deployment_names([curve.deployment for curve in curves])
    counts = [plural(curve.num_draft_tokens, "draft token") for curve in curves]
    drafts = " and ".join(dict.fromkeys(curve.draft for curve in curves))
    words = [common, f"draft {drafts}"]
    if len(set(counts)) == 1 < len(curves):
        words.append(counts[0])
    else:
        names = [", ".join(filter(None, pair)) for pair in zip(names, counts, strict=True)]
    gains, rates = [], []
    for number, (name, curve) in enumerate(zip(names, curves, strict=True)):
        xs = [index / (len(curve.speedups) - 1) for index in range(len(curve.speedups))]
        gain = Series(name, xs, curve.speedups, colour=number)
        if curve.can_fit is False:
            gain = gain._replace(kind="dashed", label=f"{name}: does not fit")
        gains.append(gain)
        useful = Series(name, curve.batch_sizes, curve.min_rates, colour=number)
        useful = within_memory(useful, curve.max_num_seqs)
        rates += [useful] if useful.xs else []
    load = f"{plural(request.batch_size, 'sequence')} of {request.mid_length:,} tokens"
    bases = " and ".join(dict.fromkeys(curve.deployment.basis for curve in curves))
    charts = [
        Chart(
            "Speed-up by speculative decoding",
            f"{', '.join(filter(None, words))}; {load}; times: {bases}{undrawn}",
            RATE_AXIS._replace(title="acceptance rate of a draft token"),
            Axis("speed-up", log=False, tick=times_tick),
            [*gains, limit("plain decode", 1.0)],
        )
    ]
    if rates:
        about = (
            "the smallest acceptance rate at which speculation is faster; a curve ends if no "
            "rate is, or if the memory is full"
        )
        charts.append(Chart("Useful acceptance rates", about, BATCH_AXIS, RATE_AXIS, rates))
    return joined(charts)


def comparable_curves(curves: Sequence[Any]) -> tuple[list[Any], str]:
    """Return the curves that one picture compares, and a note on the others for the subtitle.

    Predictions are not drawn next to bounds. The note is '' if all curves are drawn.
    """
    predicted = [curve for curve in curves if curve.deployment.calibration]
    if not predicted or len(predicted) == len(curves):
        return [*curves], ""
    bounds = [c.deployment.gpu.name for c in curves if not c.deployment.calibration]
    names = few([*dict.fromkeys(bounds)])
    return predicted, f"; not drawn without a prediction: {names}"


def deployment_names(deployments: "Sequence[TimedDeployment]") -> tuple[str, list[str]]:
    """Return the model and the GPUs that all deployments share, and a name for each.

    The names of a single deployment and of equal deployments are empty.
    """
    records = [
        {
            "model": deployment.model.name,
            "gpu": f"{deployment.parallelism.gpus}× {deployment.gpu.name}",
            "dtype": deployment.formats.weights_label,
            "kv_cache_dtype": deployment.formats.kv_cache_dtype,
            "basis": deployment.basis,
        }
        for deployment in deployments
    ]
    common = ", ".join(shared_words(records, {"model": "{}", "gpu": "{}"}))
    return common, sides(records, [*records[0]]).names
