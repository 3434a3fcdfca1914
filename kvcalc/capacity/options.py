"""What `fit` is asked, checked."""

from typing import Annotated, Any

import msgspec

from kvcalc.capacity.engines import ENGINES, Engine, EngineSettings
from kvcalc.capacity.learned import Learned, read_learned
from kvcalc.capacity.memory_terms import ENDS, SHARES
from kvcalc.errors import UserError, nearest
from kvcalc.library.load import load_model
from kvcalc.library.words import BytesInstead, HostBytes, Tokens, TokensOrNone, share, spelled
from kvcalc.model.spec import Model
from kvcalc.storage.dtypes import canonical
from kvcalc.timing.deployment import Deployment
from kvcalc.units import MOST_TOKENS, parse_rate

MOST_BYTES = 1 << 60
CHOICES = {"mamba_cache_mode": ("none", "align"), "utilization_of": ("", *SHARES), "budget": ("", *ENDS)}
MODALITIES = ("image", "video", "audio")
STATE_DTYPES = ("auto", "fp32", "bf16", "fp16")


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
    """A limit as an object; sizes of items beside it are not modelled."""

    count: int


class FitOptions(EngineSettings, frozen=True):
    """What `fit` is asked, an engine's settings among it. 0, '' and None leave a choice to the engine or the model.

    max_model_len: tokens of each sequence. max_num_seqs: that the engine is set up for, of the whole replica; None leaves it
    the engine's default and asks for one. require: sequences that have to fit, where those are more. engine_version: `0.11`,
    `0.11.2` or `latest`. enforce_eager: no CUDA graphs and no compilation. max_loras: slots for adapters of max_lora_rank.
    limit_mm_per_prompt: items of each modality, as `image=0` or in JSON. budget: which end of its range answers; '' is
    the low one where `require` is given, else the middle. users: sequences that have to fit, where those are not max_num_seqs.
    from_log: what a start-up log taught, as `diagnose --save` kept it.
    utilization_of: share of the GPU's total memory, of what is free once context and collectives stand, or of what then
    remains beside the terms. kv_cache_memory_bytes replaces the budget, num_gpu_blocks_override an engine's number of blocks;
    weight_bytes, activation_bytes and overhead_bytes the three terms. shared_prefix: first tokens that all sequences have in
    common. engram_config: `{"cpu_offload": false}` keeps tables of n-grams on the GPU. mtp: with the
    prediction layers. draft: a model beside this one. kv_offloading_bytes: host memory for the cache, per GPU. cpu_offload_gb:
    GiB of each GPU's weights that stay in the host's memory. disk_bandwidth: bytes per second that weights are read at,
    0 where it is not known.
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
    from_log: Annotated[Learned | None, read_learned] = None

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
            raise UserError(
                f"GPU memory utilisation {self.gpu_memory_utilization!r} is not above 0 and at most 1", hint="Write 0.9 for 90 %"
            )
        for name in ("max_model_len", "max_num_batched_tokens", "num_gpu_blocks_override", "shared_prefix"):
            _whole(name, getattr(self, name))
        _whole("mamba_checkpoint_blocks", self.mamba_checkpoint_blocks, most=1 << 20)
        _whole("block_size", self.block_size, most=1 << 20)
        _whole("max_in_flight_batches", self.max_in_flight_batches, most=1 << 20)
        _whole("num_speculative_tokens", self.num_speculative_tokens, most=1 << 10)
        if self.max_num_seqs is not None:
            _whole("max_num_seqs", self.max_num_seqs, 1)
        _whole("require", self.require)
        _whole("users", self.users)
        if self.from_log and self.from_log.engine != self.engine:
            raise UserError(f"that log is {self.from_log.engine}'s, not {self.engine}'s", hint=f"--engine {self.from_log.engine}")
        _whole("max_loras", self.max_loras, most=1 << 20)
        _whole("max_lora_rank", self.max_lora_rank, 1, 1 << 20)
        if not 0 <= self.cpu_offload_gb <= 1 << 20:
            raise UserError(f"cpu-offload-gb {self.cpu_offload_gb!r} is not a number of GiB")
        if self.cpu_offload_gb and self.weight_bytes is not None:
            raise UserError(
                "weight-bytes are those on the GPU, and cpu-offload-gb takes nothing off them", hint="Give one of them"
            )
        _ = self.images, self.tables_on_host
        self._check_own()
        self.rules.release(self.engine_version)
        if self.kv_cache_memory_bytes is not None:
            _whole("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, MOST_BYTES)
        for name in ("kv_offloading_bytes", "weight_bytes", "activation_bytes", "overhead_bytes"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), most=MOST_BYTES)
        if self.num_gpu_blocks_override and not self.rules.takes_num_blocks:
            known = ", ".join(e.name for e in ENGINES.values() if e.takes_num_blocks)
            raise UserError(f"engine {self.engine} takes no num-gpu-blocks-override", hint=f"Engines that do: {known}")

    def _check_own(self) -> None:
        """Settings that one engine alone has: that it is this one, and their values."""
        rules, default = self.rules, EngineSettings()
        for engine in ENGINES.values():
            for name in engine.takes:
                if engine is not rules and getattr(self, name) != getattr(default, name):
                    raise UserError(f"engine {self.engine} takes no {spelled(name)}", hint=f"Engines that do: {engine.name}")
        for name in ("max_loras", "limit_mm_per_prompt", "engram_config"):
            if getattr(self, name) and name not in rules.counts:
                known = ", ".join(e.name for e in ENGINES.values() if name in e.counts)
                raise UserError(f"engine {self.engine} counts no {spelled(name)}", hint=f"Engines that do: {known}")
        for asked in filter(None, (self.cache_type_k, self.cache_type_v)):
            if canonical(asked) not in (rules.dtypes or ()):
                hint = f"It has: {', '.join(rules.dtypes or ())}"
                raise UserError(f"{rules.name} has no cache dtype {asked!r}", hint=hint)
        _whole("n_gpu_layers", self.n_gpu_layers, -1, 1 << 20)
        _whole("n_cpu_moe", self.n_cpu_moe, most=1 << 20)
        if self.n_gpu_layers >= 0 and self.kv_offloading_bytes:
            raise UserError("kv-offloading-bytes beside n-gpu-layers is not modelled")

    def cache_label(self, used: str) -> str:
        """The cache's dtype, `used` where nothing else is said: that of keys and that of values where they differ."""
        return " + ".join(dict.fromkeys(canonical(t) or used for t in (self.cache_type_k, self.cache_type_v)))

    @property
    def rules(self) -> Engine:
        """The engine of that name."""
        return ENGINES[self.engine]

    @property
    def end(self) -> str:
        """The end of the range that answers: the middle where the engine's terms have none."""
        asked = self.budget or ("low" if self.require else "middle")
        return asked if self.rules.ranged else "middle"

    @property
    def wanted(self) -> int:
        """Sequences that have to fit, of the whole replica."""
        return max(self.users or self.max_num_seqs or 1, self.require)

    def longest(self, model: Model) -> int:
        """Tokens of the longest sequence: as asked, or the model's own."""
        return self.max_model_len or model.max_context or 4096

    @property
    def given(self) -> bool:
        """Whether the cache's size is given, which leaves the weights unchecked."""
        return bool(self.kv_cache_memory_bytes or self.num_gpu_blocks_override)

    @property
    def images(self) -> int | None:
        """Images that a prompt may have, videos counted as one kind of them; None where nothing is said."""
        return limit_of_images(self.limit_mm_per_prompt)

    @property
    def tables_on_host(self) -> bool:
        """Whether tables of n-grams stay in the host's memory, as vLLM has it unless engram_config says otherwise."""
        return offloads_tables(self.engram_config)

    @property
    def state_dtype(self) -> str:
        """mamba_ssm_cache_dtype in kvcalc's spelling; '' where the choice is left."""
        asked = canonical(self.mamba_ssm_cache_dtype)
        return "" if asked == "auto" else asked


def options_for(deployment: Deployment, **given: Any) -> FitOptions:
    """Return options of `fit` with the deployment's engine and version. Raises UserError as FitOptions."""
    return FitOptions(engine=deployment.engine, engine_version=deployment.engine_version, **given)


def limit_of_images(text: str) -> int | None:
    """The limit of `{"image": 2, "video": {"count": 0}}` or `image=2,video=0`, the greater of the two.

    Raises UserError on another text.
    """
    if not text.strip():
        return None
    try:
        if text.lstrip().startswith("{"):
            given = msgspec.json.decode(text, type=dict[str, int | Items])
            limits = {name: each if isinstance(each, int) else each.count for name, each in given.items()}
        else:
            limits = {name.strip(): int(count) for name, count in (word.split("=") for word in text.split(","))}
    except (msgspec.MsgspecError, ValueError):
        raise UserError(f"limit-mm-per-prompt {text!r} is not a limit", hint='Give one like image=2 or {"image": 2}') from None
    if any(count < 0 for count in limits.values()):
        raise UserError(f"limit-mm-per-prompt {text!r} is below 0")
    if unknown := next((name for name in limits if name not in MODALITIES), ""):
        raise UserError(f"limit-mm-per-prompt: unknown modality {unknown!r}", hint=nearest(unknown, MODALITIES))
    return max((limits[name] for name in ("image", "video") if name in limits), default=None)


class Engram(msgspec.Struct, frozen=True):
    """vLLM's settings of tables of n-grams that move bytes; its others are passed over."""

    cpu_offload: bool = True


def offloads_tables(text: str) -> bool:
    """What `{"cpu_offload": false}` says; true where nothing is said. Raises UserError on another text."""
    try:
        return msgspec.json.decode(text, type=Engram).cpu_offload if text.strip() else True
    except msgspec.MsgspecError:
        raise UserError(f"engram-config {text!r} is not a mapping in JSON", hint='Give one like {"cpu_offload": false}') from None


def _whole(name: str, value: Any, least: int = 0, most: int = MOST_TOKENS) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UserError(f"{spelled(name)} {value!r} is not a whole number from {least} to {most:,}")
