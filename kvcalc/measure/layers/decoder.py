"""A whole decoder from a `Model`: embedding, layers with norms, positions, LM head.

It has exactly the model's parameters. Each part of a layer computes x + part(norm(x)).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvcalc.errors import UserError
from kvcalc.layers.feed_forward import Dense
from kvcalc.layers.part import Sublayer
from kvcalc.layers.weights import Weight
from kvcalc.measure.layers import build_mixer
from kvcalc.measure.layers.base_layer import (
    NORM_EPSILON,
    FeedForwardLayer,
    LayerCache,
    Mixer,
    Parameters,
    model_caches,
    rms_norm,
)
from kvcalc.model.model import NORM_VECTORS, Layer, Model

OUTER_WEIGHTS = {"embedding", "position_embedding", "final_norm", "lm_head"}


class DecoderBlock(nn.Module):
    """One layer of a decoder in torch, with random weights.

    Its parts, such as attention and FFN, run in order. Each part computes x + part(norm(x)).

    Args:
        model: Model of the decoder.
        layer: The kind of layer: its parts and their sizes.
    """

    def __init__(self, model: Model, layer: Layer) -> None:
        super().__init__()
        if layer.shared or layer.norm_count != len(layer.parts) or len(layer.mixers) > 1:
            raise UserError(
                f"`measure` has no decoder of {model.name}'s layers",
                "It has one mixer and norms before each part",
            )
        self.norm = Norm(model, layer.norm_count)
        self.parts = nn.ModuleList(_part(model, layer, part) for part in layer.parts)

    def forward(self, x: Tensor, cache: LayerCache | None, past: int) -> Tensor:
        for index, part in enumerate(self.parts):
            inner = self.norm(x, index)
            x = x + (part(inner, cache, past) if isinstance(part, Mixer) else part(inner))
        return x


def _part(model: Model, layer: Layer, part: Sublayer) -> nn.Module:
    """Return the torch layer of a mixer or an FFN. Raises UserError if kvcalc has no torch layer
    for it."""
    if part.label:
        rotates = not model.position_embeddings
        return build_mixer(part, model.hidden_size, rotates, layer.shares_cache)
    if not isinstance(part, Dense) or part.input_size:
        name = type(part).__name__
        raise UserError(f"`measure` has no {name} layer", "It has dense feed-forward networks")
    return FeedForwardLayer(part, model.hidden_size)


class Norm(nn.Module):
    """Several norms over the hidden size, as one torch module: RMSNorm, LayerNorm or no norm.

    Args:
        model: Model that defines the type of norm.
        count: Number of norms. A call selects one of them by its index, from 0.
    """

    def __init__(self, model: Model, count: int) -> None:
        super().__init__()
        self.kind = model.norm
        shape = count, NORM_VECTORS[model.norm], model.hidden_size
        self.weight = nn.Parameter(1 + torch.randn(shape) / 8, requires_grad=False)

    def forward(self, x: Tensor, index: int = 0) -> Tensor:
        vectors = self.weight[index]
        if not len(vectors):
            return x
        if self.kind == "rms":
            return rms_norm(x, vectors[0])
        bias = vectors[1] if self.kind == "layer" else None
        return F.layer_norm(x, vectors[0].shape, vectors[0], bias, NORM_EPSILON)


class Decoder(nn.Module):
    """A whole decoder in torch with random weights, from token ids to logits.

    A call maps token ids [batch, new tokens] to logits [batch, 1, vocabulary] of the last token. If
    its argument `all_positions` is true, the logits are of all new tokens, [batch, new tokens,
    vocabulary]. Its argument `past` is the number of cached tokens before the new tokens.

    Args:
        model: Model to build.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        outer = {w.name: w for w in model.outer_weights}
        for name in outer:
            if name not in OUTER_WEIGHTS:
                raise UserError(f"`measure` has no decoder with {name} as {model.name} has it")
        self.model = model
        self.embedding = _table(outer["embedding"])
        positions = outer.get("position_embedding")
        self.positions = _table(positions) if positions else None
        self.blocks = nn.ModuleList(
            DecoderBlock(model, model.kinds[kind]) for kind in model.order
        )
        self.final_norm = Norm(model, 1) if "final_norm" in outer else None
        self.head = Parameters([outer["lm_head"]]) if "lm_head" in outer else None

    def caches(self, batch: int, capacity: int) -> list[LayerCache]:
        """Return one empty cache per layer, in the order of the layers.

        Args:
            batch: Number of sequences.
            capacity: Maximum tokens of a sequence.
        """
        return model_caches(self.model, batch, capacity, self.embedding.weight)

    def forward(
        self,
        tokens: Tensor,
        caches: Sequence[LayerCache] | None = None,
        past: int = 0,
        all_positions: bool = False,
    ) -> Tensor:
        x = self.embedding(tokens)
        end = past + tokens.shape[1]
        if self.positions:
            max_positions = self.model.position_embeddings
            if end > max_positions:
                raise UserError(
                    f"{self.model.name} has {max_positions:,} positions, and the request needs more"
                )
            x = x + self.positions.weight[past:end]
        if caches is None and any(layer.shares_cache for layer in self.model.kinds.values()):
            caches = self.caches(*tokens.shape)
        for index, block in enumerate(self.blocks):
            x = block(x, caches[index] if caches is not None else None, past)
        x = x if all_positions else x[:, -1:]
        x = self.final_norm(x) if self.final_norm else x
        return (
            self.head.linear("lm_head", x) if self.head else F.linear(x, self.embedding.weight)
        )


def _table(rows: Weight) -> nn.Embedding:
    return nn.Embedding(rows.inputs, rows.outputs).requires_grad_(False)
