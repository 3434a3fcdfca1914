"""Parameters and cache bytes of configs equal transformers' models."""

import json
from pathlib import Path

import pytest
from huggingface_cases import BF16, CASES, check

from kvcalc import UserError, cache_size
from kvcalc.library.huggingface import model_from


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_cache_are_those_of_transformers(name: str) -> None:
    check(CASES[name])


# Every causal-LM type by its class defaults. tests/oracle writes the figures.
FIGURES = json.loads((Path(__file__).parent / "oracle" / "figures.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("model_type", FIGURES)
def test_class_defaults_are_those_of_transformers(model_type: str) -> None:
    figures = FIGURES[model_type]
    model = model_from({"model_type": model_type} | figures["keys"], "config.json", model_type)
    assert model.parameters == figures["parameters"]
    assert {n: cache_size(model, int(n), precision=BF16).stored for n in figures["cache"]} == figures["cache"]


ZAMBA2 = CASES["zamba2"]


def test_zamba2_heads_come_from_their_width_where_a_file_gives_no_number() -> None:
    """Older files of Zamba2-2.7B have only mamba_headdim 64. Newer files add n_mamba_heads 80 = 2·2560 / 64."""
    old = {**ZAMBA2.config, "mamba_headdim": 64}
    counts = [model_from(file, "config.json", "model").parameters for file in (old, {**old, "n_mamba_heads": 80})]
    per_head = 2560 + 3  # a row of dt's projection; A, D and dt's bias
    assert counts == [ZAMBA2.parameters + 54 * (80 - 8) * per_head] * 2
    per_width = [model_from({**ZAMBA2.config, **k}, "c", "m").parameters for k in ({}, {"mamba_headdim": 64, "n_mamba_heads": 8})]
    assert per_width[0] == per_width[1]  # transformers derives the width from the number, which the file gives
    with pytest.raises(UserError, match="mamba_headdim"):
        model_from({**ZAMBA2.config, "mamba_headdim": 8192}, "c", "m")


def test_modernberts_window_is_half_of_its_local_attention_unless_given() -> None:
    """Two layers of 4 heads of 16, the first without a window: 100 tokens and 16, or 64 if the file states it."""
    sizes = {"model_type": "modernbert-decoder", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 96, "vocab_size": 1000, "local_attention": 32}
    row = 2 * 2 * 64
    for keys, window in (({}, 16), ({"sliding_window": 64}, 64)):
        assert cache_size(model_from(sizes | keys, "c", "x"), 100, precision=BF16).stored == (100 + window) * row
