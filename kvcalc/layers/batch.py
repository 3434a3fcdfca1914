"""Batches: groups of sequences that one forward pass processes."""

import re
from collections.abc import Iterable
from itertools import zip_longest

import msgspec

from kvcalc.errors import UserError
from kvcalc.units import MOST_TOKENS, Num, parse_tokens

PHASES = ("decode", "prefill")
_TERM = re.compile(r"(?:([\w.]+)\s*[x×]\s*)?([\w.]+)(?:\s*@\s*([\w.]+))?")


class Sequences(msgspec.Struct, frozen=True):
    """`count` sequences with `new` tokens to process and `past` tokens cached. Ints or broadcastable arrays."""

    count: Num
    new: Num
    past: Num


class Batch(msgspec.Struct, frozen=True):
    """The sequences of one forward pass, in groups.

    Prefill is new = S, past = 0. A decode step at context S is new = 1, past = S − 1. Verifying k draft tokens
    is new = k + 1. A continuous batch has several groups. A padded static batch is one group of the longest
    length.
    """

    groups: tuple[Sequences, ...]

    @classmethod
    def prefill(cls, context: Num, batch_size: Num = 1, past: Num = 0) -> "Batch":
        """Return `batch_size` prompts of `context` tokens after `past` cached tokens."""
        return cls((Sequences(batch_size, context, past),))

    @classmethod
    def decode(cls, context: Num, batch_size: Num = 1) -> "Batch":
        """Return one new token for each of `batch_size` sequences, which have `context` tokens after the step."""
        _check("context", context, 1)
        return cls((Sequences(batch_size, 1, context - 1),))

    @classmethod
    def of_phase(cls, phase: str, context: Num, batch_size: Num = 1) -> "Batch":
        """Return the batch of a phase name. Raises UserError for an unknown phase."""
        if phase not in PHASES:
            raise UserError(f"unknown phase {phase!r}", hint=f"Known: {', '.join(PHASES)}")
        return cls.decode(context, batch_size) if phase == "decode" else cls.prefill(context, batch_size)

    @classmethod
    def parse(cls, text: str) -> "Batch":
        """Return a mixed batch from text: `500+4x1@4k` is a prompt of 500 tokens and four decodes at 4,096.

        Each term is `[COUNTx]NEW[@CONTEXT]`: NEW tokens of each of COUNT sequences that have CONTEXT tokens after
        the pass. Without CONTEXT nothing is cached before. Raises UserError with the invalid term.
        """
        return cls(tuple(_term(word, text) for word in text.split("+")))

    def __post_init__(self) -> None:
        if not isinstance(self.groups, tuple | list) or not all(isinstance(group, Sequences) for group in self.groups):
            hint = "Write Batch.decode(4096), Batch.prefill(2000), or Batch((Sequences(count=1, new=2, past=0),))"
            raise UserError(f"{self.groups!r:.80} is no tuple of Sequences", hint=hint)
        if not self.groups:
            raise UserError("a batch needs at least one group of sequences")
        for group in self.groups:
            for name, value, least in (("count", group.count, 1), ("new", group.new, 1), ("past", group.past, 0)):
                _check(name, value, least)
        shapes = {value.shape for g in self.groups for value in (g.count, g.new, g.past) if not isinstance(value, int)}
        if len(shapes) > 1 and not _broadcast(shapes):
            raise UserError(f"the arrays of a batch do not broadcast: {', '.join(map(str, sorted(shapes)))}")

    @property
    def tokens(self) -> Num:
        """Tokens that the pass processes: Σ count · new."""
        return sum((g.count * g.new for g in self.groups), 0)

    @property
    def decodes(self) -> bool:
        """Whether the pass is a decode step: one new token per sequence."""
        return all(isinstance(g.new, int) and g.new == 1 for g in self.groups)

    @property
    def exact(self) -> bool:
        """Whether this is one pass of ints, not many passes as arrays."""
        return all(isinstance(n, int) for g in self.groups for n in (g.count, g.new, g.past))

    @property
    def sequences(self) -> Num:
        """Number of sequences in the pass."""
        return sum((g.count for g in self.groups), 0)


def _broadcast(shapes: Iterable[tuple[int, ...]]) -> bool:
    return all(len({size for size in sizes if size != 1}) <= 1 for sizes in zip_longest(*map(reversed, shapes), fillvalue=1))


def _term(word: str, text: str) -> Sequences:
    match = _TERM.fullmatch(word.strip())
    if not match:
        raise UserError(f"batch {text!r}: {word.strip()!r} should read like 4x1@4k", hint="Sequences x new tokens @ context")
    count, new = parse_tokens(match[1] or "1", "sequences"), parse_tokens(match[2], "new tokens")
    context = parse_tokens(match[3], "context") if match[3] else new
    if context < new:
        raise UserError(f"batch {text!r}: {word.strip()!r} has {new:,} new tokens, more than its context of {context:,}")
    return Sequences(count, new, context - new)


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
