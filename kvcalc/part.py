"""What every part of a layer is: a frozen spec whose fields are the keys of a preset, and what follows from them.

A part is one mixer (attention, recurrent state) or one feed-forward network. A new variant is one new file: fields,
`weights`, and for a mixer `cache` and `label`.
"""

from typing import Annotated, Literal

import msgspec

from kvcalc.cache import CacheEntry
from kvcalc.weights import Weight

Size = Annotated[int, msgspec.Meta(ge=1, le=10**8)]  # widths, heads, experts
Count = Annotated[int, msgspec.Meta(ge=0, le=10**8)]  # the same where 0 means none
Tokens = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
StateDtype = Literal["fp32", "bf16", "fp16"]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """A part of a layer. Subclasses are tagged with the `type` that a preset names."""

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Every parameter of this part, given the width of the residual stream."""
        raise TypeError(f"{type(self).__name__} lists no weights")

    def cache(self) -> tuple[CacheEntry, ...]:
        """What this part caches for one sequence; nothing unless it is a mixer."""
        return ()

    def problem(self) -> str:
        """What is wrong with this combination of fields, in one sentence, or ''."""
        return ""

    @property
    def label(self) -> str:
        """How people call this mixer: 'GQA-8', 'MLA', 'Mamba-2'; '' for what is no mixer."""
        return ""

    def as_mha(self) -> tuple[int, int]:
        """(query heads, value width): what `mha_ratio` compares with. (0, 0) for what does not attend."""
        return 0, 0
