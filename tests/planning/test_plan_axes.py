"""Speculation and disaggregated prefill in a plan: each equals the answers of the commands for one deployment."""

import math

import pytest
from conftest import Run

from kvcalc import FitOptions, load_gpu, load_model
from kvcalc.capacity import fit
from kvcalc.planning.grid import Candidate, SearchGrid, Target
from kvcalc.planning.search_space import SearchSpace, Speculation
from kvcalc.question.plan_options import Requirement
from kvcalc.question.serving_options import LatencyOptions
from kvcalc.serving.request_latency import latency_records, request


def candidates(need: Requirement, model: str, gpu: str, **axes: object) -> list[Candidate]:
    sizes = {"tp": (8,), "pp": (1,), "dp": (1,), "ep": (1,), "max_gpus": 64}
    space = SearchSpace(models=(load_model(model),), gpus=(load_gpu(gpu),), **sizes | axes)  # type: ignore[arg-type]
    return [one for batch in SearchGrid([need], space).batches() for one in batch.candidates()]


@pytest.mark.parametrize(("gpu", "most"), [("l40s", 8), ("h100-pcie", 8), ("a100-80gb", 8), ("gb200", 64), ("apple-m3-ultra", 1)])
def test_matrices_are_cut_over_one_server(gpu: str, most: int) -> None:
    """Up to 8 GPUs if the preset names no link or a link of two. In a rack of 72, the sizes that divide 64 heads."""
    engine = FitOptions(engine="llama.cpp" if "apple" in gpu else "vllm")
    space = SearchSpace(models=(load_model("llama-3.1-70b"),), gpus=(load_gpu(gpu),), max_gpus=128, pp=(1,), options=engine)
    splits = [r.tp for r in space.splits(space.models[0]) if space.includes(space.gpus[0], r)]
    assert max(splits) == most


@pytest.mark.parametrize(
    ("model", "draft"), [("llama-3.3-70b", "llama-3.2-1b"), ("deepseek-v3", "mtp"), ("llama-3.3-70b", "layers=4")]
)
@pytest.mark.parametrize("gpu", ["h200", "mi300x"])
def test_a_draft_s_tpot_is_latency_s_and_what_fits_is_fit_s(model: str, draft: str, gpu: str) -> None:
    speculation = Speculation(draft, 3, 0.7)
    for need in (Requirement(users=48, context=9001), Requirement(users=1, input_len=3000, output_len=301)):
        every = candidates(need, model, gpu, drafts=(speculation,))
        lengths = (need.input_len, need.output_len) if need.output_len else (need.context - 1, 2)
        for one in (every[0], every[-1]):
            asked = LatencyOptions(*lengths, one.max_num_seqs, draft=draft, num_speculative_tokens=3, acceptance_rate=0.7)
            assert one.tpot == pytest.approx(latency_records([(one.deployment, asked)])[0]["speculative_tpot_s"], rel=1e-12)
            options = SearchSpace(models=(), gpus=()).fit_options(need, one.max_num_seqs)
            assert one.capacity == fit(one.deployment, speculation.options(one.deployment.model, options)).capacity


def test_prompts_apart_take_replicas_of_their_own_and_one_trip_over_the_link() -> None:
    need = Requirement(rate=20.0, input_len=4000, output_len=101)
    every = candidates(need, "llama-3.3-70b", "h200", disaggregate=(False, True))
    assert not any(one.prefill_replicas for one in every[: len(every) // 2])
    one = every[len(every) // 2 + 5]
    assert one.violated_target != Target.MEMORY
    prompt, whole = request(one.deployment, 4000, 1, 1), request(one.deployment, 4000, 101, one.max_num_seqs)
    rate = one.deployment.gpu.link_bytes_per_s
    assert prompt.ttft_s and whole.tpot_s and rate
    sent = 4000 * 80 * 2 * 128 * 2 / rate  # tokens, layers, keys and values, one KV head of eight on a GPU, bf16
    assert one.ttft == pytest.approx(prompt.ttft_s + sent, rel=1e-12)
    assert one.replicas == math.ceil(20 / (one.max_num_seqs / (100 * whole.tpot_s)))
    assert one.prefill_replicas == math.ceil(20 * prompt.ttft_s)
    assert one.gpus == 8 * (one.replicas + one.prefill_replicas)


def test_axes_stand_in_the_table_and_have_their_refusals(kvcalc: Run) -> None:
    words = "plan llama-3.3-70b --gpu h100 --tp 4 --pp 1 --max-gpus 8 --users 8"
    found = kvcalc(f"{words} --context 8k --draft none,llama-3.2-1b --num-speculative-tokens 4 --format json").records
    assert {(r["draft"], r["num_speculative_tokens"], r["acceptance_rate"]) for r in found} == {
        ("llama-3.2-1b", 4, 0.8),
        (None, None, None),
    }
    assert "speculative" in next(r["command"] for r in found if r["draft"])
    found = kvcalc(f"{words} --isl 4k --osl 200 --disaggregate --format json").records
    assert {r["prefill_replicas"] for r in found} == {0, 1}
    for refused, message in (
        ("--context 4k --draft mtp", "a draft needs num-speculative-tokens"),
        ("--context 4k --disaggregate", "disaggregated prefill needs answers of 2 tokens or more"),
        ("--context 4k --draft mtp --num-speculative-tokens 2", "llama-3.3-70b has no multi-token-prediction layers"),
        ("--context 4k --engine vllm,sglang", "a plan takes one engine, not vllm,sglang. `kvcalc fit` takes a list"),
    ):
        answered = kvcalc(f"{words} {refused}")
        assert (answered.code, answered.out) == (2, "")
        assert answered.err.startswith(f"kvcalc: {message}")
