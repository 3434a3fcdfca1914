"""Where attention itself lies under a GPU's roof: one layer of one shape as every common variant, decoding and in prefill."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcalc.gpu.roof import Placed, mla_form, roofline, total_bound, total_seconds
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.attention import Grouped
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Role
from kvcalc.model.operators import forward
from kvcalc.model.precision import Precision, formats_of
from kvcalc.model.spec import Layer, Model
from kvcalc.planning.variants import variant

HEADS, WIDTH = 128, 128  # query heads and their width in Llama-3.1-405B and DeepSeek-V3 (their config.json)
SHAPE = f"one layer of {HEADS} heads of {WIDTH}"


class Point(NamedTuple):
    """A variant as it is written in `compare`, its phase, and the form in which a latent is read."""

    label: str
    variant: str
    phase: str = "decode"
    mla_form: str = "auto"


POINTS = (
    Point("MHA", "mha"),
    Point("GQA-8", "gqa:8"),
    Point("GQA-4", "gqa:4"),
    Point("GQA-8 window 1024", "gqa:8/window:1024"),
    Point("MQA", "mqa"),
    Point("MLA absorbed", "mla"),
    Point("DSA top-2048", "dsa"),
    Point("MHA prefill", "mha", "prefill"),
    Point("MLA prefill", "mla", "prefill", "expanded"),
)


def standard_layer() -> Model:
    """One layer of `HEADS` query heads of `WIDTH`, as wide as its heads together."""
    mixer = Grouped(num_attention_heads=HEADS, num_key_value_heads=HEADS, head_dim=WIDTH)
    return Model(name=SHAPE, hidden_size=HEADS * WIDTH, vocab_size=1, layers=1, kinds={"layer": Layer(parts=(mixer,))})


def attention_records(
    gpu: Gpu, contexts: Sequence[int], batches: Sequence[int], precision: Precision | None = None
) -> list[dict[str, Any]]:
    """A record a point, batch and context (fastest): what attention, its indexer and its expansions do and move in one layer.

    flops, bytes: of the operators that read the cache, not of the projections around them. intensity: their FLOPs per byte.
    knee: of the dtype that the products are computed in; to_knee: the factor that intensity lacks to be compute-bound, 1 or
    less where it is. roofline_s: the datasheet bound. Raises UserError where the GPU has no matrix peak.
    """
    used = precision or Precision()
    return [_record(p, gpu, s, b, used) for p in POINTS for b in batches for s in contexts]


def _record(point: Point, gpu: Gpu, context: int, batch_size: int, precision: Precision) -> dict[str, Any]:
    placed = _core(point, gpu, context, batch_size, precision)
    flops, moved = sum(p.operator.total.flops for p in placed), sum(p.operator.total.bytes for p in placed)
    peak, computed_in = gpu.peak(placed[-1].operator.dtype)
    knee = peak / gpu.bandwidth_bytes_per_s
    return {
        "gpu": gpu.name,
        "attention": point.label,
        "variant": point.variant,
        "phase": point.phase,
        "mla_form": mla_form(placed),
        "batch_size": batch_size,
        "context": context,
        "kv_cache_dtype": formats_of(standard_layer(), precision).kv_cache_dtype,
        "flops": flops,
        "bytes": moved,
        "intensity": flops / moved,
        "bound": total_bound(placed),
        "roofline_s": total_seconds(placed),
        "knee": knee,
        "to_knee": knee * moved / flops,
        "computed_in": computed_in,
    }


def _core(point: Point, gpu: Gpu, context: int, batch_size: int, precision: Precision) -> list[Placed]:
    model = variant(standard_layer(), point.variant).model
    batch = Batch.of_phase(point.phase, context, batch_size)
    operators = forward(model, batch, precision, mla_form=point.mla_form)
    return roofline([o for o in operators if o.role == Role.CORE], gpu)
