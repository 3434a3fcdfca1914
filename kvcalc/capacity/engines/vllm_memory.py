"""What stands beside vLLM's cache: weights as loaded, the profile's peak, what outlives it, libraries, collectives, graphs.

`Available KV cache memory` = ⌈total · utilization⌉ − their sum, on the pipeline stage that has the least (gpu_worker.py:
determine_available_memory). The middle is a first start with the sampler that the documentation gives. The ends add what is
known to differ between starts, and a margin over what is not.
"""

from functools import lru_cache, partial
from typing import Any, NamedTuple

from kvcalc.capacity.engines.vllm_compressed_memory import LOGITS_BYTES, compressed_parts, has_indexer
from kvcalc.capacity.engines.vllm_profile import compiles, peak
from kvcalc.capacity.engines.vllm_versions import Release, has_states, runs_v0, takes_runner_v2
from kvcalc.capacity.engines.vllm_weights import TABLES_ON_HOST, data_centre_blackwell, extra_weights, host_tables
from kvcalc.capacity.memory_terms import GIB, MIB, Start, Terms, Weights
from kvcalc.layers.formats import Formats
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.pipeline import stages
from kvcalc.model.spec import Model
from kvcalc.units import by_number, floor_div

PENALTIES = 4.125  # bytes per request and entry of the vocabulary: counts in int32, a bit mask (gpu/sample/penalties.py, 0.28)
SMS = 128  # of a GPU whose preset does not say
UNSEEN = 0.03  # of the memory, at the low end where tokens are compressed: of 10.1 GiB beside the weights its source shows 6.7


class Constants(NamedTuple):
    """GiB that no source gives, fitted on published start-ups (docs/engines.md); at one end of the range.

    libraries: outside torch. states: beside them for models with recurrent states. collectives: buffers of 2, 4 and 8 GPUs;
    pcie: their share where no link joins the GPUs. graphs, per_width: of an estimate of CUDA graphs, per 1024 of D/tp; per_layer:
    MiB of a captured graph for each layer, where that is more than one, of the first runner.
    margin: share of the GPU's memory beyond all terms.
    """

    libraries: float = 0.13
    states: float = 0.35
    collectives: tuple[float, float, float, float] = (0.0, 0.42, 1.2, 1.7)
    pcie: float = 0.5
    graphs: float = 0.07
    per_width: float = 0.11
    per_layer: float = 0.0
    margin: float = 0.0


MIDDLE = Constants()
CONSTANTS = {
    "low": Constants(0.25, collectives=(0.0, 0.63, 1.8, 2.55), pcie=0.8, graphs=0.22, per_layer=0.25, margin=0.02),
    "middle": MIDDLE,
    "high": Constants(0.02, collectives=(0.0, 0.252, 0.72, 1.02), pcie=0.0, graphs=0.0, margin=-0.015),
}


def terms(start: Start, end: str) -> Terms:
    """The terms of one stage. low: more of every constant; high: less, a compilation cache, and FlashInfer's sampler."""
    constants, best = CONSTANTS[end], end == "high"
    language, extra, host = weights(start)
    activation: Any
    activation, step = peak(start, kernels=best, first_start=not best)
    overhead = {
        "libraries": _bytes(constants.libraries + (constants.states if has_states(start.model) else 0)),
        "collectives": collectives(start, constants),
        "sampler's buffers": kept(start),
        "CUDA graphs": graphs(start, constants),
    }
    unseen = UNSEEN * (end == "low" and bool(compressed_parts(start)))
    needed: dict[str, Any] = {name: size for name, size in overhead.items() if not isinstance(size, int) or size}
    return Terms(language, extra, activation, needed, {}, constants.margin + unseen, step, host)


def weights(start: Start) -> Weights:
    """The model's as stored, without what stays with the host, and what is loaded beside them."""
    host = start.once(host_tables, start.tables_on_host, start.release.since >= TABLES_ON_HOST)
    return Weights(start.language - host, extra_weights(start), host)


def aside(start: Start) -> object:
    """What terms go by of a stage, but for its weights: its kinds of layers, its ends, and how many GPUs and stages there are."""
    ranks, here = start.ranks, stages(start.model, start.ranks.pp)[start.stage]
    shares = 0 if takes_runner_v2(start.release, start.model, start.formats) else ranks.pp
    held = tuple(kind for kind, count in here.counts.items() if count)
    return here.first, here.last, held, _doubled(ranks), shares


def told(start: Start) -> object:
    """What terms go by of a GPU. Multiprocessors and L2 of those alone whose sampler and compilation take memory by them."""
    gpu, rules = start.gpu, start.release
    old = runs_v0(rules, gpu, start.model)
    sms = rules.sampler == "kernels" and start.last and not takes_runner_v2(rules, start.model, start.formats)
    kind = gpu.architecture == "Hopper", data_centre_blackwell(start), bool(gpu.link_bytes_per_s)
    return *kind, old, sms and gpu.sms, compiles(start) and gpu.l2_bytes


def _bytes(gib: float) -> int:
    return int(gib * GIB)


def collectives(start: Start, constants: Constants = MIDDLE) -> int:
    """Buffers of NCCL and of vLLM's own all-reduce, by GPUs that exchange activations: tp · pp."""
    return _bytes(constants.collectives[_doubled(start.ranks)] * (1 if start.gpu.link_bytes_per_s else constants.pcie))


def _doubled(ranks: Parallelism) -> int:
    return min(3, (ranks.tp * ranks.pp - 1).bit_length())


def kept(start: Start) -> Any:
    """What the dummy sample leaves: Triton's buffer min(2^⌈log2 min(SMs, n)⌉, SMs) · V · 4; or the penalties' tables.

    First runner from 0.17 on (v1/sample/ops/topk_topp_triton.py); second where all that left free memory counts.
    """
    rules: Release = start.release
    if not start.last:
        return 0
    vocabulary, count, sms = start.model.vocab_size, start.sequences, start.gpu.sms or SMS
    if takes_runner_v2(rules, start.model, start.formats):
        return floor_div(count * vocabulary * int(8 * PENALTIES), 8) if rules.counts_consumed else 0
    if rules.sampler != "kernels":
        return 0
    return by_number(count, lambda n: min(1 << (max(1, min(sms, n)) - 1).bit_length(), sms)) * vocabulary * 4


def graphs(start: Start, constants: Constants = MIDDLE) -> Any:
    """The estimate of CUDA graphs that a release subtracts: 1 MiB a captured graph, and fitted constants.

    Sizes 1, 2, 4, then by 8 below 256 and by 16 to min(2·n, 512, T) (config/vllm.py: _set_cudagraph_sizes); each captured in
    pieces, those up to n whole as well. The first runner takes each for as large as the second that it tries, at least 1 MiB, and
    captures pieces as a pass without a cache, with an indexer's logits (gpu_model_runner.py: profile_cudagraph_memory, 0.22).
    """
    rules: Release = start.release
    second = takes_runner_v2(rules, start.model, start.formats)
    if start.eager or not (rules.graphs_v2 if second else rules.graphs_v1):
        return 0
    width = start.model.hidden_size / 1024 / start.ranks.tp
    count: Any = by_number(start.sequences, partial(captured, start.tokens))
    shared = _bytes(constants.graphs + constants.per_width * width)
    if second:
        return count * MIB + shared
    each = int(MIB * max(1, constants.per_layer * start.model.layers / start.ranks.pp))
    return count * each + shared + (LOGITS_BYTES if has_indexer(start) else 0)


def warning(rules: Release, model: Model, formats: Formats, ranks: Parallelism) -> str:
    """Of an estimate that took every graph for as large as the second, with experts over data-parallel ranks (issue 45178)."""
    experts = any(w.expert for _, w, _ in model.walk())
    if not (experts and ranks.dp > 1 and rules.graphs_v1) or takes_runner_v2(rules, model, formats):
        return ""
    said = "may set tens of GiB aside for CUDA graphs with experts over dp ranks, not counted here"
    return f"vLLM {'.'.join(map(str, rules.since[:2]))} {said}; VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 stops it"


@lru_cache(1 << 14)
def captured(tokens: int, sequences: int) -> int:
    """Graphs of an engine set up for so many sequences and tokens of a pass."""
    most = min(2 * sequences, 512, tokens)
    sizes: list[int] = [s for s in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if s <= most]
    return len(sizes) + sum(s <= sequences for s in sizes)
