"""Configs of language models inside larger files."""

import pytest

from kvcalc import UserError, load_model
from kvcalc.library.huggingface import model_from
from kvcalc.library.huggingface.vision import tower


@pytest.mark.parametrize("whole", [True, False, None])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe"])
def test_the_whole_file_says_whether_the_head_is_tied(model_type: str, whole: bool | None, inside: bool) -> None:
    """The text part does not matter. By default, the head is separate."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000}
    text = sizes | {"model_type": f"{model_type}_text", "intermediate_size": 96, "tie_word_embeddings": inside}
    text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if "moe" in model_type else {}
    part = {"thinker_config": {"text_config": text}} if "omni" in model_type else {"text_config": text}
    said = {} if whole is None else {"tie_word_embeddings": whole}
    assert model_from({"model_type": model_type} | part | said, "config.json", "x").tie_word_embeddings is bool(whole)


TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 1000,
}
QWEN3 = {"out_hidden_size": 64, "hidden_size": 1024, "intermediate_size": 4096, "depth": 24, "deepstack_visual_indexes": [5, 11]}
PIXTRAL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "image_size": 1540, "patch_size": 14}
SIGLIP = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "image_size": 896, "patch_size": 14}
LLAMA4 = {
    "hidden_size": 1408, "intermediate_size": 5632, "num_hidden_layers": 34, "image_size": 336, "patch_size": 14,
    "projector_input_dim": 4096, "projector_output_dim": 4096, "vision_output_dim": 4096, "pixel_shuffle_ratio": 0.5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("around", "vision", "parameters", "patches", "tokens"),
    [
        # parameters of tower and projector in transformers 5's own models, beside a language model of width 64
        ("gemma3", SIGLIP, 416_940_912, 4096, 256),
        ("qwen2_vl", {"embed_dim": 1280, "hidden_size": 64, "depth": 32}, 657_733_184, 65_536, 16_384),
        ("qwen2_5_vl", {"hidden_size": 1280, "out_hidden_size": 64}, 658_524_224, 65_536, 16_384),
        ("qwen3_vl", {"out_hidden_size": 64}, 502_054_384, 65_536, 16_384),
        ("qwen3_vl_moe", QWEN3, 357_391_552, 65_536, 16_384),
        ("qwen3_5", {"out_hidden_size": 64}, 437_426_992, 65_536, 16_384),
        ("mistral3", PIXTRAL, 407_570_432, 110 * 110, 55 * 55),
        ("llama4", LLAMA4, 851_223_040, 17 * 24 * 24, 17 * 12 * 12),
    ],
)  # fmt: skip
def test_towers_are_as_large_as_transformers_builds_them(
    around: str, vision: dict[str, object], parameters: int, patches: int, tokens: int
) -> None:
    found, notes = tower({"model_type": around, "vision_config": vision}, "config.json", 64)
    assert found
    assert (found.parameters, found.patches, found.tokens) == (parameters, patches, tokens)
    (said,) = notes
    assert f"vision tower ({parameters:,} parameters) is not among its parameters" in said


def test_a_tower_is_read_beside_its_model_or_said_to_be_left_out() -> None:
    """The published sizes of Mistral-Small-3.2 give its preset. Towers of unknown types are left out with a note."""
    config = {
        "model_type": "mistral3",
        "vision_config": PIXTRAL,
        "text_config": {"model_type": "mistral", **TEXT, "hidden_size": 5120},
    }
    assert model_from(config, "c", "m").vision == load_model("mistral-small-3.2-24b").vision
    other = {"model_type": "llava", "vision_config": {"hidden_size": 8}, "text_config": {"model_type": "llama", **TEXT}}
    found = model_from(other, "c", "m")
    assert found.vision is None
    assert "only the language model is counted, without the file's vision tower" in found.notes
    with pytest.raises(UserError, match=r"vision_config: depth: should be a whole number"):
        tower({"model_type": "qwen3_vl", "vision_config": {"depth": "27"}}, "c", 64)


def test_what_a_file_has_beside_its_language_model_is_said() -> None:
    """A note names every other part, under any key. A key that is false or empty is ignored."""
    flat = {"model_type": "llama", **TEXT}
    for keys, said in (
        ({"mm_vision_tower": "clip"}, "vision tower"),
        ({"audio_config": {"d_model": 8}, "vision_config": {"depth": 8}}, "vision tower and audio tower"),
        ({"talker_config": {"hidden_size": 8}, "code2wav_config": {"dim": 8}}, "talker and vocoder"),
    ):
        assert f"only the language model is counted, without the file's {said}" in model_from(flat | keys, "c", "m").notes
    assert model_from(flat | {"vision_config": None, "audio_config": {}}, "c", "m").notes == model_from(flat, "c", "m").notes
    omni = {
        "model_type": "qwen2_5_omni",
        "thinker_config": {"text_config": {"model_type": "qwen2", **TEXT}, "audio_config": {"n": 1}},
    }
    assert any("without the file's audio tower" in note for note in model_from(omni, "c", "m").notes)


@pytest.mark.parametrize(("model_type", "whole"), [("videollama3_qwen2", 8_044_744_944), ("mineru2_qwen", None)])
def test_language_models_of_wrappers_under_types_of_their_own(model_type: str, whole: int | None) -> None:
    """VideoLLaMA3-7B is Qwen2.5-7B: its checkpoint's index has 2 · 8,044,744,944 bytes, including SigLIP-so400m and a
    projector of 1152 → 3584 → 3584. Biases of q, k and v are counted."""
    keys = {
        "model_type": model_type, "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "vocab_size": 152_064,
        "num_key_value_heads": 4, "intermediate_size": 18_944, "tie_word_embeddings": False, "use_token_compression": True,
    }  # fmt: skip
    model = model_from(keys, "c", "m")
    assert (model.parameters, model.family, model.parameters_exact) == (7_615_616_512, "qwen2", True)
    projector = 1152 * 3584 + 3584 + 3584 * 3584 + 3584
    assert whole is None or 400_000_000 < whole - model.parameters - projector < 430_000_000


def test_a_wrapper_fills_its_text_part_by_itself() -> None:
    """Voxtral uses Ministral-3B's sizes for keys that the text part leaves out. A plain Llama would use Llama-7B's.

    30 layers: q and o of 3072 · 32 · 128, k and v of 3072 · 8 · 128, an FFN of 8192, two norms. Table and head have
    131,072 rows.
    """
    model = model_from({"model_type": "voxtral", "text_config": {"model_type": "llama"}}, "c", "m")
    layer = 2 * 3072 * 4096 + 2 * 3072 * 1024 + 3 * 3072 * 8192 + 2 * 3072
    assert model.parameters == 30 * layer + 2 * 131_072 * 3072 + 3072
    few = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 32}
    assert model_from(few, "c", "m").kinds["full"].parts[1].intermediate_size == 11_008


def test_a_language_model_with_its_own_head_says_whether_that_is_tied() -> None:
    """BLIP-2 contains OPT as a causal model, whose class ties the head. LLaVA's class has the head and does not tie it."""
    part = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 128}
    for around, inner, tied in (("blip-2", "opt", True), ("instructblip", "opt", True), ("llava", "llama", False)):
        model = model_from({"model_type": around, "text_config": part | {"model_type": inner}}, "c", "m")
        assert model.tie_word_embeddings is tied


@pytest.mark.parametrize(("around", "usual"), [("granite_docling", True), ("muse_glimmer", False)])
def test_a_head_of_the_wrapper_is_tied_as_the_wrapper_says(around: str, usual: bool) -> None:
    """transformers ties the wrapper's head by the config of the whole file, or its class, and ignores the text part."""
    part = {"model_type": f"{around}_text", **TEXT}
    for said in ({}, {"tie_word_embeddings": True}, {"tie_word_embeddings": False}):
        for inside in (True, False):
            config = {"model_type": around, "text_config": part | {"tie_word_embeddings": inside}} | said
            assert model_from(config, "c", "m").tie_word_embeddings is said.get("tie_word_embeddings", usual)


TIES = [
    # around, of, the version that wrote it, what the file and its text part say; whether the head is tied
    ("mistral3", "mistral", "4.50.0", None, None, False),  # as Mistral-Small-3.1, which has its own
    ("mistral3", "mistral", "", None, None, True),  # transformers 5's class
    ("mistral3", "mistral", "4.50.0", None, False, False),
    ("mistral3", "mistral", "5.1.0", True, None, True),
    ("internvl", "qwen2", "4.52.1", None, False, False),
    ("llava", "llama", "", False, True, True),
    ("glm4v", "glm4v_text", "", False, True, True),
    ("smolvlm", "llama", "4.57.1", False, False, False),
    ("blip-2", "opt", "", True, False, False),  # a causal model inside, with a head of its own
]


@pytest.mark.parametrize(("around", "inner", "version", "whole", "part", "tied"), TIES)
def test_a_text_part_says_whether_its_head_is_tied_before_its_file(
    around: str, inner: str, version: str, whole: bool | None, part: bool | None, tied: bool
) -> None:
    """If neither has the key, the text part's class decides in transformers 4, and the file's class in 5."""
    text = {"model_type": inner, **TEXT} | ({} if part is None else {"tie_word_embeddings": part})
    file = {"model_type": around, "text_config": text, "transformers_version": version}
    model = model_from(file | ({} if whole is None else {"tie_word_embeddings": whole}), "c", "m")
    assert model.tie_word_embeddings is tied


def test_the_adapters_of_phi_4_multimodal_are_named_and_not_counted() -> None:
    """Its language model is Phi-4-mini. Adapters for images and speech are separate, and text does not use them."""
    keys = {
        "model_type": "phi4mm", "architectures": ["Phi4MMForCausalLM"], "hidden_size": 3072, "num_attention_heads": 24,
        "num_hidden_layers": 32, "intermediate_size": 8192, "vocab_size": 200_064, "num_key_value_heads": 8,
        "tie_word_embeddings": True, "speech_lora": {"r": 320, "layer": "x"}, "embd_layer": {"image_embd_layer": {}},
    }  # fmt: skip
    model = model_from(keys, "c", "m")
    assert (model.parameters, model.parameters_exact) == (load_model("phi-4-mini").parameters, False)
    assert any("approximate" in note and "speech_lora" in note for note in model.notes)
    assert any("without the file's vision tower" in note for note in model.notes)


def test_a_tower_without_a_key_for_it_is_said() -> None:
    keys = {"model_type": "molmo", "qkv_bias": False, "weight_tying": False, "embedding_size": 128, **TEXT}
    assert "only the language model is counted, without the file's vision tower" in model_from(keys, "c", "m").notes


def test_an_encoder_and_a_decoder_of_a_type_that_is_not_known_are_refused_by_name() -> None:
    decoder = {"model_type": "nemotron_parse_text", "d_model": 64, "decoder_layers": 2, "vocab_size": 128}
    with pytest.raises(UserError, match=r"model_type 'nemotron_parse' is not known, and has an encoder"):
        model_from({"model_type": "nemotron_parse", "is_encoder_decoder": True, "decoder": decoder}, "c", "m")
