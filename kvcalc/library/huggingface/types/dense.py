"""Dense decoders: grouped attention and one FFN in every layer, each with its own biases, norms, windows and extras."""

from typing import Any

from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import K, when
from kvcalc.library.huggingface.patterns import FULL, SLIDING, Order, by_type, cycle, every, pick, typed, windowed
from kvcalc.library.huggingface.shapes import both, dense, even_head_dim, grouped, head_dim, moe, nothing, projections
from kvcalc.library.huggingface.types.decoders import LLAMA, MISTRAL, QWEN2
from kvcalc.library.huggingface.types.entry import Type, outer_tie

BIAS = K("attention_bias")
UNTIED = {"tie_word_embeddings": False}  # whatever the text part says, the model around it ties nothing
GLM = Type(grouped(qkv_bias=BIAS), dense())
GLM4 = GLM.variant(norms=4)
OLMO2 = Type(grouped(BIAS, qk_norm="full"), dense())
COHERE = Type(grouped(BIAS), dense(), norms=1, norm="layer_no_bias")
ERNIE = Type(grouped(K("use_bias")), dense(bias=K("use_bias")))
HUNYUAN = Type(grouped(BIAS, qk_norm="head", head=K("attention_head_dim")), dense())
PLAIN = Type(grouped(BIAS), dense(bias=K("mlp_bias"), gated=False))
QK_LAYERNORM = when(K("qk_layernorm"), "head")
MHA_ALL_BIASES = Type(
    grouped(True, kv_heads=K("num_attention_heads"), head=even_head_dim, qk_norm=QK_LAYERNORM, qk_norm_bias=True),
    dense(gated=False, bias=True),
    norm="layer",
)
PHI = MHA_ALL_BIASES.variant(mixer=grouped(True, qk_norm=QK_LAYERNORM, qk_norm_bias=True), norms=1, model={"lm_head_bias": True})


def _without_rope(c: Config) -> list[str]:
    """SmolLM3's order: where windows are on, the layers that have no rotary embedding slide."""
    step = c.size("no_rope_layer_interval", 4)
    rotated = c.items("no_rope_layers") or [(i + 1) % step for i in range(c.layers)]
    if len(rotated) != c.layers:
        raise c.fail("no_rope_layers", f"has {len(rotated)} entries for {c.layers} layers")
    return [FULL if rope or not c.flag("use_sliding_window") else SLIDING for rope in rotated]


def _exaone_order(c: Config) -> list[str]:
    """EXAONE 4's pattern: a number n (every n-th layer is full) or letters (LLLG)."""
    key = "sliding_window_pattern"
    letters = isinstance(c.get(key), str)
    by_letter, by_number = cycle(key, {"L": SLIDING, "G": FULL}, text=True), every(K(key))
    return (by_letter if letters else by_number)(c) if c.has("sliding_window") else [FULL] * c.layers


def _newer_falcon(c: Config) -> bool:
    """What the 40B brought; under its first name, before there was a key for it."""
    return c.file.get("model_type") == "RefinedWeb" or c.flag("new_decoder_architecture")


def _falcon_norms(c: Config) -> int:
    """One norm before both parts at once, or two: for parts in sequence, or one of its own for each."""
    default = 2 if _newer_falcon(c) else 1
    return 1 if c.flag("parallel_attn", True) and c.size("num_ln_in_parallel_attn", default) != 2 else 2


def _falcon_kv_heads(c: Config) -> int:
    """Grouped in the newer architecture; before it, one head or as many as there are queries."""
    if _newer_falcon(c):
        return c.size("num_kv_heads" if c.has("num_kv_heads") else "num_key_value_heads", c.size("num_attention_heads"))
    return 1 if c.flag("multi_query", True) else c.size("num_attention_heads")


def kosmos(inner_norm: bool, **model: Any) -> Type:
    """The decoder of Kosmos-2, with a LayerNorm inside the FFN and maybe one inside attention."""

    def norms(c: Config) -> dict[str, int]:
        return {"ffn_norm": 2 * c.size("ffn_dim"), "attention_norm": 2 * c.size("hidden_size") if inner_norm else 0}

    return Type(
        grouped(True, head=even_head_dim),
        both(dense(K("ffn_dim"), gated=False, bias=True), projections(vectors=norms)),
        norm="layer",
        model=model,
    )


def _groups(c: Config) -> int:
    return c.size("num_key_value_heads", c.size("num_attention_heads"))


def _mask(c: Config) -> dict[str, tuple[int, ...]]:
    """Doge's projection of the values to one mask logit per head."""
    groups = _groups(c)
    return {"mask": (groups * head_dim(c), groups, groups if c.flag("attention_bias") else 0)}


def crossing(key: str, default: tuple[int, ...], kind: str = "cross_attention") -> Order:
    """`kind` at the layers that a list of indices names, full attention elsewhere."""

    def order(c: Config) -> list[str]:
        chosen = set(c.sizes(key) if c.has(key) else default)
        return [kind if i in chosen else FULL for i in range(c.layers)]

    return order


def _cross_attention(c: Config) -> dict[str, tuple[int, ...]]:
    """Attention to the image: its keys and values come with the image, so that text adds nothing to its cache."""
    hidden, head = c.size("hidden_size"), even_head_dim(c)
    queries, groups = c.size("num_attention_heads") * head, _groups(c) * head
    return {
        "cross.q": (hidden, queries),
        "cross.k": (hidden, groups),
        "cross.v": (hidden, groups),
        "cross.o": (queries, hidden),
    }


def _sub_norms(c: Config) -> dict[str, int]:
    """BitNet's norms before the last projection of either part."""
    return {"attention_norm": c.size("hidden_size"), "ffn_norm": c.size("intermediate_size")}


def _additional(c: Config) -> dict[str, tuple[int, int]]:
    """Molmo 2's rows for tokens beyond those that the LM head can name."""
    return {"additional_embedding": (c.size("additional_vocab_size", 128, least=0), c.size("hidden_size"))}


TYPES = {
    "apertus": Type(
        grouped(BIAS, qk_norm="head"),
        both(
            dense(gated=False),
            projections(vectors=when(lambda c: c.word("hidden_act", "xielu") == "xielu", {"activation": 2}, {})),
        ),
    ),
    "arcee": PLAIN,
    "bitnet": Type(
        grouped(BIAS),
        both(dense(), projections(vectors=_sub_norms)),
    ),
    "cohere": COHERE.variant(mixer=grouped(BIAS, qk_norm=when(K("use_qk_norm"), "full"))),
    "cohere2": COHERE.variant(order=typed(every(K("sliding_window_pattern", default=4)))),
    "cosmos3_edge_text": PLAIN.variant(model=UNTIED),
    "cwm": LLAMA.variant(mixer=grouped(), order=typed(every(4, offset=0))),
    "diffllama": Type(both(grouped(BIAS), projections(vectors=lambda c: {"lambdas": 4 * head_dim(c)})), dense()),
    "doge": Type(
        both(
            grouped(BIAS, qk_norm="head"),
            projections(_mask, lambda c: {"mask_scale": _groups(c), "residual_scales": 2 * c.size("hidden_size")}),
        ),
        both(
            dense(bias=K("mlp_bias")),
            pick(
                lambda c: c.flag("is_moe"),
                moe(size=1, gated=False, router_outputs=lambda c: 2 * int(c.size("num_experts") ** 0.5)),
                nothing,
            ),
        ),
        typed(windowed()),
    ),
    "emu3_text_model": LLAMA,
    "ernie4_5": ERNIE,
    "exaone4": Type(grouped(qk_norm="head"), dense(), typed(_exaone_order)),
    "falcon": Type(
        grouped(K("bias"), kv_heads=_falcon_kv_heads, head=even_head_dim),
        dense(K("ffn_hidden_size", default=K("hidden_size", scale=4)), gated=False, bias=K("bias")),
        norms=_falcon_norms,
        norm="layer",
    ),
    "glm": GLM,
    "glm4": GLM4,
    "glm4v_text": GLM4.variant(mixer=grouped(qkv_bias=True, head=even_head_dim), inert=("attention_bias",)),
    "glm_image_text": GLM4.variant(
        model={
            "lm_head": False,
            "extra": lambda c: projections({"lm_head": (c.size("hidden_size"), c.size("vision_vocab_size"))})(c),
        }
    ),
    "glm_ocr_text": GLM4.variant(mixer=grouped()),
    "granite": LLAMA,
    "granite4_vision_text": LLAMA,
    "granite_docling_text": LLAMA.variant(model=outer_tie(True)),
    "granite_swa": LLAMA.variant(mixer=grouped(BIAS, sinks=True), order=typed(every(4, offset=0))),
    "helium": Type(grouped(qkv_bias=BIAS), dense(bias=K("mlp_bias"))),
    "hunyuan_v1_dense": HUNYUAN,
    "hunyuan_vl_text": HUNYUAN,
    "hyperclovax": LLAMA.variant(norms=when(K("use_post_norm"), 4, 2)),
    "internlm3": Type(grouped(K("qkv_bias")), dense(bias=K("bias"))),
    "iquestcoder": LLAMA,
    "jais2": PLAIN.variant(norm="layer"),
    "ministral": MISTRAL,
    "ministral3": MISTRAL,
    "kosmos_2_text_model": kosmos(True),
    "kosmos_2_5_text_model": kosmos(False, type_embeddings=2),
    "mllama_text_model": Type(
        by_type(
            full_attention=grouped(head=even_head_dim),
            cross_attention=projections(_cross_attention, lambda c: {"cross.norms": 2 * even_head_dim(c), "cross.gates": 2}),
        ),
        dense(),
        crossing("cross_attention_layers", (3, 8, 13, 18, 23, 28, 33, 38)),
        model=UNTIED | {"tables": lambda c: {"image_embedding": (8, c.size("hidden_size"))}},
    ),
    "molmo2_text": Type(
        grouped(qkv_bias=BIAS, qk_norm=when(lambda c: c.word("qk_norm_type", "qwen3") == "qwen3", "head", "full")),
        dense(),
        model=UNTIED | {"tables": _additional},
    ),
    "muse_glimmer_text": Type(
        grouped(BIAS, output_gate="full"), dense(), typed(every(4, offset=lambda c: 1 - c.layers)), norms=4, model=outer_tie()
    ),
    "nanochat": Type(grouped(BIAS), dense(gated=False), norm="none"),
    "nemotron": PLAIN.variant(norm="layer"),
    "olmo": Type(grouped(BIAS), dense(), norm="none"),
    "olmo2": OLMO2,
    "olmo3": OLMO2.variant(order=typed(every(4))),
    "paddleocr_vl_text": ERNIE,
    "persimmon": MHA_ALL_BIASES,
    "phi": PHI,
    "phi3": MISTRAL,
    "phi4_multimodal": MISTRAL,
    "qwen2_5_omni_text": QWEN2.variant(model=UNTIED),
    "qwen2_5_vl_text": QWEN2,
    "qwen2_vl_text": QWEN2,
    "seed_oss": Type(grouped(qkv_bias=BIAS, o_bias=K("attention_out_bias")), dense(bias=K("mlp_bias"))),
    "smollm3": LLAMA.variant(order=typed(_without_rope)),
    "stablelm": Type(
        grouped(qkv_bias=K("use_qkv_bias"), head=even_head_dim, qk_norm=when(K("qk_layernorm"), "full")),
        dense(),
        norms=when(K("use_parallel_residual"), 1, 2),
        norm="layer",
    ),
    "vaultgemma": Type(grouped(BIAS), dense(), typed(every(2))),
    "voxtral_realtime_text": MISTRAL.variant(
        mixer=grouped(head=K("head_dim", default=128)),
        ffn=both(
            dense(),
            projections(lambda c: {"delay_down": (c.size("hidden_size"), 32), "delay_up": (32, c.size("hidden_size"))}),
        ),
        model={"tie_word_embeddings": lambda c: c.flag("tie_word_embeddings", True)},
    ),
}
