"""Input files of every format with random errors are read, or refused in one line."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_files import header, llama, llama_tensors
from hypothesis import strategies as st
from program import MANY, hold, run, sound

from kvcalc.library.presets import shipped_folder

PRESETS = shipped_folder()
JUNK = [
    "", "0", "-1", "1", "7", "1e400", "nan", "-inf", "0.5", "1e12", "9" * 40, "0x10", "null", "true", "[]", "{}", "~", "&a", "*a",
    "!!python/object/apply:os.system [ls]", "\x1b[31m", "\x07", "\0", "\u202e", "\u2028", "\u200f", "\ud7ff", "\ufeff", "é", "🐫",
    "x" * 3000, '"', "'", "|", "#", "\\u001b[2J", "4k", "64 full", "fp8", "gpt2", "../../x", "=1+1", "a,b", "lognormal:1,2",
]  # fmt: skip
SCALAR = re.compile(r"[^\s,:{}\[\]\"=#]+")


def _model(name: str) -> bytes:
    return (PRESETS / "models" / f"{name}.yaml").read_bytes()


def _gguf(layers: int) -> bytes:
    """Return the header of a complete model: metadata of texts, lists, u32 and f32, and the tensors of each block."""
    return header(llama(layers, **{"tokenizer.ggml.token_type": [1, 1, 3]}), llama_tensors(layers))


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 1000, "head_dim": 16, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = LLAMA | {
    "model_type": "deepseek_v3", "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
HYBRID = LLAMA | {
    "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32, "rope_scaling": None,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "quantization_config": {"quant_method": "mxfp4"},
}  # fmt: skip
ROWS = (
    b"op,gpu,framework,version,dtype,m,n,k,batch,q_heads,kv_heads,head_dim,kv_len,kv_dtype,num_gpus,bytes,time_us\n"
    b"gemm,h100,vllm,0.24,bfloat16,128,4096,4096,,,,,,,,,20\ndecode_attention,h200,sglang,1,,,,,8,32,8,128,4096,fp8,,,15\n"
    b"allreduce,h100-sxm,nccl,1,bfloat16,,,,,,,,,,8,1048576.0,50\n"
)
REQUESTS = b"arrival_s,input_len,output_len\n0,100,5\n0.5,20,7\n1,300,1\n2.25,8,3\n"
LOG = (
    b"INFO 11-16 18:15:46 [api_server.py:1] vLLM API server version 0.11.0\n"
    b"INFO 11-16 18:15:47 [utils.py:1] non-default args: {'model': 'meta-llama/Llama-3.1-8B', 'max_model_len': 8192}\n"
    b"INFO 11-16 18:16:20 [gpu_model_runner.py:1] Model loading took 14.9889 GiB and 3.1 seconds\n"
    b"INFO 11-16 18:16:40 [gpu_worker.py:1] Available KV cache memory: 50.00 GiB\n"
    b"INFO 11-16 18:16:41 [kv_cache_utils.py:1] GPU KV cache size: 409,600 tokens\n"
    b"INFO 11-16 18:16:41 [kv_cache_utils.py:1] Maximum concurrency for 8,192 tokens per request: 50.00x\n"
)
FORMATS: dict[str, tuple[str, list[bytes], list[str]]] = {
    "model": (
        "m.yaml",
        [_model(name) for name in ("gpt2", "mistral-7b-v0.1", "deepseek-v3.2", "qwen3-next-80b-a3b", "gpt-oss-20b")],
        ["size {} --format json", "size {} --explain", "models {}", "roofline {} --format markdown", "fit {} --engine vllm"],
    ),
    "gpu": (
        "g.yaml",
        [(PRESETS / "gpus" / f"{name}.yaml").read_bytes() for name in ("h100-sxm", "mi300x", "apple-m4")],
        ["gpus {}", "gpus {} --format json", "fit gpt2 --gpu {} --format json", "latency gpt2 --gpu {}"],
    ),
    "config": (
        "config.json",
        [json.dumps(base, indent=1).encode() for base in (LLAMA, MIXTURE, HYBRID)],
        ["size {} --format json", "models {}", "models --import {}", "fit {} --engine vllm --mtp", "latency {} --draft mtp"],
    ),
    "gguf": (
        "m.gguf",
        [_gguf(1), _gguf(2)],
        ["size {} --format json", "models {}", "fit {} --engine llama.cpp", "models --import {}"],
    ),
    "rows": (
        "rows.csv",
        [ROWS],
        ["validate {} --format json", "validate {} --predictions -", "validate {} --by op", "plot measured --input {}"],
    ),
    "requests": (
        "r.csv",
        [REQUESTS, b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,100,5\n2023-11-16 18:15:50.99,20,7\n"],
        ["serve gpt2 --requests {} --format json", "serve gpt2 --requests {} --policy static"],
    ),
    "lengths": ("l.txt", [b"100\n200 # longest\n4k,17\n", b"length\n3\n9\n"], ["fit gpt2 --lengths {} --format json"]),
    "allocations": (
        "a.txt",
        [b"memory 4144\nA 50\nB 2048\n\nfree A   # in front of B\nask 2049\n"],
        ["fit llama-3.1-8b --allocations {}", "fit llama-3.1-8b --allocations {} --max-model-len 2k --format json"],
    ),
    "log": (
        "server.log",
        [LOG],
        ["diagnose {} --model llama-3.1-8b --gpu h100 --format json", "diagnose {} --model llama-3.1-8b --gpu h100"],
    ),
    "calibration": (
        "calibrations/h100-sxm/mine.yaml",
        [(PRESETS / "calibrations" / "h100-sxm" / "vllm.yaml").read_bytes()],
        ["latency gpt2 --stack mine --format json", "roofline deepseek-v3.2 --stack mine"],
    ),
}  # fmt: skip


@st.composite
def spoiled(draw: st.DrawFn, bases: list[bytes]) -> bytes:
    """Draw a file with up to three changes: of a word, a line, a character, a byte, or of everything from a position on."""
    content = draw(st.sampled_from(bases))
    for _ in range(draw(st.integers(0, 3))):
        content = draw(st.sampled_from([_word, _line, _bytes]))(draw, content)
    return content


def _word(draw: st.DrawFn, content: bytes) -> bytes:
    text = content.decode("latin-1")
    spots = [match.span() for match in SCALAR.finditer(text)] or [(0, 0)]
    start, end = draw(st.sampled_from(spots))
    return content[: start if draw(st.booleans()) else end] + draw(st.sampled_from(JUNK)).encode() + content[end:]


def _line(draw: st.DrawFn, content: bytes) -> bytes:
    lines = content.split(b"\n")
    at = draw(st.integers(0, len(lines) - 1))
    put = draw(st.sampled_from([[], [lines[at]] * 2, [draw(st.sampled_from(lines))], [lines[at].lstrip()], [lines[at] + b"\r"]]))
    return b"\n".join([*lines[:at], *put, *lines[at + 1 :]])


def _bytes(draw: st.DrawFn, content: bytes) -> bytes:
    at = draw(st.integers(0, len(content)))
    return content[:at] + draw(st.binary(max_size=4)) + (content[at + draw(st.integers(0, 4)) :] if draw(st.booleans()) else b"")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVCALC_PRESETS", str(tmp_path))
    yield tmp_path


@pytest.mark.parametrize("count", [25, MANY])
@pytest.mark.parametrize("form", FORMATS)
def test_a_spoiled_file_is_read_or_refused_in_one_line(form: str, count: int, folder: Path) -> None:
    name, bases, commands = FORMATS[form]
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    before = sorted(p.name for p in folder.iterdir())

    def check(content: bytes, command: str) -> None:
        (folder / name).write_bytes(content)
        sound(run(*command.format(name).split()))
        assert sorted(p.name for p in folder.iterdir()) == sorted({*before, Path(name).parts[0]}), (
            "nothing is written that was not asked for"
        )

    hold(check, count, spoiled(bases), st.sampled_from(commands))


def test_a_model_that_keeps_nothing_is_compared(folder: Path) -> None:
    """A reduction relative to 0 bytes does not exist, under either name."""
    (folder / "m.yaml").write_text("name: m\nfamily: m\nhidden_size: 64\nvocab_size: 10\nlayers: 1\nkinds: {full: {}}\n", "utf-8")
    records = sound(run("compare", "m.yaml", "--variants", "mha,mqa", "--format", "json")).records
    for record in records:
        assert (record["kv_cache_bytes"], record["reduction"], record["stored_reduction"]) == (0, None, None)
