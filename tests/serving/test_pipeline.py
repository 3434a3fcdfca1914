"""Pipeline stages: the micro-batches that are in flight, in bounds and in predictions."""

import pytest
from conftest import Run
from servers import HandClock, HandTimer, asked, served

from kvcalc import Batch, Parallelism, Sequences, deploy
from kvcalc.serving.step_timers import largest_micro_batch

MODELS = (("llama-3.1-8b", "h100", 2), ("llama-3.1-70b", "h200", 4), ("mixtral-8x7b", "a100-80gb", 4))


def test_micro_batches_by_hand() -> None:
    stages = Parallelism(pp=2)
    assert Batch.decode(9, 9).micro_batch(stages) == Batch.decode(9, 4)
    assert Batch.decode(9, 9).micro_batch(stages, rounds_up=True) == Batch.decode(9, 5)
    assert Batch.decode(9, 8).micro_batch(Parallelism(dp=8, pp=2)) == Batch.decode(9, 8)  # one sequence on each rank
    prompt = Batch.prefill(1000)
    assert prompt.micro_batch(stages) == prompt
    assert prompt.micro_batch(stages, cuts_prompts=True) == Batch((Sequences(1, 500, 250),))


@pytest.mark.parametrize(("name", "gpu", "stages"), MODELS)
def test_no_division_into_micro_batches_is_faster_than_a_bound(name: str, gpu: str, stages: int) -> None:
    """m equal parts take the time of one part through all stages, and all parts keep each stage busy."""
    alone = deploy(name, gpu, calibration="datasheet")
    piped = deploy(name, gpu, pp=stages, calibration="datasheet")
    for size in (1, 2, 3, 4, 8, 24, 240):
        bound = piped.seconds(Batch.decode(4096, size))
        for parts in (m for m in range(1, size + 1) if size % m == 0):
            part = alone.seconds(Batch.decode(4096, size // parts))
            sends = piped.seconds(Batch.decode(4096, 1)) - alone.seconds(Batch.decode(4096, 1))
            assert bound <= (max(part, parts * part / stages) + size * sends) * (1 + 1e-9)
    sizes = [piped.seconds(Batch.decode(4096, size)) for size in range(1, 30)]
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("stack", ["datasheet", "vllm"])
def test_one_request_takes_the_sum_of_the_stages_and_several_share_them(stack: str) -> None:
    alone, piped = (deploy("llama-3.1-8b", "h100", pp=pp, calibration=stack) for pp in (1, 4))
    for batch, share in (
        (Batch.decode(4096), Batch.decode(4096)),
        (Batch.prefill(4096), Batch.prefill(4096)),
        (Batch.decode(4096, 4), Batch.decode(4096)),
        (Batch.decode(4096, 40), Batch.decode(4096, 10)),
        (Batch.prefill(500, 8), Batch.prefill(500, 2)),
    ):
        sends = piped.seconds(batch) - alone.seconds(share)
        assert 0 < sends < 0.05 * alone.seconds(share)


def test_a_server_predicts_the_largest_micro_batch() -> None:
    """A pass takes a second per token. With 2 stages, 3 prompts of 9, 5 and 3 tokens take 9 + 3 s, 3 decodes 2 s."""
    clock = HandClock(0.0, 1.0, pp=2)
    assert largest_micro_batch(clock, ((3, 0), (9, 0), (5, 0)), 3) == (((9, 0), (3, 0)), 2)  # type: ignore[arg-type]
    log = served(asked((0.0, 3, 2), (0.0, 9, 2), (0.0, 5, 2)), deployment=clock).logs[0]
    assert (log.first.tolist(), log.finished.tolist()) == ([12.0] * 3, [14.0] * 3)


def test_each_micro_batch_has_the_maximum_number_of_tokens() -> None:
    """For a prompt of 10 tokens, 2 stages work on chunks of 4 and 4 tokens, then on one of 2: 4 + 2 s. One stage takes 4 + 4
    + 2 s."""
    for stages, first in ((2, 6.0), (1, 10.0)):
        run = served(asked((0.0, 10, 1)), deployment=HandClock(0.0, 1.0, pp=stages), max_num_seqs=1, max_num_batched_tokens=4)
        assert run.logs[0].first[0] == first
        assert HandTimer(HandClock(pp=stages)).stages == stages


@pytest.mark.parametrize(("load", "tokens_per_s"), [("--isl 1000 --osl 1000", 3802), ("--isl 8192 --osl 1024", 654)])
def test_bounds_are_above_published_throughput(kvcalc: Run, load: str, tokens_per_s: int) -> None:
    """Llama-3.3-70B in NVFP4 with an fp8 cache on 2 RTX PRO 6000, TP1 PP2; NVIDIA gives tokens/s of each GPU.

    Source: TensorRT-LLM, docs/source/developer-guide/perf-overview.md, commit 03e27c7d.
    """
    line = f"llama-3.3-70b --gpu rtx-pro-6000 -q nvfp4 --kv-cache-dtype fp8 --pp 2 --engine trtllm --bounds {load} --format json"
    (record,) = kvcalc(f"serve {line} --rate inf --num-prompts 2000").records
    assert record["throughput_tokens_per_s"] > tokens_per_s
    (record,) = kvcalc(f"latency {line} --batch-size {record['mean_batch_size']:.0f}").records
    assert record["output_tokens_per_s"] > tokens_per_s


@pytest.mark.slow
@pytest.mark.usefixtures("full_backlog")
def test_a_replica_of_two_stages_serves_more_than_twice_one_gpu(kvcalc: Run) -> None:
    """The weights are stored once, so the cache of two stages has more than twice the memory."""
    line = "serve llama-3.1-8b --gpu l4 --isl 1000 --osl 200 --rate inf --num-prompts 300 --max-num-seqs 256 --format json"
    for basis in ("--bounds", ""):
        one, two = (kvcalc(f"{line} {basis} --pp {pp}").records[0]["capacity_requests_per_s"] for pp in (1, 2))
        assert two > 2 * one
