"""Comparisons of GPUs, models and loads: a row of a list equals a separate request, and bounds are ranked only with bounds."""

import json
import random
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

# Kernel models exist of the first four, of the others none.
GPUS = ("h100", "h200", "l40s", "b200", "mi300x", "l4", "a100-40gb-sxm", "rtx-4090")
MODELS = ("llama-3.1-8b", "gpt2", "qwen3-8b", "gemma-2-2b")
COMMANDS: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "latency": ("--output-len 40", {"batch-size": ("1", "7", "64"), "input-len": ("300", "2k")}),
    "roofline": ("", {"batch-size": ("1", "30"), "context": ("1k", "5000")}),
    "serve": (
        "--num-prompts 8 --input-len 300 --output-len 12 --max-num-seqs 4 --policy static,continuous",
        {"rate": ("0.5", "3", "40")},
    ),
    "fit": ("--engine vllm", {"max-model-len": ("2k", "8k")}),
    "size": ("", {"context": ("1k", "9000"), "batch-size": ("1", "3")}),
}
SEEDS = range(1)


def as_text(records: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(record, sort_keys=True) for record in records)


def options(values: dict[str, str]) -> str:
    return " ".join(f"--{name} {value}" for name, value in values.items())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_row_is_the_same_alone_as_in_a_list(kvcalc: Run, command: str, seed: int) -> None:
    """The records of a list of models, GPUs and loads equal the records of separate requests."""
    draw = random.Random(seed)
    words, lists = COMMANDS[command]
    models = draw.sample(MODELS, 2)
    chosen = {name: draw.sample(values, 2) for name, values in lists.items()}
    if command != "size":
        chosen["gpu"] = draw.sample(GPUS, 2)

    def records(models: list[str], values: dict[str, str]) -> list[dict[str, Any]]:
        found = kvcalc(f"{command} {' '.join(models)} {words} {options(values)} --format json")
        assert found.code in (0, 1), found.err
        rows: list[dict[str, Any]] = json.loads(found.out)
        return rows

    together = records(models, {name: ",".join(values) for name, values in chosen.items()})
    items = product(models, *chosen.values())
    alone = [record for model, *values in items for record in records([model], dict(zip(chosen, values, strict=True)))]
    assert as_text(together) == as_text(alone)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_variant_is_the_same_whatever_stands_behind_the_reference(kvcalc: Run, seed: int) -> None:
    """The first variant is the reference of some columns. Other variants do not affect each other."""
    draw = random.Random(seed)
    gpus, others = draw.sample(GPUS, 3), draw.sample(("gqa:8", "mqa", "mla", "window:1024", "dsa"), 3)
    line = "compare llama-7b --format json --batch-size 1,9"
    together = kvcalc(f"{line} --gpu {','.join(gpus)} --variants mha,{','.join(others)}").records
    alone = [
        record
        for gpu, name in product(gpus, others)
        for record in kvcalc(f"{line} --gpu {gpu} --variants mha,{name}").records
        if record["variant"] != "mha" or name == others[0]
    ]
    assert as_text(together) == as_text(alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "load"),
    [
        ("", "rate"), ("--disaggregate", "rate"), ("--prefix-hit-rate 0.5", "users"), ("--kv-cache-dtype auto,fp8", "rate"),
    ],
)  # fmt: skip
def test_a_point_of_a_plan_is_the_same_alone(kvcalc: Run, tmp_path: Path, more: str, load: str) -> None:
    """Every configuration of a plan over lists of models, GPUs and requirements equals a plan over one of each."""
    draw = random.Random(load + more)
    loads = {"rate": ("1", "7.5", "40"), "users": ("3", "16", "50")}[load]
    chosen = {load: draw.sample(loads, 2), "isl": ["3k"], "gpu": draw.sample(GPUS, 2)}
    models = ["gemma-3-27b", draw.choice(("llama-3.1-8b", "qwen3-30b-a3b"))]
    asked = "--osl 60 --max-tpot 30ms --max-ttft 2s --max-gpus 4"

    def points(models: list[str], values: dict[str, str], more: str) -> list[str]:
        path = tmp_path / "points.jsonl"
        found = kvcalc(f"plan {' '.join(models)} {asked} {options(values)} {more} --points {path}")
        assert found.code in (0, 1), found.err
        return path.read_text().splitlines()

    together = points(models, {name: ",".join(values) for name, values in chosen.items()}, more)
    items = product(models, *chosen.values())
    alone = [line for model, *values in items for line in points([model], dict(zip(chosen, values, strict=True)), more)]
    assert sorted(together) == sorted(alone)


RATE = "plan llama-3.1-8b --rate 20 --isl 2k --osl 500 --max-ttft 2s --max-tpot 50ms"


def test_a_plan_for_one_gpu_stays_when_others_are_looked_at(kvcalc: Run) -> None:
    alone = kvcalc(f"{RATE} --price-per-hour h100=2.5 --gpu h100 --format json").records
    prices = "h100=2.5,l4=0.8,a10g=1,rtx-4090=0.4"
    among = kvcalc(f"{RATE} --price-per-hour {prices} --gpu l4,h100,a10g,rtx-4090 --format json").records
    assert among[: len(alone)] == alone
    assert {r["gpu"] for r in among[len(alone) :]} == {"rtx-4090"}
    shown = kvcalc(f"{RATE} --price-per-hour {prices} --gpu l4,h100,a10g,rtx-4090").joined
    assert "rtx-4090" not in shown.partition(" GPU ")[0] and shown.count("rtx-4090") == 1


@pytest.mark.parametrize("more", ["", "--price-per-hour h100=3,h200=4,mi300x=0.1,l4=0.1,b200=5", "--disaggregate"])
@pytest.mark.parametrize("limit", ["1ms", "30ms"])
def test_predictions_are_ranked_first_and_bounds_among_bounds(kvcalc: Run, more: str, limit: str) -> None:
    found = kvcalc(
        f"plan llama-3.1-8b --rate 20 --isl 2k --osl 500 --max-tpot {limit} --gpu mi300x,h100,l4,h200,b200 {more} --format json"
    )
    records = json.loads(found.out)
    bounds = [r["time_basis"] == "bound" for r in records]
    assert bounds == sorted(bounds)  # no prediction behind a bound
    assert {r["meets"] for r in records if r["time_basis"] != "bound"} in ({True}, {False}, set())
    listed = [r["gpu"] for r in records if r["time_basis"] == "bound"]
    if False in bounds:
        assert len(listed) == len({*listed})  # of each kind one, unranked


@pytest.mark.parametrize(
    "command", ["latency", "serve --rate 3 --num-prompts 9 --osl 20", "compare --gpu h100 --variants mha,mqa"]
)
def test_no_sentence_sets_a_bound_against_a_prediction(kvcalc: Run, command: str) -> None:
    name, _, more = command.partition(" ")
    shown = kvcalc(f"{name} llama-3.1-8b {more} --gpu mi300x,h100").out
    sentence = " ".join(re.split(r"\n(?=GPU|variant)", shown)[0].split())
    assert "mi300x" not in sentence.replace("; mi300x may be faster", "")
    assert "o measured kernel model of vllm on mi300x exists" in kvcalc(f"{name} llama-3.1-8b {more} --gpu mi300x,h100 -v").joined
    both = kvcalc(f"{name} llama-3.1-8b {more} --gpu mi300x,a100-40gb-sxm -v").joined
    assert "not ranked" not in both  # bounds are ranked among themselves


def test_a_server_without_memory_is_left_out_of_a_list(kvcalc: Run) -> None:
    """60 GB of weights do not fit on an L40S. The H100's row stays. A request for only the L40S is refused."""
    line = "serve qwen3-30b-a3b --rate 2 --num-prompts 20 --format json --gpu"
    among = kvcalc(f"{line} l40s,h100")
    assert among.records == kvcalc(f"{line} h100").records
    assert "left out: qwen3-30b-a3b leaves no memory for a cache on 1× l40s" in among.err
    assert kvcalc(f"{line} l40s").code == 2
