"""A vision tower: what an engine loads and profiles beside a language model."""

from typing import Annotated

import msgspec

from kvcalc.layers.part import Size


class Vision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A vision tower beside the language model, which `parameters` leaves out.

    parameters: its own, projector included. width, mlp, layers: as in its config. patches, tokens: of the largest image, and
    what the language model gets of it. values: of one patch (channels · height · width · frames). sharded: engines split it
    over tp.
    """

    parameters: Annotated[int, msgspec.Meta(ge=1, le=10**12)]
    width: Size
    mlp: Size
    layers: Size
    patches: Size
    tokens: Size
    values: Size
    sharded: bool = True
