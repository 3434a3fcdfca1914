"""Models with latent, sparse or compressed attention.

Sources: transformers' modelling code, and the tensors of DeepSeek-V4.1's release.
"""

from typing import Any

from kvcalc.layers.attention import LentCompressed, Sparse
from kvcalc.layers.recurrent import Engram
from kvcalc.library.huggingface.config import Config, Field, Reader, when
from kvcalc.library.huggingface.layer_types import (
    LINEAR,
    check_names,
    every,
    typed,
    uniform,
)
from kvcalc.library.huggingface.shapes import (
    after_first,
    both,
    by_type,
    compressed,
    dense,
    even_head_dim,
    grouped,
    latent,
    mixer,
    moe,
    pick,
    projections,
)
from kvcalc.library.huggingface.types.entry import Type, outer_tie
from kvcalc.library.huggingface.types.qwen import KDA
from kvcalc.units import MOST_TOKENS

SHARED = "(n_shared_experts | 0) * moe_intermediate_size"
EXPERTS = moe(shared=SHARED)
FREQUENCY = "moe_layer_freq"


def first_dense(default: int, experts: Reader = EXPERTS) -> Reader:
    """Return the reader of a dense FFN in the first layers, and experts after them."""
    return after_first(f"(first_k_dense_replace | {default})", experts, freq=FREQUENCY)


DEEPSEEK_V3 = Type(latent(), first_dense(0))
DEEPSEEK_V32 = DEEPSEEK_V3.variant(mixer=latent(spec=Sparse), ffn=first_dense(3))
LONGCAT = Type(
    both(latent(), latent()),
    both(
        dense(),
        dense(),
        moe(
            zero_experts="zero_expert_num",
            zero_expert_weights=True,
            router_bias="router_bias",
        ),
    ),
    norms=4,
    depth=lambda c: (
        c.size("num_layers") if c.in_file("num_layers") else c.size("num_hidden_layers") // 2
    ),
    layers_key="",
)


def indexer_where(offset: int, freq: int) -> Field:
    """Return the rule of layers that have an indexer of their own.

    The file lists them, or gives a pattern. Else it is each `freq`-th layer from an offset on.
    """

    def rule(c: Config) -> bool:
        kinds = c.items("indexer_types") or c.raw("index_topk_pattern")
        if not isinstance(kinds, str | list):
            skipped = c.layer - c.size("index_skip_topk_offset", offset, minimum=0) + 1
            return max(skipped, 0) % max(c.size("index_topk_freq", freq, minimum=0), 1) == 0
        if len(kinds) < c.layers or kinds[c.layer] not in ("full", "shared", "F", "S"):
            raise c.fail(
                "indexer_types",
                f"does not say for each of {c.layers} layers whether it is full or shared",
            )
        return kinds[c.layer] in ("full", "F")

    return rule


def gated_norm(name: str) -> Reader:
    """Return the reader of A.X-K2's norm, which a projection of its own output gates."""
    return projections(
        {
            f"{name}_down": "hidden_size, gated_norm_rank",
            f"{name}_up": "gated_norm_rank, hidden_size",
        }
    )


OWN_INDEXER = indexer_where(2, 1)
GLM_DSA = DEEPSEEK_V32.variant(mixer=latent(spec=Sparse, indexer=OWN_INDEXER))

# --- Mistral Large 4: no latent for queries, and every fourth layer without rotation ---


def rotates(c: Config) -> bool:
    """Return whether this layer rotates a part of its keys.

    Raises:
        UserError: Layers take their latents from other layers.
    """
    if c.has("kv_source_layers") and c.sizes("kv_source_layers") != list(range(c.layers)):
        raise c.fail(
            "kv_source_layers",
            "layers that take their latents from another layer are not read",
        )
    flags = c.items("no_rope_layers")
    if not flags:
        return (c.layer + 1) % c.size("no_rope_layer_interval", 4) != 0
    if len(flags) != c.layers:
        raise c.fail("no_rope_layers", f"has {len(flags)} entries for {c.layers} layers")
    return bool(flags[c.layer])


MISTRAL_LARGE4 = DEEPSEEK_V32.variant(
    mixer=both(
        latent(
            spec=Sparse,
            indexer=OWN_INDEXER,
            q_lora_rank=None,
            index_query_from_hidden=True,
            qk_rope_head_dim=when(rotates, "qk_rope_head_dim", 0),
            qk_nope_head_dim=when(
                rotates, "qk_nope_head_dim", "qk_nope_head_dim + qk_rope_head_dim"
            ),
        ),
        # a scale and a bias per head, and the norm before the indexer's queries
        projections(
            vectors={
                "logit_scales": "2 * num_attention_heads",
                "index_scales_and_norm": when(
                    OWN_INDEXER, "2 * (index_n_heads + hidden_size)", 0
                ),
            }
        ),
    ),
    ffn=first_dense(1),
    model=outer_tie(),
)

# --- Several residual streams ---


def streams(outputs: str, scales: int) -> Reader:
    """Return the reader of hyper-connections: one matrix over all streams before each block."""
    mix = f"hc_mult * hidden_size, {outputs}"
    return projections(
        {"mixer_streams": mix, "ffn_streams": mix},
        {"stream_scales": f"2 * ({outputs} + {scales})"},
    )


MIXED = streams("(2 + hc_mult) * hc_mult", 3)
STREAM_HEAD: dict[str, Field] = {
    "extra": projections(
        {"stream_head": "hc_mult * hidden_size, hc_mult"},
        {"stream_head_scales": "hc_mult + 1"},
    )
}
GLM5_MIXED = pick("mhc | True", MIXED)
GLM5_SPARSE = both(
    latent(spec=Sparse, indexer=OWN_INDEXER, index_pool="index_kpool"), GLM5_MIXED
)


def glm5_order(c: Config) -> list[str]:
    """Return the listed types, else each fourth layer sparse; lists of layers must agree."""
    names = typed(every(4, "indexed_attention", LINEAR))(c)
    inside = c.nested("linear_attn_config")
    for key, is_linear in (("kda_layers", True), ("full_attn_layers", False)):
        layers = [i for i, name in enumerate(names) if (name == LINEAR) is is_linear]
        if inside.has(key) and inside.sizes(key) != layers:
            raise c.fail(f"linear_attn_config.{key}", "names other layers than layer_types")
    return names


# --- DeepSeek-V4: compressed attention ---

CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
RATIO_TYPES = {0: "sliding_attention", 4: CSA, 128: HCA}


def v4_order(c: Config) -> list[str]:
    """Return the listed types, or those of older ratios; else two HCA layers, then CSA and HCA."""
    names: list[Any] | None = c.items("layer_types")
    if names is None and c.items("compress_ratios") is not None:
        names = [RATIO_TYPES.get(ratio, str(ratio)) for ratio in c.sizes("compress_ratios")]
    if names is None:
        names = [CSA if i > 1 and i % 2 else HCA for i in range(c.layers)]
    if len(names) < c.layers:
        raise c.fail("layer_types", f"has {len(names)} entries for {c.layers} layers")
    names = names[: c.layers]
    check_names(c, "layer_types", names, RATIO_TYPES.values())
    return names


def v4_ratio(c: Config) -> int:
    """Return the tokens of one compressed entry."""
    older = {CSA: ("compress_rate_csa", 4), HCA: ("compress_rate_hca", 128)}
    if c.layer_type not in older:
        return 0
    key, default = older[c.layer_type]
    return c.size(key, c.nested("compress_rates").size(c.layer_type, default))


def v4_rotated(c: Config) -> int:
    """Return the rotated elements of a head: a share of it, or a number in older files."""
    if c.has("partial_rotary_factor"):
        return int(c.size("head_dim") * c.number("partial_rotary_factor"))
    return c.size("qk_rope_head_dim", c.size("head_dim") // 8)


def index_fields(condition: Field) -> dict[str, Field]:
    """Return the sizes of the indexer, in the layers that have one."""
    keys = ("index_topk", "index_n_heads", "index_head_dim")
    return {key: when(condition, key, 0) for key in keys}


IS_CSA = "layer_type == 'compressed_sparse_attention'"
DEEPSEEK_V4 = Type(
    both(
        compressed(
            qk_rope_head_dim=v4_rotated,
            compress_ratio=v4_ratio,
            overlap=IS_CSA,
            **index_fields(IS_CSA),
        ),
        MIXED,
    ),
    moe(shared="moe_intermediate_size", shared_bias="mlp_bias"),
    v4_order,
    model=STREAM_HEAD,
    inert="num_hash_layers",  # their experts stand in a table of whole numbers, by token
)

# --- DeepSeek-V4.1: few layers store compressed rows for all, memories of n-grams ---


def v41_ratio(c: Config) -> int:
    """Return the tokens of one compressed entry. The list goes on with prediction layers."""
    ratios = c.sizes("compress_ratios")
    if len(ratios) < c.layers:
        raise c.fail("compress_ratios", f"has {len(ratios)} entries for {c.layers} layers")
    return ratios[c.layer]


def is_source(key: str) -> Field:
    """Return the rule of layers that the file lists. No layer may compress before the first."""

    def rule(c: Config) -> bool:
        sources = c.sizes(key)
        if v41_ratio(c) and not any(source <= c.layer for source in sources):
            raise c.fail(key, f"names no layer up to layer {c.layer}, which compresses")
        return c.layer in sources

    return rule


def engram_rows(c: Config) -> int:
    """Return the rows of this layer's table of n-grams; 0 if it has none."""
    layers, rows = c.sizes("engram_layer_ids"), c.items("engram_num_embeddings") or []
    are_sizes = all(type(n) is int and 0 < n <= MOST_TOKENS for n in rows)
    if len(layers) != len(rows) or not are_sizes:
        raise c.fail("engram_num_embeddings", f"does not give the rows of {len(layers)} layers")
    return rows[layers.index(c.layer)] if c.layer in layers else 0


DEEPSEEK_V41 = DEEPSEEK_V4.variant(
    mixer=both(
        compressed(
            spec=LentCompressed,
            qk_rope_head_dim=v4_rotated,
            compress_ratio=v41_ratio,
            lends=is_source("kv_source_layer_ids"),
            chooses=is_source("index_source_layer_ids"),
            # a query scores only the entries of the blocks that an earlier layer has marked
            index_candidates=(
                "(candidate_topk_blocks | 0) * (candidate_block_size | 0)"
                " if layer_index > (candidate_source_layer_id | layer_count)"
                " and layer_index in index_source_layer_ids else 0"
            ),
            **index_fields(lambda c: v41_ratio(c) > 0),
        ),
        pick(
            lambda c: engram_rows(c) > 0,
            mixer(
                Engram,
                table_rows=engram_rows,
                table_width="engram_head_dim",
                hashes="(engram_max_ngram_size - 1) * engram_n_heads",
                streams="hc_mult",
            ),
        ),
        MIXED,
    ),
    ffn=EXPERTS,
    order=uniform("compressed"),
    model={"extra": ()},
    mtp=False,  # DSpark's: windows, fewer experts, and heads of their own
    inert=(
        "engram_vocab_size engram_compressed_vocab_size engram_pad_token_id hc_sinkhorn_iters"
        " dspark_block_size dspark_markov_rank dspark_n_routed_experts dspark_num_experts_per_tok"
    ),
)

TYPES = {
    # its smallest has keys and values per head in place of latents
    "deepseek_v2": DEEPSEEK_V3.variant(
        mixer=pick("use_mla | True", latent(), grouped(head=even_head_dim)),
        inert="lm_head rm_head",
        ffn=after_first(
            "(first_k_dense_replace | 0)",
            moe(shared=SHARED, shared_bias="mlp_bias"),
            dense(bias="mlp_bias"),
            FREQUENCY,
        ),
    ),
    "deepseek_v3 mistral4": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
    "glm4_moe_lite": DEEPSEEK_V3.variant(ffn=first_dense(1)),
    "glm_moe_dsa": GLM_DSA,
    "glm5_next_text": GLM_DSA.variant(
        mixer=by_type(
            linear_attention=both(KDA, GLM5_MIXED),
            indexed_attention=GLM5_SPARSE,
            full_attention=GLM5_SPARSE,
        ),
        order=glm5_order,
        model=outer_tie(),
        inert="mla_use_nope",  # positions rotate nothing: qk_rope_head_dim is 0
    ),
    "hy_v4": GLM_DSA.variant(
        mixer=both(
            latent(spec=Sparse, indexer=indexer_where(2, 4), output_gate="full", sinks=True),
            streams("2 * hc_mult", 2),
        ),
        ffn=first_dense(1),
        model=STREAM_HEAD,
    ),
    "axk1": DEEPSEEK_V3.variant(
        ffn=first_dense(1, both(EXPERTS, projections(vectors={"experts_norm": "hidden_size"})))
    ),
    "axk2": DEEPSEEK_V32.variant(
        mixer=both(
            latent(spec=Sparse, q_up_size="2 * q_lora_rank", output_gate="full"),
            gated_norm("mixer_norm"),
        ),
        ffn=first_dense(1, both(EXPERTS, gated_norm("ffn_norm"))),
    ),
    "longcat_flash": LONGCAT,
    "minicpm3": Type(
        latent(v_head_dim="v_head_dim | hidden_size // num_attention_heads"),
        dense(bias="mlp_bias"),
    ),
    "mistral_large4_text": MISTRAL_LARGE4,
    "youtu": Type(latent()),
    "deepseek_v4": DEEPSEEK_V4,
    "deepseek_v41_text": DEEPSEEK_V41,
}
