"""Embedders and rerankers: sizes of published checkpoints, no cache, no decode, sequences per second and memory."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

import kvcalc
from kvcalc import Precision, load_gpu, load_model
from kvcalc.layers.batch import Batch
from kvcalc.library.huggingface.reader import model_from
from kvcalc.timing.deployment import TimedDeployment

XLM_R = {
    "model_type": "xlm-roberta", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "max_position_embeddings": 8194, "vocab_size": 250002, "type_vocab_size": 1,
    "torch_dtype": "float32", "position_embedding_type": "absolute",
}  # fmt: skip
MINI = {
    "model_type": "bert", "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536,
    "max_position_embeddings": 512, "vocab_size": 30522, "type_vocab_size": 2,
}  # fmt: skip
NOMIC = {
    "model_type": "nomic_bert", "n_embd": 768, "n_head": 12, "n_inner": 3072, "n_layer": 12, "n_positions": 8192,
    "vocab_size": 30528, "type_vocab_size": 2, "activation_function": "swiglu", "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
}  # fmt: skip
MODERN = {
    "model_type": "modernbert", "hidden_size": 768, "num_hidden_layers": 22, "num_attention_heads": 12,
    "intermediate_size": 1152, "vocab_size": 50368, "max_position_embeddings": 8192, "local_attention": 128,
}  # fmt: skip
MISTRAL = {
    "model_type": "mistral", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "max_position_embeddings": 32768,
    "sliding_window": 4096,
}  # fmt: skip
# Elements of the checkpoint's tensors, without buffers: BAAI/bge-m3, bge-reranker-v2-m3, all-MiniLM-L6-v2,
# nomic-embed-text-v1.5, gte-modernbert-base and e5-mistral-7b-instruct. The last stores a KV cache: its attention is causal.
PUBLISHED = [
    ("XLMRobertaModel", XLM_R, 567_754_752, 0),
    ("XLMRobertaForSequenceClassification", XLM_R | {"id2label": {"0": "LABEL_0"}}, 567_755_777, 0),
    ("BertModel", MINI, 22_713_216, 0),
    ("NomicBertModel", NOMIC, 136_731_648, 0),
    ("ModernBertModel", MODERN, 149_014_272, 0),
    ("MistralModel", MISTRAL, 7_110_660_096, 2 * 32 * 8 * 128 * 2),
]


@pytest.mark.parametrize(("name", "config", "parameters", "per_token"), PUBLISHED)
def test_parameters_equal_the_checkpoint_and_only_causal_models_have_a_cache(
    name: str, config: dict[str, Any], parameters: int, per_token: int
) -> None:
    model = model_from(config | {"architectures": [name]}, "config.json", "m")
    usable = config.get("max_position_embeddings", 8192) - 2 * ("XLM" in name)  # from RoBERTa's padding token, 1, on
    assert (model.parameters, model.parameters_exact, model.pooling, model.max_context) == (parameters, True, True, usable)
    assert kvcalc.cache_size(model, 100, precision=kvcalc.Precision("bf16")).stored == 100 * per_token


def embedder(folder: Path, config: dict[str, Any] = XLM_R, name: str = "XLMRobertaModel") -> Path:
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    return folder


def test_latency_is_one_pass_and_gives_sequences_per_second(tmp_path: Path) -> None:
    """24 layers of 512 tokens: 2 FLOPs per weight and token, and 4·D FLOPs for each of 512² pairs; a pooler on one token."""
    answer = kvcalc.latency(str(embedder(tmp_path)), gpu="h100", input_len=512, batch_size=8)
    width, inner = 1024, 4096
    layer = 2 * 512 * (4 * width**2 + 2 * width * inner) + 4 * width * 512**2
    assert answer.flops == 8 * (24 * layer + 2 * width**2)
    assert answer.sequences_per_s == pytest.approx(8 / answer.ttft_s) and answer.tpot_s is None
    assert answer.dtype == "bf16"  # vLLM loads a float32 checkpoint so


def test_times_rest_on_a_pass_over_the_whole_input() -> None:
    timed = TimedDeployment(load_model("bge-m3"), load_gpu("h100"), Precision(dtype="bf16")).with_calibration("vllm")
    answer = kvcalc.latency("bge-m3", gpu="h100", input_len=512)
    assert answer.uncalibrated_share == timed.uncalibrated_share(Batch.prefill(512)) > 0.05


def test_size_counts_the_bytes_of_a_float32_file() -> None:
    """bge-m3 stores 567,754,752 parameters in four bytes each. `dtype` changes this."""
    assert kvcalc.size("bge-m3").weight_bytes == 4 * 567_754_752
    assert kvcalc.deploy("bge-m3").size().weight_bytes == 4 * 567_754_752
    assert kvcalc.size("bge-m3", dtype="bf16").weight_bytes == 2 * 567_754_752


def test_a_window_of_both_directions_counts_its_pairs() -> None:
    """ModernBERT: a local layer sees 64 tokens on each side. Pairs are counted one by one here."""
    model = model_from(MODERN | {"architectures": ["ModernBertModel"]}, "config.json", "m")
    batch = kvcalc.Batch.prefill(200)
    local = sum(abs(i - j) <= 64 for i in range(200) for j in range(200))
    flops = {o.cost.flops for o in kvcalc.forward(model, batch) if o.name == "attention"}
    assert flops == {4 * 768 * local, 4 * 768 * 200**2}


def test_fit_gives_the_memory_and_commands_that_decode_refuse(kvcalc: Run, tmp_path: Path) -> None:
    path = embedder(tmp_path)
    fitted = json.loads(kvcalc(f"fit {path} --gpu l4 --json").out)[0]
    assert fitted["fits"] and fitted["needed_kv_cache_memory_bytes"] == 0
    assert fitted["language_weight_bytes"] == 2 * 567_754_752
    assert kvcalc(f"fit {path} --gpu l4 --memory 1GiB").code == 1
    for command in ("serve", "compare", "roofline", "plan --users 2 --context 1k", "report"):
        refused = kvcalc(f"{command} {path} --gpu h100")
        assert refused.code == 2 and "generates no tokens" in refused.err
    assert kvcalc(f"roofline {path} --gpu h100 --phase prefill --context 512").code == 0
