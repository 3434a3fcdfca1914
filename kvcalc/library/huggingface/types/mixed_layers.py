"""Decoders whose layers differ in an order of their own, share weights or caches, or repeat.

Sources: transformers' modelling code; for `hunyuan` Tencent's code of Hunyuan-Large.
"""

from collections.abc import Callable
from typing import Any

from kvcalc.layers.attention import BlockSparse, Sparse
from kvcalc.library.huggingface.config import Config, Field, Reader, when
from kvcalc.library.huggingface.layer_types import SLIDING, every, full_where, typed
from kvcalc.library.huggingface.shapes import (
    after_first,
    both,
    by_type,
    dense,
    grouped,
    latent,
    moe,
    nothing,
    pick,
    projections,
    sparse_where,
)
from kvcalc.library.huggingface.types.entry import Type, outer_tie
from kvcalc.library.huggingface.types.mixtures import (
    FIRST_DENSE,
    LOCAL,
    N_SHARED,
    PER_HEAD_GATE,
    SPLIT_HEAD,
    WIDE,
)

MOST_LAYERS = 10_000
SLIDES = "layer_type == 'sliding_attention'"


def list_entry(key: str, index: int, default: int) -> Field:
    """Return the rule of one entry of a list of sizes, as in `[text, vision]`."""

    def read(c: Config) -> int:
        sizes = c.sizes(key)
        if sizes and index >= len(sizes):
            raise c.fail(key, f"has {len(sizes)} entries")
        return sizes[index] if sizes else default

    return read


TEXT_WIDTH = list_entry("moe_intermediate_size", 0, 1536)
DENSE_WINDOWS = every("prefix_dense_sliding_window_pattern | 1")


def cohere2_order(c: Config) -> list[str]:
    """Return the order of the dense layers, and then that of the others."""
    count = min(c.size("first_k_dense_replace", 0, 0), c.layers)
    return DENSE_WINDOWS(c)[:count] + every("sliding_window_pattern")(c)[: c.layers - count]


# --- MiMo: sliding layers have sizes of their own ---


def in_window(key: str, inside: str = "") -> Field:
    """Return the rule of `swa_`-`key` in a sliding layer, else `inside`; `key` in the others."""
    return when(SLIDES, f"swa_{key} | {inside or key}", key)


# --- HRM: two stacks of layers run in turns, every turn with a cache of its own ---

STACK = "(num_layers_per_stack | num_hidden_layers)"


def turns(c: Config) -> int:
    """Return the layers as they run: a round takes the low stack L_cycles times, the high once."""
    key = "num_layers_per_stack"
    stack = c.size(key if c.has(key) else "num_hidden_layers")
    count = stack * c.size("H_cycles") * (c.size("L_cycles") + 1)
    if count > MOST_LAYERS:
        raise c.fail("H_cycles", f"gives {count:,} layers")
    return count


# --- dots3: MLA with a window, or with an indexer ---


def own(key: str, default: int) -> Callable[[Config], int]:
    """Return the rule of `swa_`-`key` in a sliding layer, unless per_layer_config gives it."""

    def read(c: Config) -> int:
        is_own = c.layer_type == SLIDING and not c.has("per_layer_config")
        return c.size(f"swa_{key}", default) if is_own else c.size(key)

    return read


NOPE = own("qk_nope_head_dim", 192)


def rope(c: Config) -> int:
    """Return the rest of a sliding layer's head_dim, unless the file says otherwise."""
    rest = c.size("swa_head_dim", 256) - NOPE(c)
    return own("qk_rope_head_dim", max(1, rest))(c)


def mla(**fields: Any) -> Reader:
    """Return the reader of dots3's MLA: a norm on the rope key and a gate per head besides."""
    heads = own("num_attention_heads", 64)
    return both(
        latent(
            num_attention_heads=heads,
            q_lora_rank=own("q_lora_rank", 1024),
            kv_lora_rank=own("kv_lora_rank", 1024),
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=rope,
            v_head_dim=own("v_head_dim", 128),
            **fields,
        ),
        projections(
            {"gate": lambda c: (c.size("hidden_size"), heads(c))},
            {"rope_key_norm": rope},
        ),
    )


def dots3_order(c: Config) -> list[str]:
    """Return the listed types, or windows except in layers 0, 1, 5, 9 …

    `use_dsa` says whether full layers have an indexer.
    """
    names = typed(
        full_where("layer_index < 2 or layer_index % 4 == 1 or not (use_sliding_window | True)")
    )(c)
    if c.get("use_dsa") is None and c.has("per_layer_config"):
        return names
    full = "indexed_attention" if c.flag("use_dsa", True) else "full_attention"
    return [name if name == "sliding_attention" else full for name in names]


def step_experts(c: Config) -> bool:
    """Return whether a layer of Step has experts. `moe_layers_enum` lists them, maybe as a text."""
    if (kinds := c.items("mlp_layer_types")) is not None and c.layer < len(kinds):
        return bool(kinds[c.layer] == "sparse")
    layers = c.get("moe_layers_enum")
    if layers is None:
        return c.layer >= 3
    items = layers.split(",") if isinstance(layers, str) else c.items("moe_layers_enum") or []
    return str(c.layer) in {str(item).strip() for item in items}


# --- Hunyuan-Large: of cla_share_factor neighbours the first projects keys and values for all ---

BORROWS = "use_cla and layer_index % (cla_share_factor | 1) != 0"
HUNYUAN_HEAD = f"attention_head_dim | head_dim | {SPLIT_HEAD}"
HUNYUAN_WIDTH = "(moe_intermediate_size | intermediate_size)"

TYPES = {
    # one norm: attention and FFN stand side by side
    "cohere2_moe": Type(
        ffn=after_first(
            FIRST_DENSE,
            moe(
                "num_experts",
                size=WIDE,
                shared="(num_shared_experts | 0) * intermediate_size",
            ),
            dense("prefix_dense_intermediate_size | intermediate_size"),
        ),
        order=typed(cohere2_order),
        norms=1,
        norm=when(lambda c: c.has("rms_norm_eps"), "rms", "layer_no_bias"),
    ),
    # DeepSeek's experts, with biases if the MLPs have them; a window thins decoded tokens only
    "deepseek_ocr2_text unlimited_ocr_text": Type(
        grouped(head=SPLIT_HEAD),
        after_first(
            "(first_k_dense_replace | 1)",
            moe("num_experts", shared=N_SHARED, shared_bias="mlp_bias"),
            dense(bias="mlp_bias"),
        ),
        model=outer_tie(),
    ),
    # text and image tokens have experts of their own, and share the shared ones
    "ernie4_5_vl_moe_text": Type(
        grouped("use_bias"),
        after_first(
            1,
            both(
                moe(
                    "num_experts",
                    "num_experts_per_tok",
                    TEXT_WIDTH,
                    lambda c: c.size("moe_num_shared_experts", 0, minimum=0) * TEXT_WIDTH(c),
                    shared_bias="use_bias",
                    correction_bias=True,
                ),
                moe(
                    "num_experts",
                    "num_experts_per_tok",
                    list_entry("moe_intermediate_size", 1, 512),
                    correction_bias=True,
                ),
            ),
            dense(bias="use_bias"),
        ),
        model=outer_tie(True),
    ),
    "llama4_text": Type(
        ffn=pick(
            lambda c: (
                c.layer in c.sizes("moe_layers")
                if c.items("moe_layers") is not None
                else (c.layer + 1) % c.size("interleave_moe_layer_step", 1) == 0
            ),
            moe(LOCAL, size=WIDE, shared=WIDE),
            dense("intermediate_size_mlp"),
        ),
        order=typed(
            full_where(
                when(
                    lambda c: c.get("no_rope_layers") in (None, []),
                    "(layer_index + 1) % (no_rope_layer_interval | 4) == 0",
                    "not (no_rope_layers | 0)",
                ),
                others="chunked_attention",
            )
        ),
    ),
    "mimo_v2_flash": Type(
        grouped(
            False,
            qkv_bias="attention_bias",
            heads=in_window("num_attention_heads"),
            kv_heads=in_window("num_key_value_heads", "2 * num_key_value_heads"),
            head=in_window("head_dim"),
            v_head_dim=in_window("v_head_dim"),
            sinks=when(
                SLIDES,
                "add_swa_attention_sink_bias | True",
                "add_full_attention_sink_bias",
            ),
            window=when(
                "(sliding_window_size | 0) > 0",
                "sliding_window_size + 1",
                "sliding_window",
            ),
        ),
        sparse_where("moe_layer_freq | (layer_index > 0)", moe(LOCAL)),
        typed(
            full_where(
                "not (hybrid_layer_pattern | (layer_index > 0 and layer_index % 6 != 5))"
            )
        ),
        inert="attention_chunk_size",
    ),
    # sizes of the indexer are in an older mapping in some files
    "minimax_m3_vl_text": Type(
        by_type(
            full_attention=grouped(False, qk_norm="head"),
            minimax_m3_sparse=grouped(
                False,
                qk_norm="head",
                spec=BlockSparse,
                index_n_heads="sparse_attention_config.sparse_num_index_heads | index_n_heads",
                index_head_dim="sparse_attention_config.sparse_index_dim | index_head_dim",
                index_block_size="sparse_attention_config.sparse_block_size | index_block_size",
                index_topk_blocks=(
                    "sparse_attention_config.sparse_topk_blocks | index_topk_blocks"
                ),
            ),
        ),
        after_first(
            0,
            moe("num_experts", size=WIDE, shared="shared_intermediate_size"),
            dense("dense_intermediate_size"),
            "moe_layer_freq",
        ),
        typed(
            full_where(
                "not sparse_attention_config.sparse_attention_freq",
                others="minimax_m3_sparse",
            )
        ),
        inert=(
            "index_local_blocks sparse_local_block sparse_init_block sparse_score_type"
            " sparse_disable_index_value use_sparse_attention first_k_dense_replace"
            " moe_intermediate_size n_shared_experts qk_norm_type use_qk_norm use_gemma_norm"
            " use_routing_bias num_mtp_modules"
        ),
    ),
    # experts at a width of their own, between two norms; a gate per channel on both branches
    "muse_spark_text": Type(
        both(
            grouped(output_gate="full"),
            projections(vectors={"residual_gates": "2 * hidden_size"}),
        ),
        after_first(
            0,
            both(
                moe(LOCAL, moe_latent_size="moe_hidden_size"),
                projections(vectors={"expert_norms": "2 * moe_hidden_size"}),
            ),
        ),
        typed(full_where("(layer_count - 1 - layer_index) % 4 == 0")),
        norms=3,
        model=outer_tie(),
    ),
    "dots3_note_text": Type(
        by_type(
            full_attention=mla(),
            indexed_attention=mla(spec=Sparse),
            sliding_attention=mla(sliding_window="sliding_window | sliding_window_size | 512"),
        ),
        after_first(
            "(first_k_dense_replace | 1)",
            moe(
                LOCAL,
                shared=(
                    "(n_shared_experts | 0)"
                    " * (moe_shared_expert_intermediate_size | shared_experts_intermediate_size)"
                ),
            ),
            freq="moe_layer_freq",
        ),
        dots3_order,
    ),
    "hrm_text": Type(
        nothing,
        nothing,
        order=lambda c: ["full_attention"] * turns(c),
        norm="none",
        layer={
            "shared": both(
                grouped(
                    kv_heads="num_attention_heads",
                    output_gate="full",
                    output_gate_bias="attention_bias",
                ),
                dense(bias="mlp_bias"),
            ),
            "weight_sets": f"2 * {STACK}",
        },
        model={
            "layers": turns,
            "extra": projections(vectors={"low_start": "hidden_size"}),
        },
    ),
    "hunyuan": Type(
        both(
            grouped(
                head=HUNYUAN_HEAD,
                qk_norm=when("use_qk_norm", "head"),
                kv_projection=f"not ({BORROWS})",
            ),
            pick(
                f"{BORROWS} and use_qk_norm",
                projections(vectors={"k_norm": HUNYUAN_HEAD}),
            ),
        ),
        pick(
            "(num_experts | 1) > 1 and layer_index >= (moe_layer_num_skipped | 0)",
            moe(
                "num_experts",
                "moe_topk | 1",
                HUNYUAN_WIDTH,
                when(
                    "use_mixed_mlp_moe | True",
                    f"(num_shared_expert | 1) * {HUNYUAN_WIDTH}",
                ),
                bias="mlp_bias",
            ),
            dense(bias="mlp_bias"),
        ),
        layer={"shares_cache": BORROWS},
    ),
    # experts project queries and outputs, one kv head for each of a token's experts
    "jetmoe": Type(
        both(
            grouped(
                False,
                heads="num_key_value_heads * num_experts_per_tok",
                head="head_dim",
                qo_projection=False,
            ),
            moe(LOCAL, size="num_key_value_heads * head_dim", gated=False),
            projections(vectors={"biases": "2 * hidden_size"}),
        ),
        moe(LOCAL, size=WIDE),
    ),
    # more heads in sliding layers
    "step3p5": Type(
        grouped(
            heads=when(
                f"{SLIDES} and not per_layer_config",
                "num_sliding_attention_heads | attention_other_setting.num_attention_heads"
                " | num_attention_heads",
                "num_attention_heads",
            ),
            kv_heads="num_attention_groups",
            qk_norm="head",
            output_gate=PER_HEAD_GATE,
        ),
        pick(
            step_experts,
            moe(
                lambda c: (
                    c.get("moe_num_experts")
                    if c.in_file("moe_num_experts")
                    else c.get("num_local_experts")
                ),
                "moe_top_k",
                shared="share_expert_dims",
                shared_bias="mlp_bias",
            ),
            dense(bias="mlp_bias"),
        ),
        model=outer_tie(),
    ),
}
