"""`fit` with lists of lengths and of users: each row equals a separate request, and one sentence covers all."""

import pytest
from conftest import Run

from kvcalc import Batch, Deployment, load_gpu, load_model

GIB = 2**30
LINE = "fit llama-3.1-8b --engine none --gpu h100"


def test_double_the_context_is_half_the_users(kvcalc: Run) -> None:
    """131,072 bytes per token: 8,192 tokens are 1 GiB, and 56.68 GiB fit 56, 28 and 14."""
    records = kvcalc(f"{LINE} --max-model-len 8k,16k,32k --format json").records
    assert [(r["requested_model_len"], r["max_num_seqs"]) for r in records] == [(8192, 56), (16_384, 28), (32_768, 14)]
    assert records == [kvcalc(f"{LINE} --max-model-len {s} --format json").records[0] for s in (8192, 16_384, 32_768)]
    assert kvcalc(f"{LINE} --max-model-len 8k,16k,32k").out.startswith(
        "56 users of 8,192 tokens or 14 of 32,768 fit on 1× h100-sxm.\n"
    )


def test_more_users_have_shorter_contexts(kvcalc: Run) -> None:
    records = kvcalc(f"{LINE} --max-num-seqs 8,64 --max-model-len 4k --format json").records
    for record, users in zip(records, (8, 64), strict=True):
        assert record["max_model_len"] == record["kv_budget_bytes"] // users // 131_072
    eight, more = (f"{r['max_model_len']:,}" for r in records)
    assert kvcalc(f"{LINE} --max-num-seqs 8,64 --max-model-len 4k").joined.startswith(
        f"8 users of {eight} tokens or 64 of {more} fit on 1× h100-sxm."
    )


def test_both_lists_are_every_combination_and_the_picture_names_them(kvcalc: Run) -> None:
    records = kvcalc(f"{LINE} --max-num-seqs 1,2 --max-model-len 1k,2k --format json").records
    assert [(r["requested_num_seqs"], r["requested_model_len"]) for r in records] == [(1, 1024), (1, 2048), (2, 1024), (2, 2048)]
    assert "2,048 tokens, required users: 2" in kvcalc(f"{LINE} --max-num-seqs 1,2 --max-model-len 1k,2k --plot -").joined


@pytest.mark.parametrize("given", ["--max-model-len 8k,", "--max-num-seqs ,8"])
def test_an_empty_place_is_refused(kvcalc: Run, given: str) -> None:
    found = kvcalc(f"{LINE} {given}")
    assert found.code == 2 and "has an empty item" in found.err
    assert kvcalc(f"{LINE} --max-num-seqs 8,x").err.startswith("kvcalc: max-num-seqs 'x'")
    assert "fit on 8× b200 with tp 8, and 40 on 8× b200 with dp 8." in kvcalc("fit deepseek-v3 --gpu b200 --dp 1,8 --tp 8,1").out


def test_conversations_that_wait_in_the_hosts_memory(kvcalc: Run) -> None:
    """llama-3.1-8b: 131,072 bytes per token, 4 GiB per conversation. 49 GiB store 12, because one block is never used."""
    (record,) = kvcalc("fit llama-3.1-8b --engine vllm --max-model-len 32k --kv-offloading-bytes 49GiB --format json").records
    assert (record["offload_tokens"], record["offload_num_seqs"]) == (49 * 8192, 12)
    found = kvcalc("fit llama-3.1-8b --kv-offloading-bytes 5GB").out  # 2,384 blocks of 16 tokens
    assert "CPU memory stores 38,144 tokens; recomputing" in found and found.endswith("--kv-offloading-size 4.6566\n")
    assert record["offload_return_s"] == 4 * GIB / (load_gpu("h100").host_link_bytes_per_s or 0)
    assert record["recompute_s"] == Deployment(load_model("llama-3.1-8b"), load_gpu("h100")).seconds(Batch.prefill(32768))


def test_sentences_name_the_alternatives_and_notes_what_options_add(kvcalc: Run) -> None:
    """Records of the same request have the figures. Of two deployments with one GPU, none is the smallest."""
    line = "fit qwen2.5-72b -q awq"
    h100, a100 = (f"1 of {r['requested_model_len']:,}" for r in kvcalc(f"{line} --gpu h100,a100-80gb --format json").records)
    assert f" fits on 1× h100-sxm, and {a100} on 1× a100-80gb. " in kvcalc(f"{line} --gpu a100-80gb,h100").joined
    assert f"fp8 cache, {h100} with bf16 cache" in kvcalc(f"{line} --kv-cache-dtype auto,fp8").joined
    shown = kvcalc("fit llama-3.1-8b --context 8k --shared-prefix 4k --max-loras 1").joined
    assert "on 1× h100-sxm beside 88.08 MiB of LoRA slots, instead of 54 without sharing. " in shown
    shared = kvcalc("fit llama-3.1-8b --shared-prefix 6k --max-num-seqs 200 --context 7k").joined
    assert ", in 25.75 GiB of KV cache, 149.25 GiB less by sharing" in shared  # 6,144 + 200 · 1,024 rows of 128 KiB, 200 · 7,168
    found = kvcalc("fit --context 64k -- vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 2 --max-model-len 32k")
    assert "--max-model-len replaces" in found.err and "fp8`" not in found.out
    assert "replicated 2 times" in kvcalc("fit llama-3.1-405b --tp 16 -v").joined
    assert "KV" not in kvcalc("fit bge-m3 --explain").out + kvcalc("fit bge-m3 --matrix").out
