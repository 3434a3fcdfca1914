"""Published quality of attention variants and of formats with fewer bits."""

import re
from typing import NamedTuple

from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.model.model import Model
from kvcalc.model.precision import PUBLISHED, Precision, formats_of
from kvcalc.storage.formats import FORMATS, cache_dtypes, canonical
from kvcalc.storage.quantization import LOSSES, cache_family, load_weight_format, loss_of

GQA = "GQA, arXiv 2305.13245"
V2 = "DeepSeek-V2, arXiv 2405.04434"


class StoredPrecision(NamedTuple):
    """Formats of the weights and of the cache, by their labels."""

    weights: str
    cache: str

    @property
    def narrowest(self) -> str:
        """The narrowest format of weights."""
        return min(self.weights.split(" + "), key=_weight_bits)


def stored_precision(model: Model, precision: Precision) -> StoredPrecision:
    """Return the formats of a model under a precision."""
    formats = formats_of(model, precision)
    return StoredPrecision(formats.weights_label, formats.kv_cache_dtype)


def precision_losses(model: Model, precision: Precision) -> list[str]:
    """Return the published losses of weights and cache that have fewer bits than published."""
    if precision == PUBLISHED:
        return []
    old, new = stored_precision(model, PUBLISHED), stored_precision(model, precision)
    formats = []
    if _weight_bits(new.narrowest) < _weight_bits(old.narrowest):
        formats.append(("weights", new.narrowest, old.narrowest))
    if _cache_bits(new.cache) < _cache_bits(old.cache):
        formats.append(("cache", new.cache, old.cache))
    return [
        f"{content} in {format_}, published in {former}: {loss_of(content, format_)}"
        for content, format_, former in formats
    ]


def narrower_formats(
    formats: StoredPrecision, gpu: Gpu, is_weights_only: bool
) -> dict[str, str]:
    """Return formats that need fewer bits on a GPU, by the field of `Precision`."""
    has_fp8 = "fp8" in gpu.flops_per_s
    narrower = {}
    if has_fp8 and _cache_bits(formats.cache) > 8 and not is_weights_only:
        narrower["kv_cache_dtype"] = "fp8"
    bits = _weight_bits(formats.narrowest)
    names = [name for name in ("fp8", "int4") if has_fp8 or name != "fp8"]
    smaller = [name for name in names if _weight_bits(name) < bits]
    return narrower | ({"quantization": smaller[0]} if smaller else {})


def _cache_bits(label: str) -> float:
    """Return the bits of the narrowest format in a cache's label. Packed rows count as the format
    that they pack."""
    widths = [FORMATS[part].bits for part in label.split(" + ") if part in FORMATS]
    return min(widths, default=8 if label.startswith("fp8") else 4)


def _weight_bits(name: str) -> float:
    try:
        return load_weight_format(name).bits or 4
    except UserError:
        return 4


# Published scores of the same model with 1 KV head, 8 KV heads and MHA (0), by task and source.
OVER_HEADS = {
    ("the mean of 7 tasks, T5-XXL uptrained", f"{GQA}, Table 1"): (
        (1, 46.6),
        (8, 47.1),
        (0, 47.2),
    ),
    ("MMLU, 7B from scratch", f"{V2}, Table 8"): ((1, 37.9), (8, 41.2), (0, 45.2)),
}


def _scores(index: int) -> str:
    """Return the published scores of a number of KV heads, compared with MHA."""
    texts = [
        f"{points[index][1]:g} against {points[-1][1]:g} in {task} ({source})"
        for (task, source), points in OVER_HEADS.items()
    ]
    return ", ".join(texts)


class Quality(NamedTuple):
    """Published quality of an attention variant.

    Attributes:
        head_diversity: How different keys and values of the heads are: full, grouped or shared.
        note: A published finding and scores, with their sources.
        trades: The disadvantage of the variant.
    """

    head_diversity: str
    note: str
    trades: str


QUALITY = {
    "mha": Quality("full", f"the reference: 'strong' ({V2}, Table 1)", "memory"),
    "mqa": Quality(
        "shared",
        f"'weak' ({V2}, Table 1); quality loss and instability ({GQA}, abstract and App. A), "
        f"{_scores(0)}",
        "quality",
    ),
    "gqa": Quality(
        "grouped",
        f"'moderate' ({V2}, Table 1); close to MHA after uptraining ({GQA}, abstract); with 8 "
        f"KV heads, {_scores(1)}",
        "some of both",
    ),
    "mla": Quality(
        "full",
        f"'stronger' than MHA in its authors' ablations ({V2}, Table 1), "
        "50 against 48.7 in MMLU, a MoE of 16B, "
        f"59 against 57.5 in MMLU, a MoE of 250B ({V2}, Table 9)",
        "FLOPs in decode",
    ),
    "dsa": Quality(
        "full",
        "on par with V3.1-Terminus on public benchmarks (DeepSeek-V3.2-Exp report)",
        "an indexer, more stored",
    ),
    "window": Quality(
        "as before",
        "reach grows by layers: W·L tokens (Mistral 7B, arXiv 2310.06825, §2)",
        "exact recall beyond W",
    ),
    "cla": Quality(
        "as before",
        "nearly MQA's accuracy at half its cache for 2 layers (arXiv 2405.12981, abstract)",
        "layer diversity",
    ),
    "evict": Quality(
        "as before",
        "heavy hitters hold most attention; 20 % kept in its tests (H2O, arXiv 2306.14048)",
        "evicted tokens",
    ),
}
for (_content, _family), _loss in LOSSES.items():
    if _content == "cache":
        _note = f"{_loss.finding}, {_loss.scores[0]} ({_loss.scores[0].source})"
        QUALITY[_family] = Quality("as before", _note, "precision")
# the variant by its name in a model's attention
OWN_NAMES = {name.upper(): name for name in ("mha", "gqa", "mqa", "mla", "dsa")} | {
    "window": "window",
    "budget": "evict",
}


def quality_of(variant: str, attention: str) -> dict[str, Quality]:
    """Return the published quality of each step of a variant's name; steps without one are left
    out.

    Args:
        variant: The name; `none` means the variants in the model's own attention.
        attention: The model's attention, such as `GQA-8 window 4096`.
    """
    steps = {}
    names = [word.strip().lower() for word in variant.split("/")]
    if "none" in names:
        own = re.findall(rf"\b({'|'.join(OWN_NAMES)})\b", attention)
        steps = {word: OWN_NAMES[word] for word in own}
    for step in names:
        is_dtype = canonical(step) in cache_dtypes()
        steps[step] = cache_family(step) if is_dtype else step.partition(":")[0]
    return {step: QUALITY[name] for step, name in steps.items() if name in QUALITY}
