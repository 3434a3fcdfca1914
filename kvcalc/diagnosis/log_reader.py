"""Read the engine starts in a log. Terminal escape sequences are removed.

At most MAX_BYTES of a log and MAX_LINE_CHARACTERS of a line are read.
"""

import json
import os
import re
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from kvcalc.capacity.engine_flags import DIALECTS, MAPPINGS, Flag
from kvcalc.capacity.memory_budget import GIB, MIB
from kvcalc.errors import UserError
from kvcalc.library.files import check_readable, file_error
from kvcalc.records import Settings

NUMBER = r"-?\d[\d,]{0,14}(?:\.\d{1,12})?"
# texts in a line that identify the engine, the most certain first
ENGINE_MARKS = re.findall(
    r"(\S+): (.+)",
    """
    vllm: vLLM API server version
    vllm: LLM engine (v
    vllm: non-default args:
    sglang: server_args=ServerArgs(
    sglang: Load weight begin. avail mem
    llama.cpp: llama_
    llama.cpp: ggml_cuda_init
    vllm: Model loading took
    vllm: Available KV cache memory
    vllm: cache blocks
    vllm: vllm/
    vllm: GPU KV cache size
    vllm: GPU memory utilization
    vllm: Maximum concurrency for
    vllm: GPU blocks:
    vllm: cuda blocks:
    vllm: for KV Cache
    vllm: kv_cache_size=
    vllm: stored in KV cache
    vllm: KV cache is needed
    vllm: LLM engine with config
    vllm: warming up sampler
    vllm: GPU KV cache usage
    vllm: is preempted
    sglang: KV Cache is allocated.
    sglang: max_total_num_tokens=
    sglang: increase --mem-fraction-static
    sglang: KV cache pool is full
    sglang: #queue-req
    trtllm: tokens in paged KV cache
    llama.cpp: ggml_backend
    llama.cpp: cudaMalloc failed
    torch: out of memory. Tried to allocate
    """,
)
# texts that begin a start of another engine than the one before
OTHER_STARTS = (
    *ENGINE_MARKS[:2],
    ENGINE_MARKS[3],
    ("llama.cpp", "llama_model_loader: loaded meta data"),
)
# texts of the first lines of a start; a second line of one kind begins another start
START_LINES = (
    "vLLM API server version",
    "LLM engine (v",
    "non-default args:",
    "args: Namespace(",
    "server_args=ServerArgs(",
)
# arguments that vLLM repeats in the line of its engine
CONFIG_ARGUMENTS = """
    model dtype tensor_parallel_size pipeline_parallel_size data_parallel_size quantization
    enforce_eager kv_cache_dtype max_model_len speculative_config
"""
V0_RELEASES = ("0.4.", "0.5.", "0.6.", "0.7.")  # vLLM's engine before V1 was the default
# Regular expressions, one on each line; a backslash continues a line. <name> is a number, <_> a
# number without a name. vLLM's V0 engine logs the peak of torch with the weights up to 0.6.6.
PATTERNS = {
    "vllm": r"""
        vllm serve (?P<model>[\w./][\w./-]*)(?P<arguments>.*)
        vLLM API server version v?(?P<version>\d+\.\d+[\w.+]*)
        non-default args: (?P<arguments>\{.*)
        args: Namespace\((?P<arguments>.*)
        LLM engine \(v(?P<version>[\w.+]+)\) with config: (?P<config>.*)
        V0 LLM engine(?P<is_v0>)
        Starting to load model (?P<model>\S+?)\.\.\.
        Using max model len <max_model_len>
        max_num_batched_tokens=<max_num_batched_tokens>
        Loading model weights took <weights> Gi?B
        Model loading took <weights> Gi?B
        total_gpu_memory \(<memory>GiB\) x gpu_memory_utilization \(<gpu_memory_utilization>\) = \
            <share>GiB
        model weights take <weights>GiB; non_torch_memory takes <libraries>GiB; PyTorch \
            activation peak memory takes <activations>GiB; the rest of the memory reserved for \
            KV Cache is <cache>GiB
        total_gpu_memory=<memory>GiB initial_memory_usage=<_>GiB \
            peak_torch_memory=<torch_peak>GiB memory_usage_post_profile=<_>G[iI][bB] \
            non_torch_memory=<libraries>GiB kv_cache_size=<cache>GiB \
            gpu_memory_utilization=<gpu_memory_utilization>
        Available KV cache memory: <cache> GiB
        reserved <cache> GiB memory for KV Cache as specified
        Initial free memory:? <free> GiB
        GPU KV cache size: <tokens> tokens
        GPU blocks: <blocks>
        cuda blocks: <blocks>
        kv_cache_size=<cache>GiB
        Overriding num_gpu_blocks.{0,80}num_gpu_blocks_override=<num_gpu_blocks_override>
        Maximum concurrency for <max_model_len> tokens per request: <concurrency>x
        Graph capturing finished in [\d.]+ secs?, took <graphs> GiB
        Free memory on device(?: \S+)? \(<free>/<memory> GiB\) on startup\. Desired GPU memory \
            utilization is \(<gpu_memory_utilization>, <share> GiB\)
        Actual usage is <weights> GiB for weight
        Actual usage is <consumed> GiB for consumed memory
        Actual usage is .{0,200}?<activations> GiB for peak activation
        Actual usage is .{0,200}?<libraries> GiB for non-torch memory
        Actual usage is .{0,200}?<graphs> GiB for CUDAGraph memory
        Application startup complete(?P<has_started>)
        Starting vLLM (?:API )?server(?P<has_started>)
        Free memory on device(?: \S+)? \(<free>/<memory> GiB\) on startup is less than desired \
            GPU memory utilization \(<gpu_memory_utilization>, <desired_share> GiB\)(?P<occupied>)
        No available memory for the cache blocks(?P<no_blocks>)
        max seq len \(<max_model_len>\), \(?<needed> Gi?B KV cache is needed, which is larger \
            than the available KV cache memory \(<cache> Gi?B\)(?P<too_long>)
        estimated maximum model length is <longest>
        max seq len \(<max_model_len>\) is larger than the maximum number of tokens that can be \
            stored in KV cache \((?=<tokens>)<longest>\)(?P<too_long>)
        out of memory occurred when warming up sampler(?P<outside_share>)
        out of memory occurred when warming up sampler with <dummy_requests> dummy requests
        Waiting: [1-9]\d{0,9} reqs, GPU KV cache usage: (?:9\d|100)(?P<is_full>)
        Running: <running> reqs, Waiting: (?=[1-9])<waiting> reqs, GPU KV cache usage: \
            (?:9\d|100)
        Pending: [1-9]\d{0,9} reqs, GPU KV cache usage: (?:9\d|100)(?P<is_full>)
        is preempted.{0,80}not enough KV cache space(?P<is_full>)
        LLM engine with config: (?P<config>.*)
        LLM engine with config(?P<is_v0>)
    """,
    "sglang": r"""
        server_args=ServerArgs\((?P<arguments>.*)
        launch_server.* --model(?:-path)?[ =](?P<model>\S+)
        launch_server(?P<arguments>.*)
        Load weight begin\. avail mem=<free> GB
        Load weight end\..{0,300}mem usage=<weights> GB
        KV Cache is allocated\.(?: dtype: \S+,)? #tokens: <tokens>, K size: <keys> GB, V \
            size: <values> GB
        KV Cache is allocated\.(?: dtype: \S+,)? #tokens: <tokens>, KV size: <keys> GB
        SWAKVPool mem usage: <all_pools> GB, swa size: \d{1,12}, full size: <full_tokens>
        Mamba Cache is allocated\..{0,120}conv_state size: <conv_states> ?GB, ssm_state size: \
            <ssm_states> ?GB
        uda graph end\..{0,80}mem usage=<graphs> GB
        CUDA graph end\..{0,80}mem usage=<graphs> GB
        max_total_num_tokens=<tokens>(?P<has_started>)
        max_total_num_tokens=.{1,400}chunked_prefill_size=<max_num_batched_tokens>
        max_total_num_tokens=.{1,400}context_len=<max_model_len>
        max_total_num_tokens=.{1,400}available_gpu_mem=<left> GB
        Not enough memory\. Please try to increase --mem-fraction-static(?P<no_blocks>)
        KV cache pool is full\. Retract requests(?P<is_full>)
        token usage: (?:0\.9|1\.0).{1,300}#queue-req: [1-9](?P<is_full>)
    """,
    "trtllm": r"""
        total: <memory> GiB, available: [\d.]+ GiB
        Allocated <cache> GiB for max tokens in paged KV cache \(<tokens>\)
        Using <tokens> tokens in paged KV cache
        max_seq_len=<max_model_len>, max_num_requests=<max_num_seqs>, \
            max_num_tokens=<max_num_batched_tokens>
        maxSequenceLen: <max_model_len>
    """,
    "llama.cpp": r"""
        build: (?P<version>\d{3,6}) \(
        Device \d+: (?P<gpu>[^,]{3,80}), compute capability
        using device \S+ \((?P<gpu>[^()]{3,80})\)(?: \([^()]{1,40}\))? - <free> MiB free
        loaded meta data with .{0,80} from (?P<model>\S.{0,300}?)(?: \(version|$)
        general\.name\s*= (?P<title>.{1,120})
        model ftype\s*= (?P<file_type>.{1,60})
        file type\s*= (?P<file_type>.{1,60})
        offloaded (?P<offloaded>\d{1,12}/\d{1,12}) layers to GPU
        <device> model buffer size =\s*<weights> MiB
        <device> KV buffer size =\s*<cache> MiB
        <device> RS buffer size =\s*<cache> MiB
        : size =\s*<all_layers> MiB \(
        <device> compute buffer size =\s*<activations> MiB
        MiB \(\s*(?P<stream_cells>\d{1,12}) cells,\s*\d{1,12} \
            layers(?:,\s*\d{1,9}(?:/\s*(?P<streams>\d{1,9}))? seqs)?\), K \
            \((?P<cache_type_k>\w+)\):.{0,40}V \((?P<cache_type_v>\w+)\)
        n_seq_max\s*= <max_num_seqs>
        n_ctx\s*= <cells>
        n_ubatch\s*= <max_num_batched_tokens>
        kv_unified\s*= (?P<kv_unified>true|false)
        flash_attn\s*= (?P<flash_attn>0)
        Flash Attention was auto, set to (?P<flash_attn>disabled)
        allocating <allocation> MiB on device \d+: cudaMalloc failed(?P<out_of_memory>)
        failed (?:to (?:allocate|initialize).{0,60}kv|for self-attention) cache(?P<no_blocks>)
        unable to allocate \S+ buffer(?P<weights_failed>)
        failed to allocate compute (?:pp )?buffers(?P<out_of_memory>)
    """,
    "torch": "",
}
TORCH_PATTERNS = r"""
        out of memory\. Tried to allocate (?P<out_of_memory>)
        out of memory\. Tried to allocate <allocation> GiB
        out of memory\. Tried to allocate <allocation_mib> MiB
        out of memory\. Tried to allocate .{0,80} total capacity of <memory> GiB
        total capacity of .{1,20} of which <unused> GiB is free
        total capacity of .{1,20} of which <unused_mib> MiB is free
        this process has <own> GiB memory in use
        this process has <own_mib> MiB memory in use
"""
_GPU_WORDS = (
    r"PRO|Super|SUPER|Ti|[A-Z]?\d[\w.-]{0,15}|NVL|PCIe|HBM3e?|Blackwell|Server|Workstation|"
    r"Edition|Ada|Generation|Max-Q"
)
GPU_NAME = re.compile(
    r"NVIDIA[ _](?:GeForce[ _]|Tesla[ _]|TITAN[ _])?[A-Z][\w.-]{1,20}"
    rf"(?:[ _](?:{_GPU_WORDS})){{0,7}}|"
    r"Tesla[ _][A-Z]\d[\w.-]{1,20}|AMD[ _]Instinct[ _]MI\d{2,3}[A-Z]?|"
    r"Apple M\d(?: (?:Pro|Max|Ultra))?|GeForce RTX \d{4}(?: Ti| SUPER)?"
)


@cache
def compile_patterns(engine: str) -> list[tuple[str, re.Pattern[str]]]:
    """Return the compiled patterns that read an engine's log lines and torch's memory errors.

    Each item is a pair: a text that every matching line contains, and the pattern. A search for the
    text is faster, so callers do it first.

    Args:
        engine: Name of the engine: "vllm", "sglang" or "llama.cpp".
    """
    patterns = []
    text = re.sub(r"\\\n\s*", "", PATTERNS[engine] + TORCH_PATTERNS)
    for pattern in re.findall(r"\S.*", text.replace("<_>", NUMBER)):
        start = re.match(r"(?:[^<(\[\\?*.+|](?![?*]))+", pattern.removeprefix("<device> "))
        assert start, pattern
        expression = pattern.replace("<device>", r"(?P<device>\S+)")
        expression = re.sub(
            r"(?<!P)<(\w+)>", lambda field: rf"(?P{field[0]}{NUMBER})(?!\d)", expression
        )
        patterns.append((start[0], re.compile(expression)))
    return patterns


# The smallest of these figures among several ranks counts, but the largest of all others.
SMALLEST_FIGURES = "cache free left unused"


class Boot(msgspec.Struct):
    """One start of an engine, as its log states it.

    Attributes:
        engine: Name of the engine, such as "vllm".
        lines: Numbers of the first and the last line of the start, from 1.
        gpu: The GPU's name; "" if unknown.
        version: The engine's version; "" if unknown.
        model: The model's name or path; "" if unknown.
        title: The model's title in a GGUF file; "" if unknown.
        file_type: The format of the weights in a GGUF file, such as "Q4_K - Medium".
        memory: Memory of one GPU in bytes; 0 if unknown.
        flags: Values of the engine's flags, by kvcalc's option names, such as {"tp": 2}.
        figures: Logged bytes of one GPU, by memory item, such as "weights". "available" is the
            memory that other processes left when an allocation failed.
        buffers: Bytes of llama.cpp's buffers, by memory item and name of the device.
        concurrency: Requests of max_model_len tokens that vLLM's KV cache stores, such as 33.04,
            on one data-parallel rank; 0 if unknown.
        counts: Capacity of the KV cache, by unit: "tokens", "full_tokens" (SGLang's tokens of
            layers without a window) or "cells" (llama.cpp's slots of one token).
        failure: Why the start failed: no_blocks (no memory left for the cache), too_long (one
            sequence of the maximum length does not fit), occupied (less memory is free than the
            engine's share), outside_share (no memory left outside the engine's share),
            out_of_memory or weights (they do not fit). "" if the log states no failure.
        has_started: Whether the log says that the engine started successfully.
        is_v0: Whether vLLM ran its V0 engine.
        is_full: Whether requests waited while the KV cache was at least 90% full.
        has_draft: Whether llama.cpp loaded a second model, as a draft.
        start_lines: Names of those log messages of this start that an engine writes once, at its
            beginning. If a message comes again, another start begins.
    """

    engine: str
    lines: tuple[int, int]
    gpu: str = ""
    version: str = ""
    model: str = ""
    title: str = ""
    file_type: str = ""
    memory: int = 0
    flags: Settings = {}
    figures: dict[str, int] = {}
    buffers: dict[tuple[str, str], int] = {}
    concurrency: float = 0
    counts: dict[str, int] = {}
    failure: str = ""
    has_started: bool = False
    is_v0: bool = False
    is_full: bool = False
    has_draft: bool = False
    start_lines: set[str] = set()

    @property
    def cache_bytes(self) -> int:
        """Return the logged bytes of the KV cache: the sum of llama.cpp's GPUs, or of one GPU."""
        caches = [size for (item, _), size in self.buffers.items() if item == "cache"]
        return sum(caches) or self.size("cache")

    def size(self, name: str) -> int:
        """Return the logged bytes of a memory item on one GPU; 0 if the log states none.

        Args:
            name: Key of the item in `figures`, such as "weights" or "cache".
        """
        return self.figures.get(name, 0)


MAX_BYTES, MAX_LINE_CHARACTERS = 64 << 20, 20_000
FIRST_LINE = """\
Give the log from its first line on, at most 64 MiB, or a line with the size of the KV cache, such \
as `GPU KV cache size: 75,824 tokens`"""
BLOCK_TOKENS = 16  # vLLM's default block size
MAX_EARLIER_LINES = 200  # read before the first line that identifies the engine
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]{0,20}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])|"
    r"#033\[[\d;]{0,12}m"
)
_VERSION = re.compile(r"(?:LLM engine \(|API server version )v?(\d+\.\d+[\w.+]*)")
_RANK = re.compile(r"\(([A-Za-z_0-9 ]{1,40}) pid=\d+\)|\b(?:TP|DP|PP)\d+")
_VALUE = (
    r"('[^']{0,400}'|\"[^\"]{0,400}\"|\{[^{}]{0,400}\}|\[[^\[\]]{0,400}\]|"
    r"[A-Za-z]{1,60}\([^()]{0,400}\)|[\w.+-]{1,80})"
)
_MAPPING_ITEM = re.compile(rf"'([a-z_0-9]{{1,60}})': {_VALUE}")
_KEYWORD_ARGUMENT = re.compile(rf"\b([a-z_0-9]{{1,60}})={_VALUE}")
_FLAG = re.compile(r"(?:^| )--?([a-z][\w-]*)[ =]+(?!-)")
BOOT_TEXTS = "version model gpu title file_type"
FAILURES = "no_blocks too_long occupied outside_share out_of_memory weights_failed"
FLAG_NUMBERS = """
    gpu_memory_utilization max_model_len max_num_batched_tokens max_num_seqs
    num_gpu_blocks_override cells
"""
FLAG_TEXTS = "cache_type_k cache_type_v flash_attn kv_unified"
FLAG_VALUES = {"true": True, "false": False, "0": "off", "disabled": "off"}
LAST_COUNTS = ("running", "waiting")  # of the last message about a full cache
COUNTS = "tokens full_tokens longest blocks dummy_requests running waiting"
HOST_DEVICES = ("CPU", "CUDA_Host", "ROCm_Host", "Host", "BLAS")


def read_boots(name: str) -> tuple[list[Boot], list[str]]:
    """Return the engine starts of a log in order, and remarks for the user on unread parts.

    Only the first 64 MiB of the log are read.

    Args:
        name: Path of the log file; "-" for standard input.

    Raises:
        UserError: The file is not text or has no start of a known engine.
    """
    data = _read_bytes(name)
    place = "standard input" if name == "-" else name
    if not data.strip():
        raise UserError("is empty", where=place)
    # Windows shells write UTF-16
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    if encoding == "utf-8" and b"\0" in data[:4096]:
        raise UserError("is not a log in text", where=place)
    boots = _split_boots(data[:MAX_BYTES].decode(encoding, errors="replace"))
    if not boots:
        raise UserError(
            "has no start-up of vLLM, SGLang, TensorRT-LLM or llama.cpp", FIRST_LINE, place
        )
    return boots, [f"{place}: only the first 64 MiB are read"] * (len(data) > MAX_BYTES)


def _read_bytes(name: str) -> bytes:
    """Return at most MAX_BYTES of a file or standard input, and one more byte if more follow.

    A name of four words or more that is no file is itself the text of a log.
    """
    if len(name.split()) > 3 and not os.path.exists(name):  # noqa: PTH110 (a text may be long)
        data = name.encode()
    elif name == "-":
        data = sys.stdin.buffer.read(MAX_BYTES + 1)
    else:
        check_readable(Path(name), 1 << 50)
        try:
            with Path(name).open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError as error:
            raise file_error("read", error, name) from None
    return data


def _joined_lines(match: re.Match[str]) -> str:
    """Return continued lines as one, and empty lines that keep the numbers of the lines after."""
    return match[0].replace("\\\n", " ") + "\n" * match[0].count("\n")


def _split_boots(text: str) -> list[Boot]:
    """Return the engine starts in the text of a log. A start without any known line is left out."""
    lines = re.sub(r"(?m)^(?:.*\\\n)+.*", _joined_lines, text).split("\n")
    first, engine = next(
        (
            (number, engine)
            for is_torch in (False, True)  # an error of torch may come before the engine's
            for number, line in enumerate(lines)
            for engine, mark in ENGINE_MARKS
            if mark in line and (engine == "torch") == is_torch
        ),
        (0, ""),
    )
    if not engine:
        return []
    boots = [Boot(engine, (first + 1, first + 1))]
    for index in range(max(0, first - MAX_EARLIER_LINES), len(lines)):
        line = lines[index][:MAX_LINE_CHARACTERS]
        if "\x1b" in line or "#033" in line:
            line = _ESCAPES.sub("", line)
        boot = boots[-1]
        starts = (name for name, mark in OTHER_STARTS if name != boot.engine and mark in line)
        other = next(starts, "")
        if other or _begins_boot(boot, line):
            gpu = "" if other else boot.gpu
            boots.append(Boot(other or boot.engine, (index + 1, index + 1), gpu))
            _begins_boot(boots[-1], line)
        _read_line(boots[-1], line)
        boots[-1].lines = boots[-1].lines[0], index + 1
    for boot in boots:
        _complete_figures(boot)
    return [
        boot
        for boot in boots
        if boot.model
        or boot.figures
        or boot.counts
        or boot.failure
        or boot.concurrency
        or boot.is_full
    ]


def _begins_boot(boot: Boot, line: str) -> bool:
    """Return whether a line begins another start than this one, and record the kind of line.

    A start of vLLM or SGLang has one version and at most one line of each kind; lines of vLLM's
    engine occur once for each rank. A start of llama.cpp has one line with the build, or one model
    before its context.
    """
    if boot.engine == "llama.cpp":
        if line.startswith("build:") or " build: " in line[:60]:
            is_another = "build" in boot.start_lines or bool(boot.model)
            boot.start_lines.add("build")
            return is_another
        has_context = "build" not in boot.start_lines and "cells" in boot.flags
        return "loaded meta data with" in line and bool(boot.model) and has_context
    kind = next((text for text in START_LINES if text in line), "")
    if not kind:
        return False
    version = _VERSION.search(line)
    if version and boot.version and version[1] != boot.version:
        return True
    rank = _RANK.search(line) if kind == START_LINES[1] else None
    key = f"{kind} {rank[1] if rank else ''}"
    is_another = key in boot.start_lines or (kind == START_LINES[0] and bool(boot.start_lines))
    boot.start_lines.add(key)
    return is_another


def _read_line(boot: Boot, line: str) -> None:
    """Store in a boot the groups of all patterns that match a line."""
    for text, expression in compile_patterns(boot.engine):
        if text in line and (match := expression.search(line)):
            for name, value in match.groupdict().items():
                # figures of a draft do not count
                if value is not None and (not boot.has_draft or name in FAILURES.split()):
                    _record(boot, name, value.strip(), match)
    if not boot.gpu and (name_match := GPU_NAME.search(line)):
        boot.gpu = name_match[0].replace("_", " ")


def _record(boot: Boot, name: str, text: str, match: re.Match[str]) -> None:
    """Record a group of a pattern by its name."""
    is_llama_cpp = boot.engine == "llama.cpp"
    if name in FAILURES.split():
        # a later message gives the reason for a failed allocation
        if boot.failure in ("", "out_of_memory"):
            boot.failure = name.removesuffix("_failed")
    elif name in BOOT_TEXTS.split():
        boot.has_draft = is_llama_cpp and name == "model" and bool(boot.model)
        prefix = "b" if is_llama_cpp and name == "version" else ""  # as builds are tagged
        setattr(boot, name, getattr(boot, name) or prefix + text)
    elif name in ("is_v0", "has_started", "is_full"):
        setattr(boot, name, True)
    elif name in ("arguments", "config"):
        _record_arguments(boot, name, text)
    elif name in FLAG_TEXTS.split():
        boot.flags[name] = FLAG_VALUES.get(text, text.lower())
    elif name == "offloaded":
        layers, all_layers = map(int, text.split("/"))
        if layers < all_layers:
            boot.flags["n_gpu_layers"] = layers
    elif name == "stream_cells":  # the larger cache counts if windows have their own
        streams = int(match["streams"] or 1)
        if streams > 1:  # a stream for each slot
            boot.flags.setdefault("max_num_seqs", streams)
        cells = int(text) * streams
        boot.counts["cells"] = max(cells, boot.counts.get("cells", 0))
        boot.flags.setdefault("cells", cells)
    elif name not in ("streams", "device"):
        _record_number(boot, name, float(text.replace(",", "")), match)


def _record_number(boot: Boot, name: str, value: float, match: re.Match[str]) -> None:
    """Record a number as memory, count, flag or figure. Negative counts and flags are ignored."""
    is_mib = boot.engine == "llama.cpp" or name.endswith("_mib")
    size = round(value * (MIB if is_mib else GIB))
    name = name.removesuffix("_mib")
    # TensorRT-LLM first measures its activations with a small cache
    least = max if boot.engine == "trtllm" else min
    if name == "memory":
        boot.memory = max(0, size)
    elif name == "concurrency":
        boot.concurrency = value
    elif name in COUNTS.split():
        if value >= 0:
            earlier = value if name in LAST_COUNTS else boot.counts.get(name, value)
            boot.counts[name] = int(least(value, earlier))
    elif name in FLAG_NUMBERS.split():
        if value >= 0:
            boot.flags[name] = value if value < 1 else int(value)
    elif name == "all_layers":  # windows have a cache of their own
        boot.figures[name] = boot.figures.get(name, 0) + size
    elif "device" not in match.groupdict():
        select = least if name in SMALLEST_FIGURES.split() else max
        boot.figures[name] = select(size, boot.figures.get(name, size))
    elif match["device"].startswith(HOST_DEVICES):
        boot.figures[f"host_{name}"] = boot.figures.get(f"host_{name}", 0) + size
    else:
        key = name, match["device"]
        boot.buffers[key] = boot.buffers.get(key, 0) + size


def _record_arguments(boot: Boot, name: str, text: str) -> None:
    """Record the engine's arguments, of its command line or as Python printed them. Without a
    tensor-parallel size, it is 1."""
    text = _FLAG.sub(lambda match: f" {match[1].replace('-', '_')}=", text)
    text = text.replace("max_seq_len=", "max_model_len=").replace("=torch.", "=")
    for argument, value in _parse_arguments(text):
        if name == "config" and argument not in CONFIG_ARGUMENTS.split():
            continue
        if argument in ("model", "model_tag", "model_path") and value:
            boot.model = boot.model or value
        flag = _flags_by_argument(boot.engine).get(argument)
        if flag is None or value in (None, "", "auto"):
            continue
        if flag.name in MAPPINGS and isinstance(value, str):
            items = {
                key: int(item) if isinstance(item, str) and item.isdigit() else item
                for key, item in _parse_arguments(value)
            }
            if items:
                boot.flags.setdefault(flag.name, json.dumps(items))
        elif flag.is_switch:
            if value is True:
                boot.flags.setdefault(flag.name, flag.setting)
        elif not isinstance(value, bool):
            with suppress(UserError):
                boot.flags.setdefault(flag.name, flag.read(value))
    boot.flags.setdefault("tp", 1)


@cache
def _flags_by_argument(engine: str) -> dict[str, Flag]:
    """Return the engine's flags by the names of its arguments in Python. Example: `tp_size`."""
    return {
        spelling.lstrip("-").replace("-", "_"): flag
        for flag in DIALECTS[engine].flags
        for spelling in flag.spellings
        if flag.name != "model"
    }


def _parse_arguments(text: str) -> list[tuple[str, Any]]:
    """Return the items of a Python mapping, or the keyword arguments, in a text. Strings, None,
    True and False become Python values; other values stay text."""
    pattern = _MAPPING_ITEM if text.startswith("{") else _KEYWORD_ARGUMENT
    constants = {"None": None, "True": True, "False": False}
    return [
        (name, value[1:-1] if value[0] in "'\"" else constants.get(value, value))
        for name, value in pattern.findall(text)
    ]


def _complete_figures(boot: Boot) -> None:
    """Compute the figures that a log states only in parts, and the engine of old releases.

    The peak of torch includes weights. SGLang's cache consists of keys and values of all pools, and
    states. For llama.cpp, the device with the most memory in use counts, and old releases log the
    tokens of the cache only as `n_ctx`. A cache of negative size is a failed start. vLLM and SGLang
    allocate nothing in their share after the cache, so a later allocation fails outside the share.
    If the longest request does not fit, the estimated length is 1% below the ratio of the logged
    sizes, because the log rounds them.
    """
    if boot.version.startswith(V0_RELEASES):
        boot.is_v0 = True
    figures = boot.figures
    if "blocks" in boot.counts:
        boot.counts.setdefault("tokens", BLOCK_TOKENS * boot.counts["blocks"])
    weights = boot.size("weights")
    if weights and "torch_peak" in figures:
        figures.setdefault("activations", max(0, figures.pop("torch_peak") - weights))
    if weights and "consumed" in figures:
        figures.setdefault("libraries", figures["consumed"] - weights)
    if "own" in figures:
        figures["available"] = figures["own"] + boot.size("unused")
    if boot.engine == "sglang":
        cache_bytes = boot.size("keys") + boot.size("values")
        if "all_pools" in figures:
            cache_bytes = boot.size("all_pools")
            boot.counts["tokens"] = boot.counts.pop("full_tokens")
        if cache_bytes:
            figures["cache"] = cache_bytes + boot.size("conv_states") + boot.size("ssm_states")
    if boot.size("cache") < 0 and not boot.failure:
        boot.failure = "no_blocks"
    if "all_layers" in figures and not boot.buffers:
        figures["cache"] = figures["all_layers"]
    for (item, _), size in boot.buffers.items():
        figures[item] = max(size, figures.get(item, 0))
    if "cells" in boot.flags and not boot.failure:
        boot.counts.setdefault("cells", boot.flags["cells"])
    if boot.failure == "too_long" and (needed := boot.size("needed")):
        length = 0.99 * boot.flags["max_model_len"] * boot.size("cache") / needed
        boot.counts["estimate"] = int(length) // 16 * 16
    has_cache = "cache" in figures or "tokens" in boot.counts
    if boot.failure == "out_of_memory" and has_cache and boot.engine != "llama.cpp":
        boot.failure = "outside_share"
