"""Parallelism over GPUs. Every figure of a pass is for one rank, the fullest."""

import msgspec

from kvcalc.errors import UserError

MOST_GPUS = 1_000_000


class Parallelism(msgspec.Struct, frozen=True):
    """Numbers of ranks. Every figure under it is for one GPU, the fullest.

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
        for name in ("tp", "pp", "dp", "ep", "dcp"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_GPUS:
                raise UserError(f"{name} {value!r} is not a number of GPUs", hint="Give a whole number from 1 up")
        if isinstance(self.per_node, bool) or not isinstance(self.per_node, int) or not 0 <= self.per_node <= MOST_GPUS:
            raise UserError(f"per_node {self.per_node!r} is not a number of GPUs", hint="Give 0 where one link joins all")
        if (self.tp * self.dp) % self.ep:
            raise UserError(f"ep {self.ep} does not divide tp·dp = {self.tp * self.dp}")
        if self.tp % self.dcp:
            raise UserError(f"decode-context parallel size {self.dcp} does not divide tp {self.tp}")

    @property
    def of_a_stage(self) -> tuple[int, int, int]:
        """A key that determines the share of each weight on one rank of a pipeline stage."""
        return self.tp, self.dp, self.ep

    @property
    def gpus(self) -> int:
        """GPUs of one replica: tp · pp · dp."""
        return self.tp * self.pp * self.dp

    def near(self, group: int) -> int:
        """Return the number of ranks of a contiguous group that are on one node."""
        return min(group, self.per_node) if self.per_node else group

    def sequences(self, batch_size: int) -> int:
        """Return the sequences on the fullest dp rank."""
        return -(-batch_size // self.dp)

    def share(self, shards: int) -> int:
        """Return the units of `shards` on one tp rank: ⌈shards/tp⌉, at least one."""
        return -(-shards // self.tp)


ONE_GPU = Parallelism()
