"""What `fit` is asked, checked."""

from typing import Annotated, Any

import msgspec

from kvcalc.capacity.engines import PLANNERS
from kvcalc.errors import UserError, nearest
from kvcalc.library.load import load_model
from kvcalc.library.words import Bytes, BytesInstead, BytesOrNone, Tokens, TokensOrNone, share, spelled
from kvcalc.model.spec import Model
from kvcalc.units import MOST_TOKENS

MOST_BYTES = 1 << 60
CHOICES = {"mamba_cache_mode": ("none", "align"), "utilization_of": ("", "total", "free")}


def _engine(text: str, what: str) -> str:
    return text.strip().lower()


def _draft(name: str, what: str) -> Model:
    return load_model(name)


class FitOptions(msgspec.Struct, frozen=True):
    """What `fit` is asked. 0, '' and None leave a choice to the engine or the model.

    max_model_len: tokens of each of max_num_seqs sequences. utilization_of: share of the GPU's total memory, or of what is
    free once context and collectives stand. kv_cache_memory_bytes replaces the budget, num_gpu_blocks_override vLLM's number
    of blocks; weight_bytes, activation_bytes and overhead_bytes the three terms. shared_prefix: first tokens that all
    sequences have in common. mtp: with the multi-token-prediction layers. draft: a model beside this one.
    kv_offloading_bytes: host memory for the cache, per GPU.
    """

    engine: Annotated[str, _engine] = "none"
    max_model_len: Tokens = 0
    max_num_seqs: int = 1
    gpu_memory_utilization: Annotated[float, share] = 0.0
    utilization_of: str = ""
    max_num_batched_tokens: Tokens = 0
    max_in_flight_batches: int = 0
    kv_cache_memory_bytes: Bytes = 0
    num_gpu_blocks_override: int = 0
    block_size: int = 0
    mamba_cache_mode: str = "none"
    mamba_checkpoint_blocks: int = 0
    mamba_ssm_cache_dtype: str = ""
    hybrid: bool = True
    flash_attention: bool = True
    weight_bytes: BytesInstead = None
    activation_bytes: BytesInstead = None
    overhead_bytes: BytesInstead = None
    shared_prefix: TokensOrNone = 0
    mtp: bool = False
    draft: Annotated[Model | None, _draft] = None
    kv_offloading_bytes: BytesOrNone = 0

    def __post_init__(self) -> None:
        if self.engine not in PLANNERS:
            raise UserError(f"unknown engine {self.engine!r}", hint=nearest(self.engine, PLANNERS))
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                hint = f"Known: {', '.join(filter(None, known))}"
                raise UserError(f"unknown {spelled(name)} {getattr(self, name)!r}", hint=hint)
        if not (self.gpu_memory_utilization == 0 or 0 < self.gpu_memory_utilization <= 1):
            raise UserError(f"GPU memory utilisation {self.gpu_memory_utilization!r} is not above 0 and at most 1")
        for name in ("max_model_len", "max_num_batched_tokens", "num_gpu_blocks_override", "shared_prefix"):
            _whole(name, getattr(self, name))
        _whole("mamba_checkpoint_blocks", self.mamba_checkpoint_blocks, most=1 << 20)
        _whole("block_size", self.block_size, most=1 << 20)
        _whole("max_in_flight_batches", self.max_in_flight_batches, most=1 << 20)
        _whole("max_num_seqs", self.max_num_seqs, 1)
        for name in ("kv_cache_memory_bytes", "kv_offloading_bytes", "weight_bytes", "activation_bytes", "overhead_bytes"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), most=MOST_BYTES)
        if self.num_gpu_blocks_override and self.engine != "vllm":
            raise UserError("num-gpu-blocks-override is vLLM's", hint="Choose engine vllm")


def _whole(name: str, value: Any, least: int = 0, most: int = MOST_TOKENS) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UserError(f"{spelled(name)} {value!r} is not a whole number from {least} to {most:,}")
