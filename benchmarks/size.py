"""Time sizes: the cache of a 61-layer model, and reading a preset and a small and a very large config.json.

The small config.json has DeepSeek-V3's shape with its fp8 blocks. The large file adds 3 MB of quantisation
lists with one name for each matrix of 256 experts in 58 layers, as in checkpoints that exclude modules from
quantisation.
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench import ADDITIONS, Line, cpu_seconds, thousand_additions

from kvcalc import cache_size, load_gpu, load_model
from kvcalc.library.huggingface import read_config

CONFIG = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129280,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def lines() -> Iterator[Line]:
    adding = cpu_seconds(thousand_additions, 2000)
    for name, most in (("deepseek-v3", 1.5), ("deepseek-v3.2", 1.5)):
        model = load_model(name)
        spent = cpu_seconds(lambda model=model: cache_size(model, 131_072, 8), 1000)
        yield Line(f"`cache_size` of {name}, {model.layers} layers", spent, ADDITIONS, adding, most)
    for name in ("llama-3.1-8b", "deepseek-v3"):
        yield Line(f"`load_model` of {name}", cpu_seconds(lambda name=name: load_model(name), 50), ADDITIONS, adding, 100)
    yield Line("`load_gpu` of h100", cpu_seconds(lambda: load_gpu("h100-sxm"), 50), ADDITIONS, adding, 100)
    yield from _configs()


def _configs() -> Iterator[Line]:
    left_out = [
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
        for layer in range(3, 61) for expert in range(256) for name in ("gate", "up", "down")
    ]  # fmt: skip
    lists = {"ignore": left_out, "modules_to_not_convert": left_out[:20_000]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        for extra, number in (({}, 20), (lists, 1)):
            path.write_text(json.dumps(CONFIG | {"quantization_config": FP8 | extra}), encoding="utf-8")
            text = path.read_bytes()
            parsing = cpu_seconds(lambda text=text: json.loads(text), number)
            spent = cpu_seconds(lambda: read_config(path), number)
            yield Line(f"a config.json of {len(text) / 1e3:,.0f} kB", spent, "json.loads of it", parsing, 8 if extra else 1500)
