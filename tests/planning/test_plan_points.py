"""Every point of a plan is what `fit` and `latency` say of it, to the last bit; the front is the front."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcalc import FitOptions, UserError, fit, load_gpu, load_model
from kvcalc.layers.batch import Batch
from kvcalc.model.precision import Precision
from kvcalc.planning.block import MEMORY, Block
from kvcalc.planning.front import Front
from kvcalc.planning.grid import Grid
from kvcalc.planning.need import Need
from kvcalc.planning.space import Space
from kvcalc.serving.latency import request
from kvcalc.timing.records import roofline_records

MODELS = ["llama-3.1-8b", "llama-3.1-70b", "deepseek-v3", "gpt-oss-120b", "qwen3-next-80b-a3b", "gemma-3-27b", "nemotron-h-47b"]


def blocks(needs: Sequence[Need], model: str, gpus: str, **space: object) -> list[Block]:
    known = [load_gpu(name) for name in gpus.split()]
    return [*Grid(needs, Space(models=(load_model(model),), gpus=tuple(known), **space)).blocks()]  # type: ignore[arg-type]


def check(block: Block, at: int) -> None:
    """One point against the commands that take one deployment."""
    need, deployment, count = block.need, block.deployment, int(block.counts[at])
    lengths = need.lengths
    found = fit(deployment, FitOptions(engine="vllm", max_model_len=lengths.context, max_num_seqs=count, budget="low"))
    assert (found.capacity, found.fits) == (block.capacity[at], block.failing[at] != MEMORY)
    if not found.fits:
        assert np.isnan(block.tpot[at])
        return
    first = request(deployment, lengths.prompt, 1, 1, lengths.cached)
    assert block.ttft[at] == first.ttft_s
    if not lengths.output:
        assert block.tpot[at] == deployment.seconds(Batch.decode(lengths.context, count))
        if deployment.parallelism.pp == 1:
            total = roofline_records(deployment, "decode", count, lengths.context)[-1]
            assert block.tpot[at] == (total["time_s"] or total["roofline_s"])
        return
    whole = request(deployment, lengths.prompt, lengths.output, count, lengths.cached)
    assert block.tpot[at] == whole.tpot_s or (whole.tpot_s is None and np.isnan(block.tpot[at]))
    assert block.e2e is not None
    assert block.e2e[at] == whole.e2e_s


@pytest.mark.parametrize("model", MODELS)
def test_random_points_are_what_fit_latency_and_roofline_say(model: str) -> None:
    chance = random.Random(model)
    needs = [
        Need(users=chance.randint(1, 300), context=chance.randint(2, 60_000)),
        Need(
            users=chance.randint(1, 90), input_len=chance.randint(1, 9000), output_len=chance.randint(1, 30), prefix_hit_rate=0.3
        ),
        Need(rate=chance.uniform(0.1, 20), input_len=chance.randint(1, 3000), output_len=2),
    ]
    cache, tp, pp = chance.choice(["auto", "fp8"]), chance.choice([1, 2, 8]), chance.randint(1, 3)
    for gpus, space in (
        ("h200", {"tp": (tp,), "pp": (1, pp), "dp": (1,)}),
        ("mi300x rtx-4090 b200", {"tp": (1, 8), "pp": (pp,)}),
    ):
        found = blocks(needs, model, gpus, precisions=(Precision(kv_cache_dtype=cache),), max_gpus=24, **space)
        points = [(block, at) for block in found for at in range(len(block.counts))]
        held = [(block, at) for block, at in points if block.failing[at] != MEMORY]
        for block, at in [*chance.sample(points, 2), *chance.sample(held, min(6, len(held)))]:
            check(block, at)


@pytest.mark.parametrize(
    ("engine", "also"), [("llama.cpp", {}), ("llama.cpp", {"kv_unified": True}), ("vllm", {"engine_version": "0.7"})]
)
def test_every_need_has_the_terms_of_its_own_context(engine: str, also: dict[str, Any]) -> None:
    """llama.cpp's buffer and V0's pass grow with the context: a need is held beside others as `fit` says."""
    needs = [Need(users=4, context=context) for context in (16, 30_000, 200_000)]
    options = FitOptions(engine=engine, **also)
    found = blocks(needs, "deepseek-v2-lite", "a100-80gb", tp=(1,), pp=(1, 2), dp=(1,), max_gpus=2, options=options)
    assert len({int(left) for block in found for left in block.left if block.deployment.parallelism.pp == 1}) > 1
    for block in found:
        for at, count in enumerate(block.counts.tolist()):
            context = block.need.context
            alone = fit(
                block.deployment, msgspec.structs.replace(options, max_model_len=context, max_num_seqs=count, budget="low")
            )
            assert alone.capacity == block.capacity[at]
            if block.deployment.parallelism.pp == 1:
                assert alone.left[alone.end] == block.left[at]


def test_users_are_spread_over_replicas_and_all_have_a_seat() -> None:
    (need,) = [Need(users=7, context=1000)]
    for block in blocks([need], "llama-3.1-8b", "h100", max_gpus=4):
        assert (block.counts * block.replicas >= 7).all()
        assert ((block.counts - 1) * block.replicas < 7).all()
        assert (block.gpus <= 4).all()


def test_a_rate_takes_as_many_replicas_as_carry_it() -> None:
    need = Need(rate=10.0, input_len=1000, output_len=100)
    for block in blocks([need], "llama-3.1-8b", "h100", tp=(1,), pp=(1,), max_gpus=64):
        held = block.failing != MEMORY
        carried = block.rate / need.output_len
        assert (block.replicas * carried >= need.rate)[held].all()
        assert ((block.replicas - 1) * carried < need.rate)[held].all()
        tried = {2**n for n in range(11)} | {3 * 2**n for n in range(2, 9)}  # to 1,024, from 8 on with the half between
        assert set(block.counts.tolist()) == tried


def dominated(points: Sequence[tuple[float, float]], one: tuple[float, float]) -> bool:
    return any(x <= one[0] and y >= one[1] and (x, y) != one for x, y in points)


def test_the_front_is_what_brute_force_finds() -> None:
    chance = random.Random(5)
    for size in (1, 2, 7, 60):
        points = [(float(chance.randint(1, 12)), float(chance.randint(1, 12))) for _ in range(size)]
        front = Front()
        for start in range(0, size, 5):
            xs, ys = zip(*points[start : start + 5], strict=True)
            front.take(np.array(xs), np.array(ys), lambda at, start=start: start + at)
        expected = {one for one in points if not dominated(points, one)}
        assert set(zip(front.xs.tolist(), front.ys.tolist(), strict=True)) == expected
        assert [points[i] for i in front.what] == [*zip(front.xs, front.ys, strict=True)]


def test_nothing_is_looked_at_that_the_model_is_not_cut_into() -> None:
    with pytest.raises(UserError, match="tensor-parallel size 3 does not divide"):
        blocks([Need(users=1, context=100)], "llama-3.1-8b", "h100", tp=(3,))
