"""What every part of a layer is: a frozen spec whose fields are the keys of a preset, and what follows from them.

A part is one mixer (attention, recurrent state) or one feed-forward network. A new variant is one new file: fields,
`weights`, and for a mixer `cache` and `label`.
"""

from typing import Annotated, ClassVar, Literal

import msgspec

from kvcalc.layers.cache import CacheEntry, Span
from kvcalc.layers.cost import Operator, Role
from kvcalc.layers.passes import Pass
from kvcalc.layers.weights import Weight, WeightKind

Size = Annotated[int, msgspec.Meta(ge=1, le=10**8)]  # widths, heads, experts
Count = Annotated[int, msgspec.Meta(ge=0, le=10**8)]  # the same where 0 means none
Tokens = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
StateDtype = Literal["fp32", "bf16", "fp16"]


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """A part of a layer. Subclasses are tagged with the `type` that a preset names."""

    STATE_FLOPS: ClassVar[int] = 4
    ROLE: ClassVar[Role] = Role.PROJECTION  # of its matrix products

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Every parameter of this part, given the width of the residual stream."""
        raise TypeError(f"{type(self).__name__} lists no weights")

    def dims(self) -> dict[str, tuple[str, str]]:
        """The two sides of each matrix in letters, D being the residual stream's width; for those that formulas are shown of."""
        return {}

    def letters(self) -> dict[str, int]:
        """What the letters of `dims` stand for, D apart."""
        return {}

    def cache(self) -> tuple[CacheEntry, ...]:
        """What this part caches for one sequence; nothing unless it is a mixer."""
        return ()

    def eviction_scores(self) -> tuple[CacheEntry, ...]:
        """What a policy that evicts keeps beside the cache to choose by; no part of the cache's bytes."""
        return ()

    @property
    def window_tokens(self) -> int:
        """Tokens that a query sees back to, itself included; 0 where nothing limits how far it sees."""
        return 0

    @property
    def pooled_tokens(self) -> int:
        """Tokens whose index keys become one, where an engine need keep but that; 0 where each is scored by itself."""
        return 0

    def operators(self, p: Pass) -> list[Operator]:
        """What this part runs in one pass on one rank. Shapes: x is [tokens, hidden_size] before and after.

        Unless a variant says otherwise: the projections that read x in one product, the others each, a scan over the state,
        and the projections that write x. The scan counts STATE_FLOPS per state element and token as matrix products (write
        and read, two each), and the decay and the convolution as vector work. Every state but a convolution's is scanned;
        rows of tokens need operators of the variant's own.
        """
        found = [w for w in p.local(self.weights(p.width)).values() if w.kind is WeightKind.MATRIX]
        first = [w for w in found if w.inputs == p.width and w.copies == 1 and not w.rows_in]
        last = [w for w in found if w.rows_in and w.outputs == p.width]
        between = [w for w in found if w not in first and w not in last]
        names = {id(w): w.name if len(last) > 1 else "out_proj" for w in last}
        return [
            *([p.gemm("in_proj", *first)] if first else []),
            *(p.gemm(w.name, w) for w in between),
            *self._scan(p, sum(w.outputs for w in first), sum(w.inputs for w in last)),
            *(p.gemm(names[id(w)], w) for w in last),
            *(p.all_reduce(p.width) if last else []),
        ]

    def _scan(self, p: Pass, width_in: int, width_out: int) -> list[Operator]:
        entries = self.cache()
        if not entries:
            return []
        if any(e.span is not Span.STATE for e in entries):
            raise TypeError(f"{type(self).__name__} lists no operators over the rows of tokens that it caches")
        states = sum(p.heads(e.heads) * e.width * e.limit for e in entries if e.role != "conv_state")
        columns = sum(p.heads(e.heads) * e.width * (e.limit + 1) for e in entries if e.role == "conv_state")
        moved = p.tokens * (width_in + width_out) * p.element
        return [p.scan(entries, self.STATE_FLOPS * states * p.tokens, 2 * (states + columns) * p.tokens, moved)]

    def problem(self) -> str:
        """What is wrong with this combination of fields, in one sentence, or ''."""
        return ""

    @property
    def label(self) -> str:
        """How people call this mixer: 'GQA-8', 'MLA', 'Mamba-2'; '' for what is no mixer."""
        return ""

    def predicting(self) -> "Part":
        """This part in a multi-token-prediction layer: the same, for most."""
        return self

    def storing(self, own: bool) -> "Part | None":
        """This part in a layer that keeps a cache of its own, or reads another layer's: with or without the projections of
        what is cached. None where no such form is known.
        """
        return self if own else None

    def as_mha(self) -> tuple[int, int, int]:
        """(query heads, key width, value width) that this attention would have as MHA; zeros for what does not attend."""
        return 0, 0, 0

    @property
    def attends(self) -> bool:
        """Whether queries look at tokens: then it has a form as MHA, MQA, MLA … too."""
        return self.as_mha()[0] > 0
