"""MLA: `kvcalc.layers.attention.Latent` in torch, in both of its forms.

Expanded: keys and values of all S tokens are projected from the latents again, and attention runs per head. Absorbed: W_UK
goes to the queries and W_UV to the outputs, and all heads attend to the latents themselves. Decode takes the absorbed form,
prefill the expanded one, unless `form` says otherwise. Scores are scaled by √(dn + dr) in both.
"""

import torch
from torch import Tensor

from kvcalc.layers.attention import Latent
from kvcalc.measure.cache import LayerCache
from kvcalc.measure.layers.base import Mixer, join_heads, refuse, rms_norm, split_heads
from kvcalc.measure.layers.kernels import attend, masked, visible

UNSUPPORTED = ("sliding_window", "output_gate", "q_up_size", "sinks")


class LatentLayer(Mixer):
    """r: kv_lora_rank, dn and dr: a key's width without and with positions, dv: a value's."""

    def __init__(self, spec: Latent, hidden_size: int, rotates: bool = True) -> None:
        refuse(spec, *UNSUPPORTED)
        super().__init__(spec, hidden_size, rotates)
        self.spec, self.form = spec, "auto"
        self.scale = (spec.qk_nope_head_dim + spec.qk_rope_head_dim) ** -0.5

    def absorbs(self, new: int) -> bool:
        """Whether a pass of so many tokens takes the absorbed form."""
        return new == 1 if self.form == "auto" else self.form == "absorbed"

    def prepare(self, x: Tensor, past: int) -> tuple[Tensor, ...]:
        """Queries in two parts [B, H, n, dn or r] and [B, H, n, dr]; latent [B, 1, n, r] and RoPE key [B, 1, n, dr]."""
        nope, rope = self._queries(self._query_latent(x), past)
        if self.absorbs(x.shape[1]):
            nope = self._heads_product(nope, self._up()[:, : self.spec.qk_nope_head_dim])
        return (nope, rope, *self._rows(x, past))

    def _query_latent(self, x: Tensor) -> Tensor:
        """What queries are projected from: [B, n, q_lora_rank], or x itself."""
        if not self.spec.q_lora_rank:
            return x
        down = self.weights.linear("q_down", x)
        return rms_norm(down, self.weights["q_norm"]) if self.spec.q_norm else down

    def _queries(self, source: Tensor, past: int) -> tuple[Tensor, Tensor]:
        q = self.weights.linear("q_up" if self.spec.q_lora_rank else "q", source)
        nope, rope = split_heads(q, self.spec.num_attention_heads).split(
            (self.spec.qk_nope_head_dim, self.spec.qk_rope_head_dim), -1
        )
        return nope, self._turned(rope, past)

    def _rows(self, x: Tensor, past: int) -> tuple[Tensor, Tensor]:
        """What is cached of the new tokens: the normalised latent, and the key that carries the position."""
        latent, rope = self.weights.linear("kv_down", x)[:, None].split((self.spec.kv_lora_rank, self.spec.qk_rope_head_dim), -1)
        if self.spec.kv_norm:
            latent = rms_norm(latent, self.weights["kv_norm"])
        return latent, self._turned(rope, past)

    def _turned(self, rope: Tensor, past: int) -> Tensor:
        return self.rotary(rope, past) if self.rotary and rope.shape[-1] else rope

    def _up(self) -> Tensor:
        """[H, dn + dv, r]: W_UK above W_UV, per head."""
        return self.weights["kv_up"].unflatten(0, (self.spec.num_attention_heads, -1))

    @staticmethod
    def _heads_product(x: Tensor, w: Tensor) -> Tensor:
        """x [B, H, n, a] · w [H, a, b] → [B, H, n, b], one product per head."""
        rows = x.transpose(0, 1).flatten(1, 2)  # [H, B·n, a]
        return (rows @ w).unflatten(1, (x.shape[0], x.shape[2])).transpose(0, 1)

    def _written(self, prepared: tuple[Tensor, ...], cache: LayerCache | None, past: int) -> tuple[Tensor, Tensor]:
        """All latents [B, 1, S, r] and RoPE keys [B, 1, S, dr], the new ones included."""
        latent, rope = prepared[2:4]
        if cache is None:
            return latent, rope
        tokens = past + latent.shape[2]
        cache.rows[0].write(latent, past)
        if not self.spec.qk_rope_head_dim:
            return cache.rows[0].read(tokens), rope
        cache.rows[1].write(rope, past)
        return cache.rows[0].read(tokens), cache.rows[1].read(tokens)

    def core(self, prepared: tuple[Tensor, ...], cache: LayerCache | None, past: int) -> Tensor:
        latents, ropes = self._written(prepared, cache, past)
        n = prepared[0].shape[2]
        if self.absorbs(n):
            mask = None if n == 1 else visible(n, latents.shape[2], 0, latents.device)
            return self._absorbed(prepared[0], prepared[1], latents, ropes, mask)
        q, k, v = self._expanded(prepared[0], prepared[1], latents, ropes)
        return attend(q, k, v, 0, self.kernel, self.scale)

    def _absorbed(self, q: Tensor, q_rope: Tensor, latents: Tensor, ropes: Tensor, mask: Tensor | None) -> Tensor:
        """Queries [B, H, n, r] and [B, H, n, dr] over shared rows → [B, H, n, r]: all heads are rows of one product."""
        heads, n = q.shape[1:3]
        scores = q.flatten(1, 2) @ latents[:, 0].transpose(1, 2)  # [B, H·n, S]
        if ropes.shape[-1]:
            scores = torch.baddbmm(scores, q_rope.flatten(1, 2), ropes[:, 0].transpose(1, 2))
        scores = scores * self.scale
        if mask is not None:
            scores = scores.unflatten(1, (heads, n)).masked_fill(~mask, float("-inf")).flatten(1, 2)
        return (scores.softmax(-1) @ latents[:, 0]).unflatten(1, (heads, n))

    def _expanded(self, q: Tensor, q_rope: Tensor, latents: Tensor, ropes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys [B, H, S, dn + dr] and values [B, H, S, dv] of every token."""
        up = split_heads(self.weights.linear("kv_up", latents[:, 0]), self.spec.num_attention_heads)
        k, v = up.split((self.spec.qk_nope_head_dim, self.spec.v_head_dim), -1)
        if not self.spec.qk_rope_head_dim:
            return q, k, v
        return torch.cat((q, q_rope), -1), torch.cat((k, ropes.expand(-1, k.shape[1], -1, -1)), -1), v

    def finish(self, mixed: Tensor, prepared: tuple[Tensor, ...]) -> Tensor:
        """mixed is [B, H, n, r] in the absorbed form, and still to be taken through W_UV."""
        if self.absorbs(mixed.shape[2]):
            mixed = self._heads_product(mixed, self._up()[:, self.spec.qk_nope_head_dim :].transpose(1, 2))
        return self.weights.linear("o", join_heads(mixed))

    def _masked(self, prepared: tuple[Tensor, ...], latents: Tensor, ropes: Tensor, mask: Tensor) -> Tensor:
        """The expanded form where `mask` [B, 1, n, S] says what each query sees."""
        q, k, v = self._expanded(prepared[0], prepared[1], latents, ropes)
        return masked(q, k, v, mask, self.kernel, self.scale)
