"""The settings of a simulated server."""

from typing import Annotated

import msgspec

from kvcalc.errors import UserError, nearest
from kvcalc.library.choices import BytesInstead, Tokens, share
from kvcalc.serving.arrivals import check_range, seconds_or_none
from kvcalc.serving.speculation import check_draft

PREEMPTIONS = ("recompute", "swap")
MAX_PREFILL_REPLICAS = 1024


class ServerSettings(msgspec.Struct, frozen=True):
    """The settings of a simulated server.

    Attributes:
        max_num_seqs: Concurrent sequences of the whole replica; None for the engine's default.
        max_num_batched_tokens: Tokens of a pass of one data-parallel rank; 0 for the engine's
            default.
        max_model_len: Tokens of a request; 0 for the longest request.
        batch_timeout: Seconds that a static batch waits to become full.
        block_size: Tokens in a cache block; 0 for the engine's default.
        gpu_memory_utilization: Share of the memory; 0 for the engine's default.
        kv_cache_memory_bytes: Bytes of the cache; None derives them as in `fit`.
        slo_ttft: Latency target in seconds; 0 sets no target.
        slo_tpot: Latency target in seconds per token; 0 sets no target.
        draft: '' or a draft for `draft_model`.
        num_speculative_tokens: Draft tokens per step; 0 for the number of prediction layers, or for
            the best number of one request.
        acceptance_rate: Acceptance rate of a draft token; None for 0.8.
        scheduler_recv_interval: SGLang's number of decode passes between two checks for arrivals.
        disaggregate: Whether `prefill_replicas` separate replicas process the prompts.
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
        check_draft(self.draft, self.num_speculative_tokens, self.acceptance_rate)
        check_range("max_num_batched_tokens", self.max_num_batched_tokens, 0, 1 << 20)
        check_range("block_size", self.block_size, 0, 1 << 20)
        check_range("scheduler_recv_interval", self.scheduler_recv_interval, 1, 1 << 20)
        if self.max_num_seqs is not None:
            check_range("max_num_seqs", self.max_num_seqs, 1, 1 << 20)
        check_range("prefill_replicas", self.prefill_replicas, 1, MAX_PREFILL_REPLICAS)
        if self.prefill_replicas > 1 and not self.disaggregate:
            raise UserError(
                "prefill-replicas need separate replicas for the prompts",
                hint="Add --disaggregate",
            )
        for name in ("batch_timeout", "price_per_hour", "slo_ttft", "slo_tpot"):
            check_range(name, getattr(self, name), 0, 10**9)
        if not 0 <= self.gpu_memory_utilization <= 1:
            raise UserError(
                f"gpu-memory-utilization {self.gpu_memory_utilization} is not above 0 and at "
                "most 1",
                hint="Write 0.9 for 90 %",
            )
        if self.preemption not in PREEMPTIONS:
            raise UserError(
                f"unknown preemption {self.preemption!r}",
                hint=nearest(self.preemption, PREEMPTIONS),
            )
