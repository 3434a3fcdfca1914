"""Contexts, batch sizes, and dimensions of layers without a model."""

from kvcalc.question.options import Question, Tokens


class ContextOptions(Question, frozen=True):
    """A context and a batch size. In records, the context changes fastest."""

    context: Tokens = 4096
    batch_size: Tokens = 1


class SizeOptions(ContextOptions, frozen=True):
    """A context, a batch size and the blocks of the cache."""

    block_size: Tokens = 16


class DimensionOptions(Question, frozen=True):
    """The dimensions of layers of one kind; 0 means that the user did not give the value."""

    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    hidden_size: int = 0
    heads: int = 0
    sliding_window: Tokens = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
