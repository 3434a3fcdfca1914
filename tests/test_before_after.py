"""`compare --deployments`: the difference first, each side what `fit` says of it; conversations that wait on the host."""

import pytest
from conftest import Run

from kvcalc import Batch, Deployment, Parallelism, Precision, load_gpu, load_model
from kvcalc.cli.compare import spread
from kvcalc.storage.quantization import UNKNOWN_LOSS, loss_of

GIB = 2**30
SERVE = "vllm serve Qwen/Qwen3-32B -tp 2 --max-model-len 32768"


def test_the_first_line_is_the_difference(kvcalc: Run) -> None:
    """Times of as many sequences as the scarcer side holds; an fp8 cache with what was published of it."""
    found = kvcalc("compare --deployments", SERVE, f"{SERVE} --kv-cache-dtype fp8", "--format", "json").records
    before, after = found
    gpu, model, ranks = load_gpu("h100"), load_model("qwen3-32b"), Parallelism(2)
    for record, dtype in ((before, "auto"), (after, "fp8")):
        timed = Deployment(model, gpu, Precision(kv_cache_dtype=dtype), ranks).under()
        assert record["tpot_s"] == float(timed.seconds(Batch.decode(32768, before["max_num_seqs"])))
        assert record["batch_size"] == before["max_num_seqs"]
    assert after["users_difference"] == after["max_num_seqs"] - before["max_num_seqs"] > 0
    assert "vllm.ai/blog/fp8-kvcache" in after["quality"]
    assert before["quality"] is None
    shown = kvcalc("compare --deployments", SERVE, f"{SERVE} --kv-cache-dtype fp8").joined
    users = f"{after['max_num_seqs']} users of 32,768 tokens fit with cache in fp8, before {before['max_num_seqs']}"
    assert shown.startswith(f"{users}, and TPOT ")


def test_sides_in_the_words_of_fit(kvcalc: Run) -> None:
    lines = ("qwen3-32b --tp 2 --gpu h200", "qwen3-32b --tp 2 --gpu h200 --max-model-len 8k -q nvfp4")
    sides = kvcalc("compare --deployments", *lines, "--format", "json").records
    for line, side in zip(lines, sides, strict=True):
        (one,) = kvcalc(f"fit {line} --engine vllm --format json").records
        assert {k: side[k] for k in one} == one
    said = sides[1]["quality"]
    assert said == f"of weights in nvfp4, {UNKNOWN_LOSS}; prompts beyond 8,192 tokens are refused: {UNKNOWN_LOSS}"
    assert loss_of("weights", "awq").startswith("rivals 8-bit weights")


def test_a_gpu_without_a_matrix_peak_has_no_first_token(kvcalc: Run) -> None:
    lines = ("llama-3.1-8b --max-model-len 8k", "llama-3.1-8b --gpu apple-m4-max --max-model-len 8k")
    h100, apple = kvcalc("compare --deployments", *lines, "--format", "json").records
    assert h100["ttft_s"] > 0 and apple["ttft_s"] is None and apple["tpot_s"] > h100["tpot_s"]


def test_options_behind_a_model_that_is_named_once(kvcalc: Run) -> None:
    found = kvcalc("compare llama-3.1-8b --deployments", "--max-model-len 8k", "--max-model-len 8k --enforce-eager")
    assert "fit with enforce-eager True, before " in found.joined and "TPOT stays" in found.joined
    assert found.code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--deployments", "gpt2"], "compares two or more"),
        (["--deployments", "--tp 2", "--tp 4"], "names no model"),
        (["--deployments", "gpt2 --tp 1,2", "gpt2 --tp 4"], "is 2 deployments"),
        (["--deployments", "gpt2 --no-such", "gpt2 --tp 4"], "fit has no --no-such. `kvcalc fit --help-all` lists its options"),
        (["--deployments", "gpt2 '", "gpt2 --tp 4"], "quotation mark"),
        (["--deployments", "gpt2 --matrix", "gpt2"], "--matrix is not part of a deployment. `kvcalc fit` takes it"),
        (["--deployments", "gpt2", "gpt2 --lengths lognormal:9,99 --seed 2"], "--lengths and --seed is not part of a deployment"),
        (["--deployments", "gpt2", "gpt2 --plot x.png"], "--plot is not part of a deployment. Options about printing"),
        (["--deployments", "gpt2 --format json", "gpt2"], "--format is not part of a deployment"),
        ([], "compare takes a model"),
    ],
)
def test_sides_that_cannot_be_had(kvcalc: Run, words: list[str], said: str) -> None:
    found = kvcalc("compare", *words)
    assert (found.code, said in found.err) == (2, True), found.err


def test_words_behind_the_option_are_sides() -> None:
    assert spread(["compare", "m", "--deployments", "a --x 1", "--tp 2", "b", "--gpu", "h200"]) == [
        "compare", "m", "--deployments", "a --x 1", "--deployments", "--tp 2", "--deployments", "b", "--gpu", "h200",
    ]  # fmt: skip


def test_conversations_that_wait_in_the_hosts_memory(kvcalc: Run) -> None:
    """llama-3.1-8b: 131,072 bytes a token, 4 GiB a conversation; 49 GiB keep 12, and one block is never given."""
    (record,) = kvcalc("fit llama-3.1-8b --engine vllm --max-model-len 32k --kv-offloading-bytes 49GiB --format json").records
    link = load_gpu("h100").host_link_bytes_per_s
    assert link
    assert record["offload_tokens"] == record["offload_num_seqs"] * 32768 == 12 * 32768
    assert record["offload_return_s"] == 4 * GIB / link
    alone = Deployment(load_model("llama-3.1-8b"), load_gpu("h100"))
    assert record["recompute_s"] == alone.seconds(Batch.prefill(32768))
    shown = kvcalc("fit llama-3.1-8b --engine vllm --max-model-len 32k --kv-offloading-bytes 49GiB -v").joined
    assert "12 users, 393,216 tokens" in shown
