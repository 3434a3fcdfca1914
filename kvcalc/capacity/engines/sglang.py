"""SGLang: a pool of token slots, a smaller pool for windows, and a pool of state slots.

Cache = free after the weights − free before them · (1 − mem_fraction_static) (model_runner.py,
0.5.3; mem_cache/kv_cache_configurator.py: _profile_available_bytes, 0.5.23).

Rules of SGLang 0.5.23: `model_executor/pool_configurator.py`,
`mem_cache/kv_cache_configurator.py` (`_handle_max_mamba_cache`, `resolve_max_num_reqs`),
`configs/model_config.py` (`is_hybrid_swa_model`), `arg_groups/overrides.py`. Its "GB" are GiB.
"""

import math
import re
from fractions import Fraction
from typing import Any, NamedTuple

from kvcalc.arithmetic import maximum, minimum, rounded_down
from kvcalc.capacity.engines.engine import (
    Defaults,
    Engine,
    EngineSettings,
    PrecisionAndRemarks,
    downcast,
    packed_latents,
    rope_table_bytes,
    scaled_index_keys,
    stage_by_stage,
    vision_tower_bytes,
)
from kvcalc.capacity.engines.layout import (
    BlockDemand,
    CacheLayout,
    LayerCaches,
    pages,
    stage_pages,
)
from kvcalc.capacity.engines.vllm_memory import lora_slots
from kvcalc.capacity.memory_budget import (
    CONTEXT_BYTES,
    GIB,
    MIB,
    EngineStartup,
    MemoryBreakdown,
    collective_bytes,
    nonzero,
    stated_memory,
)
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.batch import Parallelism
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision

DRAFT_TOKENS = 3  # --speculative-num-steps of most models (arg_groups/speculative_hook.py)
# tokens of a prefill chunk, largest CUDA-graph batch below tp 4, and from tp 4 on
BatchDefaults = tuple[int, int, int]
DEFAULTS_BY_MEMORY = {  # by the limit of the memory in GiB
    60: (4096, 32, 160),
    160: (8192, 256, 512),
    1 << 40: (16384, 512, 512),
}


class SglangRelease(NamedTuple):
    """SGLang's rules from version `since` on (server_args.py; arg_groups/memory_hook.py in 0.5.23).

    Attributes:
        since: The first version with these rules, such as (0, 5, 23).
        small: Defaults of GPUs from 20 to 35 GiB, as three numbers: tokens of a prefill chunk,
            sequences of the largest CUDA graph below tp 4, and such sequences from tp 4 on.
        prefill_graphs: Whether memory is reserved for CUDA graphs of prefills.
    """

    since: tuple[int, ...]
    small: BatchDefaults
    prefill_graphs: bool = False

    def batch_defaults(self, memory_bytes: int) -> BatchDefaults:
        """Return SGLang's default batch sizes for a GPU with this memory.

        Args:
            memory_bytes: Total memory of the GPU.

        Returns:
            Tokens of a prefill chunk; sequences of the largest CUDA graph below 4 tensor-parallel
            ranks; and such sequences from 4 ranks on.
        """
        if memory_bytes < 20 * GIB:
            return 2048, 8, 8
        if memory_bytes < 35 * GIB:
            return self.small
        return next(row for gib, row in DEFAULTS_BY_MEMORY.items() if memory_bytes < gib * GIB)


RELEASES = (
    SglangRelease((0, 5, 3), (2048, 16, 80)),
    SglangRelease((0, 5, 6), (2048, 24, 80)),
    SglangRelease((0, 5, 23), (4096, 48, 160), prefill_graphs=True),
)
LATEST = RELEASES[-1]


def defaults(
    gpu: Gpu, ranks: Parallelism, rules: SglangRelease, tokens: int, model: Model
) -> Defaults:
    """Return the defaults of an SGLang server on a GPU.

    They are the tokens of a prefill chunk, the sequences of the largest CUDA graph, the share of
    the memory that the server may use (--mem-fraction-static), and the draft tokens per pass.

    Args:
        gpu: The GPU model.
        ranks: The parallelism. From tp 4 on, most GPUs have larger CUDA graphs.
        rules: The rules of the release.
        tokens: The requested tokens of a prefill chunk; 0 for the default.
        model: The model.
    """
    chunk, *graphs = rules.batch_defaults(gpu.memory_bytes)
    tokens = tokens or chunk
    return Defaults(
        tokens=tokens,
        sequences=graphs[ranks.tp >= 4],
        utilization=static_fraction(gpu.memory_bytes, tokens, ranks, rules, model),
        draft_tokens=DRAFT_TOKENS,
    )


def static_fraction(
    memory_bytes: int,
    tokens: int,
    ranks: Parallelism,
    rules: SglangRelease = LATEST,
    model: Model | None = None,
) -> float:
    """Return SGLang's default of --mem-fraction-static: 1 − reserve ÷ memory, to three places.

    The reserve is the sum of these parts:

    - 512 MiB
    - 1.5 MiB per token of a prefill chunk
    - 2 MiB per sequence of the largest CUDA graph
    - 128 MiB · tensor-parallel ranks · pipeline stages
    - From 0.5.23 on, without pipeline stages: 1536 MiB for latent attention; for other attention 8
      MiB per prefill graph

    If the GPU has more than 60 GiB, the reserve is at least 10 GiB.

    With a vision tower, the fraction is multiplied by 0.95 · f. The factor f = 1 − 0.1 · (size − 1)
    is limited to 0.8 … 1.05. The size of the tower is layers · width² ÷ (24 · 1024²).

    Args:
        memory_bytes: Memory of the GPU.
        tokens: Tokens of a prefill chunk.
        ranks: The parallelism.
        rules: The rules of the release.
        model: The model; None for one without latents and vision tower.
    """
    memory, chunk = memory_bytes / MIB, max(tokens, 2048)
    graphs = rules.batch_defaults(memory_bytes)[2 if ranks.tp >= 4 else 1]
    reserve = 512 + 1.5 * chunk + 2 * graphs + 128 * ranks.tp * ranks.pp
    if rules.prefill_graphs and ranks.pp == 1:
        is_latent = model is not None and "latent" in model.roles
        reserve += 1536 if is_latent else 8 * count_prefill_graphs(chunk)
    if memory > 60 * 1024:
        reserve = max(reserve, 10 * 1024)
    fraction = round((memory - reserve) / memory, 3)
    if model and model.vision:
        size = model.vision.layers * model.vision.width**2 / (24 * 1024**2)
        fraction *= 0.95 * max(0.8, min(1.05, 1 - 0.1 * (size - 1)))
    return max(0.001, fraction)


def count_prefill_graphs(tokens: int) -> int:
    """Return the number of CUDA graphs of prefills that SGLang captures.

    Each graph is for one number of tokens. The steps between the numbers grow from 4 to 512 tokens.

    Args:
        tokens: Tokens of a prefill chunk, the maximum tokens of a graph.
    """
    ranges = (
        (0, 32, 4),
        (32, 256, 16),
        (256, 512, 32),
        (512, 1024, 64),
        (1024, 4096, 256),
        (4096, tokens, 512),
    )
    return sum(max(0, min(last, tokens) - first) // step for first, last, step in ranges)


def memory(start: EngineStartup, estimate: str) -> MemoryBreakdown:
    """Return the bytes of one GPU that SGLang uses outside its KV cache.

    Weights include tables of rotary embeddings, a vision tower and LoRA slots. CUDA context and
    collectives are in use before SGLang measures the free memory.

    The three estimates differ in the bytes of context and collectives, and in a safety margin,
    which is taken from vLLM's starts. No published start-up of SGLang has checked the estimates.

    Args:
        start: The GPU when the engine starts.
        estimate: "low", "middle" or "high" estimate of the KV cache budget.
    """
    terms = stated_memory(start, estimate)
    extra = {
        "rotary tables": rope_table_bytes(start.model),
        "vision tower": vision_tower_bytes(start),
        "LoRA slots": lora_slots(start),  # lora/mem_pool.py, before the cache
        **start.extra,
    }
    context, collectives, margin = {
        "low": (1.5, 1.5, 0.02),
        "middle": (1, 1, 0.0),
        "high": (0.5, 0.6, -0.015),
    }[estimate]
    startup = terms.startup
    if start.utilization_basis == "free":
        startup = {
            "CUDA context": int(CONTEXT_BYTES * context),
            "collectives": int(collective_bytes(start.ranks) * collectives),
        }
    return terms._replace(extra=nonzero(extra), startup=nonzero(startup), margin=margin)


PAGE, SPARSE_PAGE = 1, 64  # --page-size; the sparse-attention backend runs 64
# --swa-full-tokens-ratio: slots for windows per slot for full layers
WINDOW_SHARE = Fraction(4, 5)
# --mamba-full-memory-ratio: bytes for states per byte for keys and values
STATE_SHARE = Fraction(9, 10)
EVICTION_LAG_TOKENS = (
    128  # tokens outside the window before a decoding sequence frees their slots
)
# State slots of a running request, and additional slots for its prefix cache.
RUNNING_STATES, TRACKED_STATES = 3, 2
TYPES_FREEING_WINDOWS = """
    gptoss llama4 mimov2 step35 step37 step3p5 step3p7 gemma4 laguna mellum inkling graniteswa
    granitemoeswa iquestq1 unlimitedocr museglimmer
"""
TYPES_WITHOUT_TRACKED_STATES = "lfm2 jetnemotron jetvlm zaya"


class SGLang(CacheLayout):
    """The cache layout of SGLang on one GPU: pools of token slots, window slots and state slots.

    Token slots are for layers without a window, window slots for layers with a sliding window, and
    state slots for recurrent states. Token and window slots store one token each.

    Attributes:
        full: Bytes of a token slot, over all layers without a window.
        window: Bytes of a window slot, over all layers with a window.
        limit: Maximum tokens of one sequence in the window pool: the window, and tokens that SGLang
            frees later.
        state: Bytes of a state slot, over all layers with states.
        page: Tokens of a page. Slots are given out in whole pages.
        request_states: State slots of one request.
        draft_states: Additional state slots of one request for draft tokens.
    """

    def __init__(
        self,
        full: int,
        window: int,
        limit: int,
        state: int,
        page: int,
        request_states: int = 1,
        draft_states: int = 0,
    ) -> None:
        if window and not full:  # without full layers, windows are stored like them
            full, window = window, 0
        self.full, self.window, self.limit, self.state = full, window, limit, state
        self.request_states, self.draft_states = request_states, draft_states
        self.page = self.block_size = page
        self.bytes_per_block = page * (full + window)
        notes = []
        if window:
            notes.append(f"{WINDOW_SHARE} as many slots for windows as for full layers")
        if state and request_states > 1:
            notes.append(f"{request_states} state slots a sequence")
        self.notes = tuple(notes)
        demands = (
            BlockDemand(page * full, page),
            BlockDemand(page * window, page, limit, 0, "window"),
            BlockDemand(state * (request_states + draft_states), 1, 0, 1, "state"),
        )
        self.demands = [demand for demand in demands if demand.unit]

    def _paged(self, tokens: int) -> int:
        """Return the tokens of complete pages."""
        return -(-tokens // self.page) * self.page

    def needed(self, sequences: int, length: int, shared: int = 0) -> int:
        """Return the smallest budget in bytes of one GPU with enough slots in every pool.

        The pools are for tokens, for sliding windows and for recurrent states. The split of the
        budget between them is fixed, so the scarcest pool decides.

        Args:
            sequences: Number of sequences of one data-parallel rank.
            length: Tokens of each sequence.
            shared: Number of first tokens that all sequences have in common and share.
        """
        common = min(shared, length) // self.page * self.page
        slots = common + sequences * (self._paged(length) - common)
        if self.window:
            window_slots = sequences * self._paged(min(length, self.limit))
            slots = max(slots, math.ceil(window_slots / WINDOW_SHARE))
        cache = self._token_bytes(self._paged(slots))
        if not self.state:
            return cache
        states = 0
        if sequences:
            states = (
                1 + self.draft_states + sequences * (self.request_states + self.draft_states)
            )
        larger = max(Fraction(cache), states * self.state / STATE_SHARE)
        return math.ceil(larger * (1 + STATE_SHARE))

    def _token_bytes(self, slots: int) -> int:
        """Return the bytes of token slots and of the window slots that belong to them."""
        return slots * self.full + int(slots * WINDOW_SHARE) * self.window

    def state_slots(self, budget: int) -> int:
        """Return the number of slots for recurrent states (SGLang's max_mamba_cache_size).

        A request takes several slots. One more slot, which only pads batches, is already
        subtracted.

        Args:
            budget: Bytes of one GPU for the KV cache.
        """
        share = Fraction(budget) * STATE_SHARE / (1 + STATE_SHARE)
        slot_bytes = self.state * (1 + Fraction(self.draft_states, self.request_states))
        return max(0, int((share - self.state * (1 + self.draft_states)) // slot_bytes))

    def _state_bytes(self, budget: int) -> int:
        """Return the bytes of all states: slots, padding, and the draft tokens of every request."""
        slots = self.state_slots(budget) if self.state else 0
        draft_states = (slots // self.request_states + 1) * self.draft_states
        return self.state * (slots + 1 + draft_states) if slots else 0

    def slots(self, budget: int) -> int:
        """Return the tokens that layers without a window can store (SGLang's max_total_num_tokens).

        The number is a multiple of the tokens of a page.

        Args:
            budget: Bytes of one GPU for the KV cache.
        """
        if self.state and not self.state_slots(budget):
            return 0
        slot_bytes = self.full + WINDOW_SHARE * self.window
        if not slot_bytes:
            return 0
        return int((budget - self._state_bytes(budget)) / slot_bytes) // self.page * self.page

    def num_blocks(self, budget: int) -> int:
        return self.slots(budget) // self.page

    def request_blocks(self, length: int) -> int:
        return -(-length // self.page)

    def tokens(self, budget: int, length: int) -> int:
        return self.slots(budget) if self.full else super().tokens(budget, length)

    def _pools(self, budget: int, tokens: Any) -> list[tuple[int, Any]]:
        """Return pairs: the size of each pool, and the part that one sequence needs, in the unit of
        the pool."""
        slots = self.slots(budget)
        pools = [(slots, self._paged(tokens))] if self.full else []
        if self.window:
            pools.append((int(slots * WINDOW_SHARE), self._paged(minimum(tokens, self.limit))))
        if self.state:
            pools.append((self.state_slots(budget) // self.request_states, 1))
        return pools

    def concurrency(self, budget: int, length: int) -> float:
        """Return how many sequences of `length` tokens one GPU's scarcest pool fits, such as 13.7.

        The pools are for tokens, for sliding windows and for recurrent states.

        Args:
            budget: Bytes of one GPU for the KV cache.
            length: Tokens of each sequence.
        """
        count = float(min(size / need for size, need in self._pools(budget, length)))
        return int(count) if count.is_integer() else count

    def request_bytes(self, budget: int, tokens: Any) -> Any:
        """Return one request's part of the scarcest pool, converted to bytes of the budget.

        The pools are for tokens, for sliding windows and for recurrent states. Example: a request
        that needs 1% of the scarcest pool counts as 1% of the budget, so that callers can add the
        bytes of requests. The result is an array.

        Args:
            budget: Bytes of one GPU for the KV cache.
            tokens: Array of lengths of the request in tokens.
        """
        share = tokens * 0.0
        for size, need in self._pools(budget, tokens):
            share = maximum(share, need / max(1, size))
        return rounded_down(budget * share)

    def allocated(self, budget: int, sequences: int, length: int) -> int:
        return self._token_bytes(self.slots(budget)) + self._state_bytes(budget)


def _plan(
    layers: LayerCaches, ranks: Parallelism, settings: EngineSettings, stage: int
) -> CacheLayout:
    """Return the pools on one stage. Raises UserError for layers that SGLang has no pool for.

    A layer that reads another layer's cache has slots too. Each prediction or draft layer counts as
    one more of the model's own layers, on every stage.
    """
    model = layers[0].model
    drafts = layers[model.layers :]
    frees_windows = settings.hybrid and _is_named(model, TYPES_FREEING_WINDOWS)
    full = window = index = largest_index = limit = 0
    num_full = num_windowed = num_draft_windows = 0
    is_latent = keeps_windows = False
    for part, count in stage_pages(SGLANG.title, layers[: model.layers], stage, shared=True):
        index += count * part.index_bytes
        largest_index = max(largest_index, part.index_bytes)
        is_latent |= part.is_latent
        if part.limit and frees_windows:
            window += count * part.row_bytes
            num_windowed += count
            limit = max(limit, part.limit)
        elif part.rows:
            full += count * part.row_bytes
            num_full += count
            keeps_windows |= bool(part.limit)
    parts = (part for layer in drafts for part in pages(SGLANG.title, layer, shared=True))
    draft_parts = [part for part in parts if part.rows]
    if num_windowed:
        num_draft_windows = sum(bool(part.limit) for part in draft_parts)
        window += window // num_windowed * num_draft_windows
    if num_full:
        num_draft_full = len(draft_parts) - num_draft_windows
        draft_index = index * num_draft_full // num_full
        if is_latent:
            draft_index = num_draft_full * largest_index
        full += full * num_draft_full // num_full + draft_index
    page = settings.block_size or (SPARSE_PAGE if largest_index else PAGE)
    draft_states = settings.num_speculative_tokens + 1 if drafts else 0
    limit += EVICTION_LAG_TOKENS * max(draft_states, 1) + page + (2 * draft_states or page)
    # every stage has the slots of the stage with the largest states
    state = max(
        sum(n * part.state_bytes for part, n in stage_pages(SGLANG.title, layers, number))
        for number in range(ranks.pp)
    )
    has_tracked_states = not _is_named(model, TYPES_WITHOUT_TRACKED_STATES)
    plan = SGLang(
        full=full + index,
        window=window,
        limit=limit,
        state=state,
        page=page,
        request_states=RUNNING_STATES + TRACKED_STATES * has_tracked_states,
        draft_states=draft_states,
    )
    if keeps_windows:
        plan.notes += (f"SGLang keeps tokens that have left the windows of {model.name}",)
    return plan


def _is_named(model: Model, names: str) -> bool:
    """Return whether a model's type is one of these architectures."""
    model_type = re.sub(r"[^a-z0-9]", "", model.model_type.lower())
    return any(name in model_type for name in names.split())


def _precision(model: Model, precision: Precision) -> PrecisionAndRemarks:
    """Return the precision that SGLang runs: packed latents, and fp16 for a float32 checkpoint,
    bf16 for Gemma's (configs/model_config.py: _get_and_verify_dtype)."""
    precision, remarks = packed_latents("sglang", model, precision)
    dtype = "bf16" if model.model_type.startswith("gemma") else "fp16"
    precision, cast = downcast(SGLANG.title, model, precision, dtype)
    return precision, (*remarks, *cast)


SGLANG = Engine(
    name="sglang",
    title="SGLang",
    plan=stage_by_stage(_plan),
    defaults=defaults,
    releases=RELEASES,
    memory=memory,
    has_memory_range=True,
    takes=("max_loras",),
    dtypes=("bf16", "fp16", "fp32", "fp8", "fp8_ds_mla", "nvfp4"),
    precision=_precision,
    row_format=scaled_index_keys,
    utilization_basis="free",
    excludes_activations=True,
    long_context_variable="SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",  # configs/model_config.py
)
