"""SGLang's share of the memory and what stands beside its cache, by version.

Rest for the cache = free after the weights − free before them · (1 − mem_fraction_static) (model_runner.py, 0.5.3;
mem_cache/kv_cache_configurator.py: _profile_available_bytes, 0.5.23). Its "GB" are GiB.
"""

from typing import NamedTuple

from kvcalc.capacity.engines.engine import Defaults
from kvcalc.capacity.engines.versions import nearest_older
from kvcalc.capacity.engines.vllm_weights import lora_slots, rope_tables, tower
from kvcalc.capacity.memory_terms import CONTEXT_BYTES, GIB, MIB, Start, Terms, collective_bytes, stated
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.spec import Model

DRAFTED = 3  # --speculative-num-steps of most models (arg_groups/speculative_hook.py)
Capacity = tuple[int, int, int]  # tokens of a prefill chunk, largest CUDA-graph batch below tp 4, and from tp 4 on
_LARGER: tuple[tuple[int, Capacity], ...] = (  # below so many GiB
    (60, (4096, 32, 160)), (90, (8192, 256, 512)), (160, (8192, 256, 512)), (1 << 40, (16384, 512, 512)),
)  # fmt: skip


class SglangRelease(NamedTuple):
    """Rules from version `since` on (server_args.py; arg_groups/memory_hook.py in 0.5.23).

    small: of GPUs from 20 to 35 GiB. prefill_graphs: CUDA graphs of prefills are captured, and reserved for.
    """

    since: tuple[int, ...]
    small: Capacity
    prefill_graphs: bool = False

    def capacity(self, memory_bytes: int) -> Capacity:
        """The defaults of a GPU."""
        if memory_bytes < 20 * GIB:
            return 2048, 8, 8
        if memory_bytes < 35 * GIB:
            return self.small
        return next(found for most, found in _LARGER if memory_bytes < most * GIB)


RELEASES = (
    SglangRelease((0, 5, 3), (2048, 16, 80)),
    SglangRelease((0, 5, 6), (2048, 24, 80)),
    SglangRelease((0, 5, 23), (4096, 48, 160), prefill_graphs=True),
)
LATEST = RELEASES[-1]


def release(text: str) -> tuple[SglangRelease, str]:
    """The rules of a version, and a remark where they are another's. Raises UserError for what is no version."""
    return nearest_older("SGLang", RELEASES, text)


def defaults(gpu: Gpu, ranks: Parallelism, rules: SglangRelease, tokens: int, model: Model, length: int) -> Defaults:
    chunk = tokens or rules.capacity(gpu.memory_bytes)[0]
    graphs = rules.capacity(gpu.memory_bytes)[2 if ranks.tp >= 4 else 1]
    return Defaults(chunk, graphs, static_fraction(gpu.memory_bytes, chunk, ranks, rules, model), drafted=DRAFTED)


def static_fraction(
    memory_bytes: int, tokens: int, ranks: Parallelism, rules: SglangRelease = LATEST, model: Model | None = None
) -> float:
    """SGLang's default for --mem-fraction-static: what is left of the memory after its reserve, to three places.

    Reserve in MiB: 512 + 1.5 per token of a prefill chunk + 2 per sequence of the largest CUDA graph + 128 per GPU of tp·pp;
    from 0.5.23 on 8 per prefill graph too, 1536 for latent attention, none where stages are in line. 10 GiB at least above 60
    GiB. Beside a vision tower the fraction is multiplied by 0.95 · (1 − 0.1 · (size − 1)), its second factor within 0.8 and
    1.05, size being layers · width² ÷ 24 · 1024².
    """
    memory, chunk = memory_bytes / MIB, max(tokens, 2048)
    graphs = rules.capacity(memory_bytes)[2 if ranks.tp >= 4 else 1]
    reserve = 512 + 1.5 * chunk + 2 * graphs + ranks.tp * ranks.pp / 8 * 1024
    if rules.prefill_graphs and ranks.pp == 1:
        reserve += 1536 if model and _latent(model) else 8 * prefill_graphs(chunk)
    if memory > 60 * 1024:
        reserve = max(reserve, 10 * 1024)
    fraction = round((memory - reserve) / memory, 3)
    if model and model.vision:
        size = model.vision.layers * model.vision.width**2 / (24 * 1024**2)
        fraction *= 0.95 * max(0.8, min(1.05, 1 - 0.1 * (size - 1)))
    return max(0.001, fraction)


def _latent(model: Model) -> bool:
    return any(e.role == "latent" for layer in model.kinds.values() for e in layer.entries)


def prefill_graphs(most: int) -> int:
    """How many sizes of prefills are captured: by 4 to 32, 16 to 256, 32 to 512, 64 to 1024, 256 to 4096, then by 512."""
    sizes = (
        *range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64), *range(1280, 4097, 256),
        *range(4608, most + 1, 512),
    )  # fmt: skip
    return sum(size <= most for size in sizes)


def terms(start: Start, end: str) -> Terms:
    """Weights with a tower and rotary tables; activations and graphs, which the fraction leaves out, as stated.

    Context and collectives are gone before the free memory is measured. The ends differ by those, and by the margins
    that vLLM's starts gave; no published start-up of SGLang has checked them.
    """
    middle = stated(start, end)
    slots = lora_slots(start)  # lora/mem_pool.py, before the cache: model_executor/model_runner.py
    extra = {"rotary tables": rope_tables(start.model), "vision tower": tower(start), "LoRA slots": slots, **start.beside}
    context, share, margin = {"low": (1.5, 1.5, 0.02), "middle": (1, 1, 0.0), "high": (0.5, 0.6, -0.015)}[end]
    startup = {"CUDA context": int(CONTEXT_BYTES * context), "collectives": int(collective_bytes(start.ranks) * share)}
    return middle._replace(
        extra={name: size for name, size in extra.items() if size},
        startup={name: size for name, size in startup.items() if size} if start.of == "free" else middle.startup,
        margin=margin,
    )
