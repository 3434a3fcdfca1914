"""Parts: frozen specs whose fields are the keys of a preset.

A part is one mixer (attention or recurrent) or one FFN. A new variant is one new file with fields,
`weights`, and for a mixer `cache` and `label`.
"""

from functools import lru_cache
from math import prod
from typing import Annotated, ClassVar, Literal

import msgspec

from kvcalc.layers.cache import CacheEntry, Span
from kvcalc.layers.cost import Operator, Role
from kvcalc.layers.passes import Pass
from kvcalc.layers.weights import Weight, WeightKind, matrix, table, vector

Size = Annotated[int, msgspec.Meta(ge=1, le=10**8)]  # widths, heads, experts
Count = Annotated[int, msgspec.Meta(ge=0, le=10**8)]  # the same where 0 means none
Tokens = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
StateDtype = Literal["fp32", "bf16", "fp16"]


def number_of(size: str, letters: dict[str, int]) -> int:
    """Return the value of a size formula: a sum of products of letters and whole numbers.

    Example: `2·H·d + H` is 2,080 for H = 32 and d = 32.

    Args:
        size: Formula with ` + ` between products and `·` between factors.
        letters: Value of each letter.
    """
    total = 0
    for product in size.split(" + "):
        factors = product.split("·")
        total += prod(letters[word] if word in letters else int(word) for word in factors)
    return total


@lru_cache(1024)
def _listed_weights(part: "Sublayer", hidden_size: int) -> tuple[Weight, ...]:
    """Return the weights that the lines of a part list."""
    letters = part.letters() | {"D": hidden_size}
    weights = []
    for name, size, options in part.lines():
        sides, _, units = size.partition(" / ")
        inputs, _, outputs = sides.rpartition(" × ")
        shards = number_of(units or "1", letters)
        columns = number_of(outputs, letters)
        if not inputs:
            weights.append(vector(name, columns, shards))
            continue
        rows = number_of(inputs, letters)
        if "table" in options:
            weights.append(table(name, rows, columns, shards))
            continue
        weight = matrix(
            name,
            rows,
            columns,
            bias="bias" in options and bool(getattr(part, options["bias"], True)),
            shards=shards,
            rows_in="rows" in options or (outputs == "D" and bool(units)),
            copies=number_of(options.get("copies", "1"), letters),
            active=number_of(options.get("active", "0"), letters),
            expert="active" in options,
        )
        weights.append(weight)
    return tuple(weights)


class Sublayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """One part of a layer: an attention or recurrent mixer, an FFN, or other projections.

    The fields of a subclass are the keys of a part in a preset. The tag of a subclass is the value
    of the key `type`.

    Attributes:
        STATE_FLOPS: FLOPs of a scan for each state element and token.
        ROLE: Role of the matrix products.
        LETTERS: Letter and field of each size, such as `H=num_attention_heads d=head_dim`. D is
            always the hidden size.
        WEIGHTS: A line per weight. `o: H·d × D / H, bias o_bias` is a matrix [H·d, D] that tensor
            parallelism divides by heads, with a bias if the field `o_bias` is true. `norm: d` is a
            vector. Further words: `if qk_norm=full and not bias` is a condition, `copies E` a
            number of equal matrices, `active k` marks experts of which a token uses k, `table` a
            lookup table. A divided matrix with D outputs, or with `rows`, is row-parallel.
        MULTIPLE: A field, and the field of which it must be a multiple. Empty without such a rule.
    """

    STATE_FLOPS: ClassVar[int] = 4
    ROLE: ClassVar[Role] = Role.PROJECTION
    LETTERS: ClassVar[str] = ""
    WEIGHTS: ClassVar[str] = ""
    MULTIPLE: ClassVar[tuple[str, ...]] = ()

    def weights(self, hidden_size: int) -> tuple[Weight, ...]:
        """Return every weight of this part, before it is divided over ranks.

        Args:
            hidden_size: Hidden size of the model, the letter D in WEIGHTS.
        """
        return _listed_weights(self, hidden_size)

    def local_weights(self, p: Pass) -> dict[str, Weight]:
        """Return the share of each weight that one rank stores, by weight name.

        Args:
            p: Context of the pass, which gives the hidden size and the ranks.
        """
        return {w.name: w.local(p.ranks) for w in self.weights(p.width)}

    def lines(self) -> list[tuple[str, str, dict[str, str]]]:
        """Return (weight name, size formula, options) of each line of WEIGHTS that applies.

        A line applies if its `if` condition is true for the fields. `o: H·d × D / H, bias o_bias`
        gives ("o", "H·d × D / H", {"bias": "o_bias"}).
        """
        lines = []
        for line in filter(None, map(str.strip, self.WEIGHTS.splitlines())):
            name, _, text = line.partition(": ")
            size, *words = text.split(", ")
            options = {word.partition(" ")[0]: word.partition(" ")[2] for word in words}
            if all(map(self.holds, filter(None, options.get("if", "").split(" and ")))):
                lines.append((name, size, options))
        return lines

    def sides(self) -> dict[str, tuple[str, str]]:
        """Return the formulas of rows and columns of each matrix, by weight name.

        Example: {"q": ("D", "H·d")}. D is the hidden size; the class attribute LETTERS explains the
        others.
        """
        sizes = {name: size.partition(" / ")[0].split(" × ") for name, size, _ in self.lines()}
        return {name: (size[0], size[1]) for name, size in sizes.items() if len(size) == 2}

    def holds(self, condition: str) -> bool:
        """Return whether a condition on the fields of this part is true.

        Args:
            condition: `bias` (true if this field is set), `not bias` (true if it is not), or
                `output_gate=full` (true if the field has this value).
        """
        field, _, value = condition.removeprefix("not ").partition("=")
        actual = getattr(self, field)
        holds = str(actual) == value if value else bool(actual)
        return holds != condition.startswith("not ")

    def letters(self) -> dict[str, int]:
        """Return the value of each letter in LETTERS, without D. A field that is None gives 0."""
        pairs = (pair.split("=") for pair in self.LETTERS.split())
        return {letter: getattr(self, field) or 0 for letter, field in pairs}

    def cache(self) -> tuple[CacheEntry, ...]:
        """Return the cache entries that one layer with this part needs for one sequence.

        The result is empty for an FFN.
        """
        return ()

    def eviction_scores(self) -> tuple[CacheEntry, ...]:
        """Return the entries for scores that an eviction policy stores in addition to `cache()`.

        The result is empty if the part has no eviction.
        """
        return ()

    @property
    def window_tokens(self) -> int:
        """Return the size of the sliding window in tokens, including the query itself; 0 for no
        window.
        """
        return 0

    @property
    def pooled_tokens(self) -> int:
        """Return the number of tokens that share one pooled index key; 0 if each token has its own
        key.

        The index keys belong to the indexer of sparse attention. The result is not 0 if an engine
        needs to store only the pooled keys.
        """
        return 0

    def operators(self, p: Pass) -> list[Operator]:
        """Return the operators of one pass through this part on one rank.

        The input and output are x [tokens, hidden_size]. By default the operators are: the
        projections that read x as one product, each other projection, a scan over the state, and
        the projections that write x. The scan counts STATE_FLOPS per state element and token as
        matrix products. Decay and convolution count as vector work. All states except convolution
        states are scanned. A part that caches rows per token must define its own operators.

        Args:
            p: Context of the pass: its sequences, formats and ranks.
        """
        results = [w for w in self.local_weights(p).values() if w.kind is WeightKind.MATRIX]
        first = [w for w in results if w.inputs == p.width and w.copies == 1 and not w.rows_in]
        last = [w for w in results if w.rows_in and w.outputs == p.width]
        between = [w for w in results if w not in first and w not in last]
        names = {id(w): w.name if len(last) > 1 else "out_proj" for w in last}
        return [
            *([p.gemm("in_proj", *first)] if first else []),
            *(p.gemm(w.name, w) for w in between),
            *self._scan(p, sum(w.outputs for w in first), sum(w.inputs for w in last)),
            *(p.gemm(names[id(w)], w) for w in last),
            *(p.all_reduce(p.width) if last else []),
        ]

    def _extra(self, p: Pass, w: dict[str, Weight]) -> list[Operator]:
        """Return operators that a variant of attention adds between projections and attention."""
        return []

    def _scan(self, p: Pass, width_in: int, width_out: int) -> list[Operator]:
        entries = self.cache()
        if not entries:
            return []
        if any(e.span is not Span.STATE for e in entries):
            raise TypeError(
                f"{type(self).__name__} lists no operators over the rows of tokens that it caches"
            )
        states = sum(
            p.heads(e.heads) * e.width * e.limit for e in entries if e.role != "conv_state"
        )
        columns = sum(
            p.heads(e.heads) * e.width * (e.limit + 1)
            for e in entries
            if e.role == "conv_state"
        )
        moved = p.tokens * (width_in + width_out) * p.element
        return [
            p.scan(
                entries,
                self.STATE_FLOPS * states * p.tokens,
                2 * (states + columns) * p.tokens,
                moved,
            )
        ]

    def problem(self) -> str:
        """Return a sentence about an invalid combination of fields; '' if the fields are valid."""
        if not self.MULTIPLE:
            return ""
        name, unit = self.MULTIPLE
        value, divisor = getattr(self, name), getattr(self, unit)
        return (
            f"{name} {value} is not a multiple of {unit} {divisor}" if value % divisor else ""
        )

    @property
    def label(self) -> str:
        """Return the printed name of an attention or recurrent mixer, such as 'GQA-8'.

        It is '' for an FFN.
        """
        return ""

    def predicting(self) -> "Sublayer":
        """Return this part with the fields that it has in a multi-token-prediction layer.

        By default the part is unchanged.
        """
        return self

    def storing(self, own: bool) -> "Sublayer | None":
        """Return this part for a layer that stores its own cache, or that reads another layer's
        cache.

        A layer without its own cache has no projections of cached rows. The result is None if no
        source describes such a layer.

        Args:
            own: Whether the layer stores its own cache.
        """
        return self if own else None

    def as_mha(self) -> tuple[int, int, int]:
        """Return the dimensions that this attention would have as plain MHA, per layer.

        They are (query heads, elements of a key of one head, elements of a value of one head). The
        result is (0, 0, 0) for a part that is not attention.
        """
        return 0, 0, 0

    @property
    def attends(self) -> bool:
        """Return whether this part is attention over tokens.

        If so, `compare` can replace it by another attention type.
        """
        return self.as_mha()[0] > 0
