"""Layers that share or repeat: experts that project queries, stacks run several times, caches shared by neighbours.

After transformers' modelling code; `hunyuan` after the code that Tencent published with Hunyuan-Large.
"""

from typing import Any

from kvcalc.layers.attention import Sparse
from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import Field, K, Reader, when
from kvcalc.library.huggingface.patterns import after_first, by_type, pick, slides, typed
from kvcalc.library.huggingface.shapes import both, dense, grouped, latent, moe, projections
from kvcalc.library.huggingface.types.entry import Type, outer_tie
from kvcalc.library.huggingface.types.experts import BIAS, LOCAL, PER_HEAD_GATE, WIDE, split_head

MOST_LAYERS = 10_000


# --- JetMoE: experts project queries and outputs, one kv head for each of a token's experts ---

JETMOE = Type(
    both(
        grouped(
            heads=lambda c: c.size("num_key_value_heads") * c.size("num_experts_per_tok"),
            head=K("head_dim"),
            qo_projection=False,
        ),
        moe(LOCAL, size=lambda c: c.size("num_key_value_heads") * c.size("head_dim"), gated=False),
        projections(vectors=lambda c: {"biases": 2 * c.size("hidden_size")}),
    ),
    moe(LOCAL, size=WIDE),
)

# --- HRM: two stacks of layers run in turns, every turn with a cache of its own ---


def turns(c: Config) -> int:
    """Layers as they run: each of H_cycles rounds takes the low stack L_cycles times and the high one once."""
    found = stack(c) * c.size("H_cycles") * (c.size("L_cycles") + 1)
    if found > MOST_LAYERS:
        raise c.fail("H_cycles", f"gives {found:,} layers")
    return found


def stack(c: Config) -> int:
    """Layers of one stack; older files call them num_hidden_layers."""
    return c.size("num_layers_per_stack" if c.has("num_layers_per_stack") else "num_hidden_layers")


HRM_PARTS = both(
    grouped(BIAS, kv_heads=K("num_attention_heads"), output_gate="full", output_gate_bias=BIAS),
    dense(bias=K("mlp_bias")),
)
HRM = Type(
    both(),
    order=lambda c: ["full_attention"] * turns(c),
    norm="none",
    layer={"shared": HRM_PARTS, "weight_sets": lambda c: 2 * stack(c)},
    model={"layers": turns, "extra": projections(vectors=lambda c: {"low_start": c.size("hidden_size")})},
)

# --- dots3: MLA with a window, or with an indexer ---


def own(key: str, default: int | None = None) -> Field:
    """A sliding layer's size: of `per_layer_config`, else `swa_`-`key`, else a default; the plain key elsewhere."""

    def read(c: Config) -> int:
        return c.size(f"swa_{key}", default) if slides(c) and not c.has("per_layer_config") else c.size(key)

    return read


NOPE = own("qk_nope_head_dim", 192)


def rope(c: Config) -> int:
    """The rest of a sliding layer's head_dim, unless the file says otherwise."""
    return int(own("qk_rope_head_dim", max(1, c.size("swa_head_dim", 256) - NOPE(c)))(c))


def mla(spec_fields: dict[str, Any]) -> Reader:
    """dots3's MLA: a norm on the rope key and a gate per head besides."""
    heads = own("num_attention_heads", 64)
    ranks = {key: own(key, 1024) for key in ("q_lora_rank", "kv_lora_rank")}
    widths = {"qk_nope_head_dim": NOPE, "qk_rope_head_dim": rope, "v_head_dim": own("v_head_dim", 128)}
    return both(
        latent(BIAS, num_attention_heads=heads, **ranks, **widths, **spec_fields),
        projections(
            lambda c: {"gate": (c.size("hidden_size"), heads(c))},
            lambda c: {"rope_key_norm": rope(c)},
        ),
    )


def dots3_order(c: Config) -> list[str]:
    """The file's list, or windows but for layers 0, 1, 5, 9 …; `use_dsa` says whether full layers have an indexer."""
    windows = c.flag("use_sliding_window", True)
    plain = ["sliding_attention" if windows and i > 1 and i % 4 != 1 else "full_attention" for i in range(c.layers)]
    found = typed(lambda _: plain)(c)
    if c.get("use_dsa") is None and c.has("per_layer_config"):
        return found
    full = "indexed_attention" if c.flag("use_dsa", True) else "full_attention"
    return [kind if kind == "sliding_attention" else full for kind in found]


DOTS3 = Type(
    by_type(
        full_attention=mla({}),
        indexed_attention=mla({"spec": Sparse}),
        sliding_attention=mla({"sliding_window": K("sliding_window", "sliding_window_size", default=512)}),
    ),
    after_first(
        lambda c: c.size("first_k_dense_replace", 1, least=0),
        moe(
            LOCAL,
            shared=lambda c: (
                c.size("n_shared_experts", 0, least=0)
                * (
                    c.size("moe_shared_expert_intermediate_size")
                    if c.has("moe_shared_expert_intermediate_size")
                    else c.size("shared_experts_intermediate_size")
                )
            ),
        ),
        dense(),
    ),
    dots3_order,
)

# --- Step: more heads in sliding layers; the dense layers are named by what they are not ---


def step_heads(c: Config) -> int:
    """Heads of this layer."""
    if not slides(c) or c.has("per_layer_config"):
        return c.size("num_attention_heads")
    if c.has("num_sliding_attention_heads"):
        return c.size("num_sliding_attention_heads")
    return c.nested("attention_other_setting").size("num_attention_heads", c.size("num_attention_heads"))


def spelled(*keys: str) -> Field:
    """The first of `keys` that the file itself gives; the last one's default otherwise."""
    return lambda c: next((c.get(key) for key in keys if c.in_file(key)), c.get(keys[-1]))


def step_experts(c: Config) -> bool:
    """Whether this layer has experts: `moe_layers_enum` lists the numbers of those that do, as a list or as a text."""
    if (kinds := c.items("mlp_layer_types")) is not None and c.layer < len(kinds):
        return bool(kinds[c.layer] == "sparse")
    given = c.get("moe_layers_enum")
    if given is None:
        return c.layer >= 3
    items = given.split(",") if isinstance(given, str) else c.items("moe_layers_enum") or []
    return str(c.layer) in {str(item).strip() for item in items}


STEP = Type(
    grouped(BIAS, heads=step_heads, kv_heads=K("num_attention_groups"), qk_norm="head", output_gate=PER_HEAD_GATE),
    pick(
        step_experts,
        moe(
            spelled("moe_num_experts", "num_local_experts"),
            spelled("moe_top_k"),
            shared=spelled("share_expert_dims"),
            shared_bias=K("mlp_bias"),
        ),
        dense(bias=K("mlp_bias")),
    ),
    model=outer_tie(),
)

# --- Hunyuan-Large: of cla_share_factor neighbours the first projects keys and values for all ---


def borrows(c: Config) -> bool:
    """Whether this layer reads the keys and values of one before it."""
    return c.flag("use_cla") and c.layer % c.size("cla_share_factor", 1) != 0


HUNYUAN_HEAD = K("attention_head_dim", "head_dim", default=split_head)


def hunyuan_width(c: Config) -> int:
    """The width of one expert."""
    return c.size("moe_intermediate_size" if c.has("moe_intermediate_size") else "intermediate_size")


HUNYUAN = Type(
    both(
        grouped(
            BIAS,
            head=HUNYUAN_HEAD,
            qk_norm=when(K("use_qk_norm"), "head"),
            kv_projection=lambda c: not borrows(c),
        ),
        pick(
            lambda c: borrows(c) and c.flag("use_qk_norm"),
            projections(vectors=lambda c: {"k_norm": HUNYUAN_HEAD(c)}),
            both(),
        ),
    ),
    pick(
        lambda c: c.size("num_experts", 1) > 1 and c.layer >= c.size("moe_layer_num_skipped", 0, least=0),
        moe(
            K("num_experts"),
            K("moe_topk", default=1),
            hunyuan_width,
            shared=when(
                K("use_mixed_mlp_moe", default=True),
                lambda c: c.size("num_shared_expert", 1, least=0) * hunyuan_width(c),
            ),
            bias=K("mlp_bias"),
        ),
        dense(bias=K("mlp_bias")),
    ),
    layer={"shares_cache": borrows},
)

TYPES = {
    "dots3_note_text": DOTS3,
    "hrm_text": HRM,
    "hunyuan": HUNYUAN,
    "jetmoe": JETMOE,
    "step3p5": STEP,
}
