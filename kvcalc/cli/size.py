"""`kvcalc size`."""

from collections.abc import Iterator, Sized
from itertools import product
from typing import TYPE_CHECKING

from kvcalc.cli import options as o
from kvcalc.cli.chosen import chosen_models
from kvcalc.cli.common import MOST_PASSES, MOST_ROWS, MOST_SHOWN, check_number, remarks, say
from kvcalc.cli.dimensions import DimensionOptions, alone
from kvcalc.cli.groups import Grid, Output, Precisions, Ranks, grouped

if TYPE_CHECKING:
    from kvcalc.layers.ranks import Parallelism
    from kvcalc.model.precision import Precision
    from kvcalc.model.spec import Model

    Stored = tuple[Model, Precision, Parallelism]
    Asked = tuple[Model, int, int, Precision, int, Parallelism]


@grouped
def run(
    models: o.Models = [],  # noqa: B006
    *,
    grid: Grid,
    precisions: Precisions,
    block_size: o.BlockSize = 16,
    set_: o.Sets = [],  # noqa: B006 (typer copies it)
    ranks: Ranks,
    typed: DimensionOptions,
    output: Output,
) -> None:
    """How big is the cache, beside the weights."""
    from kvcalc.model.size import size_record

    contexts, batches = grid.contexts, grid.batches
    dimensions = alone(models, typed.dimensions(), set_)
    chosen = [dimensions.model()] if dimensions else chosen_models(models, set_)
    stored = list(product(chosen, precisions.precisions(), ranks.parallelisms(chosen)))
    _check_rows(output, stored, contexts, batches)
    recorded = dimensions.record if dimensions else size_record
    for model, p, r in stored:
        recorded(model, contexts[0], batches[0], p, block_size, r)  # what cannot be is refused before anything is printed
    remarks(chosen, max(contexts))
    if output.plot:
        from kvcalc.report.figures import cache_vs_context

        several, cut = len({p for _, p, _ in stored}) > 1, len({r.tp for *_, r in stored}) > 1
        named = [(m.name + f" {p.kv_cache_dtype}" * several + f" tp {r.tp}" * cut, m, p) for m, p, r in stored]
        shares = [r for *_, r in stored]
        output.picture(cache_vs_context(named, (), batches[0], max(*contexts, 1024), contexts, shares))
    if output.explain:
        from kvcalc.report.explain import explain_size

        for asked in _asked(stored, batches, contexts, block_size):
            say(explain_size(recorded(*asked), *asked))
    elif not output.printed(recorded(*one) for one in _asked(stored, batches, contexts, block_size)):
        from kvcalc.report.sizes import size_table

        records = [recorded(*one) for one in _asked(stored, batches, contexts, block_size)]
        output.show(size_table(records, stored, block_size))


def _asked(stored: "list[Stored]", batches: list[int], contexts: list[int], block_size: int) -> "Iterator[Asked]":
    """What a record is made of, one after the other."""
    for (model, precision, parallelism), batch, context in product(stored, batches, contexts):
        yield model, context, batch, precision, block_size, parallelism


def _check_rows(output: Output, *lists: Sized) -> None:
    if output.explain:
        check_number("explanations", MOST_PASSES, *lists)
    elif output.form in (o.OutputFormat.table, o.OutputFormat.markdown):
        check_number("rows of a table", MOST_SHOWN, *lists)
    check_number("rows", MOST_ROWS, *lists)
