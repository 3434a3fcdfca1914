"""A complete decoder has the model's parameters, and gives the same outputs with and without a cache."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specs import grouped, latent, of_kinds, sparse, stack
from twins import EXACT, delta_net, difference, torch

from kvcalc import Model, UserError, cache_size, load_model
from kvcalc.layers.feed_forward import Dense
from kvcalc.measure.layers.base_layer import storage_bytes
from kvcalc.measure.layers.decoder import Decoder
from kvcalc.model.model import Layer
from kvcalc.planning.variants import variant

MIXED = stack(
    grouped(4, 2, 8),
    grouped(4, 1, 8, sliding_window=5),
    latent(4),
    sparse(4, top=6, index_n_heads=16),
    delta_net(),
    vocab_size=50,
)
LEARNED = stack(
    grouped(4, 4, 8, q_bias=True, k_bias=True, v_bias=True, o_bias=True), layers=2, vocab_size=50, norm="layer",
    position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip
SHARED = variant(stack(grouped(4, 2, 8), layers=4, vocab_size=50), "cla:2").model
MODELS = {"mixed": MIXED, "learned": LEARNED, "shared": SHARED}


def decoder(model: Model, dtype: Any = torch.float64) -> Decoder:
    torch.manual_seed(2)
    return Decoder(model).to(dtype)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=15)
@given(st.lists(st.integers(1, 8), min_size=1, max_size=5))
def test_cached_equals_uncached(name: str, sizes: list[int]) -> None:
    found = decoder(MODELS[name])
    torch.manual_seed(3)
    tokens = torch.randint(50, (2, sum(sizes)))
    whole = found(tokens, all_positions=True)
    caches, logits, past = found.caches(2, sum(sizes)), [], 0
    for cache in caches:
        for rows in cache:  # states too
            rows.tensor = rows.tensor.double()
    for size in sizes:
        logits.append(found(tokens[:, past : past + size], caches, past, all_positions=True))
        past += size
    assert difference(torch.cat(logits, 1), whole) < EXACT
    assert difference(found(tokens), whole[:, -1:]) < EXACT  # the head on the last position alone


@pytest.mark.parametrize(("name", "count"), [("gpt2", 124_439_808), ("llama-3.2-1b", 1_235_814_400)])
def test_published_parameter_counts(name: str, count: int) -> None:
    with torch.device("meta"):
        found = Decoder(load_model(name))
    assert sum(p.numel() for p in found.parameters()) == count


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens", [3, 17])
def test_parameters_and_cache_bytes_are_the_model_s(name: str, tokens: int) -> None:
    """Layers that share a cache have one tensor together, which counts once."""
    model = MODELS[name]
    layers = decoder(model, torch.bfloat16)
    assert sum(p.numel() for p in layers.parameters()) == model.parameters
    caches = layers.caches(3, tokens)
    assert storage_bytes(caches) == cache_size(model, tokens, 3).stored


def test_a_position_beyond_the_table_is_refused() -> None:
    with pytest.raises(UserError, match="64 positions"):
        decoder(LEARNED)(torch.zeros(1, 65, dtype=torch.long))


def test_layers_it_has_not_are_refused() -> None:
    parallel = Layer(parts=(grouped(4, 2, 8), Dense(intermediate_size=32)), norms=1)
    with pytest.raises(UserError, match="norms before each part"):
        Decoder(of_kinds({"k": parallel}, layers=1))
