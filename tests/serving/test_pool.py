"""The pool's tables are the sizes that `size` gives, at every length; reservations are of the longest request."""

import numpy as np
import pytest

from kvcalc import FitOptions, Parallelism, UserError, cache_size, load_gpu, load_model
from kvcalc.serving.pool import make_pool
from kvcalc.serving.replica import memory
from kvcalc.timing.deployment import Deployment

MODELS = ("llama-3.1-8b", "gpt-oss-20b", "deepseek-v2-lite", "qwen3-next-80b-a3b", "granite-4-h-tiny")


def rows(name: str, **ranks: int) -> tuple:
    deployment = Deployment(load_model(name), load_gpu("h200"), parallelism=Parallelism(**ranks))
    return memory(deployment, FitOptions(engine="none", kv_cache_memory_bytes=1 << 34)).rows


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [1, 2])
def test_tables_are_the_sizes_at_every_length(name: str, tp: int) -> None:
    made = make_pool(rows(name, tp=tp), 1 << 34, "paged", 16, 10**9, 700)
    model = load_model(name)
    for tokens in (1, 15, 16, 17, 127, 128, 129, 700):
        size = cache_size(model, tokens, block_size=16, parallelism=Parallelism(tp=tp))
        assert (made.allocated[tokens], made.stored[tokens]) == (size.allocated, size.stored), tokens
    assert (np.diff(made.allocated) >= 0).all()
    assert (made.allocated >= made.stored).all()


def test_allocated_never_shrinks_where_the_content_does() -> None:
    """DeepSeek-V4 compresses: what an unfinished block held is given back, its memory not."""
    made = make_pool(rows("deepseek-v4-flash", tp=2), 1 << 34, "paged", 16, 10**9, 600)
    assert (np.diff(made.stored) < 0).any()
    assert (np.diff(made.allocated) >= 0).all()


def test_contiguous_reserves_the_longest_request() -> None:
    reserved = cache_size(load_model("llama-3.1-8b"), 2048).stored
    made = make_pool(rows("llama-3.1-8b"), 5 * reserved, "contiguous", 16, 2048, 100)
    assert set(made.allocated.tolist()) == {reserved}
    assert made.fits(100)
    assert not make_pool(rows("llama-3.1-8b"), 5 * reserved, "contiguous", 16, 99, 100).fits(100)
    with pytest.raises(UserError, match=r"one contiguous reservation of 2,048 tokens takes 256\.00 MiB of 128\.00 MiB"):
        make_pool(rows("llama-3.1-8b"), reserved // 2, "contiguous", 16, 2048, 100)


def test_an_unknown_cache() -> None:
    with pytest.raises(UserError, match=r"unknown cache 'pagd'.*paged"):
        make_pool(rows("llama-3.1-8b"), 1 << 30, "pagd", 16, 100, 100)


def test_a_model_that_leaves_no_memory() -> None:
    deployment = Deployment(load_model("llama-3.1-70b"), load_gpu("h100"))
    with pytest.raises(UserError, match=r"llama-3.1-70b leaves no memory for a cache on h100-sxm.*more GPUs"):
        memory(deployment, FitOptions())
