"""Many kinds of GPU are worked out at once: each is what it is by itself."""

import msgspec
import pytest

from kvcalc import Deployment, FitOptions, load_gpu, load_model
from kvcalc.capacity.engines import ENGINES
from kvcalc.capacity.memory_terms import Terms
from kvcalc.capacity.request import request_of, started
from kvcalc.layers.ranks import Parallelism
from kvcalc.library.listing import all_gpus
from kvcalc.planning.grid import Grid
from kvcalc.planning.need import Need
from kvcalc.planning.space import Space

ENGINES_TOLD = [("vllm", ""), ("vllm", "0.9"), ("vllm", "0.17"), ("sglang", ""), ("trtllm", ""), ("llama.cpp", "")]


@pytest.mark.parametrize(("engine", "version"), ENGINES_TOLD)
@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3", "gpt-oss-120b", "gemma-3-27b"])
def test_gpus_that_an_engine_does_not_tell_apart_have_the_same_terms(engine: str, version: str, model: str) -> None:
    """Over all presets, on the first and the last stage of two; the tokens of a pass as given."""
    base = Deployment(load_model(model), load_gpu("h100"), parallelism=Parallelism(tp=2, pp=2))
    options = FitOptions(engine=engine, engine_version=version, max_num_batched_tokens=8192, max_num_seqs=64)
    run, release, _ = started(base, options)
    request = request_of(run, options, "auto", release)
    rules = ENGINES[engine]
    for stage in (0, 1):
        found: dict[object, object] = {}
        for gpu in all_gpus():
            start = msgspec.structs.replace(request.start(stage, 64), gpu=gpu)
            terms = rules.memory(start, "low")
            assert found.setdefault(rules.told(start), terms) == terms, gpu.name


@pytest.mark.parametrize("version", ["", "0.9", "0.17"])
@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3", "deepseek-v4-pro", "gemma-3-27b", "nemotron-h-47b"])
def test_stages_that_vllm_does_not_tell_apart_differ_in_their_weights_alone(version: str, model: str) -> None:
    """Over all stages of 1 to 9: with `weights` of its own the terms of another stage are a stage's own."""
    base, options = Deployment(load_model(model), load_gpu("h200")), FitOptions(engine="vllm", engine_version=version)
    rules = ENGINES["vllm"]
    assert rules.aside
    found: dict[object, Terms] = {}
    for pp in range(1, 10):
        run, release, _ = started(msgspec.structs.replace(base, parallelism=Parallelism(tp=4, pp=pp)), options)
        request = request_of(run, options, "auto", release)
        for stage in range(pp):
            start = request.start(stage, 64)
            terms = rules.memory(start, "low")
            alike = found.setdefault(rules.aside(start), terms)
            assert alike._replace(**rules.weights(start)._asdict()) == terms
    assert len(found) < 45


def test_a_gpu_without_a_link_is_left_out_of_prompts_apart_alone() -> None:
    """A Mac gives no link: it stands with prompts and decodes together under every length, and is named once."""
    needs = [Need(rate=0.1, input_len=length, output_len=20) for length in (500, 900)]
    gpus = tuple(load_gpu(name) for name in ("h100", "apple-m4-max"))
    space = Space(models=(load_model("llama-3.2-1b"),), gpus=gpus, max_gpus=2, tp=(1,), pp=(1,), disaggregate=(False, True))
    grid = Grid(needs, space)
    found = [(b.deployment.gpu.name, b.need.input_len, bool(b.prefill.any())) for b in grid.blocks()]
    assert sorted(found) == [
        ("apple-m4-max", 500, False),
        ("apple-m4-max", 900, False),
        *(("h100-sxm", length, apart) for length in (500, 900) for apart in (False, True)),
    ]
    assert "apple-m4-max: prompts not apart, as no rate of a link to another replica is known" in grid.remarks
