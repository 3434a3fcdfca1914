"""Every part that a layer can have, as the one type that presets are read into: what the rooms of parts list."""

from typing import TYPE_CHECKING, Any, TypeAlias, Union

from kvcalc.layers import attention, ffn, recurrent
from kvcalc.layers.part import Part


def listed(*rooms: Any) -> tuple[type[Part], ...]:
    """The parts that modules list."""
    return tuple(p for room in rooms for p in vars(room).values() if isinstance(p, type) and issubclass(p, Part))


MIXERS, FFNS = listed(attention, recurrent), listed(ffn)
if TYPE_CHECKING:
    AnyPart: TypeAlias = Part
else:
    AnyPart = Union[(*MIXERS, *FFNS)]
