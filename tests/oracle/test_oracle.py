"""Compare kvcalc with transformers for every causal-LM type of the installed transformers, with its class
defaults.

For maintainers: `pip install -e '.[oracle]' && pytest -m oracle`. A new type in a release of transformers
fails here until kvcalc/library/huggingface/types has an entry for it. `defaults.py` updates the class
defaults. `figures.py` updates the figures that the ordinary tests use.
"""

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from kvcalc import Model, Precision, UserError, cache_size
from kvcalc.library.huggingface import model_from

pytestmark = pytest.mark.oracle
BF16 = Precision(dtype="bf16", kv_cache_dtype="bf16")
# Types that kvcalc refuses: a byte-level model of several stacks, draft heads that live on another model's cache, and types
# that no inference server caches.
UNSUPPORTED = {"blt", "gemma4_assistant", "gemma4_unified_assistant", "biogpt", "cpmant", "ctrl", "prophetnet", "reformer"}
UNSUPPORTED |= {"rwkv", "xlm", "xlnet", "xlstm", "doge", "gpt_neox_japanese", "roc_bert", "xmod"}
# Types whose class names no language model that can be built alone, or whose reference code cannot run on `meta`.
UNMEASURABLE = {"musicgen", "musicgen_melody"}
# Reference code that goes token by token, or cannot take long prompts.
SHORT = {"falcon_mamba", "mamba", "jamba", "zamba", "recurrent_gemma", "qwen4_exp", "qwen4_exp_text"}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# Fields without which a type's class defaults are no model that transformers itself can build and run.
MISSING: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500_000.0}},
    "deepseek_v2": {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2, "first_k_dense_replace": 1},
    "granitemoehybrid": {"layer_types": [*["linear_attention"] * 31, "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
}
INDEXER = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048}
INDEXER |= {"indexer_compress_ratio": 16, "rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}
MISSING["qwen4_exp_text"] = INDEXER
MISSING["qwen4_exp"] = {"text_config": INDEXER}
FIGURES = json.loads((Path(__file__).parent / "figures.json").read_text(encoding="utf-8"))
# Reference code whose class hands back no cache, so that there is nothing to compare.
CACHELESS = {"openai-gpt", "flaubert"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "model_type" in metafunc.fixturenames:
        asked = metafunc.config.getoption("markexpr") == "oracle"  # any other run need not have transformers
        metafunc.parametrize("model_type", names() if asked else ["any"])


def names() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal

    return sorted(causal)


def default_config(model_type: str) -> dict[str, Any]:
    """Return the class's defaults as a config.json, with the keys that have no default."""
    from transformers import AutoConfig

    found = AutoConfig.for_model(model_type, **MISSING.get(model_type, {})).to_dict()
    config: dict[str, Any] = json.loads(json.dumps(found, default=str))
    return config


def lengths_of(model: Model, model_type: str) -> tuple[int, int]:
    """Return the tokens of a short prompt, and of a prompt that is longer than every window."""
    limits = sorted({e.limit for layer in model.kinds.values() for e in layer.entries if e.grows and 0 < e.limit <= 8192})
    return 17, 64 if model_type in SHORT else min(model.max_context or 8192, (limits[-1] if limits else 512) + 64)


def accepted(measured: Any, tokens: int) -> set[int]:
    """Return the bytes of the cache that count as correct, adjusted for differences between transformers and
    engines.

    In transformers, a full window lacks one token. A convolution stores `kernel` columns, of which kernel − 1
    are needed. Recurrent states are in float32, in the model's dtype, or in another dtype.
    """
    totals = set()
    for spare in (0, 1):
        for conv, state in ((c, s) for c in (2, 4) for s in (0, 2, 4)):
            totals.add(sum(layer_bytes(layer, tokens, measured.kernels, spare, conv, state) for layer in measured.caches[tokens]))
    return totals


def layer_bytes(layer: Any, tokens: int, kernels: set[int], spare: int, conv: int, state: int) -> int:
    total = 0
    for name, shape, dtype in layer.tensors:
        count, element = prod(shape), 2
        if name.startswith("conv_states"):
            element = conv
            count = count * (shape[-1] - 1) // shape[-1] if spare and shape[-1] in kernels else count
        elif name.startswith("recurrent_states") or name.split(".")[0].isdigit():
            element = state or dtype.itemsize
        elif name.startswith(("keys", "values")) and layer.window and shape[-2] + 1 == layer.window < tokens + 1:
            count += count // shape[-2]
        total += element * count
    return total


def test_parameters_and_cache(model_type: str) -> None:
    from measure import measure

    if model_type in UNSUPPORTED:
        with pytest.raises(UserError, match="is not supported"):
            model_from({"model_type": model_type, "hidden_size": 64, "num_hidden_layers": 2}, "f.json", "x")
        return
    if model_type in UNMEASURABLE:
        return
    config = default_config(model_type)
    model = model_from(config, "config.json", model_type)
    lengths = lengths_of(model, model_type)
    measured = measure(config, lengths)
    assert model.parameters == measured.parameters == FIGURES[model_type]["parameters"]
    assert {str(n): cache_size(model, n, precision=BF16).stored for n in lengths} == FIGURES[model_type]["cache"]
    if model_type in CACHELESS:
        return
    if measured.repeated:  # keys are stored as values too: the slope tells
        near, far = (min(accepted(measured, n)) for n in lengths)
        ours = [cache_size(model, n, precision=BF16).stored for n in lengths]
        assert ours[1] - ours[0] <= far - near
        return
    for tokens in lengths:
        assert cache_size(model, tokens, precision=BF16).stored in accepted(measured, tokens), tokens


def test_defaults_are_those_of_the_installed_transformers() -> None:
    from defaults import FILE, table

    assert json.loads(Path(FILE).read_text(encoding="utf-8")) == table(), "run tests/oracle/defaults.py"
