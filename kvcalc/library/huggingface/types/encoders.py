"""BERT and similar types, GIT, and decoders of encoder-decoder families, with a causal head.

transformers' AutoModelForCausalLM builds them so. The cache is that of causal decoding. BERT's
attention to an encoder has weights only if the config asks for it, and a seq2seq decoder's always.
"""

from kvcalc.library.huggingface.config import Config, Field, when
from kvcalc.library.huggingface.layer_types import SLIDING, uniform
from kvcalc.library.huggingface.shapes import (
    both,
    cross_attention,
    dense,
    grouped,
    mha,
    projections,
)
from kvcalc.library.huggingface.types.entry import Type

POSITIONS = "max_position_embeddings"
# The head's second bias, which is tied to the first together with the embeddings.
UNTIED_BIAS: dict[str, Field] = {
    "second_head_bias": when("tie_word_embeddings", None, "vocab_size")
}
TRANSFORM = {"head": "hidden_size, hidden_size, hidden_size"}
TRANSFORM_NORM = {"head_norm": "2 * hidden_size"} | UNTIED_BIAS
BERT = Type(
    both(mha(True), cross_attention()),
    dense(gated=False, bias=True),
    norms="3 if add_cross_attention else 2",
    norm="layer",
    model={
        "position_embeddings": POSITIONS,
        "type_embeddings": "type_vocab_size",
        "embedding_norm": True,
        "final_norm": False,
        "lm_head_bias": True,
        "extra": projections(TRANSFORM, TRANSFORM_NORM),
    },
)
FINAL_NORM: dict[str, Field] = {"embedding_norm": False, "final_norm": True}

# Token, type and position tables may be narrower than the residual stream: biases join the two
# projections between.
NARROW = "(embedding_size | hidden_size)"
TYPE_ROWS = "(type_vocab_size | 0)"
IS_NARROW = f"{NARROW} != hidden_size"
NARROW_HEAD = {"head": when(IS_NARROW, None, TRANSFORM["head"])}
NARROW_VECTORS = {
    "embedding_norm": f"2 * {NARROW}",
    "head_norm": f"2 * {NARROW}",
    "projection_biases": when(IS_NARROW, f"hidden_size + {NARROW}"),
}
ELECTRA = BERT.variant(
    model={
        "embedding_size": NARROW,
        "position_embeddings": 0,
        "type_embeddings": 0,
        "embedding_norm": False,
        "tables": {
            "position_embedding": f"max_position_embeddings, {NARROW}",
            "type_embedding": f"{TYPE_ROWS}, {NARROW}",
        },
        "extra": projections(NARROW_HEAD, NARROW_VECTORS),
    }
)


def _roc_matrices(c: Config) -> dict[str, tuple[int, ...]]:
    """Return RoCBert's head, and the projection of its three embeddings."""
    inputs = width = c.size("hidden_size")
    for part in ("pronunciation", "shape"):
        inputs += c.size(f"{part}_embed_dim") if c.flag(f"enable_{part}") else 0
    mapping = {"map_inputs": (inputs, width, width)} if c.flag("concat_input", True) else {}
    return {"head": (width, width, width), **mapping}


def _other_adapters(c: Config) -> int:
    """Return X-MOD's weights of languages other than the text's, which nothing multiplies."""
    width = c.size("hidden_size")
    inner = width // c.size("adapter_reduction_factor")
    num_languages = len(set(map(str, c.items("languages") or [])))
    return max(0, num_languages - 1) * (2 * width * inner + inner + width)


ADAPTER = "hidden_size // adapter_reduction_factor"
HEADS = "decoder_attention_heads"
BART = Type(
    both(mha(True, heads=HEADS), cross_attention(on=True)),
    dense("decoder_ffn_dim", gated=False, bias=True),
    norms=3,
    norm="layer",
    model={
        "position_embeddings": "max_position_embeddings + 2",
        "embedding_norm": True,
        "final_norm": False,
    },
    layers_key="decoder_layers",
)
PEGASUS = BART.variant(model={"position_embeddings": POSITIONS} | FINAL_NORM)
# As many tables and heads as codebooks. The model's own are the first.
CODEBOOKS = "(num_codebooks | 4)"
MUSICGEN = Type(
    both(mha(), cross_attention(False, on=True)),
    dense("ffn_dim", gated=False),
    norms=3,
    norm="layer",
    model={
        "tie_word_embeddings": False,
        "tables": {"codebooks": f"{CODEBOOKS} * (vocab_size + 1) - vocab_size, hidden_size"},
        "extra": projections({"lm_heads": f"hidden_size, ({CODEBOOKS} - 1) * vocab_size"}),
    },
)

TYPES = {
    "bert camembert data2vec-text roberta xlm-roberta": BERT,
    "ernie": BERT.variant(
        model={
            "tables": {
                "task_embedding": when("use_task_id", "task_type_vocab_size, hidden_size")
            }
        }
    ),
    "bert-generation": BERT.variant(
        model={"type_embeddings": 0, "extra": projections(vectors=UNTIED_BIAS)}
    ),
    "big_bird": BERT.variant(
        mixer=both(mha("use_bias", o_bias=True), cross_attention("use_bias", o_bias=True)),
        model={"extra": projections(TRANSFORM | {"pooler": TRANSFORM["head"]}, TRANSFORM_NORM)},
    ),
    "megatron-bert xlm-roberta-xl": BERT.variant(model=FINAL_NORM),
    "roberta-prelayernorm": BERT.variant(model={"final_norm": True}),
    # an adapter for each language; a text uses only one
    "xmod": BERT.variant(
        ffn=both(
            dense(gated=False, bias=True),
            projections(
                {
                    "adapter_down": f"hidden_size, {ADAPTER}, {ADAPTER}",
                    "adapter_up": f"{ADAPTER}, hidden_size, hidden_size",
                },
                {
                    "adapters_of_other_languages": _other_adapters,
                    "adapter_norm": when("adapter_layer_norm", "2 * hidden_size"),
                },
            ),
        ),
        model={"final_norm": "pre_norm"},
    ),
    "roc_bert": BERT.variant(
        model={
            "tables": {
                "pronunciation_embedding": "pronunciation_vocab_size, pronunciation_embed_dim",
                "shape_embedding": "shape_vocab_size, shape_embed_dim",
            },
            "extra": projections(_roc_matrices, TRANSFORM_NORM),
        }
    ),
    "electra": ELECTRA,
    "roformer": ELECTRA.variant(
        model={
            "tables": {
                "type_embedding": f"{TYPE_ROWS}, {NARROW}",
                "position_embedding": "max_position_embeddings, hidden_size // num_attention_heads",
            },
            "extra": projections(NARROW_HEAD, NARROW_VECTORS | UNTIED_BIAS),
        }
    ),
    "rembert": ELECTRA.variant(
        model={
            "embedding_size": "input_embedding_size",
            "head_size": "output_embedding_size",
            "tie_word_embeddings": False,
            "tables": {
                "position_embedding": "max_position_embeddings, input_embedding_size",
                "type_embedding": f"{TYPE_ROWS}, input_embedding_size",
            },
            "extra": projections(
                {
                    "embedding_mapping": when(
                        "input_embedding_size == hidden_size",
                        "hidden_size, hidden_size",
                    )
                },
                {
                    "embedding_norm": "2 * input_embedding_size",
                    "head_norm": "2 * output_embedding_size",
                    "projection_biases": "hidden_size + output_embedding_size",
                },
            ),
        }
    ),
    "git": BERT.variant(  # the language model alone
        mixer=mha(True), norms=2, model={"type_embeddings": 0, "extra": ()}
    ),
    "bart mvp plbart": BART,
    "mbart": BART.variant(model={"final_norm": True}),
    "pegasus blenderbot": PEGASUS,
    "blenderbot-small": BART.variant(model={"position_embeddings": POSITIONS}),
    "marian": PEGASUS.variant(
        model={"final_norm": False, "vocab_size": "decoder_vocab_size | vocab_size"}
    ),
    "bigbird_pegasus": BART.variant(
        mixer=both(mha("use_bias", heads=HEADS), cross_attention("use_bias", on=True)),
        model={"position_embeddings": POSITIONS, "tie_word_embeddings": False},
    ),
    "trocr": BART.variant(
        mixer=both(
            mha(True, heads=HEADS),
            cross_attention(source="cross_attention_hidden_size", on=True),
        ),
        # positions are a table or computed
        model={
            "position_embeddings": (
                "max_position_embeddings + 2 if (use_learned_position_embeddings | True) else 0"
            ),
            "embedding_norm": "layernorm_embedding | True",
        },
    ),
    "whisper": PEGASUS.variant(
        mixer=both(
            mha(True, heads=HEADS, k_bias=False), cross_attention(k_bias=False, on=True)
        ),
        model={"position_embeddings": "max_target_positions"},
    ),
    "musicgen musicgen_decoder": MUSICGEN,
    "musicgen_melody musicgen_melody_decoder": MUSICGEN.variant(mixer=mha(), norms=2),
    "moshi": Type(
        grouped(False),
        dense("ffn_dim // 2"),
        uniform(SLIDING),
        model={"tables": {"padding": "1, hidden_size"}, "tie_word_embeddings": False},
    ),
}
