"""Parts that all torch layers share: cache, parameters, rotary positions, norms, dense FFN.

Shapes: B sequences, n new tokens, D hidden size, H query heads, G KV heads, d head dim, S all
tokens. The FFN is `kvcalc.layers.feed_forward.Dense` in torch: gated (SiLU) or plain (GELU, tanh
form).
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvcalc.errors import UserError
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.feed_forward import Dense
from kvcalc.layers.weights import Weight, WeightKind
from kvcalc.model.model import Model

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
FILL_ELEMENTS = 1 << 20


class CacheRows:
    """Stored rows of one cache entry, such as the keys of a layer, for sequences of limited length.

    Args:
        entry: Specification of the cache entry.
        batch: Number of sequences.
        capacity: Maximum tokens of a sequence.
        like: Tensor on the device of the rows, with their data type if the entry does not fix
            another.

    Attributes:
        tensor: The stored rows, [batch, heads, rows, width].
        limit: Number of rows if the entry stores only the last tokens, as a ring buffer; otherwise
            0.
    """

    def __init__(self, entry: CacheEntry, batch: int, capacity: int, like: Tensor) -> None:
        self.limit = entry.limit if entry.grows else 0
        self.capacity = capacity
        shape = batch, entry.heads, int(entry.stored_rows(capacity)), entry.width
        dtype = DTYPES[entry.dtype] if entry.dtype else like.dtype
        self.tensor = torch.zeros(shape, dtype=dtype, device=like.device)

    def append(self, rows: Tensor, past: int) -> Tensor:
        """Write the rows of new tokens, and return all rows that the new tokens attend to.

        The result is [batch, heads, rows, width]. If the entry stores only the last `limit` tokens,
        its rows are a ring buffer. One new token overwrites the oldest row and reads the buffer in
        any order, because keys include their positions. Several new tokens read the last limit − 1
        rows and their own rows. These are written after they are read, because the first queries
        still attend to rows that the last new tokens replace.

        Args:
            rows: Rows of the new tokens, [batch, heads, new tokens, width].
            past: Number of tokens before them.
        """
        new = rows.shape[2]
        end = past + new
        if end > self.capacity:
            raise ValueError(
                f"token {end} does not fit: the cache stores {self.capacity} tokens"
            )
        if not self.limit or new == 1:
            slot = past % self.limit if self.limit else past
            self.tensor[:, :, slot : slot + new] = rows
            return self.read(end)
        attended_tokens = rows
        if past:
            old = self.tensor.index_select(2, self._slots(max(0, past - self.limit + 1), past))
            attended_tokens = torch.cat((old, rows), 2)
        rows = rows[:, :, -self.limit :]
        self.tensor.index_copy_(2, self._slots(end - rows.shape[2], end), rows)
        return attended_tokens

    def _slots(self, start: int, end: int) -> Tensor:
        """Return the slots in the ring of the positions start … end − 1."""
        return torch.arange(start, end, device=self.tensor.device) % self.limit

    def read(self, tokens: int) -> Tensor:
        """Return the stored rows of the cache entry, [batch, heads, rows, width].

        Args:
            tokens: Number of tokens written so far. If `limit` is not 0, only the last `limit` of
                them are stored.
        """
        return self.tensor[:, :, : min(tokens, self.limit or tokens)]


LayerCache = tuple[CacheRows, ...]  # rows and states in the order of the layer's entries


def model_caches(model: Model, batch: int, capacity: int, like: Tensor) -> list[LayerCache]:
    """Return one empty cache per layer of a model, in the order of the layers.

    A layer that shares a cache gets the cache of the layer before it.

    Args:
        model: The model.
        batch: Number of sequences.
        capacity: Maximum tokens of a sequence.
        like: Tensor on the device of the cache, with its data type if an entry does not fix
            another.
    """
    caches: list[LayerCache] = []
    for kind in model.order:
        layer = model.kinds[kind]
        if layer.shares_cache and caches:
            caches.append(caches[-1])
        else:
            rows = (CacheRows(entry, batch, capacity, like) for entry in layer.entries)
            caches.append(tuple(rows))
    return caches


def cache_tensors(caches: Iterable[LayerCache]) -> list[Tensor]:
    """Return the tensors of several layers' caches in one list.

    A cache that several layers share occurs once.

    Args:
        caches: One cache per layer; layers that share a cache have the same object.
    """
    return [rows.tensor for cache in dict.fromkeys(caches) for rows in cache]


def storage_bytes(caches: Iterable[LayerCache]) -> int:
    """Return the allocated bytes of several layers' caches together; a shared cache counts once.

    Args:
        caches: One cache per layer; layers that share a cache have the same object.
    """
    return sum(tensor.untyped_storage().nbytes() for tensor in cache_tensors(caches))


def fill(caches: Iterable[LayerCache]) -> None:
    """Fill the caches of all layers with random rows, as if tokens had been processed.

    A decode step can then be timed without a prefill. The same 2^20 values are repeated, which is
    fast and does not affect times.

    Args:
        caches: One cache per layer.
    """
    for tensor in cache_tensors(caches):
        flat = tensor.view(-1)
        values = torch.randn(min(flat.numel(), FILL_ELEMENTS), device=tensor.device)
        for part in flat.split(FILL_ELEMENTS):
            part.copy_(values[: part.numel()])


ROPE_BASE = 10_000.0
NORM_EPSILON = 1e-6
Prepared = tuple[Tensor, ...]


class Parameters(nn.Module):
    """Random torch parameters for the weights of one part of a layer, such as attention or FFN.

    A weight called `name` becomes a parameter `name` [outputs, inputs] or, for a vector, [outputs].
    If the weight has a bias, the bias is a parameter `name_bias`.

    Args:
        weights: Names and sizes of the weights.
    """

    def __init__(self, weights: Sequence[Weight]) -> None:
        super().__init__()
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
        """Return x · Wᵀ as [..., outputs], plus the bias if the weight has one.

        Args:
            name: Name of the weight W [outputs, inputs], such as `q_proj`.
            x: Input [..., inputs].
        """
        return F.linear(x, self[name], self._parameters.get(f"{name}_bias"))

    def normed(self, name: str, x: Tensor) -> Tensor:
        """Return the RMSNorm of x over its last axis, or x unchanged if there is no such weight.

        A model without this norm can so use the same code.

        Args:
            name: Name of the norm's weight.
            x: Input [..., width].
        """
        return rms_norm(x, self[name]) if name in self._parameters else x


class Mixer(nn.Module):
    """Base class of attention and recurrence in torch, in three methods that run in order.

    The methods are separate so that `core` can be timed without projections.

    - prepare: projections and rotary positions of the new tokens.
    - core: writes the new rows to the cache, then attends or scans.
    - finish: the output projection.

    The argument `past` of all methods is the number of tokens before the new tokens. The cache
    already has their rows. Without a cache, `past` is 0.

    Attributes:
        refused: Fields of `spec` that the subclass does not support. A layer that sets one of them
            cannot be measured.
        spec: Specification of the attention or recurrence: its type and sizes.
        shares_cache: Whether the layer reads the cache of the layer before it.
        weights: Torch parameters of the layer.
        rotates: Whether the layer applies rotary positions.
    """

    refused = ""

    def __init__(self, spec: Any, hidden_size: int, rotates: bool, shares_cache: bool) -> None:
        super().__init__()
        for field in msgspec.structs.fields(spec):
            name = field.name
            value = getattr(spec, name)
            if name in self.refused.split() and value != field.default:
                raise UserError(
                    f"`measure` has no {spec.label} layer with {name} {value!r}",
                    f"Disable it with {name}=null",
                )
        self.spec, self.shares_cache = spec, shares_cache
        self.weights = Parameters(spec.weights(hidden_size))
        self.linear = self.weights.linear
        self.rotates = rotates

    def prepare(self, x: Tensor, past: int) -> Prepared:
        """Return the tensors that `core` and `finish` need, computed from the new tokens.

        Which tensors they are depends on the subclass, such as queries, keys and values.

        Args:
            x: Inputs of the new tokens [batch, new tokens, hidden size].
            past: Number of tokens before them.
        """
        raise NotImplementedError

    def core(self, prepared: Prepared, cache: LayerCache | None, past: int) -> Tensor:
        """Write the new tokens' rows to the cache, and return the output of attention or scan.

        The output is [batch, query heads, new tokens, value width].

        Args:
            prepared: Tensors that `prepare` returned.
            cache: Cache of the layer; None without a cache.
            past: Number of tokens before the new tokens.
        """
        raise NotImplementedError

    def finish(self, mixed: Tensor, prepared: Prepared) -> Tensor:
        """Return the output projection of the attention output, [batch, new tokens, hidden size].

        Args:
            mixed: Tensor that `core` returned.
            prepared: Tensors that `prepare` returned.
        """
        return self.linear("o", join_heads(mixed))

    def forward(self, x: Tensor, cache: LayerCache | None = None, past: int = 0) -> Tensor:
        prepared = self.prepare(x, past)
        return self.finish(self.core(prepared, cache, past), prepared)

    def rotated(self, x: Tensor, past: int) -> Tensor:
        """Return x with rotary positions, or unchanged if the layer has no rotary positions.

        Args:
            x: Queries or keys [..., tokens, width].
            past: Position of the first token.
        """
        return rotate(x, past) if self.rotates and x.shape[-1] else x


def append_rows(cache: LayerCache | None, index: int, rows: Tensor, past: int) -> Tensor:
    """Write rows of new tokens to one cache entry, and return all rows that the tokens attend to.

    The result is [batch, heads, rows, width].

    Args:
        cache: Cache of the layer. If it is None, the result is `rows`.
        index: Index of the cache entry in the layer, such as 0 for keys.
        rows: Rows of the new tokens, [batch, heads, new tokens, width].
        past: Number of tokens before them.
    """
    return rows if cache is None else cache[index].append(rows, past)


def rotate(x: Tensor, past: int) -> Tensor:
    """Return x with rotary positions (RoPE) applied to each token.

    Element i and element i + width/2 form a rotated pair, as in GPT-NeoX.

    Args:
        x: Queries or keys [..., tokens, width].
        past: Position of the first token.
    """
    end = past + x.shape[-2]
    tables = _rotary_tables(1 << (end - 1).bit_length(), x.shape[-1], x.dtype, x.device)
    cos, sin = (table[past:end] for table in tables)
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


@lru_cache(64)
def _rotary_tables(
    tokens: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [tokens, width / 2] of angles in float64."""
    powers = torch.arange(0, width, 2, dtype=torch.float64) / width
    angles = torch.outer(torch.arange(tokens, dtype=torch.float64), ROPE_BASE**-powers)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return the RMSNorm x / √(mean(x²) + 10⁻⁶) · weight, with the mean over the last axis.

    Args:
        x: Input [..., width].
        weight: Factors [width].
    """
    return F.rms_norm(x, (x.shape[-1],), weight, NORM_EPSILON)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return x [batch, tokens, heads · width] as [batch, heads, tokens, width]."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """Return x [batch, heads, tokens, width] as [batch, tokens, heads · width]."""
    return x.transpose(1, 2).flatten(2)


class FeedForwardLayer(nn.Module):
    """Dense feed-forward network (FFN) in torch, with random weights.

    It computes down(silu(gate(x)) · up(x)) if gated, otherwise down(gelu(up(x))). Input and output
    are [batch, tokens, hidden size].

    Args:
        spec: Width of the FFN, and whether it is gated.
        hidden_size: Width of input and output.
    """

    def __init__(self, spec: Dense, hidden_size: int) -> None:
        super().__init__()
        self.is_gated = spec.gated
        self.weights = Parameters(spec.weights(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.weights.linear("up", x)
        if self.is_gated:
            inner = F.silu(self.weights.linear("gate", x)) * inner
        else:
            inner = F.gelu(inner, approximate="tanh")
        return self.weights.linear("down", inner)
