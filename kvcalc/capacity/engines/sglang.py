"""SGLang: one pool of token slots, beside it a smaller one for windows, and one of state slots.

Rules as of SGLang 0.5.23: `model_executor/pool_configurator.py`, `mem_cache/kv_cache_configurator.py` (`_handle_max_mamba_cache`,
`resolve_max_num_reqs`), `configs/model_config.py` (`is_hybrid_swa_model`), `arg_groups/overrides.py`. Its "GB" are GiB.
"""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from kvcalc.capacity.engines.engine import (
    INDEX_ROW,
    Engine,
    EngineSettings,
    downcast,
    index_of_latents,
    nothing,
    packed_latents,
    stage_by_stage,
)
from kvcalc.capacity.engines.layout import Plan, Term
from kvcalc.capacity.engines.sglang_memory import defaults, release, terms
from kvcalc.capacity.engines.stored import Held, counted, pages
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.formats import Formats
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.storage.dtypes import FORMATS, RowFormat

PAGE, SPARSE_PAGE = 1, 64  # --page-size; the sparse-attention backend runs 64
WINDOW_SHARE = Fraction(4, 5)  # --swa-full-tokens-ratio: slots for windows per slot for full layers
STATE_SHARE = Fraction(9, 10)  # --mamba-full-memory-ratio: bytes for states per byte for keys and values
EVICTED = 128  # tokens behind the window after which a decoding sequence gives their slots back
HELD_STATES, TRACKED_STATES = 3, 2  # state slots of a running request, and those that its prefix cache tracks beside them
FREES_WINDOWS = (
    "gptoss", "llama4", "mimov2", "step35", "step37", "step3p5", "step3p7", "gemma4", "laguna", "mellum", "inkling",
    "graniteswa", "granitemoeswa", "iquestq1", "unlimitedocr", "museglimmer",
)  # fmt: skip
TRACKS_NO_STATES = ("lfm2", "jetnemotron", "jetvlm", "zaya")


class States(NamedTuple):
    """State slots of one request: those that it holds, and more for the tokens that are verified at once (0: none drafted)."""

    held: int = 1
    drafted: int = 0


ONE_STATE = States()


class SGLang(Plan):
    """Slots of `full` bytes per token for layers without a window and `window` bytes for those with; states of `state` bytes.

    limit: tokens of a sequence in the window pool at most. states: the slots of one request.
    """

    def __init__(self, full: int, window: int, limit: int, state: int, page: int, states: States = ONE_STATE) -> None:
        if window and not full:  # without full layers, windows are kept like them
            full, window = window, 0
        self.full, self.window, self.limit, self.state = full, window, limit, state
        self.held, self.drafted = states
        self.page = self.block_size = page
        self.bytes_per_block = page * (full + window)
        shares = (f"{WINDOW_SHARE} as many slots for windows as for full layers",) if window else ()
        self.notes = (*shares, *((f"{self.held} state slots a sequence",) if state and self.held > 1 else ()))

    def needed(self, sequences: int, length: int, shared: int = 0) -> int:
        """The least budget with enough slots of each kind; the split between the pools is fixed, so the scarcer decides."""
        return self._budget(self._slots(sequences, length, shared), sequences)

    def _slots(self, sequences: int, length: int, shared: int) -> int:
        page = self.page
        common = min(shared, length) // page * page
        slots = common + sequences * (-(-length // page) * page - common)
        if self.window:
            held = sequences * -(-min(length, self.limit) // page) * page
            slots = max(slots, -(-held * WINDOW_SHARE.denominator // WINDOW_SHARE.numerator))
        return -(-slots // page) * page

    def _budget(self, slots: int, sequences: int) -> int:
        cache = slots * self.full + int(slots * WINDOW_SHARE) * self.window
        if not self.state:
            return cache
        by_cache = -(-cache * (1 + STATE_SHARE) // 1)
        states = 1 + self.drafted + sequences * (self.held + self.drafted) if sequences else 0
        by_state = -(-states * self.state * (1 + STATE_SHARE) / STATE_SHARE // 1)
        return int(max(by_cache, by_state))

    def state_slots(self, budget: int) -> int:
        """State slots that requests may hold (SGLang's max_mamba_cache_size): of its share, the padding slot left out."""
        share = Fraction(budget) * STATE_SHARE / (1 + STATE_SHARE)
        each = self.state * (1 + Fraction(self.drafted, self.held))
        return max(0, int((share - self.state * (1 + self.drafted)) // each))

    def _states(self, budget: int) -> int:
        """Bytes of all states: slots with the one for padding, and those of drafted tokens of every request."""
        if not self.state:
            return 0
        slots = self.state_slots(budget)
        return self.state * (slots + 1 + (slots // self.held + 1) * self.drafted) if slots else 0

    def slots(self, budget: int) -> int:
        """Token slots for full layers that a budget buys, in whole pages (SGLang's max_total_num_tokens)."""
        if self.state and not self.state_slots(budget):
            return 0
        each = self.full + WINDOW_SHARE * self.window
        return int((budget - self._states(budget)) / each) // self.page * self.page if each else 0

    def num_blocks(self, budget: int) -> int:
        return self.slots(budget) // self.page

    def request_blocks(self, length: int) -> int:
        return -(-length // self.page)

    def tokens(self, budget: int, length: int) -> int:
        return self.slots(budget) if self.full else super().tokens(budget, length)

    def concurrency(self, budget: int, length: int) -> float:
        """The scarcest of token slots, window slots and state slots, per sequence."""
        page, slots = self.page, self.slots(budget)
        found = [slots / (-(-length // page) * page)] if self.full else []
        if self.window:
            found.append(int(slots * WINDOW_SHARE) / (-(-min(length, self.limit) // page) * page))
        if self.state:
            found.append(self.state_slots(budget) // self.held)
        return min(found)

    def request_bytes(self, budget: int, tokens: Any) -> Any:
        """The scarcest of token slots, window slots and state slots, as its share of the budget."""
        import numpy as np

        page, slots = self.page, self.slots(budget)
        share = (-(-tokens // page) * page) / max(1, slots)
        if self.window:
            held = -(-np.minimum(tokens, self.limit) // page) * page
            share = np.maximum(share, held / max(1, int(slots * WINDOW_SHARE)))
        if self.state:
            share = np.maximum(share, 1 / max(1, self.state_slots(budget) // self.held))
        return np.floor(budget * share).astype(np.int64)

    def allocated(self, budget: int, sequences: int, length: int) -> int:
        slots = self.slots(budget)
        return slots * self.full + int(slots * WINDOW_SHARE) * self.window + self._states(budget)

    def terms(self) -> list[Term]:
        page = self.page
        found = [Term(page * self.full, page)] if self.full else []
        found += [Term(page * self.window, page, self.limit, 0, "window")] if self.window else []
        return [*found, *([Term(self.state * (self.held + self.drafted), 1, 0, 1, "state")] if self.state else [])]

    def describe(self, length: int) -> list[str]:
        lines = [f"slot of a token: {self.full:,} B in layers without a window, pages of {self.block_size} tokens"]
        if self.window:
            lines.append(f"slot in window pool: {self.window:,} B, {WINDOW_SHARE} of as many slots, {self.limit:,} tokens each")
        if self.state:
            each = f"states: {self.state:,} B a slot, {self.held} slots a sequence"
            drafted = f", {self.drafted} more for drafted tokens" if self.drafted else ""
            lines.append(f"{each}{drafted}, one for padding; {STATE_SHARE} of the bytes that keys and values get")
        return lines


def _plan(held: Sequence[Held], ranks: Parallelism, settings: EngineSettings, stage: int) -> Plan:
    """The pools on one stage. Raises UserError for layers that SGLang has no pool for.

    Its token pools have room in every layer, one that reads another's cache too. Layers that predict or draft are counted
    as so many more of the model's own, on every stage.
    """
    model = held[0].model
    own, drafts = held[: model.layers], held[model.layers :]
    frees = settings.hybrid and _named(model, FREES_WINDOWS)
    full = window = index = layers = windowed = limit = 0
    each_index, latent, kept = 0, False, False
    for part, count in [(p, n) for h, n in counted(own, stage) for p in pages(SGLANG.title, h, shared=True)]:
        index += count * part.index_bytes
        each_index, latent = max(each_index, part.index_bytes), latent or part.latent
        kept |= bool(part.limit) and not frees
        if part.limit and frees:
            window, windowed, limit = window + count * part.row_bytes, windowed + count, max(limit, part.limit)
        elif part.rows:
            full, layers = full + count * part.row_bytes, layers + count
    more = [p for h in drafts for p in pages(SGLANG.title, h, shared=True) if p.rows]
    inside = sum(bool(p.limit) for p in more) if frees else 0
    if windowed:
        window += window // windowed * inside
    outside = len(more) - inside * bool(windowed)
    if layers:
        full += full * outside // layers + (outside * each_index if latent else index * outside // layers)
    page = settings.block_size or (SPARSE_PAGE if each_index else PAGE)
    drafted = settings.num_speculative_tokens + 1 if drafts else 0
    limit += EVICTED * max(drafted, 1) + page + (2 * drafted if drafted else page)
    state = max(_state(held, n) for n in range(ranks.pp))
    states = HELD_STATES + (0 if _named(model, TRACKS_NO_STATES) else TRACKED_STATES)
    plan = SGLang(full + index, window, limit, state, page, States(states, drafted))
    plan.notes += (f"SGLang keeps what has left the windows of {model.name}",) if kept else ()
    return plan


def _state(held: Sequence[Held], stage: int) -> int:
    """Bytes of one state slot on a stage; SGLang gives every stage the slots of the one with the largest."""
    return sum(n * p.state_bytes for h, n in counted(held, stage) for p in pages(SGLANG.title, h))


def _named(model: Model, names: Sequence[str]) -> bool:
    """Whether a model is of one of these architectures, by its type."""
    model_type = re.sub(r"[^a-z0-9]", "", model.model_type.lower())
    return any(name in model_type for name in names)


def _row_format(entry: CacheEntry, beside: Sequence[CacheEntry], formats: Formats, settings: EngineSettings) -> RowFormat:
    """Recurrent states as asked, else as the model has them; index keys of latents in fp8 with scales."""
    if entry.role == "recurrent_state" and settings.mamba_ssm_cache_dtype:
        return FORMATS[settings.mamba_ssm_cache_dtype]
    return INDEX_ROW if index_of_latents(entry, beside) else formats.cache_format(entry)


def _precision(model: Model, precision: Precision) -> tuple[Precision, tuple[str, ...]]:
    """Packed latents; a float32 checkpoint as fp16, Gemma's as bf16 (configs/model_config.py: _get_and_verify_dtype)."""
    precision, remarks = packed_latents("sglang", model, precision)
    precision, cast = downcast(SGLANG.title, model, precision, "bf16" if model.model_type.startswith("gemma") else "fp16")
    return precision, (*remarks, *cast)


SGLANG = Engine(
    name="sglang",
    title="SGLang",
    plan=stage_by_stage(_plan),
    defaults=defaults,
    release=release,
    memory=terms,
    ranged=True,
    told=nothing,
    counts=("max_loras",),
    dtypes=("bf16", "fp16", "fp32", "fp8", "fp8_ds_mla", "nvfp4"),
    precision=_precision,
    row_format=_row_format,
    of="free",
    outside=True,
    long_context_variable="SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",  # configs/model_config.py
)
