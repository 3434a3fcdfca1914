"""Parts: frozen specs whose fields are the keys of a preset.

A part is one mixer (attention or recurrent) or one FFN. A new variant is one new file with fields,
`weights`, and for a mixer `cache` and `label`.
"""

from functools import lru_cache
from math import prod
from typing import Annotated, ClassVar, Literal

import msgspec

from kvcalc.layers.cache import CacheEntries, Span
from kvcalc.layers.cost import Operator, Role
from kvcalc.layers.passes import Pass
from kvcalc.layers.weights import WeightKind, Weights, WeightsByName, matrix, table, vector

Size = Annotated[int, msgspec.Meta(ge=1, le=10**8)]  # widths, heads, experts
Count = Annotated[int, msgspec.Meta(ge=0, le=10**8)]  # the same where 0 means none
Number = Annotated[int, msgspec.Meta(ge=1, le=100_000)]  # layers, GPUs, multiprocessors
Tokens = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
MhaSizes = tuple[int, int, int]  # heads, and widths of a key and of a value
StateDtype = Literal["fp32", "bf16", "fp16"]


def number_of(size: str, letters: dict[str, int]) -> int:
    """Return the value of a size formula: a sum of products of letters and whole numbers.

    The text attributes WEIGHTS and STATES of layer parts contain such formulas. Example: `2·H·d +
    H` is 2,080 for H = 32 and d = 32.

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
def _listed_weights(part: "Sublayer", hidden_size: int) -> Weights:
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


class PresetStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A mapping in a preset file. Unknown keys are errors."""


class Sublayer(PresetStruct, frozen=True, tag_field="type"):
    """One part of a layer: attention, a recurrence such as Mamba, an FFN, or other projections.

    Each subclass is one type of part, such as `Grouped` for GQA. Its fields are the keys of the
    part in a model preset, which is a YAML file. The preset's key `type` selects the subclass.

    Attributes:
        STATE_FLOPS: FLOPs that the scan of a recurrent mixer needs per state element and token.
        ROLE: Group of the part's matrix products, such as FFN, by which reports select operators.
        LETTERS: The letters that WEIGHTS uses and the fields that they stand for, such as
            `H=num_attention_heads d=head_dim`. D is always the hidden size.
        WEIGHTS: A line per weight. `o: H·d × D / H, bias o_bias` is a matrix [H·d, D] that tensor
            parallelism divides by heads, with a bias if the field `o_bias` is true. `norm: d` is a
            vector. Further words: `if qk_norm=full and not bias` is a condition, `copies E` a
            number of equal matrices, `active k` marks experts of which a token uses k, `table` a
            lookup table. A divided matrix with D outputs, or with `rows`, is row-parallel.
        MULTIPLE: Names of two fields. The first must be a multiple of the second. Empty without
            such a rule.
    """

    STATE_FLOPS: ClassVar[int] = 4
    ROLE: ClassVar[Role] = Role.PROJECTION
    LETTERS: ClassVar[str] = ""
    WEIGHTS: ClassVar[str] = ""
    MULTIPLE: ClassVar[tuple[str, ...]] = ()

    def weights(self, hidden_size: int) -> Weights:
        """Return every weight of this part in one layer, complete, not divided over GPUs.

        Args:
            hidden_size: Hidden size of the model, the letter D in WEIGHTS.
        """
        return _listed_weights(self, hidden_size)

    def local_weights(self, p: Pass) -> WeightsByName:
        """Return the share of each weight that one GPU stores for one layer, by weight name.

        It is the largest share of any GPU. `operators` computes the cost of matrix products from
        it.

        Args:
            p: The forward pass, which gives the hidden size and the parallel ranks.
        """
        return {w.name: w.local(p.ranks) for w in self.weights(p.width)}

    def lines(self) -> list[tuple[str, str, dict[str, str]]]:
        """Return the lines of WEIGHTS that apply to this part, as (weight name, size, options).

        A line applies if its `if` condition is true for the fields. `o: H·d × D / H, bias o_bias`
        gives ("o", "H·d × D / H", {"bias": "o_bias"}): the text of the size, and each further word
        (also `if`) with its argument.
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
        """Return the sizes (inputs, outputs) of each matrix as formulas, by matrix name.

        Example: {"q": ("D", "H·d")}. `--explain` prints them as dimensions of matrix products. D is
        the hidden size; the class attribute LETTERS explains the other letters.
        """
        sizes = {name: size.partition(" / ")[0].split(" × ") for name, size, _ in self.lines()}
        return {name: (size[0], size[1]) for name, size in sizes.items() if len(size) == 2}

    def holds(self, condition: str) -> bool:
        """Return whether a condition on the fields of this part is true.

        The `if` conditions in WEIGHTS decide which weights the part has.

        Args:
            condition: `bias` (true if this field is set), `not bias` (true if it is not), or
                `output_gate=full` (true if the field has this value).
        """
        field, _, value = condition.removeprefix("not ").partition("=")
        actual = getattr(self, field)
        holds = str(actual) == value if value else bool(actual)
        return holds != condition.startswith("not ")

    def letters(self) -> dict[str, int]:
        """Return the value of each letter in LETTERS, such as {"H": 32, "d": 128}.

        D, the hidden size, is not included. A field that is None gives 0.
        """
        pairs = (pair.split("=") for pair in self.LETTERS.split())
        return {letter: getattr(self, field) or 0 for letter, field in pairs}

    def cache(self) -> CacheEntries:
        """Return what one layer caches for one sequence: one `CacheEntry` for each kind of row.

        A kind of row is, for example, keys. The result is empty for an FFN.
        """
        return ()

    def eviction_scores(self) -> CacheEntries:
        """Return what one layer stores per sequence to select tokens to evict: entries for scores.

        They are stored in addition to the entries of `cache()`. The result is empty if the part
        never evicts tokens from its cache.
        """
        return ()

    @property
    def window_tokens(self) -> int:
        """Return the size of the sliding window in tokens, including the query's own token.

        It is 0 without a window, or if a query also sees compressed rows of older tokens.
        """
        return 0

    @property
    def pooled_tokens(self) -> int:
        """Return the number of tokens that share one pooled index key; 0 if each token has its own.

        Index keys are the small keys that the indexer of sparse attention scores. If the result is
        not 0, an engine may cache one pooled key for this many tokens.
        """
        return 0

    def operators(self, p: Pass) -> list[Operator]:
        """Return this part's operators in a forward pass, with costs of one layer on one GPU.

        Input and output are x [tokens, hidden_size]. This default is for recurrent mixers and plain
        projections. In order: the projections that read x as one matrix product, each other
        projection, a scan over the state, the projections that write x, and their all-reduce. The
        scan counts STATE_FLOPS per state element and token as matrix FLOPs. Decay and convolution
        count as vector FLOPs. Convolution states have no matrix FLOPs. A part that caches rows per
        token, such as attention, overrides this method.

        Args:
            p: The forward pass: sequences, storage formats, parallel ranks, number of such layers.
        """
        results = [w for w in self.local_weights(p).values() if w.kind is WeightKind.MATRIX]
        first = [w for w in results if w.inputs == p.width and w.copies == 1 and not w.rows_in]
        last = [w for w in results if w.rows_in and w.outputs == p.width]
        between = [w for w in results if w not in first and w not in last]
        return [
            *([p.gemm("in_proj", *first)] if first else []),
            *(p.gemm(w.name, w) for w in between),
            *self._scan(p, sum(w.outputs for w in first), sum(w.inputs for w in last)),
            *(p.gemm(w.name if len(last) > 1 else "out_proj", w) for w in last),
            *(p.all_reduce(p.width) if last else []),
        ]

    def _extra(self, p: Pass, w: WeightsByName) -> list[Operator]:
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
        states = columns = 0
        for e in entries:
            width = p.heads(e.heads) * e.width
            if e.role == "conv_state":
                columns += width * (e.limit + 1)
            else:
                states += width * e.limit
        cost = p.cache(entries)._replace(
            flops=self.STATE_FLOPS * states * p.tokens,
            vector_flops=2 * (states + columns) * p.tokens,
            activation_bytes=p.tokens * (width_in + width_out) * p.element,
        )
        return [p.operator("scan", "scan", cost, dtype=p.formats.dtype, role=Role.CORE)]

    def problem(self) -> str:
        """Return a sentence about an invalid combination of fields; '' if the fields are valid.

        Example: 'num_attention_heads 10 is not a multiple of num_key_value_heads 4'.
        """
        if not self.MULTIPLE:
            return ""
        name, unit = self.MULTIPLE
        value = getattr(self, name)
        divisor = getattr(self, unit)
        if value % divisor:
            return f"{name} {value} is not a multiple of {unit} {divisor}"
        return ""

    @property
    def label(self) -> str:
        """Return the short printed name of an attention or recurrent mixer, such as 'GQA-8'.

        The 8 is the number of KV heads. The result is '' for an FFN.
        """
        return ""

    def predicting(self) -> "Sublayer":
        """Return the part that a multi-token-prediction (MTP) layer has in place of this one.

        By default it is this part itself. A type of attention that caches less in MTP layers
        overrides this method.
        """
        return self

    def storing(self, own: bool) -> "Sublayer | None":
        """Return this part for a layer that has its own cache, or that reads another layer's cache.

        The comparison of attention variants uses it to let several layers share one cache. A layer
        that reads another layer's cache has no projections of keys, values or latents. The result
        is None if kvcalc knows no such layer of this type; the comparison then reports an error.

        Args:
            own: True for a layer with its own cache, False for one that reads another's.
        """
        return self if own else None

    def as_mha(self) -> MhaSizes:
        """Return the dimensions of the plain multi-head attention (MHA) in place of this part.

        They are (query heads, elements of a key of one head, elements of a value of one head), for
        comparisons of cache size with MHA. The result is (0, 0, 0) for a part that is not
        attention.
        """
        return 0, 0, 0

    @property
    def attends(self) -> bool:
        """Return whether this part is attention over tokens, not a recurrent mixer or an FFN.

        If so, the command `kvcalc compare` can replace it by another attention type.
        """
        return self.as_mha()[0] > 0
