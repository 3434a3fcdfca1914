"""The options of an engine are the same in every command: memory and times follow `--engine`."""

from pathlib import Path

import pytest
from conftest import Run

import kvcalc as package
from kvcalc.question.deployment_options import ENGINE_NAMES, DeploymentOptions
from kvcalc.question.options import read_questions

SHORT = {
    "fit": "fit llama-3.1-8b --context 4k",
    "latency": "latency llama-3.1-8b --isl 100 --osl 4",
    "roofline": "roofline llama-3.1-8b",
    "compare": "compare llama-3.1-8b --variants none",
    "serve": "serve llama-3.1-8b --num-prompts 4 --isl 100 --osl 4 --rate 1",
    "plan": "plan llama-3.1-8b --gpu h100 --max-gpus 1 --users 2 --context 4k",
}
TIMED = {"vllm": "calibrated", "sglang": "calibrated", "trtllm": "calibrated", "llama.cpp": "bound", "none": "bound"}


@pytest.mark.parametrize("command", SHORT)
@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_an_engine_decides_memory_and_times(kvcalc: Run, command: str, engine: str) -> None:
    at = -1 if command == "roofline" else 0  # the total of a pass
    record = kvcalc(f"{SHORT[command]} --engine {engine} --format json").records[at]
    assert record["engine"] == engine
    assert command == "fit" or record.get("time_basis") == TIMED[engine]
    if engine == "vllm":
        assert kvcalc(f"{SHORT[command]} --format json").records[at] == record


@pytest.mark.parametrize("command", [name for name in SHORT if name != "fit"])
def test_the_former_stack_is_another_name_of_them(kvcalc: Run, command: str) -> None:
    line = f"{SHORT[command]} --format json"
    assert kvcalc(f"{line} --stack sglang").records == kvcalc(f"{line} --engine sglang").records
    assert kvcalc(f"{line} --stack datasheet").records == kvcalc(f"{line} --bounds").records
    assert kvcalc(f"{line} --stack nonsense").err == kvcalc(f"{line} --calibration nonsense").err
    assert "--stack" not in kvcalc(f"{command} --help-all").out


def test_an_engine_without_measured_times_says_so(kvcalc: Run) -> None:
    said = "o measured kernel model of"
    assert f"{said} llama.cpp on h100-sxm" in kvcalc(f"{SHORT['latency']} --engine llama.cpp").joined
    assert f"{said} vllm on l4, rtx-4090, mi300x exists" in kvcalc(f"{SHORT['latency']} --gpu l4,rtx-4090,mi300x").joined
    for options in ("--engine none", "--bounds", ""):
        assert said not in kvcalc(f"{SHORT['latency']} {options}").joined


def test_a_calibration_is_a_name_or_a_file(kvcalc: Run, tmp_path: Path) -> None:
    preset = Path(package.__file__).parents[1] / "presets/calibrations/h100-sxm/sglang.yaml"
    own = tmp_path / "own.yaml"
    own.write_text(preset.read_text("utf-8"), "utf-8")
    line = f"{SHORT['latency']} --format json"
    by_name, by_file = (kvcalc(f"{line} --calibration {one}").records for one in ("sglang", own))
    assert by_name == by_file
    assert by_name[0]["engine"] == "vllm" and by_name[0]["basis"].startswith("sglang")
    (borrowed,) = kvcalc(f"{line} --gpu a100-40gb --calibration {own}").records
    assert borrowed["time_basis"] == "scaled" and borrowed["calibration_from"] == "h100-sxm"


def test_options_that_exclude_each_other_and_unknown_engines(kvcalc: Run) -> None:
    for command in SHORT:
        found = kvcalc(f"{SHORT[command]} --engine vlm")
        assert found.code == 2 and "unknown engine 'vlm'. Did you mean vllm?" in found.err
    assert kvcalc(f"{SHORT['latency']} --bounds --calibration sglang").code == 2
    asked = read_questions(DeploymentOptions, {"engine": "vllm,SGLang", "stack": "datasheet,trtllm"})
    assert [one.choice for one in asked] == [("vllm", "datasheet"), ("trtllm", ""), ("sglang", "datasheet"), ("trtllm", "")]
