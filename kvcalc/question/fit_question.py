"""The question of `fit`: the request, the engine's settings and its memory."""

from functools import partial
from typing import Annotated

from kvcalc.question.deployment_options import (
    CONTEXT_WORDS,
    DRAFT_WORDS,
    MAX_OFFLOAD_GIB,
    OFFLOAD_WORDS,
    PREFIX_WORDS,
    PROMPT_WORDS,
    USER_WORDS,
    Engine,
    EngineVersion,
)
from kvcalc.question.options import (
    Option,
    Question,
    bytes_or_none,
    host_bytes,
    memory_share,
    tokens_or_none,
    whole_number,
)
from kvcalc.units import MAX_TOKENS, parse_rate, parse_tokens

MAX_BYTES = 1 << 60
MAX_SETTING = 1 << 20  # blocks, batches, adapters and layers
STATE_DTYPES = ("auto", "fp32", "bf16", "fp16")
ESTIMATES = ("low", "middle", "high")
UTILIZATION_BASES = ("total", "free", "remaining")

_engine = partial(Option, panel="Engine")
_memory = partial(Option, panel="Memory")
_override = partial(Option, panel="Overrides", takes="SIZE", read=bytes_or_none, max=MAX_BYTES)


class EngineSettings(Question, frozen=True):
    """Options of engines.

    Attributes:
        block_size: Tokens of a block; 0 for the engine's own.
        max_num_batched_tokens: Tokens of one pass (llama.cpp: its micro-batch).
        max_in_flight_batches: Passes that are scheduled before the first is done.
        num_speculative_tokens: Draft tokens per pass that verifies them.
        mamba_cache_mode: "none", or "align": prefix caching stores a second state page, and
            `mamba_checkpoint_blocks` more.
        mamba_ssm_cache_dtype: "" for the choice of model and engine.
        hybrid: Whether windows free tokens that leave them.
        page_tuples: Whether pages of compressed attention are in tuples of all sizes, and not
            packed.
        kv_unified: Whether llama.cpp's sequences share one cache.
        swa_full: Whether llama.cpp's layers with a window store the whole context.
        cache_type_k, cache_type_v: llama.cpp's cache dtypes of keys and values; "" for the dtype of
            the cache.
        n_gpu_layers: Layers that llama.cpp puts on the GPU: the head first, then the last ones; -1
            for all.
        n_cpu_moe, cpu_moe: First layers whose experts stay in host memory, or all of them.
    """

    block_size: Annotated[
        int, _memory("Tokens per KV cache block; 0: the engine's default", max=MAX_SETTING)
    ] = 0
    max_num_batched_tokens: int = 8192
    max_in_flight_batches: int = 2
    num_speculative_tokens: int = 0
    mamba_cache_mode: Annotated[
        str,
        _memory("Pages per recurrent state: none (1) or align (2)", choices=("none", "align")),
    ] = "none"
    mamba_checkpoint_blocks: Annotated[
        int,
        _memory("Extra state pages per sequence for checkpoints, with align", max=MAX_SETTING),
    ] = 0
    mamba_ssm_cache_dtype: Annotated[
        str,
        Option(
            "Data type of recurrent states: auto, fp32, bf16 or fp16",
            takes="DTYPE",
            panel="Data types",
            words=STATE_DTYPES,
        ),
    ] = ""
    hybrid: Annotated[
        bool,
        _memory(
            "Allocate sliding-window layers like full attention",
            "/--disable-hybrid-kv-cache-manager",
        ),
    ] = True
    page_tuples: bool = False
    kv_unified: Annotated[
        bool,
        _memory(
            "llama.cpp: one KV cache for all sequences, or one each",
            "--kv-unified/--no-kv-unified -kvu/-no-kvu",
        ),
    ] = False
    swa_full: Annotated[
        bool, _memory("llama.cpp: sliding-window layers store the whole context")
    ] = False
    cache_type_k: Annotated[
        str,
        Option(
            "llama.cpp: data type of cached keys: f16, bf16, f32, q8_0, iq4_nl",
            "--cache-type-k -ctk",
            "TYPE",
            "Data types",
        ),
    ] = ""
    cache_type_v: Annotated[
        str,
        Option(
            "llama.cpp: data type of cached values: f16, bf16, f32, q8_0, iq4_nl",
            "--cache-type-v -ctv",
            "TYPE",
            "Data types",
        ),
    ] = ""
    n_gpu_layers: Annotated[
        int,
        _memory(
            "llama.cpp: layers on the GPU, output layer included; -1: all",
            "--n-gpu-layers -ngl",
            min=-1,
            max=MAX_SETTING,
        ),
    ] = -1
    n_cpu_moe: Annotated[
        int,
        _memory(
            "llama.cpp: first N layers keep their experts on CPU",
            "--n-cpu-moe -ncmoe",
            max=MAX_SETTING,
        ),
    ] = 0
    cpu_moe: Annotated[
        bool, _memory("llama.cpp: all experts on the CPU", "--cpu-moe -cmoe")
    ] = False

    @property
    def in_flight(self) -> int:
        """Tokens scheduled and not yet done: max_num_batched_tokens · max_in_flight_batches."""
        return self.max_num_batched_tokens * self.max_in_flight_batches


class FitQuestion(EngineSettings, frozen=True):
    """Options of `fit`, with the settings of engines.

    0, "" and None leave a choice to the engine or the model.

    Attributes:
        max_model_len: Tokens of each sequence.
        max_num_seqs: Sequences of the whole replica that the engine is set up for. None means the
            engine's default, and that one sequence must fit.
        require: Sequences that must fit, if this is more.
        users: Sequences that must fit, instead of `max_num_seqs`.
        max_loras: Slots for adapters of `max_lora_rank`.
        limit_mm_per_prompt: Items of each modality, as `image=0` or in JSON.
        engram_config: `{"cpu_offload": false}` stores tables of n-grams on the GPU.
        budget: End of the range that answers. "" is the low end if `require` is set, else the
            middle.
        utilization_of: Memory that the share refers to: total, free after context and
            collectives, or remaining after all other memory terms.
        weight_bytes, activation_bytes, overhead_bytes: Replace the three terms.
        kv_offloading_bytes: Host memory for the cache, per GPU.
        disk_bandwidth: Bytes per second to read weights; 0 if unknown.
    """

    engine: Engine = "vllm"
    engine_version: EngineVersion = ""
    max_model_len: Annotated[
        int,
        Option(
            "Tokens per sequence; default: the longest that fits",
            "--max-model-len --context",
            "TOKENS",
            is_common=True,
            called=CONTEXT_WORDS + " " + PROMPT_WORDS,
            read=parse_tokens,
            list_order=1,
            max=MAX_TOKENS,
        ),
    ] = 0
    max_num_seqs: Annotated[
        int | None,
        Option(
            "Concurrent sequences of the whole replica; a list",
            is_common=True,
            called=USER_WORDS,
            read=whole_number,
            list_order=2,
            min=1,
            max=MAX_TOKENS,
        ),
    ] = None
    require: Annotated[
        int,
        Option(
            "Exit with 1 unless N sequences fit with certainty", is_common=True, max=MAX_TOKENS
        ),
    ] = 0
    users: Annotated[
        int,
        Option(
            "Concurrent users that must fit, also above --max-num-seqs",
            panel="Workload",
            max=MAX_TOKENS,
        ),
    ] = 0
    from_log: Annotated[
        str, _memory("Measured overheads that `diagnose --save` wrote", takes="FILE")
    ] = ""
    budget: Annotated[
        str,
        _memory("Memory estimate that decides: low, middle or high", choices=ESTIMATES),
    ] = ""
    enforce_eager: Annotated[
        bool, _engine("Run without CUDA graphs and compilation, as in vLLM")
    ] = False
    max_loras: Annotated[
        int, _engine("Number of LoRA adapters in one batch", max=MAX_SETTING)
    ] = 0
    max_lora_rank: Annotated[
        int, _engine("Largest rank of a LoRA adapter", min=1, max=MAX_SETTING)
    ] = 16
    limit_mm_per_prompt: Annotated[
        str,
        _engine("Inputs per prompt; image=0 does not load the vision tower", takes="LIMITS"),
    ] = ""
    engram_config: Annotated[
        str,
        _engine('N-gram tables; {"cpu_offload": false} puts them on the GPU', takes="JSON"),
    ] = ""
    gpu_memory_utilization: Annotated[
        float,
        _memory("Share of GPU memory for the engine; default: the engine's", read=memory_share),
    ] = 0.0
    utilization_of: Annotated[
        str,
        _memory(
            "Memory that --gpu-memory-utilization is a share of: total or free",
            choices=UTILIZATION_BASES,
        ),
    ] = ""
    max_num_batched_tokens: Annotated[
        int,
        _engine(
            "Tokens of one forward pass; default: the engine's",
            takes="TOKENS",
            read=parse_tokens,
            max=MAX_TOKENS,
        ),
    ] = 0
    max_in_flight_batches: Annotated[
        int,
        _engine("Batches in flight with pipeline parallelism; 0: default", max=MAX_SETTING),
    ] = 0
    num_speculative_tokens: Annotated[
        int,
        Option(
            "Draft tokens per step; 0: none, or 1 with --draft",
            panel="Speculative decoding",
            max=1024,
        ),
    ] = 0
    kv_cache_memory_bytes: Annotated[
        int | None,
        Option(
            "KV cache memory per GPU, 40GiB; skips the check of the weights",
            takes="SIZE",
            panel="Overrides",
            read=bytes_or_none,
            min=1,
            max=MAX_BYTES,
        ),
    ] = None
    num_gpu_blocks_override: Annotated[
        int,
        Option("Number of KV cache blocks, as in vLLM", panel="Overrides", max=MAX_TOKENS),
    ] = 0
    weight_bytes: Annotated[
        int | None, _override("Weights per GPU instead of the computed size: 40GiB")
    ] = None
    activation_bytes: Annotated[
        int | None, _override("Activation peak per GPU instead of the estimate: 4GiB")
    ] = None
    overhead_bytes: Annotated[
        int | None, _override("CUDA context, graphs and NCCL per GPU instead of the estimate")
    ] = None
    shared_prefix: Annotated[
        int,
        Option(
            "Leading tokens that all sequences share in the cache",
            takes="TOKENS",
            panel="Workload",
            called=PREFIX_WORDS,
            read=tokens_or_none,
            max=MAX_TOKENS,
        ),
    ] = 0
    mtp: Annotated[
        bool,
        Option("Load the multi-token prediction layers", panel="Speculative decoding"),
    ] = False
    draft: Annotated[
        str,
        Option(
            "Draft model for speculative decoding",
            takes="MODEL",
            panel="Speculative decoding",
            words="models",
            called=DRAFT_WORDS,
        ),
    ] = ""
    cpu_offload_gb: Annotated[
        float,
        _memory(
            "GiB of weights per GPU in CPU memory", called=OFFLOAD_WORDS, max=MAX_OFFLOAD_GIB
        ),
    ] = 0.0
    disk_bandwidth: Annotated[
        int,
        _engine(
            "Disk bandwidth, for the time to load weights: 7GB/s",
            takes="RATE",
            read=parse_rate,
        ),
    ] = 0
    kv_offloading_bytes: Annotated[
        int,
        _memory(
            "CPU memory per GPU for KV cache: 40GiB",
            takes="SIZE",
            called=OFFLOAD_WORDS,
            read=host_bytes,
            max=MAX_BYTES,
        ),
    ] = 0


class StudyOptions(Question, frozen=True):
    """Lengths of requests, for the waste of allocation."""

    lengths: Annotated[
        str,
        Option(
            "Memory waste for lengths from a file or lognormal:MEAN,P99",
            takes="FILE",
            panel="Allocator studies",
        ),
    ] = ""
    seed: Annotated[
        int,
        Option(
            "Seed of random lengths and of the simulated allocator", panel="Allocator studies"
        ),
    ] = 0
