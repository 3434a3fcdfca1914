"""Parallelism over GPUs, and batches: the groups of sequences that one forward pass processes.

Every figure of a pass is for the rank with the most work.
"""

import re
from collections.abc import Iterable
from itertools import zip_longest

import msgspec

from kvcalc.arithmetic import Num, Points, ceil_div, maximum, minimum
from kvcalc.errors import UserError
from kvcalc.units import MAX_TOKENS, parse_tokens

MAX_GPUS = 1_000_000


class Parallelism(msgspec.Struct, frozen=True):
    """Numbers of ranks. Every figure of a pass is for the GPU with the most work.

    Attributes:
        tp: Divides heads and columns; replicates KV heads if there are fewer than ranks.
        pp: Divides the layers.
        dp: Divides the sequences.
        ep: Spreads the experts; a divisor of tp·dp.
        dcp: Spreads cached tokens in decode; a divisor of tp.
        per_node: GPUs that one fast link connects, with whole tp groups if they fit; 0 for all.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    dcp: int = 1
    per_node: int = 0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            minimum = 0 if name == "per_node" else 1
            is_int = isinstance(value, int) and not isinstance(value, bool)
            if not is_int or not minimum <= value <= MAX_GPUS:
                hint = f"Give a whole number from {minimum} up"
                raise UserError(f"{name} {value!r} is not a number of GPUs", hint)
        if self.stage_gpus % self.ep:
            raise UserError(f"ep {self.ep} does not divide tp·dp = {self.stage_gpus}")
        if self.tp % self.dcp:
            raise UserError(
                f"decode-context parallel size {self.dcp} does not divide tp {self.tp}"
            )

    @property
    def stage_gpus(self) -> int:
        """Return the number of GPUs of one pipeline stage: tp · dp."""
        return self.tp * self.dp

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of one replica: tp · pp · dp."""
        return self.tp * self.pp * self.dp

    def near(self, group: int) -> int:
        """Return how many ranks of a contiguous group are on one node."""
        return min(group, self.per_node) if self.per_node else group

    def sequences(self, batch_size: int) -> int:
        """Return the number of sequences on the dp rank with the most sequences."""
        return -(-batch_size // self.dp)

    def share(self, shards: int) -> int:
        """Return how many of `shards` units one tp rank has: ⌈shards/tp⌉, at least 1."""
        return -(-shards // self.tp)


ONE_GPU = Parallelism()


PHASES = ("decode", "prefill")
_TERM = re.compile(r"(?:([\w.]+)\s*[x×]\s*)?([\w.]+)(?:\s*@\s*([\w.]+))?")


class Sequences(msgspec.Struct, frozen=True):
    """`count` sequences with `new` tokens to process and `past` tokens cached. Ints or
    broadcastable arrays."""

    count: Num
    new: Num
    past: Num


class Batch(msgspec.Struct, frozen=True):
    """The sequences of one forward pass, in groups.

    Prefill is new = S, past = 0. A decode step at context S is new = 1, past = S − 1. Verifying k
    draft tokens is new = k + 1. A continuous batch has several groups. A padded static batch is one
    group of the longest length.
    """

    groups: tuple[Sequences, ...]

    @classmethod
    def prefill(cls, context: Num, batch_size: Num = 1, past: Num = 0) -> "Batch":
        """Return `batch_size` prompts of `context` tokens after `past` cached tokens."""
        return cls((Sequences(batch_size, context, past),))

    @classmethod
    def decode(cls, context: Num, batch_size: Num = 1) -> "Batch":
        """Return one new token for each of `batch_size` sequences, which have `context` tokens
        after the step."""
        _check("context", context, 1)
        return cls((Sequences(batch_size, 1, context - 1),))

    @classmethod
    def of_phase(cls, phase: str, context: Num, batch_size: Num = 1) -> "Batch":
        """Return the batch of a phase name. Raises UserError for an unknown phase."""
        if phase not in PHASES:
            raise UserError(f"unknown phase {phase!r}", f"Known: {', '.join(PHASES)}")
        make_batch = cls.decode if phase == "decode" else cls.prefill
        return make_batch(context, batch_size)

    @classmethod
    def parse(cls, text: str) -> "Batch":
        """Return a mixed batch from text: `500+4x1@4k` is a prompt of 500 tokens and four decodes
        at 4,096.

        Each term is `[COUNTx]NEW[@CONTEXT]`: NEW tokens of each of COUNT sequences that have
        CONTEXT tokens after the pass. Without CONTEXT, no token is cached before the pass.

        Raises:
            UserError: A term is invalid. The message names the term.
        """
        return cls(tuple(_term(word, text) for word in text.split("+")))

    def __post_init__(self) -> None:
        is_sequence = isinstance(self.groups, tuple | list)
        if not is_sequence or not all(isinstance(g, Sequences) for g in self.groups):
            hint = (
                "Write Batch.decode(4096), Batch.prefill(2000), or Batch((Sequences(count=1, "
                "new=2, past=0),))"
            )
            raise UserError(f"{self.groups!r:.80} is no tuple of Sequences", hint)
        if not self.groups:
            raise UserError("a batch needs at least one group of sequences")
        shapes = set()
        for group in self.groups:
            for name, lowest in (("count", 1), ("new", 1), ("past", 0)):
                value = getattr(group, name)
                _check(name, value, lowest)
                if not isinstance(value, int):
                    shapes.add(value.shape)
        if len(shapes) > 1 and not _can_broadcast(shapes):
            text = ", ".join(map(str, sorted(shapes)))
            raise UserError(f"the arrays of a batch do not broadcast: {text}")

    @property
    def tokens(self) -> Num:
        """Return the number of tokens that the pass processes: Σ count · new."""
        return sum((g.count * g.new for g in self.groups), 0)

    @property
    def decodes(self) -> bool:
        """Return whether the pass is a decode step: one new token per sequence."""
        return all(isinstance(g.new, int) and g.new == 1 for g in self.groups)

    @property
    def exact(self) -> bool:
        """Return whether the figures are ints for one pass, not arrays for many passes."""
        return all(isinstance(n, int) for g in self.groups for n in (g.count, g.new, g.past))

    def micro_batch(
        self, parallelism: Parallelism, cuts_prompts: bool = False, rounds_up: bool = False
    ) -> "Batch":
        """Return the share of the batch that is in each pipeline stage at a time.

        The sequences of each data-parallel rank are divided into one micro-batch per stage. There
        are never more micro-batches than sequences.

        Examples: 9 decodes in 2 stages give 4, or 5 if rounded up. One prompt of 1,000 tokens
        stays whole; if prompts are cut, it gives a chunk of 500 tokens after 250.

        Args:
            cuts_prompts: Whether prompts are divided into chunks if there are fewer prompts than
                stages. A chunk has the mean number of tokens before it. No division of the batch
                takes less time than this chunk takes to pass all stages.
            rounds_up: Whether to return the largest micro-batch instead of the smallest.
        """
        shares = [_micro_batch(g, parallelism, cuts_prompts, rounds_up) for g in self.groups]
        return Batch(tuple(shares))

    @property
    def sequences(self) -> Num:
        """Return the number of sequences in the pass."""
        return sum((g.count for g in self.groups), 0)


def _micro_batch(
    group: Sequences, parallelism: Parallelism, cuts_prompts: bool, rounds_up: bool
) -> Sequences:
    stages = parallelism.pp
    ways = minimum(ceil_div(group.count, parallelism.dp), stages)
    count = -(-group.count // ways) if rounds_up else group.count // ways
    if not cuts_prompts or (isinstance(group.new, int) and group.new == 1):
        return Sequences(count, group.new, group.past)
    new = maximum(group.new // (stages // ways), 1)
    return Sequences(count, new, group.past + (group.new - new) // 2)


def _can_broadcast(shapes: Iterable[tuple[int, ...]]) -> bool:
    axes = zip_longest(*map(reversed, shapes), fillvalue=1)
    return all(len({*sizes} - {1}) <= 1 for sizes in axes)


def _term(word: str, text: str) -> Sequences:
    word = word.strip()
    match = _TERM.fullmatch(word)
    if not match:
        text = f"batch {text!r}: {word!r} should read like 4x1@4k"
        raise UserError(text, "Sequences x new tokens @ context")
    count = parse_tokens(match[1] or "1", "sequences")
    new = parse_tokens(match[2], "new tokens")
    context = parse_tokens(match[3], "context") if match[3] else new
    if context < new:
        raise UserError(
            f"batch {text!r}: {word!r} has {new:,} new tokens, more than its context of {context:,}"
        )
    return Sequences(count, new, context - new)


def _check(name: str, value: Num, lowest: int) -> None:
    """Raise UserError unless the value consists of whole numbers of at least `lowest`."""
    if isinstance(value, int) and not isinstance(value, bool):
        if not lowest <= value <= MAX_TOKENS:
            raise UserError(f"{name} {value!r} is outside {lowest} to {MAX_TOKENS:,}")
        return
    if isinstance(value, Points):
        for number in value:
            _check(name, number, lowest)
        return
    if isinstance(value, int) or not hasattr(value, "dtype"):
        raise UserError(f"{name} {value!r} is neither a whole number nor an array")
    # NaN compares false
    is_valid = value.dtype.kind in "iuf" and ((value >= lowest) & (value <= 1e15)).all()
    if not is_valid or (value != value.round()).any():
        raise UserError(f"{name}: an array must hold whole numbers from {lowest} to 10^15")
