"""Every causal-LM type of transformers by its class defaults: the parameters that transformers 5.23 itself counts.

The cache's bytes beside them were held against the cache that it leaves behind (tests/oracle, which writes the figures).
"""

import json
from pathlib import Path

import pytest
from huggingface_cases import BF16

from kvcalc import cache_size
from kvcalc.library.huggingface import model_from

FIGURES = json.loads((Path(__file__).parent / "oracle" / "figures.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("model_type", FIGURES)
def test_class_defaults_are_those_of_transformers(model_type: str) -> None:
    figures = FIGURES[model_type]
    model = model_from({"model_type": model_type} | figures["keys"], "config.json", model_type)
    assert model.parameters == figures["parameters"]
    assert {n: cache_size(model, int(n), precision=BF16).stored for n in figures["cache"]} == figures["cache"]
