"""A whole layer of a model against what was measured of it: the sum of its operators, norms and all-reduces among them.

Rows of `layer` name a model and one of its kinds of layer, which stands as their kernel. `batch` sequences of query_len new
tokens each attend to kv_len tokens, their own included: query_len 1 is decode, query_len = kv_len a fresh prompt. Caches are
cold, as between the layers of a pass; what an engine adds to its kernels is not in a layer.
"""

from typing import NamedTuple

from kvcalc.errors import UserError
from kvcalc.gpu.roof import roofline, total_seconds
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Operator
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.operators import forward
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.timing.calibration import Calibration
from kvcalc.timing.rows import MeasuredRow
from kvcalc.timing.served import served_model
from kvcalc.timing.steps import operator_seconds

_NAMES = {"fp8_block": "fp8_block128"}
_UNKNOWN = float("nan"), float("nan")


class _Asked(NamedTuple):
    """What a row asks, and how often its kind of layer stands in the model."""

    operators: list[Operator]
    times: int
    decodes: bool


def layer_us(row: MeasuredRow, gpu: Gpu, calibration: Calibration | None) -> tuple[float, float]:
    """µs of one layer of a row: at the least, and by the laws; NaN where the model, its ranks or a figure leaves none."""
    model = served_model(row.model)
    if model is None:
        return _UNKNOWN
    try:
        asked = _asked(row, model)
        least = float(total_seconds(roofline(asked.operators, gpu, asked.decodes)))
        timed = operator_seconds(asked.operators, gpu, calibration) if calibration else None
    except UserError:
        return _UNKNOWN
    laws = sum(float(one.seconds) for t in timed for one in t.both) if timed is not None else float("nan")
    return 1e6 * least / asked.times, 1e6 * laws / asked.times


def _asked(row: MeasuredRow, model: Model) -> _Asked:
    batch, query, length, tp, ep = (int(x) for x in row.shape)
    ranks = Parallelism(tp=max(1, tp), ep=max(1, ep))
    found = forward(model, Batch.prefill(query, batch, length - query), _stored(row, model), ranks)
    operators = [operator for operator in found if operator.layer == row.kernel]
    return _Asked(operators, model.counts[row.kernel], query == 1)


def _stored(row: MeasuredRow, model: Model) -> Precision:
    """The formats of a row: as published where that is what its dtype names, else all matrices in it."""
    name, cache = _NAMES.get(row.dtype, row.dtype), row.cache or "auto"
    if name in {scheme.format for scheme in model.quantization}:
        return Precision(kv_cache_dtype=cache)
    if name == "bfloat16":
        return Precision("bf16", cache)
    return Precision(kv_cache_dtype=cache, quantization=name)
