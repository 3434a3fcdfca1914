"""Files of unknown types: no answer that an unread key could change, and a `--set` for every refusal."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from test_huggingface_import import CONFIGS

from kvcalc import UserError, cache_size
from kvcalc.library.huggingface import model_from
from kvcalc.library.huggingface.reader import read_config

LAYERS, GROUPS, WIDTH, WINDOW = 24, 4, 128, 512
FILE = {
    "model_type": "nobodys", "architectures": ["NobodysForCausalLM"], "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": GROUPS, "head_dim": WIDTH,
    "vocab_size": 32000, "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "rms_norm_eps": 1e-6,
}  # fmt: skip
# Which layers have the window, in words of unknown code.
PATTERNS: list[dict[str, Any]] = [
    {"global_attn_every_n_layers": 6}, {"full_attention_interval": 6}, {"swa_layers": [0, 1, 2]}, {"layer_pattern": "LLLLLG"},
    {"global_layers": [5, 11, 17, 23]}, {"attn_types": ["local", "global"] * 12}, {"local_global_ratio": 5}, {"ratio": "5:1"},
    {"use_hybrid": True}, {"dense_attention_every": 4}, {"attention_config": {"every": 6}}, {"no_rope_layers": [1, 1, 1, 0] * 6},
    {"nope_layer_interval": 4}, {"plan": "LLLG"}, {"kinds": [0, 1] * 12}, {"alternate": True}, {"windows": [512, 0] * 12},
    {"sliding_window_pattern": 6}, {"max_window_layers": 12}, {"swa": {"every": 2}}, {"first_full_layers": 2}, {"g": 6},
]  # fmt: skip
# What changes the cache or the weights without any window.
OTHERS: list[dict[str, Any]] = [
    {"attn_layer_period": 8}, {"num_kv_shared_layers": 10}, {"window_size": 512}, {"attention_window": [512] * LAYERS},
    {"attention_chunk_size": 8192}, {"linear_attention_pattern": "LLLF"}, {"cross_attention_layers": [3, 8]}, {"num_loops": 4},
    {"v_head_dim": 256}, {"n_kv_heads_per_layer": [4] * LAYERS}, {"layers_block_type": ["attention", "mamba"] * 12},
    {"hybrid_override_pattern": "M*M-" * 6}, {"reuse_cache_every": 2}, {"cla_factor": 2}, {"local_attention": 1024},
    {"num_experts": 8, "num_experts_per_tok": 2, "moe_layer_interval": 2}, {"attention_span": 1024}, {"sizes": [1] * LAYERS},
    {"num_local_experts": 8, "num_experts_per_tok": 2, "expert_layers": [1, 3]},
]  # fmt: skip
PLAIN: list[dict[str, Any]] = [
    {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_interleaved": True, "rotary_pct": 0.5},
    {"attention_dropout": 0.1, "attn_pdrop": 0.1, "layerdrop": 0.1, "initializer_range": 0.02, "use_cache": True},
    {"bos_token_id": 1, "eos_token_id": [2, 3], "forced_eos_token_id": 2, "tokenizer_class": "LlamaTokenizer"},
    {"vision_config": {"window_size": 14, "fullatt_block_indexes": [7, 15], "depth": 32}, "audio_config": {"layers": 4}},
    {"quantization_comment": "int4 in groups of 128", "quantization_config": {"quant_method": "fp8"}},
    {"attn_implementation": "sdpa", "use_flash_attn": True, "attention_softmax_in_fp32": True, "attention_type": "gqa"},
    {"sliding_window": None}, {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 12},
    {"attn_logit_softcapping": 50.0, "query_pre_attn_scalar": 256, "attention_multiplier": 0.5, "parallel_attn": True},
    {"keys_to_ignore_at_inference": ["past_key_values"], "auto_map": {"AutoConfig": "a.B"}, "languages": ["en", "fr"]},
    {"sizes": ["small"], "num_hidden_layers": 1},  # a list of the length of a lone layer orders nothing
]  # fmt: skip


def read(changes: list[str] | None = None, **keys: Any) -> Any:
    return model_from(FILE | keys, "f.json", "f", changes)


def stored(tokens_kept: int) -> int:
    """Return the bf16 bytes of keys and values of these numbers of tokens, added over all layers."""
    return tokens_kept * 2 * GROUPS * WIDTH * 2


def refusal(**keys: Any) -> UserError:
    with pytest.raises(UserError) as raised:
        read(**keys)
    return raised.value


def changes_of(hint: str) -> list[str]:
    """Return the changes that the hint suggests after --set."""
    words = shlex.split(hint)
    return [words[at + 1] for at, word in enumerate(words) if word == "--set"]


def hidden(data: Any) -> Any:
    """Return the config with an unknown type and class."""
    if not isinstance(data, dict):
        return data
    return {k: "nobodys" if k == "model_type" else hidden(v) for k, v in data.items() if k != "architectures"}


@pytest.mark.parametrize("keys", PATTERNS, ids=lambda keys: next(iter(keys)))
def test_a_window_of_unknown_layers_is_refused_and_settled(keys: dict[str, Any]) -> None:
    error = refusal(sliding_window=WINDOW, **keys)
    assert next(iter(keys)) in error.what
    model = read(changes_of(error.hint), sliding_window=WINDOW, **keys)
    windows = sum("window" in model.kinds[kind].label for kind in model.order)
    assert cache_size(model, 8192).stored == stored(windows * WINDOW + (LAYERS - windows) * 8192)
    assert WINDOW * LAYERS < cache_size(model, 8192).stored / stored(1) < 8192 * LAYERS


@pytest.mark.parametrize("keys", OTHERS, ids=lambda keys: list(keys)[-1])
def test_keys_that_may_change_a_count_are_refused_and_settled(keys: dict[str, Any]) -> None:
    error = refusal(**keys)
    assert list(keys)[-1] in error.what
    assert cache_size(read(changes_of(error.hint), **keys), 8192).stored == stored(LAYERS * 8192)


@pytest.mark.parametrize("keys", PLAIN, ids=lambda keys: next(iter(keys)))
def test_keys_that_cannot_matter_are_no_reason_to_refuse(keys: dict[str, Any]) -> None:
    assert cache_size(read(**keys), 8192).stored == stored(keys.get("num_hidden_layers", LAYERS) * 8192)


def test_a_window_alone_is_refused_until_its_layers_are_named() -> None:
    """24 layers with 512 tokens each, half of the layers, or none."""
    assert "sliding_window of 512" in refusal(sliding_window=WINDOW).what
    for types, kept in (
        ("sliding_attention", LAYERS * WINDOW), ("full_attention", LAYERS * 8192),
        ("sliding_attention, full_attention", 12 * (WINDOW + 8192)), ("23 full_attention, sliding_attention", 23 * 8192 + WINDOW),
    ):  # fmt: skip
        model = read([f"layer_types={types}"], sliding_window=WINDOW)
        assert cache_size(model, 8192).stored == stored(kept)
    named = ["sliding_attention"] * 20 + ["full_attention"] * 4
    assert cache_size(read(sliding_window=WINDOW, layer_types=named), 8192).stored == stored(20 * WINDOW + 4 * 8192)
    listed = [WINDOW] * 20 + [None] * 4
    assert cache_size(read(sliding_window=listed), 8192).stored == stored(20 * WINDOW + 4 * 8192)


def test_a_list_of_layers_needs_its_window() -> None:
    named = ["sliding_attention"] * LAYERS
    assert "--set sliding_window=" in refusal(layer_types=named).hint
    assert cache_size(read(["sliding_window=64"], layer_types=named), 8192).stored == stored(LAYERS * 64)
    assert not read(["quantization_config=null"], quantization_config={"quant_method": "fp8"}).quantization


@pytest.mark.parametrize("text", ["", "0", "25 full_attention", "5 sliding_attention,", "a b c", "full_attention; x", "nonsense"])
def test_layer_types_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="layer_types"):
        read([f"layer_types={text}"], sliding_window=WINDOW)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_hidden_type_is_refused_or_has_the_same_cache(name: str) -> None:
    """For a real file with an unknown type, the general rules never give another cache size.

    Files without a number of KV heads are read as MHA, with a note.
    """
    expected = model_from(CONFIGS[name], "f.json", "f")
    try:
        found = model_from(hidden(CONFIGS[name]), "f.json", "f")
    except UserError:
        return
    if any("num_key_value_heads = one per head" in note for note in found.notes):
        return
    for context in (100, 5000, 60_000):
        assert cache_size(found, context).stored == cache_size(expected, context).stored


@pytest.mark.parametrize(
    "line", ["size {}", "fit {} --gpu h100", "fit 'vllm serve {}' --gpu h100", "plan {} --gpu h100 --users 2 --context 4k"]
)
def test_the_text_of_a_refusal_can_be_typed(kvcalc: Run, tmp_path: Path, line: str) -> None:
    file = tmp_path / "m.json"
    file.write_text(json.dumps(FILE | {"sliding_window": WINDOW, "global_attn_every_n_layers": 6}))
    line = line.format(file)
    refused = kvcalc(line)
    assert refused.code == 2
    assert "global_attn_every_n_layers" in refused.err
    (change,) = re.findall(r"--set '([^']*)'", refused.err)
    assert kvcalc(line, "--set", change).code == 0


# --- Files that are no config.json, and types whose layers no general rule counts ---

# As released: Mistral-7B-v0.1, Meta's Llama-3-8B, DeepSeek-V3's inference/configs/config_671B.json (shortened).
FILES = {
    "mamba": {"ssm_cfg": {}, "d_model": 768, "n_layer": 24, "vocab_size": 50277},
    "mistral": {"dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32, "vocab_size": 32000},
    "llama": {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "multiple_of": 1024},
    "deepseek": {"vocab_size": 129280, "dim": 7168, "inter_dim": 18432, "n_layers": 61, "n_heads": 128},
}  # fmt: skip
FLA = {
    "hidden_size": 2048, "num_hidden_layers": 24, "num_heads": 4, "expand_k": 0.5, "expand_v": 1, "hidden_ratio": 4,
    "intermediate_size": None, "vocab_size": 32000,
}  # fmt: skip


def foreign_refusal(**keys: Any) -> str:
    with pytest.raises(UserError) as caught:
        model_from(keys, "it.json", "it")
    return str(caught.value)


@pytest.mark.parametrize("word", FILES)
def test_files_of_other_programs(word: str) -> None:
    """They are refused unless they name a model type."""
    assert "has another program's format" in foreign_refusal(**FILES[word])
    named = model_from(
        FILES[word] | {"model_type": "llama", "intermediate_size": 14336, "num_key_value_heads": 8}, "it.json", "it"
    )
    assert named.family == "llama"


def test_types_of_flash_linear_attention() -> None:
    """They store states, but the general rules would give them keys and values."""
    for keys in ({}, {"intermediate_size": 5632, "num_attention_heads": 16}):
        for name in ("gla", "delta_net", "hgrn2", "rwkv6"):
            assert f"{name!r} is not supported: it is rarely served" in foreign_refusal(**FLA | keys, model_type=name)
        assert "expand_k" in foreign_refusal(**FLA | keys | {"intermediate_size": 5632}, model_type="one_of_tomorrow")


def test_files_without_sizes() -> None:
    assert "is no language model's config.json" in foreign_refusal(tokenizer_class="LlamaTokenizer")


def test_an_adapter_names_its_base_model(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text('{"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 32}')
    hint = "Write `kvcalc fit org/base --max-loras 1 --max-lora-rank 32`"
    for path in (file, tmp_path):
        with pytest.raises(UserError) as caught:
            read_config(path)
        assert str(caught.value) == f"{file}: is a LoRA adapter of org/base, not a model. {hint}"
    file.write_text('{"peft_type": "LORA", "r": "8; rm"}')
    with pytest.raises(UserError, match="r: should be a whole number"):
        read_config(file)
