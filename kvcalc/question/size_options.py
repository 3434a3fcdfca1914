"""Options for output, contexts and batch sizes, and dimensions without a model."""

from kvcalc.errors import UserError
from kvcalc.question.options import Question, Tokens


class Printing(Question, frozen=True):
    """How an answer is printed.

    Attributes:
        format: table, json, csv or markdown.
        wide: Whether all columns are shown.
        verbose: Whether all notes are shown.
        units: Units of bytes: gib (2^30), si (10^9) or bytes (exact).
        explain: Whether the formulas of the figures are printed instead.
    """

    format: str = "table"
    wide: bool = False
    verbose: bool = False
    units: str = "gib"
    explain: bool = False


class Output(Printing, frozen=True):
    """How an answer is printed, and whether its picture is drawn.

    Attributes:
        plot: File of the picture; `-` draws it in the terminal, '' draws none.
        style: Style of the picture: light, dark or slides.
    """

    plot: str = ""
    style: str = "light"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.style != "light" and not self.plot:
            raise UserError(f"style {self.style!r} needs a picture", "Add --plot FILE")


class ContextOptions(Question, frozen=True):
    """The context and the batch size of a forward pass or of a KV cache.

    The user may type a comma-separated list for each; one object of this class has one pair. The
    answer lists all contexts with the first batch size first.

    Attributes:
        context: Tokens of each sequence in the cache, including the new ones of the pass.
        batch_size: Number of concurrent sequences of the whole replica.
    """

    context: Tokens = 4096
    batch_size: Tokens = 1


class SizeOptions(ContextOptions, frozen=True):
    """The context, the batch size and the block size of a KV cache, for `size`.

    Attributes:
        block_size: Tokens of a KV cache block.
    """

    block_size: Tokens = 16


class DimensionOptions(Question, frozen=True):
    """The dimensions of a model with equal layers, given instead of a model. 0 means not given.

    Attributes:
        layers: Number of layers with their own KV cache.
        kv_heads: KV heads per layer.
        head_dim: Elements of one key or value of a head.
        hidden_size: Width of the model (hidden size) in elements. It gives the cache of MHA if
            `kv_heads` and `head_dim` are not given.
        heads: Query heads per layer.
        sliding_window: Tokens of the sliding window.
        kv_lora_rank: Elements of the latent of MLA, which replaces the KV heads.
        qk_rope_head_dim: Elements of MLA's rotated (RoPE) key.
    """

    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    hidden_size: int = 0
    heads: int = 0
    sliding_window: Tokens = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
