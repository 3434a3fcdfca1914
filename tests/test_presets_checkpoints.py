"""Presets against the tensors of released checkpoints: their names, shapes and formats, added up here."""

from math import ceil, prod
from typing import Any

import pytest

from kvcalc import UserError, load_model, weight_bytes
from kvcalc.library.huggingface import model_from


class Tensors:
    """What a safetensors index would list: elements by format, and the fp32 scale of each 128 × 128 block of fp8."""

    def __init__(self) -> None:
        self.bf16 = self.fp8 = self.fp32 = self.scales = 0

    def add(self, *shape: int, times: int = 1) -> None:
        self.bf16 += times * prod(shape)

    def wide(self, *shape: int, times: int = 1) -> None:
        self.fp32 += times * prod(shape)

    def block(self, *shape: int, times: int = 1) -> None:
        self.fp8 += times * prod(shape)
        self.scales += times * prod(ceil(n / 128) for n in shape)

    @property
    def bytes(self) -> int:
        return 2 * self.bf16 + self.fp8 + 4 * (self.fp32 + self.scales)


def glm_5_3_flash() -> tuple[Tensors, int]:
    """The language model of GLM-5.3-Flash, D = 4096, and how many of its elements are routing biases, no parameters."""
    held, width, moe = Tensors(), 4096, 0
    held.add(154880, width, times=2)
    held.add(width)
    for layer in range(45):
        held.wide(24 + 3, times=2)  # base and scales of the streams, before attention and before the FFN
        held.add(24, 4 * width, times=2)
        held.add(width, times=2)
        if layer % 4 != 3:  # KDA, 64 heads of 128
            held.wide(64 + 64 * 128)
            held.add(64, width)
            held.add(64 * 128, width + 4, times=3)  # q, k and v with a convolution over four tokens
            held.add(128, width, times=2)
            held.add(64 * 128, 128, times=2)
            held.add(128)
            held.add(width, 64 * 128)
        else:  # latents of 512, 64 heads of 256, 32 index heads of 128 over pools of 4
            held.block(1536, width)
            held.block(64 * 256, 1536)
            held.block(512, width)
            held.block(width, 64 * 256)
            held.add(64 * (256 + 256), 512)
            held.add(1536 + 512)
            held.add(32 * 128, 1536)
            held.add(128 + 32 + 128, width)
            held.add(128 + 128 + 4 * 128)
        experts, inner = (1, 12288) if layer < 3 else (289, 2048)
        held.block(inner, width, times=3 * experts)
        if layer >= 3:
            held.add(288, width)
            held.wide(288)
            moe += 288
    return held, moe


def test_glm_5_3_flash() -> None:
    held, biases = glm_5_3_flash()
    model = load_model("glm-5.3-flash")
    assert model.parameters == held.bf16 + held.fp8 + held.fp32 - biases
    assert weight_bytes(model) == held.bytes


KDA = [i for i in range(45) if i % 4 != 3]
GLM: dict[str, Any] = {
    "model_type": "glm5_next_text", "num_hidden_layers": 45, "hidden_size": 4096, "vocab_size": 154880, "n_routed_experts": 288,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "intermediate_size": 12288, "moe_intermediate_size": 2048,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 256,
    "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256, "index_topk": 2048, "index_head_dim": 128,
    "index_n_heads": 32, "index_kpool": 4, "mhc": True, "hc_mult": 4, "mla_use_nope": True, "torch_dtype": "bfloat16",
    "layer_types": ["linear_attention" if i in KDA else "deepseek_sparse_attention" for i in range(45)],
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42, "indexer_types": ["full"] * 45, "tie_word_embeddings": False,
    "linear_attn_config": {"kda_layers": KDA, "full_attn_layers": [3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43], "num_heads": 64,
                           "head_dim": 128, "short_conv_kernel_size": 4},
}  # fmt: skip


def test_glm_5_3_flash_from_its_file() -> None:
    """Its lists of layers say again what layer_types says, and are refused where they do not; without streams none count."""
    held, biases = glm_5_3_flash()
    model = model_from(GLM, "config.json", "x")
    assert (model.parameters, model.parameters_exact) == (held.bf16 + held.fp8 + held.fp32 - biases, True), model.notes
    plain = model_from(GLM | {"mhc": False}, "config.json", "x")
    assert plain.parameters == model.parameters - 45 * 2 * (24 + 3 + 24 * 4 * 4096)
    other = GLM["linear_attn_config"] | {"kda_layers": KDA[1:]}
    with pytest.raises(UserError, match="kda_layers: names other layers than layer_types"):
        model_from(GLM | {"linear_attn_config": other}, "config.json", "x")


def test_qwen_3_8_has_the_bytes_that_are_stated() -> None:
    """4.89 TB in bf16, its layer of multi-token prediction included; 95B of 2.4T active."""
    model = load_model("qwen3.8-2.4t-a95b")
    assert round(2 * (model.parameters + model.mtp_parameters) / 1e12, 2) == 4.89
    assert (round(model.parameters / 1e12, 1), round(model.active_parameters / 1e9)) == (2.4, 95)
