"""Mamba's own configs, which name no type: parameters by hand, and as transformers' copies of the checkpoints have them."""

from typing import Any

import pytest
from huggingface_cases import BF16

from kvcalc import UserError, cache_size
from kvcalc.library.huggingface import model_from

OWN = {"ssm_cfg": {}, "rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True, "pad_vocab_size_multiple": 8}


@pytest.mark.parametrize(("width", "layers", "parameters"), [(768, 24, 129_135_360), (2560, 64, 2_768_345_600)])
def test_mamba_as_its_authors_released_it(width: int, layers: int, parameters: int) -> None:
    """Inside 2D: in [D, 4D], conv 4 + 1, x [2D, r + 32], dt [r, 2D] + 2D with r = D/16, A of 16 and a D each, out, a norm."""
    inner, rank = 2 * width, -(-width // 16)
    block = (
        width * 2 * inner + 5 * inner + inner * (rank + 32) + rank * inner + inner + 16 * inner + inner + inner * width + width
    )
    model = model_from(OWN | {"d_model": width, "n_layer": layers, "vocab_size": 50277}, "config.json", "x")
    assert model.parameters == layers * block + 50280 * width + width == parameters
    assert model.parameters_exact
    state = layers * inner * (16 * 4 + 3 * 2)
    assert cache_size(model, 9, precision=BF16).stored == cache_size(model, 900, precision=BF16).stored == state


@pytest.mark.parametrize(("width", "layers", "parameters"), [(768, 24, 128_989_632), (2560, 64, 2_702_599_680)])
def test_mamba_2_as_its_authors_released_it(width: int, layers: int, parameters: int) -> None:
    """in [D, 2·2D + 2·128 + heads], conv 4 + 1 over 2D + 256 channels, three numbers a head, a norm inside, out, a norm."""
    inner, heads = 2 * width, 2 * width // 64
    block = width * (2 * inner + 256 + heads) + 5 * (inner + 256) + 3 * heads + inner + inner * width + width
    keys = {"d_model": width, "n_layer": layers, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"}, "attn_layer_idx": []}
    model = model_from(OWN | keys | {"pad_vocab_size_multiple": 16}, "config.json", "x")
    assert model.parameters == layers * block + 50288 * width + width == parameters
    assert model.parameters_exact


@pytest.mark.parametrize(
    "keys", [{"ssm_cfg": {"d_state": 64}}, {"attn_layer_idx": [1]}, {"d_intermediate": 128}, {"ssm_cfg": "x"}, {"d_model": "a"}]
)
def test_other_configs_of_mambas_own_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="blocks alone, with their defaults"):
        model_from(OWN | {"d_model": 64, "n_layer": 2, "vocab_size": 100} | keys, "config.json", "x")
