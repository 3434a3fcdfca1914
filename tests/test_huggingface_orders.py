"""Types of no preset of ours: which layer is of which kind, what it weighs and what it keeps, each counted by hand.

D = 64 wide, 4 heads of 16, 2 of keys and values, FFN F = 96, V = 1,000 rows, unless a test says otherwise. Sizes and orders
are those of transformers' `configuration_…` and `modeling_…` of each type.
"""

from typing import Any

import pytest
from huggingface_cases import BF16

from kvcalc import Model, UserError, cache_size
from kvcalc.library.huggingface import model_from

D, F, V = 64, 96, 1000
ROW = 2 * 2 * 2 * 16  # bytes of a token in a layer: keys and values of two heads of 16
BASE: dict[str, Any] = {
    "hidden_size": D, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": F,
    "vocab_size": V, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "max_position_embeddings": 2048,
}  # fmt: skip


def read(model_type: str, **keys: Any) -> Model:
    return model_from(BASE | {"model_type": model_type} | keys, "config.json", "x")


def kept(model: Model, tokens: int) -> int:
    return int(cache_size(model, tokens, precision=BF16).stored)


def per_token(model: Model) -> int:
    """Bytes by which the cache grows at 1,000 tokens, which is behind every window here."""
    return kept(model, 1001) - kept(model, 1000)


def test_zamba_s_third_layer_is_hybrid_and_then_the_fifth_of_every_six_from_the_fourth() -> None:
    """Of 14 layers the third, the eighth (3 + 4) and the fourteenth (3 + 6 + 4); heads of 32 over both streams."""
    model = read("zamba", num_hidden_layers=14, num_key_value_heads=4, head_dim=32)
    assert sorted(model.counts.values()) == [3, 11]
    assert per_token(model) == 3 * 2 * 4 * 32 * 2


@pytest.mark.parametrize("keys", [{"num_layers_per_stack": 2, "num_hidden_layers": 16}, {"num_hidden_layers": 2}], ids=str)
def test_hrm_runs_two_stacks_of_two_in_two_rounds_of_three_and_one(keys: dict[str, int]) -> None:
    """16 turns with keys and values of their own, of 4 layers with queries, keys, values, outputs and gates of 64 × 64."""
    model = read("hrm_text", **keys, H_cycles=2, L_cycles=3)
    assert sum(model.counts.values()) == 2 * 2 * (3 + 1)
    assert model.parameters == 2 * V * D + D + 4 * (5 * D * D + 3 * D * F)
    assert per_token(model) == 16 * 2 * 4 * 16 * 2


def test_zaya_keeps_two_columns_of_queries_and_keys_and_one_of_half_the_values() -> None:
    """Kernels of 2 and 2 over 4 + 2 heads of 16: two columns of 96 channels; 16 of the 32 values come one token late."""
    model = read("zaya", num_hidden_layers=4, num_experts=4, router_hidden_size=8, moe_intermediate_size=32)
    assert kept(model, 100) == 4 * (100 * ROW + (2 * 96 + 16) * 2)


def test_qwen4_norms_every_stream_before_mixer_and_ffn_and_once_at_the_end() -> None:
    """4 streams of 64; down to rank 5 and up again, before the head too, and 4 weights a channel that put a result back."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 16}
    memory = {"ngram_vocab_size_base": 50, "ple_layer_ids": []}
    keys = heads | experts | memory | {"hc_count": 4, "hc_lowrank": 5, "layer_types": ["linear_attention"] * 4}
    model = read("qwen4_exp_text", num_hidden_layers=4, **keys)
    wide = 4 * D
    sizes = {name.rpartition(".")[2]: weight.elements for name, weight, _ in model.walk()}
    assert {name: size for name, size in sizes.items() if set(name.split("_")) & {"mix", "inject", "stream"}} == {
        "mixer_mix_down": wide * 5, "mixer_mix_up": 5 * wide, "mixer_inject": wide * 4,
        "ffn_mix_down": wide * 5, "ffn_mix_up": 5 * wide, "ffn_inject": wide * 4, "block_stream_norms": 2 * wide,
        "last_mix_down": wide * 5, "last_mix_up": 5 * wide, "last_stream_norms": wide,
    }  # fmt: skip


def test_reformer_has_as_many_layers_as_its_list() -> None:
    keys = {"attention_head_size": 16, "feed_forward_size": F, "axial_pos_embds": False, "attn_layers": ["local", "lsh", "local"]}
    assert sum(read("reformer", **keys).counts.values()) == 3
    with pytest.raises(UserError, match="attn_layers: has 3 entries for 4 layers"):
        read("reformer", **keys, num_hidden_layers=4)


def test_plamo3_s_eighth_layer_is_full_unless_it_says_otherwise() -> None:
    assert per_token(read("plamo3", num_hidden_layers=17, window_size=32)) == 2 * ROW
    assert per_token(read("plamo3", num_hidden_layers=17, window_size=32, sliding_window_pattern=3)) == 5 * ROW
