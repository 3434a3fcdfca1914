"""`kvcalc size`."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from kvcalc.answers.answer import MAX_PASSES, MAX_ROWS, Answer, LazyRecords
from kvcalc.answers.deployments import (
    axes_of,
    models_of,
    remarks,
    stored_models,
    typed_dimensions,
)
from kvcalc.question.deployment_options import ShardingOptions
from kvcalc.question.options import check_number
from kvcalc.question.size_options import DimensionOptions, SizeOptions

if TYPE_CHECKING:
    from kvcalc.answers.deployments import Stored
    from kvcalc.gpu.gpu import Gpu
    from kvcalc.report.charts.chart import Chart

# The fields of `CacheSize`, by the keys of `size`.
CACHE_SIZE = {
    "stored": "kv_cache_bytes",
    "read": "kv_cache_read_bytes",
    "allocated": "kv_cache_allocated_bytes",
    "fixed": "fixed_bytes",
    "slope": "bytes_per_token",
}


def run(
    models: list[str] = [],  # noqa: B006 (no function changes the list)
    *,
    shapes: list[SizeOptions],
    sharding: list[ShardingOptions],
    dimensions: DimensionOptions,
) -> Answer:
    """Compute the bytes of the KV cache on one GPU, and compare them with the weights.

    Bytes are of the whole batch, on the GPU that stores the most.

    Args:
        models: Models, each word a name or a comma-separated list; empty if `dimensions` are given.
        shapes: Each context (tokens), batch size (sequences) and block size (tokens).
        sharding: Each item of data types and parallelism.
        dimensions: Number and widths of the layers, given instead of a model.
    """
    changes = sharding[0].set_
    typed = typed_dimensions(dimensions, models, changes)
    variants = stored_models([typed.model()] if typed else models_of(models, changes), sharding)
    return size_answer(variants, shapes, make_record=typed.record if typed else None)


def size_answer(
    variants: "Sequence[Stored]",
    shapes: Sequence[SizeOptions],
    gpus: "Sequence[Gpu]" = (),
    make_record: Callable[..., Any] | None = None,
) -> Answer:
    """Return the KV cache bytes per GPU of each model at each context and batch size.

    Args:
        variants: (model, data types, parallelism) triples.
        shapes: Contexts (tokens) and batch sizes (sequences). All have the block size of the first.
        gpus: GPUs whose memory the picture shows as a line; empty for no line.
        make_record: Function that replaces `size_record`, with the same arguments, if dimensions
            are given instead of a model: its records have no weights. None for `size_record`.
    """
    from kvcalc.model.memory import size_record
    from kvcalc.report.text.compare_text import size_table

    check_number("rows", MAX_ROWS, variants, shapes)
    block_size = shapes[0].block_size
    arguments = [
        (model, shape.context, shape.batch_size, precision, block_size, parallelism)
        for (model, precision, parallelism), shape in product(variants, shapes)
    ]
    make = make_record or size_record
    for first in arguments[:: len(shapes)]:
        make(*first)  # raises UserError before the first record is printed
    records = LazyRecords(lambda: (make(*values) for values in arguments), len(arguments))
    contexts, batches = axes_of(shapes)

    def draw() -> "list[Chart]":
        from kvcalc.planning.sweeps import cache_curve, contexts_up_to
        from kvcalc.report.charts.size_plot import cache_vs_context

        has_dtypes = len({precision for _, precision, _ in variants}) > 1
        has_sizes = len({parallelism.tp for *_, parallelism in variants}) > 1
        axis = contexts_up_to(max(*contexts, 256))
        curves = []
        for (model, precision, parallelism), batch_size in product(variants, batches):
            label = model.name
            label += f" batch {batch_size:,}" if len(batches) > 1 else ""
            label += f" {precision.kv_cache_dtype}" if has_dtypes else ""
            label += f" tp {parallelism.tp}" if has_sizes else ""
            curves.append(cache_curve(model, precision, axis, batch_size, parallelism, label))
        return [cache_vs_context(curves, batches, gpus)]

    def formulas() -> str:
        from kvcalc.report.explain import explain_size

        check_number("explanations", MAX_PASSES, records)
        return "\n".join(explain_size(make(*values), *values) for values in arguments)

    return Answer(
        records,
        lambda: [size_table([make(*values) for values in arguments], variants)],
        draw,
        _short=CACHE_SIZE,
        _formulas=formulas,
        _notes=remarks([model for model, *_ in variants], max(contexts)),
    )
