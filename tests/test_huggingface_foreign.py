"""Files of sizes that are no config.json, and types whose layers no general rule counts: refused by what they are."""

from typing import Any

import pytest

from kvcalc import UserError
from kvcalc.library.huggingface import model_from

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


def refusal(**keys: Any) -> str:
    with pytest.raises(UserError) as caught:
        model_from(keys, "it.json", "it")
    return str(caught.value)


@pytest.mark.parametrize("word", FILES)
def test_files_of_other_programs(word: str) -> None:
    """They are refused unless they name a model type."""
    assert "has another program's format" in refusal(**FILES[word])
    named = model_from(
        FILES[word] | {"model_type": "llama", "intermediate_size": 14336, "num_key_value_heads": 8}, "it.json", "it"
    )
    assert named.family == "llama"


def test_types_of_flash_linear_attention() -> None:
    """They keep states: the general rules would give them keys and values, whatever sizes the file has."""
    for keys in ({}, {"intermediate_size": 5632, "num_attention_heads": 16}):
        for name in ("gla", "delta_net", "hgrn2", "rwkv6", "one_of_tomorrow"):
            assert f"{name!r} has layers of flash-linear-attention" in refusal(**FLA | keys, model_type=name)
    assert "has layers of flash-linear-attention" in refusal(**FLA)


def test_its_plain_transformer() -> None:
    """Softmax attention: read like any unknown type, and marked, once the file says how wide its FFN is."""
    plain = {k: v for k, v in FLA.items() if not k.startswith("expand")} | {"model_type": "transformer", "num_heads": 32}
    assert "flash-linear-attention" in refusal(**plain)
    model = model_from(plain | {"intermediate_size": 5632}, "it.json", "it")
    assert (model.parameters_exact, model.kinds[model.order[0]].label) == (False, "MHA")


def test_files_without_sizes() -> None:
    assert "adapter's config, which has no sizes of a model" in refusal(peft_type="LORA", base_model_name_or_path="org/base")
    assert "is no language model's config.json" in refusal(tokenizer_class="LlamaTokenizer")
