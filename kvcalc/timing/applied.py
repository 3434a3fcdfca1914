"""Laws applied to operators: from the shape that an operator of a pass carries to the microseconds of one run.

In serving a cache is never in the L2, so laws of attention run with no residency. fp8 products take static scales: their
input arrives quantised.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvcalc.layers.cost import AttentionShape, CollectiveShape, ExpertsShape, GemmShape, Operator, SparseShape
from kvcalc.storage.dtypes import FORMATS
from kvcalc.storage.quantization import family
from kvcalc.timing.calibration import Calibration, Entry
from kvcalc.timing.cutlass import CutlassGemm
from kvcalc.timing.elementwise import Elementwise
from kvcalc.timing.experts import cells_of
from kvcalc.timing.families import MOST_DECODE_TOKENS
from kvcalc.timing.figures import Figures
from kvcalc.timing.gemm import Gemm, QuantizedGemm
from kvcalc.timing.law import Law
from kvcalc.timing.mla_decode import MlaDecode
from kvcalc.timing.mla_module import WIDTHS, MlaModule
from kvcalc.timing.mla_prefill import MlaPrefill
from kvcalc.timing.moe import Moe
from kvcalc.timing.resident import ResidentGemm, ResidentQuantizedGemm
from kvcalc.timing.routing import Routing
from kvcalc.timing.sparse_decode import SparseDecode
from kvcalc.units import at_least, maximum

if TYPE_CHECKING:
    from kvcalc.timing.law import Array

# How rows name what products compute in, by how checkpoints store the weights of fp8 products; others' are per tensor.
_BLOCKS = "fp8_block128"
# How rows name a cache by how its entries are stored; latents in fp8 lie in blocks, beside a RoPE key of 16 bits.
_CACHES = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "fp8", "fp8_block128": "fp8"}
_PROJECTIONS = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "fp8_block", "fp8_per_channel": "fp8_block", _BLOCKS: "fp8_block"}

# What products compute in, by the name of the rows that measured them.
_COMPUTED_IN = {"bfloat16": ("bf16", "fp16"), "fp8": ("fp8",), "fp8_block": ("fp8",), "nvfp4": ("fp4",)}

# Widths of keys and values of the latent attention that was measured: DeepSeek-V3's, absorbed and expanded.
_LATENTS = ((576, 512), (192, 128))

# Query heads of a KV group up to which a decode kernel stays the same: beyond them laws may become faster.
_KERNEL_HEADS = (1, 16, 32, 64)
_LAUNCH_US = Elementwise().t0

_Group = tuple[Any, Any, Any, Any]  # sequences, new and past tokens of each, pairs of all of them


class Applied(NamedTuple):
    """µs of one run (a float or an array), and the cell of the calibration that says so.

    measured: whether the cell's rows are of this format and these widths; else the law is borrowed from the nearest that are.
    """

    us: Any
    entry: Entry
    measured: bool = True


def decodes(new: Any) -> bool:
    """Whether these new tokens of a sequence are what decode kernels take."""
    return bool(new <= MOST_DECODE_TOKENS) if isinstance(new, int) else bool((new <= MOST_DECODE_TOKENS).all())


def products(operators: Sequence[Operator], figures: Figures, calibration: Calibration) -> dict[int, Applied]:
    """All matrix products, those of one law at once, by their place among the operators."""
    import numpy as np

    members: dict[str, list[int]] = {}
    for i, operator in enumerate(operators):
        if isinstance(operator.shape, GemmShape):
            members.setdefault(_products_of(operator.dtype, operator.shape.format, calibration), []).append(i)
    found = {}
    for data, indices in members.items():
        entry = calibration.entry("gemm", data)
        if entry is None:
            continue
        shapes = [operators[i].shape for i in indices]
        columns = [np.broadcast_arrays(*(np.asarray(x, float) for x in shape[:4])) for shape in shapes if shape]
        flat = [np.concatenate([column[axis].ravel() for column in columns]) for axis in range(4)]
        flat[0] = np.maximum(flat[0], 1.0)
        us = _product_law(entry.law, calibration).us(figures, *flat)
        ends = np.cumsum([column[0].size for column in columns])
        for i, column, part in zip(indices, columns, np.split(us, ends[:-1]), strict=True):
            found[i] = Applied(plain(part.reshape(column[0].shape)), entry)
    return found


def computes_as_measured(operator: Operator, calibration: Calibration) -> bool:
    """Return whether the law of an operator was fitted on products in the operator's dtype and format.

    Weight-only formats (awq, int4) borrow the law of bf16, and so do products in a dtype without rows.
    """
    if isinstance(operator.shape, GemmShape):
        rows = _products_of(operator.dtype, operator.shape.format, calibration)
        return operator.dtype in _COMPUTED_IN[rows] and (rows != "bfloat16" or operator.shape.stored >= 2)
    return operator.dtype in ("", "bf16", "fp16", "fp8", "fp4")


def _products_of(dtype: str, stored: str, calibration: Calibration) -> str:
    """Of which rows products are: fp4's for nvfp4 weights where the GPU has rows of it."""
    if stored == "nvfp4" and stored in calibration.laws.get("gemm", {}):
        return stored
    return ("fp8_block" if family(stored) == _BLOCKS else "fp8") if dtype == "fp8" else "bfloat16"


def _product_law(law: Law, calibration: Calibration) -> Law:
    """The law of products as they run in serving: weights from memory, and inputs that arrive quantised."""
    plain_law = calibration.law("gemm", "bfloat16")
    if isinstance(law, ResidentGemm | ResidentQuantizedGemm):
        law = msgspec.structs.replace(law, cold=True)
    if isinstance(law, QuantizedGemm | CutlassGemm):
        return law.quantised(plain_law.t0 if isinstance(plain_law, Gemm) else law.t0)
    return law


def by_law(
    operator: Operator, figures: Figures, calibration: Calibration, routing: Routing, domain: int | None
) -> Applied | None:
    """One operator that is no matrix product; None where no law is of its kind.

    domain: GPUs that one node joins; experts that spread further have no law.
    """
    shape = operator.shape
    if isinstance(shape, CollectiveShape):
        return _collective(shape, figures, calibration)
    if isinstance(shape, AttentionShape):
        return _attention(operator, shape, figures, calibration)
    if isinstance(shape, ExpertsShape) and shape.ranks <= (domain or shape.ranks):
        return _experts(shape, figures, calibration, routing)
    return _selects(operator, figures, calibration) if operator.name in ("indexer", "top_k") else None


def _collective(shape: CollectiveShape, figures: Figures, calibration: Calibration) -> Applied | None:
    """The part of it within a node."""
    import numpy as np

    entry = calibration.entry("allreduce", "bytes")
    if entry is None:
        return None
    size = np.asarray(shape.bytes, float)
    return Applied(plain(entry.law.us(figures, np.full_like(size, shape.near), size)), entry)


def _experts(shape: ExpertsShape, figures: Figures, calibration: Calibration, routing: Routing) -> Applied | None:
    import numpy as np

    kinds = calibration.laws.get("moe", {})
    entry = next((kinds[cell] for cell in cells_of(shape) if cell in kinds), None)
    if entry is None:
        return None
    law, tokens = entry.law, np.maximum(np.asarray(shape.tokens, float), 1.0)
    sizes = shape.hidden, shape.width, shape.top, shape.experts, 1, shape.ranks
    us = _experts_us(law, figures, routing, tokens, sizes)
    for most in law.tile_changes(shape.top, shape.experts, shape.ranks) if isinstance(law, Moe) else ():
        if (tokens > most).any():  # with the tile of fewer tokens, so that more tokens never take less time
            us = np.where(tokens > most, np.maximum(us, _fewer_experts_us(law, figures, routing, most, sizes)), us)
    return Applied(plain(us), entry)


def _experts_us(law: Law, figures: Figures, routing: Routing, tokens: "Array", sizes: tuple[int, ...]) -> "Array":
    """Return the microseconds of routed experts for an array of tokens. sizes: hidden, width, top, experts, 1, ranks."""
    import numpy as np

    widths = [np.asarray(float(x)) for x in sizes]
    load = routing.load(tokens, widths[2], widths[3], widths[5])
    return law.us(figures, *np.broadcast_arrays(tokens, *widths, load.rows, load.touched, *load.tiles))


@lru_cache(1024)
def _fewer_experts_us(law: Law, figures: Figures, routing: Routing, tokens: float, sizes: tuple[int, ...]) -> float:
    """Return the same for one number of tokens."""
    import numpy as np

    return float(_experts_us(law, figures, routing, np.asarray(max(1.0, np.floor(tokens))), sizes))


def module_overhead(shape: SparseShape, kernels: Any, figures: Figures, calibration: Calibration) -> Applied | None:
    """Return the time of a sparse-attention module beyond its operators, which take `kernels` µs; None without rows of it.

    What an MLA module takes beyond its kernels for one token is taken off: the engine's glue, fitted to servers, covers the
    launches that both have. So a sparse layer takes as much longer than an MLA layer as its module was measured to take. A
    prompt counts as its first MOST_DECODE_TOKENS tokens, so that more tokens never take less time.
    """
    import numpy as np

    entry, measured = _module_entry("dsa_decode_module", shape, calibration)
    if entry is None:
        return None
    dense, _ = _module_entry("mla_decode_module", shape, calibration)
    tokens, length, _ = _decoded(shape)
    heads = np.asarray(float(shape.heads))
    one = np.ones_like(heads)
    shared_us: Any = dense.law.overhead_us(one, heads) if dense and isinstance(dense.law, MlaModule) else 0.0
    sizes = [np.asarray(float(x)) for x in shape[1:10]]
    whole_us = entry.law.us(figures, *np.broadcast_arrays(tokens, heads, length, *sizes))
    return Applied(plain(np.maximum(whole_us - shared_us - kernels, 0.0)), entry, measured)


def mla_kernels_us(kind: str, rows: "Sequence[Array]", figures: Figures, calibration: Calibration) -> "Array | None":
    """Return the microseconds of the kernels in measured MLA modules, as warm as they were measured; None without laws.

    Args:
        kind: Formats of the cache and of the projections, such as `bfloat16/fp8_block`.
        rows: Batch, query heads of the rank and cached tokens of each module.
        figures: Figures of the GPU.
        calibration: Laws of matrix products and of latent attention.
    """
    batch, heads, length = rows
    cached, _, stored = kind.partition("/")
    attention = calibration.entry("mla_decode", cached)
    projections, absorbed = calibration.entry("gemm", stored), calibration.entry("gemm", "bfloat16")
    if attention is None or projections is None or absorbed is None:
        return None
    hidden, rank, latent, rope, nope, value = WIDTHS
    products_of: tuple[tuple[Law, Any, Any], ...] = (
        (projections.law, rank + latent + rope, hidden),
        (projections.law, heads * (nope + rope), rank),
        (projections.law, hidden, heads * value),
        (absorbed.law, heads * latent, nope),
        (absorbed.law, heads * value, latent),
    )
    us: Array = attention.law.us(figures, batch, heads, length)
    for law, n, k in products_of:
        us = us + _product_law(law, calibration).us(figures, batch, n + batch * 0, k + batch * 0)
    return us


def _decoded(shape: SparseShape) -> tuple[Any, Any, Any]:
    """Return a batch's new tokens and their mean context, with at most MOST_DECODE_TOKENS of each sequence; is it all decode?"""
    import numpy as np

    tokens: Any = 0.0
    seen: Any = 0.0
    longest: Any = 0
    for count, new, past in shape.groups:
        taken = np.minimum(np.asarray(new, float), MOST_DECODE_TOKENS)
        tokens = tokens + count * taken
        seen = seen + count * taken * (past + (taken + 1) / 2)
        longest = maximum(longest, new)
    tokens = np.maximum(tokens, 1.0)
    return tokens, np.maximum(seen / tokens, 1.0), np.asarray(longest) <= MOST_DECODE_TOKENS


def _module_entry(op: str, shape: SparseShape, calibration: Calibration) -> tuple[Entry | None, bool]:
    """Return the law of a kind of module for these formats, or the nearest one, and whether rows are of these formats."""
    cells = calibration.laws.get(op, {})
    cached, measured = cache_rows(shape.cached)
    stored = _PROJECTIONS.get(family(shape.format), "")
    if f"{cached}/{stored}" in cells:
        return cells[f"{cached}/{stored}"], measured
    near = [name for name in cells if name.endswith(f"/{stored}")] or [name for name in cells if name.startswith(f"{cached}/")]
    return (cells[near[0]], False) if near else (None, False)


def _selects(operator: Operator, figures: Figures, calibration: Calibration) -> Applied | None:
    """Return the time of the indexer's scores, or of its choice, in a decode step; NaN in a prompt; None if it has no law."""
    import numpy as np

    shape = operator.module
    entry, measured = _module_entry("dsa_decode_module", shape, calibration) if shape else (None, False)
    if shape is None or entry is None or not isinstance(entry.law, SparseDecode):
        return None
    tokens, length, is_decode = _decoded(shape)
    if operator.name == "indexer":
        us = _LAUNCH_US + entry.law.scores_us(figures, tokens, length, np.asarray(float(shape.index_width)))
    else:
        us = entry.law.top_k_us(figures, tokens, length, np.asarray(float(shape.top)))
    return Applied(plain(np.where(is_decode, us, np.nan)), entry, measured)


def cache_rows(formats: tuple[str, ...]) -> tuple[str, bool]:
    """How rows name the cache whose law these formats take, the nearest where none is of theirs, and whether one is."""
    named = _CACHES.get(formats[0]) if formats else "bfloat16"
    nearest = named or ("fp8" if FORMATS[formats[0]].bits <= 8 else "bfloat16")
    return nearest, all(name in _CACHES for name in formats)


def _attention(operator: Operator, shape: AttentionShape, figures: Figures, calibration: Calibration) -> Applied | None:
    """All groups of the batch: those that decode in one launch, each prompt's in one of its own."""
    decoding, prompts = _by_kernel(shape)
    found = [_decode(operator, shape, decoding, figures, calibration)] if decoding else []
    found += [_prefill(operator, shape, *prompt, figures, calibration) for prompt in prompts]
    each = [one for one in found if one is not None]
    if len(each) < len(found) or not each:
        return None
    worst = max((one.entry for one in each), key=lambda entry: entry.p90_abs_error)
    measured = cache_rows(shape.cached)[1] and (bool(shape.kv_heads) or (shape.key, shape.value) in _LATENTS)
    return Applied(plain(sum((one.us for one in each[1:]), each[0].us)), worst, measured)


def _by_kernel(shape: AttentionShape) -> tuple[list[_Group], list[_Group]]:
    """The groups that decode kernels take, and those that prefill kernels take; of an array each point where it belongs."""
    decoding: list[_Group] = []
    prompts: list[_Group] = []
    for count, new, past, pairs in shape.groups:
        longer = at_least(new, MOST_DECODE_TOKENS + 1)
        if isinstance(longer, int) or (longer == longer.flat[0]).all():
            (decoding if decodes(new) else prompts).append((count, new, past, pairs))
            continue
        decoding.append((count * (1 - longer), new, past, pairs * (1 - longer)))
        prompts.append((count * longer, new, past, pairs * longer))
    return decoding, prompts


def _decode(
    operator: Operator, shape: AttentionShape, groups: list[_Group], figures: Figures, calibration: Calibration
) -> Applied | None:
    """Return the time of a launch of decode kernels. Several new tokens of a sequence take the faster kind of kernel.

    More tokens never take less time: a launch takes at least as long as one with fewer tokens by another kernel. A sparse
    kernel passes once at most over the latents that it gathers before it attends.
    """
    import numpy as np

    entry = calibration.entry("decode_attention" if shape.kv_heads else "mla_decode", cache_rows(shape.cached)[0])
    if entry is None:
        return None
    batch = sum((np.asarray(c, float) for c, *_ in groups[1:]), np.asarray(groups[0][0], float))
    queries = sum((np.asarray(c * n, float) for c, n, *_ in groups[1:]), np.asarray(groups[0][0] * groups[0][1], float))
    pairs = sum((p for *_, p in groups[1:]), groups[0][3])
    used, rows = np.maximum(batch, 1), queries / np.maximum(batch, 1)
    length = np.maximum(np.round(pairs / np.maximum(queries, 1)), 1)
    cold = msgspec.structs.replace(entry.law, cold=True)
    if operator.module and isinstance(cold, MlaDecode):
        cold = msgspec.structs.replace(cold, cast=min(cold.cast, 1.0))

    def law_us(tokens: "Array") -> "Array":
        arrays: tuple[Array, ...] = (used, shape.heads * tokens, length)
        if shape.kv_heads:
            head_dim = (shape.key + shape.value) / 2
            arrays = (used, shape.heads * tokens, used * 0 + shape.kv_heads, used * 0 + head_dim, length, used * 0)
        return cold.us(figures, *np.broadcast_arrays(*arrays))

    us = law_us(rows)
    if (rows > 1).any():
        for heads in _KERNEL_HEADS:
            tokens = np.maximum(np.floor(heads * max(shape.kv_heads, 1) / shape.heads), 1)
            us = np.maximum(us, law_us(np.minimum(tokens, np.maximum(rows, 1))))
        past = sum((np.asarray(c * p, float) for c, _, p, _ in groups[1:]), np.asarray(groups[0][0] * groups[0][2], float))
        prompt = _prefill(operator, shape, batch, rows, past / used, pairs, figures, calibration)
        if prompt is not None:
            us = np.where(rows > 1, np.minimum(us, prompt.us), us)
    return Applied(np.where(batch > 0, us, 0.0), entry)


def _prefill(
    operator: Operator,
    shape: AttentionShape,
    count: Any,
    new: Any,
    past: Any,
    pairs: Any,
    figures: Figures,
    calibration: Calibration,
) -> Applied | None:
    """Return the time of the prompts of a group: at least that of a decode step of the last token of each."""
    import numpy as np

    cached, _ = cache_rows(shape.cached)
    batch, length = np.broadcast_arrays(np.asarray(count, float), np.asarray(new, float))
    used, keys = np.maximum(batch, 1), pairs / np.maximum(batch * length, 1)
    arrays: tuple[Array, ...]
    entry = calibration.entry(*(("prefill_attention", f"bfloat16/{cached}") if shape.kv_heads else ("mla_prefill", cached)))
    if entry is None:
        return None
    law = entry.law
    if shape.kv_heads:
        head_dim = (shape.key + shape.value) / 2
        arrays = (used, used * 0 + shape.heads, used * 0 + shape.kv_heads, used * 0 + head_dim, length, used * 0, keys)
    else:
        arrays = (used, used * 0 + shape.heads, length, keys, used * 0 + (shape.key + shape.value))
    if isinstance(law, MlaPrefill) and operator.form:
        law = msgspec.structs.replace(law, attends=operator.form)
    us = law.us(figures, *np.broadcast_arrays(*arrays))
    last = np.minimum(past + length, np.maximum(keys, 2 * keys - past - 1))  # keys that the last token sees, at most
    step = _decode(operator, shape, [(batch, 1, past, batch * last)], figures, calibration)
    if step is not None:
        us = np.maximum(us, step.us)
    return Applied(np.where(batch > 0, us, 0.0), entry)


def plain(us: Any) -> Any:
    """A float for a single value, else the array."""
    return float(us) if getattr(us, "ndim", 0) == 0 else us
