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
    LayerCaches,
    Remarks,
    StoredEntry,
    StoredPart,
    layer_entries,
)
from kvcalc.capacity.memory_budget import EngineStartup, MemoryBreakdown, stated_memory
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.attention import Compressed, Grouped, Latent
from kvcalc.layers.batch import Parallelism
from kvcalc.layers.cache import CacheEntries, CacheEntry
from kvcalc.layers.part import Sublayer
from kvcalc.layers.weights import Formats
from kvcalc.model.model import MAX_PADDING, Model
from kvcalc.model.precision import Precision
from kvcalc.question.fit_question import EngineSettings as EngineSettings
from kvcalc.storage.formats import FORMATS, RowFormat, canonical

# fp8 with an fp32 scale per 128 elements: the index keys of latents in vLLM and SGLang
INDEX_ROW = FORMATS["fp8_block128"]


class Defaults(NamedTuple):
    """The defaults of an engine for one GPU model, parallelism and language model.

    Attributes:
        tokens: Maximum tokens of one forward pass.
        sequences: Maximum concurrent sequences of one data-parallel rank.
        utilization: Share of the memory that the engine may use, from 0 to 1.
        in_flight_batches: Forward passes that are scheduled before the first of them is done.
        draft_tokens: Draft tokens that the model verifies per sequence in a forward pass, with
            speculative decoding.
    """

    tokens: int
    sequences: int
    utilization: float
    in_flight_batches: int = 2
    draft_tokens: int = 1


Planner = Callable[[LayerCaches, Parallelism, EngineSettings], Callable[[int], CacheLayout]]
RowRule = Callable[[CacheEntry, CacheEntries, Formats, EngineSettings], RowFormat]
PrecisionAndRemarks = tuple[Precision, Remarks]


def stage_by_stage(
    rule: Callable[[LayerCaches, Parallelism, EngineSettings, int], CacheLayout],
) -> Planner:
    """Return a function that lays out the caches of all pipeline stages, each one separately.

    The result suits the field `Engine.plan`. It takes layers, parallelism and settings. It returns
    a function that takes the index of a stage and returns the stage's cache layout.

    Args:
        rule: Takes layers, parallelism, settings and the index of a stage. Returns the cache layout
            of one GPU of this stage.
    """
    return lambda *arguments: partial(rule, *arguments)


def part_entries(model: Model, part: Sublayer) -> CacheEntries:
    """Return the cache entries of a sublayer, as the model's own code stores them.

    A cache entry is a kind of stored row, such as keys, values or latents. Engines without their
    own rule use this function as `Engine.entries`.

    Args:
        model: The model. It is not used, but other rules need it.
        part: The sublayer, such as an attention.
    """
    return (*part.cache(), *part.eviction_scores())


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """The rules of one engine: how it lays out the KV cache, and which memory it needs besides.

    A cache entry is a kind of stored row, such as keys, values or latents. Some fields are
    functions.

    Attributes:
        name: Name on the command line.
        title: Official name.
        plan: Takes the layers, the parallelism and the settings. Returns a function that takes the
            index of a pipeline stage and returns the stage's cache layout. Raises UserError for
            layers that the engine cannot store.
        defaults: Takes the GPU, the parallelism, the release, the tokens of a forward pass (0 for
            the default) and the model. Returns the engine's defaults.
        releases: Rules of the known versions, oldest first, in a class of this engine. Each applies
            from its version `since` on.
        oldest_release: The oldest version that is not refused, such as (0, 8).
        memory: Takes the state of one GPU when the engine starts, and an estimate: "low", "middle"
            or "high". Returns the memory of the GPU outside the KV cache. `start.sequences` is an
            int or an array.
        has_memory_range: Whether the low, middle and high estimates differ.
        has_context_buffers: Whether buffers outside the KV cache grow with the context.
        dtypes: Supported dtypes of the KV cache; None for all.
        unmodelled: Dtypes of the KV cache with a layout that kvcalc does not model.
        takes: Options of `fit` that this engine supports although not every engine does.
        precision: Takes the model and the requested precision. Returns the precision that the
            engine runs, and remarks for the user.
        entries: Takes the model and a sublayer. Returns the sublayer's cache entries. Raises
            UserError if the engine runs the sublayer differently from the model.
        row_format: Takes a cache entry, all entries of its sublayer, the formats and the settings.
            Returns the format in which the engine stores the entry.
        content: Takes a layer. Returns the cache entries that the engine stores for it.
        utilization_basis: Memory that the memory share (such as gpu_memory_utilization) refers to:
            "total"; "free", without the memory in use before the weights load; or "remaining", the
            memory that all other parts leave.
        limits_given_cache: Whether a cache size in the options is a maximum. The cache then takes
            at most the computed budget.
        excludes_activations: Whether activations and overhead are outside the share of the engine.
        spreads_context: Whether the engine has decode-context parallelism.
        memory_key: Takes the state of one GPU when the engine starts. Returns the GPU's properties
            that affect `memory`, so that equal GPUs are computed once.
        max_vocabulary_difference: Number of entries by which the vocabulary of a draft model may
            differ from the target's, because of padding.
        refuses_below_one_sequence: Whether the engine refuses to start if not even one sequence of
            the longest length fits.
        checks_free_memory: Whether the engine refuses to start if less than its share of the total
            memory is free.
        smaller_weights: Weight formats that the engine can load and that advice may suggest to save
            memory, largest first.
        long_context_variable: Environment variable that the engine requires for contexts beyond the
            model's maximum; "" for none.
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
    entries: Callable[[Model, Sublayer], CacheEntries] = part_entries
    row_format: RowRule = lambda entry, part, formats, settings: formats.cache_format(entry)
    content: Callable[[LayerCache], Iterable[StoredEntry]] = layer_entries
    utilization_basis: str = "total"
    limits_given_cache: bool = False
    excludes_activations: bool = False
    spreads_context: bool = False
    memory_key: Callable[[EngineStartup], object] = lambda start: None
    max_vocabulary_difference: int = MAX_PADDING
    refuses_below_one_sequence: bool = False
    checks_free_memory: bool = False
    smaller_weights: tuple[str, ...] = ("fp8", "awq")
    long_context_variable: str = ""

    def release(self, text: str) -> tuple[Any, str]:
        """Return the memory rules of an engine version, and a remark for the user or "".

        `0.11` means the first known version 0.11.x. A version between two known versions has the
        rules of the older version, and the remark says so. `latest` and "" mean the last known
        version. If no version of the engine is known, the rules are then None.

        Args:
            text: Text of the version, such as "0.11", "v0.11.2" or "latest".

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
        since = ".".join(map(str, rules.since))
        relation = f"{'nearest older' if older else 'oldest'} version known"
        return rules, f"{self.title} {name}: by the rules of {since}, the {relation}"

    def supported_precision(self, model: Model, precision: Precision) -> PrecisionAndRemarks:
        """Return the precision that this engine runs, and remarks if it differs from the request.

        Args:
            model: The model.
            precision: The requested data types of weights, activations and cache.

        Raises:
            UserError: The engine does not support the cache dtype, or kvcalc does not model its
                layout.
        """
        dtype = canonical(precision.kv_cache_dtype)
        if dtype in self.unmodelled:
            raise UserError(
                f"{self.title}'s allocation under cache dtype {dtype!r} is not modelled",
                "Use --engine none to count its content",
            )
        if self.dtypes is not None and dtype not in (*self.dtypes, "auto"):
            raise UserError(
                f"{self.name} has no cache dtype {precision.kv_cache_dtype!r}",
                "Add --engine llama.cpp"
                if dtype.startswith("q") and self.name != "llama.cpp"
                else f"It has: auto, {', '.join(self.dtypes)}",
            )
        return self.precision(model, replace(precision, kv_cache_dtype=dtype))

    def loaded_precision(self, model: Model, precision: Precision) -> Precision:
        """Return the precision in which this engine loads the model's weights.

        It differs from the request for float32 checkpoints and under llama.cpp.

        Args:
            model: The model.
            precision: The requested data types of weights, activations and cache.

        Raises:
            UserError: The engine does not support the cache dtype.
        """
        if model.dtype == "fp32" or self.name == "llama.cpp":
            precision, _ = self.supported_precision(model, precision)
        return precision

    def stored_parts(
        self,
        model: Model,
        kind: str,
        formats: Formats,
        ranks: Parallelism,
        settings: EngineSettings,
    ) -> tuple[StoredPart, ...]:
        """Return the cache entries of a layer on one GPU, in this engine's formats, by sublayer.

        There is one tuple per sublayer, with its entries, such as keys and values. Sublayers
        without a cache are left out.

        Args:
            model: The model.
            kind: Name of the layer kind, a key of `model.kinds`.
            formats: Formats of weights and cache.
            ranks: The parallelism. Tensor-parallel ranks share the heads of an entry.
            settings: The engine's settings, such as the dtype of recurrent states.
        """
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
    """Return the precision in which vLLM and SGLang store the latents of sparse attention (DSA).

    They pack fp8 latents in rows of 656 bytes, the cache dtype "fp8_ds_mla". Another cache dtype,
    or a model without such latents, leaves the precision unchanged. The second value is a tuple of
    remarks for the user: none without such latents, otherwise one on the packed rows or on the
    index keys, which are in fp8 for every cache dtype.

    Args:
        engine: Name of the engine in the remark.
        model: The model.
        precision: The requested precision.
    """
    dtype = precision.kv_cache_dtype
    if dtype == "auto" and canonical(precision.dtype) == "auto":
        dtype = canonical(model.kv_cache_dtype or "")
    if not any(e.role == "latent" and e.max_rows_per_query for e in model.entries):
        return precision, ()
    if dtype != "fp8":
        return precision, (f"{engine} stores the index keys of sparse attention in fp8",)
    remark = f"{engine} stores fp8 latents of sparse attention as packed rows (fp8_ds_mla)"
    return replace(precision, kv_cache_dtype="fp8_ds_mla"), (remark,)


def downcast(title: str, model: Model, precision: Precision, to: str) -> PrecisionAndRemarks:
    """Return the precision in which an engine loads a float32 checkpoint, and remarks.

    Engines load float32 weights in 16 bits unless another dtype is requested. If fp8 is requested,
    the GEMMs are in fp8, and everything else is in `to`. For other checkpoints, the precision is
    unchanged, and there is no remark.

    Args:
        title: Official name of the engine, for the remark.
        model: The model.
        precision: The requested precision.
        to: The engine's dtype for float32 checkpoints, such as "bf16".
    """
    dtype = canonical(precision.dtype)
    if model.dtype != "fp32" or dtype not in ("auto", "fp8"):
        return precision, ()
    remark = f"{title} loads a float32 checkpoint as {to} unless another dtype is requested"
    quantized = precision.quantization or ("fp8" if dtype == "fp8" else "")
    return replace(precision, dtype=to, quantization=quantized), (remark,)


def scaled_index_keys(
    entry: CacheEntry, part: CacheEntries, formats: Formats, settings: EngineSettings
) -> RowFormat:
    """Return the format in which vLLM and SGLang store a cache entry.

    A cache entry is a kind of stored row, such as keys. The index keys of sparse attention on
    latents (DSA) are in fp8 with scales, for every dtype of the cache. Recurrent states have the
    dtype `mamba_ssm_cache_dtype` of the settings, if there is one. Other entries have the cache's
    format.

    Args:
        entry: The cache entry.
        part: All cache entries of the same sublayer, including `entry`.
        formats: The deployment's formats.
        settings: The engine's settings. Only the dtype of states counts.
    """
    if entry.role == "recurrent_state" and settings.mamba_ssm_cache_dtype:
        return FORMATS[settings.mamba_ssm_cache_dtype]
    if entry.role == "index_key" and any(e.role == "latent" for e in part):
        return INDEX_ROW
    return formats.cache_format(entry)


def rope_table_bytes(model: Model) -> int:
    """Return the bytes of a model's tables of rotary embeddings (RoPE), in full on each GPU.

    Each distinct table has positions · width elements of 2 bytes (rotary_embedding/base.py, 0.20).
    `model.rope_tables` states both numbers. If it is empty, there is one table. Its positions are
    the model's maximum context, its width is the largest head width of the attention layers. In
    latent attention (MLA), only the rotated part of a head counts.
    """
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
    """Return the bytes of the vision encoder's weights on one GPU, 2 bytes per parameter.

    The encoder is on the first pipeline stage. It is split over the tensor-parallel ranks if the
    model's vision tower is sharded. The result is 0 on other stages, without a vision tower, and if
    prompts have no images (models/interfaces.py, 0.28).

    Args:
        start: The GPU when the engine starts.
    """
    vision = start.model.vision
    if not vision or start.stage or start.options.max_images == 0:
        return 0
    return 2 * vision.parameters // (start.ranks.tp if vision.sharded else 1)
