"""The options of `fit`, and their checks."""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from kvcalc.capacity.engines import ENGINES, Engine, EngineSettings
from kvcalc.capacity.memory_budget import ESTIMATES, SHARES, LogCorrections, read_learned
from kvcalc.errors import UserError, nearest
from kvcalc.library.choices import (
    BytesInstead,
    HostBytes,
    Tokens,
    TokensOrNone,
    share,
    spelled,
)
from kvcalc.library.load import load_model
from kvcalc.model.model import Model
from kvcalc.storage.formats import canonical
from kvcalc.timing.deployment import TimedDeployment
from kvcalc.units import MAX_TOKENS, parse_rate

MOST_BYTES = 1 << 60
CHOICES = {
    "mamba_cache_mode": ("none", "align"),
    "utilization_of": ("", *SHARES),
    "budget": ("", *ESTIMATES),
}
MODALITIES = ("image", "video", "audio")
STATE_DTYPES = ("", "auto", "fp32", "bf16", "fp16")
# Smallest and largest value of options with whole numbers.
RANGES = (
    (
        0,
        MAX_TOKENS,
        "max_model_len max_num_batched_tokens num_gpu_blocks_override shared_prefix require users",
    ),
    (1, MAX_TOKENS, "max_num_seqs"),
    (0, 1 << 10, "num_speculative_tokens"),
    (
        0,
        1 << 20,
        "block_size max_in_flight_batches mamba_checkpoint_blocks max_loras n_cpu_moe",
    ),
    (1, 1 << 20, "max_lora_rank"),
    (-1, 1 << 20, "n_gpu_layers"),
    (1, MOST_BYTES, "kv_cache_memory_bytes"),
    (0, MOST_BYTES, "kv_offloading_bytes weight_bytes activation_bytes overhead_bytes"),
)
CAN_BE_NONE = (
    "max_num_seqs",
    "kv_cache_memory_bytes",
    "weight_bytes",
    "activation_bytes",
    "overhead_bytes",
)


def _engine(text: str, what: str) -> str:
    return text.strip().lower()


def _draft(name: str, what: str) -> Model:
    return load_model(name)


def _number(text: str, what: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UserError(f"{what} {text!r}: Expected `int`") from None


class Items(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A limit of a modality as an object. Sizes of items are not modelled."""

    count: int


class FitOptions(EngineSettings, frozen=True):
    """Options of `fit`, with the settings of engines.

    0, "" and None leave a choice to the engine or the model.

    Attributes:
        max_model_len: Tokens of each sequence.
        max_num_seqs: Sequences of the whole replica that the engine is set up for. None means the
            engine's default, and that one sequence must fit.
        require: Sequences that must fit, if this is more.
        users: Sequences that must fit, instead of `max_num_seqs`.
        engine_version: `0.11`, `0.11.2` or `latest`.
        enforce_eager: Whether CUDA graphs and compilation are off.
        max_loras: Slots for adapters of `max_lora_rank`.
        limit_mm_per_prompt: Items of each modality, as `image=0` or in JSON.
        engram_config: `{"cpu_offload": false}` stores tables of n-grams on the GPU.
        budget: End of the range that answers. "" is the low end if `require` is set, else the
            middle.
        utilization_of: Share of the GPU's total memory; of the free memory after context and
            collectives; or of the memory that remains then beside the terms.
        kv_cache_memory_bytes: Replaces the budget.
        num_gpu_blocks_override: Replaces an engine's number of blocks.
        weight_bytes, activation_bytes, overhead_bytes: Replace the three terms.
        shared_prefix: First tokens that all sequences share.
        mtp: Whether the prediction layers are loaded.
        draft: A draft model.
        kv_offloading_bytes: Host memory for the cache, per GPU.
        cpu_offload_gb: GiB of each GPU's weights in host memory.
        disk_bandwidth: Bytes per second to read weights; 0 if unknown.
        from_log: Corrections from a start-up log, as `diagnose --save` writes them.
    """

    engine: Annotated[str, _engine] = "vllm"
    max_model_len: Tokens = 0
    max_num_seqs: Annotated[int | None, _number] = None
    require: int = 0
    users: int = 0
    engine_version: str = ""
    enforce_eager: bool = False
    max_loras: int = 0
    max_lora_rank: int = 16
    limit_mm_per_prompt: str = ""
    engram_config: str = ""
    budget: str = ""
    gpu_memory_utilization: Annotated[float, share] = 0.0
    utilization_of: str = ""
    max_num_batched_tokens: Tokens = 0
    max_in_flight_batches: int = 0
    num_speculative_tokens: int = 0
    kv_cache_memory_bytes: BytesInstead = None
    num_gpu_blocks_override: int = 0
    weight_bytes: BytesInstead = None
    activation_bytes: BytesInstead = None
    overhead_bytes: BytesInstead = None
    shared_prefix: TokensOrNone = 0
    mtp: bool = False
    draft: Annotated[Model | None, _draft] = None
    kv_offloading_bytes: HostBytes = 0
    cpu_offload_gb: float = 0.0
    disk_bandwidth: Annotated[int, parse_rate] = 0
    from_log: Annotated[LogCorrections | None, read_learned] = None

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise UserError(
                f"unknown engine {self.engine!r}", hint=nearest(self.engine, ENGINES)
            )
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                hint = f"Known: {', '.join(filter(None, choices))}"
                raise UserError(f"unknown {spelled(name)} {getattr(self, name)!r}", hint=hint)
        if self.state_dtype not in STATE_DTYPES:
            raise UserError(
                f"unknown state dtype {self.mamba_ssm_cache_dtype!r}",
                hint=f"Known: {', '.join(STATE_DTYPES[1:])}",
            )
        if not (self.gpu_memory_utilization == 0 or 0 < self.gpu_memory_utilization <= 1):
            raise UserError(
                f"GPU memory utilisation {self.gpu_memory_utilization!r} is not above 0 and at "
                "most 1",
                hint="Write 0.9 for 90 %",
            )
        for smallest, largest, names in RANGES:
            for name in names.split():
                self._check_whole(name, smallest, largest)
        if self.from_log and self.from_log.engine != self.engine:
            raise UserError(
                f"that log is {self.from_log.engine}'s, not {self.engine}'s",
                hint=f"--engine {self.from_log.engine}",
            )
        if not 0 <= self.cpu_offload_gb <= 1 << 20:
            raise UserError(f"cpu-offload-gb {self.cpu_offload_gb!r} is not a number of GiB")
        if self.cpu_offload_gb and self.weight_bytes is not None:
            raise UserError(
                "weight-bytes are those on the GPU, and cpu-offload-gb takes nothing off them",
                hint="Give one of them",
            )
        if self.n_gpu_layers >= 0 and self.kv_offloading_bytes:
            raise UserError("kv-offloading-bytes beside n-gpu-layers is not modelled")
        _ = self.images, self.tables_on_host
        self._check_engine()
        self.rules.release(self.engine_version)

    def _check_whole(self, name: str, smallest: int, largest: int) -> None:
        value = getattr(self, name)
        if value is None and name in CAN_BE_NONE:
            return
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not smallest <= value <= largest
        ):
            raise UserError(
                f"{spelled(name)} {value!r} is not a whole number from {smallest} to {largest:,}"
            )

    def _check_engine(self) -> None:
        """Raise UserError for an option that the engine does not have."""
        rules, defaults = self.rules, EngineSettings()
        for engine in ENGINES.values():
            for name in engine.takes:
                if engine is not rules and getattr(self, name) != getattr(defaults, name):
                    raise self._unsupported(f"takes no {spelled(name)}", [engine])
        for name in ("max_loras", "limit_mm_per_prompt", "engram_config"):
            if getattr(self, name) and name not in rules.counts:
                engines = [engine for engine in ENGINES.values() if name in engine.counts]
                raise self._unsupported(f"counts no {spelled(name)}", engines)
        if self.num_gpu_blocks_override and not rules.takes_num_blocks:
            engines = [engine for engine in ENGINES.values() if engine.takes_num_blocks]
            raise self._unsupported("takes no num-gpu-blocks-override", engines)
        for dtype in filter(None, (self.cache_type_k, self.cache_type_v)):
            if canonical(dtype) not in (rules.dtypes or ()):
                hint = f"It has: {', '.join(rules.dtypes or ())}"
                raise UserError(f"{rules.name} has no cache dtype {dtype!r}", hint=hint)

    def _unsupported(self, what: str, engines: Sequence[Engine]) -> UserError:
        names = ", ".join(engine.name for engine in engines)
        return UserError(f"engine {self.engine} {what}", hint=f"Engines that do: {names}")

    def cache_label(self, used: str) -> str:
        """Return the cache's dtype, or both dtypes if those of keys and values differ.

        Args:
            used: The dtype if none is requested.
        """
        dtypes = (canonical(t) or used for t in (self.cache_type_k, self.cache_type_v))
        return " + ".join(dict.fromkeys(dtypes))

    @property
    def rules(self) -> Engine:
        """The rules of the engine."""
        return ENGINES[self.engine]

    @property
    def end(self) -> str:
        """The end of the range that answers: the middle if the engine's terms have no range."""
        end = self.budget or ("low" if self.require else "middle")
        return end if self.rules.has_memory_range else "middle"

    @property
    def wanted(self) -> int:
        """Sequences of the whole replica that must fit."""
        return max(self.users or self.max_num_seqs or 1, self.require)

    def longest(self, model: Model) -> int:
        """Return the tokens of the longest sequence: as requested, or the model's maximum."""
        return self.max_model_len or model.max_context or 4096

    @property
    def given(self) -> bool:
        """Whether the size of the cache is an option, so that the weights are not checked."""
        return bool(self.kv_cache_memory_bytes or self.num_gpu_blocks_override)

    @property
    def images(self) -> int | None:
        """Images of a prompt, or videos if there can be more; None without a limit."""
        return limit_of_images(self.limit_mm_per_prompt)

    @property
    def tables_on_host(self) -> bool:
        """Whether tables of n-grams stay in host memory: vLLM's default."""
        return offloads_tables(self.engram_config)

    @property
    def state_dtype(self) -> str:
        """`mamba_ssm_cache_dtype` by kvcalc's name; "" if the engine chooses it."""
        dtype = canonical(self.mamba_ssm_cache_dtype)
        return "" if dtype == "auto" else dtype


def options_for(deployment: TimedDeployment, **options: Any) -> FitOptions:
    """Return options of `fit` with the deployment's engine and version. Raises UserError as
    FitOptions."""
    return FitOptions(
        engine=deployment.engine, engine_version=deployment.engine_version, **options
    )


def limit_of_images(text: str) -> int | None:
    """Return the larger limit of images and videos; None without one.

    Examples: `{"image": 2, "video": {"count": 0}}` and `image=2,video=0` give 2.

    Raises:
        UserError: The text has another form.
    """
    if not text.strip():
        return None
    limits: dict[str, int] = {}
    try:
        if text.lstrip().startswith("{"):
            for name, limit in msgspec.json.decode(text, type=dict[str, int | Items]).items():
                limits[name] = limit if isinstance(limit, int) else limit.count
        else:
            for word in text.split(","):
                name, count = word.split("=")
                limits[name.strip()] = int(count)
    except (msgspec.MsgspecError, ValueError):
        raise UserError(
            f"limit-mm-per-prompt {text!r} is not a limit",
            hint='Give one like image=2 or {"image": 2}',
        ) from None
    if min(limits.values(), default=0) < 0:
        raise UserError(f"limit-mm-per-prompt {text!r} is below 0")
    for name in limits:
        if name not in MODALITIES:
            raise UserError(
                f"limit-mm-per-prompt: unknown modality {name!r}",
                hint=nearest(name, MODALITIES),
            )
    limits.pop("audio", None)
    return max(limits.values(), default=None)


class EngramOptions(msgspec.Struct, frozen=True):
    """vLLM's settings of tables of n-grams that move bytes. Others are ignored."""

    cpu_offload: bool = True


def offloads_tables(text: str) -> bool:
    """Return whether tables are in host memory: not with `{"cpu_offload": false}`. Raises UserError
    for another text."""
    try:
        return (
            msgspec.json.decode(text, type=EngramOptions).cpu_offload if text.strip() else True
        )
    except msgspec.MsgspecError:
        raise UserError(
            f"engram-config {text!r} is not a mapping in JSON",
            hint='Give one like {"cpu_offload": false}',
        ) from None
