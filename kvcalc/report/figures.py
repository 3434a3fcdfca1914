"""The standing figures, each as a chart from models and GPUs."""

from collections.abc import Callable, Sequence

from kvcalc.gpu.spec import Gpu
from kvcalc.layers.batch import Batch
from kvcalc.model.memory import cache_size, weight_bytes
from kvcalc.model.operators import forward, total
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.report.chart import Axis, Chart, Series, bytes_tick, si_tick, tokens_tick

CONTEXT_AXIS = Axis("context, tokens", tick=tokens_tick)


def powers(first: int, last: int, per_octave: int = 4) -> list[int]:
    """Whole numbers from `first` to `last`, evenly spaced on a binary logarithmic axis."""
    found, value = [], float(first)
    while value < last:
        found.append(round(value))
        value *= 2 ** (1 / per_octave)
    return [*dict.fromkeys(found), last]


def cache_vs_context(
    models: Sequence[tuple[str, Model, Precision]], gpu: Gpu | None = None, batch_size: int = 1, last: int = 131072
) -> Chart:
    """Stored cache over context for models or variants; with a GPU, its memory beside the first one's weights as a line."""
    contexts = powers(128, last)
    series = []
    for label, model, precision in models:
        stored = tuple(cache_size(model, s, batch_size, precision).stored for s in contexts)
        series.append(Series(label, tuple(contexts), stored))
    if gpu:
        name, model, precision = models[0]
        free = gpu.usable_bytes - weight_bytes(model, precision)
        if free > 0:
            level = Series(f"{gpu.name}'s memory beside {name}'s weights: {bytes_tick(free)}", (), (free,), "limit")
            series.append(level)
    subtitle = f"stored bytes, batch {batch_size:,}; cache dtype: {_dtypes(models)}"
    return Chart("KV cache against context", subtitle, CONTEXT_AXIS, Axis("KV cache", tick=bytes_tick), tuple(series))


def _dtypes(models: Sequence[tuple[str, Model, Precision]]) -> str:
    from kvcalc.model.precision import formats_of

    return ", ".join(dict.fromkeys(formats_of(model, precision).kv_cache_dtype for _, model, precision in models))


def cache_vs_parameters(models: Sequence[Model], contexts: Sequence[int], precision: Precision) -> Chart:
    """Stored cache of one sequence over parameters, a point a model and a series a context."""
    ranked = sorted(models, key=lambda m: m.parameters)
    xs = tuple(float(m.parameters) for m in ranked)
    series = []
    for number, context in enumerate(contexts):
        ys = tuple(float(cache_size(m, context, precision=precision).stored) for m in ranked)
        labels = tuple(m.name.removeprefix("gpt-3-") for m in ranked) if number == len(contexts) - 1 else ()
        series.append(Series("", xs, ys, "trail", colour=number))
        series.append(Series(f"{tokens_tick(context)} tokens", xs, ys, "points", labels=labels, colour=number))
    subtitle = f"stored bytes of one sequence, cache dtype: {_dtypes([(m.name, m, precision) for m in ranked])}"
    x = Axis("parameters", tick=si_tick())
    return Chart("KV cache against parameters", subtitle, x, Axis("KV cache", tick=bytes_tick), tuple(series))


def no_cache(model: Model, last: int, precision: Precision) -> Chart:
    """FLOPs of each new token against length: recomputing all tokens without a cache, one token with it."""
    lengths = powers(16, last)
    without = tuple(float(total(forward(model, Batch.prefill(s), precision)).flops) for s in lengths)
    cached = tuple(float(total(forward(model, Batch.decode(s), precision)).flops) for s in lengths)
    series = (
        Series("no cache: all tokens again", tuple(lengths), without),
        Series("cache: one token", tuple(lengths), cached),
    )
    tokens = last * (last + 1) // 2
    subtitle = (
        f"{model.name}; to generate {last:,} tokens without a cache: "
        f"{tokens:,} token projections, {tokens - last:,} of them redundant"
    )
    title = "Work per new token, without and with a KV cache"
    return Chart(title, subtitle, Axis("length, tokens", tick=tokens_tick), Axis("FLOP per token", tick=si_tick("FLOP")), series)


def memory(models: Sequence[tuple[str, Model, Precision]], gpu: Gpu | None, context: int, batch_size: int) -> Chart:
    """Weights and cache of each model as stacked bars, with the GPU's memory as a line."""
    weights = tuple(float(weight_bytes(m, p)) for _, m, p in models)
    caches = tuple(float(cache_size(m, context, batch_size, p).stored) for _, m, p in models)
    series = [Series("weights", (), weights, "bar"), Series("KV cache", (), caches, "bar")]
    if gpu:
        series.append(Series(f"{gpu.name}: {bytes_tick(gpu.usable_bytes)}", (), (gpu.usable_bytes,), "limit"))
    subtitle = f"batch {batch_size:,}, context {context:,}, one GPU's view; activations and engine overhead apart"
    axis = Axis("bytes", log=False, tick=bytes_tick)
    return Chart("Where the memory goes", subtitle, axis, axis, tuple(series), tuple(label for label, *_ in models))


def dsa_vs_mla(dsa: Model, mla: Model, last: int, precision: Precision) -> Chart:
    """Bytes that one decode step reads per layer, and the context from which the sparse one reads less."""
    contexts = powers(256, last)

    def read(model: Model, context: int) -> float:
        return cache_size(model, context, precision=precision).read / model.layers

    series = [Series(m.name, tuple(contexts), tuple(read(m, s) for s in contexts)) for m in (mla, dsa)]
    crossing = _crossing(lambda s: read(dsa, s) < read(mla, s), last)
    if crossing:
        label = f"reads less from {crossing:,} tokens on"
        series.append(Series("", (float(crossing),), (read(dsa, crossing),), "points", labels=(label,), colour=2))
    saved = read(mla, last) / read(dsa, last)
    subtitle = f"per layer and decode step, cache {_dtypes([('', dsa, precision)])}; at {last:,} tokens {saved:.1f}× fewer bytes"
    title = "Sparse attention against MLA: bytes read"
    return Chart(title, subtitle, CONTEXT_AXIS, Axis("bytes read per layer", tick=bytes_tick), tuple(series))


def _crossing(less: Callable[[int], bool], last: int) -> int | None:
    """The smallest context at which `less` holds, for a comparison that turns once; None if it does not by `last`."""
    if not less(last):
        return None
    low, high = 0, last
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if less(middle) else (middle, high)
    return high
