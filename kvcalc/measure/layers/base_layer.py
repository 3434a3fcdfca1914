"""Parts that all torch layers share: parameters, rotary positions, norms, and the dense FFN.

Shapes: B sequences, n new tokens, D hidden size, H query heads, G KV heads, d head dim, S all tokens.
The FFN is `kvcalc.layers.ffn.Dense` in torch: gated (SiLU) or plain (GELU, tanh form).
"""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvcalc.errors import UserError
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.ffn import Dense
from kvcalc.layers.part import Part
from kvcalc.layers.weights import Weight, WeightKind
from kvcalc.measure.torch_cache import LayerCache

ROPE_BASE = 10_000.0
NORM_EPSILON = 1e-6


class Parameters(nn.Module):
    """Random parameters of a spec: `name` [outputs, inputs] or [outputs], and `name_bias`."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        super().__init__()
        self.biased = {w.name for w in weights if w.bias}
        for w in weights:
            if w.kind is WeightKind.VECTOR:
                self._add(w.name, 1 + torch.randn(w.outputs) / 8)
            else:
                self._add(w.name, torch.randn(w.outputs, w.inputs) * w.inputs**-0.5)
            if w.bias:
                self._add(f"{w.name}_bias", torch.randn(w.bias) / 8)

    def _add(self, name: str, values: Tensor) -> None:
        self.register_parameter(name, nn.Parameter(values, requires_grad=False))

    def __getitem__(self, name: str) -> Tensor:
        return self.get_parameter(name)

    def linear(self, name: str, x: Tensor) -> Tensor:
        """Return x [..., inputs] · Wᵀ as [..., outputs], with the bias if the spec has one."""
        bias = self[f"{name}_bias"] if name in self.biased else None
        return nn.functional.linear(x, self[name], bias)

    def __contains__(self, name: str) -> bool:
        return name in self._parameters


class Mixer(nn.Module):
    """A mixer in three steps, so that its core can be timed separately.

    - prepare: projections and positions of the new tokens.
    - core: writes the new rows to the cache, then attends or scans.
    - finish: the output projection.

    The cache stores `past` tokens before the call. Without a cache, `past` is 0.

    Attributes:
        kernel: Attention kernel: sdpa, plain or flex.
        repeats: Whether K and V are first copied to each query head.
        fused: Whether torch has a fused kernel for the core.
    """

    fused = True

    def __init__(self, spec: Part, hidden_size: int, rotates: bool = True) -> None:
        super().__init__()
        self.entries: tuple[CacheEntry, ...] = spec.cache()
        self.weights = Parameters(spec.weights(hidden_size))
        self.rotary = Rotary() if rotates else None
        self.kernel, self.repeats = "sdpa", False

    def prepare(self, x: Tensor, past: int) -> tuple[Tensor, ...]:
        """Return the inputs of the core for x [B, n, D]."""
        raise NotImplementedError

    def core(self, prepared: tuple[Tensor, ...], cache: LayerCache | None, past: int) -> Tensor:
        """Write the rows of the new tokens to the cache, and mix."""
        raise NotImplementedError

    def finish(self, mixed: Tensor, prepared: tuple[Tensor, ...]) -> Tensor:
        """Return the output [B, n, D]."""
        raise NotImplementedError

    def forward(self, x: Tensor, cache: LayerCache | None = None, past: int = 0) -> Tensor:
        prepared = self.prepare(x, past)
        return self.finish(self.core(prepared, cache, past), prepared)


class Rotary:
    """Rotary positions over the last axis, with halves paired (GPT-NeoX order). Angles use float64."""

    def __init__(self) -> None:
        self._tables: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}

    def __call__(self, x: Tensor, past: int) -> Tensor:
        """Rotate x [..., n, d] for positions past … past + n − 1."""
        cos, sin = (t[past : past + x.shape[-2]] for t in self._table(x, past + x.shape[-2]))
        low, high = x.chunk(2, -1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)

    def _table(self, x: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        key = (x.shape[-1], x.dtype, x.device)
        if key not in self._tables or self._tables[key][0].shape[0] < tokens:
            size = 1 << (tokens - 1).bit_length()
            frequencies = ROPE_BASE ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float64) / x.shape[-1])
            angles = torch.outer(torch.arange(size, dtype=torch.float64), frequencies)
            self._tables[key] = (angles.cos().to(x.device, x.dtype), angles.sin().to(x.device, x.dtype))
        return self._tables[key]


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return x / √(mean x² + ε) · weight over the last axis."""
    return nn.functional.rms_norm(x, (x.shape[-1],), weight, NORM_EPSILON)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Reshape [B, n, h·d] to [B, h, n, d]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """Reshape [B, h, n, d] to [B, n, h·d]."""
    return x.transpose(1, 2).flatten(2)


def refuse(spec: Part, *fields: str) -> None:
    """Raise UserError if the spec uses one of these fields, which its torch layer does not support."""
    for name in fields:
        default = next(f.default for f in msgspec.structs.fields(spec) if f.name == name)
        if getattr(spec, name) != default:
            raise UserError(
                f"`measure` has no {spec.label} layer with {name} {getattr(spec, name)!r}", hint=f"Switch it off: {name}=null"
            )


class FeedForwardLayer(nn.Module):
    """FFN from [B, n, D] to [B, n, D]: down(silu(gate) · up), or down(gelu(up))."""

    def __init__(self, spec: Dense, hidden_size: int) -> None:
        super().__init__()
        self.spec = spec
        self.weights = Parameters(spec.weights(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        up = self.weights.linear("up", x)
        inner = F.silu(self.weights.linear("gate", x)) * up if self.spec.gated else F.gelu(up, approximate="tanh")
        return self.weights.linear("down", inner)
