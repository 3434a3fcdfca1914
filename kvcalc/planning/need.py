"""What a plan is asked for: how many users of how many tokens, or what rate, and how long they are willing to wait."""

from typing import Annotated

import msgspec

from kvcalc.errors import UserError
from kvcalc.library.words import Tokens, spelled, tokens_called
from kvcalc.units import parse_seconds

# Sequences of a replica that are tried where their number is not given by the users.
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
Seconds = Annotated[float, parse_seconds]


class Lengths(msgspec.Struct, frozen=True):
    """Tokens of a request. prompt: before the first token is made, `cached` of them a prefix that is cached; context: at the end.

    output: tokens generated; 0 where only the context is known, and a step is taken at its end.
    """

    prompt: int
    context: int
    output: int = 0
    cached: int = 0

    @property
    def middle(self) -> int:
        """Tokens half-way through an answer, or at the end where that alone is known: of a speculative step."""
        return self.prompt + max(1, self.output // 2) if self.output else self.context


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be met. 0 leaves a limit out.

    users: sequences at once, over all replicas. context: tokens of each, or input_len and output_len. rate: requests per
    second, instead of users. max_ttft, max_tpot: seconds to the first token and per further one. min_throughput: output tokens
    per second of all replicas. prefix_hit_rate: share of a prompt whose keys and values are cached already.
    """

    users: Annotated[int, tokens_called("number of users")] = 0
    context: Tokens = 0
    input_len: Tokens = 0
    output_len: Tokens = 0
    rate: float = 0.0
    max_ttft: Seconds = 0.0
    max_tpot: Seconds = 0.0
    min_throughput: float = 0.0
    prefix_hit_rate: float = 0.0

    def __post_init__(self) -> None:
        if self.context and (self.input_len or self.output_len):
            raise UserError("context and input-len exclude each other", hint="A context is the end of input and output")
        if bool(self.input_len) != bool(self.output_len):
            raise UserError("input-len and output-len go together", hint="Or give a context")
        if not self.context and not self.input_len:
            raise UserError("a plan needs the tokens of a request", hint="Give --context, or --input-len and --output-len")
        if self.users and self.rate:
            raise UserError("users and rate exclude each other", hint="Users wait for their answers, requests at a rate do not")
        if not (self.users or self.rate or self.min_throughput):
            raise UserError("a plan needs a load", hint="Give --users, --rate or --min-throughput")
        if not self.users and not self.output_len:
            raise UserError("a rate is of requests with an end", hint="Give --input-len and --output-len")
        for name in ("rate", "min_throughput", "max_ttft", "max_tpot"):
            if not 0 <= getattr(self, name) <= 1e12:
                raise UserError(f"{spelled(name)} {getattr(self, name)} is outside 0 to 10^12")
        if not 0 <= self.prefix_hit_rate < 1:
            raise UserError(f"prefix-hit-rate {self.prefix_hit_rate} is not from 0 to below 1")

    @property
    def lengths(self) -> Lengths:
        """What each request is long."""
        prompt = self.context or self.input_len
        cached = int(prompt * self.prefix_hit_rate)
        return Lengths(prompt, self.context or self.input_len + self.output_len, self.output_len, cached)

    def batches(self, most: int) -> list[int]:
        """Sequences of a replica that make a point each, where there are at most so many replicas."""
        if not self.users:
            return list(BATCHES)
        return sorted({-(-self.users // replicas) for replicas in range(1, min(most, self.users) + 1)})
