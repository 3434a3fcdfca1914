"""Arithmetic that is the same for plain numbers, for a few points and for NumPy arrays.

All formulas use these functions. With plain numbers or `Points` only, NumPy is not imported,
so a command that asks for one request starts fast.
"""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Num: TypeAlias = int | NDArray[np.float64]
    Real: TypeAlias = Num | float
else:
    Num = Real = Any

Value = Any  # a number, Points, or a NumPy array of numbers

NUMBERS = (int, float)
Key = TypeVar("Key")
Member = TypeVar("Member")


def grouped(pairs: Iterable[tuple[Key, Member]]) -> dict[Key, list[Member]]:
    """Return the second parts of (key, member) pairs as lists by key, in the order of the pairs."""
    groups: dict[Key, list[Member]] = {}
    for key, member in pairs:
        groups.setdefault(key, []).append(member)
    return groups


class Points(tuple[Any, ...]):
    """Several numbers that behave like a NumPy array of shape [points], without importing NumPy.

    A formula is evaluated at several points in one call, such as at three batch sizes. For a few
    points, `Points` avoids the import of NumPy, so that a command starts fast. Operators such as +
    and ≥ apply to each number. Together with a NumPy array, the result is a NumPy array.
    """

    __slots__ = ()
    ndim = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self),)

    def any(self) -> bool:
        return any(self)

    def all(self) -> bool:
        return all(self)

    def astype(self, *_: Any, **__: Any) -> "Points":
        """Return the numbers as floats. It exists so that NumPy's call `array.astype(float)` works.

        All arguments are ignored.
        """
        return Points(map(float, self))


def _by_point(of_numbers: Callable[..., Any], values: Sequence[Value]) -> Points:
    """Return the function applied to each point. A plain number has the same value at all
    points."""
    columns = (value if isinstance(value, Points) else repeat(value) for value in values)
    return Points(map(of_numbers, *columns))


def _add_operator(name: str, of_numbers: Callable[..., Any]) -> None:
    """Define an operator of `Points`, and its reflection for a number on the left."""

    def apply(self: Points, *other: Value) -> Any:
        if all(isinstance(value, (*NUMBERS, Points)) for value in other):
            return _by_point(of_numbers, (self, *other))
        return NotImplemented

    setattr(Points, f"__{name}__", apply)
    setattr(Points, f"__r{name}__", lambda self, other: _by_point(of_numbers, (other, self)))


_OPERATORS = "add sub mul truediv floordiv mod neg and_ or_ lt le gt ge eq ne"
for _name in _OPERATORS.split():
    _add_operator(_name.strip("_"), getattr(operator, _name))


def _function(of_numbers: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that calls NumPy's function `name` only if an argument is an array."""

    def apply(*values: Value) -> Value:
        has_points = False
        for value in values:
            if isinstance(value, Points):
                has_points = True
            elif not isinstance(value, NUMBERS):
                import numpy as np

                return getattr(np, name)(*values)
        return _by_point(of_numbers, values) if has_points else of_numbers(*values)

    return apply


minimum = _function(min, "minimum")
maximum = _function(max, "maximum")
ceil = _function(lambda a: float(math.ceil(a)), "ceil")
floor = _function(lambda a: float(math.floor(a)), "floor")
power = _function(math.pow, "power")
sqrt = _function(math.sqrt, "sqrt")
hypot = _function(math.hypot, "hypot")
log = _function(math.log, "log")
log2 = _function(math.log2, "log2")
expm1 = _function(math.expm1, "expm1")
log1p = _function(math.log1p, "log1p")
nearest_whole = _function(lambda a: float(round(a)), "round")
where = _function(lambda condition, a, b: a if condition else b, "where")


def clip(value: Value, low: float, high: float) -> Value:
    """Return a number, or each element of an array, limited to the range from `low` to `high`.

    Example: clip(7, 0, 5) is 5.
    """
    return minimum(maximum(value, low), high)


def select(conditions: Sequence[Value], values: Sequence[Value], default: Value) -> Value:
    """Return the value of the first true condition, or `default` if no condition is true.

    If conditions or values are arrays, this is done for each element, as in NumPy's `select`.

    Args:
        conditions: Booleans or boolean arrays. The first has the highest priority.
        values: Result for each condition, in the order of `conditions`: numbers or arrays.
        default: Result if no condition is true: a number or an array.
    """
    result = default
    for condition, value in zip(reversed(conditions), reversed(values)):
        result = where(condition, value, result)
    return result


def is_any(condition: Value) -> bool:
    """Return whether a boolean is true, or at least one element of a boolean array."""
    return bool(condition.any() if hasattr(condition, "any") else condition)


def as_float(value: Value) -> Value:
    """Return a number as a float, or the elements of an array as floats."""
    return float(value) if isinstance(value, NUMBERS) else value.astype(float)


def least_over(
    choices: Iterable[tuple[float, ...]], cost: Callable[..., Value], like: Value
) -> Value:
    """Return the minimum of `cost(*choice)` over all choices; for arrays, the minimum per element.

    A kernel model uses it to find the fastest tile size of a kernel.

    Args:
        choices: The alternatives, each a tuple of numbers, such as (rows, columns) of a tile.
        cost: Function of the numbers of one choice, such as `cost(rows, columns)`. It returns a
            cost in any unit.
        like: A number or an array with the shape of one cost, which the result has too; its values
            do not matter. If it is a number, `cost` is called once for each choice. If it is an
            array, `cost` is called only once, with arguments of shape [choices, 1, …]. It then
            returns costs of shape [choices, *shape of `like`].
    """
    if isinstance(like, NUMBERS):
        return min(cost(*choice) for choice in choices)
    import numpy as np

    columns = np.array([*choices], float).T
    return cost(*columns.reshape(len(columns), -1, *[1] * like.ndim)).min(axis=0)


def floor_div(a: Num, b: int) -> Num:
    """Return ⌊a/b⌋ for a whole number `a`, or for each element of an array of whole numbers."""
    if b == 1 or isinstance(a, int):
        return a // b if b > 1 else a
    # exact below 2^53, and faster than // on arrays
    return cast("Num", floor(a / b))


def ceil_div(a: Num, b: int) -> Num:
    """Return ⌈a/b⌉ for a whole number `a`, or for each element of an array of whole numbers."""
    return -floor_div(-a, b)


def rounded_up(a: Any) -> Any:
    """Return ⌈a⌉: an int if `a` is a number, an int64 array if `a` is an array."""
    return -rounded_down(-a)


def rounded_down(a: Any) -> Any:
    """Return ⌊a⌋: an int if `a` is a number, an int64 array if `a` is an array."""
    if isinstance(a, NUMBERS):
        return math.floor(a)
    import numpy as np

    return np.floor(a).astype(np.int64)


def doublings(n: int) -> int:
    """Return ⌈log2 n⌉, the number of doublings from 1 to at least n. Example: 5 gives 3."""
    return (n - 1).bit_length()


def by_number(a: Num, rule: Callable[[int], int]) -> Num:
    """Return `rule(a)` for an int, or a float array with the rule's result for each element.

    It lets formulas with arrays call a rule that works only for an int, such as a rule with `if`.

    Args:
        a: An int or an array of whole numbers.
        rule: Function of one int. It is called once for each distinct number in `a`.
    """
    if isinstance(a, int):
        return rule(a)
    import numpy as np

    results = {n: rule(int(n)) for n in set(a.ravel().tolist())}
    return np.array([results[n] for n in a.ravel().tolist()], dtype=float).reshape(a.shape)


def at_least(a: Num, bound: int) -> Num:
    """Return 1 if a ≥ bound, otherwise 0. An array gives an array of 1.0 and 0.0.

    Formulas multiply by the result to switch a term on or off.
    """
    return int(a >= bound) if isinstance(a, int) else cast("Num", (a >= bound).astype(float))


def array_of(value: Num) -> Num:
    """Return counts as formulas need them: an array converted to float64, an int unchanged.

    A float64 is exact for whole numbers up to 2^53.
    """
    return value if isinstance(value, int) else value.astype("float64", copy=False)
