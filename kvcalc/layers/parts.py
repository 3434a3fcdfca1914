"""The union of all parts: the type of a part in a preset."""

from typing import TYPE_CHECKING, Any, TypeAlias, Union

from kvcalc.layers import attention, recurrent
from kvcalc.layers.feed_forward import Dense, Moe, Projections
from kvcalc.layers.part import Sublayer


def listed(*modules: Any) -> tuple[type[Sublayer], ...]:
    """Return all subclasses of `Sublayer` that some modules contain, in order of definition.

    A `Sublayer` is a type of layer part: attention, a recurrent mixer, an FFN, or other
    projections. A model preset may use the types of the result.

    Args:
        modules: Modules or packages, such as `kvcalc.layers.attention`.
    """
    return tuple(
        p
        for module in modules
        for p in vars(module).values()
        if isinstance(p, type) and issubclass(p, Sublayer)
    )


MIXERS = listed(attention, recurrent)
FFNS = (Dense, Projections, Moe)
if TYPE_CHECKING:
    AnyPart: TypeAlias = Sublayer
else:
    AnyPart = Union[(*MIXERS, *FFNS)]
