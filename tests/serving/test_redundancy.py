"""Savings by the cache: FLOPs pass by pass, cases in which a cache saves time, and the sentence for other cases."""

import pytest
from conftest import Run

from kvcalc import Batch, load_gpu, load_model
from kvcalc.serving.request_latency import doubling_context, request
from kvcalc.timing.deployment import TimedDeployment


def deployment(model: str = "gpt2", stack: str = "", gpu: str = "h100") -> TimedDeployment:
    return TimedDeployment(load_model(model), load_gpu(gpu)).with_calibration(stack)


def test_the_head_on_all_positions_by_hand() -> None:
    """GPT-2 with 4 input and 3 output tokens: passes of 4, 5 and 6 tokens. All except the last position of each need 2 ·
    50257 · 768 more."""
    timed = deployment()
    last, every = (request(timed, 4, 3, no_cache=True, all_positions=positions) for positions in (False, True))
    assert every.flops - last.flops == (3 + 4 + 5) * 2 * 50257 * 768


@pytest.mark.parametrize(("model", "stack"), [("llama-3.1-8b", ""), ("llama-3.1-8b", "datasheet"), ("gpt2", "datasheet")])
@pytest.mark.parametrize("every", [False, True])
def test_where_a_step_takes_twice_as_long(model: str, stack: str, every: bool) -> None:
    timed = deployment(model, stack)
    context = doubling_context(timed, 2, every)
    assert context
    for length, doubled in ((context - 1, False), (context, True)):
        again = timed.seconds(Batch.prefill(length, 2), every)
        assert (again >= 2 * timed.seconds(Batch.decode(length, 2))) == doubled


def test_the_record_and_why_it_saves_so_little(kvcalc: Run) -> None:
    line = "latency gpt2 --gpu h100 --input-len 1 --output-len 100 --no-cache"
    (found,) = kvcalc(f"{line} --format json").records
    assert found["no_cache_head"] == "last"
    assert found["no_cache_redundant_flops_share"] == pytest.approx(1 - found["flops"] / found["no_cache_flops"])
    launches = found["tpot_last_s"] - found["tpot_last_bound_s"]
    assert found["speedup"] < 1.5
    assert launches > found["tpot_last_bound_s"]


def test_nothing_is_redundant_where_chunks_take_more(kvcalc: Run) -> None:
    """With one output token, both runs pass the prompt once, and the chunked run runs its LM head four times."""
    line = "latency bloom --gpu a10 --isl 2000 --osl 1 --no-cache --max-num-batched-tokens 512 --format json"
    (found,) = kvcalc(line).records
    assert found["flops"] > found["no_cache_flops"]
    assert found["no_cache_redundant_flops_share"] == 0
