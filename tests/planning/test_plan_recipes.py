"""Deployments of large models in vLLM's documentation are feasible, and deployments that it excludes are not.

Each has the model's longest context and one user. Read on 2026-11-22 in github.com/vllm-project/recipes
(DeepSeek/DeepSeek-V3.md, OpenAI/GPT-OSS.md, moonshotai/Kimi-K2.md, Qwen/Qwen3.md: 4 MI300X) and docs.vllm.ai
(parallelism_scaling): a model that is too large for a server uses tp over the GPUs of a server and pp over
servers. Llama-3.1-405B as in blog.vllm.ai/2024/07/23/llama31.html: fp8 on 8 A100 or H100, bf16 on one server
of 8 MI300X or H200 and on several servers of other GPUs. Qwen3-235B on H100 as GPUStack ran vLLM 0.11
(github.com/gpustack/gpustack, docs/performance-lab/qwen3-235b-a22b/h100.md).
"""

import pytest

from kvcalc import FitOptions, load_gpu, load_model
from kvcalc.model.precision import Precision
from kvcalc.planning.best_configs import CandidateRanking
from kvcalc.planning.grid import SearchGrid, Target
from kvcalc.planning.search_space import SearchSpace
from kvcalc.question.plan_options import Requirement

FLAGS = FitOptions(engine="vllm", gpu_memory_utilization=0.95, max_num_batched_tokens=1024)
USUAL = FitOptions(engine="vllm")
ROCM = FitOptions(engine="vllm", gpu_memory_utilization=0.8, max_num_batched_tokens=32_768)
LARGER_PASSES = FitOptions(engine="vllm", engine_version="0.11", max_num_batched_tokens=16_384)
H100_8, H100_16, H200_8, H200_16 = ("h100", 8), ("h100", 16), ("h200", 8), ("h200", 16)


@pytest.mark.parametrize(
    ("model", "where", "quantization", "options", "feasible"),
    [
        ("deepseek-v3", H200_8, "", USUAL, True),
        ("deepseek-v3", H100_8, "", USUAL, False),
        ("deepseek-v3", H100_16, "", USUAL, True),
        ("llama-3.1-405b", H100_8, "fp8", USUAL, True),
        ("llama-3.1-405b", ("a100-80gb", 8), "fp8", USUAL, True),
        ("llama-3.1-405b", H100_8, "", USUAL, False),
        ("llama-3.1-405b", H200_8, "", USUAL, True),
        ("llama-3.1-405b", ("mi300x", 8), "", USUAL, True),
        ("gpt-oss-120b", ("h100", 1), "", FLAGS, True),
        ("gpt-oss-120b", ("h100", 1), "", USUAL, False),
        ("qwen3-235b-a22b", H100_8, "", USUAL, True),
        ("qwen3-235b-a22b", ("h100", 4), "", USUAL, False),
        ("qwen3-235b-a22b", ("h100", 4), "fp8", LARGER_PASSES, True),
        ("qwen3-235b-a22b", ("mi300x", 4), "", ROCM, True),
        ("kimi-k2", H200_16, "", USUAL, True),
        ("kimi-k2", H200_8, "", USUAL, False),
    ],
)
def test_recipes(model: str, where: tuple[str, int], quantization: str, options: FitOptions, feasible: bool) -> None:
    """The plan covers every number of GPUs up to the number in the recipe, in servers of eight if the recipe uses more."""
    gpu, gpus = where
    known = load_model(model)
    assert known.max_context
    need = Requirement(users=1, context=known.max_context)
    space = SearchSpace(
        models=(known,), gpus=(load_gpu(gpu),), max_gpus=gpus, options=options,
        precisions=(Precision(quantization=quantization),),
        tp=(min(8, gpus),), pp=tuple({1, max(1, gpus // 8)}), dp=(1,),
    )  # fmt: skip
    ranking = CandidateRanking(need, space)
    for batch in SearchGrid([need], space).batches():
        ranking.add(batch)
        lacks_memory = batch.figures["violated_target"] == Target.MEMORY
        assert (lacks_memory | (batch.figures["capacity"] >= 1)).all()
    assert bool(ranking.result().best) is feasible
