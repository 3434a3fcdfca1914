"""A model: named kinds of layer, their order, and the weights outside the layers.

`parameters` counts only the language model: tied weights once, shared blocks once, no buffers, no
multi-token-prediction layers, no vision or audio tower. `active_parameters` also excludes routed
experts beyond top-k.
"""

from collections.abc import Callable
from functools import cached_property
from itertools import cycle
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from kvcalc.errors import UserError, nearest, shown_briefly
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.feed_forward import Projections
from kvcalc.layers.part import Count, Size, Sublayer, Tokens
from kvcalc.layers.parts import AnyPart
from kvcalc.layers.weights import Weight, matrix, table, vector
from kvcalc.storage.formats import cache_dtypes, canonical
from kvcalc.storage.quantization import Quantization
from kvcalc.units import format_count

Result = TypeVar("Result")
MAX_RESULTS = 1 << 12  # maximum results of one rule


class Vision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A vision tower of a model. The model's `parameters` do not include the tower.

    Attributes:
        parameters: Parameters of the tower and of its projector into the language model.
        width: Hidden size of the tower.
        mlp: Intermediate size of the tower's FFNs.
        layers: Number of layers of the tower.
        patches: Number of patches into which the largest image is divided.
        tokens: Tokens that the language model receives for the largest image.
        values: Input values of one patch: channels · height · width · frames.
        sharded: Whether engines divide the tower over tp.
        token_side: Side in pixels of the square of an image that becomes one token; 0 if every
            image takes `tokens`.
        frames: Number of video frames that together take the tokens of one image.
    """

    parameters: Annotated[int, msgspec.Meta(ge=1, le=10**12)]
    width: Size
    mlp: Size
    layers: Size
    patches: Size
    tokens: Size
    values: Size
    sharded: bool = True
    token_side: Count = 0
    frames: Size = 1

    def image_tokens(self, width: int = 0, height: int = 0) -> int:
        """Return the tokens that the language model receives for one image.

        The result is the model's maximum if the size is unknown or every image takes the same
        tokens.

        Args:
            width: Width in pixels; 0 for the largest image.
            height: Height in pixels; 0 for the largest image.
        """
        if not (self.token_side and width and height):
            return self.tokens
        return min(self.tokens, -(-width // self.token_side) * -(-height // self.token_side))


Layers = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
MAX_KINDS = 256  # kinds of layer: a searched model has a few dozen
Norm = Literal["rms", "layer", "layer_no_bias", "none"]
NORM_VECTORS = {"rms": 1, "layer": 2, "layer_no_bias": 1, "none": 0}


class Layer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """One kind of layer: its parts in order, and its sharing with other layers.

    A part is an attention or recurrent mixer, or an FFN.

    Attributes:
        parts: Parts whose weights belong to one layer.
        norms: Number of norms in a layer outside its parts; null for one norm per mixer and FFN.
        shares_cache: Whether the layer reads an earlier layer's cache and stores none. The field
            `kv_projection` of its attention states whether it still projects K and V.
        shared: Parts whose weights several layers of this kind use together.
        weight_sets: Number of different sets of the shared weights; 0 if this kind uses the weights
            of another kind.
        unquantized: Names of matrices that a quantised checkpoint stores in the dtype of the model.
    """

    parts: tuple[AnyPart, ...] = ()
    norms: Count | None = None
    shares_cache: bool = False
    shared: tuple[AnyPart, ...] = ()
    weight_sets: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 1
    unquantized: tuple[str, ...] = ()

    @property
    def norm_count(self) -> int:
        """Return the number of norms in one layer, without norms inside its parts."""
        if self.norms is not None:
            return self.norms
        return sum(not isinstance(part, Projections) for part in self.parts)

    @property
    def all_parts(self) -> tuple[AnyPart, ...]:
        """Return all mixers and FFNs of a layer: `parts`, followed by `shared`."""
        return self.parts + self.shared

    @cached_property
    def entries(self) -> tuple[CacheEntry, ...]:
        """Return the cache entries that one layer reads for one sequence.

        The layer also stores them, unless `shares_cache` is set.
        """
        return tuple(entry for part in self.all_parts for entry in part.cache())

    @property
    def mixers(self) -> tuple[Sublayer, ...]:
        return tuple(part for part in self.all_parts if part.label)

    @property
    def label(self) -> str:
        labels = " + ".join(mixer.label for mixer in self.mixers)
        return f"{labels} (shared cache)" if self.shares_cache else labels


class Mtp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Multi-token-prediction layers of a model.

    Each layer also has a projection [2·D, D] and three norms, with D the hidden size.

    Attributes:
        kind: Kind of these layers, a key of the model's `kinds`.
        layers: Number of these layers.
    """

    kind: str
    layers: Layers = 1


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A document from which a preset's values were taken.

    Attributes:
        document: Title of the document.
        url: Address of the document.
        read: Day on which the document was read, such as 2026-11-22.
        figures: Names of the values that the document states; '' for no list.
    """

    document: str
    url: str
    read: str
    figures: str = ""


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True, kw_only=True):
    """A language model. The fields are the keys of a preset.

    Attributes:
        name: Name of the preset or of the file.
        hidden_size: Width of the residual stream.
        vocab_size: Number of vocabulary entries.
        layers: Number of layers.
        kinds: Name → kind of layer.
        pattern: Names of kinds in order, `5 local` for five in a row, repeated up to `layers`.
        family: Name of the model family, such as Llama, for lists.
        model_type: Architecture in transformers or in a GGUF file. Rules of engines depend on it,
            never on `name`.
        aliases: Other names of the preset.
        huggingface_id: Name on the Hugging Face Hub; null if unknown.
        source: Documents from which the values were taken.
        published: Published parameter counts, which tests compare with the computed counts.
        notes: Remarks for the user.
        dtype: dtype of the published weights.
        kv_cache_dtype: Format that the checkpoint declares for its KV cache; null for none.
        quantization: Quantisation schemes of the checkpoint.
        max_context: Maximum tokens of a sequence; null if unknown.
        tie_word_embeddings: Whether the LM head uses the weights of the embedding.
        norm: Type of the norms: RMSNorm, LayerNorm, LayerNorm without a bias, or none with weights.
        final_norm: Whether a norm follows the last layer.
        embedding_norm: Whether a norm follows the embedding.
        embedding_size: Width of the token table if it differs from the hidden size. A projection
            then connects them.
        head_size: Input width of the LM head if it differs from the token table.
        position_embeddings: Rows of a learned position table; 0 for other positions.
        type_embeddings: Rows of a token-type table; 0 for none.
        lm_head: Whether the model has an LM head.
        lm_head_bias: Whether the LM head has a bias.
        pooling: Whether the model embeds or ranks whole sequences and generates no tokens.
        lent: `embedding` or `lm_head` if they belong to another model (a draft uses its target's).
            A pass reads them, but they are not parameters of this model.
        parameters_exact: False if the file was read by general rules, or has unknown keys that may
            add weights.
        extra: Projections outside the layers.
        tables: Name → (rows, columns) of further lookup tables.
        rope_factors: Number of factors that scale rotary frequencies (llama3, longrope). They are
            not parameters. A GGUF file stores them as a tensor.
        buffers: Bytes of a quantised file in addition to its parameters: factors, routing biases,
            cache scales.
        uncounted_bytes: Bytes of the checkpoint's tensors minus the bytes computed from the other
            fields; 0 if its headers were not read.
        other_part_bytes: Bytes of the checkpoint's towers and layers for multi-token prediction.
        mtp: Multi-token-prediction layers; null for none.
        vision: Vision tower; null for none.
        rope_tables: Positions and rotary width of each distinct rotary table of an engine, if they
            differ from max_context and the widest head.
        file: The path that the model was read from; "" for a preset.
    """

    name: str
    hidden_size: Size
    vocab_size: Size
    layers: Layers
    kinds: Annotated[dict[str, Layer], msgspec.Meta(max_length=MAX_KINDS)]
    pattern: tuple[str, ...] = ()
    family: str = ""
    model_type: str = ""
    aliases: tuple[str, ...] = ()
    huggingface_id: str | None = None
    source: tuple[Source, ...] = ()
    published: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    kv_cache_dtype: str | None = None
    quantization: tuple[Quantization, ...] = ()
    max_context: Tokens | None = None
    tie_word_embeddings: bool = False
    norm: Norm = "rms"
    final_norm: bool = True
    embedding_norm: bool = False
    embedding_size: Size | None = None
    head_size: Size | None = None
    position_embeddings: Count = 0
    type_embeddings: Count = 0
    lm_head: bool = True
    lm_head_bias: bool = False
    pooling: bool = False
    lent: tuple[Literal["embedding", "lm_head"], ...] = ()
    parameters_exact: bool = True
    extra: tuple[Projections, ...] = ()
    tables: dict[str, tuple[Count, Count]] = {}
    rope_factors: Count = 0
    buffers: Count = 0
    uncounted_bytes: int = 0
    other_part_bytes: Count = 0
    mtp: Mtp | None = None
    vision: Vision | None = None
    rope_tables: tuple[tuple[Count, Count], ...] = ()
    file: str = ""

    @property
    def parts(self) -> list[AnyPart]:
        """Return the mixers and FFNs of each kind of layer, in one list.

        Each kind occurs once, for any number of layers. Parts whose weights several layers share
        are left out.
        """
        return [part for layer in self.kinds.values() for part in layer.parts]

    @property
    def mixers(self) -> list[Sublayer]:
        """Return the attention and recurrent mixers of each kind of layer, in one list.

        Each kind occurs once, for any number of layers.
        """
        return [mixer for layer in self.kinds.values() for mixer in layer.mixers]

    @property
    def entries(self) -> list[CacheEntry]:
        """Return the cache entries of one layer of each kind, in one list."""
        return [entry for layer in self.kinds.values() for entry in layer.entries]

    @property
    def roles(self) -> set[str]:
        """Return the roles of all cache entries, such as `k`, `v` or `latent`."""
        return {entry.role for entry in self.entries}

    def check_generates(self) -> None:
        """Raise UserError if the model embeds or ranks whole sequences and generates no tokens."""
        if self.pooling:
            hint = "Use `kvcalc latency`, `kvcalc fit` or `kvcalc roofline --phase prefill`"
            raise UserError(f"{self.name} generates no tokens", hint)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Return the name of the kind of every layer, from the first layer to the last."""
        result: list[str] = []
        for count, kind in cycle(self.runs):
            result += [kind] * min(count, self.layers - len(result))
            if len(result) == self.layers:
                break
        return tuple(result)

    @property
    def runs(self) -> list[tuple[int, str]]:
        """Return the pattern of layers as (count, kind) pairs.

        `5 local` becomes (5, "local"). Without a pattern, the only kind has the count 1.
        """
        result = []
        for item in self.pattern or tuple(self.kinds):
            count, _, kind = item.rpartition(" ")
            result.append((int(count) if count else 1, kind))
        return result

    @cached_property
    def memo(self) -> dict[object, Any]:
        """Return this model's store of memoized results: rule → key → result.

        `memoized` reads and fills the store.
        """
        return {}

    @cached_property
    def counts(self) -> dict[str, int]:
        """Return the number of layers of each kind."""
        return {kind: self.order.count(kind) for kind in self.kinds}

    def layer_weights(self, kind: str) -> tuple[Weight, ...]:
        """Return the weights of one layer of a kind, with its norms, before they are divided over
        ranks.

        Weights that layers share are not included.

        Args:
            kind: Name of the kind of layer.
        """
        return memoized(self, _layer_weights, kind)

    def shared_weights(self, kind: str) -> tuple[Weight, ...]:
        """Return one set of the weights that layers of a kind share.

        Args:
            kind: Name of the kind of layer.
        """
        return tuple(
            w for part in self.kinds[kind].shared for w in part.weights(self.hidden_size)
        )

    @cached_property
    def outer_weights(self) -> tuple[Weight, ...]:
        """Return the weights outside the layers: tables, projections, norms and LM head.

        They are not divided over ranks. An LM head that is tied to the embedding has no matrix of
        its own.
        """
        width, vocab = self.embedding_size or self.hidden_size, self.vocab_size
        result = [table("embedding", vocab, width, shards=vocab)]
        if self.position_embeddings:
            result.append(
                table("position_embedding", self.position_embeddings, self.hidden_size)
            )
        if self.type_embeddings:
            result.append(table("type_embedding", self.type_embeddings, self.hidden_size))
        result += [table(name, rows, columns) for name, (rows, columns) in self.tables.items()]
        norm = NORM_VECTORS[self.norm] * self.hidden_size
        result += [vector("embedding_norm", norm)] if self.embedding_norm and norm else []
        result += [vector("final_norm", norm)] if self.final_norm and norm else []
        head = self.head_size or width
        if width != self.hidden_size:
            result.append(matrix("embedding_up", width, self.hidden_size))
        if head != self.hidden_size:
            result.append(matrix("embedding_down", self.hidden_size, head))
        result += [w for part in self.extra for w in part.weights(self.hidden_size)]
        if self.lm_head and not self.tie_word_embeddings:
            result.append(matrix("lm_head", head, vocab, self.lm_head_bias, shards=vocab))
        elif self.lm_head_bias:
            result.append(vector("lm_head_bias", vocab, shards=vocab))
        return tuple(result)

    def walk(self) -> tuple[tuple[str, Weight, int], ...]:
        """Return (full name, weight, number of copies in the model) for every weight.

        The full name is `kind.weight`, such as `dense.q`. The number is the number of layers of the
        kind, or 1 outside the layers. Weights that layers share count once per set. Weights that
        belong to another model are left out.
        """
        return memoized(self, _walk)

    @property
    def has_experts(self) -> bool:
        """Return whether some layer has routed experts."""
        return any(weight.expert for _, weight, _ in self.walk())

    @cached_property
    def unquantized(self) -> frozenset[str]:
        """Return the matrices that a quantised checkpoint stores in the model's dtype.

        The result has full names `kind.weight`, such as `dense.q`.
        """
        return frozenset(
            f"{kind}.{name}" for kind, layer in self.kinds.items() for name in layer.unquantized
        )

    def __str__(self) -> str:
        mark = "" if self.parameters_exact else "≈ "
        parameters = f"{mark}{format_count(self.parameters)} parameters"
        limit = f", {self.max_context:,} tokens at most" if self.max_context else ""
        return f"{self.name}: {parameters}, {self.layers} layers, {self.attention}{limit}"

    _repr_pretty_ = shown_briefly

    @cached_property
    def parameters(self) -> int:
        return sum(weight.elements * count for _, weight, count in self.walk())

    @cached_property
    def active_parameters(self) -> int:
        return sum(weight.active_elements * count for _, weight, count in self.walk())

    @cached_property
    def mtp_parameters(self) -> int:
        """Return the number of parameters in the multi-token-prediction layers.

        `parameters` excludes them.
        """
        if not self.mtp:
            return 0
        layer = sum(w.elements for w in self.layer_weights(self.mtp.kind))
        return self.mtp.layers * (
            layer + 2 * self.hidden_size**2 + 3 * NORM_VECTORS[self.norm] * self.hidden_size
        )

    @cached_property
    def attention(self) -> str:
        """Return the names of the model's mixers, such as 'GQA-8'.

        With several mixers, each name has its number of layers: '5× GQA-8 window 512, 1× GQA-8'.
        """
        labels: dict[str, int] = {}
        for kind, count in self.counts.items():
            label = self.kinds[kind].label
            if label and count:
                labels[label] = labels.get(label, 0) + count
        if len(labels) == 1:
            return next(iter(labels))
        return ", ".join(f"{count}× {label}" for label, count in labels.items())

    def problem(self) -> tuple[str, str]:
        """Return the first field that contradicts others, as (key, problem).

        The result is ('', '') if all fields agree.
        """
        if not self.name.isprintable() or not self.name:
            return "name", "is empty, or has characters that a terminal does not print"
        if not self.kinds:
            return "kinds", "a model needs at least one kind of layer"
        if len(self.kinds) > 1 and not self.pattern:
            return "pattern", "is missing, and there is more than one kind of layer to order"
        for item in self.pattern:
            count, _, kind = item.rpartition(" ")
            if kind not in self.kinds:
                names = ", ".join(self.kinds)
                return "pattern", f"names an unknown kind {kind!r} (kinds: {names})"
            is_number = count.isascii() and count.isdigit() and 0 < int(count[:9]) <= 100_000
            if count and not is_number:
                return "pattern", f"item {item!r} should read like '5 {kind}'"
        dtypes = [*cache_dtypes(), "auto"]
        cache_dtype = canonical(self.kv_cache_dtype or "auto")
        if cache_dtype not in dtypes:
            text = f"unknown KV-cache dtype {self.kv_cache_dtype!r}. "
            return "kv_cache_dtype", (text + nearest(cache_dtype, dtypes)).rstrip()
        for kind, layer in self.kinds.items():
            if not kind.isprintable():
                return "kinds", f"{kind!r} has characters that a terminal does not print"
            if "." in kind:
                return (
                    "kinds",
                    f"{kind!r} has a dot, which separates a kind from the names of its weights",
                )
            for part in layer.all_parts:
                if text := part.problem():
                    return f"kinds.{kind}", text
        if self.mtp and self.mtp.kind not in self.kinds:
            return "mtp.kind", f"names an unknown kind {self.mtp.kind!r}"
        return "", ""


# Entries by which the vocabularies of a draft and its target may differ (llama.cpp,
# common/speculative.cpp: SPEC_VOCAB_MAX_SIZE_DIFFERENCE).
MAX_PADDING = 128


def memoized(model: Model, rule: Callable[..., Result], *key: Any) -> Result:
    """Return `rule(model, *key)`, computed once for each model, rule and key.

    Example: `memoized(model, loaded_bytes, formats, ranks, stage)`. If a rule reaches the maximum
    number of stored results, they are all discarded.

    Args:
        model: Model that stores the results.
        rule: Function of the model and of the values of `key`.
        key: Further arguments of `rule`, which must be hashable.
    """
    results: dict[tuple[Any, ...], Result] = model.memo.setdefault(rule, {})
    if key not in results:
        if len(results) == MAX_RESULTS:
            results.clear()
        results[key] = rule(model, *key)
    return results[key]


def _layer_weights(model: Model, kind: str) -> tuple[Weight, ...]:
    layer = model.kinds[kind]
    norm = layer.norm_count * NORM_VECTORS[model.norm] * model.hidden_size
    weights = [w for part in layer.parts for w in part.weights(model.hidden_size)]
    return (vector("norms", norm), *weights) if norm else tuple(weights)


def _walk(model: Model) -> tuple[tuple[str, Weight, int], ...]:
    rows = [(w.name, w, 1) for w in model.outer_weights if w.name not in model.lent]
    for kind, count in model.counts.items():
        if not count:
            continue
        sets = min(model.kinds[kind].weight_sets, count)
        rows += [(f"{kind}.{w.name}", w, count) for w in model.layer_weights(kind)]
        rows += [(f"{kind}.shared.{w.name}", w, sets) for w in model.shared_weights(kind)]
    return tuple(rows)


def check_vocabulary(
    target: Model, draft: Model, max_padding: int = MAX_PADDING, engine: str = ""
) -> None:
    """Raise UserError if the vocabulary sizes of a model and its draft differ too much.

    The vocabulary entries themselves are not compared. A draft that uses its target's embedding is
    not checked, because it maps its own vocabulary.

    Args:
        target: The model.
        draft: The model that drafts tokens for the target.
        max_padding: Largest allowed difference of the two sizes, in entries.
        engine: Name of the engine with this limit, for the error message.
    """
    if draft.lent or abs(target.vocab_size - draft.vocab_size) <= max_padding:
        return
    reason = "a draft proposes the model's own tokens"
    if engine:
        reason = f"{engine} drafts only with the model's own vocabulary"
    raise UserError(
        f"{reason}, and {draft.name}'s has {draft.vocab_size:,} entries, "
        f"{target.name}'s {target.vocab_size:,}",
        "Draft with a smaller model of its family",
    )
