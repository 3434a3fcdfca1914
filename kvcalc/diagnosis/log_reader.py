"""Read the engine starts in a log. Terminal escape sequences are removed.

At most MOST_BYTES of a log and MOST_LETTERS of a line are read.
"""

import re
import sys
from collections import deque
from pathlib import Path
from types import ModuleType

from kvcalc.diagnosis import llama_cpp_log, sglang_log, vllm_log
from kvcalc.diagnosis.startup import GIB, MIB, Boot, Failure
from kvcalc.errors import UserError
from kvcalc.library.files import check_readable

MOST_BYTES, MOST_LETTERS, MOST_BOOTS = 64 << 20, 20_000, 50
MOST_FILE = 1 << 50
MOST_BEFORE = 200  # lines in memory until one identifies the engine
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]{0,20}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])|"
    r"#033\[[\d;]{0,12}m"
)
_MARKS: tuple[tuple[str, str, ModuleType], ...] = (
    ("vllm", "vLLM API server version", vllm_log),
    ("vllm", "LLM engine (v", vllm_log),
    ("vllm", "non-default args:", vllm_log),
    ("sglang", "server_args=ServerArgs(", sglang_log),
    ("sglang", "Load weight begin. avail mem", sglang_log),
    ("llama.cpp", "llama_", llama_cpp_log),
    ("llama.cpp", "ggml_cuda_init", llama_cpp_log),
    ("vllm", "Model loading took", vllm_log),
    ("vllm", "Available KV cache memory", vllm_log),
    ("vllm", "cache blocks", vllm_log),
    ("vllm", "vllm/", vllm_log),
    ("vllm", "GPU KV cache size", vllm_log),
    ("vllm", "GPU memory utilization", vllm_log),
)
# Lines that begin another start, of any engine.
_STARTS = (
    ("vllm", "vLLM API server version"),
    ("vllm", "LLM engine (v"),
    ("sglang", "server_args=ServerArgs("),
    ("llama.cpp", "llama_model_loader: loaded meta data"),
)
_READERS = {"vllm": vllm_log, "sglang": sglang_log, "llama.cpp": llama_cpp_log}
_N = r"(\d{1,12}(?:\.\d{1,12})?)(?!\d)"
_TORCH = re.compile(
    rf"(?:CUDA|HIP) out of memory\. Tried to allocate {_N} (GiB|MiB)"
    rf"(?:.{{0,40}} has a total capacity of {_N} GiB of which {_N} (GiB|MiB) is free)?"
)
_PARTS = (
    r"PRO|Super|SUPER|Ti|[A-Z]?\d[\w.-]{0,15}|NVL|PCIe|HBM3e?|Blackwell|Server|Workstation|"
    r"Edition|Ada|Generation|Max-Q"
)
_CARDS = re.compile(
    r"(NVIDIA[ _](?:GeForce[ _]|Tesla[ _]|"
    rf"TITAN[ _])?[A-Z][\w.-]{{1,20}}(?:[ _](?:{_PARTS})){{0,7}}|"
    r"Tesla[ _][A-Z]\d[\w.-]{1,20}|AMD[ _]Instinct[ _]MI\d{2,3}[A-Z]?|Apple M\d(?: (?:Pro|Max|"
    r"Ultra))?|"
    r"GeForce RTX \d{4}(?: Ti| SUPER)?)"
)


def read_boots(name: str) -> tuple[list[Boot], list[str]]:
    """Return the engine starts of a log, and remarks. `-` is standard input.

    Raises UserError if the file is not text or has no start of a known engine.
    """
    data, cut = _bytes(name)
    where = "standard input" if name == "-" else name
    if not data.strip():
        raise UserError("is empty", where)
    # Windows shells write UTF-16.
    coded = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"
    if (
        data[:4] in (b"\x7fELF", b"PK\x03\x04", b"\x89PNG", b"GGUF")
        or data[:2] == b"\x1f\x8b"
        or (coded == "utf-8" and b"\0" in data[:4096])
    ):
        raise UserError("is not a log in text", where)
    boots = _boots(data.decode(coded, errors="replace"))
    if not boots:
        there = f" in its first {MOST_BYTES >> 20} MiB; the rest is not read" if cut else ""
        hint = "Give only the start-up" if cut else "Give the log from its first line on"
        raise UserError(f"has no start-up of vLLM, SGLang or llama.cpp{there}", where, hint)
    remarks = [f"{where}: only the first {MOST_BYTES >> 20} MiB are read"] if cut else []
    if len(boots) > MOST_BOOTS:
        remarks.append(f"{where}: the last {MOST_BOOTS} of {len(boots)} boots")
    return boots[-MOST_BOOTS:], remarks


def _bytes(name: str) -> tuple[bytes, bool]:
    """Return at most MOST_BYTES of a file or standard input, and whether there are more."""
    if name == "-":
        if sys.stdin is None:
            raise UserError("is closed", "standard input")
        data = sys.stdin.buffer.read(MOST_BYTES + 1)
    else:
        check_readable(Path(name), MOST_FILE)
        try:
            with Path(name).open("rb") as file:
                data = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise UserError(
                f"cannot be read: {(error.strerror or 'error').lower()}", name
            ) from None
    return data[:MOST_BYTES], len(data) > MOST_BYTES


def _boots(text: str) -> list[Boot]:
    boots: list[Boot] = []
    boot: Boot | None = None
    reader: ModuleType | None = None
    before: deque[str] = deque(maxlen=MOST_BEFORE)
    for at, raw in enumerate(text.split("\n"), 1):
        line = raw[:MOST_LETTERS]
        if "\x1b" in line or "#033" in line:
            line = _ESCAPES.sub("", line)
        if len(line) < 8:
            continue
        if boot is None or reader is None:
            result = next(
                ((engine, module) for engine, mark, module in _MARKS if mark in line),
                None,
            )
            if result is None:
                before.append(line)
                continue
            boot, reader = _new(result[0], at), result[1]
            boots.append(boot)
            for earlier in before:
                reader.begins(boot, earlier)
                _take(boot, reader, earlier)
        other = next(
            (engine for engine, mark in _STARTS if engine != boot.engine and mark in line),
            "",
        )
        if other:
            boot, reader = _new(other, at), _READERS[other]
            boots.append(boot)
            reader.begins(boot, line)
        elif reader.begins(boot, line):
            boot = _new(boot.engine, at, boot.gpu)
            boots.append(boot)
            reader.begins(boot, line)
        _take(boot, reader, line)
        boot.lines = (boot.lines[0], at)
    for one in boots:
        _READERS[one.engine].finished(one)
        one.memory = max(0, one.memory)
    return [b for b in boots if b.says_anything]


def _new(engine: str, at: int, card: str = "") -> Boot:
    return Boot(engine, (at, at), gpu=card, told={}, figures={}, counts={}, words={})


def _take(boot: Boot, reader: ModuleType, line: str) -> None:
    for anchor, pattern, take in reader.RULES:
        if anchor in line and (match := pattern.search(line)):
            take(boot, match)
    if "out of memory. Tried" in line and (match := _TORCH.search(line)):
        _torch(boot, match)
    if not boot.gpu:
        boot.gpu = _card(line)


def _torch(boot: Boot, match: re.Match[str]) -> None:
    """Record torch's message of a failed allocation."""
    unit = {"GiB": GIB, "MiB": MIB}
    figures = {"tried": round(float(match[1]) * unit[match[2]])}
    if match[3]:
        figures |= {
            "total": round(float(match[3]) * GIB),
            "free": round(float(match[4]) * unit[match[5]]),
        }
        boot.memory = boot.memory or figures["total"]
    if boot.failure is None:
        boot.failure = Failure("out_of_memory", match[0], figures)


def _card(line: str) -> str:
    """Return the GPU in a line, or ''."""
    if not any(word in line for word in ("NVIDIA", "GeForce", "Tesla", "Instinct", "Apple M")):
        return ""
    match = _CARDS.search(line)
    return match[1].replace("_", " ") if match else ""
