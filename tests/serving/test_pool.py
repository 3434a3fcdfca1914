"""The tables of a pool equal the engine's allocation at every length, as in `fit`. Reservations have the length of the
longest request."""

import numpy as np
import pytest
from msgspec.structs import replace

from kvcalc import FitOptions, Parallelism, UserError, cache_size, load_gpu, load_model
from kvcalc.capacity import Fit, fit
from kvcalc.serving.cache_accounting import Pool, make_pool
from kvcalc.serving.server import memory
from kvcalc.timing.deployment import TimedDeployment

MODELS = ("llama-3.1-8b", "gpt-oss-20b", "deepseek-v2-lite", "qwen3-next-80b-a3b", "granite-4-h-tiny")
LENGTHS = (1, 15, 16, 17, 127, 128, 129, 700)
BUDGET = 1 << 34


def deployed(name: str, engine: str, tp: int = 1) -> TimedDeployment:
    return TimedDeployment(load_model(name), load_gpu("h200"), parallelism=Parallelism(tp), engine=engine)


def replica(name: str, engine: str = "none", tp: int = 1) -> Fit:
    return memory(deployed(name, engine, tp), FitOptions(engine=engine, kv_cache_memory_bytes=BUDGET))


def pool(found: Fit, budget: int, cache: str, longest: int, most: int) -> Pool:
    options = replace(found.options, kv_cache_memory_bytes=budget)
    return make_pool(memory(found.requested, options), cache, longest, most)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [1, 2])
def test_content_is_the_sizes_at_every_length(name: str, tp: int) -> None:
    made = pool(replica(name, tp=tp), BUDGET, "paged", 10**9, 700)
    model = load_model(name)
    for tokens in LENGTHS:
        size = cache_size(model, tokens, parallelism=Parallelism(tp=tp))
        assert made.allocated[tokens] == made.stored_bytes[tokens] == size.stored, tokens


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("engine", "tp"), [("vllm", 1), ("vllm", 2), ("sglang", 1), ("trtllm", 2), ("llama.cpp", 1)])
def test_a_pool_holds_as_many_requests_as_fit_says(name: str, engine: str, tp: int) -> None:
    """⌊bytes of the pool / bytes of a request⌋ for any length. The engine's layout counts whole pages, groups and states."""
    try:
        found = replica(name, engine, tp)
    except UserError as error:
        pytest.skip(str(error))
    made = pool(found, BUDGET, "paged", 10**9, 20_000)
    assert (np.diff(made.allocated) >= 0).all()
    assert (made.allocated >= made.stored_bytes).all()
    for length in (100, 1000, 4096, 20_000):
        options = FitOptions(engine=engine, kv_cache_memory_bytes=BUDGET, max_model_len=length)
        answer = fit(deployed(name, engine, tp), options)
        assert made.budget // made.allocated[length] == answer.plan.max_sequences(BUDGET, length), length


def test_allocated_never_shrinks_where_the_content_does() -> None:
    """DeepSeek-V4 compresses tokens: the content of an unfinished block is dropped, but its memory stays allocated."""
    made = pool(replica("deepseek-v4-flash", tp=2), BUDGET, "paged", 10**9, 600)
    assert (np.diff(made.stored_bytes) < 0).any()
    assert (np.diff(made.allocated) >= 0).all()


def test_contiguous_reserves_the_longest_request() -> None:
    reserved, found = cache_size(load_model("llama-3.1-8b"), 2048).stored, replica("llama-3.1-8b")
    made = pool(found, 5 * reserved, "contiguous", 2048, 100)
    assert set(made.allocated.tolist()) == {reserved}
    assert made.fits(np.array(100))
    assert not pool(found, 5 * reserved, "contiguous", 99, 100).fits(np.array(100))
    with pytest.raises(UserError, match=r"one contiguous reservation of 2,048 tokens takes 256\.00 MiB of 128\.00 MiB"):
        pool(found, reserved // 2, "contiguous", 2048, 100)


def test_a_model_that_leaves_no_memory() -> None:
    deployment = TimedDeployment(load_model("llama-3.1-70b"), load_gpu("h100"))
    with pytest.raises(UserError, match=r"llama-3.1-70b leaves no memory for a cache on 1× h100-sxm.*more GPUs"):
        memory(deployment, FitOptions())
