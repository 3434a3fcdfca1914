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
    """FLOPs and bytes of one or more operators on one GPU.

    Costs can be added, and multiplied by a number of runs. Values are numbers for one forward pass,
    or arrays with one value per pass if the batch stands for several passes.

    Attributes:
        flops: FLOPs of matrix products, 2 per multiply-add.
        vector_flops: FLOPs of norms, RoPE, softmax, activations, top-k and sampling.
        weight_bytes: Bytes of weights that are read.
        cache_read_bytes: Bytes of KV cache and recurrent states that are read.
        cache_write_bytes: Bytes of KV cache and recurrent states that are written.
        activation_bytes: Bytes of operator inputs that are read and outputs that are written. The
            scores of fused attention stay on the chip and do not count.
        network_bytes: Bytes that this GPU sends to other GPUs.
        inter_node_bytes: Part of `network_bytes` that this GPU sends to other nodes.
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
        return Cost._make([a + b for a, b in zip(self, other)])

    def __mul__(self, times: Num) -> "Cost":  # type: ignore[override]
        return Cost._make([a * times for a in self])

    @property
    def cache_bytes(self) -> Num:
        """Return the bytes of KV cache and recurrent states that are read and written, in total."""
        return self.cache_read_bytes + self.cache_write_bytes

    @property
    def bytes(self) -> Num:
        """Return the bytes that the GPU reads from and writes to its own memory, in total.

        They are the bytes of weights, cache and activations. Bytes sent to other GPUs are not
        included.
        """
        return self.weight_bytes + self.cache_bytes + self.activation_bytes


class Role(StrEnum):
    """Group to which an operator belongs, by which reports select operators.

    Attributes:
        PROJECTION: Projections of queries, keys, values and outputs in an attention or recurrent
            layer.
        CORE: Work that depends on cached tokens: attention, indexer, scan, recomputed keys and
            values.
        FFN: Dense FFN or experts, including the router.
        HEAD: Projection to the vocabulary.
        OTHER: Norms, embeddings, elementwise chains and collectives.
    """

    PROJECTION = "projection"  # queries, keys, values and outputs of a mixer
    # depends on cached tokens: attention, indexer, scan, recomputed keys and values
    CORE = "core"
    FFN = "ffn"  # dense or experts, the router among them
    HEAD = "head"  # the projection to the vocabulary
    OTHER = "other"  # norms, embeddings, elementwise chains, collectives


class GemmShape(NamedTuple):
    """Shape of a matrix product x[m, k] · W[k, n] on one GPU, to predict its kernel's time.

    Attributes:
        m: Rows of x: tokens on this GPU; for experts, the mean tokens of an expert that is used.
        n: Columns of W, which are the outputs. It is the sum over all matrices that multiply the
            same x, and over all experts that are used.
        k: Rows of W, which are the inputs.
        stored: Mean bytes of one element of W in memory, with its share of the scales.
        format: Name of the storage format of W, such as `bf16` or `fp8`.
    """

    m: Real
    n: Real
    k: int
    stored: float
    format: str = ""


class AttentionShape(NamedTuple):
    """Shape of one layer's attention on one GPU, from which its kernel's time is predicted.

    Attributes:
        heads: Query heads on this GPU.
        kv_heads: KV heads on this GPU; 0 for latents that all heads share.
        key: Elements of a key of one head.
        value: Elements of a value of one head.
        cached: Distinct storage formats of the cached rows that attention reads, such as ("fp8",),
            the format of keys first; empty without a cache.
        groups: (count, new, past, pairs) of each group of equal sequences. `count` sequences have
            `new` new and `past` cached tokens each. `pairs` are the (query, key) pairs of the whole
            group per query head. Only keys that a query sees count, after the causal mask, windows
            and top-k.
    """

    heads: int
    kv_heads: int
    key: int
    value: int
    cached: tuple[str, ...]
    groups: tuple[tuple[Num, Num, Num, Num], ...]

    @property
    def num_queries(self) -> Num:
        """Return the new tokens of all sequences on this GPU; each is one query per head."""
        return sum(count * new for count, new, *_ in self.groups)

    @property
    def num_pairs(self) -> Num:
        """Return the (query, key) pairs of one query head in one layer, over all sequences.

        The sequences are those on this GPU. Only keys that a query sees count, after the causal
        mask, windows and top-k. The FLOPs of attention are proportional to this number.
        """
        return sum(pairs for *_, pairs in self.groups)


class CollectiveShape(NamedTuple):
    """Shape of an all-reduce, from which its time is predicted.

    Attributes:
        ranks: Number of GPUs that take part.
        bytes: Size of the array that is summed, which every GPU has completely.
        near: Number of these GPUs on each node.
    """

    ranks: int
    bytes: Num
    near: int


class ExpertsShape(NamedTuple):
    """Shape of a layer's routed experts, from which a fused MoE kernel's time is predicted.

    Attributes:
        tokens: New tokens of all data-parallel ranks.
        hidden: Input width of an expert.
        width: Intermediate width of an expert on this rank.
        top_k: Experts per token.
        experts: Number of experts in the layer.
        ranks: Number of expert-parallel ranks, which divide the experts.
        gated: Whether an expert has a gate matrix in addition to its up matrix.
        bias: Whether experts have biases.
        format: Name of the experts' storage format.
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
    """Shape of one layer's DeepSeek sparse attention on one GPU, to predict its time.

    The predicted time covers projections, indexer and attention together.

    Attributes:
        heads: Query heads on this GPU.
        hidden: Hidden size of the model.
        q_lora_rank: Width of the query latent.
        kv_lora_rank: Width of the KV latent.
        rope: Elements of a key with positions (RoPE).
        nope: Elements of a key without positions.
        value: Elements of a value.
        index_heads: Heads of the indexer; 0 without an indexer.
        index_width: Elements of an index key.
        top_k: Cached tokens that one query reads.
        cached: Format names of a cached latent and of its RoPE key.
        format: Name of the storage format of the projections.
        groups: (count, new, past) of each group of equal sequences: number of sequences, new tokens
            and cached tokens of each.
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
    """One operator of a forward pass on one GPU, such as a GEMM or attention, with its cost.

    Attributes:
        name: Name in printed tables, such as `qkv` or `all_reduce`.
        layer: Name of the kind of layer that runs the operator, such as `dense`; '' outside the
            layers.
        count: Number of runs in the pass, usually the number of layers of this kind.
        kind: gemm, attention, experts, scan, vector (elementwise work) or network.
        cost: FLOPs and bytes of one run.
        dtype: Compute dtype of the matrix products; '' without products.
        parts: Name and cost of each step that a fused operator contains. `cost` is their sum. Empty
            for other operators.
        shape: Sizes from which the kernel's time is predicted; None if the time
            follows from `cost` or `module`.
        experts: Expected number of routed experts whose weights this GPU reads; 0 for other
            operators.
        role: Group to which the operator belongs, such as FFN, by which reports select operators.
        form: Form of latent attention, absorbed or expanded; '' for other operators.
        weights: Names of the matrices that the operator multiplies by, such as `q`; may be empty.
        module: Shape of the sparse attention to which the operator belongs, if whole sparse
            attention of this kind was measured; None for other operators.
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
        """Return the FLOPs and bytes of all runs of the operator in one pass: cost · count."""
        return self.cost * self.count


def unfused(operator: Operator, element: int) -> list[tuple[str, Cost]]:
    """Return the kernels that an operator needs in an engine without fused kernels.

    Roofline records list them below the operator. Each item is the name of a kernel and its cost in
    one run. Attention becomes three kernels: scores QKᵀ, softmax, and product with V. Between them
    they write and read the scores, which fused attention never stores. An FFN's gate and up, one
    matrix product otherwise, become two kernels that both read the input. The list is empty if the
    operator would still be one kernel.

    Args:
        operator: Any operator. Only attention, GEMMs of gate and up, and experts are divided.
        element: Bytes of an activation element, such as 2 for bf16.
    """
    cost = operator.cost
    shape = operator.shape
    if isinstance(shape, AttentionShape):
        return _unfused_attention(cost, shape, element)
    if isinstance(shape, GemmShape):
        moved: Num = int(shape.m * (shape.k + shape.n // 2))
    elif isinstance(shape, ExpertsShape):
        moved = -(-shape.tokens * shape.top_k // shape.ranks) * (shape.hidden + shape.width)
    else:
        return []
    results = []
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
    heads = shape.heads
    key = shape.key
    value = shape.value
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


def product_flops(rows: Num, inner: int, columns: int) -> Num:
    """Return the FLOPs of a matrix product: 2 · rows · inner · columns.

    The product is [rows, inner] · [inner, columns]. Each element of the result needs `inner`
    multiplications and as many additions. A projection of x[tokens, inputs] has 2 · tokens ·
    inputs · outputs FLOPs. Attention scores use the same formula: 2 · pairs · heads · key width.

    Args:
        rows: Rows of the left array, such as tokens. For attention, (query, key) pairs of one head.
        inner: Length of the dot products. For attention, the number of heads.
        columns: Columns of the right array. For attention, elements of a key or value of one head.
    """
    return 2 * rows * inner * columns


def causal_pairs(new: Num, past: Num, limit: int = 0) -> Num:
    """Return the (query, key) pairs per head of one sequence under causal attention.

    The FLOPs of attention are proportional to this number. The query at position j, from past + 1
    to past + new, reads min(j, limit) keys. Without a limit the sum is new·past + new(new + 1)/2.

    Args:
        new: New tokens, which are the queries.
        past: Cached tokens before the first query.
        limit: Maximum keys of a query (window, budget, top-k); 0 for no limit.
    """
    if not limit:
        return new * past + triangle(new)

    def until(tokens: Num) -> Num:
        low: Num = minimum(tokens, limit)
        return triangle(low) + (tokens - low) * limit

    return until(new + past) - until(past)


def triangle(n: Num) -> Num:
    """Return the sum 1 + 2 + … + n, as n(n + 1)/2: the (query, key) pairs of a prompt of n tokens.

    Args:
        n: Last number of the sum, or an array of such numbers.
    """
    return floor_div(n * (n + 1), 2)


def chunk_pairs(new: Num, past: Num, chunk: int) -> Num:
    """Return the (query, key) pairs per head of one sequence under chunked attention.

    The query at position j, from past + 1 to past + new, reads the keys of its own chunk up to
    itself: ((j − 1) mod chunk) + 1 keys.

    Args:
        new: New tokens, which are the queries.
        past: Cached tokens before the first query.
        chunk: Tokens of a chunk.
    """

    def until(tokens: Num) -> Num:
        return floor_div(tokens, chunk) * triangle(chunk) + triangle(tokens % chunk)

    return until(new + past) - until(past)


def compressed_pairs(new: Num, past: Num, ratio: int, top: int = 0) -> Num:
    """Return the (query, row) pairs per head of one sequence if a row is a block of tokens.

    The query at position j, from past + 1 to past + new, reads the rows of finished blocks:
    min(⌊j/ratio⌋, top) rows. Without `top` it reads ⌊j/ratio⌋.

    Args:
        new: New tokens, which are the queries.
        past: Cached tokens before the first query.
        ratio: Tokens of a block, which one cached row stands for.
        top: Maximum rows that one query reads (top-k); 0 for no limit.
    """

    def until(tokens: Num) -> Num:
        low = minimum(tokens, top * ratio - 1) if top else tokens
        rows = floor_div(low, ratio)
        pairs = ratio * triangle(rows - 1) + rows * (low - rows * ratio + 1)
        return pairs + (tokens - low) * top

    return until(new + past) - until(past)


def reached_fraction(tokens: Num, top_k: int, experts: int) -> Real:
    """Return the expected share of experts that at least one token uses: 1 − (1 − k/E)^T.

    T is the number of tokens, k is `top_k` and E is `experts`. A forward pass reads the weights of
    this share of a layer's experts. Routing is assumed uniform. One token gives exactly k/E. If all
    experts are in the top-k, the result is the int 1. An array of tokens gives an array of shares.

    Args:
        tokens: Number of tokens.
        top_k: Experts per token.
        experts: Number of experts in the layer.
    """
    if top_k == experts:
        return 1
    if isinstance(tokens, int):
        return _reached(tokens, top_k, experts)
    import numpy as np

    counts, indices = np.unique(tokens, return_inverse=True)
    shares = np.array([_reached(int(count), top_k, experts) for count in counts])
    return shares[indices].reshape(np.shape(tokens))


def _reached(tokens: int, top_k: int, experts: int) -> float:
    return top_k / experts if tokens == 1 else 1.0 - (1.0 - top_k / experts) ** tokens


def expected_experts(tokens: Num, top_k: int, experts: int) -> Real:
    """Return the expected number of experts that at least one token uses: E·(1 − (1 − k/E)^T).

    T is the number of tokens, k is `top_k` and E is `experts`. A forward pass reads the weights of
    this many experts of a layer. Routing is assumed uniform. One token gives k. The result is a
    float, or an array for an array of tokens.

    Args:
        tokens: Number of tokens.
        top_k: Experts per token.
        experts: Number of experts in the layer.
    """
    if isinstance(tokens, int) and tokens == 1:
        return float(top_k)
    return float(experts) * reached_fraction(tokens, top_k, experts)
