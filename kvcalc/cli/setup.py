"""Options of a model whose dimensions are typed, and options of `fit` about the engine."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Annotated

import msgspec

from kvcalc.cli import options as o
from kvcalc.cli.option_groups import EngineOption
from kvcalc.cli.options import Option, OptionGroup
from kvcalc.errors import UserError
from kvcalc.library.choices import from_words, listed, spelled

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from kvcalc.capacity import FitOptions
    from kvcalc.library.load import Dimensions

_dimension = partial(Option, panel="Model dimensions")


class DimensionOptions(OptionGroup, frozen=True):
    """Dimensions of equal layers, named as in `Dimensions`. 0 means that none is typed."""

    layers: Annotated[
        int,
        _dimension(
            "Number of layers with their own KV cache, without a model",
            called="num-layers n-layers num-hidden-layers hidden-layers",
        ),
    ] = 0
    kv_heads: Annotated[
        int,
        _dimension("KV heads per layer", called="num-key-value-heads n-kv-heads num-kv-heads"),
    ] = 0
    head_dim: Annotated[int, _dimension("Width of one key or value")] = 0
    hidden_size: Annotated[
        int, _dimension("Width of the model, for MHA without --kv-heads and --head-dim")
    ] = 0
    heads: Annotated[
        int,
        _dimension(
            "Query heads, to compare the cache with MHA",
            called="num-attention-heads n-heads num-heads",
        ),
    ] = 0
    sliding_window: Annotated[
        str, _dimension("Tokens of the sliding window", takes="TOKENS")
    ] = ""
    kv_lora_rank: Annotated[
        int, _dimension("Width of MLA's compressed KV, instead of KV heads")
    ] = 0
    qk_rope_head_dim: Annotated[int, _dimension("Width of MLA's RoPE key")] = 0

    def dimensions(self) -> "Dimensions":
        from kvcalc.library.load import Dimensions
        from kvcalc.units import parse_tokens

        window = (
            parse_tokens(self.sliding_window, "--sliding-window") if self.sliding_window else 0
        )
        return Dimensions(**msgspec.structs.asdict(self) | {"sliding_window": window})


def alone(
    models: Sequence[str], dimensions: "Dimensions", changes: Sequence[str]
) -> "Dimensions | None":
    """Return the dimensions if no model is named, and None if one is.

    Raises:
        UserError: There are both or neither.
    """
    if dimensions.has_values() and (models or changes):
        change = f"layers={dimensions.layers}" if dimensions.layers else "KEY=VALUE"
        raise UserError(
            "dimensions cannot be combined with a model or --set",
            hint=f"Change a model with --set {change}",
        )
    if not (models or dimensions.has_values()):
        raise UserError(
            "no model is named",
            hint="Name one (`kvcalc models` lists them), or give --layers, --kv-heads and "
            "--head-dim",
        )
    return dimensions if dimensions.has_values() else None


LISTS = ("engine", "max_num_seqs", "max_model_len")
_engine = partial(Option, panel="Engine")
_memory = partial(Option, panel="Memory")
_override = partial(Option, panel="Overrides")


class EngineOptions(EngineOption, frozen=True):
    """Options named as in `FitOptions`. Those in LISTS are lists."""

    max_model_len: Annotated[
        str,
        Option(
            "Tokens per sequence; default: the longest that fits",
            "--max-model-len --context",
            "TOKENS",
            is_common=True,
            called=o.CONTEXT_WORDS + " " + o.PROMPT_WORDS,
        ),
    ] = ""
    max_num_seqs: Annotated[
        str,
        Option(
            "Concurrent sequences of the whole replica; a list",
            takes="N",
            is_common=True,
            called=o.USER_WORDS,
        ),
    ] = ""
    require: Annotated[
        int,
        Option("Exit with 1 unless N sequences fit with certainty", is_common=True),
    ] = 0
    users: Annotated[
        int,
        Option(
            "Concurrent users that must fit, also above --max-num-seqs",
            panel="Workload",
        ),
    ] = 0
    from_log: Annotated[
        str, _memory("Measured overheads that `diagnose --save` wrote", takes="FILE")
    ] = ""
    budget: Annotated[
        str,
        _memory(
            "Memory estimate that decides: low, middle or high",
            words=("low", "middle", "high"),
        ),
    ] = ""
    enforce_eager: Annotated[
        bool, _engine("Run without CUDA graphs and compilation, as in vLLM")
    ] = False
    max_loras: Annotated[int, _engine("Number of LoRA adapters in one batch")] = 0
    max_lora_rank: Annotated[int, _engine("Largest rank of a LoRA adapter")] = 16
    limit_mm_per_prompt: Annotated[
        str,
        _engine("Inputs per prompt; image=0 does not load the vision tower", takes="LIMITS"),
    ] = ""
    engram_config: Annotated[
        str,
        _engine('N-gram tables; {"cpu_offload": false} puts them on the GPU', takes="JSON"),
    ] = ""
    gpu_memory_utilization: Annotated[
        float | None,
        _memory("Share of GPU memory for the engine; default: the engine's"),
    ] = None
    utilization_of: Annotated[
        str,
        _memory(
            "Memory that --gpu-memory-utilization is a share of: total or free",
            words=("total", "free"),
        ),
    ] = ""
    max_num_batched_tokens: Annotated[
        str,
        _engine("Tokens of one forward pass; default: the engine's", takes="TOKENS"),
    ] = ""
    max_in_flight_batches: Annotated[
        int, _engine("Batches in flight with pipeline parallelism; 0: default")
    ] = 0
    num_speculative_tokens: Annotated[
        int,
        Option(
            "Draft tokens per step; 0: none, or 1 with --draft",
            panel="Speculative decoding",
        ),
    ] = 0
    block_size: Annotated[
        int, _memory("Tokens per KV cache block; 0: the engine's default")
    ] = 0
    mamba_cache_mode: Annotated[
        str,
        _memory("Pages per recurrent state: none (1) or align (2)", words=("none", "align")),
    ] = "none"
    mamba_checkpoint_blocks: Annotated[
        int, _memory("Extra state pages per sequence for checkpoints, with align")
    ] = 0
    mamba_ssm_cache_dtype: Annotated[
        str,
        Option(
            "Data type of recurrent states: auto, fp32, bf16 or fp16",
            takes="DTYPE",
            panel="Data types",
            words=("auto", "fp32", "bf16", "fp16"),
        ),
    ] = "auto"
    disable_hybrid: Annotated[
        bool,
        _memory(
            "Allocate sliding-window layers like full attention",
            "--disable-hybrid-kv-cache-manager",
        ),
    ] = False
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
        ),
    ] = -1
    n_cpu_moe: Annotated[
        int,
        _memory("llama.cpp: first N layers keep their experts on CPU", "--n-cpu-moe -ncmoe"),
    ] = 0
    cpu_moe: Annotated[
        bool, _memory("llama.cpp: all experts on the CPU", "--cpu-moe -cmoe")
    ] = False
    kv_cache_memory_bytes: Annotated[
        str,
        _override(
            "KV cache memory per GPU, 40GiB; skips the check of the weights",
            takes="SIZE",
        ),
    ] = ""
    num_gpu_blocks_override: Annotated[
        int, _override("Number of KV cache blocks, as in vLLM")
    ] = 0
    weight_bytes: Annotated[
        str,
        _override("Weights per GPU instead of the computed size: 40GiB", takes="SIZE"),
    ] = ""
    activation_bytes: Annotated[
        str,
        _override("Activation peak per GPU instead of the estimate: 4GiB", takes="SIZE"),
    ] = ""
    overhead_bytes: Annotated[
        str,
        _override(
            "CUDA context, graphs and NCCL per GPU instead of the estimate",
            takes="SIZE",
        ),
    ] = ""
    shared_prefix: Annotated[
        str,
        Option(
            "Leading tokens that all sequences share in the cache",
            takes="TOKENS",
            panel="Workload",
            called=o.PREFIX_WORDS,
        ),
    ] = "0"
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
            words=o.model_names,
            called=o.DRAFT_WORDS,
        ),
    ] = ""
    cpu_offload_gb: Annotated[
        float, _memory("GiB of weights per GPU in CPU memory", called=o.OFFLOAD_WORDS)
    ] = 0.0
    disk_bandwidth: Annotated[
        str,
        _engine("Disk bandwidth, for the time to load weights: 7GB/s", takes="RATE"),
    ] = ""
    kv_offloading_bytes: Annotated[
        str,
        _memory(
            "CPU memory per GPU for KV cache: 40GiB",
            takes="SIZE",
            called=o.OFFLOAD_WORDS,
        ),
    ] = ""

    def options(self, told: "Mapping[str, Any]") -> "list[FitOptions]":
        """Return every combination of the lists.

        Args:
            told: Options from an engine's command line. Options that are typed here replace them.
        """
        from kvcalc.capacity import FitOptions
        from kvcalc.capacity.memory_budget import read_learned

        if self.require < 0:
            raise UserError(f"--require {self.require} is not a number of sequences")
        defaults = msgspec.structs.asdict(EngineOptions())
        typed = {
            name: value
            for name, value in msgspec.structs.asdict(self).items()
            if value != defaults[name]
        }
        values = dict(told)
        if self.from_log and "engine" not in {*typed, *told}:
            values["engine"] = read_learned(self.from_log).engine
        if "max_num_seqs" in typed:
            values.pop("users", None)
        values |= typed
        if self.disable_hybrid:
            values["hybrid"] = False
        lists = [listed(str(values.get(name, defaults[name])), spelled(name)) for name in LISTS]
        return [
            from_words(FitOptions, values | dict(zip(LISTS, point, strict=True)))
            for point in product(*lists)
        ]
