"""What one forward pass works on: groups of sequences."""

import msgspec

from kvcalc.errors import UserError
from kvcalc.units import MOST_TOKENS, Num

PHASES = ("decode", "prefill")


class Sequences(msgspec.Struct, frozen=True):
    """`count` sequences that each process `new` tokens behind `past` cached ones. Ints, or arrays of one shape."""

    count: Num
    new: Num
    past: Num


class Batch(msgspec.Struct, frozen=True):
    """What one forward pass works on: groups of sequences.

    Prefill is new = S, past = 0; a decode step at context S is new = 1, past = S − 1; verifying k drafted tokens is
    new = k + 1; a mixed continuous batch is several groups; a padded static batch is one group of the longest length.
    """

    groups: tuple[Sequences, ...]

    @classmethod
    def prefill(cls, context: Num, batch_size: Num = 1, past: Num = 0) -> "Batch":
        """`batch_size` prompts of `context` tokens, behind `past` tokens that are cached already."""
        return cls((Sequences(batch_size, context, past),))

    @classmethod
    def decode(cls, context: Num, batch_size: Num = 1) -> "Batch":
        """One new token for each of `batch_size` sequences, whose length is `context` after the step."""
        return cls((Sequences(batch_size, 1, context - 1),))

    @classmethod
    def of_phase(cls, phase: str, context: Num, batch_size: Num = 1) -> "Batch":
        """The batch that a phase's name stands for. Raises UserError on an unknown phase."""
        if phase not in PHASES:
            raise UserError(f"unknown phase {phase!r}", hint=f"Known: {', '.join(PHASES)}")
        return cls.decode(context, batch_size) if phase == "decode" else cls.prefill(context, batch_size)

    def __post_init__(self) -> None:
        if not self.groups:
            raise UserError("a batch needs at least one group of sequences")
        for group in self.groups:
            for name, value, least in (("count", group.count, 1), ("new", group.new, 1), ("past", group.past, 0)):
                _check(name, value, least)
        shapes = {value.shape for g in self.groups for value in (g.count, g.new, g.past) if not isinstance(value, int)}
        if len(shapes) > 1:
            raise UserError(f"the arrays of a batch are not of one shape: {', '.join(map(str, sorted(shapes)))}")

    @property
    def tokens(self) -> Num:
        """Tokens that the pass processes: Σ count · new."""
        return sum((g.count * g.new for g in self.groups), 0)

    @property
    def sequences(self) -> Num:
        """Sequences in the pass."""
        return sum((g.count for g in self.groups), 0)


def _check(name: str, value: Num, least: int) -> None:
    if isinstance(value, int) and not isinstance(value, bool):
        if not least <= value <= MOST_TOKENS:
            raise UserError(f"{name} {value!r} is outside {least} to {MOST_TOKENS:,}")
        return
    if isinstance(value, int) or not hasattr(value, "dtype"):
        raise UserError(f"{name} {value!r} is neither a whole number nor an array")
    known = value.dtype.kind in "iuf" and bool(((value >= least) & (value <= 1e15)).all())  # NaN compares false
    if not known or (value.dtype.kind == "f" and bool((value != value.round()).any())):
        raise UserError(f"{name}: an array must hold whole numbers from {least} to 10^15")
