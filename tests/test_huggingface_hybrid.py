"""Configs of recurrent layers, alone and beside attention."""

import pytest
from huggingface_cases import Case, check

from kvcalc import UserError
from kvcalc.library.huggingface import model_from

BLOCKS = {"M": "mamba", "E": "moe", "*": "attention"}
ULTRA = "MEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
CASES = {
    # full_attention_interval instead of a list [conv_state_full_kernel, fp32_state]
    "qwen3-next-80b": Case(
        {
            "full_attention_interval": 4,
            "hidden_size": 2048,
            "model_type": "qwen3_next",
            "num_attention_heads": 16,
            "num_hidden_layers": 48,
            "vocab_size": 151_936,
        },
        79_674_391_296,
        {(1, 17): 77_684_736, (1, 4096): 177_930_240, (2, 4096): 355_860_480},
        3_874_929_408,
    ),
    # one part a layer, by letters [conv_state_full_kernel, fp32_state]
    "nemotron-3-nano": Case(
        {
            "hidden_size": 2688,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "model_type": "nemotron_h",
            "num_attention_heads": 32,
            "num_hidden_layers": 52,
            "vocab_size": 131_072,
            "mamba_num_heads": 64,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "n_routed_experts": 128,
            "num_experts_per_tok": 6,
            "num_key_value_heads": 2,
        },
        31_577_937_344,
        {(1, 17): 49_186_816, (1, 4096): 74_248_192, (2, 4096): 148_496_384},
        3_580_073_408,
    ),
    # latent experts [conv_state_full_kernel, fp32_state]
    "nemotron-3-super": Case(
        {
            "hidden_size": 4096,
            "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME",
            "model_type": "nemotron_h",
            "num_attention_heads": 32,
            "num_hidden_layers": 88,
            "vocab_size": 131_072,
            "moe_intermediate_size": 2688,
            "moe_latent_size": 1024,
            "moe_shared_expert_intermediate_size": 5376,
            "n_routed_experts": 512,
            "num_experts_per_tok": 22,
            "num_key_value_heads": 2,
        },
        120_668_687_360,
        {(1, 17): 170_369_024, (1, 4096): 203_784_192, (2, 4096): 407_568_384},
        12_770_216_960,
    ),
    # no num_hidden_layers at all [conv_state_full_kernel, fp32_state]
    "nemotron-3-ultra": Case(
        {
            "hidden_size": 8192,
            "layers_block_type": [BLOCKS[letter] for letter in ULTRA],
            "model_type": "nemotron_h",
            "num_attention_heads": 64,
            "vocab_size": 131_072,
            "mamba_num_heads": 256,
            "moe_intermediate_size": 5120,
            "moe_latent_size": 2048,
            "moe_shared_expert_intermediate_size": 10240,
            "n_routed_experts": 512,
            "num_experts_per_tok": 22,
            "num_key_value_heads": 2,
        },
        549_308_968_960,
        {(1, 17): 408_170_496, (1, 4096): 458_293_248, (2, 4096): 916_586_496},
        56_058_818_560,
    ),
    # [conv_state_full_kernel, fp32_state]
    "jamba": Case(
        {
            "attn_layer_period": 8,
            "expert_layer_period": 2,
            "hidden_size": 4096,
            "model_type": "jamba",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "vocab_size": 65536,
        },
        51_570_323_328,
        {(1, 17): 16_334_848, (1, 64): 17_104_896, (2, 64): 34_209_792},
        12_110_311_296,
    ),
    # [conv_state_full_kernel, fp32_state]
    "bamba-9b": Case(
        {
            "attn_layer_indices": [9, 18, 27],
            "hidden_size": 4096,
            "model_type": "bamba",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "vocab_size": 128_000,
        },
        9_808_584_064,
        {(1, 17): 244_993_024, (1, 4096): 295_115_776, (2, 4096): 590_231_552},
    ),
    # attention and Mamba-2 side by side [conv_state_full_kernel, fp32_state]
    "falcon-h1": Case(
        {
            "hidden_size": 4096,
            "model_type": "falcon_h1",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "vocab_size": 128_000,
        },
        8_514_961_408,
        {(1, 17): 36_077_568, (1, 4096): 570_720_256, (2, 4096): 1_141_440_512},
    ),
    # [conv_state_full_kernel, fp32_state]
    "falcon-mamba": Case(
        {"hidden_size": 768, "model_type": "falcon_mamba", "num_hidden_layers": 32, "vocab_size": 50280},
        159_308_544,
        {(1, 17): 3_440_640, (1, 64): 3_440_640, (2, 64): 6_881_280},
    ),
    # [conv_state_full_kernel, fp32_state]
    "mamba-130m": Case(
        {"hidden_size": 768, "model_type": "mamba", "num_hidden_layers": 24, "vocab_size": 50280},
        129_135_360,
        {(1, 17): 2_580_480, (1, 64): 2_580_480, (2, 64): 5_160_960},
    ),
    # [conv_state_full_kernel, fp32_state]
    "mamba2-130m": Case(
        {
            "hidden_size": 768,
            "model_type": "mamba2",
            "num_hidden_layers": 24,
            "vocab_size": 50288,
            "n_groups": 1,
            "num_heads": 24,
            "tie_word_embeddings": True,
        },
        128_989_632,
        {(1, 17): 19_132_416, (1, 4096): 19_132_416, (2, 4096): 38_264_832},
    ),
    # [conv_state_full_kernel, fp32_state]
    "granite-4-h-small": Case(
        {
            "hidden_size": 4096,
            "layer_types": (["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 4) * 4,
            "model_type": "granitemoehybrid",
            "num_attention_heads": 32,
            "num_hidden_layers": 40,
            "vocab_size": 100_352,
            "mamba_d_state": 128,
            "num_experts_per_tok": 10,
            "num_local_experts": 72,
            "shared_intermediate_size": 1536,
            "tie_word_embeddings": True,
            "intermediate_size": 768,
            "num_key_value_heads": 8,
        },
        32_207_337_984,
        {(1, 17): 153_098_240, (1, 4096): 219_928_576, (2, 4096): 439_857_152},
        8_803_121_664,
    ),
    # two shared blocks with adapters [conv_state_full_kernel, fp32_state]
    "zamba2": Case(
        {"hidden_size": 2560, "model_type": "zamba2", "num_attention_heads": 32, "num_hidden_layers": 54, "vocab_size": 32000},
        2_481_848_336,
        {(1, 17): 75_612_672, (1, 4096): 827_453_952, (2, 4096): 1_654_907_904},
    ),
    # short convolutions
    "lfm2": Case(
        {"hidden_size": 2560, "model_type": "lfm2", "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 65536},
        2_705_497_600,
        {(1, 17): 1_392_640, (1, 4096): 335_544_320, (2, 4096): 671_088_640},
    ),
    # lightning attention: a recurrent state in seven of eight layers
    "minimax-text-01": Case(
        {
            "hidden_size": 6144,
            "layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 10,
            "model_type": "minimax",
            "num_attention_heads": 64,
            "num_hidden_layers": 80,
            "vocab_size": 200_064,
            "num_local_experts": 32,
            "head_dim": 128,
            "intermediate_size": 9216,
        },
        456_089_655_296,
        {(1, 17): 147_496_960, (1, 4096): 314_572_800, (2, 4096): 629_145_600},
        48_403_306_496,
    ),
    # [conv_state_full_kernel, fp32_state]
    "kimi-linear": Case(
        {
            "hidden_size": 2304,
            "model_type": "kimi_linear",
            "num_attention_heads": 32,
            "num_hidden_layers": 27,
            "vocab_size": 163_840,
        },
        49_133_074_464,
        {(1, 17): 45_705_984, (1, 4096): 73_900_032, (2, 4096): 147_800_064},
        3_494_852_640,
    ),
    # [conv_state_full_kernel, fp32_state]
    "olmo-hybrid": Case(
        {
            "hidden_size": 3840,
            "model_type": "olmo_hybrid",
            "num_attention_heads": 30,
            "num_hidden_layers": 32,
            "vocab_size": 100_352,
        },
        7_430_870_688,
        {(1, 17): 56_832_000, (1, 4096): 558_059_520, (2, 4096): 1_116_119_040},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_cache_are_those_of_transformers(name: str) -> None:
    check(CASES[name])


def test_zamba2_heads_come_from_their_width_where_a_file_gives_no_number() -> None:
    """Older files of Zamba2-2.7B give mamba_headdim 64 alone; newer ones add n_mamba_heads 80 = 2·2560 / 64."""
    old = {**CASES["zamba2"].config, "mamba_headdim": 64}
    counts = [model_from(file, "config.json", "model").parameters for file in (old, {**old, "n_mamba_heads": 80})]
    per_head = 2560 + 3  # a row of dt's projection; A, D and dt's bias
    assert counts == [CASES["zamba2"].parameters + 54 * (80 - 8) * per_head] * 2
    per_width = [
        model_from({**CASES["zamba2"].config, **k}, "c", "m").parameters for k in ({}, {"mamba_headdim": 64, "n_mamba_heads": 8})
    ]
    assert per_width[0] == per_width[1]  # transformers derives the width from the number, which the file gives
    with pytest.raises(UserError, match="mamba_headdim: leaves 0 heads in 5120 channels"):
        model_from({**CASES["zamba2"].config, "mamba_headdim": 8192}, "c", "m")
