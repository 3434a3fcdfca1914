"""Configs of mixtures of experts: shared, latent and zero experts, dense layers among them."""

import pytest
from huggingface_cases import Case, check

CASES = {
    "mixtral-8x7b": Case(
        {
            "hidden_size": 4096,
            "model_type": "mixtral",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "sliding_window": None,
            "vocab_size": 32000,
        },
        46_702_792_704,
        {(1, 17): 2_228_224, (1, 4096): 536_870_912, (2, 4096): 1_073_741_824},
        12_879_925_248,
    ),
    "qwen3-30b-a3b": Case(
        {
            "decoder_sparse_step": 1,
            "head_dim": 128,
            "hidden_size": 2048,
            "mlp_only_layers": [],
            "model_type": "qwen3_moe",
            "num_attention_heads": 32,
            "num_hidden_layers": 48,
            "vocab_size": 151_936,
        },
        30_532_122_624,
        {(1, 17): 1_671_168, (1, 4096): 402_653_184, (2, 4096): 805_306_368},
        3_353_032_704,
    ),
    # dense layers by list and by step
    "qwen3-moe-mlp-only": Case(
        {
            "decoder_sparse_step": 2,
            "hidden_size": 2048,
            "mlp_only_layers": [0, 3, 7],
            "model_type": "qwen3_moe",
            "num_attention_heads": 32,
            "num_hidden_layers": 24,
            "vocab_size": 151_936,
            "num_experts": 64,
            "head_dim": 128,
        },
        4_625_113_088,
        {(1, 17): 835_584, (1, 4096): 201_326_592, (2, 4096): 402_653_184},
        1_982_701_568,
    ),
    # a shared expert behind a gate
    "qwen1.5-moe": Case(
        {
            "hidden_size": 2048,
            "model_type": "qwen2_moe",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "shared_expert_intermediate_size": 5632,
            "vocab_size": 151_936,
        },
        14_315_784_192,
        {(1, 17): 3_342_336, (1, 4096): 805_306_368, (2, 4096): 1_610_612_736},
        2_689_173_504,
    ),
    "glm-4.5-air": Case(
        {
            "first_k_dense_replace": 1,
            "hidden_size": 4096,
            "model_type": "glm4_moe",
            "n_shared_experts": 1,
            "num_attention_heads": 96,
            "num_hidden_layers": 46,
            "vocab_size": 151_552,
            "attention_bias": True,
            "head_dim": 128,
        },
        106_852_245_504,
        {(1, 17): 3_203_072, (1, 4096): 771_751_936, (2, 4096): 1_543_503_872},
        13_424_123_904,
    ),
    # q and k norms over all heads
    "minimax-m2": Case(
        {
            "hidden_size": 3072,
            "model_type": "minimax_m2",
            "num_attention_heads": 48,
            "num_hidden_layers": 62,
            "vocab_size": 200_064,
        },
        228_689_748_992,
        {(1, 17): 4_317_184, (1, 4096): 1_040_187_392, (2, 4096): 2_080_374_784},
        11_030_537_216,
    ),
    "olmoe": Case(
        {"hidden_size": 2048, "model_type": "olmoe", "num_attention_heads": 16, "num_hidden_layers": 16, "vocab_size": 50304},
        13_361_612_800,
        {(1, 17): 2_228_224, (1, 4096): 536_870_912, (2, 4096): 1_073_741_824},
        2_087_323_648,
    ),
    "granitemoe": Case(
        {
            "hidden_size": 1536,
            "model_type": "granitemoe",
            "num_attention_heads": 24,
            "num_hidden_layers": 32,
            "vocab_size": 49155,
            "num_experts_per_tok": 8,
            "num_local_experts": 40,
            "tie_word_embeddings": True,
            "intermediate_size": 512,
            "num_key_value_heads": 8,
        },
        3_298_793_472,
        {(1, 17): 1_114_112, (1, 4096): 268_435_456, (2, 4096): 536_870_912},
        882_874_368,
    ),
    "ernie-4.5-300b": Case(
        {
            "hidden_size": 8192,
            "model_type": "ernie4_5_moe",
            "moe_layer_start_index": 3,
            "num_attention_heads": 64,
            "num_hidden_layers": 54,
            "vocab_size": 103_424,
            "moe_intermediate_size": 3584,
            "moe_k": 8,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": False,
            "intermediate_size": 28672,
            "num_key_value_heads": 8,
        },
        299_484_163_264,
        {(1, 17): 3_760_128, (1, 4096): 905_969_664, (2, 4096): 1_811_939_328},
        47_926_586_560,
    ),
    "phimoe": Case(
        {"hidden_size": 4096, "model_type": "phimoe", "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32064},
        41_872_793_600,
        {(1, 17): 2_228_224, (1, 4096): 536_870_912, (2, 4096): 1_073_741_824},
        6_640_640_000,
    ),
    "dots1": Case(
        {
            "first_k_dense_replace": 1,
            "hidden_size": 4096,
            "model_type": "dots1",
            "num_attention_heads": 32,
            "num_hidden_layers": 62,
            "vocab_size": 152_064,
            "n_routed_experts": 128,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
        },
        142_774_373_888,
        {(1, 17): 17_268_736, (1, 2048): 2_080_374_784, (2, 2048): 4_160_749_568},
        14_016_581_120,
    ),
    "hunyuan-moe": Case(
        {
            "head_dim": 128,
            "hidden_size": 4096,
            "model_type": "hunyuan_v1_moe",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "vocab_size": 290_943,
        },
        13_188_337_664,
        {(1, 17): 8_912_896, (1, 2048): 1_073_741_824, (2, 2048): 2_147_483_648},
    ),
    # [window_minus_1]
    "gpt-oss-120b": Case(
        {"hidden_size": 2880, "model_type": "gpt_oss", "num_attention_heads": 64, "num_hidden_layers": 36, "vocab_size": 201_088},
        116_829_156_672,
        {(1, 17): 1_253_376, (1, 4096): 155_713_536, (2, 4096): 311_427_072},
        5_711_982_912,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_cache_are_those_of_transformers(name: str) -> None:
    check(CASES[name])
