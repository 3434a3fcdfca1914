"""How a model is run: on which sequences, in which formats, and over how many GPUs."""

import msgspec

from kvcalc.dtypes import COMPUTE, canonical
from kvcalc.errors import UserError, nearest
from kvcalc.units import MOST_TOKENS, Num

MOST_GPUS = 1_000_000


class Precision(msgspec.Struct, frozen=True):
    """Formats by role. `auto` is what the model was published in.

    dtype: of weights and products; anything but `auto` overrides a published quantisation. kv_cache_dtype: a format or a
    layout for the growing roles of the cache; `auto` is the dtype, or what the checkpoint declares for its cache.
    quantization: a storage format for the weight matrices on top of the dtype.
    """

    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str = ""

    def __post_init__(self) -> None:
        if canonical(self.dtype) not in (*COMPUTE, "auto"):
            hint = nearest(canonical(self.dtype), [*COMPUTE, "auto"])
            raise UserError(f"unknown dtype {self.dtype!r}", hint=hint)


class Parallelism(msgspec.Struct, frozen=True):
    """Ranks by kind. Every figure under it is that of one GPU, the fullest.

    tp divides heads and columns (and replicates KV heads beyond their number), pp the stack of layers, dp the sequences;
    ep, a divisor of tp·dp, spreads the experts; dcp, a divisor of tp, spreads the cached tokens in decode.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "ep", "dcp"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_GPUS:
                raise UserError(f"{name} {value!r} is not a number of GPUs", hint="Give a whole number from 1 up")
        if (self.tp * self.dp) % self.ep:
            raise UserError(f"ep {self.ep} does not divide tp·dp = {self.tp * self.dp}")
        if self.tp % self.dcp:
            raise UserError(f"decode-context parallel size {self.dcp} does not divide tp {self.tp}")

    @property
    def gpus(self) -> int:
        """GPUs of one replica: tp · pp · dp."""
        return self.tp * self.pp * self.dp

    def sequences(self, batch_size: int) -> int:
        """Sequences on the fullest of the dp ranks."""
        return -(-batch_size // self.dp)

    def share(self, shards: int) -> int:
        """Units of `shards` that one of the tp ranks holds: ⌈shards/tp⌉, and one where there are fewer than ranks."""
        return -(-shards // self.tp)


ONE_GPU = Parallelism()
PUBLISHED = Precision()


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
