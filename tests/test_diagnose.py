"""`diagnose`: logs of six versions of vLLM, of SGLang and of llama.cpp, including failed starts and hostile logs."""

import io
import itertools
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import startup_logs as logs
from conftest import Run

from kvcalc.capacity.memory_budget import read_learned

GIB, MIB = 2**30, 2**20
LENGTH = "--max-model-len 32768"


@pytest.fixture
def diagnosed(kvcalc: Run, tmp_path: Path) -> Any:
    """Return a function that diagnoses the text of a log and returns the records."""

    def run(text: str, *more: str) -> list[dict[str, Any]]:
        (tmp_path / "server.log").write_text(text, encoding="utf-8")
        return kvcalc("diagnose", str(tmp_path / "server.log"), "--format", "json", *more).records

    return run


def gib(records: list[dict[str, Any]], term: str, key: str = "logged_bytes") -> float:
    return next(r[key] for r in records if r["term"] == term) / GIB


@pytest.mark.parametrize(
    ("name", "model", "gpu", "gpus", "version", "failure", "figures", "command"),
    [
        ("V1_0_8", "qwen3-32b", "h100-sxm", 1, "0.8.5", "outside_share", {"weights": 61.0347}, "--max-model-len 16000 --gpu-memory-utilization 0.9"),
        ("V1_0_10", "gpt-oss-120b", "a100-80gb", 4, "0.10.1.1", None, {"weights": 17.2217, "cache": 45.32, "CUDA graphs": 1.88},
         "--tensor-parallel-size 4 --max-model-len 16384 --max-num-batched-tokens 2048 --gpu-memory-utilization 0.8"),
        ("V1_0_14", "qwen3-14b", "l4", 1, "0.14.1", "too_long", {"weights": 9.44, "cache": 2.1},
         "--dtype float16 --max-model-len 40960 --gpu-memory-utilization 0.6"),
        ("V1_0_20", "qwen3-32b", "h100-sxm", 1, "0.20.0", "occupied", {"in use before the start": 79.18 - 12.4},
         "--max-model-len 8192 --gpu-memory-utilization 0.9"),
        ("V1_0_28", "qwen3-14b", "l40s", 1, "0.28.0", None,
         {"weights": 27.52, "activations": 1.25, "libraries and collectives": 0.2, "CUDA graphs": 0.3, "cache": 11.57},
         "--max-model-len 40960 --gpu-memory-utilization 0.92"),
        ("NO_BLOCKS", "llama-3.3-70b", "h100-sxm", 1, "0.11.0", "no_blocks",
         {"weights": 67.72, "cache": 0, "missing before any cache": 1.44}, "--max-model-len 16000 --gpu-memory-utilization 0.9"),
        ("SGLANG", "qwen3-8b", "h100-sxm", 1, None, None, {"weights": 15.33, "cache": 53.26, "CUDA graphs": 1.38, "left free": 8.01},
         "--context-length 40960 --chunked-prefill-size 8192 --mem-fraction-static 0.874 --page-size 1"),
        ("SGLANG_FAILED", "llama-3.3-70b", "h100-sxm", 2, None, "no_blocks", {"weights": 66.02},
         "--tensor-parallel-size 2 --context-length 8192 --chunked-prefill-size 8192 --mem-fraction-static 0.7"),
        ("LLAMA_CPP", "meta-llama-3.1-8b-instruct", "rtx-4090", 1, "b6123", None,
         {"weights": 4403.49 / 1024, "cache": 4.0, "activations": 560 / 1024}, "--ctx-size 32768 --parallel 4 --ubatch-size 512"),
        ("LLAMA_CPP_FAILED", "meta-llama-3.1-8b-instruct", "rtx-3090", 1, "b6500", "no_blocks", {"weights": 4403.49 / 1024},
         "--ctx-size 262144 --parallel 1 --ubatch-size 512"),
        ("V1_0_8_3", "deepseek-r1-distill-qwen-32b", "rtx-4090", 4, "0.8.3", "too_long", {"weights": 15.4172, "cache": 0.78},
         "--tensor-parallel-size 4 --max-model-len 32768"),
        ("V1_0_12", "qwen3-next-80b-a3b", "h100-sxm", 4, "0.12.0", None,
         {"weights": 38.3117, "cache": 26.91, "CUDA graphs": 1.37}, '--max-model-len 65536 --speculative-config \'{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}\''),
        ("SGLANG_WINDOWS", "gpt-oss-20b", "h100-sxm", 1, None, None, {"weights": 13.36, "cache": 50.58, "left free": 13.15},
         "--max-running-requests 64 --chunked-prefill-size 8192 --mem-fraction-static 0.85 --page-size 1"),
        ("LLAMA_CPP_METAL", "meta-llama-3.1-8b-instruct", "apple-m2-max", 1, "b5200", None,
         {"memory of the GPU": 64, "weights": 8137.64 / 1024, "cache": 2.0, "activations": 1088 / 1024}, "--ctx-size 16384 --parallel 1 --ubatch-size 512"),
        ("LLAMA_CPP_TOO_LONG", "qwen3-14b", "rtx-4060-ti-16gb", 1, "b7300", "no_blocks", {"weights": 14176 / 1024},
         "--ctx-size 40960 --parallel 2 --ubatch-size 512"),
    ],
)  # fmt: skip
def test_what_a_log_says(diagnosed: Any, name: str, model: str, gpu: str, gpus: int, version: str, failure: str, figures: Any, command: str) -> None:  # fmt: skip
    """Model, GPU, version, failure, figures and flags follow from the log only."""
    records = diagnosed(getattr(logs, name))
    last = records[-1]
    start = [last[key] for key in ("model", "gpu", "gpus", "engine_version", "failure")]
    assert start == [model, gpu, gpus, version, failure]
    assert last["command"].endswith(command)
    assert last["term"] == "what fits"
    assert {item: gib(records, item) for item in figures} == pytest.approx(figures, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "gpu", "figures", "failure"),
    [
        (logs.V0_6_3, "rtx-3090", {"weights": 14.9888}, "too_long"),
        (logs.V0_6_4, "h200", {"weights": 0.9277, "activations": 2.38 - 0.9277, "libraries and collectives": 0.73, "cache": 122.71}, None),
        (logs.V0_7_3, "t4", {"weights": 5.6, "activations": 0.74, "libraries and collectives": 0.03, "cache": 2.39}, None),
        (logs.V1_0_10.replace("V1 LLM engine", "V0 LLM engine"), "a100-80gb", {"weights": 17.2217}, None),
    ],
    ids=["0.6.3", "0.6.4", "0.7.3", "0.10.1 by V0"],
)  # fmt: skip
def test_v0_is_repeated(kvcalc: Run, diagnosed: Any, tmp_path: Path, text: str, gpu: str, figures: Any, failure: str) -> None:
    """The figures of vLLM's V0 engine are repeated, and nothing is predicted."""
    records = diagnosed(text)
    assert {name: gib(records, name) for name in figures} == pytest.approx(figures, abs=1e-6)
    assert all(r["predicted_bytes"] is None and r["difference_bytes"] is None for r in records)
    assert (records[-1]["term"], records[-1]["failure"], records[-1]["gpu"]) == ("what fits", failure, gpu)
    assert "vLLM's V0 engine are not predicted" in kvcalc("diagnose", str(tmp_path / "server.log")).joined
    saved = kvcalc("diagnose", str(tmp_path / "server.log"), "--save", str(tmp_path / "saved.yaml"))
    assert (saved.code, (tmp_path / "saved.yaml").exists()) == (2, False)


@pytest.mark.parametrize(
    "name", ["V1_0_8", "V1_0_14", "V1_0_20", "NO_BLOCKS", "SGLANG_FAILED", "LLAMA_CPP_FAILED", "V1_0_8_3", "LLAMA_CPP_TOO_LONG"]
)
def test_every_change_that_is_advised_gives_what_was_asked(diagnosed: Any, kvcalc: Run, tmp_path: Path, name: str) -> None:
    """Each suggested command is run, as a user would run it. The last line is the first command for a shell."""
    last = diagnosed(getattr(logs, name))[-1]
    assert last["fits"] is False
    for change in last["advice"]:
        options, command = change["kvcalc_command"].removeprefix("kvcalc fit ").split(" -- ", 1)
        (answer,) = kvcalc("fit", *shlex.split(options), "--format", "json", "--", *shlex.split(command)).records
        assert answer["fits"] and answer["max_num_seqs"] >= 1, change
        assert answer["command"] == change["command"]
    printed = kvcalc("diagnose", str(tmp_path / "server.log")).joined.replace("\\ ", "")
    assert printed.endswith(last["advice"][0]["command"])


def test_layers_on_the_host_and_a_shorter_context_in_llama_cpp_s_words(diagnosed: Any, kvcalc: Run, tmp_path: Path) -> None:
    """A layer has 345 MiB of Q8_0 weights and 160 MiB of a cache of 2 · 20,480 cells. Two slots share --ctx-size."""
    last = diagnosed(logs.LLAMA_CPP_TOO_LONG)[-1]
    _, change = last["advice"]
    layers = int(change["flags"].removeprefix("--n-gpu-layers "))
    assert change["command"].endswith(f"--n-gpu-layers {layers}")
    line = "fit --gpu rtx-4060-ti-16gb --format json -- llama-server -m models/Qwen3-14B-Q8_0.gguf -c 40960 -np 2 -ub 512 -ngl"
    assert [kvcalc(f"{line} {n}").records[0]["fits"] for n in (layers, layers + 1)] == [True, False]
    assert "with `--ctx-size " in last["change"]
    assert int(last["change"].partition("--ctx-size ")[2].split("`")[0]) % 2 == 0


OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {} GPU 0 has a total capacity of {} is free.\n"
OLD_CELLS = re.sub(r" \(  8192 cells.*", " KV self size", logs.LLAMA_CPP).replace(
    "_max     = 4", "_max     = 1\nx: flash_attn = 0"
)
SHORT = logs.LLAMA_CPP_FAILED.replace("262144", "8192").replace("32768.00", "1024.00")
TOKENS = re.sub("Available KV.*", "", logs.V1_0_28)
AVAILABLE, H20 = "INFO [gpu_worker.py:298] Available KV cache memory: {} GiB\n", "--gpu h20 --model {} --context {}"
WEIGHTS, SIZE = "INFO Model loading took {} GiB\n", "INFO GPU KV cache size: {} tokens\n"
CELLS = "llama_kv_cache: size = 4096.00 MiB ( 32768 cells, 32 layers, 1/ 1 seqs), K (f16): 2048.00 MiB, V (f16): 2048.00 MiB"
TWO_GPUS = "n_ctx = 8192\nllama_kv_cache_init: CUDA0 KV buffer size = 697.00 MiB\nkv: CUDA1 KV buffer size = 663.00 MiB"
SAMPLER = "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests."
H100, L4 = "--gpu h100 --model {} --context {}", "--gpu l4 --model llama-3.1-8b --context {}"
HYBRID = "INFO GPU KV cache size: 290,864 tokens\nINFO Maximum concurrency for 32,768 tokens per request: 33.04x\n"
PAGED = "[TensorRT-LLM][INFO] [MemUsageChange] Allocated {} GiB for max tokens in paged KV cache ({}).\n"
TOO_LONG = "max seq len (131072), 16.00 GiB KV cache is needed, which is larger than the available KV cache memory (5.40 GiB)"
RUNNING = "Running: 36 reqs, Waiting: 84 reqs, GPU KV cache usage: 99.6%"


@pytest.mark.parametrize(
    ("text", "more", "first", "remedy"),
    [
        # 594 − 301.31 MiB and 0.36 GiB for graphs are 0.0082 of 79.25 GiB; half of the sequences need 297 MiB
        (logs.V1_0_10 + OUT_OF_MEMORY.format("594.00 MiB.", "79.25 GiB of which 301.31 MiB"), "",
         "594.00 MiB outside the engine's share did not fit, 301.31 MiB of 79.25 GiB are free;", "`--gpu-memory-utilization 0.79` or `--max-num-seqs 128`."),
        (OUT_OF_MEMORY.format("7.83 GiB.", "23.64 GiB of which 5.12 GiB"), "", "7.83 GiB of memory did not fit, 5.12 GiB of 23.64",
         "`kvcalc fit MODEL --gpu GPU` shows what fits"),
        (logs.V1_0_14.split("1108] ")[1].partition("\n")[0], "", "40,960 tokens need 6.25 GiB of KV cache, 2.10 GiB are left for 13,760",
         "`--max-model-len 13760` or a larger `--gpu-memory-utilization`."),
        (logs.V0_6_3.split("ValueError: ")[1], "", "one request needs 29,000 tokens of KV cache, 23,648 are left;", "`--max-model-len 23648` or a larger"),
        (logs.V1_0_14, "--context 8k", "2.10 GiB are left for 13,760 tokens; it fits with `", "--max-model-len 8192 --gpu-memory-utilization 0.6"),
        # the cache needs 4 · 4 GiB beside 4.3 of weights; without flash attention, scores need 8 GiB more
        (OLD_CELLS, "--users 4", "4.00 GiB of KV cache fit 1 user of 32,768 tokens, not 4;", "--ctx-size 131072 --parallel 4 --flash-attn on"),
        (logs.V1_0_12.replace("26.91 GiB", "2.91 GiB") + RUNNING, "--users 8", "KV cache per GPU fit 3 users of 65,536 tokens, not 8;", "3 by the log, 34 predicted"),
        (logs.V1_0_28 + RUNNING, "", "KV cache fit 1 user of 40,960 tokens; ", "its KV cache is full: use more GPUs."),
        # the log of a failed load has no size of the weights; the prediction has
        (re.sub("-FP8-dynamic|loading took|KV cache memory:|No available", "", logs.NO_BLOCKS) + OUT_OF_MEMORY.format("448 MiB.", "79.18 GiB of which"),
         "", "the weights need 131.45 GiB of one GPU, which has 79.18 GiB;", "--tensor-parallel-size 4"),
        (logs.LLAMA_CPP_FAILED, "", "32.00 GiB of KV cache did not fit on a GPU of 23.67 GiB;", "--cache-type-v q8_0"),
        (SHORT, "", "1.00 GiB of KV cache did not fit", "use a shorter context"),
        (SHORT.replace("- 23700", "- 20000"), "", "1.00 GiB of KV cache did not fit", "by prediction it fits: stop other processes"),
        (TOKENS, "--users 40 --context 800", "KV cache fit 94 users of 800 tokens, or more with shorter requests; others wait.", "94 by the log"),  # of 50 blocks
        (TOKENS + OUT_OF_MEMORY.format("500.00 MiB.", "44.39 GiB of which 210.00 MiB"), "", "500.00 MiB outside the engine's share", "with `--gpu-mem"),
        # 96 KiB · 32,768 tokens are 3 GiB
        (AVAILABLE.format(12), H20.format("qwen3-30b-a3b", "32k"), "12.00 GiB of KV cache fit 4 users of 32,768 tokens", "fit: 4 by the log, "),
        (AVAILABLE.format(45), H20.format("qwen3-30b-a3b", "32k"), "45.00 GiB of KV cache fit 15 users of 32,768 tokens", "fit: 15 by the log, "),
        # 1,487 blocks of 784 tokens in 4 groups: 371 · 784 tokens; a user needs ⌈context / 784⌉ + 3 blocks: 45, 9 or 87
        (HYBRID, H20.format("qwen3.5-27b", "32k"), "KV cache fit 33 users of 32,768 tokens", "fit: 33 logged, "),
        (HYBRID, H20.format("qwen3.5-27b", "4k"), "KV cache fit 165 users of 4,096 tokens", "290,864 tokens as vLLM counts hybrid layers"),
        (HYBRID, H20.format("qwen3.5-27b", "64k --users 20"), "KV cache fit 17 users of 65,536 tokens, not 20;", "17 by the log, "),
        (logs.V1_0_28, "--users 256 --context 4k", "18 users of 4,096 tokens, not 256; it fits with `--tensor-parallel-size 8", "--max-num-seqs 256"),
        (re.sub("GPU KV.*", "", TOKENS), "", "the log has no size of the KV cache.", "users of 40,960 tokens that fit: 1 predicted"),
        # without flags: half of 27.59 GiB of weights; 178,880 tokens of 94 · 4 · 128 · 2 · 2 bytes are 32.1 GiB, a quarter is 8.02 GiB
        (WEIGHTS.format(13.95) + SIZE.format("81,536"), "--model deepseek-r1-distill-qwen-14b --gpu rtx4090", "tp 2 is assumed; add --tp", "`--max-model-len 81520`"),
        (AVAILABLE.format(8.11) + SIZE.format("178,880"), H100.format("qwen3-235b-a22b-fp8", "8k"), "tp 4 is assumed; add --tp", "4× h100-sxm"),
        (WEIGHTS.format(20), H100.format("qwen3-235b-a22b-fp8", "8k"), "names no tensor-parallel size: tp 1 is assumed; add --tp", "1× h100-sxm"),
        # 23,648 · 128 KiB and 0.03 of 23.67 GiB are 3.6 GiB of 3.54; 1.71 and 0.05 of 79.18 GiB are 5.67 of 5.07; 13.26 and 0.066 of 78.5 are 18.44 of 4 · 32,768 · 144 KiB
        (logs.V0_6_3.split("ValueError: ")[1], "--model llama-3.1-8b --gpu rtx3090", "are left; it fits with `--gpu-memory-utilization 0.95` or `--max-model-len 23632`.", "0 by the log, 1 predicted"),
        (AVAILABLE.format(1.71), H100.format("gpt-oss-120b", "128k"), "1.71 GiB of KV cache is 3.36 GiB too small for 131,072 tokens; it fits with `--gpu-memory-utilization 0.97`", "0 by the log"),
        (logs.SGLANG.replace("26.63", "6.63").replace("387811", "96556"), "--users 4 --context 32k", "2 users of 32,768 tokens, not 4; it fits with `--context-length 32768 --mem-fraction-static 0.94`", "2 by the log"),
        (logs.V1_0_28, "--context 64k", "fit 1 user of 65,536 tokens, above the engine's maximum of 40,960; it fits with `--max-model-len 65536`.", "vllm serve"),
        # single lines: 37,765 tokens; 19,744 tokens; 2.39 GiB of 0.5 GiB for a user
        ("Maximum concurrency for 8,192 tokens per request: 4.61x", L4.format("8k"), "KV cache fit 4 users of 8,192 tokens", "4 logged"),
        ("".join(map(PAGED.format, (1.25, 41.25), (10240, 337920))), "", "stores 337,920 tokens in 41.25 GiB.", "the log names no model. Add --model and --gpu"),
        (SIZE.format("412,336"), "--context 8k --users 64", "enough for 50 users of 8,192 tokens, not 64.", "the log names no model"),
        (OUT_OF_MEMORY.format("7.82 GiB.", "79.11 GiB of which 4.56 GiB") + SAMPLER, H100.format("qwen3-32b", "40k"), "it fits with `--max-num-seqs 128`.", "vllm"),
        (HYBRID, "--context 4k", "its KV cache stores 290,864 tokens.", "the log names no model"),
        (f"{CELLS}\n{CELLS.replace('4096.00', '15.00').replace('32768', '640')}", "", "its KV cache stores 32,768 tokens in 4.01 GiB.", "the log names no model. Add --model and --gpu"),
        (AVAILABLE.format(-1.44), "", "nothing is left for the KV cache, 1.44 GiB are missing;", "shorter context"),
        ("allocating 4608.00 MiB on device 0: cudaMalloc failed: out of memory", "", "4.50 GiB of memory did not fit;", "smaller weights"),
        ("Not enough memory. Please try to increase --mem-fraction-static.", "--gpu h100 --model llama-3.3-70b --tp 2", "nothing is left for the KV cache;", "--mem-fraction-static 0.97`"),
        ("KV cache pool is full. Retract requests. #retracted_reqs: 1", "", "no size of the KV cache; ", "its KV cache is full: use more GPUs or an 8-bit cache."),
        (f"{RUNNING}\n{RUNNING.replace('36', '50').replace('84', '0')}", "", "The engine has 36 running and 84 waiting requests; ", "its KV cache is full: use more GPUs or an 8-bit cache."),
        (TWO_GPUS, "", "its KV cache stores 8,192 tokens in 1.33 GiB.", "cache 697.00 MiB"),
        (TWO_GPUS, H100.format("llama-3.1-8b", "8k"), "The engine started: 1.33 GiB of KV cache fit", "cache"),
        (TOO_LONG, "", "5.40 GiB are left for about 43,792 tokens; try `--max-model-len 43792`", "the log names no model"),  # of 44,236
        (f"$ vllm serve openai/gpt-oss-120b \\\n -tp 2 --enforce-eager --gpu-memory-utilization=0.95\n{AVAILABLE.format(31.71)}", "--gpu h100", "on 2× h100-sxm, vllm", "12 by the log"),
        (CELLS.replace("32768", "8192").replace("1/ 1", "4/ 4"), "--gpu h100 --model llama-3.1-8b", "4.00 GiB of KV cache fit 4 users of 8,192 tokens", "4 by the log"),
        ("# GPU blocks: 1234, # CPU blocks: 512", L4.format("4k"), "KV cache fit 4 users of 4,096 tokens", "4 by the log"),
        (logs.V0_7_3.split("267] ")[3].partition("\n")[0], L4.format("4k"), "2.39 GiB of KV cache fit 4 users of 4,096 tokens", "4 by the log"),
    ],
)  # fmt: skip
def test_the_first_sentence_has_figures(kvcalc: Run, tmp_path: Path, text: str, more: str, first: str, remedy: str) -> None:
    (tmp_path / "server.log").write_text(text, encoding="utf-8")
    answer = kvcalc("diagnose", str(tmp_path / "server.log"), *more.split())
    assert len(re.split("of one GPU|\n\n", answer.out)[0].split()) <= 25
    assert remedy in f"{answer.err} {answer.joined}".replace("\\ ", "").partition(first)[2]


def test_pools_and_states_of_sglang_are_one_cache(diagnosed: Any) -> None:
    """Tokens are counted in the pool without windows. 26.63 GiB of keys, 26.63 of values, 0.25 of convolutions, 1.5 of scans."""
    assert diagnosed(logs.SGLANG_WINDOWS)[-1]["tokens"] == 1_700_000
    states = "Mamba Cache is allocated. max_mamba_cache_size: 64, conv_state size: 0.25GB, ssm_state size: 1.50GB\n"
    assert gib(diagnosed(logs.SGLANG.replace("KV Cache", f"{states}KV Cache")), "cache") == pytest.approx(55.01, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "load", "first"),
    [
        # 0.6 of an L4 leaves 2.1 GiB where 6.25 are needed: 4.15 GiB more are 0.19 of its 21.99 GiB
        (logs.V1_0_14, "", "--gpu-memory-utilization 0.79"),
        # 24 × 32,768 tokens of 160 KiB are 15 GiB on each of 8 L4, with 3.4 of weights: 0.6 of 22 GiB is too little
        (logs.V1_0_14, "--users 24 --context 32k", f"--tensor-parallel-size 8 {LENGTH} --gpu-memory-utilization 0.85"),
        (logs.V1_0_28, "--users 4 --context 32k", f"--kv-cache-dtype fp8 {LENGTH}"),
    ],
)  # fmt: skip
def test_the_smallest_change_comes_first_and_two_if_no_single_one_helps(diagnosed: Any, text: str, load: str, first: str) -> None:
    advice = diagnosed(text, *load.split())[-1]["advice"]
    assert advice[0]["flags"] == first
    assert diagnosed(logs.V1_0_28, "--users", "2", "--context", "16k")[-1]["fits"]


def test_boots_versions_and_engines_are_separate(diagnosed: Any, kvcalc: Run, tmp_path: Path) -> None:
    records = diagnosed(logs.V1_0_10 + logs.SGLANG + logs.V1_0_28 + logs.V1_0_28 + logs.V0_7_3)
    assert [(r["boot"], r["engine"], r["engine_version"], r["gpu"]) for r in records if r["term"] == "what fits"] == [
        (1, "vllm", "0.10.1.1", "a100-80gb"), (2, "sglang", None, "h100-sxm"), (3, "vllm", "0.28.0", "l40s"),
        (4, "vllm", "0.28.0", "l40s"), (5, "vllm", "0.7.3", "t4"),
    ]  # fmt: skip
    assert [round(r["logged_bytes"] / GIB, 2) for r in records if r["term"] == "weights"] == [17.22, 15.33, 27.52, 27.52, 5.6]
    assert {r["boot"] for r in diagnosed(logs.V1_0_14 + logs.V1_0_28, "--boot", "2")} == {2}
    assert "boot 1 of 2, lines 1 to" in kvcalc(f"diagnose {tmp_path}/server.log").joined
    # two engines of data parallelism each log that they are initialised
    line = "(EngineCore_DP{} pid={}) INFO [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: "
    line += logs.config("Qwen/Qwen3-8B", 4096) + "\n"
    head = "INFO [api_server.py:1] vLLM API server version 0.11.0\nNVIDIA L40S\n" + line.format(0, 8)
    assert {r["boot"] for r in diagnosed(head + line.format(1, 9))} == {1}
    assert {r["boot"] for r in diagnosed(head + line.format(0, 9))} == {1, 2}


def test_a_gpu_that_could_be_two_is_asked_for(kvcalc: Run, tmp_path: Path) -> None:
    """79.18 GiB may be an H100 or an A100. Without a memory size, an H100 is assumed."""
    text, words = logs.V1_0_28.replace("INFO device_name=NVIDIA_L40S\n", ""), "Free memory on device (43.9/44.39 GiB)"
    path = tmp_path / "server.log"
    path.write_text(text.replace(words, "Free memory on device (78.7/79.18 GiB)"), encoding="utf-8")
    found = kvcalc("diagnose", str(path))
    assert (found.code, found.out) == (2, "")
    assert "the log names no GPU, and 79.18 GiB can be h100-sxm or a100-80gb. Add --gpu, such as --gpu h100-sxm" in found.err
    assert kvcalc("diagnose", str(path), "--gpu", "a100-80gb").out.count("qwen3-14b on 1× a100-80gb, vllm 0.28.0") == 1
    path.write_text(text.replace(words, ""), encoding="utf-8")
    assert "the log names no GPU: h100-sxm is assumed; add --gpu" in kvcalc("diagnose", str(path)).err


COLOURED = "".join(f"\x1b[36mvllm-1  | \x1b[0m{line}\n" for line in logs.V1_0_10.splitlines())
DOCKER = "".join(
    json.dumps({"log": f"{line}\n", "stream": "stderr", "time": "2026-11-22T10:00:00Z"}) + "\n"
    for line in logs.V1_0_10.splitlines()
)
RAY = re.sub(r"\(VllmWorker TP(\d) pid=", r"(RayWorkerWrapper ip=10.0.0.\1, pid=", logs.V1_0_10)


@pytest.mark.parametrize(
    "data",
    [
        logs.V1_0_10.replace("\n", "\r\n").encode(), logs.V1_0_10.encode("utf-16"), logs.V1_0_10.encode("utf-8-sig"),
        COLOURED.encode(), DOCKER.encode(), RAY.encode(), logs.V1_0_10.encode() + b"\xff\xe9\n",
        re.sub("^", "2026-11-22T10:00:00.1Z stderr F ", logs.V1_0_10, flags=re.MULTILINE).encode(),
    ],
    ids=["CRLF", "UTF-16", "BOM", "compose", "docker", "ray", "latin", "kubernetes"],
)  # fmt: skip
def test_however_a_log_was_kept(diagnosed: Any, kvcalc: Run, tmp_path: Path, monkeypatch: Any, data: bytes) -> None:
    path = tmp_path / "kept.log"
    path.write_bytes(data)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    for name in (str(path), "-", logs.V1_0_10):
        found = kvcalc("diagnose", name, "--format", "json").records
        assert [r | {"log": ""} for r in found] == [r | {"log": ""} for r in diagnosed(logs.V1_0_10)]


def test_of_ranks_the_fullest_counts(diagnosed: Any) -> None:
    """SGLang's second rank stores 0.25 GiB more."""
    first = next(line for line in logs.SGLANG_FAILED.splitlines(keepends=True) if "Load weight end" in line)
    second = first.replace("TP0", "TP1").replace("mem usage=66.02", "mem usage=66.27")
    for both in (first + second, second + first):
        assert gib(diagnosed(logs.SGLANG_FAILED.replace(first, both)), "weights") == pytest.approx(66.27, abs=1e-6)


def test_what_is_kept_and_used(kvcalc: Run, tmp_path: Path, diagnosed: Any) -> None:
    """`fit --from-log` gives the cache of the log, within the rounding of the log's figures."""
    kept = tmp_path / "machine.yaml"
    diagnosed(logs.V1_0_28, "--save", str(kept))
    line = "fit qwen3-14b --gpu l40s --max-model-len 40960 --engine-version 0.28 --format json"
    (learned,) = kvcalc(line, "--from-log", str(kept)).records
    assert learned["kv_budget_bytes"] / GIB == pytest.approx(11.57, abs=0.011)
    (plain,) = kvcalc(line, "--engine", "vllm").records
    assert plain["kv_budget_bytes"] != learned["kv_budget_bytes"]
    assert "that log is vllm's" in kvcalc(line, "--engine", "sglang", "--from-log", str(kept)).err
    for text in (logs.SGLANG_FAILED, logs.LLAMA_CPP):  # which do not log all that they take
        diagnosed(text, "--save", str(kept))
        assert "beside_beyond_bytes: 0\n" in kept.read_text(encoding="utf-8")
    named = read_learned(str(kept))
    kept.write_text(msgspec.structs.replace(named, model="o'clock: #1").text(), encoding="utf-8")
    assert read_learned(str(kept)).model == "o'clock: #1"
    kept.write_text("engine: vllm\nnothing: 1\n", encoding="utf-8")
    assert "is not what diagnose --save writes" in kvcalc(line, "--from-log", str(kept)).err


def test_llama_cpp_keeps_what_its_log_says(diagnosed: Any, kvcalc: Run, tmp_path: Path) -> None:
    """Keys and values in q8_0: 34 bytes for 32 numbers, 2 · 1,024 numbers per layer, 32 layers, 4 streams of 8,192 cells."""
    text = logs.LLAMA_CPP.replace("(f16): 2048.00", "(q8_0): 1088.00").replace("4096.00 MiB", "2176.00 MiB")
    cache = next(r for r in diagnosed(text) if r["term"] == "cache")
    assert cache["predicted_bytes"] == cache["logged_bytes"] == 4 * 8192 * 32 * 2 * 1024 * 34 // 32 == 2176 * MIB
    assert diagnosed(text)[-1]["command"].endswith("--ubatch-size 512 --cache-type-k q8_0 --cache-type-v q8_0")
    narrow = next(line for line in text.splitlines() if "8192 cells" in line).replace("8192", "1024")
    for log, cells in ((text, 32768), (text + narrow, 32768), (text.replace("4/4 seqs", "4 seqs"), 8192)):
        diagnosed(log)
        assert f"{cells:,} tokens in the cache" in kvcalc("diagnose", str(tmp_path / "server.log")).joined
    # four slots of 8,192 tokens, whatever memory is still free; one slot of 32,768 tokens for one user
    text = logs.LLAMA_CPP
    assert [diagnosed(text, "--context", n)[-1]["max_num_seqs"] for n in ("4k", "8k", "32k")] == [4, 4, 0]
    one = text.replace("n_seq_max     = 4", "n_seq_max     = 1").replace("8192 cells", "32768 cells").replace("4/4", "1/1")
    assert diagnosed(one)[-1]["max_num_seqs"] == diagnosed(one, "--context", "8k")[-1]["max_num_seqs"] == 1


def test_a_count_below_zero_is_none(diagnosed: Any) -> None:
    assert diagnosed(logs.V1_0_28.replace("size: 75,824", "size: -75,824"))[-1]["tokens"] is None
    assert diagnosed(logs.V0_7_3.replace("(14.74GiB)", "(-14.74GiB)"), "--gpu", "t4")[0]["term"] == "share that the engine takes"


def test_weights_and_cache_that_cannot_lie_on_the_gpu_named(kvcalc: Run, diagnosed: Any, tmp_path: Path) -> None:
    """14.99 + 50 GiB in 0.92 of the memory: a GPU of 80 GB has more memory, a GPU of 40 GB has less and gets a warning."""
    text = "INFO vLLM API server version 0.11.0\nINFO non-default args: {'model': 'meta-llama/Llama-3.1-8B'}\n"
    text += WEIGHTS.format(14.99) + AVAILABLE.format(50)
    rest = "other memory, not itemised"
    assert gib(diagnosed(text, "--gpu", "a100-80gb"), rest) == pytest.approx(0.9 * 79.25 - 64.99, abs=0.5)
    assert rest not in {record["term"] for record in diagnosed(text, "--gpu", "a100-40gb-pcie")}
    said = kvcalc("diagnose", str(tmp_path / "server.log"), "--gpu", "a100-40gb-pcie").err
    assert "the log's weights and cache, 64.99 GiB, exceed the 35.54 GiB of a100-40gb-pcie: name the GPU with --gpu" in said
    (tmp_path / "server.log").write_text(text.replace(WEIGHTS.format(14.99), "").replace("50", "21.54"))
    assert (
        "leaves 14.00 GiB of a100-40gb-pcie for 14.99 GiB"
        in kvcalc("diagnose", str(tmp_path / "server.log"), "--gpu", "a100-40gb-pcie").err
    )


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b"[TensorRT-LLM] TensorRT LLM version: 1.0.0\n", "has no start-up of vLLM, SGLang, TensorRT-LLM or llama.cpp"),
        (b"\x7fELF\x02\x01\x01" + b"\0" * 99, "is not a log in text"),
        (b"vLLM API server version 0.11.0\n", "or a line with the size of the KV cache, such as `GPU"),
        (b"INFO vLLM API server version 0.11.0\nModel loading took 3.2 GiB\n", "such as --model qwen3-8b --gpu h100"),
        (b"non-default args: {'model': '/mnt/m'}\nModel loading took 3 GiB\n", "is not a known model. Add --model and"),
    ],
)
def test_a_foreign_or_truncated_file_gets_one_sentence(kvcalc: Run, tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(data)
    found = kvcalc("diagnose", str(path))
    assert found.code == 2
    assert said in found.err.splitlines()[-1]
    assert found.err.count("kvcalc: ") == 1


@pytest.mark.parametrize(
    "line",
    [
        "non-default args: {'model': '\x1b]0;owned\x07\x1b[31mQwen/Qwen3-8B\x1b[0m', 'max_model_len': __import__('os')}",
        "non-default args: {" * 3000,
        "LLM engine (v" + "9" * 5000 + ") with config: model='" + "a" * 50_000 + "'",
        "GPU KV cache size: " + "9" * 4000 + " tokens",
        "total_gpu_memory (" + "1" * 400 + "GiB) x gpu_memory_utilization (0.9) = 1GiB",
        "Namespace(" + "a=(" * 5000,
        "max seq len (1), (1 GiB KV cache is needed" + " " * 19_000,
        "Load weight end." + "x" * 19_000,
        "\0\0\0",
    ],
)
def test_hostile_lines(kvcalc: Run, tmp_path: Path, line: str) -> None:
    """No line gives a traceback or prints an escape sequence."""
    path = tmp_path / "x.log"
    path.write_text(logs.V1_0_28 + line + "\n" + logs.V1_0_14, encoding="utf-8")
    found = kvcalc("diagnose", str(path))
    assert found.code in (0, 2)
    assert "\x1b" not in found.out + found.err
    assert "owned" not in found.out


def test_every_part_of_a_log_is_read_without_a_traceback(kvcalc: Run, tmp_path: Path) -> None:
    """A log that is cut at any position is diagnosed, or refused in one line."""
    path = tmp_path / "cut.log"
    for text, share in itertools.product((logs.V1_0_28, logs.SGLANG, logs.LLAMA_CPP), range(1, 10, 2)):
        path.write_text(text[: len(text) * share // 10], encoding="utf-8")
        assert kvcalc("diagnose", str(path)).code in (0, 2)
