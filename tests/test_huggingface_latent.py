"""Configs of latent and sparse attention, compressed entries."""

import pytest
from huggingface_cases import Case, check

CASES = {
    # num_key_value_heads 128 means nothing
    "deepseek-v3": Case(
        {
            "first_k_dense_replace": 3,
            "hidden_size": 7168,
            "model_type": "deepseek_v3",
            "num_attention_heads": 128,
            "num_hidden_layers": 61,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "vocab_size": 129_280,
        },
        671_026_404_352,
        {(1, 17): 1_194_624, (1, 4096): 287_834_112, (2, 4096): 575_668_224},
        37_552_282_624,
    ),
    # no latent for queries
    "deepseek-v2-lite": Case(
        {
            "hidden_size": 2048,
            "model_type": "deepseek_v2",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "q_lora_rank": None,
            "vocab_size": 102_400,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 6,
            "intermediate_size": 10944,
        },
        15_706_484_224,
        {(1, 17): 528_768, (1, 4096): 127_401_984, (2, 4096): 254_803_968},
        2_661_150_208,
    ),
    "moonlight": Case(
        {
            "first_k_dense_replace": 1,
            "hidden_size": 2048,
            "model_type": "deepseek_v3",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "q_lora_rank": None,
            "vocab_size": 163_840,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "intermediate_size": 11264,
        },
        15_960_108_544,
        {(1, 17): 528_768, (1, 4096): 127_401_984, (2, 4096): 254_803_968},
        2_914_774_528,
    ),
    # a type of remote code
    "kimi-k2": Case(
        {
            "hidden_size": 7168,
            "model_type": "kimi_k2",
            "num_attention_heads": 64,
            "num_hidden_layers": 61,
            "vocab_size": 163_840,
            "first_k_dense_replace": 1,
            "n_routed_experts": 384,
        },
        1_026_408_209_408,
        {(1, 17): 1_194_624, (1, 4096): 287_834_112, (2, 4096): 575_668_224},
        32_861_477_888,
    ),
    # index keys in every layer
    "deepseek-v3.2": Case(
        {
            "hidden_size": 7168,
            "index_head_dim": 128,
            "index_n_heads": 64,
            "index_topk": 2048,
            "model_type": "deepseek_v32",
            "num_attention_heads": 128,
            "num_hidden_layers": 61,
            "vocab_size": 129_280,
        },
        671_877_929_216,
        {(1, 17): 1_460_096, (1, 4096): 351_797_248, (2, 4096): 703_594_496},
        38_403_807_488,
    ),
    # an indexer in 21 of 78 layers
    "glm-5.2": Case(
        {
            "hidden_size": 6144,
            "index_topk_freq": 4,
            "index_topk_pattern": None,
            "model_type": "glm_moe_dsa",
            "num_attention_heads": 64,
            "num_hidden_layers": 78,
            "vocab_size": 154_880,
            "indexer_types": ["full"] * 2 + (["full"] + ["shared"] * 3) * 19,
        },
        743_377_000_704,
        {(1, 17): 1_618_944, (1, 4096): 390_070_272, (2, 4096): 780_140_544},
        41_250_511_104,
    ),
    # compressed entries, a window, block buffers [window_minus_1, duplicate_kv]
    "deepseek-v4-flash": Case(
        {
            "hidden_size": 4096,
            "model_type": "deepseek_v4",
            "num_attention_heads": 64,
            "num_hidden_layers": 43,
            "vocab_size": 129_280,
            "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0],
        },
        284_332_230_231,
        {(1, 17): 1_874_944, (1, 4096): 34_031_616, (2, 4096): 68_063_232},
        13_799_622_231,
    ),
    # two caches a layer
    "longcat": Case(
        {"hidden_size": 6144, "model_type": "longcat_flash", "num_attention_heads": 64, "vocab_size": 131_072, "num_layers": 28},
        741_053_585_408,
        {(1, 17): 1_096_704, (1, 4096): 264_241_152, (2, 4096): 528_482_304},
        None,
    ),
    "minicpm3": Case(
        {"hidden_size": 2560, "model_type": "minicpm3", "num_attention_heads": 40, "num_hidden_layers": 62, "vocab_size": 73448},
        4_073_875_968,
        {(1, 17): 607_104, (1, 4096): 146_276_352, (2, 4096): 292_552_704},
    ),
    "glm4-moe-lite": Case(
        {
            "hidden_size": 2048,
            "model_type": "glm4_moe_lite",
            "num_attention_heads": 20,
            "num_hidden_layers": 47,
            "vocab_size": 154_880,
        },
        29_943_390_976,
        {(1, 17): 920_448, (1, 4096): 221_773_824, (2, 4096): 443_547_648},
        3_896_763_136,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_cache_are_those_of_transformers(name: str) -> None:
    check(CASES[name])
