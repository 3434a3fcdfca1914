"""The union of all parts, the type that presets are read into."""

from typing import TYPE_CHECKING, Any, TypeAlias, Union

from kvcalc.layers import attention, ffn, recurrent
from kvcalc.layers.part import Part


def listed(*rooms: Any) -> tuple[type[Part], ...]:
    """Return the parts that modules export."""
    return tuple(p for room in rooms for p in vars(room).values() if isinstance(p, type) and issubclass(p, Part))


MIXERS, FFNS = listed(attention, recurrent), listed(ffn)
if TYPE_CHECKING:
    AnyPart: TypeAlias = Part
else:
    AnyPart = Union[(*MIXERS, *FFNS)]
