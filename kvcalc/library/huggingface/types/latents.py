"""Models with latent or sparse attention, after transformers' modelling code."""

from kvcalc.layers.attention import Sparse
from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import Field, K, Reader
from kvcalc.library.huggingface.patterns import LINEAR, after_first, by_type, every, pick, typed
from kvcalc.library.huggingface.shapes import (
    both,
    dense,
    even_head_dim,
    grouped,
    latent,
    moe,
    nothing,
    projections,
    shared_experts,
)
from kvcalc.library.huggingface.types.entry import Type, outer_tie
from kvcalc.library.huggingface.types.linear import KDA

BIAS = K("attention_bias")
EXPERTS = moe(shared=shared_experts())


def first_dense(default: int, experts: Reader = EXPERTS) -> Reader:
    """A dense FFN in the first layers, experts from there on."""
    return after_first(lambda c: c.size("first_k_dense_replace", default, least=0), experts, dense())


DEEPSEEK_V3 = Type(latent(BIAS), first_dense(0))


def plain(c: Config) -> bool:
    """Whether DeepSeek-VL2's smallest has keys and values per head in place of latents."""
    return not c.flag("use_mla", True)


DEEPSEEK_V2 = DEEPSEEK_V3.variant(
    mixer=pick(plain, grouped(BIAS, head=even_head_dim), latent(BIAS)),
    inert=("lm_head", "rm_head"),
    ffn=after_first("first_k_dense_replace", moe(shared=shared_experts(), shared_bias=K("mlp_bias")), dense(bias=K("mlp_bias"))),
)
DEEPSEEK_V32 = DEEPSEEK_V3.variant(mixer=latent(BIAS, spec=Sparse), ffn=first_dense(3))
MINICPM3 = Type(
    latent(BIAS, v_head_dim=lambda c: c.size("v_head_dim", c.size("hidden_size") // c.size("num_attention_heads"))),
    dense(bias=K("mlp_bias")),
)
AXK1 = DEEPSEEK_V3.variant(
    ffn=first_dense(1, both(EXPERTS, projections(vectors=lambda c: {"experts_norm": c.size("hidden_size")})))
)
LONGCAT = Type(
    both(latent(BIAS), latent(BIAS)),
    both(
        dense(),
        dense(),
        moe(zero_experts=K("zero_expert_num"), zero_expert_weights=True, router_bias=K("router_bias")),
    ),
    norms=4,
    depth=lambda c: c.size("num_layers") if c.in_file("num_layers") else c.size("num_hidden_layers") // 2,
    layers_key="",
)

# --- Indexers, in all layers or in some ---


def shared_choice(offset: int, freq: int) -> Field:
    """Whether this layer chooses for itself: the file's list or pattern, else every freq-th from an offset on."""

    def rule(c: Config) -> bool:
        kinds = c.items("indexer_types")
        if kinds is None:
            pattern = c.get("index_topk_pattern")
            kinds = list(pattern) if isinstance(pattern, str | list) else None
        if kinds is None:
            skipped = c.layer - c.size("index_skip_topk_offset", offset, least=0) + 1
            return max(skipped, 0) % max(c.size("index_topk_freq", freq, least=0), 1) == 0
        if len(kinds) < c.layers or kinds[c.layer] not in ("full", "shared", "F", "S"):
            raise c.fail("indexer_types", f"does not say for each of {c.layers} layers whether it is full or shared")
        return kinds[c.layer] in ("full", "F")

    return rule


def gated_norm(name: str) -> Reader:
    """A.X-K2's norm, which a low-rank projection of its own output gates."""
    width, rank = "hidden_size", "gated_norm_rank"
    return projections(lambda c: {f"{name}_down": (c.size(width), c.size(rank)), f"{name}_up": (c.size(rank), c.size(width))})


DSA = latent(BIAS, spec=Sparse, indexer=shared_choice(2, 1))
GLM_DSA = DEEPSEEK_V32.variant(mixer=DSA)
AXK2 = DEEPSEEK_V32.variant(
    mixer=both(
        latent(BIAS, spec=Sparse, q_up_size=lambda c: 2 * c.size("q_lora_rank"), output_gate="full"),
        gated_norm("mixer_norm"),
    ),
    ffn=first_dense(1, both(EXPERTS, gated_norm("ffn_norm"))),
)

# --- Mistral Large 4: no latent for queries, and every fourth layer without rotation ---

OWN_CHOICE = shared_choice(2, 1)


def rotates(c: Config) -> bool:
    """Whether this layer rotates a part of its keys. Raises UserError where layers take their latents from others."""
    if c.has("kv_source_layers") and c.sizes("kv_source_layers") != list(range(c.layers)):
        raise c.fail("kv_source_layers", "layers that take their latents from another layer are not read")
    flags = c.items("no_rope_layers")
    if flags is not None and len(flags) != c.layers:
        raise c.fail("no_rope_layers", f"has {len(flags)} entries for {c.layers} layers")
    return bool(flags[c.layer]) if flags else (c.layer + 1) % c.size("no_rope_layer_interval", 4) != 0


def logit_scales(c: Config) -> dict[str, int]:
    """A scale and a bias per head, of attention and of the indexer, and the norm before the latter's queries."""
    index = 2 * (c.size("index_n_heads") + c.size("hidden_size")) if OWN_CHOICE(c) else 0
    return {"logit_scales": 2 * c.size("num_attention_heads"), "index_scales_and_norm": index}


MISTRAL_LARGE4 = DEEPSEEK_V32.variant(
    mixer=both(
        latent(
            BIAS,
            spec=Sparse,
            indexer=OWN_CHOICE,
            q_lora_rank=None,
            index_query_from_hidden=True,
            qk_rope_head_dim=lambda c: c.size("qk_rope_head_dim") if rotates(c) else 0,
            qk_nope_head_dim=lambda c: c.size("qk_nope_head_dim") + (0 if rotates(c) else c.size("qk_rope_head_dim")),
        ),
        projections(vectors=logit_scales),
    ),
    ffn=first_dense(1),
    model=outer_tie(),
)

# --- Several residual streams ---


def streams(outputs: Field, scales: int) -> Reader:
    """Hyper-connections: before each of the two blocks, one matrix over all hc_mult streams says how to mix them."""

    def mix(c: Config) -> tuple[int, int]:
        return c.size("hc_mult") * c.size("hidden_size"), outputs(c)

    return projections(
        lambda c: {"mixer_streams": mix(c), "ffn_streams": mix(c)},
        lambda c: {"stream_scales": 2 * (outputs(c) + scales)},
    )


MIXED = streams(lambda c: (2 + c.size("hc_mult")) * c.size("hc_mult"), 3)
STREAM_HEAD: dict[str, Field] = {
    "extra": projections(
        lambda c: {"stream_head": (c.size("hc_mult") * c.size("hidden_size"), c.size("hc_mult"))},
        lambda c: {"stream_head_scales": c.size("hc_mult") + 1},
    )
}
HY_V4 = GLM_DSA.variant(
    mixer=both(
        latent(BIAS, spec=Sparse, indexer=shared_choice(2, 4), output_gate="full", sinks=True),
        streams(lambda c: 2 * c.size("hc_mult"), 2),
    ),
    ffn=first_dense(1),
    model=STREAM_HEAD,
)
GLM5_MIXED = pick(lambda c: c.flag("mhc", True), MIXED, nothing)
GLM5_NEXT_SPARSE = both(latent(BIAS, spec=Sparse, indexer=shared_choice(2, 1), index_pool=K("index_kpool")), GLM5_MIXED)


def glm5_order(c: Config) -> list[str]:
    """Types, else every fourth layer sparse; lists of layers, counted from 0, say the same again."""
    found = typed(every(4, "indexed_attention", LINEAR))(c)
    inside = c.nested("linear_attn_config")
    for key, linear in (("kda_layers", True), ("full_attn_layers", False)):
        if inside.has(key) and inside.sizes(key) != [i for i, kind in enumerate(found) if (kind == LINEAR) is linear]:
            raise c.fail(f"linear_attn_config.{key}", "names other layers than layer_types")
    return found


GLM5_NEXT = GLM_DSA.variant(
    mixer=by_type(
        linear_attention=both(KDA, GLM5_MIXED),
        indexed_attention=GLM5_NEXT_SPARSE,
        full_attention=GLM5_NEXT_SPARSE,
    ),
    ffn=first_dense(3),
    order=glm5_order,
    model=outer_tie(),
    inert=("mla_use_nope",),  # positions rotate nothing: qk_rope_head_dim is 0
)

TYPES = {
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
    "glm4_moe_lite": DEEPSEEK_V3.variant(ffn=first_dense(1)),
    "glm_moe_dsa": GLM_DSA,
    "glm5_next_text": GLM5_NEXT,
    "hy_v4": HY_V4,
    "axk1": AXK1,
    "axk2": AXK2,
    "longcat_flash": LONGCAT,
    "minicpm3": MINICPM3,
    "mistral4": DEEPSEEK_V3,
    "mistral_large4_text": MISTRAL_LARGE4,
    "youtu": Type(latent(BIAS), dense()),
}
