"""Configs of windows, chunks and shared caches: every spelling of which layers slide."""

import pytest
from huggingface_cases import BF16, Case, check

from kvcalc import cache_size
from kvcalc.library.huggingface import model_from

CASES = {
    # every other layer slides [window_minus_1]
    "gemma2-9b": Case(
        {
            "head_dim": 256,
            "hidden_size": 3584,
            "model_type": "gemma2",
            "num_attention_heads": 16,
            "num_hidden_layers": 42,
            "sliding_window": 4096,
            "vocab_size": 256_000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
        },
        9_241_705_984,
        {(1, 17): 5_849_088, (1, 6144): 1_761_607_680, (2, 6144): 3_523_215_360},
    ),
    # 5 local : 1 global [window_minus_1]
    "gemma3-27b": Case(
        {
            "head_dim": 128,
            "hidden_size": 5376,
            "model_type": "gemma3_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 62,
            "sliding_window": 1024,
            "vocab_size": 262_208,
            "intermediate_size": 21504,
            "num_key_value_heads": 16,
        },
        27_009_346_304,
        {(1, 17): 8_634_368, (1, 4096): 771_751_936, (2, 4096): 1_543_503_872},
    ),
    # the older sliding_window_pattern [window_minus_1]
    "gemma3-pattern": Case(
        {
            "hidden_size": 1152,
            "model_type": "gemma3_text",
            "num_attention_heads": 4,
            "num_hidden_layers": 7,
            "sliding_window_pattern": 3,
            "vocab_size": 262_144,
            "sliding_window": 512,
            "intermediate_size": 6912,
            "num_key_value_heads": 1,
        },
        489_885_824,
        {(1, 17): 121_856, (1, 4096): 11_010_048, (2, 4096): 22_020_096},
    ),
    # nested text_config whose absent keys are the class defaults [window_minus_1]
    "gemma3-4b-nested": Case(
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "num_hidden_layers": 34,
                "num_attention_heads": 8,
                "vocab_size": 262_208,
                "sliding_window": 1024,
                "intermediate_size": 10240,
            },
        },
        3_880_263_168,
        {(1, 17): 2_367_488, (1, 4096): 205_520_896, (2, 4096): 411_041_792},
    ),
    # 15 of 35 layers read the cache of another [window_minus_1]
    "gemma3n": Case(
        {
            "hidden_size": 2048,
            "model_type": "gemma3n_text",
            "num_attention_heads": 8,
            "num_hidden_layers": 35,
            "num_kv_shared_layers": 15,
            "vocab_size": 262_400,
        },
        6_835_235_568,
        {(1, 17): 696_320, (1, 4096): 50_331_648, (2, 4096): 100_663_296},
    ),
    # other head sizes in full layers [window_minus_1]
    "gemma4": Case(
        {
            "hidden_size": 2304,
            "hidden_size_per_layer_input": 256,
            "model_type": "gemma4_text",
            "num_attention_heads": 8,
            "num_hidden_layers": 30,
            "vocab_size": 262_144,
        },
        5_077_177_856,
        {(1, 17): 2_437_120, (1, 4096): 220_200_960, (2, 4096): 440_401_920},
    ),
    # sinks, biases in experts [window_minus_1]
    "gpt-oss-20b": Case(
        {
            "head_dim": 64,
            "hidden_size": 2880,
            "model_type": "gpt_oss",
            "num_attention_heads": 64,
            "num_hidden_layers": 24,
            "sliding_window": 128,
            "vocab_size": 201_088,
            "num_local_experts": 32,
        },
        20_914_757_184,
        {(1, 17): 835_584, (1, 4096): 103_809_024, (2, 4096): 207_618_048},
        4_187_440_704,
    ),
    # 3 local : 1 global [window_minus_1]
    "cohere2": Case(
        {
            "hidden_size": 4096,
            "model_type": "cohere2",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "vocab_size": 256_000,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
        },
        8_028_033_024,
        {(1, 17): 2_228_224, (1, 6144): 603_979_776, (2, 6144): 1_207_959_552},
    ),
    # [window_minus_1]
    "exaone4-32b": Case(
        {
            "hidden_size": 5120,
            "model_type": "exaone4",
            "num_attention_heads": 40,
            "num_hidden_layers": 64,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "vocab_size": 102_400,
            "intermediate_size": 27392,
            "num_key_value_heads": 8,
        },
        32_003_216_384,
        {(1, 17): 4_456_448, (1, 6144): 1_207_959_552, (2, 6144): 2_415_919_104},
    ),
    # [window_minus_1]
    "phi3-mini": Case(
        {
            "hidden_size": 3072,
            "model_type": "phi3",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "sliding_window": 2047,
            "vocab_size": 32064,
        },
        3_821_079_552,
        {(1, 17): 6_684_672, (1, 4096): 804_913_152, (2, 4096): 1_609_826_304},
    ),
    # [window_minus_1]
    "mistral-7b-v0.1": Case(
        {
            "hidden_size": 4096,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "sliding_window": 4096,
            "vocab_size": 32000,
        },
        7_241_732_096,
        {(1, 17): 2_228_224, (1, 6144): 536_870_912, (2, 6144): 1_073_741_824},
    ),
    # a window from a layer on [window_minus_1]
    "qwen2-window": Case(
        {
            "hidden_size": 3584,
            "max_window_layers": 21,
            "model_type": "qwen2",
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "sliding_window": 4096,
            "use_sliding_window": True,
            "vocab_size": 152_064,
            "intermediate_size": 18944,
            "num_key_value_heads": 4,
        },
        7_615_616_512,
        {(1, 17): 974_848, (1, 6144): 322_961_408, (2, 6144): 645_922_816},
    ),
    # [window_minus_1]
    "qwen2-layer-types": Case(
        {
            "hidden_size": 896,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "model_type": "qwen2",
            "num_attention_heads": 14,
            "num_hidden_layers": 6,
            "vocab_size": 151_936,
            "sliding_window": 512,
            "intermediate_size": 4864,
            "num_key_value_heads": 2,
        },
        361_744_512,
        {(1, 17): 52_224, (1, 4096): 7_077_888, (2, 4096): 14_155_776},
    ),
    # chunks of 8192 beside full layers; experts [window_minus_1]
    "llama4-scout": Case(
        {
            "attention_chunk_size": 8192,
            "hidden_size": 5120,
            "model_type": "llama4_text",
            "num_attention_heads": 40,
            "num_hidden_layers": 48,
            "vocab_size": 202_048,
        },
        107_769_861_120,
        {(1, 17): 3_342_336, (1, 10240): 1_711_276_032, (2, 10240): 3_422_552_064},
        17_172_894_720,
    ),
    # keys wider than values, other head counts in local layers [window_minus_1]
    "mimo-v2": Case(
        {
            "hidden_size": 4096,
            "model_type": "mimo_v2_flash",
            "num_attention_heads": 64,
            "num_hidden_layers": 48,
            "v_head_dim": 128,
            "vocab_size": 152_576,
        },
        308_778_768_832,
        {(1, 17): 3_786_240, (1, 4096): 120_130_560, (2, 4096): 240_261_120},
        15_445_924_288,
    ),
    "olmo3": Case(
        {
            "hidden_size": 4096,
            "model_type": "olmo3",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "sliding_window": 4096,
            "vocab_size": 50304,
        },
        6_888_624_128,
        {(1, 17): 8_912_896, (1, 2048): 1_073_741_824, (2, 2048): 2_147_483_648},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_cache_are_those_of_transformers(name: str) -> None:
    check(CASES[name])


def test_modernberts_window_is_half_of_its_local_attention_unless_given() -> None:
    """Two layers of 4 heads of 16, the first without a window: 100 tokens and 16, or the 64 that the file gives."""
    sizes = {"model_type": "modernbert-decoder", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 96, "vocab_size": 1000, "local_attention": 32}
    row = 2 * 2 * 64
    for keys, window in (({}, 16), ({"sliding_window": 64}, 64)):
        assert cache_size(model_from(sizes | keys, "c", "x"), 100, precision=BF16).stored == (100 + window) * row
