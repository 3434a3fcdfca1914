"""llama.cpp's start-up log (`src/llama-model-loader.cpp`, `src/llama-context.cpp`,
`src/llama-kv-cache.cpp`, ggml-cuda)."""

import re

from kvcalc.diagnosis.startup import MIB, Boot, Failure, N, Take, number, rules

_HOST = ("CPU", "CUDA_Host", "ROCm_Host", "Host", "BLAS")


def begins(boot: Boot, line: str) -> bool:
    """Return whether a line begins another start: a second build, or a model after one with a
    context."""
    if line.startswith("build:") or " build: " in line[:60]:
        again = "build" in boot.words or bool(boot.named)
        boot.words["build"] = ""
        return again
    return (
        "loaded meta data with" in line
        and bool(boot.named)
        and "build" not in boot.words
        and "context" in boot.words
    )


def _named(boot: Boot, match: re.Match[str]) -> None:
    if boot.named:
        boot.words["draft"] = match[1]
    boot.named = boot.named or match[1]


def _card(boot: Boot, match: re.Match[str]) -> None:
    boot.gpu = boot.gpu or match[1].strip()
    boot.count("gpus", boot.counts.get("gpus", 0) + 1)


def _buffer(term: str) -> Take:
    """Return a reader of a buffer's size. Buffers of the host and of each device are separate."""

    def take(boot: Boot, match: re.Match[str]) -> None:
        if "draft" in boot.words:
            return
        host = match[1].startswith(_HOST)
        name = f"host_{term}" if host else f"{term} on {match[1]}"
        boot.figures[name] = boot.figures.get(name, 0) + round(number(match[2]) * MIB)

    return take


def _told(name: str) -> Take:
    def take(boot: Boot, match: re.Match[str]) -> None:
        boot.words["context"] = ""
        if "draft" not in boot.words:
            boot.told[name] = int(match[1]) if match[1].isdigit() else match[1] == "true"

    return take


def _layers(boot: Boot, match: re.Match[str]) -> None:
    on, of = int(match[1]), int(match[2])
    if on < of:
        boot.told["n_gpu_layers"] = on


def _cells(boot: Boot, match: re.Match[str]) -> None:
    """Record the cells of all streams, of the larger cache if windows have another, and the cache
    types."""
    boot.words["context"] = ""
    if "draft" not in boot.words:
        boot.count("cells", int(match[1]) * int(match[2] or 1))
        boot.words["k"], boot.words["v"] = match[3].lower(), match[4].lower()


def _kept(name: str) -> Take:
    def take(boot: Boot, match: re.Match[str]) -> None:
        if "draft" not in boot.words:
            boot.words.setdefault(name, match[1].strip())

    return take


def _failed(kind: str) -> Take:
    def fail(boot: Boot, match: re.Match[str]) -> None:
        tried = {"tried": round(number(match[1]) * MIB)} if match.groups() else {}
        if boot.failure is None:
            boot.failure = Failure(kind, match[0], tried)
        elif tried and not boot.failure.figures:
            boot.failure = Failure(boot.failure.kind, boot.failure.said, tried)

    return fail


def _version(boot: Boot, match: re.Match[str]) -> None:
    boot.version = boot.version or f"b{match[1]}"


def _free(boot: Boot, match: re.Match[str]) -> None:
    boot.gpu = boot.gpu or match[1].strip()
    boot.keep("free", number(match[2]) * MIB, least=True)


RULES = rules(
    ("build:", r"build: (\d{3,6}) \(", _version),
    ("Device ", r"Device \d+: ([^,]{3,80}), compute capability", _card),
    (
        "using device",
        r"using device \S+ \(([^()]{3,80})\)(?: \([^()]{1,40}\))? - (\d{1,12}) MiB free",
        _free,
    ),
    (
        "loaded meta data",
        r"loaded meta data with .{0,80} from (\S.{0,300}?)(?: \(version|$)",
        _named,
    ),
    (
        "general.name",
        r"(?:print_info|llm_load_print_meta): general\.name\s*= (.{1,120})",
        _kept("title"),
    ),
    ("model ftype", r"model ftype\s*= (.{1,60})", _kept("type")),
    ("file type", r"file type\s*= (.{1,60})", _kept("type")),
    ("offloaded", r"offloaded (\d{1,12})/(\d{1,12}) layers to GPU", _layers),
    ("model buffer size", rf"(\S+) model buffer size =\s*{N} MiB", _buffer("weights")),
    ("KV buffer size", rf"(\S+) KV buffer size =\s*{N} MiB", _buffer("cache")),
    ("RS buffer size", rf"(\S+) RS buffer size =\s*{N} MiB", _buffer("cache")),
    (
        "compute buffer size",
        rf"(\S+) compute buffer size =\s*{N} MiB",
        _buffer("activations"),
    ),
    (
        " cells,",
        r"MiB \(\s*(\d{1,12}) cells,\s*\d{1,12} layers(?:,\s*\d{1,9}(?:/(\d{1,9}))? seqs)?\), K "
        r"\((\w+)\):.{0,40}V \((\w+)\)",
        _cells,
    ),
    ("n_seq_max", r"n_seq_max\s*= (\d{1,12})", _told("max_num_seqs")),
    ("n_ctx ", r"\bn_ctx\s*= (\d{1,12})", _told("cells")),
    ("n_ubatch", r"n_ubatch\s*= (\d{1,12})", _told("max_num_batched_tokens")),
    ("kv_unified", r"kv_unified\s*= (true|false)", _told("kv_unified")),
    (
        "cudaMalloc failed",
        rf"allocating {N} MiB on device \d+: cudaMalloc failed",
        _failed("out_of_memory"),
    ),
    (
        "kv cache",
        r"failed to (?:allocate|initialize).{0,60}kv cache",
        _failed("no_blocks"),
    ),
    ("unable to allocate", r"unable to allocate \S+ buffer", _failed("weights")),
    (
        "failed to allocate compute",
        r"failed to allocate compute (?:pp )?buffers",
        _failed("out_of_memory"),
    ),
)


def finished(boot: Boot) -> None:
    """Use the largest buffers of all devices as the figures of one GPU, and record the cache
    types."""
    for term in ("weights", "cache", "activations"):
        each = [size for name, size in boot.figures.items() if name.startswith(f"{term} on ")]
        if each:
            boot.figures[term] = max(each)
            boot.count("devices", len(each))
    if "k" in boot.words:
        boot.told |= {"cache_type_k": boot.words["k"], "cache_type_v": boot.words["v"]}
