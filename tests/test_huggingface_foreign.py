"""Files of sizes that are no config.json, and types whose layers no general rule counts: refused by what they are."""

from typing import Any

import pytest

from kvcalc import UserError
from kvcalc.library.huggingface import model_from

# As released: Mistral-7B-v0.1, Meta's Llama-3-8B, DeepSeek-V3's inference/configs/config_671B.json (shortened).
FILES = {
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
    """The file is said by its name, and where the same model is read."""
    said = refusal(**FILES[word])
    assert "not a config.json" in said
    assert f"`kvcalc models {word}`" in said
    assert "intermediate_size" not in said
    named = model_from(
        FILES[word] | {"model_type": "llama", "intermediate_size": 14336, "num_key_value_heads": 8}, "it.json", "it"
    )
    assert named.family == "llama"


def test_types_of_flash_linear_attention() -> None:
    """They keep states: the general rules would give them keys and values, whatever sizes the file has."""
    for keys in ({}, {"intermediate_size": 5632, "num_attention_heads": 16}):
        for name in ("gla", "delta_net", "hgrn2", "rwkv6", "one_of_tomorrow"):
            assert f"{name!r} is one of flash-linear-attention's" in refusal(**FLA | keys, model_type=name)
    assert "Layers of type gated_delta_net can stand" in refusal(**FLA, model_type="gated_deltanet")
    assert "its keys are those of flash-linear-attention's" in refusal(**FLA)


def test_its_plain_transformer() -> None:
    """Softmax attention: read like any unknown type, and marked, once the file says how wide its FFN is."""
    plain = {k: v for k, v in FLA.items() if not k.startswith("expand")} | {"model_type": "transformer", "num_heads": 32}
    assert "where the file gives intermediate_size" in refusal(**plain)
    model = model_from(plain | {"intermediate_size": 5632}, "it.json", "it")
    assert (model.parameters_exact, model.kinds[model.order[0]].label) == (False, "MHA")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"peft_type": "LORA", "base_model_name_or_path": "org/base"}, "adapter's config, which has no sizes of a model"),
        ({"weight_map": {}, "metadata": {"total_size": 1}}, "is the index of a checkpoint's weights, not a model's config.json"),
        ({"tokenizer_class": "LlamaTokenizer"}, "is a tokenizer's config"),
        ({"image_processor_type": "CLIPImageProcessor", "patch_size": 14}, "is a preprocessor's config"),
        ({"_from_model_config": True, "eos_token_id": 2}, "is a generation_config.json"),
        ({"bits": 4, "group_size": 128}, "is what a quantiser writes of itself"),
    ],
)  # fmt: skip
def test_files_that_stand_beside_a_config(keys: dict[str, Any], said: str) -> None:
    assert said in refusal(**keys)
    sizes = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
    assert model_from(sizes | keys | {"intermediate_size": 64, "vocab_size": 8}, "it.json", "it").layers == 1
