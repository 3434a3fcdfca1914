"""Every configuration of a plan equals `fit` and `latency` but for the order of sums, and the Pareto front is correct."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from conftest import Run

from kvcalc import FitOptions, load_gpu, load_model
from kvcalc.capacity import fit
from kvcalc.layers.batch import Batch
from kvcalc.model.precision import Precision
from kvcalc.planning.best_configs import ParetoFront
from kvcalc.planning.grid import Candidate, SearchGrid, Target
from kvcalc.planning.search_space import SearchSpace
from kvcalc.question.plan_options import Requirement
from kvcalc.serving.request_latency import request
from kvcalc.timing.deployment import roofline_records

MODELS = ["llama-3.1-8b", "llama-3.1-70b", "deepseek-v3", "gpt-oss-120b", "qwen3-next-80b-a3b", "gemma-3-27b", "nemotron-h-47b"]


def candidates(needs: Sequence[Requirement], model: str, gpus: str, **space: object) -> list[Candidate]:
    known = tuple(load_gpu(name) for name in gpus.split())
    grid = SearchGrid(needs, SearchSpace(models=(load_model(model),), gpus=known, **space))  # type: ignore[arg-type]
    return [one for batch in grid.batches() for one in batch.candidates()]


def same(seconds: float | None) -> Any:
    """Return a time that equals others but for the last digits, because sums may have another order."""
    return None if seconds is None else pytest.approx(seconds, rel=1e-12)


def check(one: Candidate) -> None:
    """Compare one candidate with the commands for one deployment."""
    need, deployment, count = one.need, one.deployment, one.max_num_seqs
    lengths = need.lengths
    fitted = fit(deployment, FitOptions(engine="vllm", max_model_len=lengths.context, max_num_seqs=count, budget="low"))
    assert (fitted.capacity, fitted.fits) == (one.capacity, one.violated_target != Target.MEMORY)
    if not fitted.fits:
        assert one.tpot is None
        return
    assert one.ttft == same(request(deployment, lengths.prompt, 1, 1, lengths.cached).ttft_s)
    if not lengths.output:
        assert one.tpot == same(deployment.seconds(Batch.decode(lengths.context, count)))
        if deployment.parallelism.pp == 1:
            total = roofline_records(deployment, "decode", count, lengths.context)[-1]
            assert one.tpot == same(total["time_s"] or total["roofline_s"])
        return
    whole = request(deployment, lengths.prompt, lengths.output, count, lengths.cached)
    tpot, e2e, ranks = whole.tpot_s, whole.e2e_s, deployment.parallelism
    if tpot and deployment.calibration and count > 1:  # prompts delay passes; bounds leave this out
        size = max(1, -(-count // min(-(-count // ranks.dp), ranks.pp)) / ranks.dp)  # prompts of a rank in its micro-batch
        prompt = (one.ttft + whole.ttft_s / size) / 2
        bounds = (tpot, prompt), (tpot + prompt * (ranks.pp - 1) / 2 / ranks.pp, prompt / ranks.pp)
        e2e = min(lengths.output * step + count / ranks.dp * each for step, each in bounds)
        rate = (need.rate or need.users / e2e) / one.replicas / ranks.dp
        tpot = min(step / (1 - rate * each) for step, each in bounds if rate * each < 1)
    assert (one.tpot, one.e2e) == (same(tpot), same(e2e))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_random_candidates_are_what_fit_latency_and_roofline_say(model: str) -> None:
    chance = random.Random(model)
    users, rate = chance.randint(1, 90), chance.uniform(0.1, 20)
    needs = [
        Requirement(users=chance.randint(1, 300), context=chance.randint(2, 60_000)),
        Requirement(users=users, input_len=chance.randint(1, 9000), output_len=chance.randint(1, 30), prefix_hit_rate=0.3),
        Requirement(rate=rate, input_len=chance.randint(1, 3000), output_len=chance.choice((1, 2))),
    ]
    cache, tp, pp = chance.choice(["auto", "fp8"]), chance.choice([1, 2, 8]), chance.randint(1, 3)
    for gpus, space in (
        ("h200", {"tp": (tp,), "pp": (1, pp), "dp": (1,)}),
        ("mi300x rtx-4090 b200", {"tp": (1, 8), "pp": (pp,)}),
    ):
        every = candidates(needs, model, gpus, precisions=(Precision(kv_cache_dtype=cache),), max_gpus=24, **space)
        fitting = [one for one in every if one.violated_target != Target.MEMORY]
        for one in [*chance.sample(every, 2), *chance.sample(fitting, min(6, len(fitting)))]:
            check(one)


@pytest.mark.parametrize("also", [{}, {"kv_unified": True}])
def test_every_need_has_the_terms_of_its_own_context(also: dict[str, Any]) -> None:
    """llama.cpp's buffer grows with the context. With other requirements in the same plan, memory still equals `fit`."""
    needs = [Requirement(users=4, context=context) for context in (16, 30_000, 200_000)]
    options = FitOptions(engine="llama.cpp", **also)
    every = candidates(needs, "deepseek-v2-lite", "a100-80gb", tp=(1,), pp=(1, 2), dp=(1,), max_gpus=2, options=options)
    assert len({one.remaining_bytes for one in every if one.deployment.parallelism.pp == 1}) > 1
    for one in every:
        settings = {"max_model_len": one.need.context, "max_num_seqs": one.max_num_seqs, "budget": "low"}
        alone = fit(one.deployment, msgspec.structs.replace(options, **settings))
        assert alone.capacity == one.capacity
        if one.deployment.parallelism.pp == 1:
            assert alone.remaining[alone.estimate] == one.remaining_bytes


def test_users_are_spread_over_replicas_and_all_have_a_seat() -> None:
    for one in candidates([Requirement(users=7, context=1000)], "llama-3.1-8b", "h100", max_gpus=4):
        assert (one.max_num_seqs - 1) * one.replicas < 7 <= one.max_num_seqs * one.replicas
        assert one.gpus <= 4


@pytest.mark.slow
@pytest.mark.usefixtures("full_backlog")
@pytest.mark.parametrize("words", ["qwen3-32b --rate 2 --pp 1", "llama-3.1-70b --rate 1.3 --pp 2", "qwen3-32b --users 50"])
def test_a_plan_s_server_keeps_up_in_serve(kvcalc: Run, words: str) -> None:
    words += " --tp 2 --isl 4k --osl 200 --gpu h100 --format json"
    planned = kvcalc(f"plan {words} --max-gpus 4").records[0]
    words, seqs = words.replace("users", "max-concurrency"), planned["command"].split()[-1]  # with headroom for peaks
    served = kvcalc(f"serve {words} --max-num-seqs {seqs} --num-prompts 1000").records[0]
    assert 0.75 < served["tpot_p50_s"] / planned["tpot_s"] < 1.05 and served["ttft_p50_s"] < 1 and not served["diverges"]


def test_a_rate_takes_as_many_replicas_as_carry_it() -> None:
    every = candidates(
        [Requirement(rate=10.0, input_len=1000, output_len=100)], "llama-3.1-8b", "h100", tp=(1,), pp=(1,), max_gpus=64
    )
    for one in every:
        if one.tokens_per_s:
            carried = min(one.tokens_per_s, 0.95 * max(other.tokens_per_s or 0 for other in every))
            assert (one.replicas - 1) * carried < 10 * 100 <= one.replicas * carried
    assert {one.max_num_seqs for one in every} == {2**n for n in range(11)} | {3 * 2**n for n in range(2, 9)}  # to 1,024


def dominated(points: Sequence[tuple[float, float]], one: tuple[float, float]) -> bool:
    return any(x <= one[0] and y >= one[1] and (x, y) != one for x, y in points)


def test_the_front_is_what_brute_force_finds() -> None:
    chance = random.Random(5)
    for size in (1, 2, 7, 60):
        points = [(float(chance.randint(1, 12)), float(chance.randint(1, 12))) for _ in range(size)]
        front = ParetoFront()
        for start in range(0, size, 5):
            xs, ys = zip(*points[start : start + 5], strict=True)
            front.add(np.array(xs), np.array(ys), lambda at, start=start: start + at)
        expected = {one for one in points if not dominated(points, one)}
        assert set(zip(front.xs.tolist(), front.ys.tolist(), strict=True)) == expected
        assert [points[i] for i in front.items] == [*zip(front.xs, front.ys, strict=True)]
