"""Drafts: their own weights by hand, the parts of the target that they use, and speculative decoding with them."""

from typing import Any

import pytest
from conftest import Run
from huggingface_cases import BF16

from kvcalc import UserError, cache_size, weight_bytes
from kvcalc.library.huggingface import model_from
from kvcalc.library.huggingface.notes import to_yaml

D, F, V, HEADS, GROUPS, SIZE = 4096, 14336, 128256, 32, 8, 128
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": D, "intermediate_size": F, "num_attention_heads": HEADS, "vocab_size": V,
    "num_key_value_heads": GROUPS, "num_hidden_layers": 1, "tie_word_embeddings": False, "torch_dtype": "float16",
    "max_position_embeddings": 2048,
}  # fmt: skip
ROW = 2 * GROUPS * SIZE * 2
KV = 2 * D * GROUPS * SIZE
LAYER = 2 * D * D + KV + 3 * D * F + 2 * D  # q and o, k and v, the FFN, two norms


def draft(**keys: Any) -> Any:
    return model_from(LLAMA | keys, "config.json", "x")


def test_eagle3_of_llama_3_1_8b() -> None:
    """q, k, v over 2D, one more norm, 3D → D, a head of 32,000 rows: 424,689,664 parameters, without an embedding."""
    model = draft(architectures=["LlamaForCausalLMEagle3"], draft_vocab_size=32000)
    by_hand = LAYER + D * D + KV + D + 3 * D * D + 32000 * D + D
    assert model.parameters == by_hand == 424_689_664
    assert (model.vocab_size, model.lent, model.parameters_exact) == (32000, ("embedding",), True)
    assert cache_size(model, 100, precision=BF16).stored == 100 * ROW
    assert any("only its own weights are counted" in note for note in model.notes)


def test_eagle3_under_the_class_of_a_decoder() -> None:
    """The authors' release is recognised by its separate vocabulary."""
    model = draft(architectures=["LlamaForCausalLM"], draft_vocab_size=32000)
    assert (model.parameters, model.lent, model.parameters_exact) == (424_689_664, ("embedding",), True)
    assert draft(architectures=["LlamaForCausalLM"]).lent == ()


def test_eagle3_joins_as_many_layers_as_the_file_names() -> None:
    two = draft(architectures=["Eagle3LlamaForCausalLM"], eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 9]})
    three = draft(architectures=["Eagle3LlamaForCausalLM"], fc_norm=True)
    assert three.parameters - two.parameters == D * D + 3 * D
    assert two.vocab_size == V  # the head of the whole vocabulary is its own all the same
    wider = draft(architectures=["Eagle3LlamaForCausalLM"], target_hidden_size=5120)
    assert wider.parameters - draft(architectures=["Eagle3LlamaForCausalLM"]).parameters == 3 * D * (5120 - D)


def test_peagle_and_eagle_1() -> None:
    """P-EAGLE: ordinary layers after the first, and a state of 3D. EAGLE: 2D → D with a bias, no norm before attention, no
    final norm."""
    model = draft(architectures=["PEagleDraftModel"], num_hidden_layers=3, draft_vocab_size=32000)
    assert model.parameters == 3 * LAYER + D * D + KV + D + 3 * D * D + 3 * D + 32000 * D + D
    first = draft(architectures=["LlamaForCausalLMEagle"])
    assert first.parameters == LAYER - D + 2 * D * D + D
    assert first.lent == ("embedding", "lm_head")


BLOCK: dict[str, Any] = LLAMA | {
    "model_type": "qwen3", "num_hidden_layers": 5, "head_dim": SIZE, "block_size": 16, "num_target_layers": 36,
    "layer_types": ["full_attention"] * 5, "max_window_layers": 5,
}  # fmt: skip
BLOCKS = 5 * (LAYER + 2 * SIZE) + 5 * D * D + 2 * D  # norms on q and k; five layers of the target joined; two norms


def block(name: str, **said: Any) -> Any:
    keys = {"target_layer_ids": [1, 9, 17, 25, 33], "mask_token_id": 5} | said
    return model_from(BLOCK | {"architectures": [name], "dflash_config": keys}, "config.json", "x")


def test_block_drafts() -> None:
    assert block("DFlashDraftModel").parameters == BLOCKS
    assert block("DFlashDraftModel", target_layer_ids=[1, 9]).parameters == BLOCKS - 3 * D * D
    rank = {"markov_rank": 256, "enable_confidence_head": True, "confidence_head_with_markov": True}
    corrected = BLOCKS + 2 * V * 256 + D + 256 + 1
    assert block("DSparkDraftModel", **rank).parameters == corrected
    assert block("DSparkDraftModel", **rank, markov_head_type="gated").parameters == corrected + (D + 256) * 256 + 256
    step = (2 * 256 + D) * 3 * 256 + 3 * 256
    assert block("DSparkDraftModel", **rank, markov_head_type="rnn").parameters == corrected + step
    gru = 3 * 1024 * (D + 1024) + (D + 1024) * 256 + 256 * V
    assert block("DominoDraftModel", gru_hidden_dim=1024, emb_dim=256).parameters == BLOCKS + gru
    assert cache_size(block("DFlashDraftModel"), 10, precision=BF16).stored == 5 * 10 * ROW
    with pytest.raises(UserError, match="markov_head_type: only vanilla, gated and rnn are known here"):
        block("DSparkDraftModel", **rank, markov_head_type="odd")


@pytest.mark.parametrize("name", ["DFlashDraftModel", "DSparkDraftModel", "DominoDraftModel"])
def test_a_published_block_draft_leaves_no_key_unread(name: str) -> None:
    model = block(name, gru_hidden_dim=8, emb_dim=8, markov_rank=8, projector_type="x", attention_mode="gqa")
    assert model.parameters_exact, model.notes


def test_windows_of_a_block_draft() -> None:
    keys = BLOCK | {
        "layer_types": [*["sliding_attention"] * 4, "full_attention"],
        "sliding_window": 32,
        "use_sliding_window": True,
    }
    model = model_from(keys | {"architectures": ["DFlashDraftModel"]}, "config.json", "x")
    assert cache_size(model, 100, precision=BF16).stored == (4 * 32 + 100) * ROW


def test_a_published_draft_has_the_bytes_of_its_file() -> None:
    """MiMo-V2.6-Flash-RL's dflash/: its safetensors header has 2,936,114,304 bytes of bf16, including a sink for each head."""
    keys = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 16384,
        "num_hidden_layers": 5, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "v_head_dim": 128,
        "partial_rotary_factor": 0.5, "block_size": 8, "layer_types": ["sliding_attention"] * 5, "sliding_window": 1024,
        "use_sliding_window": True, "is_causal": False, "num_target_layers": 48, "target_hidden_size": 4096,
        "vocab_size": 152576, "max_position_embeddings": 1048576, "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16",
        "attention_bias": False, "add_swa_attention_sink_bias": True, "tie_word_embeddings": False, "hidden_act": "silu",
        "dflash_config": {"target_layer_ids": [0, 11, 23, 35, 47], "mask_token_id": 151675, "num_anchors": 4096,
                          "block_size": 8, "loss_decay_gamma": 7.0, "attention_value_scale": 0.612, "attention_sink_bias": True},
    }  # fmt: skip
    model = model_from(keys, "config.json", "x")
    assert (weight_bytes(model), model.parameters_exact) == (2_936_114_304, True), model.notes
    assert model.parameters == 2_936_114_304 // 2
    assert cache_size(model, 5000, precision=BF16).stored == 5 * 1024 * 2 * 8 * 128 * 2


def test_a_block_draft_with_layers_of_another_kind_is_refused() -> None:
    for config in ({"attention_modes": ["kda", "gqa"]}, {"attention_mode": "mla"}):
        with pytest.raises(UserError, match="attention_modes: only gqa and mha are known here"):
            model_from(BLOCK | {"architectures": ["DSparkDraftModel"], "dflash_config": config}, "config.json", "x")
    alike = [model_from(BLOCK | {"architectures": ["DSparkDraftModel"], "dflash_config": c}, "c", "x").parameters
             for c in ({}, {"attention_mode": "gqa"}, {"attention_modes": ["gqa"] * 5})]  # fmt: skip
    assert len({*alike}) == 1


def test_other_drafts_are_refused_by_name() -> None:
    for name in ("MedusaModel", "Eagle3DeepseekV2ForCausalLM", "DFlash2DraftModel", "Qwen3MoeForCausalLMMTP"):
        with pytest.raises(UserError, match=f"class {name} is a draft that is not read"):
            draft(architectures=[name])
    eye = {"model_type": "eagle_2_5_vl", "architectures": ["Eagle2_5_VLForConditionalGeneration"], "text_config": LLAMA}
    assert model_from(eye, "config.json", "x").family == "llama"  # a vision model of that name is none


def test_what_is_lent_is_read_but_not_held(kvcalc: Run, tmp_path: Any) -> None:
    """A step reads the target's head, but the draft's weights are only its own. Exported as a preset, it is equal."""
    (tmp_path / "draft.yaml").write_text(to_yaml(block("DFlashDraftModel")))
    (record,) = kvcalc("size --dtype bf16 --format json", str(tmp_path / "draft.yaml")).records
    assert (record["parameters"], record["weight_bytes"]) == (BLOCKS, 2 * BLOCKS)
    operators = kvcalc("roofline --gpu h100 --dtype bf16 --format json", str(tmp_path / "draft.yaml")).records
    head = next(r for r in operators if r["operator"] == "lm_head")
    assert head["weight_bytes"] == 2 * V * D
    result = kvcalc(
        "latency llama-3.1-8b --gpu h100 --format json --num-speculative-tokens 3", "--draft", str(tmp_path / "draft.yaml")
    )
    assert result.records[0]["draft_weight_bytes"] == 2 * BLOCKS
