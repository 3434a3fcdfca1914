"""The exit status of `fit`: 0 if something fits, 1 if nothing does, 2 for a wrong request."""

import shlex

import pytest
from conftest import Run

LLAMA = "llama-3.1-8b --max-model-len 32k"  # 4 GiB of cache for one sequence, beside 15 GiB of weights


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (f"{LLAMA} --gpu h100", 0),
        (f"{LLAMA} --gpu h100 --engine vllm --require 3", 0),
        (f"{LLAMA} --gpu h100 --engine vllm --require 300", 1),
        (f"{LLAMA} --gpu h100 --max-num-seqs 64", 1),  # 64 × 4 GiB are more than 80 GB
        ("llama-3.1-70b --gpu h100", 1),  # 131 GiB of weights
        ("llama-3.1-70b --gpu t4,h100,b200 --engine vllm --max-model-len 4k", 0),  # one row of three fits
        ("llama-3.1-70b --gpu t4,h100 --engine sglang --max-model-len 4k", 1),
        ("llama-3.1-70b --gpu t4 --engine llama.cpp -q q4_k_m", 1),
        (f"{LLAMA} --gpu h100 --kv-cache-memory-bytes 3GiB", 1),
        (f"{LLAMA} --gpu h100 --kv-cache-memory-bytes 5GiB --lengths lognormal:300,1000", 0),
        ("llama-3.1-8b --gpu h100 --matrix", 0),
        ("llama-3.1-70b --gpu t4 --matrix", 1),
        ("llama-3.1-70b --gpu no-such-gpu", 2),
        ("llama-3.1-70b --require -1", 2),
    ],
)
def test_the_status_says_whether_something_fits(kvcalc: Run, line: str, status: int) -> None:
    found = kvcalc(f"fit {line} --format json")
    assert found.code == status, found.err
    if status < 2:
        assert any(record["fits"] for record in found.records) == (status == 0)
        assert kvcalc(f"fit {line}").code == kvcalc(f"fit {line} --explain").code == status


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("vllm serve meta-llama/Llama-3.1-8B-Instruct", 1),  # 16 GiB for 131,072 tokens do not fit on 24 GB
        ("vllm serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 16384 --max-num-seqs 256", 0),
        ("sglang serve --model-path meta-llama/Llama-3.1-8B --context-length 2048 --max-running-requests 64", 1),
        ("trtllm-serve meta-llama/Llama-3.1-8B --max_seq_len 16384 --max_batch_size 256", 0),
        ("llama-server -m ./llama-3.1-8b-q4_k_m.gguf -c 65536 -np 4", 0),  # 8 GiB of cells for all four
        ("llama-server -m ./llama-3.1-8b-q4_k_m.gguf -c 262144 -np 4", 1),  # 32 GiB of them
    ],
)
def test_a_command_line_is_judged_as_its_engine_does(kvcalc: Run, line: str, status: int) -> None:
    """vLLM starts if one sequence of its maximum length fits. llama.cpp allocates the cells of all slots."""
    found = kvcalc("fit --gpu l4 --format json --", *shlex.split(line))
    assert (found.code, found.records[0]["fits"]) == (status, not status)
