"""Options for output, contexts and batch sizes, and dimensions without a model."""

from kvcalc.errors import UserError
from kvcalc.question.options import Question, Tokens


class Printing(Question, frozen=True):
    """How records are printed."""

    format: str = "table"
    wide: bool = False
    verbose: bool = False
    units: str = "gib"
    explain: bool = False

    @property
    def is_table(self) -> bool:
        """Return whether the answer is printed as a table, with a sentence above it."""
        return self.format in ("table", "markdown")


class Output(Printing, frozen=True):
    """How records are printed and drawn."""

    plot: str = ""
    style: str = "light"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.style != "light" and not self.plot:
            raise UserError(f"style {self.style!r} needs a picture", "Add --plot FILE")


class ContextOptions(Question, frozen=True):
    """A context and a batch size. In records, the context changes fastest."""

    context: Tokens = 4096
    batch_size: Tokens = 1


class SizeOptions(ContextOptions, frozen=True):
    """A context, a batch size and the blocks of the cache."""

    block_size: Tokens = 16


class DimensionOptions(Question, frozen=True):
    """The dimensions of a model whose layers are all equal; 0 means that the user did not give the
    value."""

    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    hidden_size: int = 0
    heads: int = 0
    sliding_window: Tokens = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
