"""Causal heads on the decoders of encoder-decoder families, as transformers' AutoModelForCausalLM builds them.

Such a decoder has its attention to the encoder even then; the cache is that of its own attention. And the decoders of
speech and music models.
"""

from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import Field, K, when
from kvcalc.library.huggingface.patterns import SLIDING, uniform
from kvcalc.library.huggingface.shapes import both, counted, cross_attention, dense, grouped, mha, projections
from kvcalc.library.huggingface.types.entry import Type

NO_EMBEDDING_NORM: dict[str, Field] = {"embedding_norm": False, "final_norm": True}
Tables = dict[str, tuple[int, int]]
POSITIONS = counted("max_position_embeddings")
BART = Type(
    both(mha(True, heads="decoder_attention_heads"), cross_attention(on=True)),
    dense(K("decoder_ffn_dim"), gated=False, bias=True),
    norms=3,
    norm="layer",
    model={
        "position_embeddings": counted("max_position_embeddings", offset=2),
        "embedding_norm": True,
        "final_norm": False,
    },
    layers_key="decoder_layers",
)
PEGASUS = BART.variant(model={"position_embeddings": POSITIONS, **NO_EMBEDDING_NORM})


# MusicGen: as many tables and heads as codebooks; the model's own are the first.
def _more_tables(c: Config) -> Tables:
    vocab = c.size("vocab_size")
    return {"codebooks": (c.size("num_codebooks", 4) * (vocab + 1) - vocab, c.size("hidden_size"))}


def _more_heads(c: Config) -> dict[str, tuple[int, ...]]:
    return {"lm_heads": (c.size("hidden_size"), (c.size("num_codebooks", 4) - 1) * c.size("vocab_size"))}


MUSICGEN = Type(
    both(mha(), cross_attention(False, on=True)),
    dense(K("ffn_dim"), gated=False),
    norms=3,
    norm="layer",
    model={"tie_word_embeddings": False, "tables": _more_tables, "extra": projections(_more_heads)},
)
MUSICGEN_MELODY = MUSICGEN.variant(mixer=mha(), norms=2)


# TrOCR: positions are a table or computed.
def _learned(c: Config) -> bool:
    return c.flag("use_learned_position_embeddings", True)


TYPES = {
    "bart": BART,
    "mvp": BART,
    "plbart": BART,
    "mbart": BART.variant(model={"final_norm": True}),
    "pegasus": PEGASUS,
    "blenderbot": PEGASUS,
    "blenderbot-small": BART.variant(model={"position_embeddings": POSITIONS}),
    "marian": PEGASUS.variant(model={"final_norm": False, "vocab_size": counted("decoder_vocab_size", "vocab_size")}),
    "bigbird_pegasus": BART.variant(
        mixer=both(mha(K("use_bias"), heads="decoder_attention_heads"), cross_attention(K("use_bias"), on=True)),
        model={"position_embeddings": POSITIONS, "tie_word_embeddings": False},
    ),
    "trocr": BART.variant(
        mixer=both(
            mha(True, heads="decoder_attention_heads"),
            cross_attention(source=K("cross_attention_hidden_size"), on=True),
        ),
        model={
            "position_embeddings": when(_learned, BART.model["position_embeddings"], 0),
            "embedding_norm": lambda c: c.flag("layernorm_embedding", True),
        },
    ),
    "whisper": PEGASUS.variant(
        mixer=both(mha(True, heads="decoder_attention_heads", k_bias=False), cross_attention(k_bias=False, on=True)),
        model={"position_embeddings": counted("max_target_positions")},
    ),
    "musicgen": MUSICGEN,
    "musicgen_decoder": MUSICGEN,
    "musicgen_melody": MUSICGEN_MELODY,
    "musicgen_melody_decoder": MUSICGEN_MELODY,
    "moshi": Type(
        grouped(),
        dense(lambda c: c.size("ffn_dim") // 2),
        uniform(SLIDING),
        model={"tables": lambda c: {"padding": (1, c.size("hidden_size"))}, "tie_word_embeddings": False},
    ),
}
