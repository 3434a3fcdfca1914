"""Presets compared with the tensors of released checkpoints: their names, shapes and formats, added up here."""

from math import ceil, prod
from typing import Any

import pytest

from kvcalc import Batch, Parallelism, Precision, UserError, cache_size, forward, load_model, weight_bytes
from kvcalc.library.huggingface import model_from


class Tensors:
    """The contents of a safetensors index: elements by format, and the fp32 scale of each 128 × 128 block of fp8."""

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
    """Return the elements of GLM-5.3-Flash's language model, D = 4096, and the number of routing biases (no parameters)."""
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
    """Its lists of layers agree with layer_types. Without streams, their mixers do not count."""
    held, biases = glm_5_3_flash()
    model = model_from(GLM, "config.json", "x")
    assert (model.parameters, model.parameters_exact) == (held.bf16 + held.fp8 + held.fp32 - biases, True), model.notes
    plain = model_from(GLM | {"mhc": False}, "config.json", "x")
    assert plain.parameters == model.parameters - 45 * 2 * (24 + 3 + 24 * 4 * 4096)


def test_qwen_3_8_has_the_bytes_that_are_stated() -> None:
    """4.89 TB in bf16, its layer of multi-token prediction included; 95B of 2.4T active."""
    model = load_model("qwen3.8-2.4t-a95b")
    assert round(2 * (model.parameters + model.mtp_parameters) / 1e12, 2) == 4.89
    assert (round(model.parameters / 1e12, 1), round(model.active_parameters / 1e9)) == (2.4, 95)


def deepseek_v4_1_flash() -> tuple[int, int]:
    """Elements and bytes of its language model, D = 5120: experts in fp4 with a byte for 32, other matrices in fp8 with one
    for each 32 × 32, tables of n-grams in fp8 with one for 32 columns, the streams' mixers in fp32.
    """
    width, latent, queries = 5120, 512, 1280
    blocks = [(64 * latent, queries), (queries, width), (latent, width), *[(1024, 64 * latent // 8)] * 8, (width, 8 * 1024)]
    blocks = [*blocks, *[(2304, width)] * 3] * 40 + [(5 * width, 6144)] * 2
    plain = 2 * 129280 * width + width + 40 * (384 * width + 2 * width + 64 + queries + latent)
    plain += 4 * (latent * width + latent + 128 * latent + 128) + 3 * latent * width  # four layers lend, three of them with gates
    plain += 8 * (32 * 128 * queries + 32 * width) + 2 * 2 * 4 * width  # eight choose; scales of keys and queries of n-grams
    plain += 40 * 2 * (24 + 3)
    experts, rows, mixers = 40 * 384 * 3 * 2304 * width, 384_006_168 + 384_016_682, 40 * 2 * 24 * 4 * width
    in_blocks, scales = sum(map(prod, blocks)), sum(prod(ceil(n / 32) for n in shape) for shape in blocks)
    elements = experts + in_blocks + rows * 256 + mixers + plain
    return elements, experts // 2 + experts // 32 + in_blocks + scales + rows * (256 + 8) + 4 * mixers + 2 * plain


def test_deepseek_v4_1_flash() -> None:
    """The release is 475.2 GiB; its drafting layers' 384 experts (6.3 + 0.4) and the vision tower are 7 to 9 of them."""
    model, (elements, held) = load_model("deepseek-v4.1-flash"), deepseek_v4_1_flash()
    assert (model.parameters, weight_bytes(model)) == (elements, held)
    assert 7 < 475.2 - held / 2**30 < 9
    tables = (384_006_168 + 384_016_682) * 256
    assert round((model.parameters - tables) / 1e9) == 552


@pytest.mark.parametrize(("dtype", "each"), [("bf16", 2.5 * 640 * 2), ("mxfp8", 2.5 * (640 + 20))])
def test_lent_rows_are_stored_once_and_read_by_every_layer(dtype: str, each: float) -> None:
    """Three layers store a latent of 512 and an index key of 128 per two tokens, one layer per token: 2.5 of both per token.
    Every layer has a window of 128 latents. At 40,000 tokens a step reads a window and 512 latents in each of 38 layers.
    Four layers select among all rows (20,000 in three, 40,000 in one), four among 16,384. The step also finishes a block
    of two in three layers (bf16)."""
    model, how = load_model("deepseek-v4.1-flash"), Precision(kv_cache_dtype=dtype)
    size = cache_size(model, 40_000, precision=how)
    row = {"bf16": 1024, "mxfp8": 512 + 16}[dtype]
    assert size.slope == each
    assert size.stored == 40_000 * each + 40 * 128 * row
    assert size.read == (40 * 128 + 38 * 512) * row + (3 * 20_000 + 40_000 + 4 * 16_384) * row // 4 + 3 * 2 * 512 * 2


def test_who_reads_what_others_store_stays_on_their_stage() -> None:
    """Layers 10 to 13 read the rows of layer 8, and 21 to 39 the rows of layer 20: two stages of 20 are possible, not four."""
    model = load_model("deepseek-v4.1-flash")
    assert forward(model, Batch.decode(1000), parallelism=Parallelism(pp=2))
    with pytest.raises(UserError, match=r"stage 2 of 4 .* reads cached rows that an earlier one stores"):
        forward(model, Batch.decode(1000), parallelism=Parallelism(pp=4))


V41: dict[str, Any] = {
    "model_type": "deepseek_v41_text", "vocab_size": 129280, "hidden_size": 5120, "num_hidden_layers": 40,
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1280,
    "o_lora_rank": 1024, "o_groups": 8, "tie_word_embeddings": False, "max_position_embeddings": 1048576,
    "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 2304,
    "sliding_window": 128, "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3, "torch_dtype": "bfloat16",
    "kv_source_layer_ids": [2, 8, 14, 20], "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36], "index_n_heads": 32,
    "index_head_dim": 128, "index_topk": 512, "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048,
    "candidate_block_size": 8, "hc_mult": 4, "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4, "engram_n_heads": 8, "engram_head_dim": 256, "num_nextn_predict_layers": 3,
    "expert_dtype": "fp4", "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]},
}  # fmt: skip


def test_deepseek_v4_1_flash_from_its_file() -> None:
    model = model_from(V41, "config.json", "x")
    assert (model.parameters, weight_bytes(model)) == deepseek_v4_1_flash()
    assert (model.parameters_exact, model.mtp_parameters) == (True, 0), model.notes
    assert cache_size(model, 40_000) == cache_size(load_model("deepseek-v4.1-flash"), 40_000)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"compress_ratios": [0, 2]}, "compress_ratios: has 2 entries, and none at 2"),
        ({"engram_num_embeddings": [5]}, "engram_num_embeddings: does not give the rows of 2 layers"),
        ({"engram_num_embeddings": [5, "x"]}, "engram_rows"),
        ({"kv_source_layer_ids": [1, 2, 8, 14, 20]}, "a layer without compress_ratio neither lends nor chooses"),
        ({"index_topk": 0}, "index_topk"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(keys: dict[str, Any], why: str) -> None:
    with pytest.raises(UserError, match=why):
        model_from(V41 | keys, "config.json", "x")
