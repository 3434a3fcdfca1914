"""vLLM by version: changes of the memory that its profile of a start-up counts, and of its
defaults.

Each row was read in the source of its release; the comments name the files. A release between two
rows follows the older row.
"""

from typing import NamedTuple

import msgspec

from kvcalc.capacity.engines.engine import Defaults
from kvcalc.capacity.memory_budget import GIB
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.batch import Parallelism
from kvcalc.layers.cache import Span
from kvcalc.layers.weights import Formats
from kvcalc.model.model import Model, memoized
from kvcalc.model.precision import PUBLISHED, formats_of

V1_FOR_ALL = (0, 10, 2)
ARCHITECTURES_BELOW_8 = ("Volta", "Turing")  # architectures of a compute capability below 8.0
LISTED_FAMILIES = ("llama", "mistral", "deepseek", "granite")
DENSE_FAMILIES = ("qwen3", "llama", "mistral")


class Release(NamedTuple):
    """vLLM's rules of memory and defaults from version `since` on.

    The first model runner is v1/worker/gpu_model_runner.py, the second is
    v1/worker/gpu/model_runner.py.

    Attributes:
        since: The first version with these rules, such as (0, 11, 0).
        utilization: Default of --gpu-memory-utilization (config/cache.py).
        sampler: How the first runner samples in the profile run
            (v1/sample/ops/topk_topp_sampler.py). "sort": fp32 logits are sorted. "flashinfer": fp32
            logits are sorted, unless FlashInfer is installed. "kernels": kernels of Triton or
            FlashInfer, which need no sort.
        combo_kernels: Whether a first start compiles and times fused kernels (torch 2.9).
        graphs_v1, graphs_v2: Whether the first and the second runner subtract an estimate of CUDA
            graphs from the KV cache (v1/worker/gpu_worker.py).
        counts_consumed: Whether the profile counts all consumed memory, and not only torch's peak
            (utils/mem_utils.py).
        runner_v2: Models that the second runner takes by default (config/vllm.py:
            use_v2_model_runner): "" for none; "qwen3", "plain" (also Llama and Mistral), "listed"
            (also quantized weights and some mixtures of experts), "dense" (all dense models) or
            "all".
        sampler_v2: Bytes per request and vocabulary entry when the second runner samples in the
            profile run (v1/worker/gpu/model_runner.py).
        small_gb10: Whether a GB10 has the defaults of small GPUs (engine/arg_utils.py:
            get_batch_defaults).
        large_batch: Whether GPUs from 160 GiB on have a larger default of tokens per pass
            (engine/arg_utils.py: get_batch_defaults).
        in_flight: Whether layers with a window reserve tokens for each pass in flight
            (config/vllm.py: max_in_flight_tokens).
    """

    since: tuple[int, ...]
    utilization: float = 0.9
    sampler: str = "sort"
    combo_kernels: bool = False
    graphs_v1: bool = False
    graphs_v2: bool = False
    counts_consumed: bool = False
    runner_v2: str = ""
    sampler_v2: int = 6
    small_gb10: bool = False
    large_batch: bool = False
    in_flight: bool = False


# versions with equal rules: the changes of the first of them
CHANGES = """
0.9.1 0.9.2 0.10.0 0.10.1 0.10.2 0.11.0: sampler="flashinfer"
0.11.1 0.11.2 0.12.0 0.13.0 0.14.1 0.16.0: combo_kernels=true sampler="sort"
0.17.1 0.18.1 0.19.1: sampler="kernels"
0.20.0 0.21.0: utilization=0.92 graphs_v1=true
0.22.0: runner_v2="qwen3"
0.23.0: runner_v2="plain"
0.24.0: runner_v2="listed"
0.25.1: runner_v2="dense"
0.26.0: in_flight=true
0.27.0 0.27.1: counts_consumed=true
0.28.0: sampler_v2=2 large_batch=true
0.29.0 0.30.0 0.31.0 0.32.0: graphs_v2=true runner_v2="all"
0.33.0: sampler_v2=14 small_gb10=true
"""


def _releases() -> list[Release]:
    releases, rules = [], Release(())
    for line in CHANGES.strip().splitlines():
        versions, _, changes = line.partition(": ")
        for change in changes.split():
            name, _, value = change.partition("=")
            rules = rules._replace(**{name: msgspec.json.decode(value)})
        releases += [
            rules._replace(since=tuple(map(int, version.split("."))))
            for version in versions.split()
        ]
    return releases


RELEASES = _releases()
LATEST = RELEASES[-1]


def defaults(
    gpu: Gpu, ranks: Parallelism, rules: Release, tokens: int, model: Model
) -> Defaults:
    """Return the defaults of a vLLM server on a GPU: tokens, sequences and passes in flight.

    GPUs below 70 GiB, and the A100, have 2048 tokens per forward pass and 256 sequences. Other GPUs
    have 8192 tokens (16384 from 160 GiB, in some releases) and 1024 sequences. Sequences never
    exceed tokens. In releases that reserve tokens for passes in flight, at least two passes are in
    flight, because scheduling is asynchronous (config/vllm.py: max_concurrent_batches). Pipeline
    stages need one pass each, and one more with the second model runner.

    Args:
        gpu: The GPU model.
        ranks: The parallelism. Only the number of pipeline stages counts.
        rules: The rules of the release.
        tokens: The requested tokens of a pass; 0 for the default.
        model: The model. It decides whether the second model runner or V0 runs it.

    Raises:
        UserError: The release runs the model on its old engine V0.
    """
    if rules.since < V1_FOR_ALL and (
        gpu.architecture in ARCHITECTURES_BELOW_8 or memoized(model, has_states)
    ):
        raise UserError(
            f"vLLM {'.'.join(map(str, rules.since))} runs {model.name} on {gpu.name} with its "
            "V0 engine, which is not predicted",
            "The oldest release that runs it with V1 is 0.10.2",
        )
    is_a100 = gpu.architecture == "Ampere"  # the only one with this memory
    is_gb10 = gpu.architecture == "Blackwell" and "unified" in gpu.memory_type
    is_small = is_a100 or (rules.small_gb10 and is_gb10)
    is_large = gpu.memory_bytes >= 70 * GIB and not is_small
    large_tokens = 16384 if rules.large_batch and gpu.memory_bytes >= 160 * GIB else 8192
    tokens = tokens or (large_tokens if is_large else 2048)
    has_v2 = ranks.pp > 1 and takes_runner_v2(rules, model, formats_of(model, PUBLISHED))
    return Defaults(
        tokens=tokens,
        sequences=min(tokens, 1024 if is_large else 256),
        utilization=rules.utilization,
        in_flight_batches=max(2, ranks.pp + has_v2) if rules.in_flight else 1,
    )


def has_states(model: Model) -> bool:
    """Return whether any layer has a recurrent state, as in Mamba."""
    return any(entry.span is Span.STATE for entry in model.entries)


def takes_runner_v2(rules: Release, model: Model, formats: Formats) -> bool:
    """Return whether a release runs a model on vLLM's second model runner by default.

    The second runner is v1/worker/gpu/model_runner.py. Each of these releases adds models:

    - 0.22: dense Qwen3 with unquantized weights.
    - 0.23: Llama and Mistral with unquantized weights.
    - 0.24: these families with quantized weights, and some mixtures of experts.
    - 0.25: all dense models without recurrent states.
    - 0.29: all models.
    """
    if rules.runner_v2 in ("", "all"):
        return rules.runner_v2 == "all"
    return memoized(model, _takes_runner_v2, rules.runner_v2, formats)


def _takes_runner_v2(model: Model, group: str, formats: Formats) -> bool:
    family, is_stateful = listed_family(model), has_states(model)
    if is_stateful or model.has_experts:
        is_listed = family in ("deepseek", "granite") and not is_stateful
        return is_listed and group in ("listed", "dense")
    if group == "dense":
        return True
    families = DENSE_FAMILIES[:1] if group == "qwen3" else DENSE_FAMILIES
    return family in families and (group == "listed" or not formats.schemes)


def listed_family(model: Model) -> str:
    """Return the model family, such as "llama", in vLLM's list of models for the second runner.

    vLLM has two model runners, and moves families to the second one by release. "" means that the
    list does not contain the model's type.
    """
    if model.model_type == "qwen3":
        return "qwen3"
    return next((f for f in LISTED_FAMILIES if model.model_type.startswith(f)), "")
