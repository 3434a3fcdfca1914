"""The first lines of `fit`: the requested figure, the users with an 8-bit cache, and changes that help if nothing fits."""

import random
import re
from typing import Any

import pytest
from conftest import Run

from kvcalc import Deployment, Parallelism, load_gpu, load_model
from kvcalc.capacity import FitOptions, fit
from kvcalc.capacity.memory_budget import CONTEXT_BYTES, LIBRARY_BYTES


def named(advice: str) -> list[str]:
    """Return the option lists of an advice."""
    return re.findall(r"`(--[^`]+ [^`]+)`", advice)


MODELS = "llama-3.1-8b llama-3.3-70b gpt-oss-120b qwen3-next-80b-a3b gemma-3-27b deepseek-v3 mixtral-8x7b gpt2"
GPUS = ("t4", "l4", "rtx-3090", "rtx-4090", "a100-40gb", "l40s", "h100", "mi300x", "b200")
ENGINES = {
    "vllm": ("", "--engine-version 0.10", "--kv-cache-dtype fp8", "-q fp8", "--gpu-memory-utilization 0.5"),
    "sglang": ("", "--kv-cache-dtype fp8", "-q awq"),
    "trtllm": ("", "--kv-cache-dtype fp8"),
    "llama.cpp": ("-q q4_k_m", "-q q8_0", "", "-ctk q8_0", "--kv-unified"),
    "none": ("", "-q int4"),
}
FURTHER = ("", "--pp 2", "--dp 2", "--tp 2", "--tp 2 --enable-expert-parallel", "--budget low", "--nodes 1", "--max-num-seqs 64")
FURTHER += ("--require 8", "--users 32", "--shared-prefix 1k", "--context 8k", "--context 1M", "--max-num-seqs 8 --context 32k")


def random_request(draw: random.Random) -> str:
    engine = draw.choice(sorted(ENGINES))
    words = [draw.choice(MODELS.split()), "--gpu", draw.choice(GPUS), "--engine", engine, draw.choice(ENGINES[engine])]
    return " ".join([*words, *draw.sample(FURTHER, 2)])


@pytest.mark.slow
def test_a_printed_line_read_again_is_the_same_answer(kvcalc: Run) -> None:
    """For random requests, also if the answer is no: every key of the record and the exit status are equal."""
    read = 0
    for seed in range(100, 130):
        line = random_request(random.Random(seed)).replace("--enable-expert-parallel", "").replace("--nodes 1", "")
        found = kvcalc(f"fit {line} --format json")
        if found.code == 2 or found.records[0]["kvcalc_command"] is None:
            continue
        beside, command = found.records[0]["kvcalc_command"].removeprefix("kvcalc ").split(" -- ", 1)
        again = kvcalc(f"{beside} --format json -- {command}")
        assert (again.code, again.records) == (found.code, found.records), line
        read += 1
    assert read > 12


def test_every_suggestion_fits_as_it_is_printed(kvcalc: Run) -> None:
    """For random requests: each suggestion, typed after the request, fits on the named number of GPUs."""
    tried = 0
    for seed in range(40):
        line = random_request(random.Random(seed))
        found = kvcalc(f"fit {line} --format json")
        if found.code != 1:
            continue
        (record,) = found.records
        for option in named(record["advice"]):
            again = kvcalc(f"fit {line} {option} --format json")
            assert again.code == 0, (line, option, again.err)
            gpus = re.search(re.escape(f"`{option}`") + r" \(([\d,]+) GPUs\)", record["advice"])
            named_gpus = int(gpus[1].replace(",", "")) if gpus else record["gpus"]
            assert again.records[0]["gpus"] == named_gpus, (line, option)
            tried += 1
    assert tried > 15


LINES = [
    ("l4", "vllm serve meta-llama/Llama-3.1-8B-Instruct"),
    ("h100", "vllm serve deepseek-ai/DeepSeek-V3 --tensor-parallel-size 8 --enable-expert-parallel"),
    ("l4", "sglang serve --model-path meta-llama/Llama-3.1-8B --context-length 32768"),
    ("rtx-3090", "llama-server -m ./llama-3.3-70b-q4_k_m.gguf -c 131072 -np 1 -sm layer -ts 1,1"),
    ("l4", "trtllm-serve meta-llama/Llama-3.1-8B"),
]


@pytest.mark.parametrize(("gpu", "line"), LINES)
def test_a_command_line_is_mended_by_its_engine_s_own_flags(kvcalc: Run, gpu: str, line: str) -> None:
    shown = kvcalc(f"fit --gpu {gpu} -- {line}")
    assert shown.code == 1
    assert (options := named(shown.joined))
    assert [kvcalc(f"fit --gpu {gpu} -- {line} {option}").code for option in options] == [0] * len(options)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "llama.cpp", "none"])
@pytest.mark.parametrize("more", ["", "--require 1", "--tp 2", "--pp 2", "--gpu t4", "--draft llama-3.2-1b", "--budget high"])
def test_the_parts_of_the_memory_add_up(engine: str, more: str) -> None:
    """Every byte of a GPU has a name, at both ends of the range, whether the request fits or not."""
    words = more.split()
    options: dict[str, Any] = {"engine": engine, "max_model_len": 8192}
    options |= {"require": 1} if "--require" in words else {"budget": "high"} if "--budget" in words else {}
    options |= {"draft": load_model("llama-3.2-1b")} if "--draft" in words else {}
    ranks = Parallelism(2 if "--tp" in words else 1, 2 if "--pp" in words else 1)
    gpu = load_gpu("t4" if "--gpu" in words else "h100")
    found = fit(Deployment(load_model("llama-3.1-8b"), gpu, parallelism=ranks), FitOptions(**options))
    parts = found.memory_parts()
    assert sum(parts.values()) == gpu.memory_bytes
    assert ("CUDA context" in parts) == (engine in ("sglang", "trtllm", "llama.cpp"))
    assert parts["KV cache"] == (found.kv_budget or -found.shortage_bytes)


def test_layers_shared_by_llama_cpp_need_no_collectives(kvcalc: Run) -> None:
    """24 GB minus 0.7 GiB of context, half of 39.6 GiB of weights, 360 MiB of a pass and 133 MiB of libraries."""
    line = "fit llama-3.3-70b -q q4_k_m --gpu rtx-3090 --pp 2 --engine llama.cpp --context 128k"
    (record,) = kvcalc(f"{line} --format json").records
    assert record["startup_bytes"] == CONTEXT_BYTES
    rest = record["memory_bytes"] - CONTEXT_BYTES - record["weight_bytes"] - record["activation_bytes"] - record["overhead_bytes"]
    assert record["kv_budget_bytes"] == rest
    assert record["activation_bytes"] == 360 << 20 and record["overhead_bytes"] == LIBRARY_BYTES


def test_more_gpus_are_advised_without_experts_apart_where_none_are_asked_for(kvcalc: Run) -> None:
    """With --ep 32 as well, 32 T4 fit 16 sequences. With only --tp 32 they fit 6, and with --tp 64 no more."""
    line = "fit mimo-v2.6-flash --gpu t4 --engine vllm --max-model-len 32k --max-num-seqs 16 --format json"
    assert not any(option.startswith("--tp") for option in named(kvcalc(line).records[0]["advice"]))
    for more, fits in {"--tp 32 --ep 32": True, "--tp 32": False, "--tp 64": False}.items():
        assert kvcalc(f"{line} {more}").records[0]["fits"] is fits


def test_the_largest_free_share_is_advised(kvcalc: Run) -> None:
    """Other processes use 30 GiB, and vLLM's CUDA context lies beside its share. Of 79.18 GiB, 61 % are free, 62 % are not."""
    line = "fit llama-3.1-8b --gpu h100 --engine vllm --memory-in-use 30GiB"
    refused = kvcalc(line)
    assert refused.code == 1 and "--gpu-memory-utilization 0.61" in named(refused.out + refused.err)
    assert [kvcalc(f"{line} --gpu-memory-utilization {share}").code for share in (0.61, 0.62)] == [0, 1]


def test_the_longest_context_is_of_what_was_asked(kvcalc: Run) -> None:
    """Without a number, it is the longest context of one sequence. It is never beyond the model's maximum."""
    (alone,) = kvcalc("fit llama-3.1-8b --engine none --max-model-len 4k --format json").records
    (eight,) = kvcalc("fit llama-3.1-8b --engine none --max-model-len 4k --max-num-seqs 8 --format json").records
    assert alone["max_model_len"] > 131_072 and alone["max_model_len"] // 8 == eight["max_model_len"]
    assert alone["longest_context"] == 131_072
    assert f" {eight['max_model_len']:,} " in kvcalc("fit llama-3.1-8b --engine none --max-model-len 4k --max-num-seqs 8").out


def test_a_shared_prefix_and_memory_of_the_host_show_what_they_change(kvcalc: Run) -> None:
    line = "fit llama-3.1-8b --engine vllm --max-model-len 8k"
    (plain,) = kvcalc(f"{line} --format json").records
    (shared,) = kvcalc(f"{line} --shared-prefix 2k --kv-offloading-bytes 100GiB --format json").records
    assert plain["unshared_num_seqs"] is None and shared["unshared_num_seqs"] == plain["max_num_seqs"]
    assert shared["max_num_seqs"] > plain["max_num_seqs"] and shared["offload_num_seqs"] == 100  # of 1 GiB each


BEYOND = [
    "qwen3-30b-a3b -q fp8 --gpu l40s --engine vllm --kv-cache-dtype fp8 --context 100k --engine-version 0.10",
    "llama-7b --gpu h100 --engine sglang --context 8k",
    "mistral-7b-v0.1 --gpu h100 --engine llama.cpp --context 100k --max-num-seqs 2",
    "gpt-oss-20b --gpu h100 --engine vllm --context 200k --require 2",
    "qwen3-next-80b-a3b --gpu h200 --engine vllm --tp 2 --context 400k --max-num-seqs 4",
    "llama-3.1-8b --gpu l4 --context 200k --kv-cache-memory-bytes 30GiB --draft llama-3.2-1b",
    "llama-3.1-8b --gpu l4 --engine vllm --context 32k",
    "llama-7b --gpu h100 --engine none --max-num-seqs 8",
]


@pytest.mark.parametrize("line", BEYOND)
def test_one_answer_in_one_output(kvcalc: Run, line: str) -> None:
    """No length exceeds the longest context that fits, in the record, the sentence, the table and --explain."""
    found = kvcalc(f"fit {line} --format json")
    (record,) = found.records
    longest, length, own = record["longest_context"], record["requested_model_len"], load_model(record["model"]).max_context
    assert record["fits"] == (record["max_num_seqs"] >= record["requested_num_seqs"]) == (found.code == 0)
    assert record["fits"] == (longest is None or longest >= length)
    assert longest == (min(own, record["max_model_len"] or own) if length <= own else record["max_model_len"])
    shown, (low,) = kvcalc(f"fit {line}"), kvcalc(f"fit {line} --budget low --format json").records
    assert f" {'no limit' if longest is None else format(low['longest_context'], ',')} " in shown.joined
    told = re.search(r"longest context of .*: ([\d,]+) tokens", kvcalc(f"fit {line} --explain").out)
    assert told is None or int(told[1].replace(",", "")) == record["max_model_len"]
    if record["fits"]:
        users = re.match(r"(?:.*with memory for )?([\d,]+)", shown.joined)
        assert users and int(users[1].replace(",", "")) == record["max_num_seqs"]


def test_beyond_the_model_s_maximum_the_command_says_what_the_engine_requires(kvcalc: Run) -> None:
    """vLLM and SGLang require an environment variable. The printed line has it, and can be read again."""
    for engine, variable in (("vllm", "VLLM_ALLOW_LONG_MAX_MODEL_LEN"), ("sglang", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN")):
        line = f"fit llama-7b --gpu h100 --engine {engine} --format json --context"
        found = kvcalc(f"{line} 8k")
        (record,) = found.records
        assert record["command"].startswith(f"{variable}=1 ") and variable in found.err
        again = kvcalc("fit --gpu h100 --format json --", record["command"])
        assert again.records == found.records
        assert variable not in kvcalc(f"{line} 2k").records[0]["command"]
    assert "beyond the model's own maximum" in kvcalc("fit llama-7b --gpu h100 --matrix --max-model-len 1k,8k").err


@pytest.mark.parametrize("line", ["fit gemma-3-27b --gpu h100 --context 32k", "fit llama-3.1-8b --gpu h100 --context 8k"])
def test_the_note_on_more_users_is_the_answer_to_its_option(kvcalc: Run, line: str) -> None:
    """Windows reserve the tokens of a pass: gemma's 1,024-token windows take 1024 + 8192 by default, 1024 + 2048 then."""
    option, users = re.search(r"With `(.+?)`, (\d+ users?)", kvcalc(line).out).groups()  # type: ignore[union-attr]
    assert kvcalc(f"{line} {option}").out.startswith(users) and option.startswith("--max" if "gemma" in line else "--kv")
