"""The dense feed-forward network: `kvcalc.layers.ffn.Dense` in torch, gated (SiLU) or plain (GELU, tanh form)."""

from torch import Tensor, nn
from torch.nn import functional as F

from kvcalc.layers.ffn import Dense
from kvcalc.measure.layers.base import Parameters


class FeedForwardLayer(nn.Module):
    """x [B, n, D] → [B, n, D]: down(silu(gate) · up), or down(gelu(up))."""

    def __init__(self, spec: Dense, hidden_size: int) -> None:
        super().__init__()
        self.spec = spec
        self.weights = Parameters(spec.weights(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        up = self.weights.linear("up", x)
        inner = F.silu(self.weights.linear("gate", x)) * up if self.spec.gated else F.gelu(up, approximate="tanh")
        return self.weights.linear("down", inner)
