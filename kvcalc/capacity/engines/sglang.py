"""SGLang: a pool of token slots, a smaller pool for windows, and a pool of state slots.

Cache = free after the weights − free before them · (1 − mem_fraction_static) (model_runner.py,
0.5.3; mem_cache/kv_cache_configurator.py: _profile_available_bytes, 0.5.23).

Rules of SGLang 0.5.23: `model_executor/pool_configurator.py`,
`mem_cache/kv_cache_configurator.py` (`_handle_max_mamba_cache`, `resolve_max_num_reqs`),
`configs/model_config.py` (`is_hybrid_swa_model`), `arg_groups/overrides.py`. Its "GB" are GiB.
"""

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from kvcalc.capacity.engines.engine import (
    Defaults,
    Engine,
    EngineSettings,
    downcast,
    nearest_older,
    packed_latents,
    scaled_index_keys,
    stage_by_stage,
)
from kvcalc.capacity.engines.layout import (
    BlockDemand,
    CacheLayout,
    LayerCache,
    counted,
    pages,
)
from kvcalc.capacity.engines.vllm_weights import lora_slots, rope_tables, tower
from kvcalc.capacity.memory_budget import (
    CONTEXT_BYTES,
    GIB,
    MIB,
    EngineStartup,
    MemoryBreakdown,
    collective_bytes,
    nonzero,
    stated,
)
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.batch import Parallelism
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.weights import Formats
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision
from kvcalc.storage.formats import FORMATS, RowFormat

DRAFTED = 3  # --speculative-num-steps of most models (arg_groups/speculative_hook.py)
# tokens of a prefill chunk, largest CUDA-graph batch below tp 4, and from tp 4 on
Capacity = tuple[int, int, int]
_LARGER: tuple[tuple[int, Capacity], ...] = (  # below so many GiB
    (60, (4096, 32, 160)),
    (90, (8192, 256, 512)),
    (160, (8192, 256, 512)),
    (1 << 40, (16384, 512, 512)),
)


class SglangRelease(NamedTuple):
    """Rules from version `since` on (server_args.py; arg_groups/memory_hook.py in 0.5.23).

    small: of GPUs from 20 to 35 GiB. prefill_graphs: CUDA graphs of prefills are captured, and
    reserved for.
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
        return next(result for most, result in _LARGER if memory_bytes < most * GIB)


RELEASES = (
    SglangRelease((0, 5, 3), (2048, 16, 80)),
    SglangRelease((0, 5, 6), (2048, 24, 80)),
    SglangRelease((0, 5, 23), (4096, 48, 160), prefill_graphs=True),
)
LATEST = RELEASES[-1]


def release(text: str) -> tuple[SglangRelease, str]:
    """Return the rules of a version, and a remark if they belong to another version. Raises
    UserError for a text that is not a version."""
    return nearest_older("SGLang", RELEASES, text)


def defaults(
    gpu: Gpu, ranks: Parallelism, rules: SglangRelease, tokens: int, model: Model
) -> Defaults:
    chunk, *graphs = rules.capacity(gpu.memory_bytes)
    return Defaults(
        tokens or chunk,
        graphs[ranks.tp >= 4],
        static_fraction(gpu.memory_bytes, tokens or chunk, ranks, rules, model),
        drafted=DRAFTED,
    )


def static_fraction(
    memory_bytes: int,
    tokens: int,
    ranks: Parallelism,
    rules: SglangRelease = LATEST,
    model: Model | None = None,
) -> float:
    """Return SGLang's default of --mem-fraction-static: 1 − reserve ÷ memory, to three places.

    The reserve in MiB is 512 + 1.5 per token of a prefill chunk + 2 per sequence of the largest
    CUDA graph + 128 per GPU of tp·pp. From 0.5.23 on, 8 per prefill graph are added without
    pipeline stages, or 1536 for latent attention. Above 60 GiB, the reserve is at least 10 GiB.
    With a vision tower, the fraction is multiplied by 0.95 · (1 − 0.1 · (size − 1)), whose second
    factor is from 0.8 to 1.05. The size is layers · width² ÷ (24 · 1024²).
    """
    memory, chunk = memory_bytes / MIB, max(tokens, 2048)
    graphs = rules.capacity(memory_bytes)[2 if ranks.tp >= 4 else 1]
    reserve = 512 + 1.5 * chunk + 2 * graphs + ranks.tp * ranks.pp / 8 * 1024
    if rules.prefill_graphs and ranks.pp == 1:
        latent = model and any(
            entry.role == "latent" for layer in model.kinds.values() for entry in layer.entries
        )
        reserve += 1536 if latent else 8 * prefill_graphs(chunk)
    if memory > 60 * 1024:
        reserve = max(reserve, 10 * 1024)
    fraction = round((memory - reserve) / memory, 3)
    if model and model.vision:
        size = model.vision.layers * model.vision.width**2 / (24 * 1024**2)
        fraction *= 0.95 * max(0.8, min(1.05, 1 - 0.1 * (size - 1)))
    return max(0.001, fraction)


def prefill_graphs(tokens: int) -> int:
    """Return how many sizes of prefills up to `tokens` are captured."""
    count, first = 0, 0
    for last, step in (
        (32, 4),
        (256, 16),
        (512, 32),
        (1024, 64),
        (4096, 256),
        (tokens, 512),
    ):
        count += max(0, min(last, tokens) - first) // step
        first = last
    return count


def memory(start: EngineStartup, end: str) -> MemoryBreakdown:
    """Return the weights with a tower and rotary tables, and the stated activations and graphs.

    Context and collectives are in use before SGLang measures the free memory. The ends differ by
    both, and by the margins of vLLM's starts. No published start-up of SGLang has checked them.
    """
    terms = stated(start, end)
    extra = {
        "rotary tables": rope_tables(start.model),
        "vision tower": tower(start),
        "LoRA slots": lora_slots(start),  # lora/mem_pool.py, before the cache
        **start.extra,
    }
    context, share, margin = {
        "low": (1.5, 1.5, 0.02),
        "middle": (1, 1, 0.0),
        "high": (0.5, 0.6, -0.015),
    }[end]
    startup = terms.startup
    if start.of == "free":
        startup = {
            "CUDA context": int(CONTEXT_BYTES * context),
            "collectives": int(collective_bytes(start.ranks) * share),
        }
    return terms._replace(extra=nonzero(extra), startup=nonzero(startup), margin=margin)


PAGE, SPARSE_PAGE = 1, 64  # --page-size; the sparse-attention backend runs 64
WINDOW_SHARE = Fraction(
    4, 5
)  # --swa-full-tokens-ratio: slots for windows per slot for full layers
# --mamba-full-memory-ratio: bytes for states per byte for keys and values
STATE_SHARE = Fraction(9, 10)
EVICTED = 128  # tokens outside the window before a decoding sequence frees their slots
# State slots of a running request, and additional slots for its prefix cache.
HELD_STATES, TRACKED_STATES = 3, 2
FREES_WINDOWS = (
    "gptoss",
    "llama4",
    "mimov2",
    "step35",
    "step37",
    "step3p5",
    "step3p7",
    "gemma4",
    "laguna",
    "mellum",
    "inkling",
    "graniteswa",
    "granitemoeswa",
    "iquestq1",
    "unlimitedocr",
    "museglimmer",
)
TRACKS_NO_STATES = ("lfm2", "jetnemotron", "jetvlm", "zaya")


class States(NamedTuple):
    """State slots of one request, and additional slots for draft tokens."""

    held: int = 1
    drafted: int = 0


ONE_STATE = States()


class SGLang(CacheLayout):
    """Pools of token slots, of slots for windows, and of state slots.

    Attributes:
        full: Bytes of a token's slot in layers without a window.
        window: Bytes of a token's slot in layers with a window.
        limit: Tokens of a sequence in the window pool.
        state: Bytes of a state slot.
        page: Tokens of a page.
        held, drafted: State slots of one request, and additional slots for draft tokens.
    """

    def __init__(
        self,
        full: int,
        window: int,
        limit: int,
        state: int,
        page: int,
        states: States = ONE_STATE,
    ) -> None:
        if window and not full:  # without full layers, windows are stored like them
            full, window = window, 0
        self.full, self.window, self.limit, self.state = full, window, limit, state
        self.held, self.drafted = states
        self.page = self.block_size = page
        self.bytes_per_block = page * (full + window)
        notes = []
        if window:
            notes.append(f"{WINDOW_SHARE} as many slots for windows as for full layers")
        if state and self.held > 1:
            notes.append(f"{self.held} state slots a sequence")
        self.notes = tuple(notes)

    def _paged(self, tokens: Any) -> Any:
        """Return the tokens of whole pages."""
        return -(-tokens // self.page) * self.page

    def needed(self, sequences: int, length: int, shared: int = 0) -> int:
        """The least budget with enough slots of each kind; the split between the pools is fixed, so
        the scarcer decides."""
        return self._budget(self._slots(sequences, length, shared), sequences)

    def _slots(self, sequences: int, length: int, shared: int) -> int:
        page = self.page
        common = min(shared, length) // page * page
        slots = common + sequences * (self._paged(length) - common)
        if self.window:
            window_slots = sequences * self._paged(min(length, self.limit))
            slots = max(slots, math.ceil(window_slots / WINDOW_SHARE))
        return int(self._paged(slots))

    def _budget(self, slots: int, sequences: int) -> int:
        cache = slots * self.full + int(slots * WINDOW_SHARE) * self.window
        if not self.state:
            return cache
        states = 1 + self.drafted + sequences * (self.held + self.drafted) if sequences else 0
        larger = max(Fraction(cache), states * self.state / STATE_SHARE)
        return math.ceil(larger * (1 + STATE_SHARE))

    def state_slots(self, budget: int) -> int:
        """State slots that requests may hold (SGLang's max_mamba_cache_size): of its share, the
        padding slot left out."""
        share = Fraction(budget) * STATE_SHARE / (1 + STATE_SHARE)
        each = self.state * (1 + Fraction(self.drafted, self.held))
        return max(0, int((share - self.state * (1 + self.drafted)) // each))

    def _states(self, budget: int) -> int:
        """Bytes of all states: slots with the one for padding, and those of drafted tokens of every
        request."""
        if not self.state:
            return 0
        slots = self.state_slots(budget)
        return (
            self.state * (slots + 1 + (slots // self.held + 1) * self.drafted) if slots else 0
        )

    def slots(self, budget: int) -> int:
        """Token slots for full layers that a budget buys, in whole pages (SGLang's
        max_total_num_tokens)."""
        if self.state and not self.state_slots(budget):
            return 0
        each = self.full + WINDOW_SHARE * self.window
        return (
            int((budget - self._states(budget)) / each) // self.page * self.page if each else 0
        )

    def num_blocks(self, budget: int) -> int:
        return self.slots(budget) // self.page

    def request_blocks(self, length: int) -> int:
        return -(-length // self.page)

    def tokens(self, budget: int, length: int) -> int:
        return self.slots(budget) if self.full else super().tokens(budget, length)

    def concurrency(self, budget: int, length: int) -> float:
        """The scarcest of token slots, window slots and state slots, per sequence."""
        slots = self.slots(budget)
        result: list[float] = [slots / self._paged(length)] if self.full else []
        if self.window:
            result.append(int(slots * WINDOW_SHARE) / self._paged(min(length, self.limit)))
        if self.state:
            result.append(self.state_slots(budget) // self.held)
        return min(result)

    def request_bytes(self, budget: int, tokens: Any) -> Any:
        """The scarcest of token slots, window slots and state slots, as its share of the budget."""
        import numpy as np

        slots = self.slots(budget)
        share = self._paged(tokens) / max(1, slots)
        if self.window:
            window_tokens = self._paged(np.minimum(tokens, self.limit))
            share = np.maximum(share, window_tokens / max(1, int(slots * WINDOW_SHARE)))
        if self.state:
            share = np.maximum(share, 1 / max(1, self.state_slots(budget) // self.held))
        return np.floor(budget * share).astype(np.int64)

    def allocated(self, budget: int, sequences: int, length: int) -> int:
        slots = self.slots(budget)
        return (
            slots * self.full + int(slots * WINDOW_SHARE) * self.window + self._states(budget)
        )

    def terms(self) -> list[BlockDemand]:
        page, state = self.page, self.state * (self.held + self.drafted)
        demands = (
            BlockDemand(page * self.full, page),
            BlockDemand(page * self.window, page, self.limit, 0, "window"),
            BlockDemand(state, 1, 0, 1, "state"),
        )
        return [demand for demand in demands if demand.unit]

    def describe(self, length: int) -> list[str]:
        lines = [
            f"slot of a token: {self.full:,} B in layers without a window, pages of "
            f"{self.block_size} tokens"
        ]
        if self.window:
            lines.append(
                f"slot in window pool: {self.window:,} B, {WINDOW_SHARE} of as many slots, "
                f"{self.limit:,} tokens each"
            )
        if self.state:
            each = f"states: {self.state:,} B a slot, {self.held} slots a sequence"
            drafted = f", {self.drafted} more for drafted tokens" if self.drafted else ""
            lines.append(
                f"{each}{drafted}, one for padding; {STATE_SHARE} of the bytes that keys and "
                "values get"
            )
        return lines


def _plan(
    held: Sequence[LayerCache], ranks: Parallelism, settings: EngineSettings, stage: int
) -> CacheLayout:
    """The pools on one stage. Raises UserError for layers that SGLang has no pool for.

    Its token pools have room in every layer, one that reads another's cache too. Layers that
    predict or draft are counted as so many more of the model's own, on every stage.
    """
    model = held[0].model
    own, drafts = held[: model.layers], held[model.layers :]
    frees = settings.hybrid and _named(model, FREES_WINDOWS)
    full = window = index = layers = windowed = limit = 0
    each_index, latent, kept = 0, False, False
    for part, count in [
        (p, n) for h, n in counted(own, stage) for p in pages(SGLANG.title, h, shared=True)
    ]:
        index += count * part.index_bytes
        each_index, latent = max(each_index, part.index_bytes), latent or part.latent
        kept |= bool(part.limit) and not frees
        if part.limit and frees:
            window, windowed, limit = (
                window + count * part.row_bytes,
                windowed + count,
                max(limit, part.limit),
            )
        elif part.rows:
            full, layers = full + count * part.row_bytes, layers + count
    more = [p for h in drafts for p in pages(SGLANG.title, h, shared=True) if p.rows]
    inside = sum(bool(p.limit) for p in more) if frees else 0
    if windowed:
        window += window // windowed * inside
    outside = len(more) - inside * bool(windowed)
    if layers:
        full += full * outside // layers + (
            outside * each_index if latent else index * outside // layers
        )
    page = settings.block_size or (SPARSE_PAGE if each_index else PAGE)
    drafted = settings.num_speculative_tokens + 1 if drafts else 0
    limit += EVICTED * max(drafted, 1) + page + (2 * drafted if drafted else page)
    # every stage has the slots of the stage with the largest states
    state = max(
        sum(
            count * part.state_bytes
            for layer, count in counted(held, number)
            for part in pages(SGLANG.title, layer)
        )
        for number in range(ranks.pp)
    )
    states = HELD_STATES + (0 if _named(model, TRACKS_NO_STATES) else TRACKED_STATES)
    plan = SGLang(full + index, window, limit, state, page, States(states, drafted))
    plan.notes += (f"SGLang keeps what has left the windows of {model.name}",) if kept else ()
    return plan


def _named(model: Model, names: Sequence[str]) -> bool:
    """Whether a model is of one of these architectures, by its type."""
    model_type = re.sub(r"[^a-z0-9]", "", model.model_type.lower())
    return any(name in model_type for name in names)


def _row_format(
    entry: CacheEntry,
    beside: Sequence[CacheEntry],
    formats: Formats,
    settings: EngineSettings,
) -> RowFormat:
    """Recurrent states as asked, else as the model has them; index keys of latents in fp8 with
    scales."""
    if entry.role == "recurrent_state" and settings.mamba_ssm_cache_dtype:
        return FORMATS[settings.mamba_ssm_cache_dtype]
    return scaled_index_keys(entry, beside, formats, settings)


def _precision(model: Model, precision: Precision) -> tuple[Precision, tuple[str, ...]]:
    """Packed latents; a float32 checkpoint as fp16, Gemma's as bf16 (configs/model_config.py:
    _get_and_verify_dtype)."""
    precision, remarks = packed_latents("sglang", model, precision)
    precision, cast = downcast(
        SGLANG.title,
        model,
        precision,
        "bf16" if model.model_type.startswith("gemma") else "fp16",
    )
    return precision, (*remarks, *cast)


SGLANG = Engine(
    name="sglang",
    title="SGLang",
    plan=stage_by_stage(_plan),
    defaults=defaults,
    release=release,
    memory=memory,
    ranged=True,
    counts=("max_loras",),
    dtypes=("bf16", "fp16", "fp32", "fp8", "fp8_ds_mla", "nvfp4"),
    precision=_precision,
    row_format=_row_format,
    of="free",
    outside=True,
    long_context_variable="SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",  # configs/model_config.py
)
