"""A whole decoder from a `Model`: embedding, layers with norms, positions, LM head.

It has exactly the model's parameters. Each part of a layer computes x + part(norm(x)).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvcalc.errors import UserError
from kvcalc.layers.weights import Weight
from kvcalc.measure.layers import build_feed_forward, build_mixer
from kvcalc.measure.layers.base_layer import NORM_EPSILON, Mixer, Parameters, rms_norm
from kvcalc.measure.layers.grouped_layer import SharedLayer
from kvcalc.measure.torch_cache import LayerCache
from kvcalc.model.spec import NORM_VECTORS, Layer, Model

KNOWN = {"embedding", "position_embedding", "final_norm", "lm_head"}


class Block(nn.Module):
    """One layer: its parts in order, each after a norm."""

    def __init__(self, model: Model, layer: Layer) -> None:
        super().__init__()
        if layer.shared or layer.norm_count != len(layer.parts) or len(layer.mixers) > 1:
            raise UserError(
                f"`measure` has no decoder of {model.name}'s layers", hint="It has one mixer and norms before each part"
            )
        rotates = not model.position_embeddings
        width = model.hidden_size
        self.norm = Norm(model, layer.norm_count)
        self.parts = nn.ModuleList(
            build_mixer(part, width, rotates, layer.shares_cache) if part.label else build_feed_forward(part, width)
            for part in layer.parts
        )

    def forward(
        self, x: Tensor, cache: LayerCache | None, past: int, lent: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return x after the layer, and the K and V that later layers share in a pass without a cache."""
        for index, part in enumerate(self.parts):
            inner = self.norm(x, index)
            if isinstance(part, Mixer):
                prepared = part.prepare(inner, past)
                if isinstance(part, SharedLayer):
                    prepared = (*prepared, *lent) if cache is None else prepared
                else:
                    lent = prepared[1:]
                x = x + part.finish(part.core(prepared, cache, past), prepared)
            else:
                x = x + part(inner)
        return x, lent


class Norm(nn.Module):
    """`count` norms of the hidden size: RMSNorm or LayerNorm, as the model requires."""

    def __init__(self, model: Model, count: int) -> None:
        super().__init__()
        self.kind, self.width = model.norm, model.hidden_size
        vectors = NORM_VECTORS[model.norm]
        self.weight = nn.Parameter(1 + torch.randn(count, vectors, self.width) / 8, requires_grad=False) if vectors else None

    def forward(self, x: Tensor, index: int = 0) -> Tensor:
        if self.weight is None:
            return x
        weight = self.weight[index]
        if self.kind == "rms":
            return rms_norm(x, weight[0])
        return F.layer_norm(x, (self.width,), weight[0], weight[1] if self.kind == "layer" else None, NORM_EPSILON)


class Decoder(nn.Module):
    """Map token ids [B, n] after `past` cached tokens to logits [B, 1, V], or [B, n, V] for all positions."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        outer: dict[str, Weight] = {w.name: w for w in model.outer_weights}
        if unknown := [name for name in outer if name not in KNOWN]:
            raise UserError(f"`measure` has no decoder with {unknown[0]} as {model.name} has it")
        self.model = model
        self.embedding = _table(outer["embedding"])
        self.positions = _table(outer["position_embedding"]) if "position_embedding" in outer else None
        self.blocks = nn.ModuleList(Block(model, model.kinds[kind]) for kind in model.order)
        self.final_norm = Norm(model, 1) if "final_norm" in outer else None
        self.head = Parameters([outer["lm_head"]]) if "lm_head" in outer else None

    def caches(
        self, batch: int, capacity: int, block_size: int = 0, state: torch.dtype | None = None, is_grown: bool = False
    ) -> list[LayerCache]:
        """Return one cache per layer. A layer that shares a cache gets the cache of the layer before it."""
        table = self.embedding.weight
        found: list[LayerCache] = []
        for kind in self.model.order:
            layer = self.model.kinds[kind]
            if layer.shares_cache and found:
                found.append(found[-1])
            else:
                size = (batch, capacity, table.dtype, table.device, block_size, state, is_grown)
                found.append(LayerCache(layer.entries, *size))
        return found

    def forward(
        self, tokens: Tensor, caches: Sequence[LayerCache] | None = None, past: int = 0, all_positions: bool = False
    ) -> Tensor:
        x = self.embedding(tokens)
        if self.positions:
            if past + tokens.shape[1] > self.model.position_embeddings:
                raise UserError(f"{self.model.name} has {self.model.position_embeddings:,} positions, and the request needs more")
            x = x + self.positions.weight[past : past + tokens.shape[1]]
        lent: tuple[Tensor, ...] = ()
        for index, block in enumerate(self.blocks):
            x, lent = block(x, caches[index] if caches is not None else None, past, lent)
        x = x if all_positions else x[:, -1:]
        x = self.final_norm(x) if self.final_norm else x
        return self.head.linear("lm_head", x) if self.head else F.linear(x, self.embedding.weight)


def _table(rows: Weight) -> nn.Embedding:
    return nn.Embedding(rows.inputs, rows.outputs).requires_grad_(False)
