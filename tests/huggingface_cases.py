"""Small configs and the figures of transformers for their models, from `huggingface_cases.yaml`."""

from pathlib import Path
from typing import Any, NamedTuple

from kvcalc import Model, Precision, cache_size
from kvcalc.library.files import parse_yaml
from kvcalc.library.huggingface import model_from

BF16 = Precision(dtype="bf16", kv_cache_dtype="bf16")


class Case(NamedTuple):
    config: dict[str, Any]
    parameters: int
    cache: dict[tuple[int, int], int]  # (sequences, tokens) → bytes
    active_parameters: int | None = 0  # the same as `parameters` where 0; not compared where None


def check(case: Case) -> Model:
    """Read a config, compare its figures, and return the model for further checks."""
    model = model_from(case.config, "config.json", "model")
    assert model.parameters == case.parameters
    if case.active_parameters is not None:
        assert model.active_parameters == (case.active_parameters or case.parameters)
    found = {(batch, tokens): cache_size(model, tokens, batch, BF16).stored for batch, tokens in case.cache}
    assert found == case.cache
    return model


def read_cases() -> dict[str, Case]:
    path = Path(__file__).with_suffix(".yaml")
    cases = {}
    for name, case in parse_yaml(path.read_text(encoding="utf-8"), path.name)[0].items():
        cache = {(batch, tokens): stored for batch, tokens, stored in case["cache"]}
        cases[name] = Case(case["config"], case["parameters"], cache, case.get("active", 0))
    return cases


CASES = read_cases()
