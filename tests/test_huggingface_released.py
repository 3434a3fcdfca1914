"""Types whose code came with their weights: parameters counted by hand from the matrices that the code lists.

D = 64 wide, 4 heads of 16, 2 of keys and values, FFN F = 96, V = 1,000 rows, L = 4 layers, unless a case says otherwise.
"""

from typing import Any

import pytest
from huggingface_cases import BF16, Case, check

from kvcalc import Model, UserError, cache_size, weight_bytes
from kvcalc.library.huggingface import model_from

D, F, V, L = 64, 96, 1000, 4
BASE: dict[str, Any] = {
    "hidden_size": D, "num_hidden_layers": L, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": F,
    "vocab_size": V, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "max_position_embeddings": 2048,
}  # fmt: skip
GQA = 2 * D * D + 2 * D * 32  # q and o, k and v
MHA = 4 * D * D
FFN = 3 * D * F
ENDS = 2 * V * D + D  # embedding, head and the last norm
ROW = 2 * 2 * 2 * 16  # bytes of a token in a layer: keys and values of two heads of 16
FULL = {(1, 17): L * 17 * ROW, (2, 300): 2 * L * 300 * ROW}
ALL = {(1, 17): 2 * L * 17 * ROW}  # as many heads of keys as of queries


def read(keys: dict[str, Any]) -> Model:
    model = model_from(keys, "config.json", "x")
    assert model.parameters_exact, model.notes
    return model


def config(model_type: str, **keys: Any) -> dict[str, Any]:
    return BASE | {"model_type": model_type} | keys


CASES = {
    # qkv alone has biases; gate and up share intermediate_size
    "qwen": Case(
        config("qwen", intermediate_size=192, kv_channels=16, no_bias=True, seq_length=512),
        L * (MHA + 3 * D + FFN + 2 * D) + ENDS,
        ALL,
    ),
    "qwen-biased": Case(
        config("qwen", intermediate_size=192, kv_channels=16, no_bias=False),
        L * (MHA + 4 * D + FFN + 2 * F + D + 2 * D) + ENDS,
        ALL,
    ),
    "chatglm": Case(
        {k: v for k, v in config("chatglm").items() if k not in ("vocab_size", "num_key_value_heads", "intermediate_size")}
        | {"padded_vocab_size": V, "multi_query_attention": True, "multi_query_group_num": 2, "kv_channels": 16}
        | {"ffn_hidden_size": F, "add_qkv_bias": True, "add_bias_linear": False, "rmsnorm": True, "post_layer_norm": True},
        L * (GQA + D + 2 * 32 + FFN + 2 * D) + ENDS,
        FULL,
    ),
    "baichuan": Case(
        {k: v for k, v in config("baichuan").items() if k != "num_key_value_heads"}, L * (MHA + FFN + 2 * D) + ENDS, ALL
    ),
    "internlm": Case(
        {k: v for k, v in config("internlm", bias=True).items() if k != "num_key_value_heads"},
        L * (MHA + 4 * D + FFN + 2 * D) + ENDS,
        ALL,
    ),
    "internlm2": Case(config("internlm2", bias=False), L * (GQA + FFN + 2 * D) + ENDS, FULL),
    "internlm2-biased": Case(config("internlm2", bias=True), L * (GQA + 2 * D + 2 * 32 + FFN + 2 * D) + ENDS, FULL),
    "orion": Case(config("orion"), L * (GQA + FFN + 4 * D) + ENDS + D, FULL),
    "stablelm_epoch": Case(config("stablelm_epoch", num_heads=4, norm_eps=1e-5), L * (GQA + FFN + 4 * D) + ENDS + D, FULL),
    "jais": Case(
        {"model_type": "jais", "n_embd": D, "n_head": 4, "n_layer": L, "n_inner": F, "n_positions": 128, "vocab_size": V}
        | {"activation_function": "swiglu", "position_embedding_type": "alibi", "torch_dtype": "float16"},
        L * (MHA + 4 * D + FFN + 2 * F + D + 4 * D) + V * D + 2 * D,  # tied
        ALL,
    ),
    "mimo": Case(config("mimo", attention_bias=True), L * (GQA + D + 2 * 32 + FFN + 2 * D) + ENDS, FULL),
    "minicpm": Case(config("minicpm", scale_emb=12, dim_model_base=256), L * (GQA + FFN + 2 * D) + ENDS, FULL),
    # the released 7B says nothing of its head, which is the embedding
    "telechat-tied": Case(
        {"model_type": "telechat", "hidden_size": D, "n_layer": L, "n_head": 4, "ffn_hidden_size": F, "vocab_size": V}
        | {"embed_layernorm": True, "skip_bias_add": True, "skip_bias_add_qkv": False},
        L * (MHA + D + FFN + D + 2 * D) + V * D + 2 * D,
        ALL,
    ),
    "telechat": Case(
        {k: v for k, v in config("telechat").items() if "num_hidden" not in k and "heads" not in k and k != "intermediate_size"}
        | {"n_layer": L, "n_head": 4, "ffn_hidden_size": F, "layer_norm_epsilon": 1e-5},
        L * (MHA + D + FFN + D + 2 * D) + ENDS,  # biases where attention and FFN project back
        ALL,
    ),
    "molmo": Case(
        config("molmo", intermediate_size=2 * F, embedding_size=V, qkv_bias=True, weight_tying=False),
        L * (GQA + D + 2 * 32 + FFN + 2 * D) + ENDS + 128 * D,
        FULL,
    ),
    "grok": Case(
        config("git", architectures=["Grok1ForCausalLM"], num_local_experts=4, num_experts_per_tok=2)
        | {"moe_intermediate_size": 48, "residual_moe": True},
        L * (GQA + 4 * D + 4 * 3 * D * 48 + FFN + 4 * D) + ENDS,
        FULL,
        L * (GQA + 4 * D + 2 * 3 * D * 48 + FFN + 4 * D) + ENDS,
    ),
    "arctic": Case(
        config("arctic", num_local_experts=4, num_experts_per_tok=2, moe_layer_frequency=2, use_residual=True),
        2 * (GQA + FFN + 2 * D) + 2 * (GQA + 4 * D + 4 * FFN + 3 * D * D + 3 * D) + ENDS,
        FULL,
        2 * (GQA + FFN + 2 * D) + 2 * (GQA + 4 * D + 2 * FFN + 3 * D * D + 3 * D) + ENDS,
    ),
    "deepseek": Case(
        config("deepseek", n_routed_experts=8, n_shared_experts=2, num_experts_per_tok=2, moe_intermediate_size=32)
        | {"first_k_dense_replace": 1},
        (GQA + FFN + 2 * D) + 3 * (GQA + 8 * D + 10 * 3 * D * 32 + 2 * D) + ENDS,
        FULL,
        (GQA + FFN + 2 * D) + 3 * (GQA + 8 * D + 4 * 3 * D * 32 + 2 * D) + ENDS,
    ),
    "bailing_moe": Case(
        config("bailing_moe", num_experts=8, num_shared_experts=2, num_experts_per_tok=2, moe_intermediate_size=32)
        | {"norm_head": True, "max_window_layers": 3, "use_sliding_window": False, "sliding_window": 64},
        L * (GQA + 8 * D + 10 * 3 * D * 32 + 2 * D) + ENDS,
        FULL,
        L * (GQA + 8 * D + 4 * 3 * D * 32 + 2 * D) + ENDS,
    ),
    "bailing_moe_v2": Case(
        config("bailing_moe_v2", num_experts=8, num_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=32)
        | {"moe_shared_expert_intermediate_size": 40, "first_k_dense_replace": 1, "use_qk_norm": True, "use_rmsnorm": True}
        | {"moe_router_enable_expert_bias": True},
        (GQA + 32 + FFN + 2 * D) + 3 * (GQA + 32 + 8 * D + 8 * 3 * D * 32 + 3 * D * 40 + 2 * D) + ENDS,
        FULL,
        (GQA + 32 + FFN + 2 * D) + 3 * (GQA + 32 + 8 * D + 2 * 3 * D * 32 + 3 * D * 40 + 2 * D) + ENDS,
    ),
    "klear": Case(
        config("Klear", num_experts=8, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=32)
        | {"attention_bias": False, "mlp_only_layers": [0], "decoder_sparse_step": 1},
        (GQA + 32 + FFN + 2 * D) + 3 * (GQA + 32 + 8 * D + 8 + 9 * 3 * D * 32 + 2 * D + 2 + 2 * D) + ENDS,
        FULL,
        (GQA + 32 + FFN + 2 * D) + 3 * (GQA + 32 + 8 * D + 8 + 3 * 3 * D * 32 + 2 * D + 2 + 2 * D) + ENDS,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_cache_by_hand(name: str) -> None:
    model = check(CASES[name])
    assert model.parameters_exact, model.notes


def test_counts_of_released_checkpoints() -> None:
    """ChatGLM3-6B, Qwen-7B and Baichuan2-7B: the exact counts, which their pages round to 6.24, 7.72 and 7.51 B."""
    wide = {"torch_dtype": "float16", "hidden_size": 4096, "num_attention_heads": 32}
    chatglm = {"model_type": "chatglm", "num_layers": 28, "ffn_hidden_size": 13696, "kv_channels": 128, "add_qkv_bias": True}
    chatglm |= {"multi_query_attention": True, "multi_query_group_num": 2, "padded_vocab_size": 65024}
    qwen = {"model_type": "qwen", "num_hidden_layers": 32, "intermediate_size": 22016, "vocab_size": 151936, "no_bias": True}
    baichuan = {"model_type": "baichuan", "num_hidden_layers": 32, "intermediate_size": 11008, "vocab_size": 125696}
    counts = {6_243_584_000: chatglm, 7_721_324_544: qwen, 7_505_973_248: baichuan}
    for count, keys in counts.items():
        assert model_from(wide | {"tie_word_embeddings": False} | keys, "config.json", "x").parameters == count


def test_bytes_of_released_indexes() -> None:
    """Sizes in the indexes of released checkpoints: TeleChat-7B, MiniMax-M1 (with routers in fp32), Phi-2 in fp32 under its
    first type. Falcon-40B as `RefinedWeb` has no separate head, because the embedding is the head."""
    telechat = {"model_type": "telechat", "hidden_size": 4096, "n_head": 32, "n_layer": 30, "ffn_hidden_size": 12288}
    assert weight_bytes(read(telechat | {"vocab_size": 160256, "embed_layernorm": False})) == 14_400_036_864
    minimax = {"model_type": "minimax_m1", "hidden_size": 6144, "num_hidden_layers": 80, "num_attention_heads": 64}
    minimax |= {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "num_experts_per_tok": 2,
        "intermediate_size": 9216,
    }
    minimax |= {"attn_type_list": [int(i % 8 == 7) for i in range(80)], "vocab_size": 200064, "postnorm": True}
    minimax |= {"layernorm_mlp_alpha": 3.5, "shared_moe_mode": "sigmoid", "shared_intermediate_size": 0}
    assert weight_bytes(read(minimax | {"tie_word_embeddings": False})) == 912_210_767_872 - 2 * 80 * 32 * 6144
    phi = {"model_type": "mixformer-sequential", "n_embd": 2560, "n_head": 32, "n_layer": 32, "n_inner": None}
    phi |= {
        "n_positions": 2048,
        "architectures": ["MixFormerSequentialForCausalLM"],
        "architecture": {"mlp": {"mlp_cls": "fused_mlp"}},
    }
    assert weight_bytes(read(phi | {"vocab_size": 51200, "torch_dtype": "float32"})) == 11_118_735_360
    falcon = {"model_type": "RefinedWeb", "hidden_size": 8192, "n_head": 128, "n_head_kv": 8, "n_layer": 60, "vocab_size": 65024}
    model = read(falcon | {"bias": False, "parallel_attn": True, "alibi": False})
    assert weight_bytes(model) == 83_671_941_120 - 2 * 65024 * 8192
    assert cache_size(model, 1, precision=BF16).stored == 60 * 8 * 64 * 2 * 2


def test_mpt_shares_heads_as_its_own_code_does() -> None:
    """replit-code-v1.5: 8 KV heads, 3.32 B; 32 layers of q and o, k and v, an FFN of 4 D, two norms."""
    attention = {"attn_type": "grouped_query_attention", "kv_n_heads": 8, "alibi": True}
    keys = {"model_type": "mpt", "d_model": 3072, "n_heads": 24, "n_layers": 32, "vocab_size": 32768, "no_bias": True}
    model = read(keys | {"attn_config": attention, "ffn_config": {"ffn_type": "mptmlp"}})
    layer = 2 * 3072**2 + 2 * 3072 * 8 * 128 + 8 * 3072**2 + 2 * 3072
    assert (model.parameters, model.parameters_exact) == (32 * layer + 32768 * 3072 + 3072, True)
    assert cache_size(model, 5, precision=BF16).stored == 32 * 5 * 2 * 8 * 128 * 2
    one = read(keys | {"attn_config": {"attn_type": "multiquery_attention"}})
    assert cache_size(one, 5, precision=BF16).stored == 32 * 5 * 2 * 128 * 2


def test_minicpm_v_is_read_by_its_version() -> None:
    """2.6 contains Qwen2 (biases on q, k, v), 4.5 Qwen3 (norms on q and k), 2.5 and 4.0 Llama, 2.0 MiniCPM (tied)."""
    stack = GQA + FFN + 2 * D
    expected = {
        2.6: L * (stack + D + 2 * 32) + ENDS,
        4.5: L * (stack + 2 * 16) + ENDS,
        2.5: L * stack + ENDS,
        4.0: L * stack + ENDS,
        2.0: L * stack + ENDS - V * D,
    }
    keys = {k: v for k, v in config("minicpmv", query_num=64, image_size=448).items() if k != "tie_word_embeddings"}
    for version, parameters in expected.items():
        model = model_from(keys | {"version": version}, "config.json", "x")
        assert (model.parameters, model.parameters_exact) == (parameters, True), version
    with pytest.raises(UserError, match=r"'9\.1' is no MiniCPM-V that is read"):
        model_from(keys | {"version": 9.1}, "config.json", "x")


def test_kimi_k3() -> None:
    """2.78 T: latent experts after a norm, full-rank gates, a vector and a norm before each block, no correction bias."""
    linear = {"head_dim": 128, "num_heads": 96, "short_conv_kernel_size": 4, "use_full_rank_gate": True, "gate_lower_bound": -5.0}
    linear |= {"full_attn_layers": [*range(4, 93, 4), 93], "kda_layers": [i for i in range(1, 93) if i % 4]}
    text = {
        "model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], "vocab_size": 163840, "hidden_size": 7168,
        "num_hidden_layers": 93, "num_attention_heads": 96, "num_key_value_heads": 96, "intermediate_size": 33792,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2, "moe_intermediate_size": 3072,
        "moe_layer_freq": 1, "first_k_dense_replace": 1, "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True,
        "attn_res_block_size": 12, "mla_use_output_gate": True, "linear_attn_config": linear, "dtype": "bfloat16",
    }  # fmt: skip
    whole = {"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"], "text_config": text}
    model = model_from(whole, "config.json", "x")
    assert (model.parameters, model.parameters_exact) == (2_779_484_393_568, True)
    rows, state = 24 * (512 + 64) * 2, 69 * (96 * 128 * 128 * 4 + 3 * 96 * 128 * 3 * 2)
    assert cache_size(model, 4096, precision=BF16).stored == 4096 * rows + state


def test_nemotron_nas_layer_by_layer() -> None:
    """A part that is a matrix or left out has no cache. The FFN width is 2/3 of the hidden size times a factor, rounded up
    to a multiple of 256."""
    blocks = [
        {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 2.625}},  # int(2/3 · 2.625 · 64) = 112 → 256
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 9.0}},  # 384 → 512
        {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
    ]
    keys = config("nemotron-nas", architectures=["DeciLMForCausalLM"], block_configs=blocks, intermediate_size=None)
    model = model_from(keys | {"num_key_value_heads": None}, "config.json", "x")
    layers = (GQA + 3 * D * 256 + 2 * D) + (3 * D * 512 + D) + (D * D + D) + (2 * D * D + 2 * D * 16 + D * D + 2 * D)
    assert (model.parameters, model.parameters_exact) == (layers + ENDS, True)
    assert cache_size(model, 100, precision=BF16).stored == 100 * (ROW + ROW // 2)
    alone = model_from(keys | {"block_configs": [{"attention": {"n_heads_in_group": 1}, "ffn": {"ffn_mult": 1}}] * 4}, "f", "x")
    assert cache_size(alone, 100, precision=BF16).stored == 4 * 100 * 2 * ROW  # keys and values of each of 4 heads, not of 2
    with pytest.raises(UserError, match="block_configs: should be a mapping, not a list of 3"):
        model_from(keys | {"block_configs": blocks[:3]}, "f", "x")
    for factor in (0, 1e12, True):  # a factor is above 0 and below 10¹²
        with pytest.raises(UserError, match="ffn_mult: should be a positive number"):
            model_from(keys | {"block_configs": [blocks[0] | {"ffn": {"ffn_mult": factor}}] * 4}, "f", "x")


def test_rwkv7() -> None:
    """Four low-rank pairs (three in the first layer), six mixes, three scales, a norm, and a 16 × 16 state per head."""
    keys = {"model_type": "rwkv7", "hidden_size": D, "head_dim": 16, "num_hidden_layers": 2, "intermediate_size": F}
    keys |= {"vocab_size": V, "a_low_rank_dim": 4, "v_low_rank_dim": 5, "gate_low_rank_dim": 6, "decay_low_rank_dim": 7}
    model = model_from(keys | {"tie_word_embeddings": False, "torch_dtype": "bfloat16"}, "config.json", "x")
    pairs = (2 * D * 7 + D) + (2 * D * 4 + D) + 2 * D * 6
    each = 4 * D * D + pairs + 6 * D + 3 * D + 2 * D + 2 * D * F + D + 4 * D
    assert model.parameters == 2 * each + (2 * D * 5 + D) + 2 * D + 2 * V * D + 2 * D  # values of layer 1, first norm of layer 0
    assert cache_size(model, 1000, precision=BF16).stored == 2 * (2 * D * 2 + 4 * 16 * 16 * 4)


def test_wrappers_leave_the_text_part_to_its_class() -> None:
    """Qwen2-Audio: Qwen2's defaults (width 4,096, 32 layers, MHA), 156,032 rows. LLaVA 1.5: Llama's defaults, 32,064 rows."""
    qwen2 = {"model_type": "qwen2", "vocab_size": 156032, "intermediate_size": 11008}
    audio = {"model_type": "qwen2_audio", "text_config": qwen2}
    assert model_from(audio, "config.json", "x").parameters == 7_754_878_976
    llava = {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}}
    model = model_from(llava, "config.json", "x")
    assert model.parameters == 6_738_939_904
    assert any(n.startswith("class defaults, because the file lacks them: ") and "hidden_size=4096" in n for n in model.notes)
    with pytest.raises(UserError, match="gives no hidden_size"):  # a file of its own has no such class to lean on
        model_from({"model_type": "llama", "vocab_size": 32064}, "config.json", "x")


def test_llm_cfg_is_a_text_part() -> None:
    inner = config("llama", architectures=["LlamaForCausalLM"])
    whole = {"model_type": "llava_llama", "architectures": ["LlavaLlamaModel"], "hidden_size": 999, "llm_cfg": inner}
    assert model_from(whole, "config.json", "x").parameters == L * (GQA + FFN + 2 * D) + ENDS


def test_deepseek_vl2_without_latents() -> None:
    """The smallest model: `use_mla` false, 64 experts and two shared experts of 896 after one dense layer, 10 heads of 128."""
    text = {
        "architectures": ["DeepseekV2ForCausalLM"], "use_mla": False, "hidden_size": 1280, "intermediate_size": 6848,
        "moe_intermediate_size": 896, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "first_k_dense_replace": 1, "num_hidden_layers": 12, "num_attention_heads": 10, "num_key_value_heads": 10,
        "kv_lora_rank": None, "q_lora_rank": None, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0, "v_head_dim": 0,
        "vocab_size": 129280, "lm_head": True,
    }  # fmt: skip
    model = model_from({"model_type": "deepseek_vl_v2", "language_config": text}, "config.json", "x")
    attention, norms = 4 * 1280 * 1280, 2 * 1280
    moe = 1280 * 64 + 66 * 3 * 1280 * 896
    expected = 12 * (attention + norms) + 3 * 1280 * 6848 + 11 * moe + 2 * 129280 * 1280 + 1280
    assert (model.parameters, model.family, model.parameters_exact) == (expected, "deepseek_v2", True)
    assert cache_size(model, 10, precision=BF16).stored == 10 * 12 * 2 * 10 * 128 * 2


@pytest.mark.parametrize(("given", "heads"), [({"mamba_num_heads": 6}, 6), ({}, 64)], ids=str)
def test_plamo2(given: dict[str, int], heads: int) -> None:
    """Mamba with heads of 16, or 64 by default, and one step, decay and skip per head; attention in a window; four norms per
    layer."""
    keys = {k: v for k, v in config("plamo2").items() if k != "tie_word_embeddings"}
    keys |= given | {"hidden_size_per_head": 16, "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_step": 2}
    model = model_from(keys | {"attention_window_size": 32, "full_attention_idx": []}, "config.json", "x")
    inner, rank = heads * 16, 64
    mamba = D * 2 * inner + 4 * inner + inner * (rank + 2 * 8) + rank * heads + 3 * heads + (rank + 8 + 8) + inner * D
    attention = GQA + D + 32
    assert model.parameters == 2 * (mamba + attention) + L * (FFN + 4 * D) + V * D + D
    assert model.parameters_exact
    state = 2 * (3 * inner * 2 + inner * 8 * 4)
    assert cache_size(model, 100, precision=BF16).stored == state + 2 * 32 * ROW
