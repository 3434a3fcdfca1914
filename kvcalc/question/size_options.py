"""Contexts, batch sizes, and dimensions of layers without a model."""

from functools import partial
from typing import Annotated

from kvcalc.question.deployment_options import CONTEXT_WORDS, PROMPT_WORDS, USER_WORDS
from kvcalc.question.options import Option, Question, tokens_called
from kvcalc.units import parse_tokens

BATCH_SIZE = Option(
    "Concurrent sequences; a list adds rows",
    "--batch-size --bs",
    takes="N",
    is_common=True,
    called=USER_WORDS,
    read=tokens_called("batch size"),
    list_order=5,
)


class ContextOptions(Question, frozen=True):
    """A context and a batch size. In records, the context changes fastest."""

    context: Annotated[
        int,
        Option(
            "Cached tokens per sequence: 4096, 4k or 1k,8k,128k",
            takes="TOKENS",
            is_common=True,
            called=CONTEXT_WORDS + " " + PROMPT_WORDS,
            read=parse_tokens,
            list_order=1,
        ),
    ] = 4096
    batch_size: Annotated[int, BATCH_SIZE] = 1


class SizeOptions(ContextOptions, frozen=True):
    """A context, a batch size and the blocks of the cache."""

    block_size: Annotated[
        int,
        Option("Tokens per KV cache block", panel="Memory", read=tokens_called("block size")),
    ] = 16


_dimension = partial(Option, panel="Model dimensions")


class DimensionOptions(Question, frozen=True):
    """The dimensions of layers of one kind; 0 means that the user did not give the value."""

    layers: Annotated[
        int,
        _dimension(
            "Number of layers with their own KV cache, without a model",
            called="num-layers n-layers num-hidden-layers hidden-layers",
        ),
    ] = 0
    kv_heads: Annotated[
        int,
        _dimension("KV heads per layer", called="num-key-value-heads n-kv-heads num-kv-heads"),
    ] = 0
    head_dim: Annotated[int, _dimension("Width of one key or value")] = 0
    hidden_size: Annotated[
        int, _dimension("Width of the model, for MHA without --kv-heads and --head-dim")
    ] = 0
    heads: Annotated[
        int,
        _dimension(
            "Query heads, to compare the cache with MHA",
            called="num-attention-heads n-heads num-heads",
        ),
    ] = 0
    sliding_window: Annotated[
        int,
        _dimension(
            "Tokens of the sliding window",
            takes="TOKENS",
            read=tokens_called("--sliding-window"),
        ),
    ] = 0
    kv_lora_rank: Annotated[
        int, _dimension("Width of MLA's compressed KV, instead of KV heads")
    ] = 0
    qk_rope_head_dim: Annotated[int, _dimension("Width of MLA's RoPE key")] = 0
