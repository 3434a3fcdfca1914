"""Configs of a few fields, and what transformers 5.23 itself says of the models that they describe.

Parameters: of the causal language model, built on torch's `meta` device. Cache: the tensors that a forward pass leaves, two
bytes an element, at (sequences, tokens). In brackets behind a case, where the reference code holds something else than an
engine needs, which these figures put right: `window_minus_1` (a full window there lacks one token), `conv_state_full_kernel`
(a convolution keeps kernel − 1 columns), `fp32_state` (recurrent states are float32: four bytes), `broadcast_kv_heads`.
"""

from typing import Any, NamedTuple

from kvcalc import Model, Precision, cache_size
from kvcalc.library.huggingface import model_from

BF16 = Precision(dtype="bf16", kv_cache_dtype="bf16")


class Case(NamedTuple):
    config: dict[str, Any]
    parameters: int
    cache: dict[tuple[int, int], int]  # (sequences, tokens) → bytes
    active_parameters: int | None = 0  # the same as `parameters` where 0; not compared where None


def check(case: Case) -> Model:
    """Read the config and compare; the model, for what else a test wants to see."""
    model = model_from(case.config, "config.json", "model")
    assert model.parameters == case.parameters
    if case.active_parameters is not None:
        assert model.active_parameters == (case.active_parameters or case.parameters)
    found = {(batch, tokens): cache_size(model, tokens, batch, BF16).stored for batch, tokens in case.cache}
    assert found == case.cache
    return model
