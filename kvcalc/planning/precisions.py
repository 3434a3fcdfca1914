"""What is below a model's published precision, in words: what a plan that saves bytes so has to be tried for."""

from kvcalc.layers.formats import Formats
from kvcalc.model.memory import weight_bytes
from kvcalc.model.precision import PUBLISHED, Precision, formats_of
from kvcalc.model.spec import Model


def below_published(model: Model, precision: Precision) -> str | None:
    """Weights or cache of fewer bytes than published; None where there are none. What it costs in quality is not known here."""
    if precision == PUBLISHED:
        return None
    own, asked = formats_of(model, PUBLISHED), formats_of(model, precision)
    found = []
    if weight_bytes(model, precision) < weight_bytes(model):
        found.append(f"weights in {asked.weights_label}, published in {own.weights_label}")
    if _row_bytes(model, asked) < _row_bytes(model, own):
        found.append(f"cache in {asked.kv_cache_dtype}, published in {own.kv_cache_dtype}")
    return f"{'; '.join(found)}: quality is to be measured" if found else None


def _row_bytes(model: Model, formats: Formats) -> int:
    return sum(formats.entry_bytes(e, e.heads) for layer in model.kinds.values() for e in layer.entries if e.grows)
