"""The Python API: results of a deployment equal the command line's records, tables and errors."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

import kvcalc as package
from kvcalc.answers.notebook import DEPLOYING
from kvcalc.cli.commands import function_of
from kvcalc.question.options import parameters_in
from kvcalc.report.export import json_pieces

DEPLOYED = {"tp": 2, "kv_cache_dtype": "fp8"}
LINE = "llama-3.1-8b --tp 2 --kv-cache-dtype fp8"


def deployed(**more: Any) -> package.Deployment:
    return package.deploy("llama-3.1-8b", "h100", **DEPLOYED | more)


READINGS = [
    ("size", {"context": "32k", "batch_size": 3, "block_size": 64}, "--context 32k --batch-size 3 --block-size 64"),
    ("fit", {"max_model_len": "32k", "engine": "vllm"}, "--gpu h100 --max-model-len 32k --engine vllm"),
    ("fit", {"kv_cache_memory_bytes": "4GiB", "max_model_len": 5000, "shared_prefix": "1k", "draft": "llama-3.2-1b"},
     "--gpu h100 --kv-cache-memory-bytes 4GiB --max-model-len 5000 --shared-prefix 1k --draft llama-3.2-1b"),
    ("fit", {"lengths": "lognormal:500,2000", "seed": 3, "weight_bytes": 0, "hybrid": False, "gpu_memory_utilization": 0.1},
     "--gpu h100 --lengths lognormal:500,2000 --seed 3 --weight-bytes 0 --disable-hybrid-kv-cache-manager "
     "--gpu-memory-utilization 0.1"),
    ("latency", {"input_len": 2000, "output_len": "1k", "batch_size": 2, "no_cache": True, "draft": "layers=2"},
     "--input-len 2000 --output-len 1k --batch-size 2 --no-cache --draft layers=2"),
    ("roofline", {"phase": "prefill", "batch_size": 8, "context": "4k"}, "--phase prefill --batch-size 8 --context 4k"),
    ("roofline", {"batch": "500+4x1@4k"}, "--batch 500+4x1@4k"),
    ("serve", {"rate": 10, "num_prompts": 20, "max_num_seqs": 8, "slo_ttft": 0.5, "policy": "static", "max_model_len": "4k"},
     "--rate 10 --num-prompts 20 --max-num-seqs 8 --slo-ttft 0.5 --policy static --max-model-len 4k"),
    ("serve", {"num_prompts": 9, "cache": "contiguous", "output_len": 40}, "--num-prompts 9 --cache contiguous --osl 40"),
    ("compare", {"variants": "none,mqa/int4", "context": "9k"}, "--variants none,mqa/int4 --context 9k"),
    ("compare", {"variants": ["mha", "gqa:4"]}, "--variants mha,gqa:4"),
    ("compare", {}, ""),
]  # fmt: skip
each_reading = pytest.mark.parametrize(("reading", "options", "words"), READINGS, ids=[f"{r} {w}" for r, _, w in READINGS])


@each_reading
def test_a_reading_is_what_the_command_prints(kvcalc: Run, reading: str, options: dict[str, Any], words: str) -> None:
    answer = getattr(deployed(), reading)(**options)
    printed = kvcalc(f"{reading} {LINE} {words} --format json").records
    assert json.loads("".join(json_pieces(answer.records()))) == printed
    table = str(answer)
    assert table == repr(answer)
    assert table and kvcalc(f"{reading} {LINE} {words}").out.startswith(table.rstrip() + "\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stack": "datasheet"}, "--stack datasheet"),
        ({"stack": "sglang", "dp": 2, "ep": 2, "tp": 1}, "--stack sglang --dp 2 --ep 2 --tp 1"),
        ({"pp": 2, "tp": 16, "dcp": 2, "dtype": "fp8"}, "--pp 2 --tp 16 --dcp 2 --dtype fp8"),
        ({"quantization": "awq", "calibration_from": "h200", "kv_cache_dtype": "auto"},
         "-q awq --calibration-from h200 --kv-cache-dtype auto"),
        ({"mla_form": "expanded"}, "--mla-form expanded"),
    ],
)  # fmt: skip
def test_a_deployment_takes_the_options_of_the_command_line(kvcalc: Run, options: dict[str, Any], words: str) -> None:
    name = "deepseek-v2-lite" if "mla_form" in options else "llama-3.1-8b"
    given = {"tp": 2, "kv_cache_dtype": "fp8"} | options
    found = package.deploy(name, "h100", **given).roofline(batch_size=16).records()
    line = f"roofline {name} --tp 2 --kv-cache-dtype fp8 {words} --batch-size 16 --format json"
    assert json.loads("".join(json_pieces(found))) == kvcalc(line).records


@each_reading
def test_a_command_is_a_function_with_its_options(reading: str, options: dict[str, Any], words: str) -> None:
    answer = getattr(package, reading)("llama-3.1-8b", gpu="h100", **DEPLOYED, **options)
    assert answer.records() == getattr(package, reading)(deployed(), **options).records()


@pytest.mark.parametrize("command", ["size", "compare", "roofline", "latency", "serve", "fit"])
def test_arguments_are_options_of_the_command_line(command: str) -> None:
    """`size` and `compare` need no server, and `fit` has one kind of time."""
    names = {parameter.name for parameter in parameters_in(function_of(command))}
    described = re.findall(r"^ +(\w+): .* \[.*\]$", getattr(package.Deployment, command).__doc__ or "", re.MULTILINE)
    assert len(described) >= 3 and {*described} <= names
    if command in ("roofline", "latency", "serve"):
        assert names >= DEPLOYING


def test_attributes_are_the_keys_of_the_chief_record() -> None:
    """4,096 tokens: 32 layers of 8 KV heads, K and V of 128, two GPUs, one byte each. For a pass, it is the total."""
    size = deployed().size()
    assert size.stored == size.kv_cache_bytes == 4096 * 32 * 8 * 2 * 128 // 2
    assert (size.read, size.allocated) == (size.kv_cache_read_bytes, size.kv_cache_allocated_bytes)
    assert (size.fixed, size.slope) == (0, 32 * 8 * 2 * 128 // 2)
    step = deployed().roofline()
    assert step.operator == "total"
    assert step.flops == sum(r["flops"] for r in step.records()[:-1])
    compared = deployed().compare("mha,mqa")
    assert (compared.variant, compared.records()[1]["variant"]) == ("mha", "mqa")
    assert set(dir(size)) >= {"stored", "kv_cache_bytes", "records"}


def test_answers_and_deployments_are_frozen() -> None:
    answer = deployed().size()
    answer.records()[0]["kv_cache_bytes"] = 1
    assert answer.stored > 1
    with pytest.raises(AttributeError):
        answer.stored = 1
    with pytest.raises(AttributeError):
        deployed().mla_form = "expanded"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: package.deploy("llama-3.1-8x", "h100"), "size llama-3.1-8x"),
        (lambda: package.deploy("gpt2", "h1000"), "latency gpt2 --gpu h1000"),
        (lambda: package.deploy("gpt2", "h100", dtype="fp7"), "size gpt2 --dtype fp7"),
        (lambda: package.deploy("gpt2", "h100", tp=5).size(), "size gpt2 --tp 5"),
        (lambda: deployed().size("0"), "size gpt2 --context 0"),
        (lambda: deployed().fit(max_model_len=0), "fit gpt2 --max-model-len 0"),
        (lambda: deployed().fit(weight_bytes="1XB"), "fit gpt2 --weight-bytes 1XB"),
        (lambda: deployed().fit(gpu_memory_utilization=0), "fit gpt2 --gpu-memory-utilization 0"),
        (lambda: deployed().latency(input_len=0), "latency gpt2 --input-len 0"),
        (lambda: deployed().serve(rate=0), "serve gpt2 --rate 0"),
        (lambda: deployed().compare("gqa8"), "compare gpt2 --variants gqa8"),
    ],
)
def test_refusals_are_those_of_the_command_line(kvcalc: Run, call: Any, line: str) -> None:
    with pytest.raises(package.UserError) as refused:
        call()
    assert kvcalc(line).err == f"kvcalc: {refused.value}\n"


def test_none_leaves_an_option_as_it_is() -> None:
    assert deployed().fit(max_model_len=None, draft=None).records() == deployed().fit().records()


def test_the_package_is_light_and_lists_its_names() -> None:
    code = """
        import sys, kvcalc
        loaded = [m for m in sys.modules if m.startswith("kvcalc.")]
        assert loaded == [], loaded
        assert set(dir(kvcalc)) == {*kvcalc.__all__, "__version__"}
        kvcalc.deploy("gpt2", "h100").size()
        assert "numpy" not in sys.modules and "matplotlib" not in sys.modules and "rich" not in sys.modules
    """
    words = [sys.executable, "-c", "\n".join(line.strip() for line in code.splitlines())]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), shlex.join(words)


def test_the_documented_code_runs() -> None:
    guides = Path(__file__).parent.parent / "docs" / "how-to"
    for page in ("use-python.md", "operators-in-python.md"):
        text = (guides / page).read_text(encoding="utf-8")
        blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        assert blocks
        for block in blocks:
            exec(compile(block, page, "exec"), {})
