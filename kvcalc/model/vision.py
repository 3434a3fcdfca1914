"""Vision towers that an engine loads with a language model."""

from typing import Annotated

import msgspec

from kvcalc.layers.part import Size


class Vision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A vision tower, which `parameters` excludes.

    Attributes:
        parameters: Parameters of the tower and its projector.
        width: Hidden size.
        mlp: Intermediate size.
        layers: Number of layers.
        patches: Patches of the largest image.
        tokens: Tokens of the largest image in the language model.
        values: Values of one patch: channels · height · width · frames.
        sharded: Whether engines split it over tp.
    """

    parameters: Annotated[int, msgspec.Meta(ge=1, le=10**12)]
    width: Size
    mlp: Size
    layers: Size
    patches: Size
    tokens: Size
    values: Size
    sharded: bool = True
