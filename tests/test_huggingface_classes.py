"""The effect of a file's class, keys that make parameters uncertain, and the use of a file by the general rules."""

from typing import Any

import pytest
from conftest import Run

from kvcalc import Model, UserError
from kvcalc.library.huggingface import model_from

D, F, V = 64, 96, 1000
SIZES: dict[str, Any] = {
    "hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": F,
    "vocab_size": V, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LAYER = 4 * D * D + 3 * D * F + 2 * D
LLAMA = 2 * LAYER + 2 * V * D + D


def read(**keys: Any) -> Model:
    return model_from(SIZES | keys, "config.json", "model")


def llama(**keys: Any) -> Model:
    return read(model_type="llama", **keys)


# --- classes ---


def test_a_class_is_its_types_own_by_its_name() -> None:
    """A class is the type in CamelCase with any head. A class for whole sequences has a classifier of 2 labels instead of an
    LM head."""
    head = V * D
    own = {"LlamaForCausalLM": 0, "LLaMAForCausalLM": 0, "LlamaModel": -head, "LlamaForSequenceClassification": 2 * D - head}
    for name, difference in own.items():
        model = llama(architectures=[name])
        assert (model.parameters, model.parameters_exact, model.family) == (LLAMA + difference, True, "llama"), name
    assert not llama(architectures=["LlamaForTokenClassification"]).parameters_exact
    deepseek = {"kv_lora_rank": 16, "q_lora_rank": None, "n_routed_experts": 4, "num_experts_per_tok": 2}
    for model_type, name, keys in (
        ("qwen3_moe", "Qwen3MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
        ("kimi_k2", "DeepseekV3ForCausalLM", deepseek),
        ("gpt-sw3", "GPT2LMHeadModel", {}),
        ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", {"head_dim": 16}),
    ):
        model = read(model_type=model_type, architectures=[name], **keys)
        assert model.parameters_exact, (name, model.notes)
        assert not any("class " in note and "class defaults" not in note for note in model.notes)


def test_a_classifier_of_a_type_with_code_of_its_own() -> None:
    """If transformers has no class, the checkpoint's class decides. A class without a head in its name is the whole model."""
    heads = {"InternLMForCausalLM": False, "InternLMModel": False, "InternLMForSequenceClassification": True}
    for written, pooling in heads.items():
        assert read(model_type="internlm", bias=True, architectures=[written]).pooling is pooling


def test_another_types_class_decides() -> None:
    """xAI gave Grok 2 the model_type `git`. A file without a model_type is read by its class."""
    grok = read(model_type="git", architectures=["Grok1ForCausalLM"], num_local_experts=2, num_experts_per_tok=1)
    assert (grok.family, grok.parameters) == ("grok", 2 * (4 * D * D + 2 * D + 2 * 3 * D * F + 4 * D) + 2 * V * D + D)
    assert any("read as grok, after its class Grok1ForCausalLM: model_type 'git' is not its own" in n for n in grok.notes)
    named = read(architectures=["Qwen2ForCausalLM"])
    assert (named.family, named.parameters) == ("qwen2", LLAMA + 2 * 3 * D)
    assert any("the file gives no model_type" in note for note in named.notes)
    assert read(model_type="llava", architectures=["LlavaQwenForCausalLM"], mm_hidden_size=9).family == "qwen2"


@pytest.mark.parametrize("name", ["LlamaForCausalLMWithValueHead", "SomethingForCausalLM", "PhantomModel"])
def test_a_class_that_nobody_knows_leaves_a_doubt(name: str) -> None:
    model = llama(architectures=[name])
    assert (model.parameters, model.parameters_exact) == (LLAMA, False)
    assert any(f"class {name} is not one of llama's" in note for note in model.notes)


def test_no_class_no_doubt() -> None:
    for architectures in (None, [], ""):
        assert llama(architectures=architectures).parameters_exact
    with pytest.raises(UserError, match="architectures: should be a list of class names"):
        llama(architectures=[3])


# --- keys ---


def test_a_key_that_may_carry_weights_puts_them_in_doubt() -> None:
    for key in ("side_rank", "extra_proj_dim", "moe_lora_alpha_rank", "use_residual", "attn_bias_kind", "qk_norm_kind"):
        model = llama(**{key: 3})
        assert (model.parameters, model.parameters_exact) == (LLAMA, False), key
        assert f"parameters are approximate: unread keys may add weights: {key}" in model.notes


def test_a_key_inside_a_mapping_counts_too() -> None:
    inside = {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4, "kda_layers": [1, 2], "full_attn_layers": []}
    keys = SIZES | {"model_type": "kimi_linear", "kv_lora_rank": 16, "num_experts": 4, "num_experts_per_token": 2}
    exact = model_from(keys | {"linear_attn_config": inside}, "f", "x")
    doubtful = model_from(keys | {"linear_attn_config": inside | {"decay_rank": 3}}, "f", "x")
    assert (exact.parameters_exact, doubtful.parameters_exact) == (True, False)
    assert any("add weights: linear_attn_config.decay_rank" in note for note in doubtful.notes)
    unread = llama(adapter={"rank": 8, "alpha": 16})
    assert any("add weights: adapter.rank" in note for note in unread.notes)


@pytest.mark.parametrize(
    "keys",
    [
        {"use_residual": False, "side_rank": 0, "extra_dim": None, "lora": {}},
        {"layer_norm_eps": 1e-5, "initializer_range": 0.02, "bos_token_id": 3, "rope_scaling": {"factor": 8.0}},
        {"vision_config": {"hidden_size": 8}, "image_size": 448, "mm_hidden_size": 9, "query_num": 64},
        {"chunk_size": 3, "block_size": 4, "mtp_num_layers": 1, "id2label": {"0": "A"}, "quantization": {"bits": 4}},
        {"use_sliding_window": False, "max_window_layers": 28, "sliding_window": 4096},
        {"head_dim": 16, "num_key_value_heads": 4, "n_kv_heads": 4},  # the same under another name
    ],
)
def test_keys_that_are_off_or_carry_nothing(keys: dict[str, Any]) -> None:
    model = llama(**keys)
    assert (model.parameters, model.parameters_exact) == (LLAMA, True), model.notes


def test_a_key_that_transformers_class_has_is_no_surprise() -> None:
    """GLM-4's class has the key qk_head_dim, DeepSeek-V3's head_dim. Neither adds a weight."""
    keys = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": None}
    model = read(model_type="deepseek_v3", num_experts_per_tok=2, qk_head_dim=16, head_dim=8, **keys)
    assert model.parameters_exact, model.notes


# --- general rules ---


def general(**keys: Any) -> Model:
    model = read(model_type="nobody", **keys)
    assert not model.parameters_exact
    return model


def test_the_general_rules_heed_the_file() -> None:
    """Llama's norms and FFN by default; LayerNorms, plain FFNs and biases if the file states them."""
    assert general().parameters == general(hidden_act="silu", rms_norm_eps=1e-6).parameters == LLAMA
    norms = 2 * 2 * D + D  # the second vector of five LayerNorms
    assert general(layer_norm_epsilon=1e-5, hidden_act="silu").parameters == LLAMA + norms
    assert general(layer_norm_epsilon=1e-5, rms_norm_eps=1e-5).parameters == LLAMA
    plain = LLAMA - 2 * D * F
    assert general(hidden_act="relu2").parameters == plain
    assert general(hidden_act="gelu", layer_norm_eps=1e-5, bias=False).parameters == plain + norms
    assert general(hidden_act="gelu", layer_norm_eps=1e-5).parameters == plain + norms + 2 * (4 * D + F + D)
    assert general(use_qkv_bias=True).parameters == LLAMA + 2 * 3 * D
    assert general(attention_bias=True).parameters == LLAMA + 2 * 4 * D
    assert general(bias=True).parameters == general(use_bias=True).parameters == LLAMA + 2 * (4 * D + 2 * F + D)
    assert general(use_qk_norm=True).parameters == LLAMA + 2 * 2 * 16


def test_shared_experts_and_sparse_steps_are_no_secret_of_the_cache() -> None:
    keys = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_shared_experts": 2}
    expert = 3 * D * 32
    layers = 4 * D * D + 2 * D + 4 * D
    assert general(**keys).parameters == 2 * (layers + 6 * expert) + 2 * V * D + D
    every_second = general(**keys, decoder_sparse_step=2, mlp_only_layers=[]).parameters
    assert every_second == LAYER + layers + 6 * expert + 2 * V * D + D
    own = general(**keys, moe_shared_expert_intermediate_size=48).parameters
    assert own == 2 * (layers + 4 * expert + 2 * 3 * D * 48) + 2 * V * D + D
    off = {"max_window_layers": 28, "use_sliding_window": False, "sliding_window": 4096}
    assert general(**off).attention == "MHA"
    with pytest.raises(UserError, match="max_window_layers"):
        general(max_window_layers=28, use_sliding_window=True, sliding_window=4096)


# --- where it shows ---


def test_table_and_record_say_about(kvcalc: Run, tmp_path: Any) -> None:
    import json

    (tmp_path / "about.json").write_text(json.dumps(SIZES | {"model_type": "llama", "side_rank": 3}))
    (tmp_path / "exact.json").write_text(json.dumps(SIZES | {"model_type": "llama"}))
    about, exact = (str(tmp_path / f"{name}.json") for name in ("about", "exact"))
    records = kvcalc("size --format json", about, exact).records
    assert [r["parameters_exact"] for r in records] == [False, True]
    table = kvcalc("size", about, exact).out.splitlines()
    assert [["≈" in line for line in table if line.startswith(f"{name}  ")] for name in ("about", "exact")] == [[True], [False]]
    assert "≈" in kvcalc("size", about).out
    assert "parameters ≈ " in kvcalc("size --explain", about).out
    assert "parameters = " in kvcalc("size --explain", exact).out
    preset = tmp_path / "about.yaml"
    preset.write_text(kvcalc("models --import", about).out)
    assert kvcalc("size --format json", str(preset)).records[0]["parameters_exact"] is False
    assert kvcalc("compare --gpu h100 --variants mqa --format json", about).records[0]["parameters_exact"] is False


def test_a_decoder_of_two_stacks_says_that_it_is_one() -> None:
    """Whisper-tiny: 4 layers of 384. The figures are for WhisperForCausalLM, without the encoder."""
    keys = {"model_type": "whisper", "d_model": 384, "decoder_layers": 4, "decoder_attention_heads": 6, "decoder_ffn_dim": 1536,
            "vocab_size": 51865, "is_encoder_decoder": True}  # fmt: skip
    whole = model_from(keys | {"architectures": ["WhisperForConditionalGeneration"]}, "c", "m")
    half = model_from(keys | {"architectures": ["WhisperForCausalLM"]}, "c", "m")
    said = "only its decoder is counted, without the encoder and the cache of cross-attention"
    assert (said in whole.notes, whole.parameters_exact) == (True, False)
    assert (said in half.notes, half.parameters_exact) == (False, True)
    assert whole.parameters == half.parameters
