"""The notes and errors of the reader: defaults, unread keys, unknown types, configs without sizes, broken files."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

from kvcalc import UserError
from kvcalc.library.huggingface import model_from, read_config

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 1000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
# q and o [64, 64], k and v [64, 16], FFN 3 · [64, 128], two norms, in 2 layers; embedding, head and last norm
PARAMETERS = 2 * (2 * 64 * 64 + 2 * 64 * 16 + 3 * 64 * 128 + 2 * 64) + 2 * 1000 * 64 + 64


def read(without: tuple[str, ...] = (), **changes: Any) -> Any:
    """Return the model of the small Llama with keys changed or removed."""
    config = {k: v for k, v in (LLAMA | changes).items() if k not in without}
    return model_from(config, "f.json", "small")


def refusal(without: tuple[str, ...] = (), **changes: Any) -> str:
    with pytest.raises(UserError) as refused:
        read(without, **changes)
    text = str(refused.value)
    assert text.startswith("f.json: ")
    return text


def test_a_complete_file_needs_no_notes() -> None:
    model = read()
    assert (model.parameters, model.dtype, model.max_context) == (PARAMETERS, "bf16", 4096)
    assert not [note for note in model.notes if "not read" in note]


@pytest.mark.parametrize("inside", [True, False])
def test_more_keys_than_any_config_has_are_refused(inside: bool) -> None:
    many = {f"k{n}": 0 for n in range(10_001)}
    said = refusal(tuple(LLAMA), text_config=LLAMA | many) if inside else refusal(**many)
    assert said == "f.json: has more than 10,000 keys"


def test_class_defaults_are_named() -> None:
    notes = read(without=("vocab_size", "attention_bias")).notes
    said = next(note for note in notes if note.startswith("class defaults, because the file lacks them: "))
    assert "attention_bias=False" in said and "vocab_size=32000" in said


def test_a_dtype_that_is_not_declared_is_said() -> None:
    assert "dtype: is missing; bf16 is assumed" in read(without=("torch_dtype",)).notes
    assert any("'int4' is no format of weights" in note for note in read(torch_dtype="int4").notes)


def test_unread_keys_are_listed_and_empty_ones_are_not() -> None:
    notes = read(window_of_mystery=7, hidden_act="silu", nothing=None, off=False, zero=0).notes
    assert "keys not read: window_of_mystery" in notes


def test_null_counts_as_null() -> None:
    assert read(head_dim=None).parameters == PARAMETERS
    assert read(head_dim=16).parameters == PARAMETERS + 2 * (2 * 64 * 64 + 2 * 64 * 16)  # every projection twice as wide


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers"])
def test_a_skeleton_is_refused(key: str) -> None:
    assert f"it gives no {key}. Looked for {key}, n_" in refusal(without=(key,))


def test_older_spellings_are_read_and_so_is_a_folder(tmp_path: Path) -> None:
    spelled = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
    config = {spelled.get(k, k): v for k, v in LLAMA.items()}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config))
    for path in (tmp_path / "mine", tmp_path / "mine" / "config.json"):
        model = read_config(path)
        assert (model.name, model.parameters) == ("mine", PARAMETERS)


# --- Types that are not known ---


def test_unknown_type_with_standard_fields_is_read_by_general_rules_and_says_so() -> None:
    model = read(model_type="llama-of-tomorrow")
    assert model.parameters == PARAMETERS
    assert "model_type 'llama-of-tomorrow' is not known. General rules for decoders apply" in " ".join(model.notes)
    assumed = " ".join(read(model_type="", without=("num_key_value_heads", "tie_word_embeddings")).notes)
    assert "num_key_value_heads = one per head" in assumed and "tie_word_embeddings = false" in assumed


@pytest.mark.parametrize(
    "key",
    ["window_size", "kv_share_every", "q_latent", "lora_dim", "ssm_state", "conv_width", "index_top", "n_chunks", "compressors"],
)
def test_unknown_type_with_a_key_that_may_change_the_cache_is_refused(key: str) -> None:
    assert f"--set {key}=null" in refusal(model_type="llama_x", **{key: 4})
    assert f"--set attn.{key}=null" in refusal(model_type="llama_x", attn={key: 4})


def test_unknown_type_with_a_layer_that_general_rules_do_not_know_is_refused() -> None:
    assert "unknown layer type 'linear_attention'" in refusal(model_type="x", layer_types=["linear_attention"] * 2)
    latent = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": None}
    assert "a window over latents" in refusal(model_type="x", sliding_window=8, **latent)
    assert read(model_type="x", **latent).attention == "MLA"
    assert "has an encoder" in refusal(model_type="x", is_encoder_decoder=True)


@pytest.mark.parametrize("name", ["gemma4_assistant", "blt", "t5", "vit", "clip_text_model"])
def test_type_that_transformers_knows_and_kvcalc_does_not_is_never_guessed(name: str) -> None:
    assert f"model_type {name!r} is not supported" in refusal(model_type=name)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("xlnet", "XLNetLMHeadModel"), ("xlm", "XLMWithLMHeadModel"), ("reformer", "ReformerModelWithLMHead"),
        ("transfo-xl", "TransfoXLLMHeadModel"), ("xlstm", "xLSTMForCausalLM"), ("rwkv", "RwkvForCausalLM"),
        ("cpmant", "CpmAntForCausalLM"), ("ctrl", "CTRLLMHeadModel"), ("biogpt", "BioGptForCausalLM"),
        ("prophetnet", "ProphetNetForConditionalGeneration"), ("openelm", "OpenELMForCausalLM"),
    ],
)  # fmt: skip
def test_a_type_that_is_rarely_served_is_refused(name: str, written: str) -> None:
    """It is refused by its model_type, or by its class if the file has no type."""
    for keys in ({"model_type": name}, {"model_type": "", "architectures": [written]}):
        assert f"model_type {name!r} is not supported: it is rarely served" in refusal(**keys)


# --- Values that do not fit ---


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("hidden_size", "64", "hidden_size: should be a whole number, not '64'"),
        ("hidden_size", -64, "hidden_size: -64 is outside 1 to 100,000,000"),
        ("hidden_size", True, "hidden_size: should be a whole number, not True"),
        ("hidden_size", float("nan"), "hidden_size: should be a whole number, not nan"),
        ("hidden_size", 10**4000, "hidden_size: 1000000"),
        ("hidden_size", [64] * 3, "hidden_size: should be a whole number, not a list of 3"),
        ("hidden_size", {"a": 1}, "hidden_size: should be a whole number, not a mapping of 1"),
        ("num_hidden_layers", 3000, "num_hidden_layers: should be a whole number from 1 to 2,000, not 3000"),
        ("num_attention_heads", 7, "num_attention_heads: 7 does not divide hidden_size 64"),
        ("num_key_value_heads", 3, "layer 0: num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
        ("vocab_size", 0, "vocab_size: 0 is outside"),
        ("head_dim", 0, "head_dim: 0 is outside"),
        ("intermediate_size", [1, "x"], "intermediate_size"),
        ("tie_word_embeddings", "false", "tie_word_embeddings: should be true or false, not 'false'"),
        ("model_type", ["llama"], "model_type: should be a text, not a list of 1"),
        ("layer_types", "full_attention", "layer_types: should be a list"),
        ("layer_types", ["full_attention"] * 3, "layer_types: has 3 entries for 2 layers"),
        ("layer_types", ["full_attention", None], "layer_types: holds None"),
        ("layer_types", ["full_attention", "mamba"], "layer_types: 'linear_attention' is no kind of attention"),
        ("per_layer_config", {"x": 1}, "per_layer_config: 'x' should be a layer's number"),
        ("quantization_config", [1], "quantization_config: should be a mapping, not a list of 1"),
    ],
)
def test_bad_values_name_their_key(key: str, value: Any, said: str) -> None:
    assert said in refusal(**{key: value})


def test_text_config_in_text_config_in_text_config_is_refused() -> None:
    config: dict[str, Any] = dict(LLAMA)
    for _ in range(5):
        config = {"model_type": "llava", "text_config": config}
    with pytest.raises(UserError, match="nests one text_config in another too deeply"):
        model_from(config, "f.json", "x")


FILES = {
    "empty": (b"", "is not JSON"),
    "a list": (b"[1, 2]", "contains no mapping of keys to values"),
    "a number": (b"17", "contains no mapping of keys to values"),
    "cut short": (b'{"model_type": "llama", "hid', "is not JSON"),
    "not UTF-8": (b'{"model_type": "\xff\xfe"}', "is not UTF-8 text (byte 16)"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "is not UTF-8 text"),
    "a key twice": (b'{"hidden_size": 64, "hidden_size": 128}', "key 'hidden_size' occurs twice"),
    "a key twice inside": (b'{"text_config": {"n_layer": 1, "n_layer": 2}}', "key 'n_layer' occurs twice"),
    "deep lists": (b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", "nests deeper than 32 levels"),
    "very deep lists": (b"[" * 500_000, "nests deeper than 32 levels"),
    "very deep mappings": (b'{"a":' * 200_000, "nests deeper than 32 levels"),
    "5000 digits": (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not JSON"),
    "17 MB": (b'{"a": "' + b"x" * 17_000_000 + b'"}', "has 17,000,009 bytes; more than 16,777,216 are not read"),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_files_name_themselves(name: str, tmp_path: Path, kvcalc: Run) -> None:
    content, said = FILES[name]
    path = tmp_path / "config.json"
    path.write_bytes(content)
    result = kvcalc("size", str(path))
    assert result.code == 2
    assert result.out == ""
    assert len(result.err.splitlines()) == 1
    assert f"{path}: {said}" in result.err


def test_byte_order_mark_and_infinity_are_no_obstacle(tmp_path: Path) -> None:
    text = json.dumps(LLAMA | {"layer_norm_eps": float("nan"), "time_step_limit": [0.0, float("inf")]})
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_config(tmp_path).parameters == PARAMETERS


@pytest.mark.parametrize(
    ("model_type", "more"), [("kimi_linear", {}), ("bailing_hybrid", {}), ("nemotron_h", {"hybrid_override_pattern": "M*-M"})]
)
def test_classes_that_tie_nothing(model_type: str, more: dict[str, Any]) -> None:
    """transformers' classes without tied keys build a head for any value of `tie_word_embeddings`."""
    given = LLAMA | {"model_type": model_type, "num_hidden_layers": 4, **more}
    tied, own = (model_from(given | {"tie_word_embeddings": tie}, "f.json", "x") for tie in (True, False))
    assert tied.parameters == own.parameters
    assert (tied.tie_word_embeddings, tied.parameters_exact) == (False, own.parameters_exact)


def test_heads_of_cohere_compass_are_as_wide_as_is_said() -> None:
    """4 layers: q and o [64, 256], k and v [64, 64], FFN 3 · [64, 128], one norm; one table and the final norm."""
    given = {"model_type": "cohere_compass_text", "num_hidden_layers": 4, "head_dim": 32, "tie_word_embeddings": True}
    found = model_from(LLAMA | given, "f.json", "x")
    assert found.parameters == 4 * (2 * 64 * 256 + 2 * 64 * 64 + 3 * 64 * 128 + 64) + 1000 * 64 + 64


def test_a_cross_attention_that_the_type_has_not_makes_the_count_approximate() -> None:
    given = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000, "n_positions": 128}
    assert model_from(given, "f.json", "x").parameters_exact
    assert not model_from(given | {"add_cross_attention": True}, "f.json", "x").parameters_exact


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"model_type": "qwen2", "use_sliding_window": 7}, "should be true or false, not 7"),
        ({"model_type": "gpt2", "n_inner": [], "n_embd": 64, "n_layer": 2, "n_head": 8}, "has 0 entries for 2 layers"),
    ],
)  # fmt: skip
def test_conditions_and_empty_lists_are_not_guessed(keys: dict[str, Any], message: str) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2}
    with pytest.raises(UserError, match=message):
        model_from(sizes | {"intermediate_size": 128, "vocab_size": 1000} | keys, "f.json", "f")
