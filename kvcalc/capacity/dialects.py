"""The flags of each engine's command line that decide its memory, by the names of `FitOptions`, `Precision` and `Parallelism`.

Sources: vLLM's `engine/arg_utils.py` (human_readable_int: k is 1000, K is 1024), SGLang's `server_args.py`, llama.cpp's
`common/arg.cpp`, TensorRT-LLM's `commands/serve.py`, each as of autumn 2026.
"""

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from kvcalc.errors import UserError
from kvcalc.storage.dtypes import canonical

GIB = 1 << 30
_HUMAN = re.compile(r"(\d+)(?:\.(\d+))?([kKmMgGtT]?)(i?)B?")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def number(text: str) -> int:
    """A whole number, as vLLM reads it: 1k is 1000, 1K is 1024. Raises UserError on another text."""
    match = _HUMAN.fullmatch(text.strip().replace("_", ""))
    if match is None or len(text) > 40:
        raise UserError(f"{text!r} is not a whole number")
    whole, part, suffix, binary = match.groups()
    base = 1024 if suffix.isupper() or binary else 1000
    value = float(f"{whole}.{part}") * base ** _POWERS[suffix.lower()] if part else int(whole) * base ** _POWERS[suffix.lower()]
    if value != int(value):
        raise UserError(f"{text!r} is not a whole number")
    return int(value)


def _plain(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def _real(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(f"{text!r} is not a number") from None


def _limits(text: str) -> str:
    """`image=0` as the JSON that vLLM takes today."""
    if text.lstrip().startswith("{"):
        return text
    return json.dumps({name.strip(): int(count) for name, count in (word.split("=") for word in text.split(","))})


def _named(names: dict[str, str]) -> tuple[Callable[[str], str], Callable[[Any], str]]:
    """A reader and a writer of formats that the engine spells otherwise."""
    back = {theirs: ours for ours, theirs in reversed(names.items())}
    return lambda text: back.get(text.lower(), canonical(text)), lambda ours: names.get(ours, ours)


class Flag(NamedTuple):
    """One option of an engine. spellings: the first is written. read, write: words to a value and back. alone: without one."""

    name: str
    spellings: tuple[str, ...]
    read: Callable[[str], Any] = number
    write: Callable[[Any], str] = _plain
    alone: bool = False


def _flag(name: str, *spellings: str, **how: Any) -> Flag:
    return Flag(name, spellings, **how)


def _words(name: str, *spellings: str, **names: str) -> Flag:
    read, write = _named(names)
    return Flag(name, spellings, read, write)


def _switches(*lines: str) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())


class Dialect(NamedTuple):
    """How an engine is started.

    starts: words that begin a command line; the first is written. model: flags that name the model, written where it does not
    stand by itself; also: flags that name it and are only read. switches: flags without a value that change nothing here.
    formats: weights that the engine quantises as it loads them, by our name; any other format is a checkpoint's own.
    max_num_seqs_is_cap: whether the engine starts even if fewer full-length sequences fit than its limit allows. llama.cpp
    allocates the cells of all slots at start, so its number of slots is no cap.
    """

    engine: str
    starts: tuple[tuple[str, ...], ...]
    flags: tuple[Flag, ...]
    model: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    switches: frozenset[str] = frozenset()
    formats: dict[str, str] = {}
    max_num_seqs_is_cap: bool = True

    def flag(self, name: str) -> Flag | None:
        """The flag that carries the option of that name; None where the engine has none."""
        return next((f for f in self.flags if f.name == name), None)


_LONG = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_VLLM = Dialect(
    engine="vllm",
    starts=(
        ("vllm", "serve"), ("-m", "vllm.entrypoints.openai.api_server"), ("-m", "vllm.entrypoints.cli.main", "serve"),
        ("-m", "vllm.entrypoints.api_server"), ("vllm/vllm-openai",),
    ),
    also=("--model", "--model-tag"),
    flags=(
        _words("dtype", "--dtype", **_LONG),
        _flag("quantization", "--quantization", "-q", read=str.lower),
        _words("kv_cache_dtype", "--kv-cache-dtype", **_LONG),
        _flag("tp", "--tensor-parallel-size", "-tp"),
        _flag("pp", "--pipeline-parallel-size", "-pp"),
        _flag("dp", "--data-parallel-size", "-dp"),
        _flag("dcp", "--decode-context-parallel-size", "-dcp"),
        _flag("all_experts", "--enable-expert-parallel", "-ep", alone=True),
        _flag("max_model_len", "--max-model-len"),
        _flag("max_num_seqs", "--max-num-seqs"),
        _flag("max_num_batched_tokens", "--max-num-batched-tokens"),
        _flag("gpu_memory_utilization", "--gpu-memory-utilization", read=_real),
        _flag("kv_cache_memory_bytes", "--kv-cache-memory-bytes", "--kv-cache-memory"),
        _flag("num_gpu_blocks_override", "--num-gpu-blocks-override"),
        _flag("block_size", "--block-size"),
        _flag("enforce_eager", "--enforce-eager", alone=True),
        _flag("lora", "--enable-lora", alone=True),
        _flag("max_loras", "--max-loras"),
        _flag("max_lora_rank", "--max-lora-rank"),
        _flag("limit_mm_per_prompt", "--limit-mm-per-prompt", read=str, write=_limits),
        _flag("engram_config", "--engram-config", read=str, write=str),
        _flag("text_only", "--language-model-only", alone=True),
        _words("mamba_cache_mode", "--mamba-cache-mode"),
        _words("mamba_ssm_cache_dtype", "--mamba-ssm-cache-dtype", **_LONG),
        _flag("windows_kept", "--disable-hybrid-kv-cache-manager", alone=True),
        _flag("one_in_flight", "--no-async-scheduling", alone=True),
        _flag("two_in_flight", "--async-scheduling", alone=True),
        _flag("cpu_offload_gb", "--cpu-offload-gb", read=_real),
        _flag("kv_offloading_size", "--kv-offloading-size", read=_real),
        _flag("speculation", "--speculative-config", "-sc", read=str),
        _flag("draft_name", "--speculative-model", read=str),
    ),
    switches=_switches(
        "--trust-remote-code --enable-prefix-caching --no-enable-prefix-caching --enable-chunked-prefill",
        "--no-enable-chunked-prefill --enable-auto-tool-choice --disable-log-requests --disable-log-stats",
        "--disable-custom-all-reduce --enable-log-requests --disable-sliding-window --calculate-kv-scales",
        "--fully-sharded-loras --disable-frontend-multiprocessing --enable-reasoning --enable-sleep-mode",
        "--skip-mm-profiling --enable-eplb --headless --enable-prompt-tokens-details --use-v2-block-manager",
    ),
    formats={"fp8": "fp8", "nf4": "bitsandbytes"},
)  # fmt: skip
_SGLANG = Dialect(
    engine="sglang",
    starts=(("python", "-m", "sglang.launch_server"), ("-m", "sglang.launch_server"), ("sglang", "serve")),
    model=("--model-path", "--model"),
    flags=(
        _words("dtype", "--dtype", **_LONG),
        _flag("quantization", "--quantization", read=str.lower),
        _words("kv_cache_dtype", "--kv-cache-dtype", fp8="fp8_e4m3", fp8_ds_mla="fp8_e4m3", nvfp4="fp4_e2m1"),
        _flag("tp", "--tensor-parallel-size", "--tp-size", "--tp"),
        _flag("pp", "--pipeline-parallel-size", "--pp-size", "--pp"),
        _flag("dp", "--data-parallel-size", "--dp-size", "--dp"),
        _flag("ep", "--expert-parallel-size", "--ep-size", "--ep"),
        _flag("shared_attention", "--enable-dp-attention", alone=True),
        _flag("max_model_len", "--context-length"),
        _flag("max_num_seqs", "--max-running-requests"),
        _flag("max_num_batched_tokens", "--chunked-prefill-size"),
        _flag("gpu_memory_utilization", "--mem-fraction-static", read=_real),
        _flag("block_size", "--page-size"),
        _flag("enforce_eager", "--disable-cuda-graph", alone=True),
        _flag("lora", "--enable-lora", alone=True),
        _flag("max_loras", "--max-loras-per-batch"),
        _flag("max_lora_rank", "--max-lora-rank"),
        _words("mamba_ssm_cache_dtype", "--mamba-ssm-dtype", **_LONG),
        _flag("cpu_offload_gb", "--cpu-offload-gb", read=_real),
        _flag("prediction", "--speculative-algorithm", "--speculative-algo", read=str.lower),
        _flag("draft_name", "--speculative-draft-model-path", "--speculative-draft-model", read=str),
        _flag("drafting_steps", "--speculative-num-steps"),
        _flag("drafted_branches", "--speculative-eagle-topk"),
        _flag("verified_tokens", "--speculative-num-draft-tokens"),
        _flag("windows_kept", "--disable-hybrid-swa-memory", alone=True),
    ),
    switches=_switches(
        "--trust-remote-code --enable-metrics --disable-radix-cache --enable-torch-compile --enable-dp-lm-head",
        "--enable-mixed-chunk --enable-cache-report --enable-multimodal --log-requests --disable-overlap-schedule",
        "--disable-custom-all-reduce --enable-deepep-moe --enable-eplb --enable-hierarchical-cache --skip-tokenizer-init",
        "--enable-p2p-check",
    ),
    formats={"fp8": "fp8"},
)  # fmt: skip
_TYPES = {"fp16": "f16", "fp32": "f32"}
_LLAMA_CPP = Dialect(
    engine="llama.cpp",
    max_num_seqs_is_cap=False,
    starts=(("llama-server",), ("llama-cli",), ("llama-bench",), ("llama-run",), ("llama-batched-bench",)),
    model=("-m", "--model", "-hf", "-hfr", "--hf-repo"),
    flags=(
        _flag("cells", "--ctx-size", "-c"),
        _flag("max_num_seqs", "--parallel", "-np"),
        _flag("max_num_batched_tokens", "--ubatch-size", "-ub"),
        _flag("batch", "--batch-size", "-b"),
        _words("cache_type_k", "--cache-type-k", "-ctk", **_TYPES),
        _words("cache_type_v", "--cache-type-v", "-ctv", **_TYPES),
        _flag("kv_unified", "--kv-unified", "-kvu", alone=True),
        _flag("kv_apart", "--no-kv-unified", "-no-kvu", alone=True),
        _flag("swa_full", "--swa-full", alone=True),
        _flag("n_gpu_layers", "--n-gpu-layers", "--gpu-layers", "-ngl", read=lambda t: -1 if t in ("all", "auto") else number(t)),
        _flag("n_cpu_moe", "--n-cpu-moe", "-ncmoe"),
        _flag("cpu_moe", "--cpu-moe", "-cmoe", alone=True),
        _flag("split_mode", "--split-mode", "-sm", read=str.lower),
        _flag("tensor_split", "--tensor-split", "-ts", read=str),
        _flag("draft_name", "--model-draft", "-md", read=str),
    ),
    switches=_switches(
        "--jinja --no-mmap --mlock --metrics --slots --no-slots --embedding --no-webui --verbose -v --no-warmup",
        "--cont-batching -cb --context-shift --no-context-shift --no-kv-offload -nkvo --check-tensors --no-mmproj",
        "--reranking --offline",
    ),
)  # fmt: skip
_TRTLLM = Dialect(
    engine="trtllm",
    starts=(("trtllm-serve",), ("trtllm-serve", "serve")),
    flags=(
        _flag("tp", "--tp_size", "--tensor_parallel_size"),
        _flag("pp", "--pp_size", "--pipeline_parallel_size"),
        _flag("ep", "--ep_size", "--moe_expert_parallel_size"),
        _flag("max_model_len", "--max_seq_len"),
        _flag("max_num_seqs", "--max_batch_size"),
        _flag("max_num_batched_tokens", "--max_num_tokens"),
        _flag(
            "gpu_memory_utilization", "--kv_cache_free_gpu_memory_fraction", "--free_gpu_memory_fraction", read=_real
        ),
        _words("kv_cache_dtype", "--kv_cache_dtype"),
    ),
    switches=_switches(
        "--trust_remote_code --enable_chunked_prefill --fail_fast_on_attention_window_too_large",
    ),
)  # fmt: skip
DIALECTS: dict[str, Dialect] = {d.engine: d for d in (_VLLM, _SGLANG, _LLAMA_CPP, _TRTLLM)}
