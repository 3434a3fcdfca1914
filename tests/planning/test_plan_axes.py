"""Speculation and prompts on replicas of their own: axes of a plan, each what the commands say of one deployment."""

import math

import msgspec
import pytest
from conftest import Run

from kvcalc import fit, load_gpu, load_model
from kvcalc.planning.block import MEMORY, Block
from kvcalc.planning.grid import Grid
from kvcalc.planning.need import Need
from kvcalc.planning.space import Space, Speculated
from kvcalc.serving.latency import request
from kvcalc.serving.request_record import LatencyOptions, latency_record


def blocks(need: Need, model: str, gpu: str, **axes: object) -> list[Block]:
    sizes = {"tp": (8,), "pp": (1,), "dp": (1,), "ep": (1,), "max_gpus": 64}
    space = Space(models=(load_model(model),), gpus=(load_gpu(gpu),), **sizes | axes)  # type: ignore[arg-type]
    return [*Grid([need], space).blocks()]


@pytest.mark.parametrize(("gpu", "most"), [("l40s", 8), ("h100-pcie", 8), ("a100-80gb", 8), ("gb200", 64)])
def test_matrices_are_cut_over_one_server(gpu: str, most: int) -> None:
    """Of 8 GPUs where nothing is said of its links, or they join two; of a rack of 72 those that divide 64 heads."""
    space = Space(models=(load_model("llama-3.1-70b"),), gpus=(load_gpu(gpu),), max_gpus=128, pp=(1,))
    splits = [r.tp for r in space.splits(space.models[0]) if space.takes(space.gpus[0], r)]
    assert max(splits) == most


@pytest.mark.parametrize(
    ("model", "draft"), [("llama-3.3-70b", "llama-3.2-1b"), ("deepseek-v3", "mtp"), ("llama-3.3-70b", "layers=4")]
)
@pytest.mark.parametrize("gpu", ["h200", "mi300x"])
def test_a_draft_s_tpot_is_latency_s_and_what_fits_is_fit_s(model: str, draft: str, gpu: str) -> None:
    for need in (Need(users=48, context=9001), Need(users=48, input_len=3000, output_len=301)):
        (block,) = blocks(need, model, gpu, drafts=(Speculated(draft, 3, 0.7),))
        lengths = (need.input_len, need.output_len) if need.output_len else (need.context - 1, 2)
        options = (
            block.speculated.options(block.deployment.model, Space(models=(), gpus=()).options_of(need))
            if block.speculated
            else None
        )
        for at in (0, len(block.counts) - 1):
            count = int(block.counts[at])
            asked = LatencyOptions(*lengths, count, draft=draft, num_speculative_tokens=3, acceptance_rate=0.7)
            assert block.tpot[at] == latency_record(block.deployment, asked)["speculative_tpot_s"]
            assert options
            assert block.capacity[at] == fit(block.deployment, msgspec.structs.replace(options, max_num_seqs=count)).capacity


def test_prompts_apart_take_replicas_of_their_own_and_one_trip_over_the_link() -> None:
    need = Need(rate=20.0, input_len=4000, output_len=101)
    together, apart = blocks(need, "llama-3.3-70b", "h200", disaggregate=(False, True))
    assert not together.prefill.any()
    deployment, at = apart.deployment, 5
    count = int(apart.counts[at])
    assert apart.failing[at] != MEMORY
    alone, whole = request(deployment, 4000, 1, 1), request(deployment, 4000, 101, count)
    assert alone.ttft_s
    assert whole.tpot_s
    gpu = deployment.gpu
    assert gpu.link_bytes_per_s
    sent = 4000 * 80 * 2 * 128 * 2 / gpu.link_bytes_per_s  # tokens, layers, keys and values, one KV head of eight on a GPU, bf16
    assert apart.ttft == pytest.approx(alone.ttft_s + sent, rel=1e-12)
    carried = count / (100 * whole.tpot_s)
    assert apart.replicas[at] == math.ceil(20 / carried)
    assert apart.prefill[at] == math.ceil(20 * alone.ttft_s)
    assert apart.gpus[at] == 8 * (apart.replicas[at] + apart.prefill[at])


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
        (
            "--context 4k --num-speculative-tokens 2",
            "num-speculative-tokens and acceptance-rate are of a draft, and there is none",
        ),
        ("--context 4k --disaggregate", "prompts apart from decodes take answers of 2 tokens or more"),
        ("--context 4k --draft mtp --num-speculative-tokens 2", "llama-3.3-70b has no multi-token-prediction layers"),
        ("--context 4k --draft qwen3-0.6b --num-speculative-tokens 2", "a draft proposes the model's own tokens, and qwen3-0.6b"),
        ("--context 4k --engine vllm,sglang", "a plan takes one engine, not vllm,sglang. `kvcalc fit` takes a list"),
        ("--context 4k --stack vllm,sglang", "a plan takes one stack, not vllm,sglang. `kvcalc latency` takes a list"),
        ("--context 4k --draft layers=99 --num-speculative-tokens 2", "draft layers=99: llama-3.3-70b has 80 layers to take"),
    ):
        answered = kvcalc(f"{words} {refused}")
        assert (answered.code, answered.out) == (2, "")
        assert answered.err.startswith(f"kvcalc: {message}")


def test_splits_left_out_for_the_same_reason_are_one_note(kvcalc: Run) -> None:
    """Of 1 to 6 stages over two nodes those of 3 and 5 do not divide."""
    found = kvcalc("plan llama-3.1-8b --gpu h100 --users 1 --context 4k --tp 1 --max-gpus 6 --nodes 2")
    assert "note: 1 GPUs do not divide over 2 nodes (and 2 more like this)" in found.err.splitlines()
