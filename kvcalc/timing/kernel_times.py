"""Apply kernel models to operators: from the shape of an operator to the microseconds of one run.

In serving, other layers evict a layer's cache and weights from the L2, so both are read from
memory. fp8 GEMMs use static scales: the previous operator quantises their input.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvcalc.arithmetic import (
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
from kvcalc.storage.formats import FORMATS, first_words
from kvcalc.storage.quantization import family
from kvcalc.timing.calibration import Calibration, KernelModelEntry
from kvcalc.timing.kernel_models.families import MAX_DECODE_TOKENS
from kvcalc.timing.kernel_models.fused_moe import FusedMoe, busiest_load, expert_kinds
from kvcalc.timing.kernel_models.gemm import (
    CutlassGemm,
    QuantizedGemm,
    ResidentGemm,
    ResidentQuantizedGemm,
)
from kvcalc.timing.kernel_models.kernel_model import (
    LAUNCH_US,
    Array,
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
_CACHES = first_words("""
    bfloat16  bf16 fp16
    fp8       fp8 fp8_block128
""")
# Measured rows' name of the projections of a sparse module, by the format of their weights.
_PROJECTIONS = first_words("""
    bfloat16   bf16 fp16
    fp8_block  fp8 fp8_per_channel fp8_block128
""")
# Dtypes of the products of measured rows, by the rows' name.
_COMPUTED_IN = {"bfloat16": "bf16 fp16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4"}
# Widths of keys and values of measured MLA (DeepSeek-V3), absorbed and expanded.
_LATENT_WIDTHS = ((576, 512), (192, 128))
# Share of the bandwidth up to which a kernel of experts was measured without its autotuning. Such
# kernels reach 13% to 24%, all others at least 63%. Serving engines tune them, so the next kind of
# data predicts their time.
_UNTUNED = 0.3
# Query heads of a KV group up to which a decode kernel stays the same. With more, the next kernel
# may be faster.
_KERNEL_HEADS = (1, 16, 32, 64)

_Group = tuple[Any, Any, Any, Any]  # count, new, past, and query-key pairs of all sequences


class KernelTime(NamedTuple):
    """The predicted time of one run of an operator of a forward pass, such as a GEMM.

    Attributes:
        us: Microseconds, a float or an array. NaN marks points, such as batch sizes, to which the
            time model does not apply.
        entry: The fitted time model that predicts the time, with its errors.
        is_measured: Whether the time model was fitted to the operator's data types and widths. If
            false, it is the model of the nearest ones.
    """

    us: Any
    entry: KernelModelEntry
    is_measured: bool = True


def computes_as_measured(operator: Operator, calibration: Calibration) -> bool:
    """Return whether the time model of an operator was fitted to its dtype and weight format.

    The result is False for formats that quantise only the weights (awq, int4) and for dtypes
    without measurements. The predicted times of such operators are marked as scaled, not as
    calibrated.

    Args:
        operator: The operator of a forward pass, such as a GEMM.
        calibration: Fitted time models with which the operator is timed.
    """
    if isinstance(operator.shape, GemmShape):
        kind = _gemm_kind(operator.dtype, operator.shape.format, calibration)
        has_wide_weights = kind != "bfloat16" or operator.shape.stored >= 2
        return operator.dtype in _COMPUTED_IN[kind].split() and has_wide_weights
    return operator.dtype in ("", "bf16", "fp16", "fp8", "fp4")


def _gemm_kind(dtype: str, stored: str, calibration: Calibration) -> str:
    """Return the kind of measured rows that times a GEMM; nvfp4 or fp8 only if the GPU has such
    rows."""
    if stored == "nvfp4" and calibration.find_entry("gemm", stored):
        return stored
    if dtype != "fp8" or not calibration.find_entry("gemm", "fp8"):
        return "bfloat16"
    return "fp8_block" if family(stored) == _BLOCKS else "fp8"


def _served_gemm(kernel_model: KernelModel, bf16_model: KernelModel | None) -> KernelModel:
    """Return the kernel model of GEMMs in serving: weights in memory, inputs already quantised.

    Args:
        kernel_model: The fitted kernel model.
        bf16_model: The kernel model of bf16 GEMMs, if known. Launches take no longer than its own.
    """
    if isinstance(kernel_model, ResidentGemm | ResidentQuantizedGemm):
        kernel_model = replace(kernel_model, cold=True)
    if isinstance(kernel_model, QuantizedGemm | CutlassGemm):
        t0 = min(kernel_model.t0, getattr(bf16_model, "t0", math.inf))
        row = {"row": 0.0} if isinstance(kernel_model, CutlassGemm) else {}
        return replace(kernel_model, t0=t0, bq=math.inf, **row)
    return kernel_model


def cache_kind(formats: tuple[str, ...]) -> tuple[str, bool]:
    """Return (nearest KV cache format with measurements, whether `formats` itself was measured).

    The time model of attention over this format then times the operator. Example: ("fp8",) gives
    ("fp8", True). ("int8",) has no measured rows and gives ("fp8", False).

    Args:
        formats: Formats of the cached keys and values, keys first. Without a cache it is empty,
            which counts as bfloat16.
    """
    name = _CACHES.get(formats[0]) if formats else "bfloat16"
    if not name:
        name = "fp8" if FORMATS[formats[0]].bits <= 8 else "bfloat16"
    return name, all(stored in _CACHES for stored in formats)


class KernelTimer(NamedTuple):
    """Predicts the times of operators of a forward pass with the time models of one calibration.

    Attributes:
        parameters: Datasheet rates and sizes of the GPU.
        calibration: Time models fitted to measured kernels.
        domain: Number of GPUs that one link, such as NVLink, connects; None if it connects all
            GPUs. Experts that are spread over more GPUs have no time model.
    """

    parameters: GpuParameters
    calibration: Calibration
    domain: int | None = None

    def time(self, operator: Operator) -> KernelTime | None:
        """Return the predicted time of one run of an operator; None if no time model exists for it.

        Args:
            operator: The operator of a forward pass on one GPU, such as a GEMM.
        """
        shape = operator.shape
        if isinstance(shape, GemmShape):
            kind = _gemm_kind(operator.dtype, shape.format, self.calibration)
            entry = self.calibration.find_entry("gemm", kind)
            if not entry:
                return None
            bf16_model = self.calibration.kernel_model("gemm", "bfloat16")
            kernel_model = _served_gemm(entry.law, bf16_model)
            sizes = maximum(shape.m, 1), shape.n, shape.k, shape.stored
            return KernelTime(kernel_model.us(self.parameters, *sizes), entry)
        if isinstance(shape, CollectiveShape):  # its part within a node
            entry = self.calibration.find_entry("allreduce", "bytes")
            if not entry:
                return None
            return KernelTime(entry.law.us(self.parameters, shape.near, shape.bytes), entry)
        if isinstance(shape, AttentionShape):
            return self._attention(operator, shape)
        if isinstance(shape, ExpertsShape) and shape.ranks <= (self.domain or shape.ranks):
            return self._experts(shape)
        if operator.name in ("indexer", "top_k") and operator.module:
            return self._selection(operator.name, operator.module)
        return None

    def _experts(self, shape: ExpertsShape) -> KernelTime | None:
        cells = self.calibration.laws.get("moe", {})
        kinds = [kind for kind in expert_kinds(shape) if kind in cells]
        tuned = (cells[kind] for kind in kinds if getattr(cells[kind].law, "em", 1) > _UNTUNED)
        entry = next(tuned, None)
        if not entry:
            return None
        kernel_model = entry.law

        def us_of(tokens: Any) -> Any:
            load = busiest_load(tokens, shape.top_k, shape.experts, shape.ranks)
            sizes = shape.hidden, shape.width, shape.top_k, shape.experts, 1, shape.ranks
            loads = load.rows, load.touched, *load.tiles
            us = kernel_model.us(self.parameters, tokens, *sizes, *loads)
            return float(us) if getattr(us, "ndim", 0) == 0 else us

        tokens = maximum(shape.tokens, 1)
        us = us_of(tokens)
        if not isinstance(kernel_model, FusedMoe):
            return KernelTime(us, entry)
        for last in kernel_model.tile_changes(shape.top_k, shape.experts, shape.ranks):
            # With the tile of fewer tokens, so that more tokens never take less time.
            if is_any(tokens > last):
                us = where(tokens > last, maximum(us, us_of(max(1.0, floor(last)))), us)
        return KernelTime(us, entry)

    def module_overhead(self, shape: SparseShape, kernels_us: Any) -> KernelTime | None:
        """Return the time of one layer's sparse attention that its single operators do not explain.

        The whole attention module was measured too, and takes longer than its operators together.
        The result is the difference of both times, minus the overhead of an MLA module (latent
        attention) with one new token, and at least 0. The MLA overhead is subtracted because the
        engine's overhead per layer, which was fitted to measured servers, already contains it.

        None means that there is no time model for the module. The module's time was measured in
        decode steps, so a sequence with more than 16 new tokens counts as one with 16.

        Args:
            shape: Sizes of the module in one layer on one rank.
            kernels_us: Microseconds of the module's operators together, in one layer.
        """
        entry, is_measured = self._module_entry("dsa_decode_module", shape)
        if not entry:
            return None
        dense, _ = self._module_entry("mla_decode_module", shape)
        tokens, length, _ = _decode_load(shape)
        shared_us = 0.0
        if dense and isinstance(dense.law, MlaModule):
            shared_us = dense.law.overhead_us(1, shape.heads)
        module_us = entry.law.us(self.parameters, tokens, shape.heads, length, *shape[1:10])
        return KernelTime(maximum(module_us - shared_us - kernels_us, 0.0), entry, is_measured)

    def _module_entry(
        self, op: str, shape: SparseShape
    ) -> tuple[KernelModelEntry | None, bool]:
        """Return the kernel model of a module in these formats or the nearest ones, and whether
        these formats were measured."""
        cells = self.calibration.laws.get(op, {})
        cached, is_measured = cache_kind(shape.cached)
        stored = _PROJECTIONS.get(family(shape.format), "")
        if f"{cached}/{stored}" in cells:
            return cells[f"{cached}/{stored}"], is_measured
        nearest = [name for name in cells if name.endswith(f"/{stored}")]
        nearest += [name for name in cells if name.startswith(f"{cached}/")]
        return (cells[nearest[0]] if nearest else None), False

    def _selection(self, name: str, shape: SparseShape) -> KernelTime | None:
        """Return the time of the indexer's scores or of its top-k in a decode step.

        NaN for a prompt, None without a kernel model.
        """
        entry, is_measured = self._module_entry("dsa_decode_module", shape)
        if not entry or not isinstance(entry.law, SparseDecode):
            return None
        tokens, length, is_decode = _decode_load(shape)
        load = self.parameters, tokens, length
        us = (
            LAUNCH_US + entry.law.scores_us(*load, shape.index_width)
            if name == "indexer"
            else entry.law.top_k_us(*load, shape.top_k)
        )
        return KernelTime(where(is_decode, us, math.nan), entry, is_measured)

    def _attention(self, operator: Operator, shape: AttentionShape) -> KernelTime | None:
        """Return the time of attention in a pass: one launch for all decoding groups, and one for
        each group of prompts.

        If the points of an array need different kernels, both launches contain the group. Its count
        is 0 at the points of the other kernel.
        """
        decoding = []
        prompts = []
        for count, new, past, pairs in shape.groups:
            is_prompt = at_least(new, MAX_DECODE_TOKENS + 1)
            is_decode = 1 - is_prompt
            if is_any(is_decode):
                decoding.append((count * is_decode, new, past, pairs * is_decode))
            if is_any(is_prompt):
                prompts.append((count * is_prompt, new, past, pairs * is_prompt))
        launches = [self._decode(operator, shape, decoding)] if decoding else []
        launches += [self._prefill(operator, shape, prompt) for prompt in prompts]
        timed = [launch for launch in launches if launch]
        if len(timed) < len(launches) or not timed:
            return None
        worst = max((launch.entry for launch in timed), key=lambda entry: entry.p90_abs_error)
        is_measured = cache_kind(shape.cached)[1] and all(each.is_measured for each in timed)
        if not shape.kv_heads:
            is_measured = is_measured and (shape.key, shape.value) in _LATENT_WIDTHS
        return KernelTime(sum(launch.us for launch in timed), worst, is_measured)

    def _decode(
        self, operator: Operator, shape: AttentionShape, groups: list[_Group]
    ) -> KernelTime | None:
        """Return the time of one launch of a decode kernel.

        Several new tokens per sequence may use a prefill kernel if it is faster. More tokens never
        take less time: a launch takes at least the time of fewer tokens with another kernel. A
        sparse kernel reads the latents that it gathers at most once before it attends.

        If only a 16-bit cache was measured, an 8-bit cache takes the time of half its bytes. On a
        GPU without fp8 units it takes the same time as the 16-bit cache, because the conversion to
        16 bits costs as much as the bytes save. With vLLM on an A100, decode steps of Qwen3-8B are
        0.4% to 5.5% faster with an fp8 cache (vLLM issue 42058). Triton's kernel takes 1.6 times as
        long (vLLM pull request 45829).
        """
        op = "decode_attention" if shape.kv_heads else "mla_decode"
        measured = self.calibration.find_entry(op, cache_kind(shape.cached)[0])
        entry = measured or self.calibration.find_entry(op, "bfloat16")
        if not entry:
            return None
        batch = sum(as_float(count) for count, *_ in groups)
        queries = sum(as_float(count * new) for count, new, *_ in groups)
        pairs = sum(pairs for *_, pairs in groups)
        sequences = maximum(batch, 1)
        tokens = queries / sequences
        length = maximum(nearest_whole(pairs / maximum(queries, 1)), 1)
        kernel_model = replace(entry.law, cold=True)
        if not measured and self.parameters.fp8 > self.parameters.bf16:
            kernel_model = replace(kernel_model, bytes=1)
        if operator.module and isinstance(kernel_model, MlaDecode):
            kernel_model = replace(kernel_model, cast=min(kernel_model.cast, 1.0))

        def us_of(new: Any) -> Any:
            sizes: tuple[Any, ...] = sequences, shape.heads * new, length
            if shape.kv_heads:
                sizes = *sizes[:2], shape.kv_heads, (shape.key + shape.value) / 2, length, 0
            return kernel_model.us(self.parameters, *sizes)

        us = us_of(tokens)
        if is_any(tokens > 1):
            for heads in _KERNEL_HEADS:
                new = max(math.floor(heads * max(shape.kv_heads, 1) / shape.heads), 1)
                us = maximum(us, us_of(minimum(new, maximum(tokens, 1))))
            past = sum(as_float(count * past) for count, _, past, _ in groups) / sequences
            prompt = self._prefill(operator, shape, (batch, tokens, past, pairs))
            if prompt:
                us = where(tokens > 1, minimum(us, prompt.us), us)
        return KernelTime(where(batch > 0, us, 0.0), entry, bool(measured))

    def _prefill(
        self, operator: Operator, shape: AttentionShape, group: _Group
    ) -> KernelTime | None:
        """Return the time of the prompts of a group, at least the time of a decode step of their
        last tokens."""
        count, new, past, pairs = group
        cached, _ = cache_kind(shape.cached)
        entry = (
            self.calibration.find_entry("prefill_attention", f"bfloat16/{cached}")
            if shape.kv_heads
            else self.calibration.find_entry("mla_prefill", cached)
        )
        if not entry:
            return None
        kernel_model = entry.law
        keys = pairs / maximum(count * new, 1)  # that a query sees on average
        sizes: tuple[Any, ...]
        if isinstance(kernel_model, MlaPrefill):
            if operator.form:
                kernel_model = replace(kernel_model, attends=operator.form)
            sizes = new, keys, shape.key + shape.value
        else:
            sizes = shape.kv_heads, (shape.key + shape.value) / 2, new, 0, keys
        us = kernel_model.us(self.parameters, maximum(count, 1), shape.heads, *sizes)
        last_keys = minimum(past + new, maximum(keys, 2 * keys - past - 1))
        step = self._decode(operator, shape, [(count, 1, past, count * last_keys)])
        if step:
            us = maximum(us, step.us)
        return KernelTime(where(count > 0, us, 0.0), entry, not step or step.is_measured)


def mla_kernels_us(
    kind: str, rows: Sequence[Array], parameters: GpuParameters, calibration: Calibration
) -> Array | None:
    """Return the predicted microseconds [rows] of GEMMs and attention in measured MLA modules.

    An MLA module is the latent attention of one layer in a decode step. The rest of its measured
    time is the overhead that a fit needs. None means that a required time model is missing. The KV
    cache may be in the L2 cache, as in the measurement.

    Args:
        kind: Data types of the KV cache and of the projections, such as `bfloat16/fp8_block`.
        rows: Three arrays [rows]: batch size, query heads of the rank, and cached tokens per
            sequence.
        parameters: Datasheet rates and sizes of the GPU.
        calibration: Fitted time models of GEMMs and of latent attention.
    """
    batch, heads, length = rows
    cached, _, stored = kind.partition("/")
    attention = calibration.kernel_model("mla_decode", cached)
    projections = calibration.kernel_model("gemm", stored)
    absorbed = calibration.kernel_model("gemm", "bfloat16")
    if not (attention and projections and absorbed):
        return None
    hidden, rank, latent, rope, nope, value = WIDTHS
    gemms = (
        (projections, rank + latent + rope, hidden),
        (projections, heads * (nope + rope), rank),
        (projections, hidden, heads * value),
        (absorbed, heads * latent, nope),
        (absorbed, heads * value, latent),
    )
    us = attention.us(parameters, batch, heads, length)
    for kernel_model, n, k in gemms:
        served = _served_gemm(kernel_model, absorbed)
        us = us + served.us(parameters, batch, n + batch * 0, k + batch * 0)
    return us


def _decode_load(shape: SparseShape) -> tuple[Any, Any, Any]:
    """Return the new tokens of a batch, their mean context, and whether the batch only decodes.

    At most MAX_DECODE_TOKENS tokens of each sequence count.
    """
    tokens = 0.0
    contexts = 0.0
    longest = 0
    for count, new, past in shape.groups:
        counted = minimum(new, MAX_DECODE_TOKENS)
        tokens = tokens + count * counted
        contexts = contexts + count * counted * (past + (counted + 1) / 2)
        longest = maximum(longest, new)
    tokens = maximum(tokens, 1.0)
    return tokens, maximum(contexts / tokens, 1.0), longest <= MAX_DECODE_TOKENS
