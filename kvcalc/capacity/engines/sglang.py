"""SGLang: one pool of token slots, beside it a smaller one for windows, and one of state slots.

Rules as of SGLang's `model_runner_kv_cache_mixin.py` and `server_args.py` (2026). Its "GB" are GiB.
"""

from collections.abc import Sequence
from fractions import Fraction

from kvcalc.capacity.engines.engine import INDEX_ROW, Engine, EngineSettings, index_of_latents, packed_latents
from kvcalc.capacity.engines.layout import Plan, Term
from kvcalc.capacity.engines.sglang_memory import defaults, release, terms
from kvcalc.capacity.engines.stored import Held, counted, pages
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.formats import Formats
from kvcalc.layers.ranks import Parallelism
from kvcalc.storage.dtypes import FORMATS, RowFormat

PAGE, SPARSE_PAGE = 1, 64  # --page-size; the sparse-attention backend runs 64
WINDOW_SHARE = Fraction(4, 5)  # --swa-full-tokens-ratio: slots for windows per slot for full layers
STATE_SHARE = Fraction(9, 10)  # --mamba-full-memory-ratio: bytes for states per byte for keys and values


class SGLang(Plan):
    """Slots of `full` bytes per token for layers without a window and `window` bytes for those with; states of `state` bytes."""

    def __init__(self, full: int, window: int, limit: int, state: int, page: int) -> None:
        if window and not full:  # without full layers, windows are kept like them
            full, window = window, 0
        self.full, self.window, self.limit, self.state = full, window, limit, state
        self.page = self.block_size = page
        self.bytes_per_block = page * (full + window)
        self.notes = (f"{WINDOW_SHARE} as many slots for windows as for full layers",) if window else ()

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
        by_state = -(-sequences * self.state * (1 + STATE_SHARE) / STATE_SHARE // 1)
        return int(max(by_cache, by_state))

    def slots(self, budget: int) -> int:
        """Token slots for full layers that a budget buys, in whole pages (SGLang's max_total_num_tokens)."""
        for_cache = int(budget / (1 + STATE_SHARE)) if self.state else budget
        each = self.full + WINDOW_SHARE * self.window
        return int(for_cache / each) // self.page * self.page if each else 0

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
            found.append(int(budget * STATE_SHARE / (1 + STATE_SHARE)) // self.state)
        return min(found)

    def allocated(self, budget: int, sequences: int, length: int) -> int:
        slots = self.slots(budget)
        states = int(budget * STATE_SHARE / (1 + STATE_SHARE)) // self.state * self.state if self.state else 0
        return slots * self.full + int(slots * WINDOW_SHARE) * self.window + states

    def terms(self) -> list[Term]:
        page = self.page
        found = [Term(page * self.full, page)] if self.full else []
        found += [Term(page * self.window, page, self.limit, 0, "window")] if self.window else []
        return [*found, *([Term(self.state, 1, 0, 1, "state")] if self.state else [])]

    def describe(self, length: int) -> list[str]:
        lines = [f"slot of a token: {self.full:,} B in layers without a window, pages of {self.block_size} tokens"]
        if self.window:
            lines.append(f"slot in window pool: {self.window:,} B, {WINDOW_SHARE} of as many slots, {self.limit:,} tokens each")
        if self.state:
            lines.append(f"states: {self.state:,} B a sequence, {STATE_SHARE} of the bytes that keys and values get")
        return lines


def _plan(held: Sequence[Held], ranks: Parallelism, settings: EngineSettings, stage: int) -> Plan:
    """The pools on one stage. Raises UserError for layers that SGLang has no pool for."""
    full = window = limit = state = 0
    page = PAGE
    for kept, count in [(p, n) for h, n in counted(held, stage) for p in pages(SGLANG.title, h)]:
        state += count * kept.state_bytes
        full += count * kept.index_bytes
        page = SPARSE_PAGE if kept.index_keys else page
        if kept.limit:
            window, limit = window + count * kept.row_bytes, max(limit, kept.limit)
        else:
            full += count * kept.row_bytes
    return SGLang(full, window, limit, state, settings.block_size or page)


def _row_format(entry: CacheEntry, beside: Sequence[CacheEntry], formats: Formats, settings: EngineSettings) -> RowFormat:
    """Recurrent states as asked, else as the model has them; index keys of latents in fp8 with scales."""
    if entry.role == "recurrent_state" and settings.mamba_ssm_cache_dtype:
        return FORMATS[settings.mamba_ssm_cache_dtype]
    return INDEX_ROW if index_of_latents(entry, beside) else formats.cache_format(entry)


SGLANG = Engine(
    name="sglang",
    title="SGLang",
    plan=_plan,
    defaults=defaults,
    release=release,
    memory=terms,
    ranged=True,
    dtypes=("bf16", "fp16", "fp32", "fp8", "fp8_ds_mla", "nvfp4"),
    precision=lambda model, precision: packed_latents("sglang", model, precision),
    row_format=_row_format,
    of="free",
    outside=True,
)
