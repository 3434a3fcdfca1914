"""vLLM: layers to cache specs, the block size, and a plan in blocks.

Rules as of vLLM 0.33 (v1/kv_cache_interface.py, v1/core/kv_cache_planning.py, platforms/interface.py). The grouping of
layers is in `vllm_groups`. All figures are per rank.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvcalc.capacity.engines.engine import INDEX_ROW, Engine, EngineSettings, downcast, index_of_latents, of_part, packed_latents
from kvcalc.capacity.engines.layout import Plan, Term
from kvcalc.capacity.engines.stored import Held, Pages, pages
from kvcalc.capacity.engines.vllm_compressed import BLOCK as COMPRESSED_BLOCK
from kvcalc.capacity.engines.vllm_compressed import compressed_specs, compresses, compresses_tokens, packed_groups, tuple_bytes
from kvcalc.capacity.engines.vllm_groups import Group, Spec, SpecKind, groups_of, promoted
from kvcalc.capacity.engines.vllm_memory import aside, terms, told, warning, weights
from kvcalc.capacity.engines.vllm_pooled import pool_of, pooled_content, pooled_groups
from kvcalc.capacity.engines.vllm_versions import defaults, release
from kvcalc.errors import UserError
from kvcalc.layers.attention import Latent
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.formats import Formats
from kvcalc.layers.part import Part
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.storage.dtypes import FORMATS, KEYS_AND_VALUES_ONLY, RowFormat, canonical
from kvcalc.units import MOST_TOKENS

BLOCK, MLA_BLOCK, MLA_HYBRID_BLOCK = 16, 64, 128  # tokens; FlashMLA and the indexer run 64; hybrids of MLA align to 128
NF4 = ("nf4", "bitsandbytes")
NULL_BLOCKS = 1  # the first block of the pool is a placeholder that no sequence ever gets


class Vllm(Plan):
    """A pool of equal blocks on one stage; every group of layers takes its own blocks from it."""

    def __init__(self, groups: list[Group], stage: int, block: int, ranks: Parallelism, settings: EngineSettings) -> None:
        self.groups, self.stage = groups, stage
        tuples = settings.page_tuples and any(s.latent and s.padded for g in groups for _, s in g.specs)
        widest = max((g.page_bytes(stage) for g in groups), default=0)
        self.bytes_per_block = self._unit = tuple_bytes(groups, stage) if tuples else widest
        self.block_size = block if any(g.spec.kind is not SpecKind.STATE for g in groups) else None
        self.page_bytes = max((g.widest_page() for g in groups), default=0)
        self._counts = [_term(g.spec, ranks.dcp, settings) for g in groups]
        alike = len({s.page for g in groups for _, s in g.specs}) == 1
        padding = sum(g.padding(max(len(o.specs) for o in groups)) for g in groups) if alike else 0
        notes = [f"{padding} padding layers make the groups equal"] if padding else []
        if settings.block_size and block != settings.block_size:
            notes.append(f"blocks of {block} tokens: the layers cannot use {settings.block_size}")
        self.notes = tuple(notes)

    def num_blocks(self, budget: int) -> int:
        """⌊budget / bytes_per_block⌋, the null block among them; a stage without cached layers still has the null block."""
        return budget // self._unit if self._unit else NULL_BLOCKS

    def request_blocks(self, length: int) -> int:
        """Σ over groups: full ⌈L/block⌉; window ⌈min(W − 1 + F, L)/block⌉ + 1; chunk ⌈min(C + F, L)/block⌉; state 1 or 2."""
        return sum(t.count(length) for t in self._counts)

    def needed(self, sequences: int, length: int, shared: int = 0) -> int:
        """The null block, a common prefix's full blocks once per group without a window, and the rest per sequence."""
        common, own = self._blocks(length, shared)
        return self._unit * (NULL_BLOCKS + common + sequences * own)

    def most_sequences(self, budget: int, length: int, shared: int = 0) -> int:
        common, own = self._blocks(length, shared)
        free = self.num_blocks(budget) - NULL_BLOCKS - common
        if not own or not self._unit:
            return MOST_TOKENS if free >= 0 or not self._unit else 0
        return min(MOST_TOKENS, max(0, free) // own)

    def _blocks(self, length: int, shared: int) -> tuple[int, int]:
        """Blocks that all sequences share, and those of each by itself."""
        common = sum(min(shared, length) // t.block for t in self._counts if t.cap < 0)
        return common, self.request_blocks(length) - common

    def pool(self, budget: int) -> int:
        return self.num_blocks(budget) * self._unit

    def many_sequences(self, budgets: Any, length: int, shared: int = 0) -> Any:
        import numpy as np

        own = self.request_blocks(length)
        common = sum(min(shared, length) // t.block for t in self._counts if t.cap < 0)
        if not self._unit or own == common:
            return super().many_sequences(budgets, length, shared)
        return np.clip((budgets // self._unit - NULL_BLOCKS - common) // (own - common), 0, MOST_TOKENS)

    def concurrency(self, budget: int, length: int) -> float:
        """num_blocks ÷ blocks per request, as vLLM logs it: the null block is not taken off."""
        own = self.request_blocks(length)
        return self.num_blocks(budget) / own if own else 0.0

    def terms(self) -> list[Term]:
        return [t._replace(unit=self._unit) for t in self._counts]

    def describe(self, length: int) -> list[str]:
        lines = []
        for group, term in zip(self.groups, self._counts, strict=True):
            blocks, pages = term.count(length), group.pages(self.stage)
            page = " + ".join(f"{n} × {size:,}" for size, n in pages)
            lines.append(
                f"group of {len(group.specs)} {group.spec.kind} layers: pages {page or 'none on this stage'} = "
                f"{group.page_bytes(self.stage):,} B, blocks of {term.block if term.cap else '–'} tokens; "
                f"{blocks:,} blocks at {length:,} tokens"
            )
        return lines


def _plan(held: Sequence[Held], ranks: Parallelism, settings: EngineSettings) -> Callable[[int], Plan]:
    """The pool on each stage. Groups are made over the whole model, so that every stage has the same block tables.

    Raises UserError for layers that vLLM's planner has no page for.
    """
    if compresses(held):
        return _packed_plan(held, ranks, settings)
    if pool_of(held):
        groups, block = pooled_groups(VLLM.title, held, settings.block_size)
        return lambda stage: Vllm(groups, stage, block, ranks, settings)
    kinds = {id(h.parts): h for h in held}
    specs = {key: [s for kept in pages(VLLM.title, h) for s in _specs(kept, settings)] for key, h in kinds.items()}
    block = block_size([s for found in specs.values() for s in found], settings)
    specs = {key: [s.in_blocks(block) for s in found] for key, found in specs.items()}
    layers = [(h.stage, s) for h in held for s in specs[id(h.parts)]]
    if not settings.hybrid:
        layers = promoted(layers)
    if ranks.dcp > 1 and any(s.kind is SpecKind.WINDOW for _, s in layers):
        raise UserError("vLLM spreads no sliding windows over decode-context-parallel ranks")
    groups = groups_of(layers)
    return lambda stage: Vllm(groups, stage, block, ranks, settings)


def _packed_plan(held: Sequence[Held], ranks: Parallelism, settings: EngineSettings) -> Callable[[int], Plan]:
    """The pool of a model that compresses its tokens. Raises UserError without the hybrid cache manager, and with DCP."""
    if not settings.hybrid or ranks.dcp > 1:
        what = "spreads no sliding windows over decode-context-parallel ranks"
        raise UserError(f"vLLM {what}" if ranks.dcp > 1 else "vLLM's pages of compressed attention need its hybrid cache manager")
    block = -(-(settings.block_size or 1) // COMPRESSED_BLOCK) * COMPRESSED_BLOCK
    kinds = {id(h.parts): h for h in held}
    specs = {key: [s for part in h.parts for s in compressed_specs(part, block)] for key, h in kinds.items()}
    groups = packed_groups([(h.stage, s) for h in held for s in specs[id(h.parts)]])
    return lambda stage: Vllm(groups, stage, block, ranks, settings)


def block_size(specs: Sequence[Spec], settings: EngineSettings) -> int:
    """Tokens per block: 16 or as asked, raised to what the backend runs and, beside states, until a page holds a state.

    With `a` bytes of attention per token and layer and `m` bytes of state: align · ⌈m / (align · a)⌉, at least what it was.
    """
    base, latent = settings.block_size or BLOCK, any(s.latent for s in specs)
    if latent:
        base = -(-base // MLA_BLOCK) * MLA_BLOCK
    states = [s.row for s in specs if s.kind is SpecKind.STATE]
    attention = _row(specs)
    if not states or not attention:
        return base
    align = max(base, MLA_HYBRID_BLOCK if latent else BLOCK)
    return max(base, align * -(-max(states) // (align * attention)))


def _row(specs: Sequence[Spec]) -> int:
    """Bytes of attention per token and layer: those of the full layers if there are any."""
    full = [s.row for s in specs if s.kind is SpecKind.FULL and s.main]
    return max(full or [s.row for s in specs if s.kind is not SpecKind.STATE], default=0)


def _term(spec: Spec, dcp: int, settings: EngineSettings) -> Term:
    if spec.kind is SpecKind.STATE:
        pages = 2 + settings.mamba_checkpoint_blocks if settings.mamba_cache_mode == "align" else 1
        return Term(0, 1, 0, pages + settings.num_speculative_tokens, "state")
    if spec.kind is SpecKind.RING:
        return Term(0, 1, 0, 1, "ring")
    if spec.kind is SpecKind.WINDOW:
        return Term(0, spec.block, spec.limit - 1 + settings.in_flight, 1, "window and tokens in flight")
    if spec.kind is SpecKind.CHUNK:
        return Term(0, spec.block, spec.limit + settings.in_flight, 0, "chunk and tokens in flight")
    return Term(0, spec.block * dcp)


def _specs(kept: Pages, settings: EngineSettings) -> list[Spec]:
    """The cache specs of one part: of its rows, of the index keys beside them, or one page for all its states.

    A convolution's state has a column more for each drafted token (model_executor/layers/mamba/mamba_utils.py).
    """
    if kept.states:
        drafted = settings.num_speculative_tokens * sum(s.row_bytes for s in kept.states if s.entry.role == "conv_state")
        shape = tuple((f"{s.entry.role} {s.format.name}", s.heads, s.entry.width * s.entry.limit) for s in kept.states)
        return [Spec(SpecKind.STATE, kept.state_bytes + drafted, shape)]
    kind = SpecKind.CHUNK if kept.chunked else SpecKind.WINDOW if kept.limit else SpecKind.FULL
    shape = tuple((s.entry.role, s.heads, s.entry.width) for s in kept.rows)
    found = [Spec(kind, kept.row_bytes, shape, kept.limit, latent=kept.latent)]
    for s in kept.index_keys:
        index = (("index_key", 1, s.entry.width),)
        found.append(Spec(SpecKind.FULL, s.row_bytes, index, latent=kept.latent, main=False))
    return found


def _entries(model: Model, part: Part) -> Sequence[CacheEntry]:
    """Of MiniCPM3 keys of every head, and values padded to their width (model_executor/models/minicpm3.py)."""
    if isinstance(part, Latent) and model.model_type == "minicpm3":
        return part.expanded(part.qk_nope_head_dim + part.qk_rope_head_dim)
    return of_part(model, part)


def _precision(model: Model, precision: Precision) -> tuple[Precision, tuple[str, ...]]:
    """fp8 latents of sparse attention packed, nf4 with its scales quantised too, and a float32 checkpoint cast to bf16.

    model_loader/bitsandbytes_loader.py: compress_statistics, 0.7 to 0.16.
    """
    precision, remarks = packed_latents("vllm", model, precision)
    if precision.quantization.lower() in NF4:
        nested = "vLLM's bitsandbytes quantises the scales of nf4 too"
        precision, remarks = msgspec.structs.replace(precision, quantization="nf4_double"), (*remarks, nested)
    if canonical(precision.kv_cache_dtype) == "auto" and compresses_tokens(model):
        packed = "vllm packs compressed latents in fp8 (fp8_ds_mla) unless bf16 is asked for"
        precision, remarks = msgspec.structs.replace(precision, kv_cache_dtype="fp8_ds_mla"), (*remarks, packed)
    if model.model_type == "minicpm3":
        remarks = (*remarks, "vllm keeps keys and values of every head of minicpm3, not its latents")
    precision, cast = downcast(VLLM.title, model, precision, "bf16")
    return precision, (*remarks, *cast)


def _row_format(entry: CacheEntry, beside: Sequence[CacheEntry], formats: Formats, settings: EngineSettings) -> RowFormat:
    """Recurrent states as asked, else as the model fixes them, else in its own dtype; index keys of latents in fp8."""
    if entry.role == "recurrent_state" and (settings.mamba_ssm_cache_dtype or entry.assumed):
        return FORMATS[settings.mamba_ssm_cache_dtype or formats.dtype]
    if entry.role == "compressor":
        return FORMATS["fp32"]
    return INDEX_ROW if index_of_latents(entry, beside) else formats.cache_format(entry)


VLLM = Engine(
    name="vllm",
    title="vLLM",
    plan=_plan,
    defaults=defaults,
    release=release,
    warns=warning,
    memory=terms,
    ranged=True,
    counts=("max_loras", "limit_mm_per_prompt", "engram_config"),
    dtypes=(
        "bf16", "fp16", "fp32", "fp8", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla", "fp8_per_token_head", "int8_per_token_head",
        "int4_per_token_head",
    ),
    unmodelled=KEYS_AND_VALUES_ONLY,
    precision=_precision,
    entries=_entries,
    row_format=_row_format,
    content=pooled_content,
    spreads_context=True,
    takes_num_blocks=True,
    told=told,
    aside=aside,
    weights=weights,
    unlike_drafts=0,  # config/speculative.py: verify_equal_vocab_size_if_draft_model
    refuses_below_one_sequence=True,
    long_context_variable="VLLM_ALLOW_LONG_MAX_MODEL_LEN",  # config/model.py: _get_and_verify_max_len
)  # fmt: skip
