"""`kvcalc size`."""

from collections.abc import Iterator, Sized
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvcalc.cli import options as o
from kvcalc.cli.chosen import chosen_models
from kvcalc.cli.common import MOST_PASSES, MOST_ROWS, MOST_SHOWN, check_number, remarks, say
from kvcalc.cli.groups import Grid, Group, Output, Precisions, Ranks, grouped

if TYPE_CHECKING:
    from kvcalc.layers.ranks import Parallelism
    from kvcalc.library.typed import Dimensions
    from kvcalc.model.precision import Precision
    from kvcalc.model.spec import Model

    Stored = tuple[Model, Precision, Parallelism]
    Asked = tuple[Model, int, int, Precision, int, Parallelism]

_typed = partial(typer.Option, rich_help_panel="A cache without a model", show_default=False)


class DimensionOptions(Group, frozen=True):
    """The dimensions of layers that are all alike, by the names of `Dimensions`; 0 is not given."""

    layers: Annotated[int, _typed("--layers", help="Layers, each with a cache of its own.")] = 0
    kv_heads: Annotated[int, _typed("--kv-heads", help="KV heads of a layer.")] = 0
    head_dim: Annotated[int, _typed("--head-dim", help="Width of a key and of a value.")] = 0
    heads: Annotated[int, _typed("--heads", help="Query heads: what the same would be as MHA.")] = 0
    sliding_window: Annotated[str, _typed("--sliding-window", help="Tokens kept at most.")] = ""
    kv_lora_rank: Annotated[int, _typed("--kv-lora-rank", help="Latent of a token, instead of KV heads.")] = 0
    qk_rope_head_dim: Annotated[int, _typed("--qk-rope-head-dim", help="RoPE key beside the latent.")] = 0

    def dimensions(self) -> "Dimensions":
        from kvcalc.library.typed import Dimensions
        from kvcalc.units import parse_tokens

        window = parse_tokens(self.sliding_window, "--sliding-window") if self.sliding_window else 0
        return Dimensions(**msgspec.structs.asdict(self) | {"sliding_window": window})


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
    dimensions = _alone(models, typed.dimensions(), set_)
    chosen = [dimensions.model()] if dimensions else chosen_models(models, set_)
    stored = list(product(chosen, precisions.precisions(), ranks.parallelisms(chosen)))
    _check_rows(output, stored, contexts, batches)
    recorded = dimensions.record if dimensions else size_record
    for model, p, r in stored:
        recorded(model, contexts[0], batches[0], p, block_size, r)  # what cannot be is refused before anything is printed
    remarks(chosen, max(contexts))
    if output.plot:
        from kvcalc.report.figures import cache_vs_context

        several = len({p for _, p, _ in stored}) > 1
        named = [(f"{m.name} {p.kv_cache_dtype}" if several else m.name, m, p) for m, p, _ in stored]
        output.picture(cache_vs_context(named, None, batches[0], max(*contexts, 1024)))
    if output.explain:
        from kvcalc.report.explain import explain_size

        for asked in _asked(stored, batches, contexts, block_size):
            say(explain_size(*asked, weights=not dimensions))
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


def _alone(models: list[str], dimensions: "Dimensions", changes: list[str]) -> "Dimensions | None":
    """The dimensions where no model is named; None where one is. Raises UserError on both or neither."""
    from kvcalc.errors import UserError

    if dimensions.given() and (models or changes):
        raise UserError("dimensions are of a cache without a model, and --set of one", hint="Change a model with --set")
    if not (models or dimensions.given()):
        raise UserError("name a model, or give --layers, --kv-heads and --head-dim", hint="`kvcalc models` lists presets")
    return dimensions if dimensions.given() else None
