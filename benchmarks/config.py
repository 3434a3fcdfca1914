"""How much CPU time it takes to read a config.json, beyond starting up and importing: two files, small and very large.

The small one is DeepSeek-V3's shape with its fp8 blocks; the large one adds 3 MB of quantisation lists, one name for each
matrix of 256 experts in 58 layers, as checkpoints that leave modules out have them. Each is read in a process of its own,
after the imports; CPU time (user and system), the median of so many runs. Exit status 1 when one is above its target.

    python benchmarks/config.py [RUNS]
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TARGETS_MS = {"small": 30.0, "3 MB of lists": 200.0}
CONFIG = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "vocab_size": 129280,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
READ = """\
import sys, time
from pathlib import Path
from kvcalc.library.huggingface import read_config
start = time.process_time()
model = read_config(Path(sys.argv[1]))
print(time.process_time() - start)
"""


def milliseconds(path: Path, runs: int) -> float:
    """The median CPU time of reading this file."""
    words = [sys.executable, "-c", READ, str(path)]
    times = [float(subprocess.run(words, check=True, capture_output=True, text=True).stdout) for _ in range(runs)]
    return statistics.median(times) * 1000


def main() -> int:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 9
    left_out = [
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj"
        for layer in range(3, 61) for expert in range(256) for name in ("gate", "up", "down")
    ]  # fmt: skip
    lists = {"ignore": left_out, "modules_to_not_convert": left_out[:20_000]}
    slow = 0
    with tempfile.TemporaryDirectory() as folder:
        for (name, target), extra in zip(TARGETS_MS.items(), ({}, lists), strict=True):
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(CONFIG | {"quantization_config": FP8 | extra}), encoding="utf-8")
            took = milliseconds(path, runs)
            slow += took > target
            print(f"{name} ({path.stat().st_size / 1e6:.1f} MB): {took:.1f} ms of CPU, target {target:.0f} ms")
    return int(slow > 0)


if __name__ == "__main__":
    sys.exit(main())
