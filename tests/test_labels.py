"""Names of mixers, layers and models."""

import pytest
from specs import compressed, csa, grouped, hca, latent, of_kinds, sparse

from kvcalc import Layer
from kvcalc.layers.attention import BlockSparse
from kvcalc.layers.feed_forward import Dense
from kvcalc.layers.part import Sublayer
from kvcalc.layers.recurrent import Mamba

MAMBA = Mamba(intermediate_size=8, state_size=4, time_step_rank=2)
BLOCKS = BlockSparse(
    num_attention_heads=8, num_key_value_heads=4, head_dim=8, index_block_size=64, index_topk_blocks=16, index_n_heads=1,
    index_head_dim=8,
)  # fmt: skip


@pytest.mark.parametrize(
    ("part", "label"),
    [
        (grouped(8, 8), "MHA"),
        (grouped(8, 2), "GQA-2"),
        (grouped(8, 1), "MQA"),
        (grouped(1, 1), "MQA"),
        (grouped(8, 2, sliding_window=512), "GQA-2 window 512"),
        (grouped(8, 2, attention_chunk_size=64), "GQA-2 chunk 64"),
        (grouped(8, 2, sliding_window=512, cache_budget=100), "GQA-2 window 512 budget 100"),
        (latent(), "MLA"),
        (latent(sliding_window=64), "MLA window 64"),
        (sparse(top=64), "DSA top-64"),
        (sparse(top=64, indexer=False), "DSA top-64 (shared index)"),
        (BLOCKS, "GQA-4 top-16 blocks of 64"),
        (compressed(), "MQA window 128"),
        (csa(), "CSA 1:4"),
        (hca(), "HCA 1:128"),
        (MAMBA, "Mamba"),
        (Dense(intermediate_size=1), ""),
    ],
)
def test_a_mixer_is_called(part: Sublayer, label: str) -> None:
    assert part.label == label


def test_a_layer_is_called_by_its_mixers_and_a_model_by_its_layers() -> None:
    dense = Dense(intermediate_size=8)
    kinds = {
        "hybrid": Layer(parts=(grouped(), MAMBA, dense)),
        "shared": Layer(parts=(grouped(), dense), shares_cache=True),
        "block": Layer(parts=(dense,), shared=(latent(),)),
        "ffn": Layer(parts=(dense,)),
        "also": Layer(parts=(grouped(), MAMBA)),
        "never": Layer(parts=(sparse(),)),
    }
    assert [layer.label for layer in kinds.values()] == [
        "GQA-2 + Mamba", "GQA-2 (shared cache)", "MLA", "", "GQA-2 + Mamba", "DSA top-64",
    ]  # fmt: skip
    pattern = ("2 hybrid", "shared", "block", "3 ffn", "also")
    model = of_kinds(kinds, layers=8, pattern=pattern)
    assert model.attention == "3× GQA-2 + Mamba, 1× GQA-2 (shared cache), 1× MLA"
    assert of_kinds({"k": kinds["hybrid"]}, layers=5).attention == "GQA-2 + Mamba"
    assert of_kinds({"k": kinds["hybrid"], "f": kinds["ffn"]}, layers=2, pattern=("k", "f")).attention == "GQA-2 + Mamba"
    assert of_kinds({"f": kinds["ffn"]}, layers=2).attention == ""
