"""Records of `compare`: attention variants of a model at one context and batch size."""

from typing import Annotated, TypedDict

from kvcalc.records.figures import FloatOrNull, TextOrNull
from kvcalc.records.roofline import PassTotalRecord
from kvcalc.records.size import DeploymentRecord, MemoryRecord, SizeRecord, TimeBasisRecord


class QualityRecord(TypedDict):
    """JSON keys about the published quality of an attention variant, such as MHA or GQA.

    `head_diversity` is `full` if each query head has its own keys and values, `grouped` (GQA) or
    `shared` (MQA). `quality` has published findings with their sources, and `trades` what the
    variant gives up, such as memory. After a key's meaning come the heading and the format of its
    table column.
    """

    head_diversity: Annotated[
        TextOrNull,
        "how different keys and values of the heads can be; null if unknown",
        "heads",
    ]
    quality_share: Annotated[
        FloatOrNull,
        "published score ÷ score with 16 bits; null if nobody measured this model",
        "quality",
    ]
    quality: Annotated[TextOrNull, "published quality of the variant; null if unknown"]
    trades: Annotated[TextOrNull, "gains and losses of the variant; null if unknown"]


class VariantRecord(SizeRecord, QualityRecord):
    """KV cache and attention of an attention variant, compared with the first variant of `compare`.

    The record is for one context and batch size. Bytes are of one GPU. "Reference" is the first
    variant; a reduction of 4 means that the reference needs 4 times the bytes. FLOPs of attention,
    `attention_intensity` and `eviction_flops` are of one decode step. `attention_flops_per_s` is
    the FLOP rate of attention at its datasheet bound. `held_equal` names what the variant leaves
    unchanged, such as layers and query heads. Eviction is a cache policy that discards tokens; the
    FLOPs are 0 without it.
    """

    variant: Annotated[
        str, "the attention variant, as on the command line", "variant", "variant"
    ]
    reduction: Annotated[FloatOrNull, "same as stored_reduction; null in the same cases"]
    reference: Annotated[str, "the variant with which the others are compared"]
    stored_reduction: Annotated[
        FloatOrNull,
        "stored bytes of the reference ÷ stored bytes; null if the variant stores nothing",
        "stores",
        "reduction",
    ]
    read_reduction: Annotated[
        FloatOrNull,
        "bytes read by the reference ÷ bytes read; null if the variant reads nothing",
        "reads",
        "reduction",
    ]
    attention_intensity: Annotated[
        FloatOrNull,
        "FLOP of attention per byte of KV cache that it reads; null if it reads none",
        "FLOP/B",
    ]
    attention_flops_per_s: Annotated[
        FloatOrNull, "FLOPs of attention ÷ its datasheet bound; null in the same case"
    ]
    eviction_flops: Annotated[int, "vector FLOPs of the choice of tokens to evict"]
    phase: Annotated[str, "decode, prefill or mixed", "phase"]
    held_equal: Annotated[str, "properties that all variants share"]


class CompareRecord(
    VariantRecord, DeploymentRecord, PassTotalRecord, TimeBasisRecord, MemoryRecord
):
    """One attention variant in `compare`: its KV cache, a decode step, a prefill, and the fit.

    The record is for one deployment, context and batch size. Bytes and FLOPs are of one GPU and for
    the whole batch. `ttft_s` and `prefill_flops` are of a prefill in which each sequence has
    `context` new tokens. "A matrix peak" is a published FLOP rate of the GPU's matrix units. After
    a key's meaning come the heading and the format of its table column.
    """

    ttft_s: Annotated[
        FloatOrNull,
        "time to the first token of a prompt of context tokens; null without a matrix peak",
        "TTFT",
    ]
    prefill_flops: Annotated[int, "matrix FLOPs of this prompt", "prefill FLOP"]
    mha_parameters: Annotated[int, "parameters of the model with multi-head attention"]
