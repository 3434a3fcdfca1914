"""What `fit` says first: the figure asked for, what a cache of 8 bits makes of it, and, where nothing fits, what mends it."""

import re

import pytest
from conftest import Run

from kvcalc.capacity.remedy import LARGEST_TP
from kvcalc.storage.quality import UNKNOWN

SHORT = [
    "llama-3.1-70b",
    "llama-3.1-70b --tp 2 --engine vllm",
    "llama-3.1-70b --gpu a100-80gb --engine vllm",
    "llama-3.1-8b --gpu a100-40gb --max-num-seqs 64 --max-model-len 8k",
    "llama-3.1-8b --gpu l4 --engine sglang --max-model-len 32k",
    "llama-3.1-8b --gpu rtx-4090 --engine llama.cpp",
    "llama-3.1-8b --engine vllm --max-model-len 32k --max-num-seqs 14 --budget low",
    "deepseek-v3 --tp 8 --enable-expert-parallel --engine vllm",
    "gemma-3-27b --gpu h100 --engine vllm --max-num-seqs 40 --max-model-len 32k",
    "mixtral-8x7b --gpu mi300x --engine vllm --max-num-seqs 64 --max-model-len 32k",
]


@pytest.mark.parametrize("line", SHORT)
def test_what_would_fit_fits(kvcalc: Run, line: str) -> None:
    """Each option that is named is run; of GPUs, half as many do not hold it; fp8 is named on no GPU without it."""
    (record,) = kvcalc(f"fit {line} --format json").records
    assert not record["fits"]
    said = kvcalc(f"fit {line}").joined
    assert record["advice"] in said and record["advice"] in kvcalc(f"fit {line} --format json").err
    options = re.search(r"would fit with (.*)$", record["advice"])
    assert options
    named = options[1].split(" or ")
    for option in named:
        (mended,) = kvcalc(f"fit {line} {option} --format json").records
        assert mended["fits"] and mended["advice"] is None, option
    assert "fp8" not in " ".join(named) or "fp8" in kvcalc(f"gpus {record['gpu']}").out
    (wider,) = [option for option in named if option.startswith("--tp ")]
    if (half := int(wider.split()[1]) // 2) > record["tensor_parallel_size"]:
        assert not kvcalc(f"fit {line} --tp {half} --format json").records[0]["fits"]


def test_what_fits_as_it_is_fits(kvcalc: Run) -> None:
    line = "fit llama-3.1-8b --engine none --gpu a100-40gb --max-model-len 8k --max-num-seqs 64"
    assert "20 × 8,192 fit;" in kvcalc(line).joined
    assert kvcalc(f"{line} --max-num-seqs 20 --format json").records[0]["fits"]
    assert not kvcalc(f"{line} --max-num-seqs 21 --format json").records[0]["fits"]
    line = "fit llama-3.1-70b --tp 2 --engine vllm"
    longest = kvcalc(f"{line} --format json").records[0]["max_model_len"]
    assert f"1 × {longest:,} fits, longer prompts refused ({UNKNOWN});" in kvcalc(line).joined
    assert kvcalc(f"{line} --max-model-len {longest} --format json").records[0]["fits"]


def test_where_no_change_helps_it_says_so(kvcalc: Run) -> None:
    said = kvcalc("fit gpt2 --require 1000000").joined
    assert f"would fit with no smaller cache or weights, nor --tp to {LARGEST_TP}" in said


def test_more_gpus_are_advised_without_experts_apart_where_none_are_asked_for(kvcalc: Run) -> None:
    """With --ep 32 as well, 32 T4 hold 16 sequences; with --tp 32 alone 6, and --tp 64 no more."""
    line = "fit mimo-v2.6-flash --gpu t4 --engine vllm --max-model-len 32k --max-num-seqs 16 --format json"
    assert kvcalc(line).records[0]["advice"].endswith(f"would fit with no smaller cache or weights, nor --tp to {LARGEST_TP}")
    assert [kvcalc(f"{line} {more}").records[0]["fits"] for more in ("--tp 32 --ep 32", "--tp 32", "--tp 64")] == [
        True,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [  # 131,072 bytes a token in bf16: 56.68 GiB hold 14 × 4 GiB, in fp8 28 × 2 GiB
        ("llama-3.1-8b --engine none --max-model-len 32k",
         "14 users of 32,768 tokens fit on 1× h100-sxm (tp 1), 28 with an fp8 cache ("),
        ("llama-3.1-8b --engine none --max-model-len 32k --gpu a100-80gb",
         "14 users of 32,768 tokens fit on 1× a100-80gb (tp 1);"),
        ("llama-3.1-8b --engine none --max-model-len 32k --kv-cache-dtype fp8",
         "28 users of 32,768 tokens fit on 1× h100-sxm (tp 1);"),
        ("llama-3.1-8b --engine none --max-model-len 128k",
         "3 users of 131,072 tokens fit on 1× h100-sxm (tp 1), 7 with an fp8 cache"),
        ("llama-3.1-8b --gpu rtx-4090 --engine llama.cpp --max-model-len 32k", f"q8_0 cache ({UNKNOWN}); one alone to 69,120"),
    ],
)  # fmt: skip
def test_the_first_sentence_answers(kvcalc: Run, line: str, said: str) -> None:
    shown = kvcalc(f"fit {line}")
    assert said in shown.joined
    smaller = re.search(r", ([\d,]+) with an? (\w+) cache", shown.joined)
    (record,) = kvcalc(f"fit {line} --format json").records
    if smaller:
        (again,) = kvcalc(f"fit {line} --kv-cache-dtype {smaller[2]} --format json").records
        assert f"{again['max_num_seqs']:,}" == smaller[1]
        assert record["small_cache_num_seqs"] == again["max_num_seqs"]
    else:
        assert record["small_cache_num_seqs"] is None


def test_the_longest_context_is_of_what_was_asked(kvcalc: Run) -> None:
    """Of one sequence where no number was given; never beyond what the model is made for, whatever the memory holds."""
    (alone,) = kvcalc("fit llama-3.1-8b --engine none --max-model-len 4k --format json").records
    (eight,) = kvcalc("fit llama-3.1-8b --engine none --max-model-len 4k --max-num-seqs 8 --format json").records
    assert alone["max_model_len"] > 131_072 and alone["max_model_len"] // 8 == eight["max_model_len"]
    said = kvcalc("fit llama-3.1-8b --engine none --max-model-len 4k").joined
    assert said.split("; ")[1].startswith("one alone to 131,072 tokens")
    assert (
        f"; 8 at once to {eight['max_model_len']:,} tokens"
        in kvcalc("fit llama-3.1-8b --engine none --max-model-len 4k --max-num-seqs 8").joined
    )


def test_users_are_of_the_replica_and_concurrency_of_a_rank(kvcalc: Run) -> None:
    line = "fit llama-3.1-8b --engine vllm --max-model-len 32k --format json"
    (one,), (two,) = kvcalc(line).records, kvcalc(f"{line} --dp 2").records
    assert two["max_num_seqs"] == 2 * one["max_num_seqs"] and two["max_concurrency"] == one["max_concurrency"]
    head = kvcalc("fit llama-3.1-8b --engine vllm --max-model-len 32k --dp 2").out
    assert "users  concurrency" in head and "whole sequences of that length, of the replica" in " ".join(head.split())


def test_a_shared_prefix_and_memory_of_the_host_show_what_they_change(kvcalc: Run) -> None:
    line = "fit llama-3.1-8b --engine vllm --max-model-len 8k"
    (plain,) = kvcalc(f"{line} --format json").records
    (shared,) = kvcalc(f"{line} --shared-prefix 2k --kv-offloading-bytes 100GiB --format json").records
    assert plain["unshared_num_seqs"] is None and shared["unshared_num_seqs"] == plain["max_num_seqs"]
    assert shared["max_num_seqs"] > plain["max_num_seqs"] and shared["offload_num_seqs"] == 100  # of 1 GiB each
    shown = kvcalc(f"{line} --shared-prefix 2k --kv-offloading-bytes 100GiB")
    head = next(text for text in shown.out.splitlines() if text.startswith("GPU"))
    assert "users  not shared  on the host" in head
    assert f", {plain['max_num_seqs']} without the shared prefix of 2,048, 100 more in the host's memory" in shown.joined
    assert "not shared" not in kvcalc(line).out and "on the host" not in kvcalc(line).out


def test_advice_of_fewer_bits_names_what_was_published_of_it(kvcalc: Run) -> None:
    (record,) = kvcalc("fit llama-3.1-8b --gpu l4 --engine vllm --max-model-len 8k --max-num-seqs 10 --format json").records
    assert "--kv-cache-dtype fp8" in record["advice"] or "--quantization" in record["advice"]
    assert "vllm.ai/blog/fp8-kvcache" in record["advice"] or "arXiv 2411.02355" in record["advice"]
