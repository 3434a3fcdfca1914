"""`kvcalc size`."""

from itertools import product

from kvcalc.cli import options as o
from kvcalc.cli.common import MOST_ROWS, check_number, remarks
from kvcalc.cli.groups import Grid, Output, Precisions, Ranks, chosen_model, grouped


@grouped
def run(
    models: o.Models,
    *,
    grid: Grid,
    precisions: Precisions,
    block_size: o.BlockSize = 16,
    set_: o.Sets = [],  # noqa: B006 (typer copies it)
    explain: o.Explain = False,
    ranks: Ranks,
    output: Output,
) -> None:
    """How big is the cache, beside the weights."""
    from kvcalc.model.size import size_record

    how = precisions.precision(), block_size, ranks.parallelism()
    contexts, batches = grid.contexts, grid.batches
    check_number("rows", MOST_ROWS, models, contexts, batches)
    chosen = [chosen_model(name, set_) for name in models]
    points = list(product(chosen, batches, contexts))
    records = [size_record(model, context, batch, *how) for model, batch, context in points]
    for model in chosen:
        remarks(model, max(contexts))
    if output.plot:
        from kvcalc.report.figures import cache_vs_context

        named = [(m.name, m, how[0]) for m in chosen]
        output.picture(cache_vs_context(named, None, batches[0], max(*contexts, 1024)))
    if explain:
        from kvcalc.report.explain import explain_size

        for model, batch, context in points:
            print(explain_size(model, context, batch, *how))
    elif not output.printed(records):
        from kvcalc.report.sizes import size_table

        output.show(size_table(records, chosen, *how))
