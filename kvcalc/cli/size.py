"""`kvcalc size`."""

from collections.abc import Iterator, Sized
from itertools import product
from typing import TYPE_CHECKING

from kvcalc.cli import options as o
from kvcalc.cli.option_groups import (
    ContextOptions,
    Output,
    Precisions,
    Ranks,
    chosen_models,
)
from kvcalc.cli.options import (
    MAX_PASSES,
    MAX_ROWS,
    MAX_TABLE_ROWS,
    check_number,
    remarks,
    say,
)
from kvcalc.cli.setup import DimensionOptions, alone

if TYPE_CHECKING:
    from kvcalc.layers.batch import Parallelism
    from kvcalc.model.model import Model
    from kvcalc.model.precision import Precision

    Stored = tuple[Model, Precision, Parallelism]
    Asked = tuple[Model, int, int, Precision, int, Parallelism]


def run(
    models: o.Models = [],  # noqa: B006
    *,
    grid: ContextOptions,
    precisions: Precisions,
    block_size: o.BlockSize = 16,
    set_: o.Settings = [],  # noqa: B006 (typer copies it)
    ranks: Ranks,
    typed: DimensionOptions,
    output: Output,
) -> None:
    """Compute KV cache size and compare it with the weights."""
    from kvcalc.model.memory import size_record

    contexts, batches = grid.contexts, grid.batches
    dimensions = alone(models, typed.dimensions(), set_)
    chosen = [dimensions.model()] if dimensions else chosen_models(models, set_)
    stored = list(product(chosen, precisions.precisions(), ranks.parallelisms(chosen)))
    _check_rows(output, stored, contexts, batches)
    recorded = dimensions.record if dimensions else size_record
    for model, p, r in stored:
        # what cannot be is refused before anything is printed
        recorded(model, contexts[0], batches[0], p, block_size, r)
    remarks(chosen, max(contexts))
    if output.plot:
        from kvcalc.planning.sweeps import cache_curve, contexts_up_to
        from kvcalc.report.charts.size_plot import cache_vs_context

        several, cut = (
            len({p for _, p, _ in stored}) > 1,
            len({r.tp for *_, r in stored}) > 1,
        )
        axis = contexts_up_to(max(*contexts, 1024), contexts)
        curves = []
        for m, p, r in stored:
            label = m.name + f" {p.kv_cache_dtype}" * several + f" tp {r.tp}" * cut
            curves.append(cache_curve(m, p, axis, batches[0], r, label))
        output.picture(cache_vs_context(curves, batches[0], requested=contexts))
    if output.explain:
        from kvcalc.report.explain import explain_size

        for requested in _asked(stored, batches, contexts, block_size):
            say(explain_size(recorded(*requested), *requested))
    elif not output.printed(
        recorded(*one) for one in _asked(stored, batches, contexts, block_size)
    ):
        from kvcalc.report.text.size_text import size_table

        records = [recorded(*one) for one in _asked(stored, batches, contexts, block_size)]
        output.show(size_table(records, stored, block_size))


def _asked(
    stored: "list[Stored]", batches: list[int], contexts: list[int], block_size: int
) -> "Iterator[Asked]":
    """What a record is made of, one after the other."""
    for (model, precision, parallelism), batch, context in product(stored, batches, contexts):
        yield model, context, batch, precision, block_size, parallelism


def _check_rows(output: Output, *lists: Sized) -> None:
    if output.explain:
        check_number("explanations", MAX_PASSES, *lists)
    elif output.form in (o.OutputFormat.table, o.OutputFormat.markdown):
        check_number("rows of a table", MAX_TABLE_ROWS, *lists)
    check_number("rows", MAX_ROWS, *lists)
