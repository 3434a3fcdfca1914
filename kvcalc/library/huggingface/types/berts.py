"""BERT and its kin with a causal head, as transformers' AutoModelForCausalLM builds them; and GIT's decoder.

The cache is that of causal decoding. Attention to an encoder has weights only where the config asks for it.
"""

from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import Field, K
from kvcalc.library.huggingface.shapes import both, counted, cross_attention, crossed, dense, mha, projections
from kvcalc.library.huggingface.types.entry import Type

Sizes = dict[str, int]
Matrices = dict[str, tuple[int, ...]]


def _width(c: Config, key: str = "") -> int:
    return c.size(key, c.size("hidden_size")) if key else c.size("hidden_size")


def _untied_bias(c: Config) -> Sizes:
    """The head's second bias, which is tied to the first together with the embeddings."""
    return {} if c.flag("tie_word_embeddings") else {"second_head_bias": c.size("vocab_size")}


def _transform(c: Config) -> Matrices:
    return {"head": (_width(c), _width(c), _width(c))}


def _transform_norm(c: Config) -> Sizes:
    return {"head_norm": 2 * _width(c), **_untied_bias(c)}


BERT = Type(
    both(mha(True), cross_attention()),
    dense(gated=False, bias=True),
    norms=lambda c: 2 + crossed(c),
    norm="layer",
    model={
        "position_embeddings": counted("max_position_embeddings"),
        "type_embeddings": counted("type_vocab_size"),
        "embedding_norm": True,
        "final_norm": False,
        "lm_head_bias": True,
        "extra": projections(_transform, _transform_norm),
    },
)
FINAL_NORM: dict[str, Field] = {"embedding_norm": False, "final_norm": True}


# Token, type and position tables may be narrower than the residual stream: biases join the two projections between.
def _narrow_tables(key: str, *rows: tuple[str, str]) -> Field:
    return lambda c: {name: (c.size(count, least=0), _width(c, key)) for name, count in rows}


def _narrow_head(c: Config) -> Matrices:
    width, inner = _width(c), c.size("embedding_size", _width(c))
    return {"head": (width, width, width)} if inner == width else {}


def _narrow_vectors(c: Config) -> Sizes:
    width, inner = _width(c), c.size("embedding_size", _width(c))
    biases = {"projection_biases": width + inner} if inner != width else {}
    return {"embedding_norm": 2 * inner, "head_norm": 2 * inner, **biases}


ELECTRA = BERT.variant(
    model={
        "embedding_size": counted("embedding_size", "hidden_size"),
        "position_embeddings": 0,
        "type_embeddings": 0,
        "embedding_norm": False,
        "tables": _narrow_tables(
            "embedding_size", ("position_embedding", "max_position_embeddings"), ("type_embedding", "type_vocab_size")
        ),
        "extra": projections(_narrow_head, _narrow_vectors),
    },
)


def _roformer_tables(c: Config) -> dict[str, tuple[int, int]]:
    head = c.size("hidden_size") // c.size("num_attention_heads")
    types = _narrow_tables("embedding_size", ("type_embedding", "type_vocab_size"))(c)
    return {**types, "position_embedding": (c.size("max_position_embeddings"), head)}


def _rembert_matrices(c: Config) -> Matrices:
    same = c.size("input_embedding_size") == _width(c)
    return {"embedding_mapping": (_width(c), _width(c))} if same else {}


def _rembert_vectors(c: Config) -> Sizes:
    narrow, head = c.size("input_embedding_size"), c.size("output_embedding_size")
    return {"embedding_norm": 2 * narrow, "head_norm": 2 * head, "projection_biases": _width(c) + head}


def _roc_tables(c: Config) -> dict[str, tuple[int, int]]:
    return {
        "pronunciation_embedding": (c.size("pronunciation_vocab_size"), c.size("pronunciation_embed_dim")),
        "shape_embedding": (c.size("shape_vocab_size"), c.size("shape_embed_dim")),
    }


def _roc_matrices(c: Config) -> Matrices:
    width = _width(c)
    inputs = width + (c.size("pronunciation_embed_dim") if c.flag("enable_pronunciation") else 0)
    inputs += c.size("shape_embed_dim") if c.flag("enable_shape") else 0
    return {**_transform(c), **({"map_inputs": (inputs, width, width)} if c.flag("concat_input", True) else {})}


def _task_table(c: Config) -> dict[str, tuple[int, int]]:
    return {"task_embedding": (c.size("task_type_vocab_size"), _width(c))} if c.flag("use_task_id") else {}


# X-MOD: an adapter for each language, of which a text meets one; the others are weights that nothing multiplies.
def _adapter(c: Config) -> Matrices:
    width = _width(c)
    inner = width // c.size("adapter_reduction_factor")
    return {"adapter_down": (width, inner, inner), "adapter_up": (inner, width, width)}


def _other_adapters(c: Config) -> Sizes:
    each = sum(inputs * outputs + bias for inputs, outputs, bias in _adapter(c).values())
    others = max(0, len(set(map(str, c.items("languages") or []))) - 1)
    norm = {"adapter_norm": 2 * _width(c)} if c.flag("adapter_layer_norm") else {}
    return {"adapters_of_other_languages": others * each, **norm}


TYPES = {
    "bert": BERT,
    "camembert": BERT,
    "data2vec-text": BERT,
    "roberta": BERT,
    "xlm-roberta": BERT,
    "ernie": BERT.variant(
        model={"tables": _task_table},
    ),
    "bert-generation": BERT.variant(model={"type_embeddings": 0, "extra": projections(vectors=_untied_bias)}),
    "big_bird": BERT.variant(
        mixer=both(mha(K("use_bias"), o_bias=True), cross_attention(K("use_bias"), o_bias=True)),
        model={"extra": projections(lambda c: {**_transform(c), "pooler": (_width(c),) * 3}, _transform_norm)},
    ),
    "megatron-bert": BERT.variant(model=FINAL_NORM),
    "roberta-prelayernorm": BERT.variant(model={"final_norm": True}),
    "xlm-roberta-xl": BERT.variant(model=FINAL_NORM),
    "xmod": BERT.variant(
        ffn=both(dense(gated=False, bias=True), projections(_adapter, _other_adapters)),
        model={"final_norm": lambda c: c.flag("pre_norm")},
    ),
    "roc_bert": BERT.variant(model={"tables": _roc_tables, "extra": projections(_roc_matrices, _transform_norm)}),
    "electra": ELECTRA,
    "roformer": ELECTRA.variant(
        model={
            "tables": _roformer_tables,
            "extra": projections(_narrow_head, lambda c: {**_narrow_vectors(c), **_untied_bias(c)}),
        }
    ),
    "rembert": ELECTRA.variant(
        model={
            "embedding_size": counted("input_embedding_size"),
            "head_size": counted("output_embedding_size"),
            "tie_word_embeddings": False,
            "tables": _narrow_tables(
                "input_embedding_size",
                ("position_embedding", "max_position_embeddings"),
                ("type_embedding", "type_vocab_size"),
            ),
            "extra": projections(_rembert_matrices, _rembert_vectors),
        }
    ),
    "git": Type(  # the language model alone
        mha(True),
        dense(gated=False, bias=True),
        norm="layer",
        model={
            "position_embeddings": counted("max_position_embeddings"),
            "embedding_norm": True,
            "final_norm": False,
            "lm_head_bias": True,
        },
    ),
}
