"""vLLM's start-up log, from 0.6 on, both engines.

Wording of `engine/llm_engine.py`, `worker/worker.py`, `executor/executor_base.py` (V0) and of
`v1/engine/core.py`, `v1/worker/gpu_worker.py`, `v1/worker/gpu_model_runner.py`,
`v1/core/kv_cache_utils.py` (V1). Its "GB" are GiB.
"""

import json
import re

from kvcalc.diagnosis.startup import (
    GIB,
    Boot,
    Failure,
    N,
    Take,
    arguments_of,
    number,
    read_fields,
    rules,
    tell,
    unquoted,
)

_ANCHORS = (
    "vLLM API server version",
    "LLM engine (v",
    "non-default args:",
    "args: Namespace(",
)
_RANK = re.compile(r"\(([A-Za-z_0-9 ]{1,40}) pid=\d+\)|\b(?:TP|DP|PP)\d+")
_VERSION = re.compile(r"(?:LLM engine \(|API server version )v?(\d+\.\d+[\w.+]*)")
_PAIRS = re.compile(
    r"'([a-z_0-9]{1,60})': ('[^']{0,400}'|\"[^\"]{0,400}\"|\{[^{}]{0,400}\}|\[[^\[\]]{0,400}\]|"
    r"[\w.+-]{1,80})"
)
_NAMES = re.compile(
    r"\b([a-z_0-9]{1,60})=('[^']{0,400}'|\"[^\"]{0,400}\"|\{[^{}]{0,400}\}|"
    r"[A-Za-z]{1,60}\([^()]{0,400}\)|[\w.+-]{1,80})"
)
_OURS = arguments_of("vllm")


def begins(boot: Boot, line: str) -> bool:
    """Whether a line starts another boot than the one that is read: a second of the same kind from
    the same rank, or of another version.
    """
    anchor = next((a for a in _ANCHORS if a in line), "")
    if not anchor:
        return False
    rank = _RANK.search(line) if anchor == "LLM engine (v" else None
    version = _VERSION.search(line)
    if version and boot.version and version[1] != boot.version:
        return True
    key = f"{anchor} {rank[1] if rank else ''}"
    if key in boot.words:
        return True
    first = "vLLM API server version" in line and any(
        k.startswith(_ANCHORS[1:]) for k in boot.words
    )
    boot.words[key] = ""
    return first


def _tell(boot: Boot, name: str, text: str) -> None:
    """One argument as Python wrote it."""
    value, flag = unquoted(text), _OURS.get(name)
    if name in ("model", "model_tag") and value:
        boot.named = boot.named or value
    if (
        flag
        and flag.name in ("limit_mm_per_prompt", "speculation", "engram_config")
        and isinstance(value, str)
    ):
        boot.tell(flag.name, _mapping(value))
    else:
        tell(boot, flag, value)


def _mapping(text: str) -> str | None:
    """A mapping of plain values, or an object's arguments, as JSON."""
    pairs = dict(_PAIRS.findall(text)) if text.startswith("{") else dict(_NAMES.findall(text))
    plain = {name: unquoted(value) for name, value in pairs.items()}
    read = {
        name: int(value) if isinstance(value, str) and value.isdigit() else value
        for name, value in plain.items()
    }
    return json.dumps(read) if read else None


def _arguments(boot: Boot, match: re.Match[str]) -> None:
    for name, value in _PAIRS.findall(match[1]):
        _tell(boot, name, value)


def _namespace(boot: Boot, match: re.Match[str]) -> None:
    for name, value in _NAMES.findall(match[1]):
        _tell(boot, name, value)


_CONFIG = {
    "model": "model",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "quantization": "quantization",
    "enforce_eager": "enforce_eager",
    "kv_cache_dtype": "kv_cache_dtype",
    "max_seq_len": "max_model_len",
    "speculative_config": "speculative_config",
}


def _engine(boot: Boot, match: re.Match[str]) -> None:
    boot.version = boot.version or match[2]
    if match[1]:
        boot.words["runner"] = match[1]
    for name, value in _NAMES.findall(match[3]):
        if name == "dtype":
            _tell(boot, "dtype", value.removeprefix("torch."))
        elif name in _CONFIG:
            _tell(boot, _CONFIG[name], value)


def _failed(kind: str, *names: str) -> Take:
    def fail(boot: Boot, match: re.Match[str]) -> None:
        units = {"length": 1, "longest": 1, "tokens": 1, "seqs": 1}
        results = {
            n: round(number(t) * units.get(n, GIB))
            for n, t in zip(names, match.groups(), strict=True)
            if t
        }
        if boot.failure is None or boot.failure.kind == "out_of_memory" != kind:
            boot.failure = Failure(kind, match[0], results)
        if "length" in results:
            boot.tell("max_model_len", results["length"])
        if "available" in results:
            boot.keep("cache", results["available"], least=True)
        boot.memory = boot.memory or results.get("total", 0)

    return fail


def _occupied(boot: Boot, match: re.Match[str]) -> None:
    read_fields(boot, match)
    free, share = (round(number(match[name]) * GIB) for name in ("free", "desired_share"))
    figures = {"free": free, "total": boot.memory, "share": share}
    boot.failure = Failure("occupied", match[0], figures)


def _version(boot: Boot, match: re.Match[str]) -> None:
    boot.version = boot.version or match[1]


def _model(boot: Boot, match: re.Match[str]) -> None:
    boot.named = boot.named or match[1]


def _started(boot: Boot, match: re.Match[str]) -> None:
    boot.started = True


_FREE = r"Free memory on device(?: \S+)? \(<free>/<memory> GiB\) on startup"

RULES = rules(
    (
        "vLLM API server version",
        r"vLLM API server version v?(\d+\.\d+[\w.+]*)",
        _version,
    ),
    ("non-default args:", r"non-default args: (\{.*)", _arguments),
    ("Namespace(", r"args: Namespace\((.*)", _namespace),
    (
        "LLM engine (v",
        r"(?:(V0) )?LLM engine \(v([\w.+]+)\) with config: (.*)",
        _engine,
    ),
    ("Starting to load model", r"Starting to load model (\S+?)\.\.\.", _model),
    ("Using max model len", r"Using max model len <max_model_len>"),
    (
        "max_num_batched_tokens=",
        r"max_num_batched_tokens=(?P<max_num_batched_tokens>\d{1,12})(?!\d)",
    ),
    ("weights took", r"Loading model weights took <weights> Gi?B"),
    ("Model loading took", r"Model loading took <weights> Gi?B"),
    # V0 from 0.7 on: one sentence, whose second half may be on its own line
    (
        "total_gpu_memory (",
        r"total_gpu_memory \(<memory>GiB\) x gpu_memory_utilization "
        r"\(<gpu_memory_utilization>\) = <share>GiB",
    ),
    (
        "model weights take",
        r"model weights take <weights>GiB; non_torch_memory takes <libraries>GiB; PyTorch "
        r"activation peak memory "
        r"takes <activations>GiB; the rest of the memory reserved for KV Cache is <cache>GiB",
    ),
    # V0 to 0.6.6: torch's peak includes the weights
    (
        "Memory profiling results",
        rf"total_gpu_memory=<memory>GiB initial_memory_usage={N}GiB "
        r"peak_torch_memory=<torch_peak>GiB "
        rf"memory_usage_post_profile={N}G[iI][bB] non_torch_memory=<libraries>GiB "
        r"kv_cache_size=<cache>GiB "
        r"gpu_memory_utilization=<gpu_memory_utilization>",
    ),
    ("Available KV cache memory", r"Available KV cache memory: <cache> GiB"),
    ("reserved", r"reserved <cache> GiB memory for KV Cache as specified"),
    ("Initial free memory", r"Initial free memory:? <free> GiB"),
    ("GPU KV cache size", r"GPU KV cache size: <tokens> tokens"),
    ("blocks:", r"# (?:GPU|cuda) blocks: <blocks>"),
    (
        "Overriding num_gpu_blocks",
        r"num_gpu_blocks_override=(?P<num_gpu_blocks_override>\d{1,12})(?!\d)",
    ),
    (
        "Maximum concurrency",
        rf"Maximum concurrency for <max_model_len> tokens per request: {N}x",
    ),
    (
        "Estimated CUDA graph memory",
        r"Estimated CUDA graph memory: <graphs_estimated> GiB",
    ),
    ("CUDA graph pool memory", r"\(actual\), <graphs_estimated> GiB \(estimated\)"),
    (
        "Graph capturing finished",
        r"Graph capturing finished in [\d.]+ secs?, took <graphs> GiB",
    ),
    (
        "on startup. Desired",
        rf"{_FREE}\. Desired GPU memory utilization is \(<gpu_memory_utilization>, <share> GiB\)",
    ),
    ("Actual usage is", r"Actual usage is <weights> GiB for weight"),
    ("consumed memory", r"Actual usage is <consumed> GiB for consumed memory"),
    ("for peak activation", r"<activations> GiB for peak activation"),
    ("for non-torch memory", r"<libraries> GiB for non-torch memory"),
    ("for CUDAGraph memory", r"<graphs> GiB for CUDAGraph memory"),
    (
        "is less than desired",
        rf"{_FREE} is less than desired GPU memory utilization \(<gpu_memory_utilization>, "
        r"<desired_share> GiB\)",
        _occupied,
    ),
    (
        "No available memory for the cache",
        r"No available memory for the cache blocks",
        _failed("no_blocks"),
    ),
    (
        "KV cache is needed",
        rf"max seq len \({N}\), \(?{N} Gi?B KV cache is needed, which is larger than the "
        r"available KV cache memory "
        rf"\({N} Gi?B\)"
        rf"(?:.{{0,80}}estimated maximum model length is {N})?",
        _failed("too_long", "length", "needed", "available", "longest"),
    ),
    (
        "max seq len (",
        rf"max seq len \({N}\) is larger than the maximum number of tokens that can be stored "
        rf"in KV cache \({N}\)",
        _failed("too_long", "length", "tokens"),
    ),
    (
        "warming up sampler",
        rf"out of memory.{{0,40}} warming up sampler with {N} dummy",
        _failed("out_of_memory", "seqs"),
    ),
    ("startup complete", r"Application startup complete", _started),
    ("vLLM server on", r"Starting vLLM (?:API )?server", _started),
)


def finished(boot: Boot) -> None:
    """Compute activations from torch's peak, and libraries from the consumed memory."""
    figures = boot.figures
    if "torch_peak" in figures and "weights" in figures:
        figures.setdefault(
            "activations", max(0, figures.pop("torch_peak") - figures["weights"])
        )
    if "consumed" in figures and "weights" in figures:
        figures.setdefault("libraries", figures["consumed"] - figures["weights"])
