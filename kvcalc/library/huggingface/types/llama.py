"""Plain decoders: grouped attention and a dense FFN or experts in every layer.

Source: transformers' modelling code.
"""

from typing import Any

from kvcalc.library.huggingface.config import Config, when
from kvcalc.library.huggingface.layer_types import (
    FULL,
    SLIDING,
    cycle,
    every,
    full_where,
    typed,
    windowed,
)
from kvcalc.library.huggingface.shapes import (
    both,
    by_type,
    dense,
    even_head_dim,
    grouped,
    half_window,
    head_dim,
    moe,
    pick,
    projections,
    stepped,
)
from kvcalc.library.huggingface.types.entry import Type, outer_tie
from kvcalc.records import JsonObject

# whatever the text part says, the model around it ties nothing
UNTIED = {"tie_word_embeddings": False}
GROUPS = "num_key_value_heads | num_attention_heads"
EXPERTS = moe(size="intermediate_size")

LLAMA = Type(ffn=dense(bias="mlp_bias"))
QWEN2_ORDER = typed(
    full_where("not use_sliding_window or layer_index < (max_window_layers | layer_count)")
)
QWEN2 = Type(grouped(False, qkv_bias=True), order=QWEN2_ORDER)
QWEN3 = Type(grouped(qk_norm="head"), order=QWEN2_ORDER)
QWEN3_VL = QWEN3.variant(order=typed(), model=outer_tie())
MISTRAL = Type(grouped(False), order=typed(windowed()))
GEMMA2 = Type(order=typed(every(2)), norms=4)
GLM = Type(grouped(False, qkv_bias="attention_bias"))
GLM4 = GLM.variant(norms=4)
OLMO2 = Type(grouped(qk_norm="full"))
COHERE = Type(norms=1, norm="layer_no_bias")
ERNIE = Type(grouped("use_bias"), dense(bias="use_bias"))
PLAIN = Type(ffn=dense(bias="mlp_bias", gated=False))
QK_LAYERNORM: JsonObject = {
    "qk_norm": when("qk_layernorm", "head"),
    "qk_norm_bias": True,
}
MHA_ALL_BIASES = Type(
    grouped(True, kv_heads="num_attention_heads", head=even_head_dim, **QK_LAYERNORM),
    dense(gated=False, bias=True),
    norm="layer",
)


def _exaone_order(c: Config) -> list[str]:
    """Return EXAONE 4's order by a number n (every n-th layer is full) or letters (LLLG)."""
    key = "sliding_window_pattern"
    if not c.has("sliding_window"):
        return [FULL] * c.layers
    if isinstance(c.get(key), str):
        return cycle(key, {"L": SLIDING, "G": FULL}, is_text=True)(c)
    return every(key)(c)


def _is_newer_falcon(c: Config) -> bool:
    """Return whether this is the 40B's architecture, by its key or by the type's first name."""
    return c.file.get("model_type") == "RefinedWeb" or c.flag("new_decoder_architecture")


def _falcon_norms(c: Config) -> int:
    """Return one norm for parallel parts, or two for sequential parts or one norm for each."""
    default = 2 if _is_newer_falcon(c) else 1
    if not c.flag("parallel_attn", True):
        return 2
    return 2 if c.size("num_ln_in_parallel_attn", default) == 2 else 1


def kosmos(attention_norm: Any = None, **model: Any) -> Type:
    """Return the decoder of Kosmos-2: a LayerNorm inside the FFN, and maybe inside attention."""
    norms = {"ffn_norm": "2 * ffn_dim", "attention_norm": attention_norm}
    return Type(
        grouped(True, head=even_head_dim),
        both(dense("ffn_dim", gated=False, bias=True), projections(vectors=norms)),
        norm="layer",
        model=model,
    )


def _doge_mask(c: Config) -> dict[str, tuple[int, ...]]:
    """Return Doge's projection of the values to one mask logit per head."""
    groups = c.size("num_key_value_heads", c.size("num_attention_heads"))
    return {
        "mask": (
            groups * head_dim(c),
            groups,
            groups if c.flag("attention_bias") else 0,
        )
    }


def _image_attention(c: Config) -> dict[str, tuple[int, ...]]:
    """Return the matrices of attention to the image. Text adds nothing to its cache."""
    hidden, head = c.size("hidden_size"), even_head_dim(c)
    queries = c.size("num_attention_heads") * head
    groups = c.size("num_key_value_heads", c.size("num_attention_heads")) * head
    keys = (hidden, groups)
    return {
        "cross.q": (hidden, queries),
        "cross.k": keys,
        "cross.v": keys,
        "cross.o": (queries, hidden),
    }


TYPES = {
    (
        "llama emu3_text_model granite granite4_vision_text iquestcoder aquila skywork"
        " telechat3"  # mlx-lm's telechat3.py
    ): LLAMA,
    "gemma": Type(),
    "mistral ministral ministral3 phi3 phi4_multimodal": MISTRAL,
    "mixtral": MISTRAL.variant(ffn=EXPERTS),
    "gpt2": Type(
        grouped(True, kv_heads="num_attention_heads"),
        dense("n_inner | 4 * hidden_size", gated=False, bias=True),
        norm="layer",
        model={"position_embeddings": "max_position_embeddings"},
    ),
    "qwen2 qwen2_5_vl_text qwen2_vl_text": QWEN2,
    "qwen2_5_omni_text": QWEN2.variant(model=UNTIED),
    "qwen3": QWEN3,
    "qwen3_vl_text": QWEN3_VL,
    "qwen3_moe": QWEN3.variant(
        ffn=stepped(moe()),
        order=typed(windowed("use_sliding_window")),
        inert="use_qk_norm",
    ),
    "qwen3_vl_moe_text": QWEN3_VL.variant(ffn=stepped(moe())),
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA2.variant(
        mixer=grouped(qk_norm="head", window=half_window(True)),
        order=typed(every("sliding_window_pattern | _sliding_window_pattern | 6")),
    ),
    "gpt_oss": Type(
        grouped(sinks=True),
        moe(bias=True, router_bias=True, size="intermediate_size"),
        typed(every(2)),
    ),
    "starcoder2": Type(
        grouped("use_bias"),
        dense(gated=False, bias="use_bias"),
        typed(windowed()),
        norm="layer",
    ),
    "minimax_m2": Type(
        grouped(False, qk_norm="full"),
        EXPERTS,
        inert="use_qk_norm qk_norm_type use_routing_bias shared_intermediate_size",
    ),
    "opt": Type(
        grouped("enable_bias", kv_heads="num_attention_heads", head=even_head_dim),
        dense("ffn_dim", gated=False, bias="enable_bias"),
        norm=when("layer_norm_elementwise_affine | True", "layer", "none"),
        model={
            "position_embeddings": "max_position_embeddings + 2",
            "embedding_size": "word_embed_proj_dim",
            "final_norm": "(do_layer_norm_before | True) and not _remove_final_layer_norm",
        },
    ),
    "apertus": PLAIN.variant(
        mixer=grouped(qk_norm="head"),
        ffn=both(
            dense(gated=False),
            projections(vectors={"activation": when("(hidden_act | 'xielu') == 'xielu'", 2)}),
        ),
    ),
    "arcee": PLAIN,
    "bitnet": Type(
        ffn=both(
            dense(),
            projections(
                vectors={
                    "attention_norm": "hidden_size",
                    "ffn_norm": "intermediate_size",
                }
            ),
        )
    ),
    "cohere": COHERE.variant(mixer=grouped(qk_norm=when("use_qk_norm", "full"))),
    "cohere2": COHERE.variant(order=typed(every("sliding_window_pattern | 4"))),
    "cosmos3_edge_text": PLAIN.variant(model=UNTIED),
    "cwm": LLAMA.variant(mixer=grouped(False), order=typed(full_where("layer_index % 4 == 0"))),
    "diffllama": Type(
        both(grouped(), projections(vectors={"lambdas": lambda c: 4 * head_dim(c)}))
    ),
    "doge": Type(
        both(
            grouped(qk_norm="head"),
            projections(
                _doge_mask, {"mask_scale": GROUPS, "residual_scales": "2 * hidden_size"}
            ),
        ),
        both(
            dense(bias="mlp_bias"),
            pick(
                "is_moe",
                moe(
                    size=1,
                    gated=False,
                    router_outputs=lambda c: 2 * int(c.size("num_experts") ** 0.5),
                ),
            ),
        ),
        typed(windowed()),
    ),
    "ernie4_5 paddleocr_vl_text": ERNIE,
    "exaone4": Type(grouped(False, qk_norm="head"), order=typed(_exaone_order)),
    "falcon": Type(
        grouped(
            "bias",
            kv_heads=when(
                _is_newer_falcon,
                f"num_kv_heads | {GROUPS}",
                "1 if (multi_query | True) else num_attention_heads",
            ),
            head=even_head_dim,
        ),
        dense("ffn_hidden_size | 4 * hidden_size", gated=False, bias="bias"),
        norms=_falcon_norms,
        norm="layer",
    ),
    "glm": GLM,
    "glm4": GLM4,
    "glm4v_text": GLM4.variant(
        mixer=grouped(False, qkv_bias=True, head=even_head_dim), inert="attention_bias"
    ),
    "glm_image_text": GLM4.variant(
        model={
            "lm_head": False,
            "extra": projections({"lm_head": "hidden_size, vision_vocab_size"}),
        }
    ),
    "glm_ocr_text": GLM4.variant(mixer=grouped(False)),
    "granite_docling_text": LLAMA.variant(model=outer_tie(True)),
    "granite_swa": LLAMA.variant(
        mixer=grouped(sinks=True), order=typed(full_where("layer_index % 4 == 0"))
    ),
    "helium": GLM.variant(ffn=dense(bias="mlp_bias")),
    "hunyuan_v1_dense hunyuan_vl_text": Type(
        grouped(qk_norm="head", head="attention_head_dim")
    ),
    "hyperclovax": LLAMA.variant(norms=when("use_post_norm", 4, 2)),
    "internlm3": Type(grouped("qkv_bias"), dense(bias="bias")),
    "jais2": PLAIN.variant(norm="layer"),
    "kosmos_2_text_model": kosmos("2 * hidden_size"),
    "kosmos_2_5_text_model": kosmos(0, type_embeddings=2),
    "mllama_text_model": Type(
        by_type(
            full_attention=grouped(False, head=even_head_dim),
            cross_attention=projections(
                _image_attention,
                {"cross.norms": lambda c: 2 * even_head_dim(c), "cross.gates": 2},
            ),
        ),
        order=full_where("layer_index in cross_attention_layers", "cross_attention", FULL),
        model=UNTIED | {"tables": {"image_embedding": "8, hidden_size"}},
        defaults={"cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]},
    ),
    "molmo2_text": Type(
        grouped(
            False,
            qkv_bias="attention_bias",
            qk_norm=when("(qk_norm_type | 'qwen3') == 'qwen3'", "head", "full"),
        ),
        model=UNTIED
        | {"tables": {"additional_embedding": "additional_vocab_size | 128, hidden_size"}},
    ),
    "muse_glimmer_text": Type(
        grouped(output_gate="full"),
        order=typed(full_where("(layer_count - 1 - layer_index) % 4 == 0")),
        norms=4,
        model=outer_tie(),
    ),
    "nanochat": Type(ffn=dense(gated=False), norm="none"),
    "nemotron": PLAIN.variant(norm="layer"),
    "olmo": Type(norm="none"),
    "olmo2": OLMO2,
    "olmo3": OLMO2.variant(order=typed(every(4))),
    "persimmon fuyu": MHA_ALL_BIASES,
    "phi": MHA_ALL_BIASES.variant(
        mixer=grouped(True, **QK_LAYERNORM), norms=1, model={"lm_head_bias": True}
    ),
    "seed_oss": Type(
        grouped(qkv_bias="attention_bias", o_bias="attention_out_bias"),
        dense(bias="mlp_bias"),
    ),
    # where windows are on, the layers without rotary embedding slide
    "smollm3": LLAMA.variant(
        order=typed(
            full_where(
                "(no_rope_layers | (layer_index + 1) % (no_rope_layer_interval | 4)) != 0"
                " or not use_sliding_window"
            )
        )
    ),
    "stablelm": Type(
        grouped(
            False,
            qkv_bias="use_qkv_bias",
            head=even_head_dim,
            qk_norm=when("qk_layernorm", "full"),
        ),
        norms=when("use_parallel_residual", 1, 2),
        norm="layer",
    ),
    "vaultgemma": Type(order=typed(every(2))),
    "voxtral_realtime_text": MISTRAL.variant(
        mixer=grouped(False, head="head_dim | 128"),
        ffn=both(
            dense(),
            projections({"delay_down": "hidden_size, 32", "delay_up": "32, hidden_size"}),
        ),
        model={"tie_word_embeddings": "tie_word_embeddings | True"},
    ),
}
