"""What vLLM's own documentation says of large models: deployments that it gives are feasible, those that it rules out are not.

Each at the longest context that the model is made for, and one user. Read on 2026-11-22 in github.com/vllm-project/recipes
(DeepSeek/DeepSeek-V3.md, OpenAI/GPT-OSS.md, moonshotai/Kimi-K2.md, Qwen/Qwen3.md) and docs.vllm.ai (parallelism_scaling): a
model too large for a server takes tp over its GPUs and pp over servers.
"""

import pytest

from kvcalc import FitOptions, load_gpu, load_model
from kvcalc.model.precision import Precision
from kvcalc.planning.best import Tally
from kvcalc.planning.grid import MEMORY, Grid
from kvcalc.planning.need import Need
from kvcalc.planning.space import Space

FLAGS = FitOptions(engine="vllm", gpu_memory_utilization=0.95, max_num_batched_tokens=1024)
USUAL = FitOptions(engine="vllm")
H100_8, H100_16, H200_8, H200_16 = ("h100", 8), ("h100", 16), ("h200", 8), ("h200", 16)


@pytest.mark.parametrize(
    ("model", "where", "quantization", "options", "feasible"),
    [
        ("deepseek-v3", H200_8, "", USUAL, True),
        ("deepseek-v3", H100_8, "", USUAL, False),
        ("deepseek-v3", H100_16, "", USUAL, True),
        ("llama-3.1-405b", H100_8, "fp8", USUAL, True),
        ("llama-3.1-405b", H100_8, "", USUAL, False),
        ("gpt-oss-120b", ("h100", 1), "", FLAGS, True),
        ("gpt-oss-120b", ("h100", 1), "", USUAL, False),
        ("qwen3-235b-a22b", H100_8, "", USUAL, True),
        ("qwen3-235b-a22b", ("h100", 4), "", USUAL, False),
        ("kimi-k2", H200_16, "", USUAL, True),
        ("kimi-k2", H200_8, "", USUAL, False),
    ],
)
def test_recipes(model: str, where: tuple[str, int], quantization: str, options: FitOptions, feasible: bool) -> None:
    """Over every number of GPUs up to those of the recipe, and servers of eight where it takes more."""
    gpu, gpus = where
    known = load_model(model)
    assert known.max_context
    need = Need(users=1, context=known.max_context)
    space = Space(
        models=(known,), gpus=(load_gpu(gpu),), max_gpus=gpus, options=options,
        precisions=(Precision(quantization=quantization),),
        tp=(min(8, gpus),), pp=tuple({1, max(1, gpus // 8)}), dp=(1,),
    )  # fmt: skip
    tally = Tally(need, gpus, {})
    for block in Grid([need], space).blocks():
        tally.take(block)
        assert ((block.failing == MEMORY) | (block.capacity >= 1)).all()
    assert bool(tally.answer().best) is feasible
