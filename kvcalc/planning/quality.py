"""What is stored in fewer bits than before, in words, and what is published of that.

What is known of an attention variant's quality: how diverse its heads are, a published finding and
scores, what it trades.
"""

import re
from typing import NamedTuple

from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.model.model import Model
from kvcalc.model.precision import PUBLISHED, Precision, formats_of
from kvcalc.storage.formats import FORMATS, cache_dtypes, canonical
from kvcalc.storage.quantization import (
    LOSSES,
    Score,
    cache_family,
    load_weight_format,
    loss_of,
)


class StoredPrecision(NamedTuple):
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


def stored(model: Model, precision: Precision) -> StoredPrecision:
    """The labels of a model under a precision."""
    formats = formats_of(model, precision)
    return StoredPrecision(formats.weights_label, formats.kv_cache_dtype)


def lowered(old: StoredPrecision, new: StoredPrecision) -> list[Lowered]:
    """What `new` stores in fewer bits than `old`: by the narrowest format of each."""
    results = []
    if _weight_bits(new.narrowest) < _weight_bits(old.narrowest):
        results.append(Lowered("weights", new.narrowest, old.narrowest))
    if _cache_bits(new.cache) < _cache_bits(old.cache):
        results.append(Lowered("cache", new.cache, old.cache))
    return results


def below_published(model: Model, precision: Precision) -> list[Lowered]:
    """Weights or cache of fewer bits than published."""
    return (
        lowered(stored(model, PUBLISHED), stored(model, precision))
        if precision != PUBLISHED
        else []
    )


def paid(low: Lowered, former: str = "") -> str:
    """What is lowered, with what is known of its cost."""
    return f"{low.what} in {low.format}{former}: {loss_of(low.what, low.format)}"


def narrower(formats: StoredPrecision, gpu: Gpu, weights_only: bool) -> list[tuple[str, str]]:
    """Return options and formats that need fewer bits on a GPU."""
    has_fp8 = "fp8" in gpu.flops_per_s
    options = []
    if has_fp8 and _cache_bits(formats.cache) > 8 and not weights_only:
        options.append(("--kv-cache-dtype", "fp8"))
    for name in ("fp8", "int4") if has_fp8 else ("int4",):
        if _weight_bits(name) < _weight_bits(formats.narrowest):
            return [*options, ("--quantization", name)]
    return options


def _cache_bits(label: str) -> float:
    """Bits of the narrowest format in a cache's label; packed rows as what they pack."""
    widths = [FORMATS[part].bits for part in label.split(" + ") if part in FORMATS]
    return min(widths, default=8 if label.startswith("fp8") else 4)


def _weight_bits(name: str) -> float:
    try:
        return load_weight_format(name).bits or 4
    except UserError:
        return 4


_GQA = "GQA, arXiv 2305.13245"
_V2 = "DeepSeek-V2, arXiv 2405.04434"


class Quality(NamedTuple):
    """head_diversity: full, grouped or shared keys and values. note: a published finding, with its
    source. trades: for what."""

    head_diversity: str
    note: str
    trades: str
    scores: tuple[Score, ...] = ()

    def __str__(self) -> str:
        sources = [score.source for score in self.scores]
        last = [source not in sources[at + 1 :] for at, source in enumerate(sources)]
        scores = (
            f"{s} ({s.source})" if stated else str(s)
            for s, stated in zip(self.scores, last, strict=True)
        )
        return ", ".join([self.note, *scores])


T5_XXL = ("the mean of 7 tasks, T5-XXL uptrained", f"{_GQA}, Table 1")
DENSE_7B = ("MMLU, 7B from scratch", f"{_V2}, Table 8")
MOE = "MMLU, a MoE of {}", f"{_V2}, Table 9"
# Published scores of the same model with fewer KV heads: (KV heads, 0 for all; score)
OVER_HEADS = {
    T5_XXL: ((1, 46.6), (8, 47.1), (0, 47.2)),
    DENSE_7B: ((1, 37.9), (8, 41.2), (0, 45.2)),
}


def _with_heads(heads: int) -> tuple[Score, ...]:
    """The scores of so many KV heads."""
    tables = ((dict(points), *names) for names, points in OVER_HEADS.items())
    return tuple(
        Score(scores[heads], scores[0], what, source) for scores, what, source in tables
    )


QUALITY = {
    "mha": Quality("full", f"the reference: 'strong' ({_V2}, Table 1)", "memory"),
    "mqa": Quality(
        "shared",
        f"'weak' ({_V2}, Table 1); quality loss and instability ({_GQA}, abstract and App. A)",
        "quality",
        _with_heads(1),
    ),
    "gqa": Quality(
        "grouped",
        f"'moderate' ({_V2}, Table 1); close to MHA after uptraining ({_GQA}, abstract); with 8 "
        "KV heads",
        "some of both",
        _with_heads(8),
    ),
    "mla": Quality(
        "full",
        f"'stronger' than MHA in its authors' ablations ({_V2}, Table 1)",
        "FLOPs in decode",
        (
            Score(50.0, 48.7, MOE[0].format("16B"), MOE[1]),
            Score(59.0, 57.5, MOE[0].format("250B"), MOE[1]),
        ),
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
    **{
        family: Quality("as before", loss.found, "precision", loss.scores)
        for (stored, family), loss in LOSSES.items()
        if stored == "cache"
    },
}
_OWN = {
    "MHA": "mha",
    "GQA": "gqa",
    "MQA": "mqa",
    "MLA": "mla",
    "DSA": "dsa",
    "window": "window",
    "budget": "evict",
}


def quality_of(variant: str, attention: str) -> dict[str, Quality]:
    """What is known of each step of a variant's name, by step; steps of which nothing is noted are
    left out.

    `none` stands for what the model's `attention` is made of.
    """
    steps = {
        step: _named(step.partition(":")[0])
        for step in (word.strip().lower() for word in variant.split("/"))
    }
    if "none" in steps:
        own = dict.fromkeys(re.findall(rf"\b({'|'.join(_OWN)})\b", attention))
        steps = {word: _OWN[word] for word in own} | {
            step: name for step, name in steps.items() if step != "none"
        }
    return {step: QUALITY[name] for step, name in steps.items() if name in QUALITY}


def _named(step: str) -> str:
    """The entry of a step: of a cache format that of its family."""
    return step if canonical(step) not in cache_dtypes() else cache_family(step)
