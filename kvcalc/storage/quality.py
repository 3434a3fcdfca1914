"""Published quality losses of storage formats, with their sources."""

from typing import NamedTuple

from kvcalc.storage.dtypes import canonical
from kvcalc.storage.quantization import family

_LMDEPLOY = "LMDeploy's kv_quant.md"
_SGLANG = "SGLang's quantized_kv_cache.md"
_TRADE_OFFS = "the abstract of arXiv 2411.02355"


class Score(NamedTuple):
    """A published score, the score of the same model with full heads or 16 bits, the task, and the source."""

    value: float
    full: float
    what: str
    source: str

    def __str__(self) -> str:
        return f"{self.value:g} against {self.full:g} in {self.what}"


class Loss(NamedTuple):
    """The published loss of a format.

    Attributes:
        note: A finding.
        source: Source of the finding; '' if it is the source of the scores.
    """

    note: str
    source: str = ""
    scores: tuple[Score, ...] = ()

    @property
    def found(self) -> str:
        """The finding with its source."""
        return f"{self.note} ({self.source})" if self.source else self.note

    def __str__(self) -> str:
        """Return one measurement with its source: the first score, or the finding."""
        return (
            f"published score {self.scores[0]}, by {self.scores[0].source}" if self.scores else f"{self.note}, by {self.source}"
        )


_CHAT_7B = "MMLU, Llama-2-7B-chat", _LMDEPLOY
_R1 = "AIME25, DeepSeek-R1", _SGLANG
# By what is stored and its format. Abstracts, pages and their tables as they stood on 2026-11-22.
LOSSES = {
    ("weights", "fp8"): Loss("effectively lossless for Llama-3.1 of all sizes", _TRADE_OFFS),
    ("weights", "int8"): Loss("1–3 % lower accuracy of Llama-3.1 of all sizes", _TRADE_OFFS),
    ("weights", "int4"): Loss("rivals 8-bit weights for Llama-3.1 of all sizes", _TRADE_OFFS),
    ("cache", "fp8"): Loss(
        "near the bf16 cache's accuracy on the models tried", "vllm.ai/blog/fp8-kvcache", (Score(0.4934, 0.5067, *_R1),)
    ),
    ("cache", "fp4"): Loss("varies with size and task", "", (Score(0.4, 0.5067, *_R1),)),
    ("cache", "int8"): Loss("'almost lossless'", "", (Score(35.58, 35.64, *_CHAT_7B),)),
    ("cache", "int4"): Loss("'slight loss'", "", (Score(34.79, 35.64, *_CHAT_7B),)),
}
UNKNOWN = "no published measurement of what that costs is noted here"
_ALIKE = {"awq": "int4", "gptq": "int4", "int4_group32": "int4", "fp8_block128": "fp8", "fp8_per_channel": "fp8"}
_CACHES = {"fp8": "fp8", "int8": "int8", "int4": "int4", "nvfp4": "fp4", "mxfp4": "fp4"}


def cache_family(format_: str) -> str:
    """Return the family of a cache format that has published scores, or ''."""
    return next((family for prefix, family in _CACHES.items() if canonical(format_).startswith(prefix)), "")


def _loss(stored: str, format_: str) -> Loss | None:
    plain = family(format_)
    like = cache_family(format_) if stored == "cache" else _ALIKE.get(plain, plain)
    return LOSSES.get((stored, like))


def loss_of(stored: str, format_: str) -> str:
    """Return one published measurement of storing `weights` or `cache` in a format, with its source."""
    return str(_loss(stored, format_) or UNKNOWN)


def losses_of(stored: str, format_: str) -> str:
    """Return the finding and every score of a format, each with its source."""
    known = _loss(stored, format_)
    if not known:
        return UNKNOWN
    return ", ".join([known.found, *(f"{score} ({score.source})" for score in known.scores)])
