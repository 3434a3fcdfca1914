"""Layers for which llama.cpp stores other rows than the model's own code, compared with the cache sizes that a build prints."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from gguf_files import F16, F32, Tensors, write

from kvcalc import Deployment, Model, Precision, UserError, load_gpu, load_model
from kvcalc.capacity import FitOptions, fit
from kvcalc.capacity.fit_records import fit_record
from kvcalc.library.huggingface import model_from

H100 = load_gpu("h100")
MIB = 2**20
SIZES: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "num_hidden_layers": 4, "vocab_size": 1000, "torch_dtype": "bfloat16",
}  # fmt: skip
MINICPM3 = SIZES | {
    "model_type": "minicpm3", "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
LLAMA4 = SIZES | {"model_type": "llama4_text", "num_local_experts": 4, "intermediate_size_mlp": 512, "attention_chunk_size": 512}
GEMMA3 = SIZES | {"model_type": "gemma3_text", "sliding_window": 512}
EXAONE4 = SIZES | {"model_type": "exaone4", "sliding_window": 512, "sliding_window_pattern": 4}


def read(config: dict[str, Any]) -> Model:
    return model_from(config, "config.json", "model")


def record(model: Model, engine: str = "llama.cpp", dtype: str = "auto", **options: Any) -> dict[str, Any]:
    return fit_record(fit(Deployment(model, H100, Precision(kv_cache_dtype=dtype)), FitOptions(engine=engine, **options)))


def allocated(model: Model, tokens: int, sequences: int = 1, **options: Any) -> float:
    """Return the MiB of the cells."""
    return record(model, max_model_len=tokens, max_num_seqs=sequences, **options)["kv_cache_allocated_bytes"] / MIB


def test_minicpm3_keeps_keys_and_values_of_every_head() -> None:
    """A build prints "16.00 MiB (4096 cells, 4 layers)", 158.00 for two sequences of 20,000, and 8.50 in q8_0: 4 heads · (64
    + 64) elements."""
    model = read(MINICPM3)
    assert allocated(model, 4000) == 16
    assert allocated(model, 20_000, 2) == 158
    assert allocated(model, 4096, dtype="q8_0") == 8.5
    assert "keys and values of every head" in " ".join(fit(Deployment(model, H100), FitOptions(engine="llama.cpp")).notes)


def test_minicpm3_with_other_values_is_not_loaded() -> None:
    """Its files do not state the width of the values. A build prints "attn_kv_b.weight has wrong shape", because it assumes
    hidden_size / heads."""
    with pytest.raises(UserError, match=r"loads no minicpm3 with values of 32.*hidden_size / heads, 64"):
        record(read(MINICPM3 | {"v_head_dim": 32}), max_model_len=4096)


def test_plm_keeps_keys_and_values_of_every_head() -> None:
    """A build prints, before its graph fails, "12.00 MiB (4096 cells, 4 layers)" and 48.00 for four sequences: 4 heads · (64
    + 32) elements."""
    model = read(MINICPM3 | {"model_type": "plm", "q_lora_rank": None, "v_head_dim": 32})
    assert (allocated(model, 4000), allocated(model, 4000, 4)) == (12, 48)


def test_minicpm3_under_vllm() -> None:
    """MiniCPM3Attention: num_kv_heads = num_local_heads, values padded to 64 + 32. Blocks of 16 · 4 layers · 2 · 4 · 96 · 2 B."""
    model = read(MINICPM3 | {"qk_nope_head_dim": 64})
    assert record(model, "vllm", max_model_len=4096)["bytes_per_block"] == 16 * 4 * 2 * 4 * 96 * 2


def test_a_file_with_kv_up_in_one_tensor(tmp_path: Path) -> None:
    """DeepSeek-V2-Lite as GGUF before llama.cpp stored latents: 16 heads of 128 + 64 and 128, 16,384 cells, log 4.22 GiB."""
    layer: Tensors = {
        "attn_norm.weight": ((2048,), F32), "attn_q.weight": ((2048, 16 * 192), F16), "attn_kv_a_norm.weight": ((512,), F32),
        "attn_kv_a_mqa.weight": ((2048, 576), F16), "attn_kv_b.weight": ((512, 16 * 256), F16), "ffn_norm.weight": ((2048,), F32),
        "attn_output.weight": ((2048, 2048), F16), "ffn_up.weight": ((2048, 10944), F16), "ffn_gate.weight": ((2048, 10944), F16),
        "ffn_down.weight": ((10944, 2048), F16),
    }  # fmt: skip
    said = {
        "block_count": 27, "embedding_length": 2048, "context_length": 163840, "attention.head_count": 16,
        "attention.kv_lora_rank": 512, "attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    tensors = {f"blk.{n}.{name}": tensor for n in range(27) for name, tensor in layer.items()}
    tensors |= {"token_embd.weight": ((2048, 1000), F16), "output_norm.weight": ((2048,), F32)}
    metadata = {"general.architecture": "deepseek2"} | {f"deepseek2.{key}": value for key, value in said.items()}
    assert allocated(load_model(str(write(tmp_path / "lite.gguf", metadata, tensors))), 16_384) == 4320


def test_chunks_are_of_8192_tokens() -> None:
    """A build prints 19.75 MiB (20224 cells, 1 layer) + 25.50 (8704 cells, 3 layers), for any chunk size of the model."""
    model = read(LLAMA4)
    assert allocated(model, 20_000, 2) == 19.75 + 25.5
    assert allocated(model, 20_000, max_num_batched_tokens=1024) == 9.875 + 13.5
    remarks = fit(Deployment(model, H100), FitOptions(engine="llama.cpp")).notes
    assert any("chunks always have 8,192 tokens" in said for said in remarks)


def test_windows_by_the_pattern_of_the_type() -> None:
    """For five layers of gemma3, all with a window, a build prints 2.50 MiB (1024 cells)."""
    assert allocated(read(GEMMA3 | {"num_hidden_layers": 5}), 4000) == 2.5


def test_exaone4_has_windows_at_64_layers_alone() -> None:
    """A build prints 8.00 MiB for 4 layers (4096 cells), and for 64 layers 32.00 (4096 cells, 16 layers) + 24.00 (1024
    cells, 48 layers)."""
    assert allocated(read(EXAONE4), 4000) == 8
    assert allocated(read(EXAONE4 | {"num_hidden_layers": 64}), 4000) == 32 + 24


def test_released_models_stay_as_they_are() -> None:
    """Presets of types with a fixed pattern or chunk have llama.cpp's values, so the type changes nothing."""
    for name, model_type in (("gemma-2-9b", "gemma2"), ("olmo-3-7b", "olmo3"), ("llama-4-scout", "llama4_text")):
        model = load_model(name)
        assert model.model_type == model_type
        assert allocated(model, 20_000) == allocated(msgspec.structs.replace(model, model_type=""), 20_000)
