"""Configs of plain decoders: grouped attention, a dense network, biases, norms, ties and old spellings of keys."""

import pytest
from huggingface_cases import Case, check

CASES = {
    "llama-3.1-8b": Case(
        {
            "hidden_size": 4096,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "vocab_size": 128_256,
            "intermediate_size": 14336,
            "num_key_value_heads": 8,
        },
        8_030_261_248,
        {(1, 17): 2_228_224, (1, 4096): 536_870_912, (2, 4096): 1_073_741_824},
    ),
    # tied embeddings count once
    "llama-3.2-1b": Case(
        {
            "head_dim": 64,
            "hidden_size": 2048,
            "model_type": "llama",
            "num_attention_heads": 32,
            "num_hidden_layers": 16,
            "tie_word_embeddings": True,
            "vocab_size": 128_256,
            "intermediate_size": 8192,
            "num_key_value_heads": 8,
        },
        1_235_814_400,
        {(1, 17): 557_056, (1, 4096): 134_217_728, (2, 4096): 268_435_456},
    ),
    # head_dim 128 where hidden/heads is 160; a window that is null
    "mistral-nemo": Case(
        {
            "head_dim": 128,
            "hidden_size": 5120,
            "model_type": "mistral",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "sliding_window": None,
            "vocab_size": 131_072,
        },
        12_247_782_400,
        {(1, 17): 2_785_280, (1, 4096): 671_088_640, (2, 4096): 1_342_177_280},
    ),
    # head_dim 128 where hidden/heads is 64; q and k norms; a window switched off
    "qwen3-0.6b": Case(
        {
            "head_dim": 128,
            "hidden_size": 1024,
            "max_window_layers": 28,
            "model_type": "qwen3",
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "sliding_window": None,
            "use_sliding_window": False,
            "vocab_size": 151_936,
            "tie_word_embeddings": True,
            "intermediate_size": 3072,
            "num_key_value_heads": 8,
        },
        596_049_920,
        {(1, 17): 1_949_696, (1, 4096): 469_762_048, (2, 4096): 939_524_096},
    ),
    # biases on q, k, v alone; a window switched off
    "qwen2.5-7b": Case(
        {
            "hidden_size": 3584,
            "model_type": "qwen2",
            "num_attention_heads": 28,
            "num_hidden_layers": 28,
            "sliding_window": 131_072,
            "use_sliding_window": False,
            "vocab_size": 152_064,
            "intermediate_size": 18944,
            "num_key_value_heads": 4,
        },
        7_615_616_512,
        {(1, 17): 974_848, (1, 4096): 234_881_024, (2, 4096): 469_762_048},
    ),
    "hunyuan": Case(
        {
            "head_dim": 128,
            "hidden_size": 4096,
            "model_type": "hunyuan_v1_dense",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "vocab_size": 290_943,
        },
        8_859_684_864,
        {(1, 17): 8_912_896, (1, 2048): 1_073_741_824, (2, 2048): 2_147_483_648},
    ),
    # learned positions, biases, old spellings
    "gpt2": Case(
        {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257},
        124_439_808,
        {(1, 17): 626_688, (1, 1024): 37_748_736, (2, 1024): 75_497_472},
    ),
    # one norm before two parallel parts, a bias on the head
    "gptj": Case(
        {"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "vocab_size": 50400},
        6_050_882_784,
        {(1, 17): 7_798_784, (1, 2048): 939_524_096, (2, 2048): 1_879_048_192},
    ),
    "pythia-6.9b": Case(
        {
            "hidden_size": 4096,
            "model_type": "gpt_neox",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "vocab_size": 50432,
            "intermediate_size": 16384,
        },
        6_857_302_016,
        {(1, 17): 8_912_896, (1, 2048): 1_073_741_824, (2, 2048): 2_147_483_648},
    ),
    "phi-2": Case(
        {
            "hidden_size": 2560,
            "model_type": "phi",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "vocab_size": 51200,
            "intermediate_size": 10240,
        },
        2_779_683_840,
        {(1, 17): 5_570_560, (1, 2048): 671_088_640, (2, 2048): 1_342_177_280},
    ),
    # embeddings narrower than the stream
    "opt-350m": Case(
        {
            "do_layer_norm_before": False,
            "hidden_size": 1024,
            "model_type": "opt",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "vocab_size": 50272,
            "word_embed_proj_dim": 512,
            "ffn_dim": 4096,
        },
        331_196_416,
        {(1, 17): 1_671_168, (1, 2048): 201_326_592, (2, 2048): 402_653_184},
    ),
    "bloom-560m": Case(
        {"model_type": "bloom", "n_layer": 24, "num_attention_heads": 16, "vocab_size": 250_880, "n_embed": 1024},
        559_214_592,
        {(1, 17): 1_671_168, (1, 4096): 402_653_184, (2, 4096): 805_306_368},
    ),
    "mpt-7b": Case(
        {"d_model": 4096, "model_type": "mpt", "n_heads": 32, "n_layers": 32, "vocab_size": 50432},
        6_649_286_656,
        {(1, 17): 8_912_896, (1, 2048): 1_073_741_824, (2, 2048): 2_147_483_648},
    ),
    # MQA by a flag
    "starcoder": Case(
        {
            "model_type": "gpt_bigcode",
            "multi_query": True,
            "n_embd": 6144,
            "n_head": 48,
            "n_layer": 40,
            "vocab_size": 49152,
            "n_positions": 8192,
        },
        15_517_456_384,
        {(1, 17): 348_160, (1, 4096): 83_886_080, (2, 4096): 167_772_160},
    ),
    "falcon-rw-1b": Case(
        {
            "bias": True,
            "hidden_size": 2048,
            "model_type": "falcon",
            "multi_query": False,
            "new_decoder_architecture": False,
            "num_attention_heads": 32,
            "num_hidden_layers": 24,
            "vocab_size": 50304,
            "parallel_attn": False,
        },
        1_311_625_216,
        {(1, 17): 3_342_336, (1, 2048): 402_653_184, (2, 2048): 805_306_368},
    ),
    # num_kv_heads 71 that caches one
    "falcon-7b": Case(
        {
            "hidden_size": 4544,
            "model_type": "falcon",
            "multi_query": True,
            "num_attention_heads": 71,
            "num_hidden_layers": 32,
            "num_kv_heads": 71,
            "vocab_size": 65024,
        },
        6_921_720_704,
        {(1, 17): 139_264, (1, 2048): 16_777_216, (2, 2048): 33_554_432},
    ),
    # 8 KV heads, which the reference code broadcasts to 128 [broadcast_kv_heads]
    "falcon-40b": Case(
        {
            "hidden_size": 8192,
            "model_type": "falcon",
            "new_decoder_architecture": True,
            "num_attention_heads": 128,
            "num_hidden_layers": 60,
            "num_kv_heads": 8,
            "vocab_size": 65024,
        },
        41_303_293_952,
        {(1, 17): 2_088_960, (1, 2048): 251_658_240, (2, 2048): 503_316_480},
    ),
    "stablelm-2-12b": Case(
        {
            "hidden_size": 5120,
            "model_type": "stablelm",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "vocab_size": 100_352,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "intermediate_size": 13824,
            "num_key_value_heads": 8,
        },
        12_143_185_920,
        {(1, 17): 3_481_600, (1, 4096): 838_860_800, (2, 4096): 1_677_721_600},
    ),
    "olmo2-7b": Case(
        {"hidden_size": 4096, "model_type": "olmo2", "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 100_352},
        7_298_617_344,
        {(1, 17): 8_912_896, (1, 4096): 2_147_483_648, (2, 4096): 4_294_967_296},
    ),
    "minitron-8b": Case(
        {
            "hidden_size": 4096,
            "model_type": "nemotron",
            "num_attention_heads": 48,
            "num_hidden_layers": 32,
            "vocab_size": 256_000,
            "head_dim": 128,
            "intermediate_size": 16384,
            "num_key_value_heads": 8,
        },
        8_271_699_968,
        {(1, 17): 2_228_224, (1, 4096): 536_870_912, (2, 4096): 1_073_741_824},
    ),
    "command-r-plus": Case(
        {
            "hidden_size": 12288,
            "model_type": "cohere",
            "num_attention_heads": 96,
            "num_hidden_layers": 64,
            "use_qk_norm": True,
            "vocab_size": 256_000,
            "intermediate_size": 33792,
            "num_key_value_heads": 8,
        },
        103_810_674_688,
        {(1, 17): 4_456_448, (1, 4096): 1_073_741_824, (2, 4096): 2_147_483_648},
    ),
    # every layer slides [window_minus_1]
    "starcoder2-15b": Case(
        {
            "hidden_size": 6144,
            "model_type": "starcoder2",
            "num_attention_heads": 48,
            "num_hidden_layers": 40,
            "sliding_window": 4096,
            "vocab_size": 49152,
            "tie_word_embeddings": False,
            "intermediate_size": 24576,
            "num_key_value_heads": 4,
        },
        15_957_889_024,
        {(1, 17): 1_392_640, (1, 6144): 335_544_320, (2, 6144): 671_088_640},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_cache_are_those_of_transformers(name: str) -> None:
    check(CASES[name])
