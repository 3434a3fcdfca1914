"""Decoders of the first generations: GPT and its kin, RWKV, xLSTM, XLNet; after transformers' modelling code."""

from kvcalc.layers.attention import HiddenStates
from kvcalc.layers.recurrent import MatrixLstm, Rwkv
from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import Field, K, when
from kvcalc.library.huggingface.patterns import every, typed
from kvcalc.library.huggingface.shapes import both, counted, cross_attention, crossed, dense, grouped, mha, mixer, projections
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


def _cpmant_tables(c: Config) -> Tables:
    width, segments = c.size("hidden_size"), c.size("segment_types")
    return {
        "prompt_embedding": (c.size("prompt_types") * c.size("prompt_length"), width),
        "segment_embedding": (segments, width),
        "position_bias": (segments**2 + c.size("position_bias_num_buckets"), c.size("num_attention_heads")),
    }


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


# xLSTM: projections are a factor of the hidden size wide, memories that rounded up to a multiple of 64.
def _scaled(factor: str, multiple: Field = None) -> Field:
    def width(c: Config) -> int:
        step = multiple(c) if multiple else 1
        return int((c.size("hidden_size") * c.number(factor) + step - 1) // step * step)

    return width


def _head_of(factor: str) -> Field:
    return lambda c: _scaled(factor, lambda _: 64)(c) // c.size("num_heads")


def _xlstm_width(c: Config) -> int:
    """The width of table, norms and blocks alike. Raises UserError where the file gives its table another."""
    width = c.size("hidden_size")
    if c.size("embedding_dim", width) != width:
        raise c.fail("embedding_dim", f"{c.size('embedding_dim')} is not hidden_size {width}, and nothing joins the two")
    return width


XLSTM = Type(
    mixer(
        MatrixLstm,
        num_heads=K("num_heads"),
        qk_size=_scaled("qk_dim_factor"),
        v_size=_scaled("v_dim_factor"),
        qk_head_dim=_head_of("qk_dim_factor"),
        v_head_dim=_head_of("v_dim_factor"),
        bias=K("use_bias"),
    ),
    dense(_scaled("ffn_proj_factor", lambda c: c.size("ffn_round_up_to_multiple_of")), bias=K("use_bias")),
    norm=when(lambda c: c.flag("use_bias"), "layer", "rms"),
    model={
        "final_norm": False,  # the last norm has no bias, whatever the others have
        "extra": projections(vectors=lambda c: {"out_norm": _xlstm_width(c)}),
        "tie_word_embeddings": False,
    },
    layers_key="num_blocks",
    depth=lambda c: c.size("num_hidden_layers") if c.in_file("num_hidden_layers") else 0,
)
RWKV = Type(
    mixer(
        Rwkv,
        attention_hidden_size=lambda c: c.size("attention_hidden_size", c.size("hidden_size")),
        shift_size=K("hidden_size"),
    ),
    both(
        dense(_inner("intermediate_size"), gated=False),
        projections(
            matrices=lambda c: {"receptance": (c.size("hidden_size"),) * 2},
            vectors=lambda c: {"time_mix": 2 * c.size("hidden_size")},
        ),
    ),
    norms=lambda c: 2 if c.layer else 3,
    norm="layer",
)


def _reformer(c: Config) -> Tables:
    if not c.flag("axial_pos_embds"):
        return {"position_embedding": (c.size("max_position_embeddings"), c.size("hidden_size"))}
    axes = zip(c.sizes("axial_pos_shape"), c.sizes("axial_pos_embds_dim"), strict=False)
    return {f"position_axis_{i}": axis for i, axis in enumerate(axes)}


# Two residual streams, which the last norm and the head read side by side.
REFORMER = Type(
    mixer(
        HiddenStates,
        num_attention_heads=K("num_attention_heads"),
        head_dim=K("attention_head_size"),
        hidden_size=K("hidden_size"),
        shared_qk=lambda c: c.layer_type == "lsh",
    ),
    dense(K("feed_forward_size"), gated=False, bias=True),
    typed(key="attn_layers"),
    norm="layer",
    model={
        "final_norm": False,
        "lm_head": False,
        "lm_head_bias": True,
        "tie_word_embeddings": False,
        "tables": _reformer,
        "extra": projections(
            lambda c: {"lm_head": (2 * c.size("hidden_size"), c.size("vocab_size"))},
            lambda c: {"final_norm": 4 * c.size("hidden_size")},
        ),
    },
    depth=lambda c: len(c.items("attn_layers") or []) if c.in_file("attn_layers") else 0,
)
XLNET = Type(
    mixer(
        HiddenStates,
        num_attention_heads=K("num_attention_heads"),
        head_dim=lambda c: c.size("hidden_size") // c.size("num_attention_heads"),
        hidden_size=K("hidden_size"),
        memory=K("mem_len"),
        cached=K("use_mems_eval"),
        relative=True,
    ),
    dense(K("d_inner"), gated=False, bias=True),
    norm="layer",
    model={
        "final_norm": False,
        "lm_head_bias": True,
        "vocab_size": counted("n_token", "vocab_size"),
        "extra": projections(vectors=lambda c: {"mask_embedding": c.size("hidden_size")}),
    },
)


def _languages(c: Config) -> Tables:
    count = c.size("n_langs")
    return {"language_embedding": (count, c.size("hidden_size"))} if count > 1 and c.flag("use_lang_emb") else {}


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
    "ctrl": Type(mha(True), dense(K("dff"), gated=False, bias=True), norm="layer", model=HEAD_BIAS),
    "biogpt": Type(
        mha(True),
        dense(gated=False, bias=True),
        norm="layer",
        model={"position_embeddings": counted("max_position_embeddings", offset=2)},
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
    "cpmant": Type(
        grouped(
            heads=K("num_attention_heads"),
            kv_heads=K("num_attention_heads"),
            head=K("dim_head"),
            prefix_tokens=K("prompt_length"),
        ),
        dense(K("dim_ff")),
        model={"tables": _cpmant_tables, "tie_word_embeddings": False},
    ),
    "modernbert-decoder": MODERNBERT,
    "rwkv": RWKV,
    "xlstm": XLSTM,
    "reformer": REFORMER,
    "xlnet": XLNET,
    "xlm": Type(  # keeps keys and values only where it is a causal model at all
        mha(True, cached=K("causal")),
        dense(_four_times, gated=False, bias=True),
        norm="layer",
        model={
            **POSITIONS,
            "embedding_norm": True,
            "final_norm": False,
            "lm_head_bias": True,
            "vocab_size": counted("n_words", "vocab_size"),
            "tables": _languages,
        },
    ),
}
