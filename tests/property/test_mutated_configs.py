"""Thousands of broken configs: each gives a model with valid sizes or one clear error, and never another
exception.

The mutations have a seed, so every run tries the same ones. A mutation drops a key, or sets a key (of this or
another type) to a value of any JSON type. Half of the configs are mutated twice.
"""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcalc import Model, UserError
from kvcalc.library.huggingface import model_from, read_config
from kvcalc.model.memory import size_record

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 128,
    "vocab_size": 1000, "head_dim": 16, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED = EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
INDEX = {"index_topk": 16, "index_n_heads": 4, "index_head_dim": 16}
MAMBA = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "model.layers.0.mlp"]}
GROUPS = {
    "quant_method": "compressed-tensors", "ignore": ["re:.*self_attn.*", "lm_head"], "kv_cache_scheme": None,
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"quantization_config": GROUPS},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 8, "n_positions": 128, "n_inner": None, "vocab_size": 1000},
    "falcon": SMALL | {"num_kv_heads": 8, "multi_query": True, "bias": False, "parallel_attn": True}
    | {"new_decoder_architecture": False},
    "gemma3": {"text_config": SMALL | {"model_type": "gemma3_text", "sliding_window": 32, "sliding_window_pattern": 2}},
    "gemma3n_text": SMALL
    | {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2, "hidden_size_per_layer_input": 8}
    | {"vocab_size_per_layer_input": 100, "laurel_rank": 4, "altup_num_inputs": 2, "sliding_window": 32},
    "deepseek_v3": SMALL | LATENT | ROUTED | {"quantization_config": BLOCKS, "num_nextn_predict_layers": 1},
    "deepseek_v32": SMALL | LATENT | ROUTED | INDEX,
    "deepseek_v4": SMALL | EXPERTS | INDEX
    | {"n_routed_experts": 4, "q_lora_rank": 24, "o_lora_rank": 16, "o_groups": 2, "sliding_window": 32, "hc_mult": 2}
    | {"compress_ratios": [0, 4, 128, 4], "qk_rope_head_dim": 8},
    "qwen3_next": SMALL | EXPERTS
    | {"num_experts": 4, "full_attention_interval": 2, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2}
    | {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4},
    "nemotron_h": SMALL | ROUTED
    | {"hybrid_override_pattern": "ME*-", "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 16, "n_groups": 2}
    | {"moe_shared_expert_intermediate_size": 32, "moe_latent_size": None, "conv_kernel": 4},
    "gpt_oss": SMALL | EXPERTS
    | {"num_local_experts": 4, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}},
    "llama4": {
        "text_config": SMALL
        | {"model_type": "llama4_text", "attention_chunk_size": 32, "no_rope_layers": [1, 1, 1, 0], "num_local_experts": 4}
        | {"interleave_moe_layer_step": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 96}
    },
    "mixtral": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "jamba": SMALL | MAMBA
    | {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2}
    | {"expert_layer_offset": 1, "mamba_dt_rank": "auto"},
    "minimax": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "attn_type_list": [0, 0, 0, 1]},
    "lfm2": SMALL | {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3, "block_auto_adjust_ff_dim": True},
    "zamba2": SMALL | MAMBA
    | {"layers_block_type": ["mamba", "mamba", "hybrid", "mamba"], "num_mem_blocks": 1, "adapter_rank": 4, "n_mamba_heads": 8}
    | {"mamba_ngroups": 1, "use_shared_attention_adapter": True},
    "phi3": SMALL | {"sliding_window": 32, "partial_rotary_factor": 0.5},
    "glm_moe_dsa": SMALL | LATENT | ROUTED | INDEX | {"indexer_types": ["full", "full", "shared", "shared"]},
    "qwen2_5_vl": {
        "vision_config": {"depth": 2},
        "text_config": SMALL | {"model_type": "qwen2_5_vl_text", "use_sliding_window": False},
    },
}  # fmt: skip
JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 3, 7, 2000, 2001, 10**9, 10**30, 1.5, 2.0, -0.5, float("nan"), float("inf"),
    "", "4", "auto", "NaN", "x" * 3000, "full_attention", "\x1b[31m",
    [], [1], [None], [[]], ["a", "b"], [-1] * 4, [10**30], [0, 1, 0, 1], [True] * 4, [1.5] * 4, [1] * 20_000, [{}],
    ["full_attention"] * 4, ["mamba"] * 4, {}, {"a": 1}, {"0": {}}, {"0": {"head_dim": "x"}}, {"": None}, {"x": [{"y": None}]},
]  # fmt: skip
FOREIGN = sorted({key for base in BASES.values() for key in (*base, *base.get("text_config", {}))})
FOREIGN += ["per_layer_config", "mlp_layer_types", "dtype", "rope_scaling", "rope_parameters", "model_type", "layer_types"]
EACH = 250


def paths(config: dict[str, Any], around: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Return the paths of all keys, including keys in nested mappings."""
    for key, value in config.items():
        yield (*around, key)
        if isinstance(value, dict):
            yield from paths(value, (*around, key))


def mutated(config: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a copy with one key dropped, changed or added."""
    changed = copy.deepcopy(config)
    *around, key = rng.choice([*paths(changed), *((name,) for name in rng.sample(FOREIGN, 5))])
    inside: Any = changed
    for step in around:
        inside = inside[step]
    if rng.random() < 0.15:
        inside.pop(key, None)
    else:
        inside[key] = rng.choice(JUNK)
    return changed


def sized(config: dict[str, Any]) -> Model | None:
    """Return the model of a config after computing all its figures; None if the config is refused."""
    try:
        model = model_from(config, "f.json", "x")
        record = size_record(model, 4096, 2)
    except UserError as error:
        assert len(str(error)) < 2000 and str(error).isprintable()
        return None
    assert model.parameters > 0
    assert all(isinstance(record[k], int) and record[k] >= 0 for k in record if k.endswith("_bytes"))
    return model


@pytest.mark.parametrize("name", BASES)
def test_bases_are_models(name: str) -> None:
    assert sized({"model_type": name, **BASES[name]})


@pytest.mark.parametrize("name", BASES)
def test_every_key_dropped(name: str) -> None:
    base = {"model_type": name, **BASES[name]}
    found = []
    for *around, key in paths(base):
        config = copy.deepcopy(base)
        inside: Any = config
        for step in around:
            inside = inside[step]
        del inside[key]
        found.append(sized(config))
    assert None in found  # without its width, at the least, a model is refused


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_mutations_end_in_a_model_or_in_one_clear_error(name: str) -> None:
    rng, base = random.Random(name), {"model_type": name, **BASES[name]}
    models = 0
    for _ in range(EACH):
        config = mutated(base, rng)
        if rng.random() < 0.5:
            config = mutated(config, rng)
        models += sized(config) is not None
    assert 0 < models < EACH, "some mutations matter, and some do not"


@pytest.mark.parametrize("name", BASES)
def test_files_cut_or_overwritten_anywhere_are_read_or_refused(name: str, tmp_path: Path) -> None:
    rng, whole = random.Random(name), json.dumps({"model_type": name, **BASES[name]}).encode()
    path = tmp_path / "config.json"
    for _ in range(30):
        at, content = rng.randrange(len(whole)), bytearray(whole)
        content[at : at + rng.randrange(1, 4)] = rng.randbytes(rng.randrange(4))
        path.write_bytes(content if rng.random() < 0.8 else whole[:at])
        try:
            size_record(read_config(path), 4096)
        except UserError as error:
            assert str(error).isprintable()
