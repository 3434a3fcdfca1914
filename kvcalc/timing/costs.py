"""What measured operations cost at least: the FLOPs and bytes that no kernel can save, for the bound beside each row."""

from collections.abc import Callable

from kvcalc.layers.cost import Cost
from kvcalc.timing.law import Array, attended
from kvcalc.timing.mla_module import WIDTHS
from kvcalc.timing.sparse_decode import SCALE, weights_of


def cost_of(op: str, kind: str, shape: tuple[Array, ...]) -> tuple[Cost, str] | None:
    """What measured operations cost at least, and the dtype of their products; None for an operation that is not known."""
    found = _COSTS.get(op)
    return None if found is None else found(kind, *shape)


def _cost(flops: Array, moved: Array) -> Cost:
    return Cost(flops=flops, activation_bytes=moved)


def _element(kind: str) -> float:
    """Return the bytes of a value at the least: of 4-bit ones without their scales."""
    if kind.startswith(("int4", "w4", "nvfp4", "mxfp4")):
        return 0.5
    return 1 if "fp8" in kind else 2


def _products(kind: str) -> str:
    """Return the dtype of the products. MXFP4 weights and MXFP8 activations multiply at the rate of fp8."""
    if kind.startswith(("nvfp4", "mxfp4")):
        return "fp4"
    return "fp8" if "fp8" in kind else "bf16"


def _attends(kind: str) -> str:
    """Return the dtype of attention over a cache of this kind: a kernel may multiply an fp8 cache in fp8."""
    return "fp8" if kind.endswith("fp8") else "bf16"


def _gemm_cost(kind: str, m: Array, n: Array, k: Array) -> tuple[Cost, str]:
    return _cost(2 * m * n * k, (m + n) * k * _element(kind) + 2 * m * n), _products(kind)


def _decode_cost(
    kind: str, batch: Array, q_heads: Array, kv_heads: Array, head_dim: Array, length: Array, window: Array
) -> tuple[Cost, str]:
    seen = attended(length, window)
    moved = 2 * batch * kv_heads * seen * head_dim * _element(kind) + 4 * batch * q_heads * head_dim
    return _cost(4 * batch * q_heads * seen * head_dim, moved), _attends(kind)


def _prefill_cost(
    kind: str, batch: Array, q_heads: Array, kv_heads: Array, head_dim: Array, length: Array, window: Array
) -> tuple[Cost, str]:
    limit = attended(length, window)
    pairs = batch * (limit * (limit + 1) / 2 + (length - limit) * limit)
    moved = batch * length * head_dim * (4 * q_heads + 2 * kv_heads * (2 + _element(kind.partition("/")[2])))
    return _cost(4 * pairs * q_heads * head_dim, moved), _products(kind.partition("/")[0])


def _mla_decode_cost(kind: str, batch: Array, heads: Array, length: Array) -> tuple[Cost, str]:
    moved = batch * length * 576 * _element(kind) + 2 * batch * heads * 1088
    return _cost(2 * batch * heads * length * 1088, moved), _attends(kind)


def _mla_prefill_cost(kind: str, batch: Array, heads: Array, length: Array) -> tuple[Cost, str]:
    pairs = batch * length * (length + 1) / 2
    return _cost(2 * pairs * heads * 320, 2 * batch * length * heads * 640), _attends(kind)


def _allreduce_cost(kind: str, ranks: Array, size: Array) -> tuple[Cost, str]:
    return Cost(network_bytes=2 * (ranks - 1) / ranks * size), ""


def _moe_cost(kind: str, *shape: Array) -> tuple[Cost, str]:
    """Two or three products per expert: of the pairs and the experts on the rank, a uniform router's mean where not given."""
    import numpy as np

    tokens, hidden, inter, top, experts, tp, ep, *given = shape
    rows, touched = tokens * top / ep, experts / ep * (1 - (1 - np.minimum(top / experts, 1)) ** tokens)
    if given:
        rows, touched = (np.where(g > 0, g, u) for g, u in zip(given[:2], (rows, touched), strict=True))
    elements = (2 if kind.endswith("ungated") else 3) * hidden * inter / tp
    moved = touched * elements * _element(kind) + 4 * np.minimum(rows, tokens) * hidden
    return _cost(2 * rows * elements, moved), _products(kind)


def _dsa_cost(kind: str, *shape: Array) -> tuple[Cost, str]:
    """Projections and the absorbed matrices, index keys of all tokens, the chosen latents."""
    import numpy as np

    batch, heads, length, _, _, latent, rope, *_, index, width, top = shape
    weights, absorbed = weights_of(heads, *shape[3:11])
    seen = np.minimum(length, top)
    scanned = np.where(index > 0, batch * length, 0.0)
    flops = 2 * batch * (weights + absorbed) + 2 * batch * heads * seen * (2 * latent + rope) + 2 * scanned * index * width
    cached, _, stored = kind.partition("/")
    moved = weights * _element(stored) + 2 * absorbed + batch * seen * (latent + rope) * _element(cached)
    return _cost(flops, moved + scanned * (width + SCALE)), _products(stored)


def _mla_module_cost(kind: str, batch: Array, heads: Array, length: Array) -> tuple[Cost, str]:
    """Return the cost of DeepSeek-V3's module: a sparse one without an indexer, which reads all tokens."""
    widths = (batch * 0 + width for width in (*WIDTHS, 0, 0))
    return _dsa_cost(kind, batch, heads, length, *widths, length)


_COSTS: dict[str, Callable[..., tuple[Cost, str]]] = {
    "gemm": _gemm_cost,
    "decode_attention": _decode_cost,
    "prefill_attention": _prefill_cost,
    "mla_decode": _mla_decode_cost,
    "mla_prefill": _mla_prefill_cost,
    "allreduce": _allreduce_cost,
    "moe": _moe_cost,
    "dsa_decode_module": _dsa_cost,
    "mla_decode_module": _mla_module_cost,
}
