"""What every time law is: a few physical parameters, each with a unit, a meaning and a range, and a vectorised formula.

All laws have the shape t = t0 + min over launch plans of pnorm_p(compute time, memory time), in microseconds. `pnorm_p(a, b)
= (a^p + b^p)^(1/p)` is the softened maximum of two engines that overlap: p = ∞ is the roofline's max, p = 1 the plain sum.
"""

from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, get_args, get_type_hints

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvcalc.timing.figures import Figures

    Array = NDArray[np.float64]
else:
    Array = Any


class Range(msgspec.Struct, frozen=True):
    """Of a parameter: the least and the greatest value, in its own unit, and a typical one. All are positive."""

    least: float
    most: float
    typical: float


class Law(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="form"):
    """A time law. Its annotated float fields are the fitted parameters; other fields choose between forms.

    CHOICES: alternatives of the other fields, which a fit tries. SOFTNESS: the relative error at which squares turn into
    absolute values in a fit. PULL: how many e-fold a parameter may stray from its typical value at the price of one such error
    of one row; 0: freely.
    """

    CHOICES: ClassVar[tuple[dict[str, Any], ...]] = ({},)
    SOFTNESS: ClassVar[float] = 0.04
    PULL: ClassVar[float] = 0.0

    def us(self, machine: "Figures", *shape: "Array") -> "Array":
        """Microseconds of one call, for arrays of shapes in the order that the law's docstring or `rows` gives."""
        raise NotImplementedError

    @classmethod
    def ranges(cls) -> dict[str, Range]:
        """The range of each fitted parameter."""
        return _ranges(cls)


@cache
def _ranges(law: type[Law]) -> dict[str, Range]:
    found = {}
    defaults = {f.name: f.default for f in msgspec.structs.fields(law)}
    for name, hint in get_type_hints(law, include_extras=True).items():
        if name in defaults and get_args(hint)[:1] == (float,):
            meta = next(m for m in get_args(hint)[1:] if isinstance(m, msgspec.Meta))
            found[name] = Range(float(meta.ge or 0), float(meta.le or 0), defaults[name])
    return found


def within(least: float, most: float) -> msgspec.Meta:
    """Of a parameter's type: the range that it lies in."""
    return msgspec.Meta(ge=least, le=most)


def attended(length: "Array", window: "Array") -> "Array":
    """Cached tokens that a query sees at most: `length`, or the window where there is one (above 0)."""
    import numpy as np

    return np.where(window > 0, np.minimum(length, np.maximum(window, 1)), length)


def by_width(head_dim: "Array", at_64: float, at_256: float) -> "Array":
    """The factor on a rate fitted at head_dim 128, by the widths that kernels are built for; √at_256 at 192."""
    import numpy as np

    return np.select([head_dim <= 64, head_dim <= 128, head_dim <= 192], [at_64, 1.0, at_256**0.5], at_256)


def pnorm(p: float, a: "Array", b: "Array") -> "Array":
    """(a^p + b^p)^(1/p), without overflow: the larger one times a factor from 1 to 2^(1/p).

    `np.power` rather than `**`, which takes another routine for single values, a last bit apart from that for arrays.
    """
    import numpy as np

    high = np.maximum(a, b)
    low = np.minimum(a, b)
    return high * np.power(1.0 + np.power(low / np.maximum(high, 1e-300), p), 1.0 / p)
