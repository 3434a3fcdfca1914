"""The standing figures, each as a chart from models and GPUs."""

from collections.abc import Callable, Sequence
from itertools import takewhile

from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.attention import Latent, Sparse
from kvcalc.layers.batch import Batch
from kvcalc.layers.ranks import ONE_GPU, Parallelism
from kvcalc.model.memory import cache_size, weight_bytes
from kvcalc.model.operators import through_layers, total
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.report.chart import Axis, Chart, Series, bytes_tick, si_tick, tokens_tick

CONTEXT_AXIS = Axis("context, tokens", tick=tokens_tick)
MOST_MARKS = 3  # contexts asked for that are written into a picture
ALIKE, NAMES = 1.02, 48  # times another's bytes, up to which one line stands for both; letters of what has one line
MOST_LEVELS = 3  # that say what is left where, of more the subtitle alone; and among which the figures of bars are seen
MOST_LINES, BENEATH = 2, 0.06  # more lines leave too little room below them for names of points: so much of an axis more


def powers(first: int, last: int, per_octave: int = 4) -> list[int]:
    """Whole numbers from `first` to `last`, evenly spaced on a binary logarithmic axis."""
    found, value = [], float(first)
    while value < last:
        found.append(round(value))
        value *= 2 ** (1 / per_octave)
    return [*dict.fromkeys(found), last]


def cache_vs_context(
    models: Sequence[tuple[str, Model, Precision]],
    gpus: Sequence[Gpu] = (),
    batch_size: int = 1,
    last: int = 131072,
    asked: Sequence[int] = (),
    ranks: Sequence[Parallelism] = (),
    levels: Sequence[tuple[str, int]] = (),
) -> Chart:
    """Stored cache over context for models or variants; the memory of each GPU beside the first one's weights as a level.

    asked: contexts whose bytes are written beside the curves, as far as there is room for them. ranks: how GPUs share each
    model; bytes are of one GPU, the fullest. levels: instead of the memory, the KV cache budget of each GPU.
    """
    contexts = powers(128, last)
    ranks = ranks or [ONE_GPU] * len(models)
    series, ends = [], []
    for number, ((label, model, precision), cut) in enumerate(zip(models, ranks, strict=True)):
        ys = tuple(_stored(model, s, batch_size, precision, cut) for s in contexts)
        ends.append(ys[-1])
        series.append(Series(f"{label}: {bytes_tick(ys[-1])}", tuple(contexts), ys, colour=number))
        others = [s for s in asked if s != last]
        if others and len(models) * len(others) <= MOST_MARKS:
            ys = tuple(_stored(model, s, batch_size, precision, cut) for s in others)
            texts = tuple(f"{tokens_tick(s)}: {bytes_tick(y)}" for s, y in zip(others, ys, strict=True))
            series.append(Series("", tuple(map(float, others)), ys, "points", labels=texts, colour=number))
    name, model, precision = models[0]
    taken = weight_bytes(model, precision, ranks[0])
    free = [(gpu.name, gpu.usable_bytes - taken) for gpu in gpus if gpu.usable_bytes > taken]
    lines = _levels(levels or free)
    series += [s._replace(label=f"{'left on ' * (len(lines) <= MOST_LEVELS)}{s.label}") for s in lines]
    counts = {cut.gpus for cut in ranks}
    where = "" if counts == {1} else f" of one GPU of {min(counts)}" if len(counts) == 1 else " of one GPU"
    subtitle = f"stored bytes{where}, batch {batch_size:,}; cache dtype: {_dtypes(models)}"
    left = f"the KV cache budget with {name}" if levels else f"what the weights of {name} leave"
    subtitle += f"; dotted: {left}" * (series[-1].kind == "limit")
    apart = f": {_times(max(ends) / min(ends))} apart at {tokens_tick(last)}" if max(ends) > 1.05 * min(ends) else ""
    title = f"KV cache of {name} against context" if len(models) == 1 else f"KV cache against context{apart}"
    return Chart(title, subtitle, CONTEXT_AXIS, Axis("KV cache", tick=bytes_tick), tuple(series))


def _stored(model: Model, context: int, batch_size: int, precision: Precision, ranks: Parallelism = ONE_GPU) -> float:
    return float(cache_size(model, context, batch_size, precision, parallelism=ranks).stored)


def _dtypes(models: Sequence[tuple[str, Model, Precision]]) -> str:
    from kvcalc.model.precision import formats_of

    return ", ".join(dict.fromkeys(formats_of(model, precision).kv_cache_dtype for _, model, precision in models))


def cache_vs_parameters(models: Sequence[Model], contexts: Sequence[int], precision: Precision) -> Chart:
    """Stored cache of one sequence over parameters, a point a model and context; the sizes of a family are joined, beside growth
    in proportion; elsewhere the points of each model.

    Raises UserError on fewer than two models.
    """
    if len(models) < 2:
        raise UserError(
            "the figure 'cache-vs-parameters' takes two models or more, best the sizes of one family: qwen3-4b qwen3-8b qwen3-32b"
        )
    ranked = sorted(models, key=lambda m: m.parameters)
    xs = tuple(float(m.parameters) for m in ranked)
    family = _family([m.name for m in ranked])
    series = []
    for number, context in enumerate(contexts):
        ys = tuple(_stored(m, context, 1, precision) for m in ranked)
        labels = tuple(m.name.removeprefix(family) for m in ranked) if context == min(contexts) else ()
        series += [Series(f"{tokens_tick(context)} tokens", xs, ys, colour=number)] * bool(family)
        name = "" if family or len(contexts) == 1 else f"{tokens_tick(context)} tokens"
        series.append(Series(name, xs, ys, "points", labels=labels, colour=number))
    if not family and len(contexts) > 1:
        ends = [(min(ys), max(ys)) for ys in zip(*(s.ys for s in series), strict=True)]
        series[:0] = [Series("", (x, x), both, "quiet") for x, both in zip(xs, ends, strict=True)]
    title = f"KV cache {f'of {tokens_tick(contexts[0])} tokens ' * (len(contexts) == 1)}against parameters"
    if family:
        steps = tuple(powers(round(xs[0]), round(xs[-1])))
        series.append(Series("as the parameters grow", steps, tuple(ys[0] * x / xs[0] for x in steps), "quiet"))
        grown = f"{_times(xs[-1] / xs[0])} the parameters, {_times(ys[-1] / ys[0])} the KV cache"
        title = f"From {ranked[0].name} to {ranked[-1].name}: {grown}"
    subtitle = f"stored bytes of one sequence, cache dtype: {_dtypes([(m.name, m, precision) for m in ranked])}"
    heights = [y for s in series for y in s.ys if y > 0]
    beneath = min(heights, default=1.0) * (min(heights, default=1.0) / max(heights, default=1.0)) ** BENEATH
    y = Axis("KV cache", tick=bytes_tick, shown=(beneath,) if family and len(contexts) > MOST_LINES else ())
    return Chart(title, subtitle, Axis("parameters", tick=_parameters), y, tuple(series))


def _family(names: Sequence[str]) -> str:
    """What all names begin with, up to a hyphen."""
    shared = [letters[0] for letters in takewhile(lambda letters: len({*letters}) == 1, zip(*names, strict=False))]
    head, hyphen, _ = "".join(shared).rpartition("-")
    return head + hyphen


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}×" if ratio >= 100 else f"{ratio:.3g}×"


def _parameters(value: float) -> str:
    """125M, 7B: as models are called."""
    return f"{value / 1e9:.3g}B" if value >= 1e9 else f"{value / 1e6:.3g}M"


def no_cache(model: Model, last: int, precision: Precision, ranks: Parallelism = ONE_GPU) -> Chart:
    """FLOPs of each new token on one GPU against length: recomputing all tokens without a cache, one token with it."""
    lengths, work = powers(16, last), si_tick("FLOP")
    without = tuple(float(total(through_layers(model, Batch.prefill(s), precision, ranks)).flops) for s in lengths)
    cached = tuple(float(total(through_layers(model, Batch.decode(s), precision, ranks)).flops) for s in lengths)
    series = (
        Series(f"no cache, all tokens again: {work(without[-1])}", tuple(lengths), without),
        Series(f"cache, one token: {work(cached[-1])}", tuple(lengths), cached),
    )
    tokens = last * (last + 1) // 2
    subtitle = (
        f"{model.name}; to generate {last:,} tokens without a cache: "
        f"{tokens:,} token projections, {tokens - last:,} of them redundant"
    )
    title = f"Without a KV cache the last of {last:,} tokens takes {_times(without[-1] / cached[-1])} the work"
    axis = Axis("FLOP per token" + f", one GPU of {ranks.gpus}" * (ranks.gpus > 1), tick=work)
    return Chart(title, subtitle, Axis("length, tokens", tick=tokens_tick), axis, series)


def memory(models: Sequence[tuple[str, Model, Precision]], gpus: Sequence[Gpu], context: int, batch_size: int) -> Chart:
    """Weights and cache of each model as stacked bars, with the memory of each GPU as a line, and how many of one that takes."""
    weights = tuple(float(weight_bytes(m, p)) for _, m, p in models)
    caches = tuple(float(cache_size(m, context, batch_size, p).stored) for _, m, p in models)
    sums = [a + b for a, b in zip(weights, caches, strict=True)]
    texts = tuple(map(bytes_tick, sums))
    if len(gpus) == 1:
        counts = [-(-int(total) // gpus[0].usable_bytes) for total in sums]
        texts = tuple(f"{text}, {n} GPU{'s' * (n > 1)}" for text, n in zip(texts, counts, strict=True))
    levels, names = _levels([(gpu.name, gpu.usable_bytes) for gpu in gpus]), tuple(label for label, *_ in models)
    if len(levels) > MOST_LEVELS:  # among which no figure would be seen to be its bar's
        names, texts = tuple(f"{name}: {text}" for name, text in zip(names, texts, strict=True)), ("",) * len(names)
    series = [Series("weights", (), weights, "bar"), Series("KV cache", (), caches, "bar", labels=texts), *levels]
    subtitle = f"batch {batch_size:,}, context {context:,}; activations and what an engine takes for itself are apart"
    axis = Axis("", log=False, tick=bytes_tick)
    title = f"Weights and KV cache{_of_memory([label for label, *_ in models], sums, gpus)}"
    return Chart(title, subtitle, axis, axis, tuple(series), names)


def _levels(sizes: Sequence[tuple[str, int]]) -> list[Series]:
    """A line across for each of some names' bytes; one, at the least, for those that would lie on each other, if short enough."""
    groups: list[list[tuple[str, int]]] = []
    for name, size in sorted(sizes, key=lambda one: one[1]):
        last = groups[-1] if groups else []
        near = last and size <= ALIKE * last[0][1] and sum(len(n) for n, _ in (*last, (name, 0))) <= NAMES
        if near or (last and size == last[-1][1]):
            last.append((name, size))
        else:
            groups.append([(name, size)])
    found = []
    for group in groups:
        least, most = (bytes_tick(group[at][1]) for at in (0, -1))
        span = most if least == most else f"{least.removesuffix(most[most.index(' ') :])} to {most}"
        label = f"{', '.join(name for name, _ in group)}: {span}"
        found.append(Series(label, (), (float(group[0][1]),), "limit"))
    return found


def _of_memory(names: Sequence[str], sums: Sequence[float], gpus: Sequence[Gpu]) -> str:
    """How many models fit one GPU, or which GPUs hold one model."""
    if len(gpus) == 1:
        least = sum(size <= gpus[0].usable_bytes for size in sums)
        return (
            f": {least} of {len(sums)} fit one {gpus[0].name}" if len(sums) > 1 else f" beside the memory of one {gpus[0].name}"
        )
    if len(names) > 1 or not gpus:
        return f" beside the memories of {len(gpus)} GPUs" * bool(gpus)
    least = sum(sums[0] <= gpu.usable_bytes for gpu in gpus)
    return f" of {names[0]}: {least or 'none'} of {len(gpus)} GPUs hold{'s' * (least < 2)} them"


def dsa_vs_mla(models: Sequence[Model], last: int, precision: Precision) -> Chart:
    """Bytes that one decode step reads per layer, and the context from which the sparse one reads less.

    Raises UserError unless one of two models has DSA and the other MLA.
    """
    dsa, mla = _sparse_and_dense(models)
    contexts = powers(256, last)

    def read(model: Model, context: int) -> float:
        return cache_size(model, context, precision=precision).read / model.layers

    named = ((mla, "MLA"), (dsa, "DSA"))
    series = [
        Series(f"{m.name}, {what}: {bytes_tick(read(m, last))}", tuple(contexts), tuple(read(m, s) for s in contexts))
        for m, what in named
    ]
    crossing, saved = _crossing(lambda s: read(dsa, s) < read(mla, s), last), read(mla, last) / read(dsa, last)
    if crossing:
        label = f"reads less from {crossing:,} tokens on"
        series.append(Series("", (float(crossing),), (read(dsa, crossing),), "points", labels=(label,), colour=2))
    subtitle = f"bytes read per layer and decode step; cache {_dtypes([('', dsa, precision)])}"
    title = "Sparse attention against MLA: bytes read"
    if crossing:
        title = f"Sparse attention reads {saved:.1f}× fewer bytes than MLA at {tokens_tick(last)} tokens"
    return Chart(title, subtitle, CONTEXT_AXIS, Axis("bytes read per layer", tick=bytes_tick), tuple(series))


def _sparse_and_dense(models: Sequence[Model]) -> tuple[Model, Model]:
    """The model with DSA and the one with MLA, in whatever order they come."""
    sparse = [m for m in models if any(isinstance(p, Sparse) for kind in m.kinds.values() for p in kind.parts)]
    dense = [m for m in models if m not in sparse and any(isinstance(p, Latent) for k in m.kinds.values() for p in k.parts)]
    if len(models) != 2 or len(sparse) != 1 or len(dense) != 1:
        given = ", ".join(f"{m.name} has {m.attention}" for m in models)
        needed = (
            "the figure 'dsa-vs-mla' compares two models, one with DSA and one with MLA, such as deepseek-v3.2 and deepseek-v3"
        )
        raise UserError(f"{needed}; {given}")
    return sparse[0], dense[0]


def _crossing(less: Callable[[int], bool], last: int) -> int | None:
    """The smallest context at which `less` holds, for a comparison that turns once; None if it does not by `last`."""
    if not less(last):
        return None
    low, high = 0, last
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if less(middle) else (middle, high)
    return high
