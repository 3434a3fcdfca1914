"""Decoders of the first generations: GPT and its kin; after transformers' modelling code."""

from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import Field, K
from kvcalc.library.huggingface.patterns import every, typed
from kvcalc.library.huggingface.shapes import both, counted, cross_attention, crossed, dense, mha, projections
from kvcalc.library.huggingface.types.dense import MHA_ALL_BIASES
from kvcalc.library.huggingface.types.entry import Type

Sizes = dict[str, int]
Tables = dict[str, tuple[int, int]]


def _inner(key: str) -> Field:
    """The FFN's width: the key, else four times the hidden size."""
    return lambda c: c.size(key, _four_times(c))


def _four_times(c: Config) -> int:
    return 4 * c.size("hidden_size")


POSITIONS = {"position_embeddings": counted("max_position_embeddings")}
GPT = Type(
    both(mha(True), cross_attention()),
    dense(_inner("n_inner"), gated=False, bias=True),
    norms=lambda c: 2 + crossed(c),
    norm="layer",
    model=POSITIONS,
)
# One norm for attention and FFN side by side; rotary positions; a bias on the LM head alone.
HEAD_BIAS: dict[str, Field] = {"lm_head_bias": True}
GPTJ = Type(mha(), dense(_inner("n_inner"), gated=False, bias=True), norms=1, norm="layer", model=HEAD_BIAS)
NEOX = Type(mha(K("attention_bias")), dense(gated=False, bias=True), norm="layer")


def _japanese_bias(c: Config) -> Sizes:
    return {"dense_bias": c.size("hidden_size")} if c.layer == c.layers - 1 else {}


def _mpt_groups(c: Config) -> int:
    """Heads of keys and values, as the code released with MPT reads `attn_config`."""
    attention = c.nested("attn_config")
    kind = attention.word("attn_type", "multihead_attention")
    heads = c.size("num_attention_heads")
    return (
        attention.size("kv_n_heads", heads)
        if kind == "grouped_query_attention"
        else 1
        if kind.startswith("multiquery")
        else heads
    )


# ModernBERT's decoder: the first layer has no norm before attention, and the head has a matrix and a norm of its own.
def _modernbert_norm(c: Config) -> str:
    return "layer" if c.flag("norm_bias") else "layer_no_bias"


def _modernbert_window(c: Config) -> int | None:
    """Half of `local_attention`, unless the file gives the window itself."""
    given = c.size("sliding_window") if c.in_file("sliding_window") else c.size("local_attention", 0, least=0) // 2
    return given or None


MODERNBERT = Type(
    mha(K("attention_bias"), window=_modernbert_window),
    dense(bias=K("mlp_bias")),
    typed(every(K("global_attn_every_n_layers", default=3), offset=0)),
    norms=lambda c: 2 if c.layer else 1,
    norm=_modernbert_norm,
    model={
        "embedding_norm": True,
        "lm_head_bias": lambda c: c.flag("decoder_bias"),
        "extra": projections(
            lambda c: {"head": (c.size("hidden_size"),) * (3 if c.flag("classifier_bias") else 2)},
            lambda c: {"head_norm": c.size("hidden_size") * (2 if c.flag("norm_bias") else 1)},
        ),
    },
)


TYPES = {
    "gpt-sw3": GPT,
    "gpt_bigcode": GPT.variant(
        mixer=both(
            mha(True, kv_heads=lambda c: 1 if c.flag("multi_query") else c.size("num_attention_heads")),
            cross_attention(),
        ),
    ),
    "gpt_neo": GPT.variant(  # its local layers mask what is out of the window, and keep it
        mixer=mha(o_bias=True), ffn=dense(_inner("intermediate_size"), gated=False, bias=True), norms=2
    ),
    "openai-gpt": GPT.variant(
        mixer=mha(True), ffn=dense(_four_times, gated=False, bias=True), norms=2, model={"final_norm": False}
    ),
    "xglm": Type(
        both(mha(True), cross_attention()),
        dense(K("ffn_dim"), gated=False, bias=True),
        norms=lambda c: 2 + crossed(c),
        norm="layer",
    ),
    "bloom": Type(mha(True), dense(_four_times, gated=False, bias=True), norm="layer", model={"embedding_norm": True}),
    "mpt": Type(
        mha(kv_heads=_mpt_groups),
        dense(_four_times, gated=lambda c: c.nested("ffn_config").word("ffn_type") == "mptglu"),
        norm="layer_no_bias",
        inert=("fc_type", "ffn_type", "alibi_bias_max", "attn_uses_sequence_id", "prefix_lm"),
    ),
    "gptj": GPTJ,
    "codegen": GPTJ,
    "gpt_neox": NEOX,
    "gpt_neox_japanese": NEOX.variant(
        mixer=both(mha(), projections(vectors=_japanese_bias)),
        ffn=dense(lambda c: int(c.size("hidden_size") * c.number("intermediate_multiple_size")), gated=False),
    ),
    "fuyu": MHA_ALL_BIASES,
    "modernbert-decoder": MODERNBERT,
}
