"""Many GPU models are computed in one call. Each result equals the result of a separate call."""

import msgspec
import pytest

from kvcalc import Deployment, FitOptions, UserError, load_gpu, load_model
from kvcalc.capacity import fit
from kvcalc.capacity.engines import ENGINES
from kvcalc.capacity.memory_budget import MemoryBreakdown
from kvcalc.layers.batch import Parallelism
from kvcalc.library.load import all_gpus
from kvcalc.planning.grid import SearchGrid
from kvcalc.planning.search_space import SearchSpace
from kvcalc.question.plan_options import Requirement

RELEASES = [("vllm", ""), ("vllm", "0.11"), ("vllm", "0.17"), ("sglang", ""), ("trtllm", ""), ("llama.cpp", "")]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "version"), RELEASES)
@pytest.mark.parametrize("model", ["deepseek-v4-pro", "gpt-oss-120b"])
def test_starts_with_equal_keys_have_equal_terms(engine: str, version: str, model: str) -> None:
    """This covers all GPUs on 1 to 9 stages."""
    options = FitOptions(engine=engine, engine_version=version, max_num_batched_tokens=8192, max_num_seqs=64)
    rules = ENGINES[engine]
    known: dict[object, MemoryBreakdown] = {}
    for pp in (1, 9):
        base = Deployment(load_model(model), load_gpu("h100"), parallelism=Parallelism(tp=4, pp=pp))
        try:
            request = fit(base, options)
        except UserError as error:
            pytest.skip(str(error))
        for stage in range(pp):
            for gpu in all_gpus():
                start = msgspec.structs.replace(request.startup(stage, 64), gpu=gpu)
                terms = rules.memory(start, "low")
                key = rules.memory_key(start), pp, stage
                assert known.setdefault(key, terms) == terms, (gpu.name, pp, stage)


def test_a_gpu_without_a_link_is_left_out_of_prompts_apart_alone() -> None:
    """A Mac has no link to other machines: it is in the plan only without disaggregated prefill, with one remark for all."""
    needs = [Requirement(rate=0.1, input_len=length, output_len=20) for length in (500, 900)]
    gpus = tuple(load_gpu(name) for name in ("h100", "apple-m4-max"))
    space = SearchSpace(models=(load_model("llama-3.2-1b"),), gpus=gpus, max_gpus=2, tp=(1,), pp=(1,), disaggregate=(False, True))
    grid = SearchGrid(needs, space)
    candidates = [one for batch in grid.batches() for one in batch.candidates()]
    assert sorted({(one.gpu, one.need.input_len, one.prefill_replicas > 0) for one in candidates}) == [
        ("apple-m4-max", 500, False),
        ("apple-m4-max", 900, False),
        *(("h100-sxm", length, apart) for length in (500, 900) for apart in (False, True)),
    ]
    assert "apple-m4-max: no disaggregated prefill, as no rate of a link to another replica is known" in grid.remarks
