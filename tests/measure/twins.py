"""Small parts, their torch layers, and ways to run a layer that must give equal outputs."""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from specs import grouped, latent, sparse

from kvcalc.layers.part import Sublayer
from kvcalc.layers.recurrent import GatedDeltaNet
from kvcalc.measure.layers import build_mixer
from kvcalc.measure.layers.base_layer import CacheRows, LayerCache, Mixer

torch.set_num_threads(1)  # threads of small products wait for each other longer than they save

WIDTH = 48
EXACT = 1e-10  # of float64 results, relative to their largest


def delta_net(**fields: Any) -> GatedDeltaNet:
    return GatedDeltaNet(
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6} | fields
    )


@st.composite
def grouped_specs(draw: st.DrawFn, **fields: Any) -> Sublayer:
    groups, shared = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    window = draw(st.one_of(st.none(), st.integers(1, 12)))
    biased = draw(st.booleans())
    norm = draw(st.sampled_from([None, "head", "full"]))
    value = draw(st.sampled_from([None, 6]))
    return grouped(
        groups * shared, groups, 2 * draw(st.integers(1, 5)),
        **({"sliding_window": window, "q_bias": biased, "k_bias": biased, "qk_norm": norm, "v_head_dim": value} | fields),
    )  # fmt: skip


@st.composite
def latent_specs(draw: st.DrawFn) -> Sublayer:
    return latent(
        draw(st.integers(1, 4)), draw(st.integers(1, 24)), 2 * draw(st.integers(0, 4)),
        q_lora_rank=draw(st.sampled_from([None, 20])), kv_norm=draw(st.booleans()), q_norm=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def sparse_specs(draw: st.DrawFn, top: int = 0) -> Sublayer:
    """Draw a sparse part with 16 index heads. With fewer heads, ReLU may leave several tokens at score 0, and a
    top-k may take either."""
    rank = draw(st.sampled_from([None, 20]))
    hidden = draw(st.booleans())
    return sparse(
        draw(st.integers(1, 4)), draw(st.integers(1, 24)), 2 * draw(st.integers(0, 4)), top or draw(st.integers(1, 12)),
        q_lora_rank=rank, index_query_from_hidden=hidden, index_n_heads=16,
    )  # fmt: skip


@st.composite
def delta_specs(draw: st.DrawFn) -> Sublayer:
    heads = draw(st.integers(1, 3))
    return delta_net(
        linear_num_key_heads=heads, linear_num_value_heads=heads * draw(st.integers(1, 3)),
        linear_conv_kernel_dim=draw(st.integers(1, 5)), conv_bias=draw(st.booleans()),
    )  # fmt: skip


def any_spec() -> st.SearchStrategy[Sublayer]:
    return st.one_of(grouped_specs(), latent_specs(), sparse_specs(), delta_specs())


def twin(spec: Sublayer, dtype: Any = torch.float64) -> Mixer:
    """Return the torch layer of a part, of width 48, with reproducible weights."""
    torch.manual_seed(7)
    return build_mixer(spec, WIDTH).to(dtype)


def inputs(batch: int, tokens: int, dtype: Any = torch.float64) -> Any:
    torch.manual_seed(11)
    return torch.randn(batch, tokens, WIDTH, dtype=dtype)


def new_cache(layer: Mixer, batch: int, capacity: int, dtype: Any = torch.float64) -> LayerCache:
    """Return an empty cache of a layer. States of a float64 layer are in float64 too."""
    cache = tuple(CacheRows(entry, batch, capacity, torch.empty(0, dtype=dtype)) for entry in layer.spec.cache())
    for rows in cache if dtype == torch.float64 else ():
        rows.tensor = rows.tensor.double()
    return cache


def in_pieces(layer: Mixer, x: Any, pieces: Sequence[int], cache: LayerCache) -> Any:
    """Run x through the layer in passes of these numbers of tokens, each after the earlier passes."""
    assert sum(pieces) == x.shape[1]
    found, past = [], 0
    for size in pieces:
        found.append(layer(x[:, past : past + size], cache, past))
        past += size
    return torch.cat(found, 1)


def difference(a: Any, b: Any) -> float:
    """Return the largest difference, relative to the largest value."""
    assert a.shape == b.shape
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))
