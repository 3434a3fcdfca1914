"""vLLM's slots for LoRA adapters: by hand, and compared with a published start."""

import pytest
from test_fit_vllm import GIB, asked, small

from kvcalc import load_model


def test_slots_of_adapters() -> None:
    """4 layers: q 64 → 128, k and v 64 → 32, o 128 → 64, gate and up 64 → 128, down 128 → 64; 3 slots of rank 16, 2 bytes."""
    widths = 2 * 192 + 2 * 96 + 3 * 192
    assert asked(small(), max_loras=3).terms.extra["LoRA slots"] == 2 * 3 * 16 * 4 * widths
    assert asked(small(), max_loras=3, max_lora_rank=64).terms.extra["LoRA slots"] == 2 * 3 * 64 * 4 * widths


def test_adapters_of_a_published_start() -> None:
    """One slot of rank 32 with Qwen3-8B in fp8: "Model loading took 8.9638 GiB" in 0.10.2 on an L4."""
    options = {"max_loras": 1, "max_lora_rank": 32, "max_model_len": 2048, "max_num_seqs": 224}
    found = asked("qwen3-8b", "l4", "0.10.2", weights="fp8_block128", **options)
    assert found.budget.weights / GIB == pytest.approx(8.9638, abs=0.001)


def test_adapters_of_tables() -> None:
    """Llama's token table and head have slots, Qwen3's from 0.22 on: slots · rank · (V + D) elements of two bytes each."""
    for model, versions in (("llama-3.1-8b", ("0.11", "0.33")), ("qwen3-8b", ("0.11", "0.22"))):
        spec = load_model(model)
        each = 2 * 2 * 16 * (spec.vocab_size + spec.hidden_size)
        old, new = (asked(spec, version=v, max_loras=2).terms.extra["LoRA slots"] for v in versions)
        layers = sum(
            2 * 2 * 16 * (w.inputs + w.outputs) * n for name, w, n in spec.walk() if w.kind.name == "MATRIX" and "." in name
        )
        assert new == layers + 2 * each
        assert old == (layers if model == "qwen3-8b" else new)
