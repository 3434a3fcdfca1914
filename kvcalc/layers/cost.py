"""Cost of operators, and the formulas of matrix products and attention.

`flops` counts only matrix products, 2 per multiply-add. Norms, RoPE, softmax, activations, top-k
and sampling count as `vector_flops`. Bytes are counted separately for weights, cache reads, cache
writes, activations and network traffic.
"""

from enum import StrEnum
from typing import NamedTuple, TypeAlias

import msgspec

from kvcalc.arithmetic import Num, Real, floor_div, minimum

SOFTMAX_FLOPS = 5  # per score: maximum, subtraction, exponential, sum, division


class Cost(NamedTuple):
    """FLOPs and bytes on one GPU. Costs add up, and scale with the number of runs.

    Values are ints, or arrays if the batch has arrays.

    Attributes:
        flops: FLOPs of matrix products, 2 per multiply-add.
        vector_flops: FLOPs of norms, RoPE, softmax, activations, top-k and sampling.
        weight_bytes: Weights, read once per pass.
        cache_read_bytes, cache_write_bytes: KV cache and states.
        activation_bytes: Inputs and outputs of operators, without attention scores.
        network_bytes: Bytes sent to other GPUs.
        inter_node_bytes: Part of `network_bytes` that leaves the node over this rank's link.
    """

    flops: Num = 0
    vector_flops: Num = 0
    weight_bytes: Num = 0
    cache_read_bytes: Num = 0
    cache_write_bytes: Num = 0
    activation_bytes: Num = 0
    network_bytes: Num = 0
    inter_node_bytes: Num = 0

    def __add__(self, other: "Cost") -> "Cost":  # type: ignore[override]
        return Cost._make([a + b for a, b in zip(self, other, strict=True)])

    def __mul__(self, times: Num) -> "Cost":  # type: ignore[override]
        return Cost._make([a * times for a in self])

    @property
    def cache_bytes(self) -> Num:
        """Return the bytes of cache reads and writes."""
        return self.cache_read_bytes + self.cache_write_bytes

    @property
    def bytes(self) -> Num:
        """Return the bytes of memory traffic of the GPU, without the network."""
        return (
            self.weight_bytes
            + self.cache_read_bytes
            + self.cache_write_bytes
            + self.activation_bytes
        )


class Role(StrEnum):
    """Purpose of an operator, independent of its name."""

    PROJECTION = "projection"  # queries, keys, values and outputs of a mixer
    # depends on cached tokens: attention, indexer, scan, recomputed keys and values
    CORE = "core"
    FFN = "ffn"  # dense or experts, the router among them
    HEAD = "head"  # the projection to the vocabulary
    OTHER = "other"  # norms, embeddings, elementwise chains, collectives


class GemmShape(NamedTuple):
    """A matrix product x[m, k] · W[k, n] for a kernel model.

    Block-diagonal copies count together in n. `stored` is the bytes of one weight in `format`, with
    scales.
    """

    m: Real
    n: Real
    k: int
    stored: float
    format: str = ""


class AttentionShape(NamedTuple):
    """The shape of an attention operator for a kernel model.

    Attributes:
        groups: (count, new, past, pairs) of each group; pairs are the (query, key) pairs of all its
            sequences, limited by windows and top-k.
        kv_heads: KV heads; 0 for latents that all heads share.
        cached: Formats of the cache entries that attention reads, keys first; empty without a
            cache.
    """

    heads: int
    kv_heads: int
    key: int
    value: int
    cached: tuple[str, ...]
    groups: tuple[tuple[Num, Num, Num, Num], ...]

    @property
    def num_queries(self) -> Num:
        """Return the new tokens of all sequences."""
        return sum(count * new for count, new, *_ in self.groups)

    @property
    def num_pairs(self) -> Num:
        """Return the (query, key) pairs of all sequences."""
        return sum(pairs for *_, pairs in self.groups)


class CollectiveShape(NamedTuple):
    """The shape of an all-reduce of `bytes` bytes over `ranks` ranks; `near` of the ranks are on
    one node."""

    ranks: int
    bytes: Num
    near: int


class ExpertsShape(NamedTuple):
    """Routed experts for a kernel model.

    Attributes:
        tokens: Tokens of all ranks.
        hidden: Width of a token.
        top_k: Experts per token.
        experts: Number of experts.
        ranks: Ranks over which whole experts are spread.
        width: Columns of an expert on this rank.
        gated: Whether an expert has two matrices of this width: gate and up.
        bias: Whether experts have biases.
        format: Weight format of the experts.
    """

    tokens: Num
    hidden: int
    width: int
    top_k: int
    experts: int
    ranks: int
    gated: bool
    bias: bool
    format: str


class SparseShape(NamedTuple):
    """The sparse-attention module of one layer for a kernel model: projections, indexer, attention.

    Attributes:
        heads: Query heads of this rank.
        hidden, q_lora_rank, kv_lora_rank, rope, nope, value: Widths, as in the module's spec.
        index_heads: Heads of the indexer; 0 without an indexer.
        index_width: Width of an index key.
        top_k: Tokens that a query reads.
        cached: Formats of a latent and its RoPE key.
        format: Storage format of the projections.
        groups: (count, new, past) of each group of the batch.
    """

    heads: int
    hidden: int
    q_lora_rank: int
    kv_lora_rank: int
    rope: int
    nope: int
    value: int
    index_heads: int
    index_width: int
    top_k: int
    cached: tuple[str, ...]
    format: str
    groups: tuple[tuple[Num, Num, Num], ...]


Shape: TypeAlias = GemmShape | AttentionShape | CollectiveShape | ExpertsShape


class Operator(msgspec.Struct, frozen=True):
    """One operator of a pass.

    Attributes:
        name: Name in tables.
        layer: Kind of layer; '' outside the layers.
        count: Number of runs in the pass.
        kind: gemm, attention, experts, scan, vector or network.
        cost: Cost of one run.
        dtype: dtype of its matrix products; '' without products.
        parts: Name and cost of each part of a fused operator. `cost` includes them.
        shape: Shape for a kernel model, if one exists.
        experts: Expected number of routed experts whose weights this GPU reads.
        role: Purpose of the operator.
        form: Form of latent attention, absorbed or expanded; '' for other operators.
        weights: Names of the matrices that the operator multiplies by.
        module: Shape of the sparse-attention module to which the operator belongs.
    """

    name: str
    layer: str
    count: int
    kind: str
    cost: Cost
    dtype: str = ""
    parts: tuple[tuple[str, Cost], ...] = ()
    shape: Shape | None = None
    experts: Real = 0
    role: Role = Role.OTHER
    form: str = ""
    weights: tuple[str, ...] = ()
    module: SparseShape | None = None

    @property
    def total(self) -> Cost:
        """Return the cost of all runs together."""
        return self.cost * self.count


def unfused(operator: Operator, element: int) -> list[tuple[str, Cost]]:
    """Return the cost of each part of an operator if the parts run as separate kernels.

    Attention becomes the scores QKᵀ, their softmax and the product with V. The kernels write or
    read arrays [queries, keys], which fused attention never stores. An FFN's gate and up read the
    input twice.

    Args:
        element: Bytes of an activation.
    """
    cost, shape = operator.cost, operator.shape
    if isinstance(shape, AttentionShape):
        return _unfused_attention(cost, shape, element)
    if isinstance(shape, GemmShape):
        moved: Num = int(shape.m * (shape.k + shape.n // 2))
    elif isinstance(shape, ExpertsShape):
        moved = -(-shape.tokens * shape.top_k // shape.ranks) * (shape.hidden + shape.width)
    else:
        return []
    results: list[tuple[str, Cost]] = []
    for name, part in operator.parts or ((operator.name, cost),):
        prefix, is_wide, _ = name.partition("gate_up")
        if is_wide:
            half = Cost(
                part.flops // 2, 0, part.weight_bytes // 2, activation_bytes=moved * element
            )
            results += [(f"{prefix}gate", half), (f"{prefix}up", half)]
        elif operator.parts:
            results.append((name, part))
    return results


def _unfused_attention(
    cost: Cost, shape: AttentionShape, element: int
) -> list[tuple[str, Cost]]:
    heads, key, value = shape.heads, shape.key, shape.value
    queries = shape.num_queries * heads * element
    pairs = shape.num_pairs * heads
    scores = pairs * element
    expanded = cost.activation_bytes - queries * (key + value)
    read = cost.cache_read_bytes
    # an absorbed latent is key and value, so both products read it
    width = key if not shape.kv_heads and not expanded else key + value
    qk = Cost(
        2 * pairs * key,
        cache_read_bytes=read * key // width,
        activation_bytes=queries * key + scores + expanded * key // (key + value),
    )
    softmax = Cost(vector_flops=cost.vector_flops, activation_bytes=2 * scores)
    av = Cost(
        2 * pairs * value,
        cache_read_bytes=read * value // width,
        activation_bytes=scores + queries * value + expanded * value // (key + value),
    )
    return [("qk", qk), ("softmax", softmax), ("av", av)]


def gemm_flops(tokens: Num, inputs: int, outputs: int) -> Num:
    """Return FLOPs of x[tokens, inputs] · W[inputs, outputs]: 2 · tokens · inputs · outputs."""
    return 2 * tokens * inputs * outputs


def pair_flops(pairs: Num, heads: int, width: int) -> Num:
    """Return FLOPs of scores or weighted values: 2 · pairs · heads · width."""
    return 2 * pairs * heads * width


def causal_pairs(new: Num, past: Num, limit: int = 0) -> Num:
    """Return the (query, key) pairs of `new` causal queries after `past` tokens.

    Without a limit: new·past + new(new + 1)/2.

    Args:
        limit: Maximum keys of a query (window, budget, top-k): Σ min(j, limit) for j = past + 1 …
            past + new.
    """
    if not limit:
        return new * past + triangle(new)

    def until(tokens: Num) -> Num:
        low: Num = minimum(tokens, limit)
        return triangle(low) + (tokens - low) * limit

    return until(new + past) - until(past)


def triangle(n: Num) -> Num:
    """Return 1 + 2 + … + n."""
    return floor_div(n * (n + 1), 2)


def chunk_pairs(new: Num, past: Num, chunk: int) -> Num:
    """Return the (query, key) pairs if a query sees only its own chunk: Σ ((j − 1) mod chunk) +
    1."""

    def until(tokens: Num) -> Num:
        return floor_div(tokens, chunk) * triangle(chunk) + triangle(tokens % chunk)

    return until(new + past) - until(past)


def compressed_pairs(new: Num, past: Num, ratio: int, top: int = 0) -> Num:
    """Return the (query, row) pairs for rows of `ratio` tokens each: Σ min(⌊j/ratio⌋, top)."""

    def until(tokens: Num) -> Num:
        low: Num = minimum(tokens, top * ratio - 1) if top else tokens
        rows = floor_div(low, ratio)
        pairs = ratio * triangle(rows - 1) + rows * (low - rows * ratio + 1)
        return pairs + (tokens - low) * top

    return until(new + past) - until(past)


def reached_fraction(tokens: Num, top_k: int, experts: int) -> Real:
    """Return the share of experts that `tokens` tokens reach under uniform routing: 1 − (1 −
    k/E)^T.

    One token reaches exactly k/E. With k = E the result is the int 1. An array of tokens gives an
    array of shares.
    """
    if top_k == experts:
        return 1
    if isinstance(tokens, int):
        return _reached(tokens, top_k, experts)
    import numpy as np

    counts, indices = np.unique(tokens, return_inverse=True)
    shares = np.array([_reached(int(count), top_k, experts) for count in counts])
    fractions: Real = shares[indices].reshape(np.shape(tokens))
    return fractions


def _reached(tokens: int, top_k: int, experts: int) -> float:
    return top_k / experts if tokens == 1 else 1.0 - (1.0 - top_k / experts) ** tokens


def expected_experts(tokens: Num, top_k: int, experts: int) -> Real:
    """Return the expected number of distinct experts: E·(1 − (1 − k/E)^T), a float; one token gives
    k."""
    if isinstance(tokens, int) and tokens == 1:
        return float(top_k)
    return float(experts) * reached_fraction(tokens, top_k, experts)
