"""vLLM by version: what changed in the memory that its profile of a start-up counts, and in its defaults.

Each row was read in that release's own source; files are named beside the field. A release between two rows keeps the older.
"""

from typing import NamedTuple

from kvcalc.capacity.engines.engine import Defaults
from kvcalc.capacity.engines.versions import nearest_older
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.formats import Formats
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.precision import PUBLISHED, formats_of
from kvcalc.model.spec import Model

GIB = 1 << 30
V1_BY_DEFAULT, V1_FOR_ALL = (0, 8, 1), (0, 10, 2)
BELOW_8 = ("Volta", "Turing")  # architectures of a compute capability below 8.0
LONG, IMAGES_OF_V0, V0_SEQUENCES = 32_768, 5120, 256
Version = tuple[int, ...]


class Release(NamedTuple):
    """Rules from version `since` on.

    utilization: --gpu-memory-utilization (config/cache.py). sampler: of the first runner's dummy sample; `sort`: logits
    sorted in fp32; `flashinfer`: that too, but for its kernels where they are installed; `kernels`: Triton's or FlashInfer's,
    which need no sort (v1/sample/ops/topk_topp_sampler.py). combo_kernels: a first start compiles and times fused kernels
    (torch 2.9, 0.11.1).
    graphs_v1, graphs_v2: the estimate of CUDA graphs is subtracted, by runner (v1/worker/gpu_worker.py).
    counts_consumed: whatever left free memory is counted, not torch's peak alone (utils/mem_utils.py). runner_v2: models
    that the second runner takes by default (config/vllm.py: use_v2_model_runner). sampler_v2: bytes per request and entry of
    the vocabulary in its dummy sample (v1/worker/gpu/model_runner.py). small_a100, small_gb10, large_batch, by_name: defaults by
    GPU (engine/arg_utils.py: get_batch_defaults, before it _set_default_args_v1); few_sequences: of a small one; chunk: of a
    long prompt under V0 (config.py: SchedulerConfig). page_tuples: of compressed pages, settings in `engine`. in_flight: windows
    reserve for every pass in flight, before it for one (config/vllm.py: max_in_flight_tokens).
    """

    since: Version
    utilization: float = 0.9
    sampler: str = "sort"
    combo_kernels: bool = False
    graphs_v1: bool = False
    graphs_v2: bool = False
    counts_consumed: bool = False
    runner_v2: str = ""
    sampler_v2: int = 6
    small_a100: bool = True
    small_gb10: bool = False
    large_batch: bool = False
    by_name: bool = False
    few_sequences: int = 256
    chunk: int = 2048
    page_tuples: bool = True
    in_flight: bool = False


_V0 = Release((0, 6, 3), chunk=512)
_NAMED = Release((0, 8, 1), small_a100=False, by_name=True, few_sequences=1024)
_TORCH29 = Release((0, 11, 1), combo_kernels=True)
_KERNELS = _TORCH29._replace(since=(0, 17, 1), sampler="kernels")
_GRAPHS = _KERNELS._replace(since=(0, 20, 0), utilization=0.92, graphs_v1=True)
_PACKED = _GRAPHS._replace(since=(0, 24, 0), runner_v2="listed", page_tuples=False)
_CONSUMED = _PACKED._replace(since=(0, 27, 0), counts_consumed=True, runner_v2="dense", in_flight=True)
_ALL = _CONSUMED._replace(since=(0, 29, 0), graphs_v2=True, runner_v2="all", sampler_v2=2, large_batch=True)
RELEASES = (
    _V0, _V0._replace(since=(0, 6, 4)), *(Release(v) for v in ((0, 6, 5), (0, 6, 6), (0, 7, 1), (0, 7, 3))),
    *(_NAMED._replace(since=v) for v in ((0, 8, 1), (0, 8, 2), (0, 8, 3))), _NAMED._replace(since=(0, 8, 4), few_sequences=256),
    Release((0, 8, 5), small_a100=False), Release((0, 9, 1), sampler="flashinfer"),
    *(Release(v, sampler="flashinfer") for v in ((0, 9, 2), (0, 10, 0), (0, 10, 1), (0, 10, 2), (0, 11, 0))),
    *(_TORCH29._replace(since=v) for v in ((0, 11, 1), (0, 11, 2), (0, 12, 0), (0, 13, 0), (0, 14, 1), (0, 16, 0))),
    *(_KERNELS._replace(since=v) for v in ((0, 17, 1), (0, 18, 1), (0, 19, 1))),
    _GRAPHS, _GRAPHS._replace(since=(0, 21, 0)), _GRAPHS._replace(since=(0, 22, 0), runner_v2="qwen3"),
    _GRAPHS._replace(since=(0, 23, 0), runner_v2="plain"),
    _PACKED, _PACKED._replace(since=(0, 25, 1), runner_v2="dense"),
    _CONSUMED._replace(since=(0, 26, 0), counts_consumed=False),
    _CONSUMED, _CONSUMED._replace(since=(0, 27, 1)), _CONSUMED._replace(since=(0, 28, 0), sampler_v2=2, large_batch=True),
    *(_ALL._replace(since=v) for v in ((0, 29, 0), (0, 30, 0), (0, 31, 0), (0, 32, 0))),
    _ALL._replace(since=(0, 33, 0), sampler_v2=14, small_gb10=True),
)  # fmt: skip
LATEST = RELEASES[-1]


def release(text: str) -> tuple[Release, str]:
    """The rules of a version, and a remark where they are another's. Raises UserError for what is no version."""
    return nearest_older("vLLM", RELEASES, text)


def defaults(gpu: Gpu, ranks: Parallelism, rules: Release, tokens: int, model: Model, length: int) -> Defaults:
    """Of the server. V1: 2048 tokens and 256 sequences below 70 GiB (and on an A100), else 8192 (16384 from 160 GiB) and 1024.

    V0: the longest sequence in one pass, at least 2048 (5120 with images), and 256. Never more sequences than tokens. Passes in
    flight, where windows reserve for them: as many as pipeline stages, and with the second runner one more; at least two, which
    asynchronous scheduling overlaps (config/vllm.py: max_concurrent_batches).
    """
    if runs_v0(rules, gpu, model):
        tokens = tokens or _pass_of_v0(rules, model, length)
        return Defaults(tokens, min(tokens, V0_SEQUENCES), rules.utilization, 1, page_tuples=rules.page_tuples)
    large = _large(gpu, rules)
    most = 16384 if rules.large_batch and gpu.memory_bytes >= 160 * GIB else 8192
    tokens = tokens or (most if large else 2048)
    second = ranks.pp > 1 and takes_runner_v2(rules, model, formats_of(model, PUBLISHED))
    flights = max(2, ranks.pp + second) if rules.in_flight else 1
    sequences = min(tokens, 1024 if large else rules.few_sequences)
    return Defaults(tokens, sequences, rules.utilization, flights, page_tuples=rules.page_tuples)


def _large(gpu: Gpu, rules: Release) -> bool:
    """Whether a GPU gets the larger defaults."""
    if rules.by_name:
        return gpu.name.startswith(("h100", "h200"))
    is_a100 = gpu.architecture == "Ampere"  # the only one of that memory
    is_gb10 = gpu.architecture == "Blackwell" and "unified" in gpu.memory_type
    small = (rules.small_a100 and is_a100) or (rules.small_gb10 and is_gb10)
    return gpu.memory_bytes >= 70 * GIB and not small


def runs_v0(rules: Release, gpu: Gpu, model: Model) -> bool:
    """Whether V0 runs a model: before 0.8, and before 0.10.2 below compute capability 8.0 and with recurrent states.

    engine/arg_utils.py: _is_v1_supported_oracle.
    """
    old = gpu.architecture in BELOW_8 or has_states(model)
    return rules.since < V1_BY_DEFAULT or (old and rules.since < V1_FOR_ALL)


def _pass_of_v0(rules: Release, model: Model, length: int) -> int:
    """Tokens of V0's pass: prompts are cut where the longest is beyond 32K and no latents, images or window are there.

    engine/arg_utils.py: _set_default_args_v0, 0.8.5.
    """
    entries = [entry for layer in model.kinds.values() for entry in layer.entries]
    whole = bool(model.vision) or any(e.role == "latent" for e in entries) or all(e.limit for e in entries)
    if length > LONG and not whole:
        return rules.chunk
    return max(length, IMAGES_OF_V0 if model.vision else 2048)


def has_states(model: Model) -> bool:
    """Whether the model has recurrent states."""
    known = model.known
    if "states" not in known:
        known["states"] = any(e.span.name == "STATE" for layer in model.kinds.values() for e in layer.entries)
    return bool(known["states"])


def takes_runner_v2(rules: Release, model: Model, formats: Formats) -> bool:
    """Whether this release runs a model on its second runner by default.

    0.22: dense Qwen3 as published; 0.23: Llama and Mistral too; 0.24: quantised too, and a short list of experts' models; 0.25:
    whatever is dense and has no states; 0.29: all.
    """
    if rules.runner_v2 in ("", "all"):
        return rules.runner_v2 == "all"
    key = "second runner", rules.runner_v2, formats
    if key not in model.known:
        model.known[key] = _chooses_runner_v2(rules.runner_v2, model, formats)
    return bool(model.known[key])


def _chooses_runner_v2(by: str, model: Model, formats: Formats) -> bool:
    """Whether a release that goes `by` that rule runs the model on its second runner."""
    layers = [layer for kind, layer in model.kinds.items() if model.counts[kind]]
    experts = any(getattr(p, "num_experts", 0) for layer in layers for p in layer.parts)
    states = any(entry.span.name == "STATE" for layer in layers for entry in layer.entries)
    named = listed_family(model)
    listed = named in ("deepseek", "granite") and experts and not states
    dense = not experts and not states
    return {
        "qwen3": dense and named == "qwen3" and not formats.schemes,
        "plain": dense and named in ("qwen3", "llama", "mistral") and not formats.schemes,
        "listed": (dense and named in ("qwen3", "llama", "mistral")) or listed,
        "dense": dense or listed,
    }[by]


def listed_family(model: Model) -> str:
    """Return the family that vLLM's list of architectures names, by the model type; "" if it names none."""
    if model.model_type == "qwen3":
        return "qwen3"
    return next((f for f in ("llama", "mistral", "deepseek", "granite") if model.model_type.startswith(f)), "")
