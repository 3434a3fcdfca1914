"""vLLM's start-up log, from 0.6 on, both engines.

Wording of `engine/llm_engine.py`, `worker/worker.py`, `executor/executor_base.py` (V0) and of `v1/engine/core.py`,
`v1/worker/gpu_worker.py`, `v1/worker/gpu_model_runner.py`, `v1/core/kv_cache_utils.py` (V1). Its "GB" are GiB.
"""

import json
import re

from kvcalc.planning.startup.boot import GIB, Boot, Failure
from kvcalc.planning.startup.words import N, Take, arguments_of, number, rules, tell, unquoted

_ANCHORS = ("vLLM API server version", "LLM engine (v", "non-default args:", "args: Namespace(")
_RANK = re.compile(r"\(([A-Za-z_0-9 ]{1,40}) pid=\d+\)|\b(?:TP|DP|PP)\d+")
_VERSION = re.compile(r"(?:LLM engine \(|API server version )v?(\d+\.\d+[\w.+]*)")
_PAIRS = re.compile(r"'([a-z_0-9]{1,60})': ('[^']{0,400}'|\"[^\"]{0,400}\"|\{[^{}]{0,400}\}|\[[^\[\]]{0,400}\]|[\w.+-]{1,80})")
_NAMES = re.compile(
    r"\b([a-z_0-9]{1,60})=('[^']{0,400}'|\"[^\"]{0,400}\"|\{[^{}]{0,400}\}|[A-Za-z]{1,60}\([^()]{0,400}\)|[\w.+-]{1,80})"
)
_OURS = arguments_of("vllm")


def begins(boot: Boot, line: str) -> bool:
    """Whether a line starts another boot than the one that is read: a second of the same kind from the same rank, or of another
    version.
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
    first = "vLLM API server version" in line and any(k.startswith(_ANCHORS[1:]) for k in boot.words)
    boot.words[key] = ""
    return first


def _tell(boot: Boot, name: str, text: str) -> None:
    """One argument as Python wrote it."""
    value, flag = unquoted(text), _OURS.get(name)
    if name in ("model", "model_tag") and value:
        boot.named = boot.named or value
    if flag and flag.name in ("limit_mm_per_prompt", "speculation", "engram_config") and isinstance(value, str):
        boot.tell(flag.name, _mapping(value))
    else:
        tell(boot, flag, value)


def _mapping(text: str) -> str | None:
    """A mapping of plain values, or an object's arguments, as JSON."""
    pairs = dict(_PAIRS.findall(text)) if text.startswith("{") else dict(_NAMES.findall(text))
    plain = {name: unquoted(value) for name, value in pairs.items()}
    read = {name: int(value) if isinstance(value, str) and value.isdigit() else value for name, value in plain.items()}
    return json.dumps(read) if read else None


def _arguments(boot: Boot, match: re.Match[str]) -> None:
    for name, value in _PAIRS.findall(match[1]):
        _tell(boot, name, value)


def _namespace(boot: Boot, match: re.Match[str]) -> None:
    for name, value in _NAMES.findall(match[1]):
        _tell(boot, name, value)


_CONFIG = {
    "model": "model", "tensor_parallel_size": "tensor_parallel_size", "pipeline_parallel_size": "pipeline_parallel_size",
    "data_parallel_size": "data_parallel_size", "quantization": "quantization", "enforce_eager": "enforce_eager",
    "kv_cache_dtype": "kv_cache_dtype", "max_seq_len": "max_model_len", "speculative_config": "speculative_config",
}  # fmt: skip


def _engine(boot: Boot, match: re.Match[str]) -> None:
    boot.version = boot.version or match[1]
    pairs = _NAMES.findall(match[2])
    for name, value in pairs:
        if name == "dtype":
            _tell(boot, "dtype", value.removeprefix("torch."))
        elif name in _CONFIG:
            _tell(boot, _CONFIG[name], value)


def _figure(name: str, least: bool = False) -> Take:
    return lambda boot, match: boot.keep(name, number(match[1]) * GIB, least)


def _counted(name: str) -> Take:
    return lambda boot, match: boot.count(name, int(number(match[1])), least=True)


def _concurrency(boot: Boot, match: re.Match[str]) -> None:
    boot.tell("max_model_len", int(number(match[1])))


def _profile(boot: Boot, match: re.Match[str]) -> None:
    """V0 from 0.7 on: every term in one sentence, of which the second half may stand on a line of its own."""
    boot.memory = round(number(match[1]) * GIB)
    boot.tell("gpu_memory_utilization", number(match[2]))
    boot.keep("share", number(match[3]) * GIB)


def _terms(boot: Boot, match: re.Match[str]) -> None:
    for name, text in zip(("weights", "libraries", "activations", "cache"), match.groups(), strict=True):
        boot.keep(name, number(text) * GIB, least=name == "cache")


def _results(boot: Boot, match: re.Match[str]) -> None:
    """V0 to 0.6.6: torch's peak holds the weights."""
    total, _, peak, _, libraries, cache, share = map(number, match.groups())
    boot.memory = round(total * GIB)
    boot.keep("torch_peak", peak * GIB)
    boot.keep("libraries", libraries * GIB)
    boot.keep("cache", cache * GIB, least=True)
    boot.tell("gpu_memory_utilization", share)


def _summary(boot: Boot, match: re.Match[str]) -> None:
    free, total, utilization, share = map(number, match.groups())
    boot.memory = round(total * GIB)
    boot.keep("free", free * GIB, least=True)
    boot.told["gpu_memory_utilization"] = utilization
    boot.keep("share", share * GIB)


def _failed(kind: str, *names: str) -> Take:
    def fail(boot: Boot, match: re.Match[str]) -> None:
        units = {"length": 1, "longest": 1, "tokens": 1, "seqs": 1}
        found = {n: round(number(t) * units.get(n, GIB)) for n, t in zip(names, match.groups(), strict=True) if t}
        if boot.failure is None or boot.failure.kind == "out_of_memory" != kind:
            boot.failure = Failure(kind, match[0], found)
        if "length" in found:
            boot.tell("max_model_len", found["length"])
        if "available" in found:
            boot.keep("cache", found["available"], least=True)
        boot.memory = boot.memory or found.get("total", 0)

    return fail


def _occupied(boot: Boot, match: re.Match[str]) -> None:
    free, total, utilization, share = map(number, match.groups())
    boot.memory = round(total * GIB)
    boot.keep("free", free * GIB, least=True)
    boot.told["gpu_memory_utilization"] = utilization
    boot.failure = Failure("occupied", match[0], {"free": round(free * GIB), "total": boot.memory, "share": round(share * GIB)})


def _said(name: str) -> Take:
    def keep(boot: Boot, match: re.Match[str]) -> None:
        if name == "version":
            boot.version = boot.version or match[1]
        elif name == "named":
            boot.named = boot.named or match[1]
        elif name == "started":
            boot.started = True
        else:
            boot.tell(name, int(number(match[1])))

    return keep


RULES = rules(
        ("vLLM API server version", r"vLLM API server version v?(\d+\.\d+[\w.+]*)", _said("version")),
        ("non-default args:", r"non-default args: (\{.*)", _arguments),
        ("Namespace(", r"args: Namespace\((.*)", _namespace),
        ("LLM engine (v", r"LLM engine \(v([\w.+]+)\) with config: (.*)", _engine),
        ("Starting to load model", r"Starting to load model (\S+?)\.\.\.", _said("named")),
        ("Using max model len", rf"Using max model len {N}", _said("max_model_len")),
        ("max_num_batched_tokens=", r"max_num_batched_tokens=(\d{1,12})(?!\d)", _said("max_num_batched_tokens")),
        ("weights took", rf"Loading model weights took {N} Gi?B", _figure("weights")),
        ("Model loading took", rf"Model loading took {N} Gi?B", _figure("weights")),
        ("total_gpu_memory (", rf"total_gpu_memory \({N}GiB\) x gpu_memory_utilization \({N}\) = {N}GiB", _profile),
        (
            "model weights take",
            rf"model weights take {N}GiB; non_torch_memory takes {N}GiB; PyTorch activation peak memory takes {N}GiB; "
            rf"the rest of the memory reserved for KV Cache is {N}GiB",
            _terms,
        ),
        (
            "Memory profiling results",
            rf"total_gpu_memory={N}GiB initial_memory_usage={N}GiB peak_torch_memory={N}GiB "
            rf"memory_usage_post_profile={N}G[iI][bB] non_torch_memory={N}GiB kv_cache_size={N}GiB gpu_memory_utilization={N}",
            _results,
        ),
        ("Available KV cache memory", rf"Available KV cache memory: {N} GiB", _figure("cache", least=True)),
        ("reserved", rf"reserved {N} GiB memory for KV Cache as specified", _figure("cache", least=True)),
        ("Initial free memory", rf"Initial free memory:? {N} GiB", _figure("free", least=True)),
        ("GPU KV cache size", rf"GPU KV cache size: {N} tokens", _counted("tokens")),
        ("blocks:", rf"# (?:GPU|cuda) blocks: {N}", _counted("blocks")),
        ("Overriding num_gpu_blocks", r"num_gpu_blocks_override=(\d{1,12})(?!\d)", _said("num_gpu_blocks_override")),
        ("Maximum concurrency", rf"Maximum concurrency for {N} tokens per request: {N}x", _concurrency),
        ("Estimated CUDA graph memory", rf"Estimated CUDA graph memory: {N} GiB", _figure("graphs_estimated")),
        ("CUDA graph pool memory", rf"\(actual\), {N} GiB \(estimated\)", _figure("graphs_estimated")),
        ("Graph capturing finished", rf"Graph capturing finished in [\d.]+ secs?, took {N} GiB", _figure("graphs")),
        (
            "on startup. Desired",
            rf"Free memory on device(?: \S+)? \({N}/{N} GiB\) on startup\. Desired GPU memory utilization is \({N}, {N} GiB\)",
            _summary,
        ),
        ("Actual usage is", rf"Actual usage is {N} GiB for weight", _figure("weights")),
        ("consumed memory", rf"Actual usage is {N} GiB for consumed memory", _figure("consumed")),
        ("for peak activation", rf"{N} GiB for peak activation", _figure("activations")),
        ("for non-torch memory", rf"{N} GiB for non-torch memory", _figure("libraries")),
        ("for CUDAGraph memory", rf"{N} GiB for CUDAGraph memory", _figure("graphs")),
        (
            "is less than desired",
            rf"Free memory on device(?: \S+)? \({N}/{N} GiB\) on startup is less than desired GPU memory utilization "
            rf"\({N}, {N} GiB\)",
            _occupied,
        ),
        ("No available memory for the cache", r"No available memory for the cache blocks", _failed("no_blocks")),
        (
            "KV cache is needed",
            rf"max seq len \({N}\), \(?{N} Gi?B KV cache is needed, which is larger than the available KV cache memory "
            rf"\({N} Gi?B\)"
            rf"(?:.{{0,80}}estimated maximum model length is {N})?",
            _failed("too_long", "length", "needed", "available", "longest"),
        ),
        (
            "max seq len (",
            rf"max seq len \({N}\) is larger than the maximum number of tokens that can be stored in KV cache \({N}\)",
            _failed("too_long", "length", "tokens"),
        ),
        ("warming up sampler", rf"out of memory.{{0,40}} warming up sampler with {N} dummy", _failed("out_of_memory", "seqs")),
        ("startup complete", r"Application startup complete", _said("started")),
        ("vLLM server on", r"Starting vLLM (?:API )?server", _said("started")),
)  # fmt: skip


def finished(boot: Boot) -> None:
    """What follows from several figures: activations from torch's peak, libraries from what was consumed."""
    figures = boot.figures
    if "torch_peak" in figures and "weights" in figures:
        figures.setdefault("activations", max(0, figures.pop("torch_peak") - figures["weights"]))
    if "consumed" in figures and "weights" in figures:
        figures.setdefault("libraries", figures["consumed"] - figures["weights"])
