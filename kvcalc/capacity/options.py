"""What `fit` is asked, checked."""

from typing import Annotated, Any

from kvcalc.capacity.engines import ENGINES, Engine, EngineSettings
from kvcalc.capacity.memory_terms import SHARES
from kvcalc.errors import UserError, nearest
from kvcalc.library.load import load_model
from kvcalc.library.words import BytesInstead, BytesOrNone, Tokens, TokensOrNone, share, spelled
from kvcalc.model.spec import Model
from kvcalc.storage.dtypes import canonical
from kvcalc.units import MOST_TOKENS

MOST_BYTES = 1 << 60
CHOICES = {"mamba_cache_mode": ("none", "align"), "utilization_of": ("", *SHARES)}
STATE_DTYPES = ("auto", "fp32", "bf16", "fp16")


def _engine(text: str, what: str) -> str:
    return text.strip().lower()


def _draft(name: str, what: str) -> Model:
    return load_model(name)


class FitOptions(EngineSettings, frozen=True):
    """What `fit` is asked, an engine's settings among it. 0, '' and None leave a choice to the engine or the model.

    max_model_len: tokens of each of max_num_seqs sequences. utilization_of: share of the GPU's total memory, of what is free
    once context and collectives stand, or of what then remains beside the terms. kv_cache_memory_bytes replaces the budget,
    num_gpu_blocks_override an engine's number of blocks; weight_bytes, activation_bytes and overhead_bytes the three terms.
    shared_prefix: first tokens that all sequences have in common. mtp: with the multi-token-prediction layers. draft: a model
    beside this one. kv_offloading_bytes: host memory for the cache, per GPU.
    """

    engine: Annotated[str, _engine] = "none"
    max_model_len: Tokens = 0
    max_num_seqs: int = 1
    gpu_memory_utilization: Annotated[float, share] = 0.0
    utilization_of: str = ""
    max_num_batched_tokens: Tokens = 0
    max_in_flight_batches: int = 0
    kv_cache_memory_bytes: BytesInstead = None
    num_gpu_blocks_override: int = 0
    weight_bytes: BytesInstead = None
    activation_bytes: BytesInstead = None
    overhead_bytes: BytesInstead = None
    shared_prefix: TokensOrNone = 0
    mtp: bool = False
    draft: Annotated[Model | None, _draft] = None
    kv_offloading_bytes: BytesOrNone = 0

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise UserError(f"unknown engine {self.engine!r}", hint=nearest(self.engine, ENGINES))
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                hint = f"Known: {', '.join(filter(None, choices))}"
                raise UserError(f"unknown {spelled(name)} {getattr(self, name)!r}", hint=hint)
        if self.state_dtype not in ("", *STATE_DTYPES):
            raise UserError(f"unknown state dtype {self.mamba_ssm_cache_dtype!r}", hint=f"Known: {', '.join(STATE_DTYPES)}")
        if not (self.gpu_memory_utilization == 0 or 0 < self.gpu_memory_utilization <= 1):
            raise UserError(f"GPU memory utilisation {self.gpu_memory_utilization!r} is not above 0 and at most 1")
        for name in ("max_model_len", "max_num_batched_tokens", "num_gpu_blocks_override", "shared_prefix"):
            _whole(name, getattr(self, name))
        _whole("mamba_checkpoint_blocks", self.mamba_checkpoint_blocks, most=1 << 20)
        _whole("block_size", self.block_size, most=1 << 20)
        _whole("max_in_flight_batches", self.max_in_flight_batches, most=1 << 20)
        _whole("max_num_seqs", self.max_num_seqs, 1)
        if self.kv_cache_memory_bytes is not None:
            _whole("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, MOST_BYTES)
        for name in ("kv_offloading_bytes", "weight_bytes", "activation_bytes", "overhead_bytes"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), most=MOST_BYTES)
        if self.num_gpu_blocks_override and not self.rules.takes_num_blocks:
            known = ", ".join(e.name for e in ENGINES.values() if e.takes_num_blocks)
            raise UserError(f"engine {self.engine} takes no num-gpu-blocks-override", hint=f"Engines that do: {known}")

    @property
    def rules(self) -> Engine:
        """The engine of that name."""
        return ENGINES[self.engine]

    @property
    def state_dtype(self) -> str:
        """mamba_ssm_cache_dtype in kvcalc's spelling; '' where the choice is left."""
        asked = canonical(self.mamba_ssm_cache_dtype)
        return "" if asked == "auto" else asked


def _whole(name: str, value: Any, least: int = 0, most: int = MOST_TOKENS) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UserError(f"{spelled(name)} {value!r} is not a whole number from {least} to {most:,}")
