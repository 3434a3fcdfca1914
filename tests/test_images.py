"""Tokens of images and video frames, by hand from published configs, and their effect on `fit`."""

import json
from typing import Any

import pytest
from conftest import Run

from kvcalc.library.huggingface.vision import tower

QWEN3_VL = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}}
GEMMA3 = {"model_type": "gemma3", "mm_tokens_per_image": 256, "vision_config": {"image_size": 896, "patch_size": 14}}
# Width, height, tokens: squares of 32 pixels of Qwen3-VL, at most 16,777,216 pixels; Gemma 3 resizes every image.
IMAGES = [
    (QWEN3_VL, 1024, 1024, 32 * 32),
    (QWEN3_VL, 1000, 750, 32 * 24),
    (QWEN3_VL, 20_000, 20_000, 16_384),
    (GEMMA3, 1024, 768, 256),
]


# Parameters of transformers' vision model and projector: GLM-4.5V, and Gemma 4 26B-A4B with its text width of 2816.
TOWERS = [
    ({"model_type": "glm4v_moe", "vision_config": {"depth": 24}}, 4096, 892_498_432),
    (
        {
            "model_type": "gemma4",
            "vision_config": {
                "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "head_dim": 72, "standardize": True,
            },
        }, 2816, 569_548_080 + 2304 + 1152 * 2816,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("config", "width", "parameters"), TOWERS)
def test_towers_have_the_parameters_of_transformers(config: dict[str, Any], width: int, parameters: int) -> None:
    vision, _ = tower(config, "config.json", width)
    assert vision and vision.parameters == parameters


@pytest.mark.parametrize(("config", "width", "height", "tokens"), IMAGES)
def test_tokens_of_an_image_follow_from_the_config(config: dict[str, Any], width: int, height: int, tokens: int) -> None:
    vision, _ = tower(config, "config.json", 4096)
    assert vision and vision.image_tokens(width, height) == tokens


def fitted(kvcalc: Run, options: str) -> dict[str, Any]:
    return json.loads(kvcalc(f"fit qwen3.5-27b --gpu h100 --max-model-len 32k {options} --json").out)[0]


def test_the_limit_and_the_size_of_images_change_memory_and_tokens(kvcalc: Run) -> None:
    """The profile of vLLM runs the encoder on the images that its token budget of 8,192 or one image takes."""
    default, four, small, none = (
        fitted(kvcalc, option)
        for option in (
            "",
            "--limit-mm-per-prompt image=4",
            '--limit-mm-per-prompt \'{"image":{"count":1,"width":512,"height":512},"video":0}\' --max-num-seqs 2',
            "--limit-mm-per-prompt image=0,video=0",
        )
    )
    assert (default["images"], default["image_tokens"], default["frame_tokens"]) == (None, 16_384, 8_192)
    assert (four["images"], four["activation_bytes"]) == (4, default["activation_bytes"])
    assert (small["image_tokens"], small["frame_tokens"]) == (16 * 16, 8 * 16)
    assert small["activation_bytes"] < default["activation_bytes"]
    assert none["weight_bytes"] == default["weight_bytes"] - 2 * 460_730_096  # the tower is not loaded


def test_fit_states_the_tokens_of_the_images(kvcalc: Run) -> None:
    shown = kvcalc("fit qwen3.5-27b --gpu h100 --max-model-len 32k --limit-mm-per-prompt image=4").out
    assert "32,768 tokens" in shown and "4 images may need 65,536" in shown
