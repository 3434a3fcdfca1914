"""What an engine is: a value, defined once, at the end of its own file. Everything that tells engines apart is a field here."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from kvcalc.capacity.engines.layout import Plan
from kvcalc.capacity.engines.stored import Held, StoredEntry, StoredPart
from kvcalc.capacity.memory_terms import Start, Terms, Weights, stated, stated_weights
from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.formats import Formats
from kvcalc.layers.part import Part
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.drafts import PADDING
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.storage.dtypes import FORMATS, RowFormat, canonical

INDEX_ROW = FORMATS["fp8_block128"]  # fp8 with an fp32 scale per 128 elements: the index keys of latents in vLLM and SGLang


class EngineSettings(msgspec.Struct, frozen=True):
    """Options of engines. block_size 0 is the engine's own; mamba_ssm_cache_dtype '' is what model and engine choose.

    max_num_batched_tokens: tokens of one pass (llama.cpp: its micro-batch). max_in_flight_batches: passes scheduled before
    the first of them is done. num_speculative_tokens: drafted for each pass that verifies them.
    mamba_cache_mode: none, or align (a second state page that prefix caching keeps, and mamba_checkpoint_blocks more).
    hybrid: windows are freed as they pass. kv_unified: llama.cpp's sequences share one cache, rather than each its own,
    swa_full: its layers with a window hold the whole context. page_tuples: pages of compressed attention lie in tuples of
    every size, as many as the size that most layers have, rather than packed.
    cache_type_k, cache_type_v: llama.cpp's cache dtypes of keys and of values, '' what the cache's dtype says. n_gpu_layers:
    that llama.cpp puts on the GPU, the head first and then the last ones, −1 all; n_cpu_moe: first layers whose experts stay
    with the host, cpu_moe: those of all.
    """

    block_size: int = 0
    max_num_batched_tokens: int = 8192
    max_in_flight_batches: int = 2
    num_speculative_tokens: int = 0
    mamba_cache_mode: str = "none"
    mamba_checkpoint_blocks: int = 0
    mamba_ssm_cache_dtype: str = ""
    hybrid: bool = True
    page_tuples: bool = False
    kv_unified: bool = False
    swa_full: bool = False
    cache_type_k: str = ""
    cache_type_v: str = ""
    n_gpu_layers: int = -1
    n_cpu_moe: int = 0
    cpu_moe: bool = False

    @property
    def in_flight(self) -> int:
        """Tokens scheduled and not yet done: max_num_batched_tokens · max_in_flight_batches."""
        return self.max_num_batched_tokens * self.max_in_flight_batches


class Defaults(NamedTuple):
    """What an engine chooses where nothing is said. tokens: of one pass; sequences: at once, on one dp rank.

    flights: passes scheduled before the first of them is done. drafted: tokens a pass, where something drafts. page_tuples: as
    in the settings.
    """

    tokens: int
    sequences: int
    utilization: float
    flights: int = 2
    drafted: int = 1
    page_tuples: bool = False


Planner = Callable[[Sequence[Held], Parallelism, EngineSettings], Callable[[int], Plan]]
RowRule = Callable[[CacheEntry, Sequence[CacheEntry], Formats, EngineSettings], RowFormat]
PrecisionRule = Callable[[Model, Precision], tuple[Precision, tuple[str, ...]]]
DefaultsRule = Callable[[Gpu, Parallelism, Any, int, Model, int], Defaults]
ReleaseRule = Callable[[str], tuple[Any, str]]
WarningRule = Callable[[Any, Model, Formats, Parallelism], str]
ToldRule = Callable[[Start], object]
WeightsRule = Callable[[Start], Weights]
MemoryRule = Callable[[Start, str], Terms]
GrowthRule = Callable[[Start, Terms], Terms]
ContentRule = Callable[[Held], Iterable[StoredEntry]]
EntriesRule = Callable[[Model, Part], Sequence[CacheEntry]]


def stage_by_stage(rule: Callable[[Sequence[Held], Parallelism, EngineSettings, int], Plan]) -> Planner:
    """The plan of an engine that lays out each stage by itself."""
    return lambda *asked: partial(rule, *asked)


def as_modelled(entry: CacheEntry, beside: Sequence[CacheEntry], formats: Formats, settings: EngineSettings) -> RowFormat:
    """The format that the model's own rules give an entry."""
    return formats.cache_format(entry)


def of_part(model: Model, part: Part) -> Sequence[CacheEntry]:
    """What the part itself says that it keeps."""
    return (*part.cache(), *part.eviction_scores())


def as_asked(model: Model, precision: Precision) -> tuple[Precision, tuple[str, ...]]:
    """The precision unchanged, and nothing to remark."""
    return precision, ()


def as_kept(held: Held) -> Iterable[StoredEntry]:
    """Every entry of a layer, as its mixers keep it."""
    return (entry for part in held.parts for entry in part)


def by_name(start: Start) -> object:
    """Every kind of GPU by itself."""
    return start.gpu.name


def nothing(start: Start) -> object:
    """All GPUs are alike."""
    return ()


def unversioned(text: str) -> tuple[Any, str]:
    """Of an engine whose versions are not told apart: only the latest. Raises UserError for another."""
    if text.strip().lower() not in ("", "latest"):
        raise UserError(f"no versions are known of that engine, so none by engine-version {text!r}", hint="Leave it out")
    return None, ""


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of one engine.

    name: as people type it; title: as its makers write it. plan: layers, ranks, settings → a pipeline stage → the layout of
    that stage's cache memory; raises UserError for layers that it has no pages for.
    dtypes: cache dtypes that it takes (None: all), unmodelled: those that it takes and whose layout is not modelled here.
    takes: settings that this engine alone has. counts: those of max_loras, limit_mm_per_prompt and engram_config whose bytes
    it knows.
    precision: what it makes of a precision asked for, with remarks. entries: what it keeps of one part of a model, where that
    is not what the part says; raises UserError for what it does not run as the model says. row_format: how it stores one entry,
    given the part's entries. content: the entries of a layer that it holds, where they are not the mixers' own. release: a
    version as typed → its rules, in the engine's own terms, and a remark. defaults: GPU, ranks, that release, the tokens of a
    pass (0: not given), the model and the longest sequence → what it chooses. warns: of what its CUDA graphs may take that is
    not predicted, ''. memory: a start and an end of the range → the terms beside the cache; ranged: that the ends differ.
    of: its share is of the total memory, of what is free before the weights, or of what is remaining beside them.
    outside: activations and overhead lie outside the share. grows: terms that hold whatever the context → those of the
    context of a start, where its buffers grow with it.
    spreads_context: it has decode-context parallelism. takes_num_blocks: its number of blocks can be given.
    told: what its terms go by of a GPU: those of GPUs that are alike in it are the same. aside: where its terms can be asked for
    an array of sequences, what they go by of a stage, but for the weights; weights: those of a stage.
    unlike_drafts: entries of padding by which a draft's vocabulary may differ from the model's.
    refuses_below_one_sequence: it does not start where not even one sequence of the longest length fits.
    smaller_weights: formats with fewer bits that it can load, the largest first. long_context_variable: the environment
    variable that it requires for contexts beyond the model's own maximum; '' if it requires none.
    """

    name: str
    title: str
    plan: Planner
    defaults: DefaultsRule
    release: ReleaseRule = unversioned
    warns: WarningRule | None = None
    memory: MemoryRule = stated
    ranged: bool = False
    dtypes: tuple[str, ...] | None = None
    unmodelled: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    precision: PrecisionRule = as_asked
    entries: EntriesRule = of_part
    row_format: RowRule = as_modelled
    content: ContentRule = as_kept
    of: str = "total"
    outside: bool = False
    grows: GrowthRule | None = None
    spreads_context: bool = False
    takes_num_blocks: bool = False
    told: ToldRule = by_name
    aside: ToldRule | None = None
    weights: WeightsRule = stated_weights
    unlike_drafts: int = PADDING
    refuses_below_one_sequence: bool = False
    smaller_weights: tuple[str, ...] = ("fp8", "awq")
    long_context_variable: str = ""

    def stored(self, model: Model, precision: Precision) -> tuple[Precision, tuple[str, ...]]:
        """The precision that this engine would run, and remarks where it is not the one asked for.

        Raises UserError for a cache dtype that the engine has not, or that is not modelled.
        """
        used = canonical(precision.kv_cache_dtype)
        if used in self.unmodelled:
            raise UserError(
                f"{self.title}'s allocation under cache dtype {used!r} is not modelled", hint="Engine none counts its content"
            )
        if self.dtypes is not None and used not in (*self.dtypes, "auto"):
            hint = f"It has: auto, {', '.join(self.dtypes)}"
            raise UserError(f"{self.name} has no cache dtype {precision.kv_cache_dtype!r}", hint=hint)
        return self.precision(model, msgspec.structs.replace(precision, kv_cache_dtype=used))

    def parts(
        self, model: Model, kind: str, formats: Formats, ranks: Parallelism, settings: EngineSettings
    ) -> tuple[StoredPart, ...]:
        """What each part of a layer of `kind` keeps or reads, in this engine's formats, on one rank."""
        layer, found = model.kinds[kind], []
        for entries in filter(None, (self.entries(model, part) for part in (*layer.parts, *layer.shared))):
            rows = ((e, ranks.share(e.heads), self.row_format(e, entries, formats, settings)) for e in entries)
            found.append(tuple(StoredEntry(*row) for row in rows))
        return tuple(found)


def packed_latents(engine: str, model: Model, precision: Precision) -> tuple[Precision, tuple[str, ...]]:
    """fp8 latents of sparse attention (DSA) become packed rows of 656 bytes in vLLM and SGLang."""
    sparse = any(e.role == "latent" and e.top for layer in model.kinds.values() for e in layer.entries)
    used = precision.kv_cache_dtype
    if used == "auto" and canonical(precision.dtype) == "auto":
        used = canonical(model.kv_cache_dtype or "")
    if not sparse or used != "fp8":
        return precision, ()
    remark = f"{engine} stores fp8 latents of sparse attention as packed rows (fp8_ds_mla)"
    return msgspec.structs.replace(precision, kv_cache_dtype="fp8_ds_mla"), (remark,)


def downcast(title: str, model: Model, precision: Precision, to: str) -> tuple[Precision, tuple[str, ...]]:
    """What an engine makes of a float32 checkpoint, unless a dtype is asked for; fp8 is of its products alone."""
    asked = canonical(precision.dtype)
    if model.dtype != "fp32" or asked not in ("auto", "fp8"):
        return precision, ()
    remark = f"{title} loads a float32 checkpoint as {to} unless another dtype is asked for"
    quantized = precision.quantization or ("fp8" if asked == "fp8" else "")
    return msgspec.structs.replace(precision, dtype=to, quantization=quantized), (remark,)


def index_of_latents(entry: CacheEntry, beside: Sequence[CacheEntry]) -> bool:
    """Whether an entry holds the index keys of latents, which vLLM and SGLang store alike whatever the cache's dtype."""
    return entry.role == "index_key" and any(e.role == "latent" for e in beside)
