"""One block of a GGUF file as a layer: attention, FFN or experts, and norms, each from the shapes of its tensors."""

from typing import Any

from kvcalc.layers.attention import Grouped, Latent
from kvcalc.layers.ffn import Dense, Moe
from kvcalc.library.gguf import TensorInfo
from kvcalc.library.gguf_fields import Fields
from kvcalc.model.spec import Layer


class Block:
    """The layer that a block's tensors make, the format of each of its matrices, and whether its norms have biases.

    Raises UserError where a tensor is missing, has another shape than the metadata say, or is left over.
    """

    def __init__(self, fields: Fields, number: int, tensors: dict[str, TensorInfo]) -> None:
        self.fields, self.number, self.left = fields, number, dict(tensors)
        self.stored: list[tuple[str, str]] = []
        self.norm_biases: list[bool] = []
        if not any(self._has(name) for name in ("attn_kv_a_mqa", "attn_qkv", "attn_q")):
            fields.refuse(tensors.values())
        attention: Grouped | Latent = self._latent() if self._has("attn_kv_a_mqa") else self._grouped()
        network = self._experts() if self._has("ffn_gate_inp") else self._dense("", "ffn_{}")
        parts = (attention, network)
        norms = self._norms()
        fields.refuse(self.left.values())
        self.layer = Layer(parts=parts, norms=None if norms == len(parts) else norms)

    def _take(self, name: str, *shape: int) -> TensorInfo:
        """A tensor that must be there, of this shape (0 for any length)."""
        found = self.left.pop(f"{name}.weight", None)
        if found is None:
            raise self.fields.fail(f"tensor blk.{self.number}.{name}.weight is missing")
        if shape and (len(shape) != len(found.shape) or any(n and n != m for n, m in zip(shape, found.shape, strict=True))):
            wanted = ", ".join(str(n or "any") for n in shape)
            raise self.fields.fail(f"tensor {found.name} has the shape {list(found.shape)}, not [{wanted}]")
        return found

    def _matrix(self, weight: str, name: str, *shape: int) -> TensorInfo:
        """A tensor that is one weight."""
        found = self._take(name, *shape)
        self.stored.append((weight, found.type))
        return found

    def _has(self, name: str) -> bool:
        return f"{name}.weight" in self.left

    def _bias(self, name: str) -> bool:
        """Whether a tensor has a bias, which is then taken."""
        return self.left.pop(f"{name}.bias", None) is not None

    def _vector(self, name: str) -> int:
        """The elements of a vector, which is taken; 0 where there is none."""
        found = self.left.pop(f"{name}.weight", None)
        return found.elements if found else 0

    def _grouped(self) -> Grouped:
        f, n = self.fields, self.number
        heads = f.size("attention.head_count", layer=n)
        groups = f.size("attention.head_count_kv", heads, layer=n)
        if not heads or not groups or (not f.has("attention.key_length") and f.width % heads):
            raise f.fail(f"block {n} has no heads of a whole width")
        key = f.size("attention.key_length", f.width // heads)
        value = f.size("attention.value_length", key)
        given: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": key}
        if value != key:
            given["v_head_dim"] = value
        if self._has("attn_qkv"):
            joined = self._take("attn_qkv", f.width, (heads + groups) * key + groups * value)
            self.stored += [(name, joined.type) for name in ("q", "k", "v")]
            given |= dict.fromkeys(("q_bias", "k_bias", "v_bias"), self._bias("attn_qkv"))
        else:
            for name, width in (("q", heads * key), ("k", groups * key), ("v", groups * value)):
                self._matrix(name, f"attn_{name}", f.width, width)
                given[f"{name}_bias"] = self._bias(f"attn_{name}")
        self._matrix("o", "attn_output", heads * value, f.width)
        given |= {"o_bias": self._bias("attn_output"), "sinks": bool(self._vector("attn_sinks"))}
        given |= self._head_norms(heads, groups, key)
        if window := f.window(n):
            given["attention_chunk_size" if f.family == "llama4" else "sliding_window"] = window
        return Grouped(**given)

    def _head_norms(self, heads: int, groups: int, width: int) -> dict[str, Any]:
        bias = self._bias("attn_q_norm")
        queries, keys = self._vector("attn_q_norm"), self._vector("attn_k_norm")
        if not queries and not keys:
            return {}
        if (queries, keys) not in ((width, width), (heads * width, groups * width)) or bias != self._bias("attn_k_norm"):
            raise self.fields.fail(f"block {self.number} norms queries and keys of {queries:,} and {keys:,} elements")
        return {"qk_norm": "head" if queries == width else "full", "qk_norm_bias": bias}

    def _latent(self) -> Latent:
        f, n = self.fields, self.number
        heads, rank = f.size("attention.head_count", layer=n), f.size("attention.kv_lora_rank")
        down = self._matrix("kv_down", "attn_kv_a_mqa", f.width, 0)
        rope = down.shape[1] - rank
        q_rank = self._matrix("q_down", "attn_q_a", f.width, 0).shape[1] if self._has("attn_q_a") else 0
        queries = self._matrix("q_up" if q_rank else "q", "attn_q_b" if q_rank else "attn_q", q_rank or f.width, 0)
        out = self._matrix("o", "attn_output", 0, f.width)
        if not heads or rope < 0 or queries.shape[1] % heads or out.shape[0] % heads:
            raise f.fail(f"block {n} has latents and heads that do not fit")
        nope, value = queries.shape[1] // heads - rope, out.shape[0] // heads
        if self._has("attn_kv_b"):
            self._matrix("kv_up", "attn_kv_b", rank, heads * (nope + value))
        else:
            up = self._take("attn_k_b", nope, rank, heads), self._take("attn_v_b", rank, value, heads)
            held, elements = sum(t.bytes for t in up), sum(t.elements for t in up)
            same = up[0].type == up[1].type
            self.stored.append(("kv_up", up[0].type if same else f"{up[0].type}_{up[1].type}@{held}/{elements}"))
        return Latent(
            num_attention_heads=heads, kv_lora_rank=rank, qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value,
            q_lora_rank=q_rank or None, q_norm=bool(self._vector("attn_q_a_norm")),
            kv_norm=bool(self._vector("attn_kv_a_norm")), sliding_window=f.window(n) or None,
        )  # fmt: skip

    def _dense(self, group: str, names: str) -> Dense:
        """up and down, and a gate where there is one: a tensor of its own, or the other half of up."""
        f = self.fields
        gate, up, down = (names.format(name) for name in ("gate", "up", "down"))
        inner = self._matrix(f"{group}down", down, 0, f.width).shape[0]
        joined = not self._has(gate) and self._has(up) and self.left[f"{up}.weight"].shape[1] == 2 * inner
        gated = joined or self._has(gate)
        wide = self._matrix(f"{group}up", up, f.width, 2 * inner if joined else inner)
        if joined:
            self.stored.append((f"{group}gate", wide.type))
        elif gated:
            self._matrix(f"{group}gate", gate, f.width, inner)
        biases = {self._bias(name) for name in ((up,) if joined or not gated else (gate, up))}
        if len(biases) > 1:
            raise f.fail(f"block {self.number} has a bias on one of {gate} and {up} alone")
        bias, below = biases.pop(), self._bias(down)
        return Dense(intermediate_size=inner, gated=gated, bias=bias, down_bias=None if below == bias else below)

    def _experts(self) -> Moe:
        f, n = self.fields, self.number
        experts = self._matrix("router", "ffn_gate_inp", f.width, 0).shape[1]
        inner = self._matrix("experts.down", "ffn_down_exps", 0, f.width, experts).shape[0]
        names = ["ffn_down_exps"]
        gated = self._has("ffn_gate_up_exps") or self._has("ffn_gate_exps")
        if self._has("ffn_gate_up_exps"):
            joined = self._take("ffn_gate_up_exps", f.width, 2 * inner, experts)
            self.stored += [("experts.gate", joined.type), ("experts.up", joined.type)]
            names.append("ffn_gate_up_exps")
        else:
            for name in ("gate", "up") if gated else ("up",):
                self._matrix(f"experts.{name}", f"ffn_{name}_exps", f.width, inner, experts)
                names.append(f"ffn_{name}_exps")
        biases = {self._bias(name) for name in names}
        if len(biases) > 1:
            raise f.fail(f"block {n} has biases on some matrices of its experts alone")
        given: dict[str, Any] = {"router_bias": self._bias("ffn_gate_inp"), "bias": biases.pop(), "gated": gated}
        if self._has("ffn_down_shexp"):
            shared = self._dense("shared.", "ffn_{}_shexp")
            given |= {"shared_expert_intermediate_size": shared.intermediate_size, "shared_gated": shared.gated}
            given["shared_bias"] = shared.bias
        if self._has("ffn_gate_inp_shexp"):
            self._matrix("shared.weight", "ffn_gate_inp_shexp")
            given["shared_expert_gate"] = True
        used = f.size("expert_used_count", layer=n)
        return Moe(num_experts=experts, num_experts_per_tok=used, moe_intermediate_size=inner, **given)

    def _norms(self) -> int:
        """How many norms of the residual's width are left, which are the layer's."""
        names = [k.removesuffix(".weight") for k, t in self.left.items() if k.endswith(".weight") and "norm" in k]
        for name in [name for name in names if self.left[f"{name}.weight"].shape == (self.fields.width,)]:
            del self.left[f"{name}.weight"]
            self.norm_biases.append(self._bias(name))
        return len(self.norm_biases)
