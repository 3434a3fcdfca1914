"""Types without a preset: the kind, the weights and the cache of each layer, counted by hand.

Unless a test states other sizes, D = 64, with 4 heads of 16, 2 KV heads, FFN F = 96, and V = 1,000 rows. Sizes and orders
follow transformers' `configuration_…` and `modeling_…` of each type.
"""

from typing import Any

import pytest
from huggingface_cases import BF16

from kvcalc import Model, UserError, cache_size
from kvcalc.library.huggingface import model_from
from kvcalc.library.huggingface.reader import runs

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
    """Return the bytes by which the cache grows per token at 1,000 tokens, beyond every window here."""
    return kept(model, 1001) - kept(model, 1000)


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
# Layers that see everything (F), a window (w), and those without keys and values of the text (–), where no file lists them.
ORDERS: dict[str, tuple[dict[str, Any], str]] = {
    "modernbert-decoder": ({"local_attention": 64}, "FwwFwwFw"),  # every third from the first
    "lfm3": ({"sliding_window": 32}, "––F–w–F–w"),  # the third of four, and the first of four but the very first
    "flint": ({"sliding_window": 32} | MOE, "FFwwwFwwwFwF"),  # two, then the second of four, and the last
    # every other one of the first three
    "qwen2_moe": ({"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 3} | MOE, "wFwFFF"),
    "smollm3": ({"sliding_window": 32, "use_sliding_window": True}, "FFFwFFFw"),  # every fourth, which rotates nothing
    "plamo3": ({"window_size": 32}, "wwwwwwwFw"),  # every eighth
    "muse_glimmer_text": ({"sliding_window": 32}, "wwFwwwF"),  # every fourth, counted from the last
    "granite_swa": ({"sliding_window": 32}, "FwwwFw"),  # every fourth from the first
    "mllama_text_model": ({}, ("FFF–F" + "FFF–F" * 7)),  # the fourth of five sees the picture
}


@pytest.mark.parametrize("model_type", ORDERS)
def test_which_layers_see_what(model_type: str) -> None:
    keys, order = ORDERS[model_type]
    model = read(model_type, num_hidden_layers=len(order), **keys)
    assert "".join({"full": "F", "local": "w"}.get(kind.partition("_")[0], "–") for kind in model.order) == order


@pytest.mark.parametrize(
    ("order", "written"),
    [
        ("aaaa", ("a",)), ("abcabca", ("a", "b", "c")), ("aabaaab", ("2 a", "b", "a")), ("aabaaa", ("2 a", "b", "a")),
        ("aabbaaa", ("2 a", "2 b", "a")), ("aaab", ("3 a", "b")), ("abab", ("a", "b")),
    ],
)  # fmt: skip
def test_an_order_is_written_as_its_shortest_round(order: str, written: tuple[str, ...]) -> None:
    assert runs([*order]) == written


def test_layers_of_deepseek_v4_without_a_list() -> None:
    """Layers 3, 5, … compress 4 tokens to one row. All others compress 128 tokens."""
    listed = read("deepseek_v4", num_hidden_layers=6, compress_ratios=[128, 128, 128, 4, 128, 4])
    assert read("deepseek_v4", num_hidden_layers=6) == listed


def test_flint_s_first_two_layers_are_dense() -> None:
    model = read("flint", num_hidden_layers=5, sliding_window=32, **MOE)
    assert ["moe" in kind for kind in model.order] == [False, False, True, True, True]
    every_second = read("flint", num_hidden_layers=6, sliding_window=32, decoder_sparse_step=2, **MOE)
    assert ["moe" in kind for kind in every_second.order] == [False, False, False, True, False, True]
    with pytest.raises(UserError, match="mlp_only_layers: contains 'a', which is not a whole number"):
        read("flint", num_hidden_layers=6, sliding_window=32, mlp_only_layers=["a"], **MOE)
    none_dense = read("flint", num_hidden_layers=5, sliding_window=32, mlp_only_layers=[3], **MOE)
    assert ["moe" in kind for kind in none_dense.order] == [True, True, True, False, True]


@pytest.mark.parametrize(
    ("keys", "sparse"),
    [
        ({}, [1, 2, 3]), ({"moe_layer_end_index": None}, [1, 2, 3]), ({"moe_layer_end_index": 2}, [1, 2]),
        ({"moe_layer_start_index": 2}, [2, 3]), ({"moe_layer_interval": 2}, [1, 3]),
    ],
    ids=str,
)  # fmt: skip
def test_where_ernie_s_experts_begin_and_end(keys: dict[str, Any], sparse: list[int]) -> None:
    order = read("ernie4_5_moe", num_hidden_layers=4, **keys).order
    assert [i for i, kind in enumerate(order) if "moe" in kind] == sparse


def test_phixtral_s_experts_are_four_times_as_wide_unless_it_says_otherwise() -> None:
    """4 query heads and 4 KV heads, all with biases; experts up to 256 and down again, and a norm of two vectors."""
    keys = {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    for given, inner in (({}, 256), ({"n_inner": 100}, 100)):
        each = 4 * (D * D + D) + D * 4 + 4 * (2 * D * inner + inner + D) + 2 * D
        assert read("phixtral", **keys, **given).parameters == 2 * each + 2 * V * D + V + 2 * D


@pytest.mark.parametrize(
    ("model_type", "attention_norm", "segments"), [("kosmos_2_text_model", 2 * D, 0), ("kosmos_2_5_text_model", 0, 2 * D)]
)
def test_kosmos_has_biases_and_a_norm_inside_its_network(model_type: str, attention_norm: int, segments: int) -> None:
    """q, k, v and o, up to F, a norm of F, and down again; two further norms. Kosmos-2.5 has an embedding for text and
    picture segments."""
    model = read(model_type, num_hidden_layers=2, num_key_value_heads=4, ffn_dim=F)
    layer = 4 * (D * D + D) + (D * F + F) + 2 * F + (F * D + D) + 2 * 2 * D + attention_norm
    assert model.parameters == 2 * layer + 2 * V * D + 2 * D + segments


def test_hy_v4_has_a_sink_a_head() -> None:
    model = read("hy_v4", num_hidden_layers=2)
    assert [weight.elements for name, weight, _ in model.walk() if name.endswith(".sinks")] == [4, 4]


def test_zamba_s_third_layer_is_hybrid_and_then_the_fifth_of_every_six_from_the_fourth() -> None:
    """Of 14 layers, the third, the eighth (3 + 4 + 1) and the fourteenth are hybrid, with heads of 32 over both streams."""
    model = read("zamba", num_hidden_layers=14, num_key_value_heads=4, head_dim=32)
    assert sorted(model.counts.values()) == [3, 11]
    assert per_token(model) == 3 * 2 * 4 * 32 * 2


@pytest.mark.parametrize("keys", [{"num_layers_per_stack": 2, "num_hidden_layers": 16}, {"num_hidden_layers": 2}], ids=str)
def test_hrm_runs_two_stacks_of_two_in_two_rounds_of_three_and_one(keys: dict[str, int]) -> None:
    """16 turns with separate keys and values, of 4 layers with queries, keys, values, outputs and gates of 64 × 64."""
    model = read("hrm_text", **keys, H_cycles=2, L_cycles=3)
    assert sum(model.counts.values()) == 2 * 2 * (3 + 1)
    assert model.parameters == 2 * V * D + D + 4 * (5 * D * D + 3 * D * F)
    assert per_token(model) == 16 * 2 * 4 * 16 * 2


def test_zaya_as_its_makers_write_it_is_refused() -> None:
    """ZAYA1-8B's original file has 80 layers, attention and experts in turn. transformers' file has 40 layers with both."""
    with pytest.raises(UserError, match="zaya_mlp_expansion: counts attention and experts as separate layers"):
        read("zaya", num_hidden_layers=80, zaya_mlp_expansion=256)


def test_zaya_keeps_two_columns_of_queries_and_keys_and_one_of_half_the_values() -> None:
    """Kernels of 2 and 2 over 4 + 2 heads of 16: two columns of 96 channels. 16 of the 32 values are one token late."""
    model = read("zaya", num_hidden_layers=4, num_experts=4, router_hidden_size=8, moe_intermediate_size=32)
    assert kept(model, 100) == 4 * (100 * ROW + (2 * 96 + 16) * 2)


def test_qwen4_norms_every_stream_before_mixer_and_ffn_and_once_at_the_end() -> None:
    """4 streams of 64: projections to rank 5 and back, also before the head, and 4 weights per channel for each result."""
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


@pytest.mark.parametrize(
    ("model_type", "keys", "said"),
    [
        ("opt", {"word_embed_proj_dim": 10**12}, "embedding_size: Expected 'int' <= 100000000"),
        ("opt", {"word_embed_proj_dim": False}, "embedding_size: Expected 'int | null', got 'bool'"),
        ("phimoe", {"lm_head_bias": 2} | MOE, "lm_head_bias: Expected 'bool', got 'int'"),
    ],
)
def test_values_that_no_model_has_are_refused_by_name(model_type: str, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        read(model_type, num_hidden_layers=2, **keys)
    assert str(refused.value) == f"config.json: {said}"


def test_plamo3_s_windows_say_otherwise() -> None:
    assert per_token(read("plamo3", num_hidden_layers=17, window_size=32, sliding_window_pattern=3)) == 5 * ROW


@pytest.mark.parametrize(("step", "where"), [(0, []), (1, [1, 2, 3, 4]), (2, [2, 4])])
def test_experts_of_every_so_many_layers_after_the_first(step: int, where: list[int]) -> None:
    keys = MOE | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": step}
    model = read("deepseek_v3", num_hidden_layers=5, **keys)
    assert [n for n, kind in enumerate(model.order) if kind == "moe"] == where


def test_experts_of_the_layers_that_a_text_lists() -> None:
    for listed in ("1, 4", [1, 4]):
        model = read("step3p5", num_hidden_layers=6, moe_layers_enum=listed, **MOE)
        assert ["moe" in kind for kind in model.order] == [False, True, False, False, True, False]


def test_half_of_a_window_that_looks_both_ways_lies_ahead() -> None:
    """Gemma 3 with bidirectional attention stores 64 // 2 + 1 tokens in five of six layers."""
    for both, window in ((False, 64), (True, 33)):
        model = read("gemma3_text", num_hidden_layers=6, sliding_window=64, use_bidirectional_attention=both)
        assert kept(model, 1000) == (5 * window + 1000) * ROW
