"""Build recurrent parts of a layer from a GGUF block; their sizes are in its `ssm` metadata."""

from kvcalc.layers.recurrent import GatedDeltaNet, Mamba, Mamba2, ShortConv
from kvcalc.library.gguf_block import Block


def delta(b: Block) -> GatedDeltaNet:
    """Return the gated delta net of Qwen3-Next and Qwen3.5.

    Queries, keys and values are one tensor, and their gate is another tensor.
    """
    width, kh, vh = b.fields.width, b.size("ssm.group_count"), b.size("ssm.time_step_rank")
    dk, values, kernel = b.size("ssm.state_size"), b.size("ssm.inner_size"), b.size("ssm.conv_kernel")
    keys = kh * dk
    joined, gate = b.take("attn_qkv", width, 2 * keys + values), b.take("attn_gate", width, values)
    b.stored.append(("qk", joined.type))
    b.pieces("v_gate", (joined, values), (gate, values))
    if b.has("ssm_ba"):
        b.matrix("step_decay", "ssm_ba", width, 2 * vh)
    else:
        b.pieces("step_decay", (b.take("ssm_alpha", width, vh), vh), (b.take("ssm_beta", width, vh), vh))
    b.take("ssm_conv1d", kernel, 2 * keys + values)
    for name in ("ssm_a", "ssm_dt.bias", "ssm_norm"):
        b.vector(name)
    b.matrix("out", "ssm_out", values, width)
    return GatedDeltaNet(
        linear_num_key_heads=kh, linear_num_value_heads=vh, linear_key_head_dim=dk, linear_value_head_dim=values // vh,
        linear_conv_kernel_dim=kernel, conv_bias=b.bias("ssm_conv1d"),
    )  # fmt: skip


def mamba(b: Block) -> Mamba | Mamba2:
    """Return Mamba if the time step has a separate projection, and Mamba-2 otherwise."""
    width, inner, states = b.fields.width, b.size("ssm.inner_size"), b.size("ssm.state_size")
    rank, kernel = b.size("ssm.time_step_rank"), b.size("ssm.conv_kernel")
    step = b.has("ssm_x")
    groups = 0 if step else b.size("ssm.group_count", 1)
    projected = b.matrix("in", "ssm_in", width, 2 * inner if step else 2 * inner + 2 * groups * states + rank)
    b.take("ssm_conv1d", kernel, inner if step else inner + 2 * groups * states)
    b.matrix("out", "ssm_out", inner, width)
    conv_bias, proj_bias = b.bias("ssm_conv1d"), b.alike("ssm_in", "ssm_out")
    for name in ("ssm_a", "ssm_d", "ssm_dt.bias"):
        b.vector(name)
    if step:
        b.matrix("x", "ssm_x", inner, rank + 2 * states)
        b.matrix("dt", "ssm_dt", rank, inner)
        normed = [b.vector(f"ssm_{name}_norm") for name in ("dt", "b", "c")]
        return Mamba(
            intermediate_size=inner, state_size=states, time_step_rank=rank, conv_kernel=kernel, conv_bias=conv_bias,
            proj_bias=proj_bias, inner_norms=any(normed),
        )  # fmt: skip
    b.stored.append(("in_bc", projected.type))
    return Mamba2(
        num_heads=rank, head_dim=inner // rank, state_size=states, n_groups=groups, conv_kernel=kernel, conv_bias=conv_bias,
        proj_bias=proj_bias, gate_norm=bool(b.vector("ssm_norm")),
    )  # fmt: skip


def short_conv(b: Block) -> ShortConv:
    """Return LFM2's convolution between two gates."""
    width, kernel = b.fields.width, b.size("shortconv.l_cache")
    b.matrix("in", "shortconv.in_proj", width, 3 * width)
    b.take("shortconv.conv", kernel, width)
    b.matrix("out", "shortconv.out_proj", width, width)
    return ShortConv(width=width, conv_kernel=kernel, bias=b.alike("shortconv.in_proj", "shortconv.conv", "shortconv.out_proj"))
