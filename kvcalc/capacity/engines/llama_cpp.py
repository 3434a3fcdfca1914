"""llama.cpp: cells for the whole context of all sequences, allocated at start, and a smaller cache for windows.

Rules as of llama.cpp's `src/llama-kv-cache-iswa.cpp`, `src/llama-kv-cache.cpp`, `src/llama-context.cpp` and
`src/llama-memory-recurrent.cpp` (autumn 2026): cells in multiples of 256, f16 keys and values unless told otherwise, states
in f32. One cache for all sequences (unified), or one for each: `llama_context_default_params` and `common_params`
(`common/common.h`) say each its own; `tools/server/server.cpp` takes one for all only where it chooses the slots itself.
"""

from collections.abc import Sequence

import msgspec

from kvcalc.capacity.engines.engine import Defaults, Engine, EngineSettings, stage_by_stage
from kvcalc.capacity.engines.layout import Plan, Term
from kvcalc.capacity.engines.llama_cpp_layers import PATTERNED, entries, remarks, unwindowed
from kvcalc.capacity.engines.llama_cpp_memory import PAD, grown, host_layers, terms
from kvcalc.capacity.engines.stored import Held, counted, pages
from kvcalc.errors import UserError
from kvcalc.layers.cache import CacheEntry, Span
from kvcalc.layers.formats import Formats
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.storage.dtypes import FORMATS, RowFormat, cache_layout, canonical

UBATCH = 512  # --ubatch-size
TYPES = ("fp32", "bf16", "fp16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")  # common/arg.cpp, kv_cache_types


class LlamaCpp(Plan):
    """`full` bytes per cell of layers without a window, `window` bytes per cell of those with, `state` bytes a sequence."""

    block_size = PAD
    host: "LlamaCpp | None" = None

    def __init__(self, full: int, window: int, limit: int, state: int, settings: EngineSettings) -> None:
        self.full, self.window, self.limit, self.state = full, window, limit, state
        self.unified, self.ubatch = settings.kv_unified, settings.max_num_batched_tokens
        self.notes = (f"llama.cpp: {'one cache for all sequences' if self.unified else 'a cache for each sequence'}",)

    def cells(self, sequences: int, length: int, shared: int = 0) -> int:
        """Cells of layers without a window: n · pad(L); unified pad(n · L), with a common prefix once."""
        if not self.unified:
            return sequences * _padded(length)
        common = min(shared, length)
        return _padded(common + sequences * (length - common))

    def window_cells(self, sequences: int, length: int) -> int:
        """n · min(pad(L), pad(W + ubatch)); unified min(pad(n · L), pad(W · n + ubatch))."""
        if not self.unified:
            return sequences * min(_padded(length), _padded(self.limit + self.ubatch))
        return min(_padded(sequences * length), _padded(self.limit * sequences + self.ubatch))

    def cache_bytes(self, sequences: int, length: int, shared: int = 0) -> int:
        """Bytes of the cells, as llama.cpp logs them: full and window caches together, recurrent states apart."""
        found = self.cells(sequences, length, shared) * self.full
        return found + self.window_cells(sequences, length) * self.window if self.window else found

    def needed(self, sequences: int, length: int, shared: int = 0) -> int:
        return self.cache_bytes(sequences, length, shared) + sequences * self.state

    def allocated(self, budget: int, sequences: int, length: int) -> int:
        return self.cache_bytes(sequences, length)

    def parts(self, sequences: int, length: int) -> dict[str, int]:
        """The window caches, which kv_cache_allocated_bytes includes, and the recurrent states, which it does not.

        And what of both kinds is in the host's memory, which neither includes.
        """
        apart = {"host_cache_bytes": self.host.needed(sequences, length)} if self.host else {}
        window = self.window_cells(sequences, length) * self.window if self.window else 0
        return {"window_cache_bytes": window, "state_bytes": sequences * self.state, **apart}

    def terms(self) -> list[Term]:
        found = [Term(PAD * self.full, PAD)] if self.full else []
        if self.window:
            most = _padded(self.limit + self.ubatch)
            found.append(Term(PAD * self.window, PAD, most, 0, "window and micro-batch"))
        return [*found, *([Term(self.state, 1, 0, 1, "state")] if self.state else [])]

    def describe(self, length: int) -> list[str]:
        cells = self.cells(1, length)
        lines = [f"{cells:,} cells × {self.full:,} B in layers without a window = {cells * self.full:,} B"]
        if self.window:
            held = self.window_cells(1, length)
            lines.append(
                f"{held:,} cells (least of all and {self.limit:,} + {self.ubatch:,}, padded to {PAD}) × {self.window:,} B "
                f"in layers with one = {held * self.window:,} B"
            )
        return [*lines, *([f"recurrent states, in a buffer of their own: {self.state:,} B a sequence"] if self.state else [])]


def _padded(cells: int) -> int:
    return -(-cells // PAD) * PAD


def _plan(held: Sequence[Held], ranks: Parallelism, settings: EngineSettings, stage: int) -> Plan:
    """The caches on one stage; of layers that the host keeps, a plan of their own. Raises UserError where none is left here."""
    first = host_layers(held[0].model, settings.n_gpu_layers)
    interleaved = set() if settings.swa_full else _interleaved(held)
    plan = _caches(held[first:], interleaved, settings, stage)
    if not (plan.full or plan.window or plan.state):
        raise UserError(f"no layer of {held[0].model.name} that keeps a cache is on the GPU", hint="Raise n-gpu-layers")
    if first:
        plan.host = _caches(held[:first], interleaved, settings, stage)
        plan.notes += (f"llama.cpp: the first {first} layers and their caches are in the host's memory",)
    return plan


def _caches(held: Sequence[Held], interleaved: set[int], settings: EngineSettings, stage: int) -> LlamaCpp:
    """The caches of some layers. Raises UserError for layers that llama.cpp has no cache for."""
    full = window = limit = state = 0
    for h, count in counted(held, stage):
        for kept in pages(LLAMA_CPP.title, h):
            state += count * kept.state_bytes
            full += count * kept.index_bytes
            if kept.limit and id(h.model) in interleaved:
                window, limit = window + count * kept.row_bytes, max(limit, kept.limit)
            else:
                full += count * kept.row_bytes
    return LlamaCpp(full, window, limit, state, settings)


def _interleaved(held: Sequence[Held]) -> set[int]:
    """The models, by id, whose windows llama.cpp reads: not those with one in every layer (`src/models/llama.cpp`, of mistral;
    `starcoder2.cpp`, `phi3.cpp`), unless their type has a pattern of windows, nor those that `unwindowed` knows."""
    layers = {id(h.parts): h for h in held if not unwindowed(h.model)}.values()
    found = {id(h.model) for h in layers for kept in pages(LLAMA_CPP.title, h) if kept.rows and not kept.limit}
    return found | {id(h.model) for h in layers if h.model.model_type in PATTERNED}


def _precision(model: Model, precision: Precision) -> tuple[Precision, tuple[str, ...]]:
    """fp16 where nothing is asked for: llama.cpp's own default, whatever the model's dtype. What it keeps otherwise is said."""
    if precision.kv_cache_dtype == "auto":
        precision = msgspec.structs.replace(precision, kv_cache_dtype="fp16")
    return precision, remarks(model)


def _row_format(entry: CacheEntry, beside: Sequence[CacheEntry], formats: Formats, settings: EngineSettings) -> RowFormat:
    """States of both kinds in fp32; keys, latents and index keys in K's type, values in V's.

    Raises UserError where llama.cpp makes no context (`llama_init_from_model`, `src/llama-context.cpp`): blocks that do not
    divide a head, or latents with two types.
    """
    if entry.span is Span.STATE:
        return FORMATS["fp32"]
    types = [canonical(t) or formats.kv_cache_dtype for t in (settings.cache_type_k, settings.cache_type_v)]
    if types[0] != types[1] and any(e.role == "latent" for e in beside):
        raise UserError(f"llama.cpp stores latents in one type, not keys in {types[0]} and values in {types[1]}")
    stored = cache_layout(types[entry.role == "v"]).get(entry.role) or formats.cache_format(entry)
    if stored.whole_groups and entry.width % stored.group:
        raise UserError(
            f"llama.cpp refuses a cache of {stored.name}: its blocks of {stored.group} do not divide a head of {entry.width}",
            hint="Use fp16 or bf16",
        )
    return stored


LLAMA_CPP = Engine(
    name="llama.cpp",
    title="llama.cpp",
    plan=stage_by_stage(_plan),
    defaults=lambda gpu, ranks, release, tokens, *asked: Defaults(tokens or UBATCH, 1, 1.0),
    memory=terms,
    grows=grown,
    told=lambda start: start.gpu.per,
    dtypes=TYPES,
    takes=("cache_type_k", "cache_type_v", "kv_unified", "swa_full", "n_gpu_layers", "n_cpu_moe", "cpu_moe"),
    precision=_precision,
    entries=entries,
    row_format=_row_format,
    of="free",
    smaller_weights=("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m"),
)
