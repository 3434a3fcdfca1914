"""Apply kernel models to operators: from the shape of an operator to the microseconds of one run.

In serving, other layers evict a layer's cache and weights from the L2, so both are read from
memory. fp8 GEMMs use static scales: their input is quantised by the operator before.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from kvcalc.arithmetic import (
    NUMBERS,
    as_float,
    at_least,
    floor,
    is_any,
    maximum,
    minimum,
    nearest_whole,
    where,
)
from kvcalc.layers.cost import (
    AttentionShape,
    CollectiveShape,
    ExpertsShape,
    GemmShape,
    Operator,
    SparseShape,
)
from kvcalc.storage.formats import FORMATS
from kvcalc.storage.quantization import family
from kvcalc.timing.calibration import Calibration, Entry
from kvcalc.timing.kernel_models.families import MOST_DECODE_TOKENS
from kvcalc.timing.kernel_models.fused_moe import FusedMoe, Routing, cells_of
from kvcalc.timing.kernel_models.gemm import (
    CutlassGemm,
    Gemm,
    QuantizedGemm,
    ResidentGemm,
    ResidentQuantizedGemm,
)
from kvcalc.timing.kernel_models.kernel_model import (
    Array,
    Elementwise,
    GpuParameters,
    KernelModel,
)
from kvcalc.timing.kernel_models.mla import (
    WIDTHS,
    MlaDecode,
    MlaModule,
    MlaPrefill,
    SparseDecode,
)

_BLOCKS = "fp8_block128"  # weights of fp8 GEMMs with block scales; all others are per tensor
# Measured rows' name of a cache, by the format of its entries. Latents in fp8 are in blocks and
# have a 16-bit RoPE key.
_CACHES = {"bf16": "bfloat16", "fp16": "bfloat16", "fp8": "fp8", "fp8_block128": "fp8"}
_PROJECTIONS = {
    "bf16": "bfloat16",
    "fp16": "bfloat16",
    "fp8": "fp8_block",
    "fp8_per_channel": "fp8_block",
    _BLOCKS: "fp8_block",
}

# Dtypes of the products of measured rows, by the rows' name.
_COMPUTED_IN = {
    "bfloat16": ("bf16", "fp16"),
    "fp8": ("fp8",),
    "fp8_block": ("fp8",),
    "nvfp4": ("fp4",),
}

# Widths of keys and values of measured MLA: DeepSeek-V3's, absorbed and expanded.
_LATENTS = ((576, 512), (192, 128))

# Query heads of a KV group up to which a decode kernel stays the same. With more, the next kernel
# may be faster.
_KERNEL_HEADS = (1, 16, 32, 64)
_LAUNCH_US = Elementwise().t0

_Group = tuple[Any, Any, Any, Any]  # count, new, past, and query-key pairs of all sequences


class KernelTimes(NamedTuple):
    """The time of one run of an operator.

    Attributes:
        us: Microseconds, a float or an array. NaN where the kernel model does not apply.
        entry: The fitted kernel model.
        measured: Whether it was fitted on this format and these widths; otherwise it is the nearest
            one.
    """

    us: Any
    entry: Entry
    measured: bool = True


def decodes(new: Any) -> bool:
    """Return whether decode kernels take this number of new tokens of a sequence, at all points."""
    return not is_any(new > MOST_DECODE_TOKENS)


def products(
    operators: Sequence[Operator], figures: GpuParameters, calibration: Calibration
) -> dict[int, KernelTimes]:
    """Return the times of all matrix products, by their index among the operators."""
    times: dict[int, KernelTimes] = {}
    laws: dict[str, KernelModel] = {}
    for index, operator in enumerate(operators):
        if not isinstance(operator.shape, GemmShape):
            continue
        rows = _products_of(operator.dtype, operator.shape.format, calibration)
        entry = calibration.entry("gemm", rows)
        if entry is None:
            continue
        if rows not in laws:
            laws[rows] = _product_law(entry.law, calibration)
        m, n, k, stored = operator.shape[:4]
        sizes = maximum(m, 1), n, k, stored
        is_one = all(isinstance(size, NUMBERS) for size in sizes)
        us = _gemm_us(laws[rows], figures, sizes) if is_one else laws[rows].us(figures, *sizes)
        times[index] = KernelTimes(us, entry)
    return times


@lru_cache(1024)
def _gemm_us(law: KernelModel, figures: GpuParameters, sizes: tuple[float, ...]) -> Any:
    """Return the microseconds of one GEMM; sizes: m, n, k and bytes per element of the weights."""
    return law.us(figures, *sizes)


def computes_as_measured(operator: Operator, calibration: Calibration) -> bool:
    """Return whether the kernel model of an operator was fitted on the operator's dtype and format.

    Weight-only formats (awq, int4) and dtypes without measured rows use the model of bf16.
    """
    if isinstance(operator.shape, GemmShape):
        rows = _products_of(operator.dtype, operator.shape.format, calibration)
        return operator.dtype in _COMPUTED_IN[rows] and (
            rows != "bfloat16" or operator.shape.stored >= 2
        )
    return operator.dtype in ("", "bf16", "fp16", "fp8", "fp4")


def _products_of(dtype: str, stored: str, calibration: Calibration) -> str:
    """Return the name of the measured rows of a GEMM: nvfp4 only if the GPU has such rows."""
    if stored == "nvfp4" and stored in calibration.laws.get("gemm", {}):
        return stored
    if dtype != "fp8":
        return "bfloat16"
    return "fp8_block" if family(stored) == _BLOCKS else "fp8"


def _product_law(law: KernelModel, calibration: Calibration) -> KernelModel:
    """Return the kernel model of GEMMs in serving: weights in memory, inputs already quantised."""
    plain_law = calibration.law("gemm", "bfloat16")
    if isinstance(law, ResidentGemm | ResidentQuantizedGemm):
        law = msgspec.structs.replace(law, cold=True)
    if isinstance(law, QuantizedGemm | CutlassGemm):
        return law.quantised(plain_law.t0 if isinstance(plain_law, Gemm) else law.t0)
    return law


def by_law(
    operator: Operator,
    figures: GpuParameters,
    calibration: Calibration,
    routing: Routing,
    domain: int | None,
) -> KernelTimes | None:
    """Return the time of an operator that is not a GEMM; None without a kernel model of its kind.

    Args:
        domain: Number of GPUs of a node. Experts that span nodes have no kernel model.
    """
    shape = operator.shape
    if isinstance(shape, CollectiveShape):
        return _collective(shape, figures, calibration)
    if isinstance(shape, AttentionShape):
        return _attention(operator, shape, figures, calibration)
    if isinstance(shape, ExpertsShape) and shape.ranks <= (domain or shape.ranks):
        return _experts(shape, figures, calibration, routing)
    if operator.name in ("indexer", "top_k"):
        return _selects(operator, figures, calibration)
    return None


def _collective(
    shape: CollectiveShape, figures: GpuParameters, calibration: Calibration
) -> KernelTimes | None:
    """Return the time of the part of a collective that is within a node."""
    entry = calibration.entry("allreduce", "bytes")
    if entry is None:
        return None
    return KernelTimes(entry.law.us(figures, shape.near, shape.bytes), entry)


def _experts(
    shape: ExpertsShape,
    figures: GpuParameters,
    calibration: Calibration,
    routing: Routing,
) -> KernelTimes | None:
    kinds = calibration.laws.get("moe", {})
    entry = next((kinds[cell] for cell in cells_of(shape) if cell in kinds), None)
    if entry is None:
        return None
    law, tokens = entry.law, maximum(shape.tokens, 1)
    sizes = shape.hidden, shape.width, shape.top, shape.experts, 1, shape.ranks
    us = _experts_us(law, figures, routing, tokens, sizes)
    changes: tuple[float, ...] = ()
    if isinstance(law, FusedMoe):
        changes = law.tile_changes(shape.top, shape.experts, shape.ranks)
    for most in changes:
        # With the tile of fewer tokens, so that more tokens never take less time.
        more = tokens > most
        if is_any(more):
            fewer = _fewer_experts_us(law, figures, routing, most, sizes)
            us = where(more, maximum(us, fewer), us)
    return KernelTimes(us, entry)


def _experts_us(
    law: KernelModel,
    figures: GpuParameters,
    routing: Routing,
    tokens: Any,
    sizes: tuple[int, ...],
) -> Any:
    """Return the microseconds of routed experts. sizes: hidden, width, top, experts, 1, ranks."""
    _, _, top, experts, _, ranks = sizes
    load = routing.load(tokens, top, experts, ranks)
    return plain(law.us(figures, tokens, *sizes, load.rows, load.touched, *load.tiles))


@lru_cache(1024)
def _fewer_experts_us(
    law: KernelModel,
    figures: GpuParameters,
    routing: Routing,
    tokens: float,
    sizes: tuple[int, ...],
) -> float:
    """Return the same for one number of tokens."""
    return float(_experts_us(law, figures, routing, max(1.0, floor(tokens)), sizes))


def module_overhead(
    shape: SparseShape, kernels: Any, figures: GpuParameters, calibration: Calibration
) -> KernelTimes | None:
    """Return the time of a sparse-attention module beyond its operators; None without a kernel
    model.

    The overhead of an MLA module for one token is subtracted, because the engine's overhead per
    layer, fitted to servers, contains the launches that both modules have. So the difference
    between a sparse layer and an MLA layer is the measured one. A prompt counts as its first
    MOST_DECODE_TOKENS tokens, so that more tokens never take less time.

    Args:
        kernels: Microseconds of the module's operators.
    """
    entry, measured = _module_entry("dsa_decode_module", shape, calibration)
    if entry is None:
        return None
    dense, _ = _module_entry("mla_decode_module", shape, calibration)
    tokens, length, _ = _decoded(shape)
    shared_us: Any = 0.0
    if dense and isinstance(dense.law, MlaModule):
        shared_us = dense.law.overhead_us(1, shape.heads)
    whole_us = entry.law.us(figures, tokens, shape.heads, length, *shape[1:10])
    return KernelTimes(maximum(whole_us - shared_us - kernels, 0.0), entry, measured)


def mla_kernels_us(
    kind: str, rows: Sequence[Array], figures: GpuParameters, calibration: Calibration
) -> Array | None:
    """Return the microseconds of the kernels in measured MLA modules; None without kernel models.

    The cache may be in the L2, as in the measurement.

    Args:
        kind: Formats of the cache and of the projections, such as `bfloat16/fp8_block`.
        rows: Batch, query heads of the rank and cached tokens of each module.
        figures: Parameters of the GPU.
        calibration: Kernel models of GEMMs and of latent attention.
    """
    batch, heads, length = rows
    cached, _, stored = kind.partition("/")
    attention = calibration.entry("mla_decode", cached)
    projections, absorbed = (
        calibration.entry("gemm", stored),
        calibration.entry("gemm", "bfloat16"),
    )
    if attention is None or projections is None or absorbed is None:
        return None
    hidden, rank, latent, rope, nope, value = WIDTHS
    products_of: tuple[tuple[KernelModel, Any, Any], ...] = (
        (projections.law, rank + latent + rope, hidden),
        (projections.law, heads * (nope + rope), rank),
        (projections.law, hidden, heads * value),
        (absorbed.law, heads * latent, nope),
        (absorbed.law, heads * value, latent),
    )
    us: Array = attention.law.us(figures, batch, heads, length)
    for law, n, k in products_of:
        us = us + _product_law(law, calibration).us(
            figures, batch, n + batch * 0, k + batch * 0
        )
    return us


def _decoded(shape: SparseShape) -> tuple[Any, Any, Any]:
    """Return the new tokens of a batch, their mean context, and whether the batch only decodes.

    At most MOST_DECODE_TOKENS tokens of each sequence count.
    """
    tokens: Any = 0.0
    seen: Any = 0.0
    longest: Any = 0
    for count, new, past in shape.groups:
        taken = minimum(new, MOST_DECODE_TOKENS)
        tokens = tokens + count * taken
        seen = seen + count * taken * (past + (taken + 1) / 2)
        longest = maximum(longest, new)
    tokens = maximum(tokens, 1.0)
    return tokens, maximum(seen / tokens, 1.0), longest <= MOST_DECODE_TOKENS


def _module_entry(
    op: str, shape: SparseShape, calibration: Calibration
) -> tuple[Entry | None, bool]:
    """Return the kernel model of a module in these formats or the nearest ones, and whether these
    formats were measured."""
    cells = calibration.laws.get(op, {})
    cached, measured = cache_rows(shape.cached)
    stored = _PROJECTIONS.get(family(shape.format), "")
    if f"{cached}/{stored}" in cells:
        return cells[f"{cached}/{stored}"], measured
    near = [name for name in cells if name.endswith(f"/{stored}")] or [
        name for name in cells if name.startswith(f"{cached}/")
    ]
    return (cells[near[0]], False) if near else (None, False)


def _selects(
    operator: Operator, figures: GpuParameters, calibration: Calibration
) -> KernelTimes | None:
    """Return the time of the indexer's scores or of its top-k in a decode step.

    NaN for a prompt, None without a kernel model.
    """
    shape = operator.module
    if shape is None:
        return None
    entry, measured = _module_entry("dsa_decode_module", shape, calibration)
    if entry is None or not isinstance(entry.law, SparseDecode):
        return None
    tokens, length, is_decode = _decoded(shape)
    if operator.name == "indexer":
        us = _LAUNCH_US + entry.law.scores_us(figures, tokens, length, shape.index_width)
    else:
        us = entry.law.top_k_us(figures, tokens, length, shape.top)
    return KernelTimes(where(is_decode, us, math.nan), entry, measured)


def cache_rows(formats: tuple[str, ...]) -> tuple[str, bool]:
    """Return the measured rows' name of the nearest cache format, and whether the formats were
    measured."""
    name = _CACHES.get(formats[0]) if formats else "bfloat16"
    if name is None:
        name = "fp8" if FORMATS[formats[0]].bits <= 8 else "bfloat16"
    return name, all(stored in _CACHES for stored in formats)


def _attention(
    operator: Operator,
    shape: AttentionShape,
    figures: GpuParameters,
    calibration: Calibration,
) -> KernelTimes | None:
    """Return the time of all groups: one launch for the decoding ones, and one for each prompt
    group."""
    decoding, prompts = _by_kernel(shape)
    launches = [_prefill(operator, shape, *prompt, figures, calibration) for prompt in prompts]
    if decoding:
        launches.insert(0, _decode(operator, shape, decoding, figures, calibration))
    timed = [launch for launch in launches if launch is not None]
    if len(timed) < len(launches) or not timed:
        return None
    worst = max((launch.entry for launch in timed), key=lambda entry: entry.p90_abs_error)
    is_width_measured = bool(shape.kv_heads) or (shape.key, shape.value) in _LATENTS
    measured = cache_rows(shape.cached)[1] and is_width_measured
    return KernelTimes(sum(launch.us for launch in timed), worst, measured)


def _by_kernel(shape: AttentionShape) -> tuple[list[_Group], list[_Group]]:
    """Return the groups that decode kernels take, and those that prefill kernels take.

    If the points of an array need different kernels, both lists have the group with a count of 0 at
    the other points.
    """
    decoding: list[_Group] = []
    prompts: list[_Group] = []
    for count, new, past, pairs in shape.groups:
        is_prompt = at_least(new, MOST_DECODE_TOKENS + 1)
        if not is_any(is_prompt):
            decoding.append((count, new, past, pairs))
        elif not is_any(is_prompt == 0):
            prompts.append((count, new, past, pairs))
        else:
            decoding.append((count * (1 - is_prompt), new, past, pairs * (1 - is_prompt)))
            prompts.append((count * is_prompt, new, past, pairs * is_prompt))
    return decoding, prompts


def _decode(
    operator: Operator,
    shape: AttentionShape,
    groups: list[_Group],
    figures: GpuParameters,
    calibration: Calibration,
) -> KernelTimes | None:
    """Return the time of one launch of a decode kernel.

    Several new tokens per sequence may use a prefill kernel if it is faster. More tokens never take
    less time: a launch takes at least the time of fewer tokens with another kernel. A sparse kernel
    passes at most once over the latents that it gathers before it attends.
    """
    family_name = "decode_attention" if shape.kv_heads else "mla_decode"
    entry = calibration.entry(family_name, cache_rows(shape.cached)[0])
    if entry is None:
        return None
    batch: Any = sum(as_float(count) for count, *_ in groups)
    queries: Any = sum(as_float(count * new) for count, new, *_ in groups)
    pairs = sum(pairs for *_, pairs in groups)
    used = maximum(batch, 1)
    tokens = queries / used
    length = maximum(nearest_whole(pairs / maximum(queries, 1)), 1)
    cold = msgspec.structs.replace(entry.law, cold=True)
    if operator.module and isinstance(cold, MlaDecode):
        cold = msgspec.structs.replace(cold, cast=min(cold.cast, 1.0))

    def law_us(new: Any) -> Any:
        if not shape.kv_heads:
            return cold.us(figures, used, shape.heads * new, length)
        head_dim = (shape.key + shape.value) / 2
        return cold.us(figures, used, shape.heads * new, shape.kv_heads, head_dim, length, 0)

    us = law_us(tokens)
    if is_any(tokens > 1):
        for heads in _KERNEL_HEADS:
            most = max(math.floor(heads * max(shape.kv_heads, 1) / shape.heads), 1)
            us = maximum(us, law_us(minimum(most, maximum(tokens, 1))))
        past = sum(as_float(count * past) for count, _, past, _ in groups) / used
        prompt = _prefill(operator, shape, batch, tokens, past, pairs, figures, calibration)
        if prompt is not None:
            us = where(tokens > 1, minimum(us, prompt.us), us)
    return KernelTimes(where(batch > 0, us, 0.0), entry)


def _prefill(
    operator: Operator,
    shape: AttentionShape,
    count: Any,
    new: Any,
    past: Any,
    pairs: Any,
    figures: GpuParameters,
    calibration: Calibration,
) -> KernelTimes | None:
    """Return the time of the prompts of a group, at least that of a decode step of their last
    tokens."""
    cached, _ = cache_rows(shape.cached)
    if shape.kv_heads:
        entry = calibration.entry("prefill_attention", f"bfloat16/{cached}")
    else:
        entry = calibration.entry("mla_prefill", cached)
    if entry is None:
        return None
    used = maximum(count, 1)
    keys = pairs / maximum(count * new, 1)  # that a query sees on average
    law = entry.law
    if isinstance(law, MlaPrefill):
        if operator.form:
            law = msgspec.structs.replace(law, attends=operator.form)
        us = law.us(figures, used, shape.heads, new, keys, shape.key + shape.value)
    else:
        head_dim = (shape.key + shape.value) / 2
        us = law.us(figures, used, shape.heads, shape.kv_heads, head_dim, new, 0, keys)
    last = minimum(past + new, maximum(keys, 2 * keys - past - 1))  # keys of the last token
    step = _decode(operator, shape, [(count, 1, past, count * last)], figures, calibration)
    if step is not None:
        us = maximum(us, step.us)
    return KernelTimes(where(count > 0, us, 0.0), entry)


def plain(us: Any) -> Any:
    """Return a float for an array of no dimensions, else the array."""
    return float(us) if getattr(us, "ndim", 0) == 0 else us
