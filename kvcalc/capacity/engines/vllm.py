"""vLLM: layers to cache specs, the block size, and a plan in blocks.

Rules as of vLLM 0.33 (v1/kv_cache_interface.py, v1/core/kv_cache_planning.py, platforms/interface.py). The grouping of
layers is in `vllm_groups`. All figures are per rank.
"""

from collections.abc import Sequence

from kvcalc.capacity.engines.plan import EngineSettings, Held, Plan, Term
from kvcalc.capacity.engines.rows import index_row_bytes
from kvcalc.capacity.engines.vllm_groups import Group, Spec, SpecKind, groups_of, promoted
from kvcalc.errors import UserError
from kvcalc.layers.attention import Compressed, HiddenStates
from kvcalc.layers.cache import CacheEntry, Span
from kvcalc.layers.part import Part
from kvcalc.layers.ranks import Parallelism
from kvcalc.storage.dtypes import FORMATS, canonical

BLOCK, MLA_BLOCK, MLA_HYBRID_BLOCK = 16, 64, 128  # tokens; FlashMLA and the indexer run 64; hybrids of MLA align to 128
NULL_BLOCKS = 1  # the first block of the pool is a placeholder that no sequence ever gets


class Vllm(Plan):
    """A pool of equal blocks on one stage; every group of layers takes its own blocks from it."""

    def __init__(self, groups: list[Group], stage: int, block: int, ranks: Parallelism, settings: EngineSettings) -> None:
        self.groups, self.stage = groups, stage
        self.bytes_per_block = self._unit = max((g.page_bytes(stage) for g in groups), default=0)
        self.block_size = block if any(g.spec.kind is not SpecKind.STATE for g in groups) else None
        self.page_bytes = max((g.widest_page() for g in groups), default=0)
        self._counts = [_term(g.spec, ranks.dcp, settings) for g in groups]
        padding = sum(g.padding(max((len(o.specs) for o in groups), default=0)) for g in groups)
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
        own = self.request_blocks(length)
        common = sum(min(shared, length) // t.block for t in self._counts if t.cap < 0)
        return self._unit * (NULL_BLOCKS + common + sequences * (own - common))

    def pool(self, budget: int) -> int:
        return self.num_blocks(budget) * self._unit

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


def plan(held: Sequence[Held], ranks: Parallelism, settings: EngineSettings, stage: int) -> Plan:
    """The pool on one stage. Groups are made over the whole model, so that every stage has the same block tables.

    Raises UserError for layers that vLLM's planner has no page for.
    """
    kinds: dict[tuple[int, str], list[Spec]] = {}
    for h in held:
        if (id(h.model), h.kind) not in kinds:
            kinds[id(h.model), h.kind] = _specs(h, ranks, settings)
    found = list(kinds.values())
    block = block_size([s for specs in found for s in specs], settings)
    sized = {key: [_sized(s, block, found) for s in specs] for key, specs in kinds.items()}
    layers = [(h.stage, s) for h in held for s in sized[id(h.model), h.kind]]
    if not settings.hybrid:
        layers = promoted(layers)
    if ranks.dcp > 1 and any(s.kind is SpecKind.WINDOW for _, s in layers):
        raise UserError("vLLM spreads no sliding windows over decode-context-parallel ranks")
    return Vllm(groups_of(layers), stage, block, ranks, settings)


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


def _sized(spec: Spec, block: int, kinds: Sequence[Sequence[Spec]]) -> Spec:
    """A spec with its block; beside attention, a state's page is padded to an attention page."""
    if spec.kind is not SpecKind.STATE:
        return spec._replace(block=block)
    page = block * _row([s for specs in kinds for s in specs])
    return spec._replace(padded=page if page > spec.row else 0)


def _term(spec: Spec, dcp: int, settings: EngineSettings) -> Term:
    if spec.kind is SpecKind.STATE:
        pages = 2 + settings.mamba_checkpoint_blocks if settings.mamba_cache_mode == "align" else 1
        return Term(0, 1, 0, pages, "state")
    if spec.kind is SpecKind.WINDOW:
        return Term(0, spec.block, spec.limit - 1 + settings.in_flight, 1, "window and tokens in flight")
    if spec.kind is SpecKind.CHUNK:
        return Term(0, spec.block, spec.limit + settings.in_flight, 0, "chunk and tokens in flight")
    return Term(0, spec.block * dcp)


def _specs(held: Held, ranks: Parallelism, settings: EngineSettings) -> list[Spec]:
    """The cache specs of one layer: none where it shares another's cache."""
    if held.layer.shares_cache:
        return []
    found = []
    for part in (*held.layer.parts, *held.layer.shared):
        if isinstance(part, Compressed | HiddenStates):
            raise UserError(
                f"the planner has no pages for {part.label} ({held.model.name})", hint="--engine none counts its content"
            )
        states = [e for e in part.cache() if e.span is Span.STATE]
        growing = [e for e in part.cache() if e.grows]
        if growing and states:
            raise UserError(f"vLLM has no pages for the prefix of {held.model.name}", hint="--engine none counts its content")
        found += _state(held, part, states, ranks, settings) if states else _attention(held, part, growing, ranks)
    return found


def _attention(held: Held, part: Part, entries: list[CacheEntry], ranks: Parallelism) -> list[Spec]:
    main = [e for e in entries if e.role != "index_key"]
    if not main:
        return []
    window, chunk = getattr(part, "sliding_window", None), getattr(part, "attention_chunk_size", None)
    kind = SpecKind.WINDOW if window else SpecKind.CHUNK if chunk else SpecKind.FULL
    latent = any(e.role == "latent" for e in main)
    row = sum(held.formats.entry_bytes(e, ranks.share(e.heads)) for e in main)
    shape = tuple((e.role, ranks.share(e.heads), e.width) for e in main)
    found = [Spec(kind, row, shape, window or chunk or 0, latent=latent)]
    for e in entries:
        if e.role == "index_key":
            width = index_row_bytes(e.width) if latent else held.formats.entry_bytes(e, ranks.share(e.heads))
            found.append(Spec(SpecKind.FULL, width, (("index_key", 1, e.width),), latent=latent, main=False))
    return found


def _state(held: Held, part: Part, entries: list[CacheEntry], ranks: Parallelism, settings: EngineSettings) -> list[Spec]:
    """One page for all states of a layer: convolution columns in the model's dtype, the recurrent state in its own."""
    plain = FORMATS[held.formats.dtype]
    recurrent = FORMATS[state_dtype(held, part, settings)]
    total, shape = 0, []
    for e in entries:
        fmt = recurrent if e.role == "recurrent_state" else plain
        heads = ranks.share(e.heads)
        total += heads * e.limit * fmt.row_bytes(e.width)
        shape.append((f"{e.role} {fmt.name}", heads, e.width * e.limit))
    return [Spec(SpecKind.STATE, total, tuple(shape))]


def state_dtype(held: Held, part: Part, settings: EngineSettings) -> str:
    """The dtype of a recurrent state: as asked, else as the spec says, else fp32 for Nemotron-H, else the model's."""
    asked = canonical(settings.mamba_ssm_cache_dtype or "auto")
    if asked != "auto":
        if asked not in ("fp32", "bf16", "fp16"):
            raise UserError(f"unknown state dtype {settings.mamba_ssm_cache_dtype!r}", hint="Known: auto, fp32, bf16, fp16")
        return asked
    said: str | None = getattr(part, "state_dtype", None)
    if said:
        return said
    return "fp32" if held.model.family.lower().startswith("nemotron") else held.formats.dtype
