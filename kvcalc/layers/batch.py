"""Parallelism over GPUs, and batches: the groups of sequences that one forward pass processes.

Every figure of a pass is for the rank with the most work.
"""

import re

import msgspec

from kvcalc.arithmetic import Num, Points, ceil_div, maximum, minimum
from kvcalc.errors import UserError
from kvcalc.units import MAX_TOKENS, parse_tokens

MAX_GPUS = 1_000_000


class Parallelism(msgspec.Struct, frozen=True):
    """Number of ranks of each kind of parallelism in one replica of a deployment.

    A rank is one GPU's position in its group. Results for one forward pass are for the GPU with the
    most work.

    Attributes:
        tp: Tensor-parallel ranks, which divide attention heads and matrix columns. If there are
            more ranks than KV heads, the KV heads are replicated.
        pp: Pipeline stages, which divide the layers.
        dp: Data-parallel ranks, which divide the sequences.
        ep: Expert-parallel ranks, which divide the experts. `ep` must divide tp · dp.
        dcp: Decode-context-parallel ranks, which divide the cached tokens. `dcp` must divide tp.
        per_node: Number of GPUs of one node, which a fast link connects; 0 if all GPUs are on one
            node.
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
            if type(value) is not int or not minimum <= value <= MAX_GPUS:
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

    def near(self, group_size: int) -> int:
        """Return how many ranks of a communication group are on one node.

        A communication group is the ranks that take part in one collective, such as the tp ranks of
        an all-reduce. With 8 GPUs per node, a group of 16 ranks has 8 ranks on each node, and a
        group of 4 has all 4 on one node. If `per_node` is 0, all ranks are on one node. Traffic to
        the other ranks uses the slower network between nodes.

        Args:
            group_size: Number of ranks of the group. Their GPU indices are consecutive.
        """
        return min(group_size, self.per_node) if self.per_node else group_size

    def sequences(self, batch_size: int) -> int:
        """Return the number of sequences on the fullest data-parallel rank: ⌈batch_size/dp⌉.

        Args:
            batch_size: Number of sequences, over all data-parallel ranks.
        """
        return -(-batch_size // self.dp)

    def share(self, shards: int) -> int:
        """Return the number of units on one tensor-parallel rank: ⌈shards/tp⌉.

        A unit is what tensor parallelism does not split: a head, a column or a vocabulary row.

        Args:
            shards: Number of units of the layer on all ranks together.
        """
        return -(-shards // self.tp)


ONE_GPU = Parallelism()


PHASES = ("decode", "prefill")
_TERM = re.compile(r"(?:([\w.]+)\s*[x×]\s*)?([\w.]+)(?:\s*@\s*([\w.]+))?")


class Sequences(msgspec.Struct, frozen=True):
    """A group of equal sequences in one forward pass. Fields are ints or broadcastable arrays.

    An array has one value for each of several independent forward passes.

    Attributes:
        count: Number of sequences.
        new: New tokens of each sequence, which the pass processes.
        past: Tokens of each sequence that are in the KV cache before the pass.
    """

    count: Num
    new: Num
    past: Num


class Batch(msgspec.Struct, frozen=True):
    """The sequences that one forward pass processes, in groups of equal sequences.

    Prefill of a prompt of S tokens is new = S, past = 0. A decode step at context S is new = 1,
    past = S − 1. Verifying k draft tokens is new = k + 1. A continuous batch has several groups. A
    padded static batch is one group of the longest length.

    Attributes:
        groups: One `Sequences` for each group. If a field of it is an array, the batch stands for
            several independent passes, one for each index, and results are arrays too.
    """

    groups: tuple[Sequences, ...]

    @classmethod
    def prefill(cls, context: Num, batch_size: Num = 1, past: Num = 0) -> "Batch":
        """Return the batch of a prefill of `batch_size` prompts.

        Args:
            context: New tokens of each prompt. Tokens in `past` are not included.
            batch_size: Number of prompts.
            past: Tokens of each prompt that are already in the KV cache.
        """
        return cls((Sequences(batch_size, context, past),))

    @classmethod
    def decode(cls, context: Num, batch_size: Num = 1) -> "Batch":
        """Return the batch of a decode step: one new token for each of `batch_size` sequences.

        Args:
            context: Tokens of each sequence after the step, including the new token.
            batch_size: Number of sequences.
        """
        _check("context", context, 1)
        return cls((Sequences(batch_size, 1, context - 1),))

    @classmethod
    def of_phase(cls, phase: str, context: Num, batch_size: Num = 1) -> "Batch":
        """Return a decode or prefill batch, selected by the name of the phase.

        Args:
            phase: `decode` or `prefill`.
            context: Tokens of each sequence after the pass. A prefill computes all of them.
            batch_size: Number of sequences.

        Raises:
            UserError: The phase is unknown.
        """
        if phase not in PHASES:
            raise UserError(f"unknown phase {phase!r}", f"Known: {', '.join(PHASES)}")
        make_batch = cls.decode if phase == "decode" else cls.prefill
        return make_batch(context, batch_size)

    @classmethod
    def parse(cls, text: str) -> "Batch":
        """Return a batch of several groups from text, such as `500+4x1@4k`.

        The example is a prompt of 500 tokens and four decodes at a context of 4,096 tokens.

        Args:
            text: Terms `[COUNTx]NEW[@CONTEXT]`, joined by `+`. Each of COUNT sequences has NEW new
                tokens, and CONTEXT tokens after the pass. Without CONTEXT, no token is cached
                before the pass.

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
        if len(shapes) > 1:
            import numpy as np

            try:
                np.broadcast_shapes(*shapes)
            except ValueError:
                text = ", ".join(map(str, sorted(shapes)))
                raise UserError(f"the arrays of a batch do not broadcast: {text}") from None

    @property
    def tokens(self) -> Num:
        """Return the number of new tokens in the batch: Σ count · new over its groups.

        It counts all data-parallel ranks.
        """
        return sum(g.count * g.new for g in self.groups)

    @property
    def decodes(self) -> bool:
        """Return whether every sequence of the batch has exactly one new token.

        This is so in a decode step without draft tokens. The time of such a step has a lower bound
        from memory traffic even if the GPU's matrix FLOP/s are unknown. The result is False if a
        number of new tokens is an array.
        """
        return all(isinstance(g.new, int) and g.new == 1 for g in self.groups)

    @property
    def exact(self) -> bool:
        """Return whether all counts and lengths are ints, so the batch stands for one forward pass.

        Results of only such a batch are stored for later calls. It is False if a field is an array.
        The batch then stands for several independent passes, one for each index of the array.
        """
        return all(isinstance(n, int) for g in self.groups for n in (g.count, g.new, g.past))

    def micro_batch(
        self, parallelism: Parallelism, cuts_prompts: bool = False, rounds_up: bool = False
    ) -> "Batch":
        """Return the micro-batch that one pipeline stage processes at a time.

        With pipeline parallelism, the sequences of each data-parallel rank are divided into one
        micro-batch per stage, so that all stages work at the same time. There are never more
        micro-batches than sequences. Each group of equal sequences is divided by itself. The result
        counts the sequences of all data-parallel ranks. It is the whole batch if there is one
        stage.

        Examples: 9 decodes in 2 stages give 4, or 5 if rounded up. One prompt of 1,000 tokens stays
        whole. If prompts are cut, it gives a chunk of 500 new tokens after 250 past tokens.

        Args:
            parallelism: Gives the number of pipeline stages and data-parallel ranks.
            cuts_prompts: Whether prompts are divided into chunks if there are fewer prompts than
                stages. The returned chunk has the mean number of tokens before it, here the mean of
                0 and 500. The time of this chunk in all stages is a lower bound for any way to
                divide the prompt.
            rounds_up: Whether to return the largest micro-batch instead of the smallest.
        """
        shares = []
        for group in self.groups:
            ways = minimum(ceil_div(group.count, parallelism.dp), parallelism.pp)
            count = -(-group.count // ways) if rounds_up else group.count // ways
            new, past = group.new, group.past
            if cuts_prompts:
                new = maximum(group.new // (parallelism.pp // ways), 1)
                past = past + (group.new - new) // 2
            shares.append(Sequences(count, new, past))
        return Batch(tuple(shares))

    @property
    def sequences(self) -> Num:
        """Return the number of sequences in the batch: Σ count over its groups.

        It counts all data-parallel ranks.
        """
        return sum(g.count for g in self.groups)


def _term(word: str, text: str) -> Sequences:
    word = word.strip()
    match = _TERM.fullmatch(word)
    if not match or text.isdigit():
        text = f"batch {text!r}: {word!r} should read like 4x1@4k, sequences x new tokens @ context"
        raise UserError(text, "For a number of sequences, use --batch-size")
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
    if type(value) is int:
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
