"""What a simulated server is set to."""

from typing import Annotated

import msgspec

from kvcalc.errors import UserError, nearest
from kvcalc.library.words import BytesInstead, Tokens, share
from kvcalc.serving.load import seconds_or_none, within
from kvcalc.serving.metrics import Goals
from kvcalc.serving.speculation import MOST_SPECULATED, expected_tokens

PREEMPTIONS = ("recompute", "swap")
MOST_REPLICAS = 1024  # for prompts


class ServerSettings(msgspec.Struct, frozen=True):
    """Of the server. max_num_seqs is the whole replica's, as a batch size is; max_num_batched_tokens of one dp rank's pass.

    0 leaves max_num_batched_tokens, block_size and gpu_memory_utilization to the engine and max_model_len to the longest
    request, None leaves max_num_seqs to the engine and kv_cache_memory_bytes to `fit`.
    slo_ttft, slo_tpot: seconds that users accept; 0 sets no goal. draft: as `draft_model` takes it, '' for none; it proposes
    num_speculative_tokens a step (0: as many as it has prediction layers, or as suit one request best), each accepted with
    acceptance_rate (None: 0.8). scheduler_recv_interval: SGLang's, decode passes from one look at what has come to the next.
    disaggregate: prompts are processed on prefill_replicas of their own.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int = 0
    max_model_len: Tokens = 0
    preemption: str = "recompute"
    batch_timeout: float = 0.0
    block_size: int = 0
    gpu_memory_utilization: Annotated[float, share] = 0.0
    kv_cache_memory_bytes: BytesInstead = None
    slo_ttft: Annotated[float, seconds_or_none] = 0.0
    slo_tpot: Annotated[float, seconds_or_none] = 0.0
    price_per_hour: float = 0.0
    draft: str = ""
    num_speculative_tokens: int = 0
    acceptance_rate: float | None = None
    scheduler_recv_interval: int = 1
    disaggregate: bool = False
    prefill_replicas: int = 1

    def __post_init__(self) -> None:
        _check_draft(self.draft, self.num_speculative_tokens, self.acceptance_rate)
        for name, least in (
            ("max_num_batched_tokens", 0),
            ("block_size", 0),
            ("scheduler_recv_interval", 1),
        ):
            within(name, getattr(self, name), least, 1 << 20)
        if self.max_num_seqs is not None:
            within("max_num_seqs", self.max_num_seqs, 1, 1 << 20)
        within("prefill_replicas", self.prefill_replicas, 1, MOST_REPLICAS)
        if self.prefill_replicas > 1 and not self.disaggregate:
            raise UserError("prefill-replicas are of a server whose prompts are processed apart", hint="Add --disaggregate")
        for name in ("batch_timeout", "price_per_hour", "slo_ttft", "slo_tpot"):
            within(name, getattr(self, name), 0, 10**9)
        if not 0 <= self.gpu_memory_utilization <= 1:
            raise UserError(
                f"gpu-memory-utilization {self.gpu_memory_utilization} is not above 0 and at most 1", hint="Write 0.9 for 90 %"
            )
        if self.preemption not in PREEMPTIONS:
            raise UserError(f"unknown preemption {self.preemption!r}", hint=nearest(self.preemption, PREEMPTIONS))

    @property
    def goals(self) -> Goals:
        return Goals(self.slo_ttft, self.slo_tpot)


def _check_draft(draft: str, drafted: int, acceptance: float | None) -> None:
    if not draft and (drafted or acceptance is not None):
        raise UserError("num-speculative-tokens and acceptance-rate are of a draft, and there is none")
    within("num_speculative_tokens", drafted, 0, MOST_SPECULATED)
    expected_tokens(acceptance or 0.0, drafted)
