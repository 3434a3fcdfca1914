"""Gated delta net: `GatedDeltaNet` in torch, in chunks of tokens.

With decay e^g and step β per head, the state S [dk, dv] becomes e^g·S + k·uᵀ with
u = β·(v − e^g·Sᵀk), and the output is Sᵀq (Yang et al. 2024, arXiv 2412.06464, section 3.1).

In a chunk, γ is the running sum of g. The u solve the unit lower triangular system
u_i + Σ_{j<i} β_i·e^(γi − γj)·(k_i·k_j)·u_j = β_i·(v_i − e^γi·Sᵀk_i), so matrix products replace the
loop over tokens.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvcalc.measure.layers.base_layer import Mixer, Prepared, rms_norm, split_heads
from kvcalc.measure.torch_cache import LayerCache

CHUNK = 64
# Ranges of A and of the time step in an untrained model. Faster decays produce denormal numbers,
# which make a CPU many times slower.
A_RANGE = 1.0, 16.0
DT_RANGE = 1e-3, 1e-1


class GatedDeltaNetLayer(Mixer):
    """hk key heads of width dk and hv value heads of width dv; hv / hk value heads share q and
    k."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        a_log, dt_bias = self.weights["a_dt"].chunk(2)
        a_log.uniform_(*A_RANGE).log_()
        dt_bias.uniform_(*map(math.log, DT_RANGE)).exp_().expm1_().log_()

    def prepare(self, x: Tensor, past: int) -> Prepared:
        """Return the inputs of the convolution, and the gates.

        q and k together are [B, hk, n, 2·dk], v is [B, hv, n, dv], β and g are [B, hv, n].
        """
        heads = self.spec.linear_num_value_heads
        qk = split_heads(self.linear("qk", x), self.spec.linear_num_key_heads)
        v, gate = (split_heads(part, heads) for part in self.linear("v_gate", x).chunk(2, -1))
        step, decay = self.linear("step_decay", x).transpose(1, 2).chunk(2, 1)
        a_log, dt_bias = self.weights["a_dt"][:, None].chunk(2)
        return qk, v, step.sigmoid(), -a_log.exp() * F.softplus(decay + dt_bias), gate

    def core(self, prepared: Prepared, cache: LayerCache | None, past: int) -> Tensor:
        """Return convolution and scan as [B, hv, n, dv]. Without a cache, all states start at
        zero."""
        spec = self.spec
        qk, v, step, decay, _ = prepared
        states = [rows.tensor for rows in cache] if cache is not None else [None] * 3
        qk = F.silu(self.convolved("conv_qk", qk, states[0]))
        v = F.silu(self.convolved("conv_v", v, states[1]))
        dtype = torch.promote_types(torch.float32, v.dtype)
        q, k = (F.normalize(part, dim=-1) for part in qk.to(dtype).chunk(2, -1))
        q = q * spec.linear_key_head_dim**-0.5
        shared = spec.linear_num_value_heads // spec.linear_num_key_heads
        if shared > 1:
            q, k = q.repeat_interleave(shared, 1), k.repeat_interleave(shared, 1)
        state = states[2]
        if state is None:
            state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
        mixed, end = scan(q, k, v.to(dtype), step.to(dtype), decay.to(dtype), state.to(dtype))
        if states[2] is not None:
            states[2].copy_(end)
        return mixed.to(v.dtype)

    def convolved(self, name: str, x: Tensor, state: Tensor | None) -> Tensor:
        """Return the causal convolution of each channel of x [B, h, n, w].

        The state [B, h, kernel − 1, w] advances by n columns.
        """
        batch, heads, n, width = x.shape
        kernel = self.spec.linear_conv_kernel_dim
        columns = x.new_zeros(batch, heads, kernel - 1, width) if state is None else state
        columns = torch.cat((columns, x), 2)
        filters = self.weights[name].view(heads, 1, width, -1)
        out = torch.zeros_like(x)
        for i in range(kernel):
            out = out + columns[:, :, i : i + n] * filters[..., i]
        if state is not None and kernel > 1:
            state.copy_(columns[:, :, n:])
        return out + filters[..., kernel] if self.spec.conv_bias else out

    def finish(self, mixed: Tensor, prepared: Prepared) -> Tensor:
        gated = rms_norm(mixed, self.weights["norm"]) * F.silu(prepared[4])
        return self.linear("out", gated.transpose(1, 2).flatten(2))


def scan(
    q: Tensor, k: Tensor, v: Tensor, step: Tensor, decay: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, h, n, dv] and the last state, in chunks of 64 tokens."""
    outputs = []
    inputs = (tensor.split(CHUNK, 2) for tensor in (q, k, v, step, decay))
    for chunk in zip(*inputs, strict=True):
        out, state = _chunk(chunk, state)
        outputs.append(out)
    return torch.cat(outputs, 2), state


def _chunk(chunk: Prepared, state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, step, decay = chunk
    size = q.shape[2]
    total = decay.cumsum(-1)
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    # [B, h, i, j]
    fading = (
        (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    )
    since_start = total.exp()[..., None]
    until_end = (total[..., -1:] - total).exp()[..., None]
    step = step[..., None]
    system = step * fading * (k @ k.transpose(2, 3))
    target = step * (v - since_start * (k @ state))
    change = torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)
    out = since_start * (q @ state) + (fading * (q @ k.transpose(2, 3))) @ change
    return out, state * since_start[..., -1:, :] + (until_end * k).transpose(2, 3) @ change
