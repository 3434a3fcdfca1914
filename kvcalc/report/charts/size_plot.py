"""Pictures of weights and cache: over contexts, over parameters and next to the memory of GPUs."""

from collections.abc import Iterable, Sequence
from os.path import commonprefix
from typing import TYPE_CHECKING

from kvcalc.arithmetic import grouped
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.records import Records
from kvcalc.report.charts.chart import (
    CONTEXT_AXIS,
    Axis,
    Chart,
    Series,
    bar_chart,
    bytes_tick,
    limit_line,
    si_tick,
    tokens_tick,
    whole_tick,
)
from kvcalc.report.text.tables import ratio as ratio_text

if TYPE_CHECKING:
    from kvcalc.planning.sweeps import CacheCurve, GenerationWork, SparseReads

CACHE_AXIS = Axis("KV cache", bytes_tick)


def cache_vs_context(
    curves: "Sequence[CacheCurve]", batch_sizes: Sequence[int], gpus: Sequence[Gpu] = ()
) -> Chart:
    """Return a chart of the stored KV cache in bytes per GPU over contexts.

    Args:
        curves: A curve for each model or format, over equal contexts.
        batch_sizes: Numbers of sequences in the curves, for the subtitle.
        gpus: GPUs. A line marks the memory that each has left after loading the first model's
            weights.
    """
    first = curves[0]
    last = first.contexts[-1]
    series = []
    for curve in curves:
        label = f"{curve.label}: {bytes_tick(curve.stored_bytes[-1])}"
        series.append(Series(label, curve.contexts, curve.stored_bytes))
    limits = _names_by_size(
        (gpu.name, gpu.usable_bytes - first.weight_bytes)
        for gpu in gpus
        if gpu.usable_bytes > first.weight_bytes
    )
    series += [limit_line(name, size) for name, size in limits.items()]
    per_gpu = " per GPU" * any(curve.gpus > 1 for curve in curves)
    batches = ", ".join(f"{size:,}" for size in batch_sizes)
    subtitle = f"stored bytes{per_gpu}, batch {batches}; {_cache_dtypes(curves)}"
    if limits:
        subtitle += f"; dotted: memory without the weights of {first.label}"
    title = f"KV cache of {first.label} against context"
    if len(curves) > 1:
        title = "KV cache against context"
        ends = [curve.stored_bytes[-1] for curve in curves]
        if 0 < 1.05 * min(ends) < max(ends):  # an embedder may have no cache
            title += f": {ratio_text(max(ends) / min(ends))} apart at {tokens_tick(last)}"
    return Chart(title, subtitle, CONTEXT_AXIS, CACHE_AXIS, series)


def _cache_dtypes(curves: "Sequence[CacheCurve]") -> str:
    return f"cache dtype: {', '.join(dict.fromkeys(c.kv_cache_dtype for c in curves))}"


def _names_by_size(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return sizes in bytes, the smallest first, by a text with the names and the size."""
    names = grouped((size, name) for name, size in sizes)
    return {f"{', '.join(names[size])}: {bytes_tick(size)}": size for size in sorted(names)}


def cache_vs_parameters(curves: "Sequence[CacheCurve]") -> Chart:
    """Return a chart of one sequence's KV cache in bytes over the number of parameters of models.

    Each model has one point per context. If the models are one family, a line joins their points,
    and a further line shows growth in proportion to the parameters.

    Args:
        curves: A curve per model, over equal contexts, for one sequence and not split over GPUs.

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
    xs = [curve.parameters for curve in ranked]
    is_family = "-" in commonprefix([curve.label for curve in ranked])  # noqa: RUF071 - characters
    series = []
    for number, context in enumerate(contexts):
        ys = [curve.stored_bytes[number] for curve in ranked]
        label = f"{tokens_tick(context)} tokens"
        labels = [curve.label for curve in ranked] if context == min(contexts) else []
        if is_family:
            series.append(Series(label, xs, ys, colour=number))
            label = ""
        series.append(Series(label, xs, ys, "points", labels=labels, colour=number))
    title = "KV cache against parameters"
    if is_family:
        growth = last.parameters / first.parameters
        ends = [ys[0], ys[0] * growth]
        series.append(Series("as the parameters grow", [xs[0], xs[-1]], ends, "quiet"))
        if ys[0]:
            title = (
                f"From {first.label} to {last.label}: {ratio_text(growth)} the parameters, "
                f"{ratio_text(ys[-1] / ys[0])} the KV cache"
            )
    subtitle = f"stored bytes of one sequence, {_cache_dtypes(ranked)}"
    x_axis = Axis(
        "parameters",  # as in the names of models: 125M, 7B
        lambda value: f"{value / 1e9:.3g}B" if value >= 1e9 else f"{value / 1e6:.3g}M",
    )
    return Chart(title, subtitle, x_axis, CACHE_AXIS, series)


def hierarchy_chart(name: str, levels: Records) -> Chart:
    """Return a chart of bandwidth over size for the memories of a GPU, from registers to disk.

    A link to another memory has no size, so it is a horizontal line.

    Args:
        name: Name of the GPU.
        levels: Records of `memory_levels`, one per memory or link.
    """
    memories = [level for level in levels if level["bytes"]]
    series = [
        Series(
            "",
            [level["bytes"] for level in memories],
            [level["bytes_per_s"] for level in memories],
            "points",
            labels=[level["level"] for level in memories],
        )
    ]
    for level in levels:
        if level not in memories and level["bytes_per_s"]:
            series.append(limit_line(level["level"], level["bytes_per_s"]))
    size, rate = Axis("size", bytes_tick), Axis("bandwidth", si_tick("B/s"))
    return Chart(
        f"Memory hierarchy of {name}", "bandwidth is of one direction", size, rate, series
    )


def generation_work_chart(works: "Sequence[GenerationWork]") -> list[Chart]:
    """Return two charts per model: FLOPs of each generated token without a KV cache, and with it.

    FLOPs are of one GPU. The axes are linear. FLOPs of full attention per token grow with the
    square of the length without a cache, and in proportion to the length with it.

    Args:
        works: FLOPs of each token of a generation, for each model.
    """
    charts = []
    write = si_tick("FLOP")
    x = Axis("length, tokens", whole_tick, log=False, shown=(0,))
    for work in works:
        last = work.lengths[-1]
        uncached, cached = work.uncached_flops[-1], work.cached_flops[-1]
        projections = last * (last + 1) // 2
        about = (
            f"to generate {last:,} tokens without a cache: {projections:,} token projections, "
            f"{projections - last:,} of them redundant"
        )
        ratio = f"token {last:,} takes {ratio_text(uncached / cached)} the work"
        share = f", one GPU of {work.gpus}" if work.gpus > 1 else ""
        y = Axis(f"FLOP per token{share}", write, log=False, shown=(0,))
        panels = (
            (
                f"Without a KV cache, {ratio}",
                about,
                work.uncached_flops,
                work.uncached_attention_flops,
            ),
            (
                "With a KV cache",
                "only the new token goes through the model",
                work.cached_flops,
                work.cached_attention_flops,
            ),
        )
        for title, subtitle, whole, attention in panels:
            series = [
                Series(f"{name}: {write(flops[-1])}", work.lengths, flops)
                for name, flops in (("whole pass", whole), ("attention only", attention))
            ]
            charts.append(Chart(title, f"{work.model}; {subtitle}", x, y, series))
    return charts


def weights_and_cache(
    curves: "Sequence[CacheCurve]", gpus: Sequence[Gpu], batch_size: int
) -> Chart:
    """Return a chart with one bar per model: bytes of its weights and its KV cache.

    Args:
        curves: A curve per model, not split over GPUs. Only its first context is drawn.
        gpus: GPUs. A line marks the memory of each GPU. With one GPU, a text at each bar says how
            many such GPUs have enough memory for it.
        batch_size: Number of sequences in the cache, for the subtitle.
    """
    weights = [curve.weight_bytes for curve in curves]
    caches = [curve.stored_bytes[0] for curve in curves]
    sums = [weight + cache for weight, cache in zip(weights, caches)]
    texts = [*map(bytes_tick, sums)]
    title = "Weights and KV cache"
    if len(gpus) > 1:
        title += f" next to the memories of {len(gpus)} GPUs"
    elif gpus:
        gpu = gpus[0]
        counts = [-(-size // gpu.usable_bytes) for size in sums]
        texts = [
            f"{text}, {count} GPU{'s' * (count > 1)}" for text, count in zip(texts, counts)
        ]
        title += f": {counts.count(1)} of {len(sums)} fit one {gpu.name}"
    return bar_chart(
        title,
        f"batch {batch_size:,}, context {curves[0].contexts[0]:,}; without activations and the "
        "engine's own memory",
        [curve.label for curve in curves],
        {"weights": weights, "KV cache": caches},
        bytes_tick,
        texts,
        _names_by_size([(gpu.name, gpu.usable_bytes) for gpu in gpus]),
    )


def sparse_reads_chart(reads: "SparseReads") -> Chart:
    """Return a chart of the cache bytes that a decode step reads per layer, over contexts.

    A model with multi-head latent attention (MLA) reads its whole cache. A model with DeepSeek
    sparse attention (DSA) reads only a part of it. A point marks the context from which it reads
    less, if there is one. Bytes are for one sequence.

    Args:
        reads: Bytes per layer at each context, for models with MLA and with DSA.
    """
    series = []
    for curve, kind in ((reads.dense, "MLA"), (reads.sparse, "DSA")):
        ys = [size / curve.layers for size in curve.read_bytes]
        series.append(
            Series(f"{curve.label}, {kind}: {bytes_tick(ys[-1])}", curve.contexts, ys)
        )
    title = "Sparse attention against MLA: bytes read"
    if reads.crossing:
        y = ys[reads.sparse.contexts.index(reads.crossing)]
        text = f"reads less from {reads.crossing:,} tokens on"
        series.append(Series("", [reads.crossing], [y], "points", labels=[text], colour=2))
        title = (
            f"Sparse attention reads {series[0].ys[-1] / ys[-1]:.1f}× fewer bytes than MLA at"
            f" {tokens_tick(reads.dense.contexts[-1])} tokens"
        )
    subtitle = f"bytes read per layer and decode step; cache {reads.sparse.kv_cache_dtype}"
    return Chart(
        title, subtitle, CONTEXT_AXIS, Axis("bytes read per layer", bytes_tick), series
    )
