"""A model of which the dimensions alone are typed: the options, and whether they or a model is meant."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kvcalc.cli.groups import Group

if TYPE_CHECKING:
    from kvcalc.library.typed import Dimensions

_typed = partial(typer.Option, rich_help_panel="A cache without a model", show_default=False)


class DimensionOptions(Group, frozen=True):
    """The dimensions of layers that are all alike, by the names of `Dimensions`; 0 is not given."""

    layers: Annotated[int, _typed("--layers", help="Layers, each with a cache of its own.")] = 0
    kv_heads: Annotated[int, _typed("--kv-heads", help="KV heads of a layer.")] = 0
    head_dim: Annotated[int, _typed("--head-dim", help="Width of a key and of a value.")] = 0
    hidden_size: Annotated[int, _typed("--hidden-size", help="Instead: MHA that is as wide as the model.")] = 0
    heads: Annotated[int, _typed("--heads", help="Query heads: what the same would be as MHA.")] = 0
    sliding_window: Annotated[str, _typed("--sliding-window", help="Tokens kept at most.")] = ""
    kv_lora_rank: Annotated[int, _typed("--kv-lora-rank", help="Latent of a token, instead of KV heads.")] = 0
    qk_rope_head_dim: Annotated[int, _typed("--qk-rope-head-dim", help="RoPE key beside the latent.")] = 0

    def dimensions(self) -> "Dimensions":
        from kvcalc.library.typed import Dimensions
        from kvcalc.units import parse_tokens

        window = parse_tokens(self.sliding_window, "--sliding-window") if self.sliding_window else 0
        return Dimensions(**msgspec.structs.asdict(self) | {"sliding_window": window})


def alone(models: Sequence[str], dimensions: "Dimensions", changes: Sequence[str]) -> "Dimensions | None":
    """The dimensions where no model is named; None where one is. Raises UserError on both or neither."""
    from kvcalc.errors import UserError

    if dimensions.given() and (models or changes):
        hint = f"Change a model with --set{f' layers={dimensions.layers}' if dimensions.layers else ''}"
        raise UserError("dimensions are of a cache without a model, and --set of one", hint=hint)
    if not (models or dimensions.given()):
        raise UserError("name a model, or give --layers, --kv-heads and --head-dim", hint="`kvcalc models` lists presets")
    return dimensions if dimensions.given() else None
