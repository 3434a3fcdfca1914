"""Pictures of weights and cache: over contexts, over parameters and beside the memory of GPUs."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.report.charts.chart import (
    CONTEXT_AXIS,
    Axis,
    Chart,
    Series,
    bar_chart,
    bytes_tick,
    joined,
    limit,
    si_tick,
    times_tick,
    tokens_tick,
)

if TYPE_CHECKING:
    from kvcalc.planning.sweeps import CacheCurve, GenerationWork, SparseReads

CACHE_AXIS = Axis("KV cache", tick=bytes_tick)
MAX_MARKS = 3  # requested contexts whose bytes are written at the curves
MAX_LEVELS = 3  # limits that say what they are; the subtitle says it of more


def cache_vs_context(
    curves: "Sequence[CacheCurve]",
    batch_size: int = 1,
    gpus: Sequence[Gpu] = (),
    requested: Sequence[int] = (),
    budgets: Mapping[str, int] | None = None,
) -> Chart:
    """Return a chart of the stored cache over contexts.

    Args:
        curves: Curves over the same contexts.
        batch_size: Number of sequences.
        gpus: GPUs; the memory that the weights of the first model leave is a limit.
        requested: Contexts whose bytes are written at the curves if there are few.
        budgets: KV cache budgets by GPU name, instead of `gpus`.
    """
    first = curves[0]
    last = first.contexts[-1]
    series = _cache_series(curves, [c for c in requested if c != last])
    subtitle = f"stored bytes{_of_gpus(curves)}, batch {batch_size:,}; {_cache_dtypes(curves)}"
    free = budgets or {
        gpu.name: gpu.usable_bytes - first.weight_bytes
        for gpu in gpus
        if gpu.usable_bytes > first.weight_bytes
    }
    levels = _levels(free.items())
    if levels:
        left = f"what the weights of {first.label} leave"
        subtitle += (
            f"; dotted: {f'the KV cache budget with {first.label}' if budgets else left}"
        )
    before = "left on " if len(levels) <= MAX_LEVELS else ""
    series += [level._replace(label=before + level.label) for level in levels]
    title = f"KV cache of {first.label} against context"
    if len(curves) > 1:
        title = "KV cache against context"
        ends = [curve.stored_bytes[-1] for curve in curves]
        if max(ends) > 1.05 * min(ends):
            title += f": {times_tick(max(ends) / min(ends))} apart at {tokens_tick(last)}"
    return Chart(
        title,
        subtitle,
        CONTEXT_AXIS,
        CACHE_AXIS,
        tuple(series),
    )


def _cache_series(curves: "Sequence[CacheCurve]", marks: Sequence[int]) -> list[Series]:
    """Return the curves, with the bytes at marked contexts if there are few."""
    series = []
    for number, curve in enumerate(curves):
        label = f"{curve.label}: {bytes_tick(curve.stored_bytes[-1])}"
        points = tuple(curve.contexts), tuple(curve.stored_bytes)
        series.append(Series(label, *points, colour=number))
        if marks and len(curves) * len(marks) <= MAX_MARKS:
            stored = dict(zip(curve.contexts, curve.stored_bytes, strict=True))
            sizes = tuple(stored[context] for context in marks)
            texts = tuple(f"{tokens_tick(c)}: {bytes_tick(stored[c])}" for c in marks)
            series.append(
                Series(
                    "",
                    tuple(marks),
                    sizes,
                    "points",
                    labels=texts,
                    colour=number,
                )
            )
    return series


def _of_gpus(curves: "Sequence[CacheCurve]") -> str:
    counts = {curve.gpus for curve in curves}
    if counts == {1}:
        return ""
    return f" of one GPU of {min(counts)}" if len(counts) == 1 else " of one GPU"


def _cache_dtypes(curves: "Iterable[CacheCurve]") -> str:
    dtypes = dict.fromkeys(curve.kv_cache_dtype for curve in curves)
    return f"cache dtype: {', '.join(dtypes)}"


def _levels(sizes: Iterable[tuple[str, int]]) -> list[Series]:
    """Return a limit for each size, with the names of all that have it."""
    names: dict[int, list[str]] = {}
    for name, size in sizes:
        names.setdefault(size, []).append(name)
    return [limit(f"{', '.join(names[n])}: {bytes_tick(n)}", n) for n in sorted(names)]


def cache_vs_parameters(curves: "Sequence[CacheCurve]") -> Chart:
    """Return a chart of the cache of one sequence over parameters, with a point per context.

    Sizes of a family are joined by a line, beside a line in proportion to the parameters.

    Raises:
        UserError: There are fewer than two models.
    """
    if len(curves) < 2:
        raise UserError(
            "the figure 'cache-vs-parameters' takes two models or more, best the sizes of one "
            "family: qwen3-4b qwen3-8b qwen3-32b"
        )
    ranked = sorted(curves, key=lambda curve: curve.parameters)
    first, last = ranked[0], ranked[-1]
    contexts = first.contexts
    xs = tuple(curve.parameters for curve in ranked)
    columns = zip(*(curve.label for curve in ranked), strict=False)
    shared = "".join(letters[0] for letters in takewhile(lambda c: len(set(c)) == 1, columns))
    family = shared[: shared.rfind("-") + 1]
    series = []
    for number, context in enumerate(contexts):
        ys = tuple(curve.stored_bytes[number] for curve in ranked)
        name = f"{tokens_tick(context)} tokens"
        labels: tuple[str, ...] = ()
        if context == min(contexts):
            labels = tuple(curve.label.removeprefix(family) for curve in ranked)
        if family:
            series.append(Series(name, xs, ys, colour=number))
        label = "" if family or len(contexts) == 1 else name
        series.append(
            Series(
                label,
                xs,
                ys,
                "points",
                labels=labels,
                colour=number,
            )
        )
    single = f"of {tokens_tick(contexts[0])} tokens " if len(contexts) == 1 else ""
    title = f"KV cache {single}against parameters"
    if family:
        growth = last.parameters / first.parameters
        ends = (ys[0], ys[0] * growth)
        series.append(Series("as the parameters grow", (xs[0], xs[-1]), ends, "quiet"))
        title = (
            f"From {first.label} to {last.label}: {times_tick(growth)} the parameters, "
            f"{times_tick(ys[-1] / ys[0])} the KV cache"
        )
    subtitle = f"stored bytes of one sequence, {_cache_dtypes(ranked)}"
    parameters = Axis("parameters", tick=_parameters_tick)
    return Chart(
        title,
        subtitle,
        parameters,
        CACHE_AXIS,
        tuple(series),
    )


def _parameters_tick(value: float) -> str:
    """Return parameters as models are called: 125M, 7B."""
    return f"{value / 1e9:.3g}B" if value >= 1e9 else f"{value / 1e6:.3g}M"


def generation_work_chart(works: "Sequence[GenerationWork]") -> Chart:
    """Return a chart per model of the FLOPs of each token, without a cache and with it."""
    charts = [_work_chart(work) for work in works]
    if len(charts) == 1:
        return charts[0]
    over = (
        "The work of each token, without a KV cache and with it",
        charts[0].subtitle.partition("; ")[2],
    )
    short = [
        chart._replace(
            title=work.model,
            subtitle=chart.title.replace("Without a KV cache", "without it"),
        )
        for work, chart in zip(works, charts, strict=True)
    ]
    return joined([short[0]._replace(over=over), *short[1:]])


def _work_chart(work: "GenerationWork") -> Chart:
    write = si_tick("FLOP")
    lengths = tuple(work.lengths)
    last = lengths[-1]
    again, once = work.uncached_flops[-1], work.cached_flops[-1]
    series = (
        Series(
            f"no cache, all tokens again: {write(again)}",
            lengths,
            tuple(work.uncached_flops),
        ),
        Series(f"cache, one token: {write(once)}", lengths, tuple(work.cached_flops)),
    )
    projections = last * (last + 1) // 2
    subtitle = (
        f"{work.model}; to generate {last:,} tokens without a cache: "
        f"{projections:,} token projections, {projections - last:,} of them redundant"
    )
    title = (
        f"Without a KV cache the last of {last:,} tokens takes {times_tick(again / once)} "
        "the work"
    )
    share = f", one GPU of {work.gpus}" if work.gpus > 1 else ""
    x = Axis("length, tokens", tick=tokens_tick)
    return Chart(
        title,
        subtitle,
        x,
        Axis(f"FLOP per token{share}", tick=write),
        series,
    )


def weights_and_cache(
    curves: "Sequence[CacheCurve]", gpus: Sequence[Gpu], batch_size: int
) -> Chart:
    """Return bars of weights and cache at one context, with the memory of each GPU as a limit."""
    weights = [curve.weight_bytes for curve in curves]
    caches = [curve.stored_bytes[0] for curve in curves]
    sums = [sum(sizes) for sizes in zip(weights, caches, strict=True)]
    texts = [*map(bytes_tick, sums)]
    title = "Weights and KV cache"
    if len(gpus) > 1:
        title += f" beside the memories of {len(gpus)} GPUs"
    elif gpus:
        gpu = gpus[0]
        counts = [-(-size // gpu.usable_bytes) for size in sums]
        texts = [
            f"{text}, {count} GPU{'s' * (count > 1)}"
            for text, count in zip(texts, counts, strict=True)
        ]
        title += f": {counts.count(1)} of {len(sums)} fit one {gpu.name}"
    return bar_chart(
        title,
        f"batch {batch_size:,}, context {curves[0].contexts[0]:,}; without activations and what an "
        "engine takes for itself",
        [curve.label for curve in curves],
        {"weights": weights, "KV cache": caches},
        bytes_tick,
        texts,
        {one.label: one.ys[0] for one in _levels((g.name, g.usable_bytes) for g in gpus)},
    )


def sparse_reads_chart(reads: "SparseReads") -> Chart:
    """Return a chart of the bytes that a decode step reads per layer, sparse and dense."""
    last = reads.dense.contexts[-1]
    series = []
    ends = []
    for curve, kind in ((reads.dense, "MLA"), (reads.sparse, "DSA")):
        ys = tuple(size / curve.layers for size in curve.read_bytes)
        ends.append(ys[-1])
        label = f"{curve.label}, {kind}: {bytes_tick(ys[-1])}"
        series.append(Series(label, tuple(curve.contexts), ys))
    title = "Sparse attention against MLA: bytes read"
    if reads.crossing:
        y = ys[reads.sparse.contexts.index(reads.crossing)]
        label = f"reads less from {reads.crossing:,} tokens on"
        point = (float(reads.crossing),), (y,)
        series.append(
            Series(
                "",
                *point,
                "points",
                labels=(label,),
                colour=2,
            )
        )
        title = (
            f"Sparse attention reads {ends[0] / ends[1]:.1f}× fewer bytes than MLA at "
            f"{tokens_tick(last)} tokens"
        )
    subtitle = f"bytes read per layer and decode step; cache {reads.sparse.kv_cache_dtype}"
    y_axis = Axis("bytes read per layer", tick=bytes_tick)
    return Chart(
        title,
        subtitle,
        CONTEXT_AXIS,
        y_axis,
        tuple(series),
    )
