"""Build attention, FFN and experts of a layer from the tensor shapes of a GGUF block."""

from typing import Any

from kvcalc.layers.attention import Grouped, Latent
from kvcalc.layers.ffn import Dense, Moe
from kvcalc.library.gguf_block import Block


def grouped(b: Block) -> Grouped:
    """Return attention with heads of keys and values.

    The projections may be one tensor. Queries with a gate are twice as wide.
    """
    width, heads = b.fields.width, b.size("attention.head_count")
    if not b.fields.has("attention.key_length") and width % heads:
        raise b.fields.fail(f"block {b.number}: {heads} heads do not divide {width}")
    key = b.size("attention.key_length", width // heads)
    value = b.size("attention.value_length", key)
    groups = b.fields.size("attention.head_count_kv", heads, b.number)
    if not groups and b.has("attn_k"):  # some hybrids' lists say 0 of every layer
        groups = b.left["attn_k.weight"].elements // (width * key) or 1
    given: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": key}
    given |= {"v_head_dim": value} if value != key else {}
    if b.has("attn_qkv"):
        joined = b.take("attn_qkv", width, (heads + groups) * key + groups * value)
        b.stored += [(name, joined.type) for name in ("q", "k", "v")]
        given |= dict.fromkeys(("q_bias", "k_bias", "v_bias"), b.bias("attn_qkv"))
    else:
        given |= _queries(b, heads * key) | {"q_bias": b.bias("attn_q")}
        for name, outputs in (("k", groups * key), ("v", groups * value)):
            b.matrix(name, f"attn_{name}", width, outputs)
            given[f"{name}_bias"] = b.bias(f"attn_{name}")
    if b.has("attn_gate"):
        gate = b.matrix("gate", "attn_gate", width, 0)
        if gate.shape[1] not in (heads, heads * value):
            raise b.fields.fail(f"tensor {gate.name} gates {gate.shape[1]:,} channels of {heads:,} heads of {value:,}")
        given["output_gate"] = "full" if gate.shape[1] == heads * value else "head"
    b.matrix("o", "attn_output", heads * value, width)
    given |= {"o_bias": b.bias("attn_output"), "sinks": bool(b.vector("attn_sinks"))}
    given |= _head_norms(b, heads, groups, key)
    if window := b.fields.window(b.number):
        given["attention_chunk_size" if b.fields.family == "llama4" else "sliding_window"] = window
    return Grouped(**given)


def _queries(b: Block, outputs: int) -> dict[str, Any]:
    queries = b.matrix("q", "attn_q", b.fields.width, 0)
    if queries.shape[1] == 2 * outputs:
        b.stored.append(("gate", queries.type))
        return {"output_gate": "full"}
    if queries.shape[1] != outputs:
        raise b.fields.fail(f"tensor {queries.name} has the shape {list(queries.shape)}, not [{b.fields.width}, {outputs}]")
    return {}


def _head_norms(b: Block, heads: int, groups: int, width: int) -> dict[str, Any]:
    queries, keys = b.vector("attn_q_norm"), b.vector("attn_k_norm")
    if not queries and not keys:
        return {}
    if (queries, keys) not in ((width, width), (heads * width, groups * width)):
        raise b.fields.fail(f"block {b.number} norms queries and keys of {queries:,} and {keys:,} elements")
    return {"qk_norm": "head" if queries == width else "full", "qk_norm_bias": b.alike("attn_q_norm", "attn_k_norm")}


def latent(b: Block) -> Latent:
    """Return MLA. Its kv_up is one tensor, or two: [dn, r] and [r, dv] for each head."""
    width, heads, rank = b.fields.width, b.size("attention.head_count"), b.size("attention.kv_lora_rank")
    down = b.matrix("kv_down", "attn_kv_a_mqa", width, 0)
    rope = down.shape[1] - rank
    q_rank = b.matrix("q_down", "attn_q_a", width, 0).shape[1] if b.has("attn_q_a") else 0
    queries = b.matrix("q_up" if q_rank else "q", "attn_q_b" if q_rank else "attn_q", q_rank or width, 0)
    out = b.matrix("o", "attn_output", 0, width)
    if rope < 0 or queries.shape[1] % heads or out.shape[0] % heads:
        raise b.fields.fail(f"block {b.number} has latents and heads that do not fit")
    nope, value = queries.shape[1] // heads - rope, out.shape[0] // heads
    whole = b.has("attn_kv_b")
    if whole:
        b.matrix("kv_up", "attn_kv_b", rank, heads * (nope + value))
    else:
        keys, values = b.take("attn_k_b", nope, rank, heads), b.take("attn_v_b", rank, value, heads)
        b.pieces("kv_up", (keys, rank * heads), (values, value * heads))
    return Latent(
        num_attention_heads=heads, kv_lora_rank=rank, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value,
        q_lora_rank=q_rank or None, q_norm=bool(b.vector("attn_q_a_norm")), kv_norm=bool(b.vector("attn_kv_a_norm")),
        sliding_window=b.fields.window(b.number) or None, heads_cached=whole,
    )  # fmt: skip


def dense(b: Block, group: str = "", names: str = "ffn_{}") -> Dense:
    """Return a dense FFN: up, down and an optional gate.

    The gate is a separate tensor or the other half of up.
    """
    gate, up, down = (names.format(name) for name in ("gate", "up", "down"))
    inner = b.matrix(f"{group}down", down, 0, b.fields.width).shape[0]
    joined = not b.has(gate) and b.has(up) and b.left[f"{up}.weight"].shape[1] == 2 * inner
    gated = joined or b.has(gate)
    wide = b.matrix(f"{group}up", up, b.fields.width, 2 * inner if joined else inner)
    if joined:
        b.stored.append((f"{group}gate", wide.type))
    elif gated:
        b.matrix(f"{group}gate", gate, b.fields.width, inner)
    bias, below = b.alike(*((gate, up) if gated and not joined else (up,))), b.bias(down)
    return Dense(intermediate_size=inner, gated=gated, bias=bias, down_bias=None if below == bias else below)


def experts(b: Block) -> Moe:
    """Return a router and stacked experts, with shared experts if the block has any."""
    width = b.fields.width
    count = b.matrix("router", "ffn_gate_inp", width, 0).shape[1]
    inner = b.matrix("experts.down", "ffn_down_exps", 0, width, count).shape[0]
    names = ["ffn_down_exps"]
    gated = b.has("ffn_gate_up_exps") or b.has("ffn_gate_exps")
    if b.has("ffn_gate_up_exps"):
        joined = b.take("ffn_gate_up_exps", width, 2 * inner, count)
        b.stored += [("experts.gate", joined.type), ("experts.up", joined.type)]
        names.append("ffn_gate_up_exps")
    else:
        for name in ("gate", "up") if gated else ("up",):
            b.matrix(f"experts.{name}", f"ffn_{name}_exps", width, inner, count)
            names.append(f"ffn_{name}_exps")
    given: dict[str, Any] = {"router_bias": b.bias("ffn_gate_inp"), "bias": b.alike(*names), "gated": gated}
    if b.has("ffn_down_shexp"):
        shared = dense(b, "shared.", "ffn_{}_shexp")
        given |= {"shared_expert_intermediate_size": shared.intermediate_size, "shared_gated": shared.gated}
        given["shared_bias"] = shared.bias
    if b.has("ffn_gate_inp_shexp"):
        b.matrix("shared.weight", "ffn_gate_inp_shexp")
        given["shared_expert_gate"] = True
    return Moe(num_experts=count, num_experts_per_tok=b.size("expert_used_count"), moe_intermediate_size=inner, **given)
