"""Models with recurrent layers, with or without attention.

Source: transformers' modelling code.
"""

from kvcalc.layers.recurrent import Mamba, Mamba2
from kvcalc.library.huggingface.config import Config, Field, Reader
from kvcalc.library.huggingface.layer_types import (
    FULL,
    LINEAR,
    full_where,
    typed,
    uniform,
)
from kvcalc.library.huggingface.shapes import (
    attention_or,
    both,
    by_type,
    dense,
    grouped,
    mixer,
    moe,
    nothing,
    pick,
    projections,
    state_dtype,
)
from kvcalc.library.huggingface.types.entry import Type

HYBRID = "hybrid"  # a recurrent layer with attention beside it or before it
STATE = state_dtype("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
EXPANDED = "mamba_expand * hidden_size"


def automatic(key: str, otherwise: str) -> Field:
    """Return the rule of a size: the formula `otherwise` if the key is missing or `auto`."""
    return f"{otherwise} if ({key} | 'auto') == 'auto' else {key}"


def step_rank(key: str) -> Field:
    """Return the rule of the rank of a time step."""
    return automatic(key, "(hidden_size + 15) // 16")


# --- Mamba and Mamba-2 ---

MAMBA1 = {"conv_bias": "use_conv_bias", "proj_bias": "use_bias", "state_dtype": STATE}
INNER = {
    "state_size": "mamba_d_state",
    "conv_kernel": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
    "proj_bias": "mamba_proj_bias",
    "state_dtype": STATE,
}


def inner_mamba(**fields: Field) -> Reader:
    """Return the reader of Mamba under the keys of a hybrid."""
    sizes = {
        "intermediate_size": EXPANDED,
        "time_step_rank": step_rank("mamba_dt_rank"),
    }
    return mixer(Mamba, **(INNER | sizes | fields))


def inner_mamba2(inner: str = EXPANDED, **fields: Field) -> Reader:
    """Return the reader of Mamba-2 under the keys of a hybrid, `inner` channels wide."""
    sizes = {
        "num_heads": "mamba_n_heads",
        "head_dim": automatic("mamba_d_head", f"({inner}) // mamba_n_heads"),
        "n_groups": "mamba_n_groups",
    }
    return mixer(Mamba2, **(INNER | sizes | fields))


BAMBA = Type(
    attention_or(inner_mamba2()),
    dense(bias="mlp_bias"),
    full_where("layer_index in attn_layer_indices", others=LINEAR),
)


def granite_order(c: Config) -> list[str]:
    """Return the order under its older key; all layers recur without it."""
    key = "layers_block_type"
    return (typed(key=key) if c.in_file(key) else uniform(LINEAR))(c)


# --- Nemotron-H: a mixer or an FFN a layer ---

LETTERS = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}


def lettered(c: Config) -> list[str]:
    """Return the order of one letter a layer. transformers' default has one layer of each."""
    return [LETTERS.get(letter, letter) for letter in c.word("hybrid_override_pattern", "ME*-")]


def listed(c: Config) -> int:
    """Return the number of layers that the file lists, if it says anything about them."""
    keys = ("layer_types", "hybrid_override_pattern", "num_hidden_layers")
    return len(c.items("layer_types") or lettered(c)) if any(map(c.in_file, keys)) else 0


# --- Zamba: hybrid layers share attention and an FFN over the stream and the embeddings ---

WIDE = "(attention_hidden_size | 2 * hidden_size)"


def shared_block(bias: Field = False) -> Field:
    """Return the rule of the shared block, in hybrid layers."""
    block = both(
        grouped(
            False,
            input_size=WIDE,
            head=f"attention_head_dim | {WIDE} // num_attention_heads",
        ),
        dense("intermediate_size | 4 * hidden_size", bias=bias),
        projections(vectors={"shared_norms": f"{WIDE} + hidden_size"}),
    )
    return lambda c: block(c) if c.layer_type == HYBRID else None


def adapters(c: Config) -> dict[str, tuple[int, int]]:
    """Return the unshared weights of each hybrid layer: the output, and Zamba2's adapters."""
    hidden = c.size("hidden_size")
    wide = c.size("attention_hidden_size", 2 * hidden)
    matrices = {"shared_out": (hidden, hidden)}
    if c.has("adapter_rank"):
        rank = c.size("adapter_rank")
        pairs = {"gate_up": (hidden, 2 * c.size("intermediate_size", 4 * hidden))}
        if c.flag("use_shared_attention_adapter"):
            pairs |= dict.fromkeys("qkv", (wide, wide))
        for name, (inputs, outputs) in pairs.items():
            matrices[f"{name}_adapter_down"] = (inputs, rank)
            matrices[f"{name}_adapter_up"] = (rank, outputs)
    return matrices


def beside_shared(mamba: Reader) -> Reader:
    """Return the reader of a recurrence in all layers, joined with the block in hybrid ones."""
    return by_type(linear_attention=mamba, hybrid=both(mamba, projections(adapters)))


def zamba2_order(c: Config) -> list[str]:
    """Return Zamba2's own order, which transformers gives to any file without one."""
    hybrids = (6, 12, 18, 24, 30, 36, 42, 47, 51)
    if c.layers != 54:
        raise c.fail(
            "layers_block_type",
            f"is missing, and there are {c.layers} layers rather than 54",
        )
    return [HYBRID if i in hybrids else LINEAR for i in range(c.layers)]


def zamba2_heads(c: Config) -> int:
    """Return the heads of a Mamba-2 layer; older files give only their width."""
    inner = c.size("mamba_expand") * c.size("hidden_size")
    key = "n_mamba_heads"
    heads = c.size(key) if c.in_file(key) or not c.has("mamba_headdim") else 0
    if not heads:
        key = "mamba_headdim"
        heads = inner // c.size(key)
    if not 1 <= heads <= inner:
        raise c.fail(key, f"leaves {heads} heads in {inner} channels")
    return heads


ZAMBA = Type(
    beside_shared(inner_mamba(n_mamba_heads="n_mamba_heads")),
    nothing,
    # the third layer is hybrid, and then one in every period, counted from the fourth
    typed(
        full_where(
            "layer_index == 2 or layer_index > 2"
            " and (layer_index - 3) % attn_layer_period - (attn_layer_offset | 0) == 0",
            HYBRID,
            LINEAR,
        )
    ),
    norms=1,
    layer={"shared": shared_block()},
)

TYPES = {
    "mamba falcon_mamba": Type(
        mixer(
            Mamba,
            intermediate_size="intermediate_size | expand * hidden_size",
            state_size="state_size",
            time_step_rank=step_rank("time_step_rank"),
            conv_kernel="conv_kernel",
            **MAMBA1,
        ),
        nothing,
        norms=1,
    ),
    "mamba2": Type(
        mixer(
            Mamba2,
            num_heads="num_heads",
            head_dim="head_dim",
            state_size="state_size",
            n_groups="n_groups",
            conv_kernel="conv_kernel",
            **MAMBA1,
        ),
        nothing,
        norms=1,
    ),
    "bamba": BAMBA,
    "granitemoehybrid": BAMBA.variant(
        ffn=pick(
            "(num_local_experts | 0) > 0",
            moe(
                "num_local_experts",
                size="intermediate_size",
                shared="shared_intermediate_size",
            ),
            dense("shared_intermediate_size"),
        ),
        order=granite_order,
    ),
    "falcon_h1": Type(
        both(
            grouped(),
            inner_mamba2(
                f"mamba_d_ssm | {EXPANDED}",
                gate_norm="mamba_rms_norm",
                out_bias="projectors_bias",
            ),
        ),
        dense(bias="mlp_bias"),
        uniform(HYBRID),
    ),
    "jamba": Type(
        attention_or(inner_mamba(inner_norms=True), grouped(False)),
        pick(
            "num_experts > 1 and layer_index % expert_layer_period - (expert_layer_offset | "
            "0) == 0",
            moe("num_experts", size="intermediate_size"),
            dense(),
        ),
        full_where(
            "(layer_index - (attn_layer_offset | 0)) % (attn_layer_period | 1) == 0",
            others=LINEAR,
        ),
    ),
    "nemotron_h": Type(
        by_type(
            full_attention=grouped(False),
            linear_attention=inner_mamba2(
                num_heads="mamba_num_heads",
                head_dim="mamba_head_dim",
                state_size="ssm_state_size",
                n_groups="mamba_n_groups | n_groups",
                conv_kernel="mamba_d_conv | conv_kernel",
                conv_bias="mamba_conv_bias | use_conv_bias",
                proj_bias="use_bias",
            ),
            mlp=dense(gated=False, bias="mlp_bias"),
            moe=moe(
                "n_routed_experts | num_local_experts",
                size="moe_intermediate_size",
                gated=False,
                shared=(
                    "moe_shared_expert_intermediate_size"
                    " if (moe_shared_expert_intermediate_size | 0) > 0 else intermediate_size"
                ),
                shared_bias="mlp_bias",
                moe_latent_size="moe_latent_size",
                latent_bias="mlp_bias",
            ),
        ),
        nothing,
        typed(lettered),
        norms=1,
        depth=listed,
        layers_key="",
        spellings={"head_dim": ("attention_head_dim",)},
        model={"tie_word_embeddings": False},
        inert="time_step_rank tie_word_embeddings",
    ),
    "zamba": ZAMBA,
    "zamba2": ZAMBA.variant(
        mixer=beside_shared(
            inner_mamba2(
                num_heads=zamba2_heads,
                head_dim=lambda c: (
                    c.size("mamba_expand") * c.size("hidden_size") // zamba2_heads(c)
                ),
                n_groups="mamba_ngroups",
                conv_bias=True,
                proj_bias="add_bias_linear",
            )
        ),
        order=typed(zamba2_order),
        layer={
            "shared": shared_block("add_bias_linear"),
            "weight_sets": "num_mem_blocks",
        },
    ),
}
