"""The question of `fit`: the request, the engine's settings and its memory."""

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from kvcalc.question.deployment_options import EngineName
from kvcalc.question.options import (
    MemoryShare,
    OptionalBytes,
    OptionalTokens,
    Question,
    Tokens,
    host_bytes,
)
from kvcalc.records import Settings
from kvcalc.units import parse_rate

STATE_DTYPES = ("auto", "fp32", "bf16", "fp16")


class EngineSettings(Question, frozen=True):
    """The settings of an engine that affect its memory.

    Attributes:
        block_size: Tokens of a KV cache block; 0 for the engine's own.
        max_num_batched_tokens: Maximum tokens of one forward pass of a data-parallel rank
            (llama.cpp: of its micro-batch).
        max_in_flight_batches: Number of passes that are scheduled before the first of them is done.
        num_speculative_tokens: Draft tokens of a sequence per pass that verifies them; 0 without a
            draft.
        mamba_cache_mode: "none" or "align". With "align", prefix caching stores a second page of
            the recurrent state per sequence, and `mamba_checkpoint_blocks` further pages.
        mamba_checkpoint_blocks: Number of further pages of the recurrent state per sequence with
            "align".
        mamba_ssm_cache_dtype: Data type of recurrent states; "" for the choice of model and engine.
        hybrid: Whether layers with windows free the memory of tokens outside the window.
        kv_unified: Whether llama.cpp's sequences share one cache.
        swa_full: Whether llama.cpp's layers with a window store the whole context.
        cache_type_k, cache_type_v: llama.cpp's cache dtypes of keys and values; "" for the dtype of
            the cache.
        n_gpu_layers: Layers that llama.cpp puts on the GPU: first the LM head, then the last
            layers; -1 for all.
        n_cpu_moe: Number of layers, from the first on, whose experts stay in host memory.
        cpu_moe: Whether the experts of all layers stay in host memory.
        flash_attn: "on", "off", or "auto" for flash attention wherever llama.cpp supports it, which
            is counted like "on".
        idle_slots: Slots of llama-server that share the cells of the requested sequences.
    """

    block_size: int = 0
    max_num_batched_tokens: int = 8192
    max_in_flight_batches: int = 2
    num_speculative_tokens: int = 0
    mamba_cache_mode: str = "none"
    mamba_checkpoint_blocks: int = 0
    mamba_ssm_cache_dtype: str = ""
    hybrid: bool = True
    kv_unified: bool = False
    swa_full: bool = False
    cache_type_k: str = ""
    cache_type_v: str = ""
    n_gpu_layers: int = -1
    n_cpu_moe: int = 0
    cpu_moe: bool = False
    flash_attn: str = "auto"
    idle_slots: int = 0

    @property
    def in_flight(self) -> int:
        """Return the maximum tokens of all forward passes that are scheduled but not done.

        Layers with a sliding window reserve cache for these tokens. The number is
        max_num_batched_tokens · max_in_flight_batches.
        """
        return self.max_num_batched_tokens * self.max_in_flight_batches


class FitQuestion(EngineSettings, frozen=True):
    """The options of `fit`: the requested sequences, the engine and its settings.

    0, "" and None mean that nothing is given: the engine, the model or kvcalc then chooses. For
    amounts that are added, such as `memory_in_use` and `kv_offloading_bytes`, 0 means none.

    Attributes:
        engine, engine_version: Engine, and its version; "" for the latest.
        max_model_len: Tokens of each sequence; 0 for the model's maximum.
        max_num_seqs: Sequences of the whole replica for which the engine is set up, and which must
            fit. None means the engine's default; then one sequence must fit.
        require: Sequences of the whole replica that must fit even in the cautious (low) estimate.
            It counts if it is more than `users` or `max_num_seqs`.
        users: Sequences of the whole replica that must fit, instead of `max_num_seqs`.
        from_log: File of memory corrections that `diagnose --save` wrote.
        budget: Estimate of the KV cache budget that decides what fits: low (cautious), middle or
            high. "" is low if `require` is set, else middle. Without `max_model_len`, `fit` also
            uses low if no sequence of the model's maximum length fits in the low estimate.
        enforce_eager: Whether the engine runs without CUDA graphs and compilation.
        max_loras: Slots for LoRA adapters.
        max_lora_rank: Largest rank of an adapter, for which each slot is reserved.
        limit_mm_per_prompt: Maximum images and videos in a prompt, as `image=0` or in JSON.
        gpu_memory_utilization: Share of the GPU memory for the engine, above 0 and at most 1.
        utilization_of: Memory that `gpu_memory_utilization` refers to: total, free after context
            and collectives, or remaining after all other parts of memory.
        max_num_batched_tokens: Maximum tokens of one forward pass of a data-parallel rank
            (llama.cpp: of its micro-batch).
        max_in_flight_batches: Number of passes that are scheduled before the first of them is done.
        kv_cache_memory_bytes: Bytes of the cache per GPU, instead of the computed budget.
        num_gpu_blocks_override: Number of KV cache blocks per GPU, instead of the computed number.
        memory_in_use: Bytes of each GPU that other processes use.
        weight_bytes, activation_bytes, overhead_bytes: Bytes per GPU that replace the computed
            weights, activations and overhead.
        shared_prefix: Leading tokens that all sequences share in the cache.
        mtp: Whether the multi-token prediction layers are loaded.
        draft: Name of a draft model.
        cpu_offload_gb: GiB of each GPU's weights in CPU memory.
        disk_bandwidth: Bytes per second at which weights are read from disk, for the loading time;
            0 leaves out this time.
        kv_offloading_bytes: Bytes of host memory for more KV cache, per GPU.
    """

    engine: EngineName = "vllm"
    engine_version: str = ""
    max_model_len: Tokens = 0
    max_num_seqs: int | None = None
    require: int = 0
    users: int = 0
    from_log: str = ""
    budget: str = ""
    enforce_eager: bool = False
    max_loras: int = 0
    max_lora_rank: int = 16
    limit_mm_per_prompt: str = ""
    gpu_memory_utilization: MemoryShare = 0.0
    utilization_of: str = ""
    max_num_batched_tokens: Tokens = 0
    max_in_flight_batches: int = 0
    kv_cache_memory_bytes: OptionalBytes = None
    num_gpu_blocks_override: int = 0
    memory_in_use: Annotated[int, host_bytes] = 0
    weight_bytes: OptionalBytes = None
    activation_bytes: OptionalBytes = None
    overhead_bytes: OptionalBytes = None
    shared_prefix: OptionalTokens = 0
    mtp: bool = False
    draft: str = ""
    cpu_offload_gb: float = 0.0
    disk_bandwidth: Annotated[int, parse_rate] = 0
    kv_offloading_bytes: Annotated[int, host_bytes] = 0


class StudyOptions(Question, frozen=True):
    """Lengths of example requests, for which `fit` computes the waste of memory allocators.

    Attributes:
        lengths: Tokens of each request, as a list such as `5,3,4`, a file, or a distribution such
            as `lognormal:MEAN,P99`; '' for no study.
        seed: Seed of random lengths and of the simulated allocator.
    """

    lengths: str = ""
    seed: int = 0


class TypedWords(NamedTuple):
    """The words of a `fit` request as the user typed them. Suggested commands repeat them.

    Attributes:
        names: Name of a model or GPU → the word that the user typed for it. Example:
            "h100-sxm" → "h100".
        extra_words: Words of options that no engine's command line has, such as `--memory 36GiB`.
        has_all_experts: Whether the request has `--enable-expert-parallel`. Suggested changes to
            more GPUs then do not add `--ep`.
        stated: Options that an engine's command line states, by their names in `fit`; empty if the
            request has no engine's command line.
        notes: Notes for the user about the engine's command line, such as flags that are ignored.
        flags: Flags of the engine's command line that are not counted; "" for none. Suggested
            command lines end with them.
    """

    names: Mapping[str, str] = {}
    extra_words: tuple[str, ...] = ()
    has_all_experts: bool = False
    stated: Settings = {}
    notes: Sequence[str] = ()
    flags: str = ""
