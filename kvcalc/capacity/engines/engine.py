"""The `Engine` type, whose fields are the differences between engines, and rules that several
engines share.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from kvcalc.capacity.engines.layout import (
    CacheLayout,
    LayerCache,
    StoredEntry,
    StoredPart,
    layer_entries,
)
from kvcalc.capacity.memory_budget import EngineStartup, MemoryBreakdown, stated_memory
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.attention import Compressed, Grouped, Latent
from kvcalc.layers.batch import Parallelism
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.part import Sublayer
from kvcalc.layers.weights import Formats
from kvcalc.model.model import MAX_PADDING, Model
from kvcalc.model.precision import Precision
from kvcalc.question.fit_question import EngineSettings as EngineSettings
from kvcalc.storage.formats import FORMATS, RowFormat, canonical

# fp8 with an fp32 scale per 128 elements: the index keys of latents in vLLM and SGLang
INDEX_ROW = FORMATS["fp8_block128"]


class Defaults(NamedTuple):
    """Defaults of an engine for one GPU and model.

    Attributes:
        tokens: Maximum tokens of one pass.
        sequences: Concurrent sequences of one dp rank.
        utilization: Share of the memory that the engine may use.
        in_flight_batches: Passes that are scheduled before the first is done.
        draft_tokens: Draft tokens per pass.
    """

    tokens: int
    sequences: int
    utilization: float
    in_flight_batches: int = 2
    draft_tokens: int = 1


Planner = Callable[
    [Sequence[LayerCache], Parallelism, EngineSettings], Callable[[int], CacheLayout]
]
RowRule = Callable[[CacheEntry, Sequence[CacheEntry], Formats, EngineSettings], RowFormat]
PrecisionAndRemarks = tuple[Precision, tuple[str, ...]]


def stage_by_stage(
    rule: Callable[[Sequence[LayerCache], Parallelism, EngineSettings, int], CacheLayout],
) -> Planner:
    """Return the planner of an engine that plans each stage separately."""
    return lambda *arguments: partial(rule, *arguments)


def part_entries(model: Model, part: Sublayer) -> Sequence[CacheEntry]:
    """Return the cache entries that the part itself lists. Engines without their own rule use
    this."""
    return (*part.cache(), *part.eviction_scores())


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of one engine.

    Attributes:
        name, title: The name on the command line, and the official name.
        plan: Takes layers, ranks and settings. Returns a function that takes a pipeline stage and
            returns the layout of its cache. Raises UserError for layers that the engine cannot
            store.
        defaults: Takes GPU, ranks, release, tokens of a pass (0 for the default) and model. Returns
            the engine's defaults.
        releases: Rules from version `since` on, oldest first, in a type of this engine.
        oldest_release: The oldest version that is not refused.
        memory: Takes a start and an estimate of the range. Returns the memory outside the cache.
            The sequences of the start are an int or an array.
        has_memory_range: Whether the estimates of the range differ.
        has_context_buffers: Whether buffers outside the cache grow with the context.
        dtypes: Supported cache dtypes; None for all.
        unmodelled: Cache dtypes with a layout that is not modelled.
        takes: Options of `fit` that this engine supports although not every engine does.
        precision: Takes the model and the requested precision. Returns the precision that the
            engine runs, and remarks.
        entries: Takes the model and a part. Returns the part's cache entries. Raises UserError if
            the engine runs the part differently from the model.
        row_format: Takes an entry, its part, the formats and the settings. Returns the format in
            which the engine stores the entry.
        content: Takes a layer. Returns the entries that the engine stores.
        utilization_basis: Memory that the share refers to: total, free or remaining.
        excludes_activations: Whether activations and overhead are outside the share.
        spreads_context: Whether the engine has decode-context parallelism.
        memory_key: Takes a start. Returns the properties of its GPU that affect `memory`.
        max_vocabulary_difference: Padding entries by which a draft's vocabulary may differ.
        refuses_below_one_sequence: Whether the engine refuses to start if not even one sequence of
            the longest length fits.
        checks_free_memory: Whether the engine refuses to start if less than its share of the total
            memory is free.
        smaller_weights: Smaller weight formats that the engine can load, largest first.
        long_context_variable: Environment variable that the engine requires for contexts beyond the
            model's maximum.
    """

    name: str
    title: str
    plan: Planner
    defaults: Callable[[Gpu, Parallelism, Any, int, Model], Defaults]
    releases: Sequence[Any] = ()
    oldest_release: tuple[int, ...] = ()
    memory: Callable[[EngineStartup, str], MemoryBreakdown] = stated_memory
    has_memory_range: bool = False
    has_context_buffers: bool = False
    dtypes: tuple[str, ...] | None = None
    unmodelled: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    precision: Callable[[Model, Precision], PrecisionAndRemarks] = lambda _, precision: (
        precision,
        (),
    )
    entries: Callable[[Model, Sublayer], Sequence[CacheEntry]] = part_entries
    row_format: RowRule = lambda entry, part, formats, settings: formats.cache_format(entry)
    content: Callable[[LayerCache], Iterable[StoredEntry]] = layer_entries
    utilization_basis: str = "total"
    excludes_activations: bool = False
    spreads_context: bool = False
    memory_key: Callable[[EngineStartup], object] = lambda start: None
    max_vocabulary_difference: int = MAX_PADDING
    refuses_below_one_sequence: bool = False
    checks_free_memory: bool = False
    smaller_weights: tuple[str, ...] = ("fp8", "awq")
    long_context_variable: str = ""

    def release(self, text: str) -> tuple[Any, str]:
        """Return the rules of an engine version, and a remark if they are the rules of another
        version.

        `0.11` means the first known version 0.11.x. A version between two known versions has the
        rules of the older version. `latest` and "" mean the last known version.

        Raises:
            UserError: The text is not a version, the version is too old, or the engine has no known
                versions.
        """
        name = text.strip().lower().removeprefix("v")
        if name in ("", "latest"):
            return (self.releases[-1] if self.releases else None), ""
        if not self.releases:
            raise UserError(
                f"no versions are known of that engine, so none by engine-version {text!r}",
                "Leave it out",
            )
        if not re.fullmatch(r"\d{1,4}(\.\d{1,4}){1,3}(\.?(post|rc|dev)\d*)?", name):
            raise UserError(
                f"unknown engine-version {text!r}", "Give one like 0.11, 0.11.2 or latest"
            )
        version = tuple(map(int, re.findall(r"\d+", name)[:3]))
        if version < self.oldest_release:
            supported = ".".join(map(str, self.oldest_release))
            raise UserError(
                f"{self.title} {name} is not predicted: the oldest supported release is {supported}"
            )
        for rules in self.releases:
            if rules.since[: len(version)] == version:
                return rules, ""
        older = [rules for rules in self.releases if rules.since <= version]
        rules = older[-1] if older else self.releases[0]
        relation = "the nearest older version" if older else "the oldest version"
        since = ".".join(map(str, rules.since))
        return rules, f"{self.title} {name}: by the rules of {since}, {relation} known"

    def supported_precision(self, model: Model, precision: Precision) -> PrecisionAndRemarks:
        """Return the precision that this engine would run, and remarks if it differs from the
        requested one.

        Raises:
            UserError: The engine does not support the cache dtype, or the dtype's layout is not
                modelled.
        """
        dtype = canonical(precision.kv_cache_dtype)
        if dtype in self.unmodelled:
            raise UserError(
                f"{self.title}'s allocation under cache dtype {dtype!r} is not modelled",
                "Engine none counts its content",
            )
        if self.dtypes is not None and dtype not in (*self.dtypes, "auto"):
            raise UserError(
                f"{self.name} has no cache dtype {precision.kv_cache_dtype!r}",
                f"It has: auto, {', '.join(self.dtypes)}",
            )
        return self.precision(model, replace(precision, kv_cache_dtype=dtype))

    def stored_parts(
        self,
        model: Model,
        kind: str,
        formats: Formats,
        ranks: Parallelism,
        settings: EngineSettings,
    ) -> tuple[StoredPart, ...]:
        """Return the cache entries of each part of a layer on one rank, in this engine's
        formats."""
        layer, parts = model.kinds[kind], []
        for part in layer.all_parts:
            stored_entries = []
            entries = self.entries(model, part)
            for entry in entries:
                row_format = self.row_format(entry, entries, formats, settings)
                stored_entries.append(StoredEntry(entry, ranks.share(entry.heads), row_format))
            if stored_entries:
                parts.append(tuple(stored_entries))
        return tuple(parts)


def packed_latents(engine: str, model: Model, precision: Precision) -> PrecisionAndRemarks:
    """Turn fp8 latents of sparse attention (DSA) into packed rows of 656 bytes, as vLLM and SGLang
    do."""
    dtype = precision.kv_cache_dtype
    if dtype == "auto" and canonical(precision.dtype) == "auto":
        dtype = canonical(model.kv_cache_dtype or "")
    if dtype != "fp8" or not any(
        e.role == "latent" and e.max_rows_per_query for e in model.entries
    ):
        return precision, ()
    remark = f"{engine} stores fp8 latents of sparse attention as packed rows (fp8_ds_mla)"
    return replace(precision, kv_cache_dtype="fp8_ds_mla"), (remark,)


def downcast(title: str, model: Model, precision: Precision, to: str) -> PrecisionAndRemarks:
    """Return the precision in which an engine loads a float32 checkpoint, and a remark.

    A requested dtype has priority, unless it is fp8, which applies only to GEMMs.
    """
    dtype = canonical(precision.dtype)
    if model.dtype != "fp32" or dtype not in ("auto", "fp8"):
        return precision, ()
    remark = f"{title} loads a float32 checkpoint as {to} unless another dtype is requested"
    quantized = precision.quantization or ("fp8" if dtype == "fp8" else "")
    return replace(precision, dtype=to, quantization=quantized), (remark,)


def scaled_index_keys(
    entry: CacheEntry,
    part: Sequence[CacheEntry],
    formats: Formats,
    settings: EngineSettings,
) -> RowFormat:
    """Return the format in which vLLM and SGLang store an entry.

    The index keys of latents are in fp8 with scales, under every dtype of the cache. Recurrent
    states are in the requested dtype, if there is one.
    """
    if entry.role == "recurrent_state" and settings.mamba_ssm_cache_dtype:
        return FORMATS[settings.mamba_ssm_cache_dtype]
    if entry.role == "index_key" and any(e.role == "latent" for e in part):
        return INDEX_ROW
    return formats.cache_format(entry)


def rope_table_bytes(model: Model) -> int:
    """Return the bytes of rotary tables: positions · width · 2 for each distinct table
    (rotary_embedding/base.py, 0.20)."""
    if model.rope_tables:
        return sum(2 * positions * width for positions, width in model.rope_tables)
    widths = [0]
    for part in model.parts:
        if isinstance(part, Latent | Compressed):
            widths.append(part.qk_rope_head_dim)
        elif isinstance(part, Grouped):
            widths.append(part.head_dim)
    return 2 * (model.max_context or 0) * max(widths)


def vision_tower_bytes(start: EngineStartup) -> int:
    """Return the bytes of the vision tower, which is on the first stage and split over tp.

    The result is 0 if requests have no images (models/interfaces.py, 0.28).
    """
    vision = start.model.vision
    if not vision or start.stage or start.options.max_images == 0:
        return 0
    return 2 * vision.parameters // (start.ranks.tp if vision.sharded else 1)
