"""A model: named kinds of layer, their order, and the weights outside the layers.

`parameters` counts only the language model: tied weights once, shared blocks once, no buffers, no
multi-token-prediction layers, no vision or audio tower. `active_parameters` also excludes routed
experts beyond top-k.
"""

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from itertools import cycle
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from kvcalc.errors import UserError, nearest, shown_briefly
from kvcalc.layers.cache import CacheEntries, CacheEntry
from kvcalc.layers.feed_forward import Projections
from kvcalc.layers.part import Count, Number, PresetStruct, Size, Sublayer, Tokens
from kvcalc.layers.parts import AnyPart
from kvcalc.layers.weights import Weight, Weights, matrix, table, vector
from kvcalc.storage.formats import cache_dtypes, canonical
from kvcalc.storage.quantization import Quantization
from kvcalc.units import format_count

Result = TypeVar("Result")
MAX_RESULTS = 1 << 12  # maximum results of one rule


class Vision(PresetStruct, frozen=True):
    """A vision tower of a model, the image encoder in front of the language model.

    The model's `parameters` do not include the tower. The fields are keys of a model preset, which
    is a YAML file.

    Attributes:
        parameters: Parameters of the tower and of its projector into the language model.
        width: Hidden size of the tower.
        mlp: Intermediate size of the tower's FFNs.
        layers: Number of layers of the tower.
        patches: Number of patches into which the largest image is divided.
        tokens: Tokens that the language model receives for the largest image.
        values: Input values of one patch: channels · height · width · frames.
        sharded: Whether engines divide the tower over the tensor-parallel ranks.
        token_side: Side in pixels of the square of an image that becomes one token; 0 if every
            image becomes `tokens` tokens.
        frames: Number of video frames that together become as many tokens as one image.
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
        """Return the number of tokens that the language model receives for one image.

        The result is `tokens`, the number for the largest image, if the size is unknown or if every
        image becomes the same number of tokens.

        Args:
            width: Width of the image in pixels; 0 if unknown.
            height: Height of the image in pixels; 0 if unknown.
        """
        if not (self.token_side and width and height):
            return self.tokens
        return min(self.tokens, -(-width // self.token_side) * -(-height // self.token_side))


MAX_KINDS = 256  # kinds of layer: a searched model has a few dozen
Norm = Literal["rms", "layer", "layer_no_bias", "none"]
CountedWeight = tuple[str, Weight, int]  # full name, weight, number of layers
NORM_VECTORS = {"rms": 1, "layer": 2, "layer_no_bias": 1, "none": 0}


class Layer(PresetStruct, frozen=True, dict=True):
    """One kind of layer of a model, such as a layer with a sliding window and a dense FFN.

    A model lists its kinds of layer once and states their order. A mixer is the attention or the
    recurrence of a layer. The fields are keys of a model preset, which is a YAML file.

    Attributes:
        parts: Mixers, FFNs and other projections of one layer, in order.
        norms: Number of norms in a layer outside its parts; null for one norm per mixer and FFN.
        shares_cache: Whether the layer reads an earlier layer's cache and stores none. The field
            `kv_projection` of its attention states whether it still projects K and V.
        shared: Further parts, whose weights several layers of this kind use together.
        weight_sets: Number of different sets of the weights of `shared`: 2 if half the layers use
            one set and half the other; 0 if this kind uses the weights of another kind.
        unquantized: Names of matrices, such as `q`, that a quantised checkpoint stores in the dtype
            of the model.
    """

    parts: tuple[AnyPart, ...] = ()
    norms: Count | None = None
    shares_cache: bool = False
    shared: tuple[AnyPart, ...] = ()
    weight_sets: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 1
    unquantized: tuple[str, ...] = ()

    @property
    def norm_count(self) -> int:
        """Return the number of norms in one layer, not counting norms of its parts, such as q_norm.

        It is the field `norms`. If `norms` is null, it is one for each attention, recurrence and
        FFN in `parts`.
        """
        if self.norms is not None:
            return self.norms
        return sum(not isinstance(part, Projections) for part in self.parts)

    @property
    def all_parts(self) -> tuple[AnyPart, ...]:
        """Return all parts of a layer, such as attention and FFN: `parts`, followed by `shared`."""
        return self.parts + self.shared

    @cached_property
    def entries(self) -> CacheEntries:
        """Return what one layer reads of one sequence's cache: one entry for each kind of row.

        The layer also stores these rows. Exceptions are all rows if `shares_cache` is set, and
        entries with `is_stored_by_other_layer`.
        """
        return tuple(entry for part in self.all_parts for entry in part.cache())

    @property
    def mixers(self) -> tuple[Sublayer, ...]:
        """Return the attention and recurrent parts of a layer, without its FFNs."""
        return tuple(part for part in self.all_parts if part.label)

    @property
    def label(self) -> str:
        """Return the printed name of a layer's attention or recurrence, such as 'GQA-8'.

        It ends with ` (shared cache)` if the layer reads another layer's cache.
        """
        labels = " + ".join(mixer.label for mixer in self.mixers)
        return f"{labels} (shared cache)" if self.shares_cache else labels


class Mtp(PresetStruct, frozen=True):
    """Multi-token-prediction (MTP) layers of a model, which draft tokens for speculative decoding.

    In addition to its parts, each layer has a projection [2·D, D] and three norms, with D the
    hidden size.

    Attributes:
        kind: Kind of these layers, a key of the model's `kinds`.
        layers: Number of these layers.
    """

    kind: str
    layers: Number = 1


class Source(PresetStruct, frozen=True):
    """A document from which a preset's values were taken.

    Attributes:
        document: Title of the document.
        url: Address of the document.
        read: Day on which the document was read, such as 2026-11-22.
        figures: Names of the values that were taken from the document; '' if they are not listed.
    """

    document: str
    url: str
    read: str
    figures: str = ""


class Model(PresetStruct, frozen=True, dict=True, kw_only=True):
    """A language model: its sizes, layers and formats. The fields are the keys of a model preset.

    A preset is a YAML file. kvcalc also reads models from a config.json or a GGUF file.

    Attributes:
        name: Name of the preset or of the file.
        hidden_size: Width of the residual stream.
        vocab_size: Number of vocabulary entries.
        layers: Number of layers.
        kinds: Name → kind of layer, such as `local` for layers with a sliding window.
        pattern: Names of kinds in the order of the layers. (`5 local`, `full`) is five local layers
            and one full layer, repeated up to `layers`. Empty if there is only one kind.
        family: Name of the model family, such as Llama, for lists of models.
        model_type: Name of the architecture in transformers or in a GGUF file. Behaviour that an
            engine has only for some models depends on it, and never on `name`.
        aliases: Other names of the preset.
        checkpoints: Alias → name on the Hugging Face Hub of another checkpoint whose config gives
            the same sizes, such as a chat model. The alias is then the name of the loaded model.
        huggingface_id: Name on the Hugging Face Hub; null if unknown.
        source: Documents from which the values were taken.
        published: Published parameter counts as text, such as parameters → 8.2B. Tests compare them
            with the computed counts.
        notes: Remarks for the user.
        dtype: dtype of the published weights.
        kv_cache_dtype: KV cache format that the checkpoint declares; null if it declares none.
        quantization: Quantisation schemes of the checkpoint.
        max_context: Maximum tokens of a sequence; null if unknown.
        tie_word_embeddings: Whether the LM head uses the weights of the embedding.
        norm: Type of the norms: `rms` (RMSNorm), `layer` (LayerNorm), `layer_no_bias`, or `none`
            for norms without weights.
        final_norm: Whether a norm follows the last layer.
        embedding_norm: Whether a norm follows the embedding.
        embedding_size: Width of the embedding table if it differs from the hidden size. A
            projection then connects them. null if they are equal.
        head_size: Input width of the LM head; null if it is the width of the embedding table.
        position_embeddings: Rows of a learned position table; 0 for other positions, such as RoPE.
        type_embeddings: Rows of a token-type table; 0 for none.
        lm_head: Whether the model has an LM head.
        lm_head_bias: Whether the LM head has a bias.
        pooling: Whether the model embeds or ranks whole sequences and generates no tokens.
        lent: `embedding`, `lm_head` or both, if they belong to another model: a draft model can use
            those of its target. A forward pass reads them, but they are not parameters of this
            model.
        parameters_exact: False if the computed parameter count may be wrong, because kvcalc has no
            rules for this architecture or the file has unknown keys. Counts are then printed with
            ≈.
        extra: Projections outside the layers, such as an adapter.
        tables: Name → (rows, columns) of further lookup tables.
        rope_factors: Number of factors that scale rotary frequencies (llama3, longrope). They are
            not parameters. A GGUF file stores them as a tensor.
        buffers: Bytes that a quantised file has in addition to its parameters: rotary factors,
            routing biases, cache scales.
        uncounted_bytes: Bytes of the checkpoint's tensors minus the bytes computed from the other
            fields; 0 if its headers were not read.
        other_part_bytes: Bytes that the checkpoint has for vision or audio towers and for
            multi-token-prediction layers.
        mtp: Multi-token-prediction layers; null for none.
        vision: Vision tower; null for none.
        rope_tables: (positions, rotary width) of each distinct table of cosines and sines that an
            engine stores. Empty for one table of max_context positions and the widest head.
        file: The path that the model was read from; "" for a preset.
    """

    name: str
    hidden_size: Size
    vocab_size: Size
    layers: Number
    kinds: Annotated[dict[str, Layer], msgspec.Meta(max_length=MAX_KINDS)]
    pattern: tuple[str, ...] = ()
    family: str = ""
    model_type: str = ""
    aliases: tuple[str, ...] = ()
    checkpoints: dict[str, str] = {}
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
        """Return the parts of one layer of each kind, such as attention and FFN, in one list.

        Each kind occurs once, for any number of layers. The list serves to look up what types of
        part the model has. Parts whose weights several layers share are left out.
        """
        return [part for layer in self.kinds.values() for part in layer.parts]

    @property
    def mixers(self) -> list[Sublayer]:
        """Return the attention or recurrence of one layer of each kind, in one list.

        Each kind occurs once, for any number of layers.
        """
        return [mixer for layer in self.kinds.values() for mixer in layer.mixers]

    @property
    def entries(self) -> list[CacheEntry]:
        """Return what one layer of each kind caches for one sequence, in one list of cache entries.

        An entry describes one kind of row, such as keys. Each kind of layer occurs once.
        """
        return [entry for layer in self.kinds.values() for entry in layer.entries]

    @property
    def roles(self) -> set[str]:
        """Return the kinds of rows that the model caches, such as {"k", "v"}.

        Engines and cache formats support a model by these roles.
        """
        return {entry.role for entry in self.entries}

    def check_generates(self) -> None:
        """Check that the model generates tokens, for commands that need decode steps.

        Raises:
            UserError: The model embeds or ranks whole sequences instead. The message names commands
                that support such models.
        """
        if self.pooling:
            hint = "Use `kvcalc latency`, `kvcalc fit` or `kvcalc roofline --phase prefill`"
            raise UserError(f"{self.name} generates no tokens", hint)

    @cached_property
    def order(self) -> tuple[str, ...]:
        """Return the kind of every layer by name, from the first layer to the last.

        Example: ("local", "local", "full", "local", "local", "full").
        """
        result: list[str] = []
        for count, kind in cycle(self.runs):
            result += [kind] * min(count, self.layers - len(result))
            if len(result) == self.layers:
                break
        return tuple(result)

    @property
    def runs(self) -> list[tuple[int, str]]:
        """Return one repetition of the pattern of layers as (number of layers, kind) pairs.

        The pattern (`5 local`, `full`) becomes [(5, "local"), (1, "full")], for any number of
        layers in the model. Without a pattern, the only kind has the number 1.
        """
        result = []
        for item in self.pattern or tuple(self.kinds):
            count, _, kind = item.rpartition(" ")
            result.append((int(count) if count else 1, kind))
        return result

    @cached_property
    def memo(self) -> dict[object, Any]:
        """Return this model's store of results, which the function `memoized` reads and fills.

        It maps a function to its results, and these map the further arguments to a result.
        """
        return {}

    @cached_property
    def counts(self) -> dict[str, int]:
        """Return the number of layers of each kind, by name of the kind."""
        return {kind: self.order.count(kind) for kind in self.kinds}

    def layer_weights(self, kind: str) -> Weights:
        """Return the weights of one layer of a kind, including its norms.

        They are complete, before they are divided over GPUs. Weights that several layers share are
        not included.

        Args:
            kind: Name of the kind of layer.
        """
        return memoized(self, _layer_weights, kind)

    def shared_weights(self, kind: str) -> Weights:
        """Return the weights that several layers of a kind use together, one set of them.

        They are complete, before they are divided over GPUs. The result is empty for a kind of
        layer without shared weights.

        Args:
            kind: Name of the kind of layer.
        """
        return tuple(
            w for part in self.kinds[kind].shared for w in part.weights(self.hidden_size)
        )

    @cached_property
    def outer_weights(self) -> Weights:
        """Return the weights outside the layers: tables, projections, norms and LM head.

        They are complete, before they are divided over GPUs. An LM head that is tied to the
        embedding is not listed a second time.
        """
        width = self.embedding_size or self.hidden_size
        vocab = self.vocab_size
        result = [table("embedding", vocab, width, shards=vocab)]
        if self.position_embeddings:
            result.append(
                table("position_embedding", self.position_embeddings, self.hidden_size)
            )
        if self.type_embeddings:
            result.append(table("type_embedding", self.type_embeddings, self.hidden_size))
        result += [table(name, rows, columns) for name, (rows, columns) in self.tables.items()]
        norm = NORM_VECTORS[self.norm] * self.hidden_size
        if self.embedding_norm and norm:
            result.append(vector("embedding_norm", norm))
        if self.final_norm and norm:
            result.append(vector("final_norm", norm))
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

    def walk(self) -> tuple[CountedWeight, ...]:
        """Return (full name, weight, number of times it occurs) for every weight of the model.

        The full name is `kind.weight`, such as `dense.q`, and its number is the layers of this
        kind. A weight outside the layers has the number 1. A weight that several layers share has
        the number of its different copies. Weights that belong to another model are left out.
        """
        return memoized(self, _walk)

    @property
    def has_experts(self) -> bool:
        """Return whether some layer has routed experts."""
        return any(weight.expert for _, weight, _ in self.walk())

    @cached_property
    def unquantized(self) -> frozenset[str]:
        """Return the names of matrices that a quantised checkpoint stores in the model's dtype.

        The names are full names `kind.weight`, such as `dense.q`.
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
        """Return the total number of parameters, without a vision tower and MTP layers.

        All experts of all layers count. Weights that belong to another model do not.
        """
        return sum(weight.elements * count for _, weight, count in self.walk())

    @cached_property
    def active_parameters(self) -> int:
        """Return the number of parameters that one token uses.

        It equals `parameters`, except that only the top-k routed experts of each layer count.
        """
        return sum(weight.active_elements * count for _, weight, count in self.walk())

    @cached_property
    def mtp_parameters(self) -> int:
        """Return the number of parameters in multi-token-prediction (MTP) layers; 0 without them.

        The property `parameters` excludes them.
        """
        if not self.mtp:
            return 0
        layer = sum(w.elements for w in self.layer_weights(self.mtp.kind))
        return self.mtp.layers * (
            layer + 2 * self.hidden_size**2 + 3 * NORM_VECTORS[self.norm] * self.hidden_size
        )

    @cached_property
    def attention(self) -> str:
        """Return the printed names of the model's attention or recurrence, such as 'GQA-8'.

        If layers differ, each name has its number of layers: '5× GQA-8 window 512, 1× GQA-8'.
        """
        labels: Counter[str] = Counter()
        for kind, count in self.counts.items():
            label = self.kinds[kind].label
            if label and count:
                labels[label] += count
        if len(labels) == 1:
            return next(iter(labels))
        return ", ".join(f"{count}× {label}" for label, count in labels.items())

    def problem(self) -> tuple[str, str]:
        """Return the first field that is invalid or contradicts others, as (key, problem).

        Example: ("pattern", "names an unknown kind 'lokal' (kinds: local, full)"). The result is
        ('', '') if all fields are valid.
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
                problem = f"names an unknown kind {kind!r} (kinds: {', '.join(self.kinds)})"
                return "pattern", problem
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
                text = (
                    f"{kind!r} has a dot, which separates a kind from the names of its weights"
                )
                return "kinds", text
            for part in layer.all_parts:
                if text := part.problem():
                    return f"kinds.{kind}", text
        if self.mtp and self.mtp.kind not in self.kinds:
            return "mtp.kind", f"names an unknown kind {self.mtp.kind!r}"
        return "", ""

    def checked(self, place: str) -> "Model":
        """Return the model, or raise UserError if its fields contradict each other.

        Args:
            place: File or name for the error message.
        """
        key, problem = self.problem()
        if problem:
            raise UserError(f"{key}: {problem}", where=place)
        return self


# Entries by which the vocabularies of a draft and its target may differ (llama.cpp,
# common/speculative.cpp: SPEC_VOCAB_MAX_SIZE_DIFFERENCE).
MAX_PADDING = 128


def memoized(model: Model, rule: Callable[..., Result], *key: Any) -> Result:
    """Return `rule(model, *key)`, computed once for each model, rule and key.

    Example: `memoized(model, loaded_bytes, formats, ranks, stage)` calls `loaded_bytes(model,
    formats, ranks, stage)` the first time, and later returns the stored result. If a rule has 4,096
    results, all its results are discarded before the next is stored.

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


def _layer_weights(model: Model, kind: str) -> Weights:
    layer = model.kinds[kind]
    norm = layer.norm_count * NORM_VECTORS[model.norm] * model.hidden_size
    weights = [w for part in layer.parts for w in part.weights(model.hidden_size)]
    return (vector("norms", norm), *weights) if norm else tuple(weights)


def _walk(model: Model) -> tuple[CountedWeight, ...]:
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
    """Check that the vocabulary sizes of a model and its draft model are close enough.

    A draft model for speculative decoding must propose tokens of its target. Only sizes are
    compared, not the entries. A draft model that uses its target's embedding or LM head is not
    checked, because it maps its own vocabulary.

    Args:
        target: The model that verifies tokens.
        draft: The model that drafts tokens for the target.
        max_padding: Largest allowed difference of the two sizes, in entries. The default, 128, is
            the limit of llama.cpp.
        engine: Name of the engine with this limit, for the error message; '' for none.

    Raises:
        UserError: The sizes differ by more than `max_padding`.
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
