"""Models whose layers recur, alone or beside attention, after transformers' modelling code."""

from math import ceil

from kvcalc.layers.recurrent import Mamba, Mamba2
from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.fields import Field, K, Reader
from kvcalc.library.huggingface.patterns import FULL, LINEAR, Order, by_type, every, pick, typed, uniform
from kvcalc.library.huggingface.shapes import both, dense, grouped, mixer, moe, projections, state_dtype
from kvcalc.library.huggingface.types.entry import Type

BIAS = K("attention_bias")
HYBRID = "hybrid"  # a recurrent layer with attention beside it or before it
STATE = state_dtype("mamba_ssm_cache_dtype", "mamba_ssm_dtype")


def automatic(key: str, rule: Field) -> Field:
    """A whole number, or what the rule makes of `auto` (or of nothing)."""
    return lambda c: rule(c) if c.get(key) in (None, "auto") else c.size(key)


def expanded(key: str) -> Field:
    """Hidden size times a whole factor."""
    return lambda c: c.size(key) * c.size("hidden_size")


def per_head(inner: Field, heads: str) -> Field:
    """The width of one of `heads` heads of `inner` channels in all."""
    return lambda c: inner(c) // c.size(heads)


def attends(key: str, others: str = LINEAR) -> Order:
    """Full attention in the layers that a list names, counted from 0, `others` elsewhere."""

    def order(c: Config) -> list[str]:
        named = set(c.sizes(key))
        return [FULL if i in named else others for i in range(c.layers)]

    return order


EXPANDED = expanded("mamba_expand")
STEP = automatic("mamba_dt_rank", lambda c: ceil(c.size("hidden_size") / 16))

# --- Mamba and Mamba-2 ---

MAMBA1 = {"conv_bias": K("use_conv_bias"), "proj_bias": K("use_bias"), "state_dtype": STATE}
MAMBA = Type(
    mixer(
        Mamba,
        intermediate_size=lambda c: c.size("intermediate_size", expanded("expand")(c)),
        state_size=K("state_size"),
        time_step_rank=automatic("time_step_rank", lambda c: ceil(c.size("hidden_size") / 16)),
        conv_kernel=K("conv_kernel"),
        **MAMBA1,
    ),
    norms=1,
)
MAMBA2 = Type(
    mixer(
        Mamba2,
        num_heads=K("num_heads"), head_dim=K("head_dim"), state_size=K("state_size"), n_groups=K("n_groups"),
        conv_kernel=K("conv_kernel"), **MAMBA1,
    ),
    norms=1,
)  # fmt: skip


def inner_mamba(**fields: Field) -> Reader:
    """Mamba under the keys of a hybrid."""
    keys = {
        "intermediate_size": EXPANDED, "state_size": K("mamba_d_state"), "conv_kernel": K("mamba_d_conv"),
        "time_step_rank": STEP, "conv_bias": K("mamba_conv_bias"), "proj_bias": K("mamba_proj_bias"),
        "state_dtype": STATE,
    }  # fmt: skip
    return mixer(Mamba, **(keys | fields))


def inner_mamba2(inner: Field = EXPANDED, **fields: Field) -> Reader:
    """Mamba-2 under the keys of a hybrid, `inner` channels wide."""
    keys = {
        "num_heads": K("mamba_n_heads"), "head_dim": automatic("mamba_d_head", per_head(inner, "mamba_n_heads")),
        "state_size": K("mamba_d_state"), "n_groups": K("mamba_n_groups"), "conv_kernel": K("mamba_d_conv"),
        "conv_bias": K("mamba_conv_bias"), "proj_bias": K("mamba_proj_bias"), "state_dtype": STATE,
    }  # fmt: skip
    return mixer(Mamba2, **(keys | fields))


BAMBA = Type(
    by_type(full_attention=grouped(BIAS), linear_attention=inner_mamba2()),
    dense(bias=K("mlp_bias")),
    attends("attn_layer_indices"),
)
GRANITE_HYBRID = BAMBA.variant(
    ffn=pick(
        lambda c: c.size("num_local_experts", 0, least=0) > 0,
        moe(K("num_local_experts"), size=K("intermediate_size"), shared=K("shared_intermediate_size")),
        dense(K("shared_intermediate_size")),
    ),
    order=lambda c: (typed(key="layers_block_type") if c.in_file("layers_block_type") else uniform(LINEAR))(c),
)
FALCON_H1 = Type(
    both(
        grouped(BIAS),
        inner_mamba2(
            lambda c: c.size("mamba_d_ssm", EXPANDED(c)),
            gate_norm=K("mamba_rms_norm"),
            out_bias=K("projectors_bias"),
        ),
    ),
    dense(bias=K("mlp_bias")),
    uniform(HYBRID),
)
JAMBA = Type(
    by_type(full_attention=grouped(), linear_attention=inner_mamba(inner_norms=True)),
    pick(
        lambda c: c.size("num_experts") > 1 and c.layer % c.size("expert_layer_period") == c.size("expert_layer_offset", least=0),
        moe(K("num_experts"), size=K("intermediate_size")),
        dense(),
    ),
    every(K("attn_layer_period"), others=LINEAR, offset=lambda c: -c.size("attn_layer_offset", least=0)),
)

# --- Nemotron-H: a mixer or an FFN a layer ---

LETTERS = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}


def lettered(c: Config) -> list[str]:
    """One letter a layer; transformers' own default is one layer of each, whatever num_hidden_layers says."""
    return [LETTERS.get(letter, letter) for letter in c.word("hybrid_override_pattern", "ME*-")]


def listed(c: Config) -> int:
    """How many layers the file lists, if it says anything about them."""
    said = any(map(c.in_file, ("layer_types", "hybrid_override_pattern", "num_hidden_layers")))
    return len(c.items("layer_types") or lettered(c)) if said else 0


NEMOTRON_H = Type(
    by_type(
        full_attention=grouped(),
        linear_attention=inner_mamba2(
            num_heads=K("mamba_num_heads"), head_dim=K("mamba_head_dim"), state_size=K("ssm_state_size"),
            n_groups=K("mamba_n_groups", "n_groups"), conv_kernel=K("mamba_d_conv", "conv_kernel"),
            conv_bias=K("mamba_conv_bias", "use_conv_bias"), proj_bias=K("use_bias"),
        ),
        mlp=dense(gated=False, bias=K("mlp_bias")),
        moe=moe(
            K("n_routed_experts", "num_local_experts"), size=K("moe_intermediate_size"), gated=False,
            shared=lambda c: c.size("moe_shared_expert_intermediate_size", least=0) or c.size("intermediate_size"),
            shared_bias=K("mlp_bias"), moe_latent_size=K("moe_latent_size"), latent_bias=K("mlp_bias"),
        ),
    ),
    order=typed(lettered),
    norms=1,
    depth=listed,
    layers_key="",
    spellings={"head_dim": ("attention_head_dim",)},
    model={"tie_word_embeddings": False},
    inert=("time_step_rank", "tie_word_embeddings"),
)  # fmt: skip

# --- Zamba: attention and an FFN shared by the hybrid layers, over the stream and the embeddings side by side ---


def doubled(key: str) -> Field:
    """A width that is twice the residual stream's unless given."""
    return lambda c: c.size(key, 2 * c.size("hidden_size"))


def shared_block(bias: Field = False) -> Field:
    """The shared block, in hybrid layers."""
    wide = doubled("attention_hidden_size")
    block = both(
        grouped(input_size=wide, head=lambda c: c.size("attention_head_dim", wide(c) // c.size("num_attention_heads"))),
        dense(lambda c: c.size("intermediate_size", 4 * c.size("hidden_size")), bias=bias),
        projections(vectors=lambda c: {"shared_norms": wide(c) + c.size("hidden_size")}),
    )
    return lambda c: block(c) if c.layer_type == HYBRID else None


def adapters(c: Config) -> dict[str, tuple[int, int]]:
    """What each hybrid layer has of its own: the way back into the stream, and Zamba2's low-rank adapters."""
    hidden, wide = c.size("hidden_size"), doubled("attention_hidden_size")(c)
    found = {"shared_out": (hidden, hidden)}
    if c.has("adapter_rank"):
        rank = c.size("adapter_rank")
        pairs = {"gate_up": (hidden, 2 * c.size("intermediate_size", 4 * hidden))}
        if c.flag("use_shared_attention_adapter"):
            pairs |= dict.fromkeys("qkv", (wide, wide))
        for name, (inputs, outputs) in pairs.items():
            found |= {f"{name}_adapter_down": (inputs, rank), f"{name}_adapter_up": (rank, outputs)}
    return found


def beside_shared(mamba: Reader) -> Reader:
    """A recurrence in every layer, and in hybrid ones what joins the shared block."""
    return by_type(linear_attention=mamba, hybrid=both(mamba, projections(adapters)))


def zamba2_order(c: Config) -> list[str]:
    """Zamba2's own order, which transformers gives to any file without one; it has 54 layers."""
    at = (6, 12, 18, 24, 30, 36, 42, 47, 51)
    if c.layers != 54:
        raise c.fail("layers_block_type", f"is missing, and there are {c.layers} layers rather than 54")
    return [HYBRID if i in at else LINEAR for i in range(c.layers)]


def zamba_order(c: Config) -> list[str]:
    """The third layer is hybrid, and then one in every period, counted from the fourth."""
    period, offset = c.size("attn_layer_period"), c.size("attn_layer_offset", least=0)
    return [HYBRID if i == 2 or (i > 2 and (i - 3) % period == offset) else LINEAR for i in range(c.layers)]


ZAMBA = Type(
    beside_shared(inner_mamba(n_mamba_heads=K("n_mamba_heads"))),
    order=typed(zamba_order),
    norms=1,
    layer={"shared": shared_block()},
)


def zamba2_heads(c: Config) -> int:
    """Heads of a Mamba-2 layer, of which transformers derives the width; older files give only that."""
    given, inner = not c.in_file("n_mamba_heads") and c.has("mamba_headdim"), EXPANDED(c)
    heads = inner // c.size("mamba_headdim") if given else c.size("n_mamba_heads")
    if not 1 <= heads <= inner:
        raise c.fail("mamba_headdim" if given else "n_mamba_heads", f"leaves {heads} heads in {inner} channels")
    return heads


ZAMBA2 = ZAMBA.variant(
    mixer=beside_shared(
        inner_mamba2(
            num_heads=zamba2_heads, head_dim=lambda c: EXPANDED(c) // zamba2_heads(c),
            n_groups=K("mamba_ngroups"), conv_bias=True, proj_bias=K("add_bias_linear"),
        )
    ),
    order=typed(zamba2_order),
    layer={"shared": shared_block(K("add_bias_linear")), "weight_sets": lambda c: c.size("num_mem_blocks")},
)  # fmt: skip

TYPES = {
    "mamba": MAMBA,
    "falcon_mamba": MAMBA,
    "mamba2": MAMBA2,
    "bamba": BAMBA,
    "granitemoehybrid": GRANITE_HYBRID,
    "falcon_h1": FALCON_H1,
    "jamba": JAMBA,
    "nemotron_h": NEMOTRON_H,
    "zamba": ZAMBA,
    "zamba2": ZAMBA2,
}
