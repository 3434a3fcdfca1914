"""`kvcalc models --import`: the preset of a config gives the same model, number for number."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import test_huggingface_quantized
from conftest import Run
from huggingface_cases import CASES

from kvcalc import Model, load_model
from kvcalc.library.files import parse_yaml
from kvcalc.library.huggingface import model_from
from kvcalc.library.huggingface.notes import preset_text_of
from kvcalc.library.presets import build
from kvcalc.model.memory import size_record

CONFIGS: dict[str, dict[str, Any]] = {name: case.config for name, case in CASES.items()}
CONFIGS |= {
    name: test_huggingface_quantized.LLAMA | {"quantization_config": quantization}
    for name, (quantization, _) in test_huggingface_quantized.CHECKPOINTS.items()
}
LLAMA = test_huggingface_quantized.LLAMA


def again(text: str) -> Model:
    data, lines = parse_yaml(text, "mine.yaml")
    return build(data, Model, "mine.yaml", lines)


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name: str) -> None:
    model = model_from(CONFIGS[name], "config.json", name)
    found = again(preset_text_of(model))
    assert found == msgspec.structs.replace(model, notes=())
    for context in (17, 5000):
        assert size_record(found, context, 3) == size_record(model, context, 3)


@pytest.mark.parametrize(
    "name", ["1e3", "12", "null", "true", "~", "yes", "a: b", "- x", "#x", "é", "'", "2024-01-01", "=", "x" * 80]
)
def test_names_that_yaml_would_take_for_something_else(name: str) -> None:
    assert again(preset_text_of(model_from(LLAMA, "config.json", name))).name == name


def test_command_writes_a_preset_that_loads_and_gives_the_same_record(kvcalc: Run, tmp_path: Path) -> None:
    config = {k: v for k, v in LLAMA.items() if k != "attention_bias"} | {
        "odd_key": 3,
        "quantization_config": {"quant_method": "fp8"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = kvcalc("models --import", str(tmp_path / "config.json"))
    assert (result.code, result.err) == (0, "")
    head = [line for line in result.out.splitlines() if line.startswith("#")]
    assert "# keys not read: odd_key" in head
    assert any(line.startswith("# class defaults, because the file lacks them: attention_bias=False") for line in head)
    assert "# huggingface_id: org/name" in head and any(line.startswith("# source: ") for line in head)
    (tmp_path / "mine.yaml").write_text(result.out)
    ours, theirs = (kvcalc("size --context 1k,8k --format json", str(tmp_path / n)).records for n in ("mine.yaml", "config.json"))
    assert ours == theirs
    assert load_model(str(tmp_path / "mine.yaml")).huggingface_id is None


def test_hints_are_valid_once_they_are_filled_in() -> None:
    text = (
        preset_text_of(model_from(LLAMA, "config.json", "mine"))
        .replace("# huggingface_id", "huggingface_id")
        .replace("# source", "source")
    )
    model = again(text)
    assert model.huggingface_id == "org/name" and model.source[0].document == "config.json"


def test_a_bad_file_is_one_error_and_nothing_is_written(kvcalc: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"hidden_size": "wide"}))
    result = kvcalc("models --import", str(tmp_path / "config.json"))
    assert (result.code, result.out) == (2, "")
    assert "config.json: hidden_size: should be a whole number, not 'wide'" in result.err
