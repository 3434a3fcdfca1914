"""What is stored in fewer bits than before, in words, and what is published of that."""

from typing import NamedTuple

from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.model.precision import PUBLISHED, Precision, formats_of
from kvcalc.model.spec import Model
from kvcalc.storage.dtypes import FORMATS
from kvcalc.storage.quality import loss_of
from kvcalc.storage.quantization import load_weight_format


class Stored(NamedTuple):
    """How weights and cache are stored, by their labels."""

    weights: str
    cache: str

    @property
    def narrowest(self) -> str:
        """Of the weights' formats the one with the fewest bits."""
        return min(self.weights.split(" + "), key=_weight_bits)


class Lowered(NamedTuple):
    """`weights` or `cache` in a format of fewer bits than `former`."""

    what: str
    format: str
    former: str


def stored(model: Model, precision: Precision) -> Stored:
    """The labels of a model under a precision."""
    formats = formats_of(model, precision)
    return Stored(formats.weights_label, formats.kv_cache_dtype)


def lowered(old: Stored, new: Stored) -> list[Lowered]:
    """What `new` stores in fewer bits than `old`: by the narrowest format of each."""
    found = []
    if _weight_bits(new.narrowest) < _weight_bits(old.narrowest):
        found.append(Lowered("weights", new.narrowest, old.narrowest))
    if _cache_bits(new.cache) < _cache_bits(old.cache):
        found.append(Lowered("cache", new.cache, old.cache))
    return found


def below_published(model: Model, precision: Precision) -> list[Lowered]:
    """Weights or cache of fewer bits than published."""
    return lowered(stored(model, PUBLISHED), stored(model, precision)) if precision != PUBLISHED else []


def paid(low: Lowered, former: str = "") -> str:
    """What is lowered, with what is known of its cost."""
    return f"{low.what} in {low.format}{former}: {loss_of(low.what, low.format)}"


def narrower(held: Stored, gpu: Gpu, weights_alone: bool = False) -> list[tuple[str, str, str]]:
    """Return (option, `weights` or `cache`, format) of what would store fewer bits on a GPU."""
    eight, found = "fp8" in gpu.flops_per_s, []
    if eight and _cache_bits(held.cache) > 8 and not weights_alone:
        found.append(("--kv-cache-dtype", "cache", "fp8"))
    smaller = [name for name in ("fp8", "int4") if (eight or name != "fp8") and _weight_bits(name) < _weight_bits(held.narrowest)]
    return found + [("--quantization", "weights", name) for name in smaller[:1]]


def _cache_bits(label: str) -> float:
    """Bits of the narrowest format in a cache's label; packed rows as what they pack."""
    widths = [FORMATS[part].bits for part in label.split(" + ") if part in FORMATS]
    return min(widths, default=8 if label.startswith("fp8") else 4)


def _weight_bits(name: str) -> float:
    try:
        return load_weight_format(name).bits or 4
    except UserError:
        return 4
