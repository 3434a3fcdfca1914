"""Gated delta net: `GatedDeltaNet` in torch, token by token and in chunks.

With decay e^g and step β per head, the state S [dk, dv] becomes e^g·S + k·uᵀ with
u = β·(v − e^g·Sᵀk), and the output is Sᵀq (Yang et al. 2024, arXiv 2412.06464, section 3.1).

In a chunk, γ is the running sum of g. The u solve the unit lower triangular system
u_i + Σ_{j<i} β_i·e^(γi − γj)·(k_i·k_j)·u_j = β_i·(v_i − e^γi·Sᵀk_i), so matrix products replace the
loop over tokens.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from kvcalc.layers.recurrent import GatedDeltaNet
from kvcalc.measure.layers.base_layer import Mixer, join_heads, rms_norm, split_heads
from kvcalc.measure.torch_cache import LayerCache

CHUNK = 64
A_RANGE, DT_RANGE = (
    (1.0, 16.0),
    (1e-3, 1e-1),
)  # that a model starts from; faster decays leave denormal numbers, which CPUs are slow at


class GatedDeltaNetLayer(Mixer):
    """hk key heads of width dk and hv value heads of width dv; hv / hk value heads share q and k.

    Decays have the values of an untrained model. Faster decays produce denormal numbers, which make a CPU
    many times slower.
    """

    fused = False

    def __init__(self, spec: GatedDeltaNet, hidden_size: int, rotates: bool = True) -> None:
        super().__init__(spec, hidden_size, rotates=False)
        self.spec = spec
        heads = spec.linear_num_value_heads
        self.weights["a_dt"][:heads] = torch.empty(heads).uniform_(*A_RANGE).log()
        self.weights["a_dt"][heads:] = torch.empty(heads).uniform_(*map(math.log, DT_RANGE)).exp().expm1().log()

    def prepare(self, x: Tensor, past: int) -> tuple[Tensor, ...]:
        """Return the inputs of the convolution, and the gates.

        q and k together are [B, hk, n, 2·dk], v is [B, hv, n, dv], β and g are [B, hv, n].
        """
        spec, w = self.spec, self.weights
        qk = split_heads(w.linear("qk", x), spec.linear_num_key_heads)
        v, gate = (split_heads(part, spec.linear_num_value_heads) for part in w.linear("v_gate", x).chunk(2, -1))
        step, decay = (part.transpose(1, 2) for part in w.linear("step_decay", x).chunk(2, -1))
        a_log, dt_bias = (part[:, None] for part in w["a_dt"].chunk(2))
        return qk, v, step.sigmoid(), -a_log.exp() * F.softplus(decay + dt_bias), gate

    def core(self, prepared: tuple[Tensor, ...], cache: LayerCache | None, past: int) -> Tensor:
        """Return convolution and scan as [B, hv, n, dv]. Without a cache, all states start at zero."""
        spec = self.spec
        qk, v, step, decay, _ = prepared
        states = cache.tensors if cache is not None else [None, None, None]
        qk = F.silu(self._convolved("conv_qk", qk, states[0]))
        v = F.silu(self._convolved("conv_v", v, states[1]))
        wide = torch.promote_types(torch.float32, v.dtype)
        q, k = (F.normalize(part.to(wide), dim=-1) for part in qk.chunk(2, -1))
        shared = spec.linear_num_value_heads // spec.linear_num_key_heads
        q, k = (part.repeat_interleave(shared, 1) if shared > 1 else part for part in (q * spec.linear_key_head_dim**-0.5, k))
        scan = stepwise if v.shape[2] == 1 else chunkwise
        start = states[2].to(wide) if states[2] is not None else q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
        mixed, end = scan(q, k, v.to(wide), step.to(wide), decay.to(wide), start)
        if states[2] is not None:
            states[2].copy_(end)
        return mixed.to(v.dtype)

    def _convolved(self, name: str, x: Tensor, state: Tensor | None) -> Tensor:
        """Return the causal convolution of each channel of x [B, h, n, w].

        The state [B, h, kernel − 1, w] advances by n columns.
        """
        heads, n, width = x.shape[1:]
        kernel = self.spec.linear_conv_kernel_dim
        before = x.new_zeros(x.shape[0], heads, kernel - 1, width) if state is None else state
        columns = torch.cat((before, x), 2)
        filters = self.weights[name].view(heads, width, -1)
        out = sum((columns[:, :, i : i + n] * filters[:, None, :, i] for i in range(kernel)), torch.zeros_like(x))
        if state is not None and kernel > 1:
            state.copy_(columns[:, :, n:])
        return out + filters[:, None, :, kernel] if self.spec.conv_bias else out

    def finish(self, mixed: Tensor, prepared: tuple[Tensor, ...]) -> Tensor:
        return self.weights.linear("out", join_heads(rms_norm(mixed, self.weights["norm"]) * F.silu(prepared[4])))


def stepwise(q: Tensor, k: Tensor, v: Tensor, step: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs [B, h, n, dv] and the last state, one token after the other."""
    found = []
    for i in range(q.shape[2]):
        state = state * decay[:, :, i, None, None].exp()
        recalled = (k[:, :, i, None] @ state)[:, :, 0]  # [B, h, dv]
        change = step[:, :, i, None] * (v[:, :, i] - recalled)
        state = state + k[:, :, i, :, None] * change[:, :, None]
        found.append(q[:, :, i, None] @ state)
    return torch.cat(found, 2), state


def chunkwise(q: Tensor, k: Tensor, v: Tensor, step: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs [B, h, n, dv] and the last state, in chunks of 64 tokens."""
    found = []
    for start in range(0, q.shape[2], CHUNK):
        part = slice(start, start + CHUNK)
        out, state = _chunk(q[:, :, part], k[:, :, part], v[:, :, part], step[:, :, part, None], decay[:, :, part], state)
        found.append(out)
    return torch.cat(found, 2), state


def _chunk(q: Tensor, k: Tensor, v: Tensor, step: Tensor, decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    total = decay.cumsum(-1)
    size = q.shape[2]
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    fading = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, float("-inf")).exp()  # [B, h, i, j]
    since = total.exp()[..., None]
    system = step * fading * (k @ k.transpose(2, 3))
    asked = step * (v - since * (k @ state))
    change = torch.linalg.solve_triangular(system, asked, upper=False, unitriangular=True)
    out = since * (q @ state) + (fading * (q @ k.transpose(2, 3))) @ change
    left = (total[..., -1:] - total).exp()[..., None]
    return out, state * since[..., -1:, :] + (left * k).transpose(2, 3) @ change
