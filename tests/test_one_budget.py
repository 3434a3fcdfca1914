"""All commands give a deployment the same KV cache budget and the same users."""

from typing import Any

import pytest
from conftest import Run

CONTEXT = 8192
CASES = [  # model, GPU, engine, further options
    ("llama-3.1-8b", "h100", "vllm", ""),
    ("llama-3.1-8b", "l40s", "sglang", "--kv-cache-dtype fp8"),
    ("llama-3.1-8b", "rtx-4090", "llama.cpp", "-q q4_k_m"),
    ("llama-3.1-8b", "a100-80gb", "vllm", "--engine-version 0.11"),
    ("llama-3.1-70b", "h200", "trtllm", "--tp 4"),
    ("gpt-oss-120b", "h100", "vllm", ""),
    ("gpt-oss-120b", "h100", "sglang", "--tp 2"),
    ("gpt-oss-120b", "h200", "none", ""),
    ("gemma-3-27b", "h100", "vllm", ""),
    ("gemma-3-27b", "b200", "sglang", "--tp 2 --kv-cache-dtype fp8"),
    ("qwen3-32b", "h100", "vllm", ""),
    ("qwen3-next-80b-a3b", "h200", "vllm", "--tp 2"),
    ("qwen3-next-80b-a3b", "h200", "sglang", "--tp 2"),
    ("deepseek-v3.2", "h200", "vllm", "--tp 8 --kv-cache-dtype fp8"),
    ("mixtral-8x7b", "mi300x", "none", "--dtype fp16"),
]
LINES = {
    "latency": "--isl 8000 --osl 192",
    "compare": f"--variants none --context {CONTEXT}",
    "roofline": f"--context {CONTEXT}",
    "serve": f"--num-prompts 4 --isl 100 --osl 4 --rate 1 --max-model-len {CONTEXT}",
}


def last(kvcalc: Run, line: str) -> dict[str, Any]:
    return kvcalc(f"{line} --format json").records[-1]


@pytest.mark.parametrize(("model", "gpu", "engine", "options"), CASES)
def test_budget_and_users_are_those_of_fit(kvcalc: Run, model: str, gpu: str, engine: str, options: str) -> None:
    deployed = f"{model} --gpu {gpu} --engine {engine} {options}"
    fitted = last(kvcalc, f"fit {deployed} --context {CONTEXT}")
    assert fitted["kv_budget_bytes"] > 0
    for command, words in LINES.items():
        record = last(kvcalc, f"{command} {deployed} {words}")
        assert record["kv_budget_bytes"] == fitted["kv_budget_bytes"], command
        if command != "serve":  # whose max_num_seqs is the setting
            assert (record["fits"], record["max_num_seqs"]) == (fitted["fits"], fitted["max_num_seqs"]), command


@pytest.mark.parametrize(("model", "gpu", "engine", "options"), [case for case in CASES if case[2] != "llama.cpp"])
def test_a_plan_holds_what_fit_holds(kvcalc: Run, model: str, gpu: str, engine: str, options: str) -> None:
    """A plan sets up the engine for its users, and uses the low end of the range."""
    deployed = f"{model} --gpu {gpu} --engine {engine} {options}"
    tp = "" if "--tp" in options else "--tp 1"
    planned = kvcalc(f"plan {deployed} {tp} --pp 1 --max-gpus 8 --users 2 --context {CONTEXT} --format json").records[0]
    setup = f"--max-num-seqs {planned['max_num_seqs']} --budget low --dp {planned['data_parallel_size']}"
    setup += f" --ep {planned['expert_parallel_size']}"
    fitted = last(kvcalc, f"fit {deployed} --context {CONTEXT} {setup}")
    budget = fitted["kv_budget_low_bytes"] or fitted["kv_budget_bytes"]
    assert (planned["kv_budget_low_bytes"], planned["capacity_sequences"]) == (budget, fitted["capacity_sequences"])


def test_a_draft_takes_of_the_same_budget(kvcalc: Run) -> None:
    """Weights and cache of a draft count in `fit`, `latency` and `serve`, in addition to the model's."""
    line = "llama-3.1-70b --gpu h200 --tp 2"
    drafted = "--draft llama-3.2-1b --num-speculative-tokens 4"
    fitted = last(kvcalc, f"fit {line} {drafted} --context {CONTEXT}")
    plain = last(kvcalc, f"fit {line} --context {CONTEXT}")
    assert plain["kv_budget_bytes"] > fitted["kv_budget_bytes"] and plain["max_num_seqs"] > fitted["max_num_seqs"]
    for command in ("latency", "serve"):
        record = last(kvcalc, f"{command} {line} {drafted} {LINES[command]}")
        assert record["kv_budget_bytes"] == fitted["kv_budget_bytes"], command
    assert last(kvcalc, f"latency {line} {drafted} {LINES['latency']}")["max_num_seqs"] == fitted["max_num_seqs"]


def test_an_engine_that_refuses_a_model_gives_times_alone(kvcalc: Run) -> None:
    """vLLM has no pages for a cache with eviction: `fit` and `serve` refuse it. Times have a note."""
    line = "llama-7b --set cache_budget=4096"
    for command in ("fit", "serve --num-prompts 2"):
        refused = kvcalc(f"{command} {line}")
        assert refused.code == 2 and "no memory rules of vLLM" in refused.err and refused.err.count("\n") == 1
    for command in ("latency --isl 100 --osl 4", "roofline", "compare --variants none"):
        record = last(kvcalc, f"{command} {line}")
        assert (record["kv_budget_bytes"], record["fits"]) == (None, None)
        assert "no memory rules of vLLM" in record["memory_note"]
        assert "no memory rules of vLLM" in kvcalc(f"{command} {line} -v").joined
    assert last(kvcalc, f"roofline {line} --batch-size 256")["fits"] is False  # 512 GiB of rows on one GPU
