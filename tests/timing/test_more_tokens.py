"""A pass over more tokens never takes less time, on every GPU under every stack."""

import json

import msgspec
import numpy as np
import pytest
from conftest import Run

from kvcalc.layers.batch import Batch, Parallelism
from kvcalc.library import presets
from kvcalc.library.load import load_gpu, load_model
from kvcalc.model.precision import Precision
from kvcalc.timing.calibration import all_stacks, load_calibration, stacks_of
from kvcalc.timing.deployment import TimedDeployment

GPUS = [name for name in presets.preset_files("gpus") if stacks_of(load_gpu(name))]
CALIBRATIONS = [(gpu, stack) for gpu in GPUS for stack in stacks_of(load_gpu(gpu))]
# Name, ranks, weights and cache: MHA, GQA of 4, 5 and 8 query heads a group, windows, experts.
MODELS = [
    ("gpt2", 1, "", "auto"), ("llama-3.1-8b", 1, "", "auto"), ("llama-3.1-8b", 1, "fp8", "fp8"),
    ("llama-3.1-70b", 8, "fp8", "auto"), ("qwen3-14b", 1, "", "auto"), ("gemma-3-27b", 1, "", "auto"),
    ("qwen3-30b-a3b", 1, "", "auto"), ("gpt-oss-120b", 2, "", "auto"),
]  # fmt: skip
# All to 200; then what tiles end at, and the next number.
TOKENS = np.unique([*range(1, 201), *(n + more for n in range(192, 4096, 32) for more in (0, 1)), 4096]).astype(float)


def test_every_calibration_is_here() -> None:
    assert {stack for _, stack in CALIBRATIONS} == set(all_stacks())
    assert len(CALIBRATIONS) > 20


def deployment(gpu: str, stack: str, name: str, tp: int, quantization: str, cache: str) -> TimedDeployment:
    card, precision = load_gpu(gpu), Precision(quantization=quantization, kv_cache_dtype=cache)
    plain = TimedDeployment(load_model(name), card, precision, Parallelism(tp=tp))
    return msgspec.structs.replace(plain, calibration=load_calibration(card, stack))


@pytest.mark.slow
@pytest.mark.parametrize(("gpu", "stack"), CALIBRATIONS)
def test_more_new_tokens_never_take_less_time(gpu: str, stack: str) -> None:
    """1 to 4,096 new tokens after zero, some and many cached tokens, across the boundary between decode and prefill kernels.

    Without a cache, each step is a pass over all tokens. It is never faster than a decode step of the last token.
    """
    for name, *how in MODELS:
        timed = deployment(gpu, stack, name, *how)
        step = np.asarray(timed.seconds(Batch.decode(TOKENS)))
        for past, batch in ((0, 1), (2000, 1), (37, 5)):
            seconds = np.asarray(timed.seconds(Batch.prefill(TOKENS, batch, past)))
            fewer = np.maximum.accumulate(seconds)[:-1]
            assert (seconds[1:] >= fewer * (1 - 1e-12)).all(), (name, past, batch, int(np.argmin(seconds[1:] / fewer)) + 1)
            assert past or (seconds >= step * (1 - 1e-6)).all(), (name, int(np.argmin(seconds / step)) + 1)


@pytest.mark.parametrize("gpu", GPUS)
def test_no_cache_never_pays_off(kvcalc: Run, gpu: str) -> None:
    code, out, _ = kvcalc(f"latency gpt2 --input-len 5 --output-len 100 --no-cache --gpu {gpu} --format json")
    assert code == 0
    assert json.loads(out)[0]["speedup"] >= 1
