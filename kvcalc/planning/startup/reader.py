"""Logs to boots: bounded, never run, and without the escape sequences that terminals obey.

At most MOST_BYTES of a log are read, of a line MOST_LETTERS; what follows is passed over and said.
"""

import re
import sys
from collections import deque
from pathlib import Path
from types import ModuleType

from kvcalc.errors import UserError
from kvcalc.library.files import check_readable
from kvcalc.planning.startup import llama_cpp, sglang, vllm
from kvcalc.planning.startup.boot import GIB, MIB, Boot, Failure

MOST_BYTES, MOST_LETTERS, MOST_BOOTS = 64 << 20, 20_000, 50
MOST_FILE = 1 << 50
MOST_BEFORE = 200  # lines that are kept until one tells the engine
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]{0,20}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])|#033\[[\d;]{0,12}m")
_MARKS: tuple[tuple[str, str, ModuleType], ...] = (
    ("vllm", "vLLM API server version", vllm), ("vllm", "LLM engine (v", vllm), ("vllm", "non-default args:", vllm),
    ("sglang", "server_args=ServerArgs(", sglang), ("sglang", "Load weight begin. avail mem", sglang),
    ("llama.cpp", "llama_", llama_cpp), ("llama.cpp", "ggml_cuda_init", llama_cpp),
    ("vllm", "Model loading took", vllm), ("vllm", "Available KV cache memory", vllm), ("vllm", "cache blocks", vllm),
    ("vllm", "vllm/", vllm), ("vllm", "GPU KV cache size", vllm), ("vllm", "GPU memory utilization", vllm),
)  # fmt: skip
# What begins another boot, whatever engine the one before was of.
_STARTS = (
    ("vllm", "vLLM API server version"), ("vllm", "LLM engine (v"), ("sglang", "server_args=ServerArgs("),
    ("llama.cpp", "llama_model_loader: loaded meta data"),
)  # fmt: skip
_READERS = {"vllm": vllm, "sglang": sglang, "llama.cpp": llama_cpp}
_N = r"(\d{1,12}(?:\.\d{1,12})?)(?!\d)"
_TORCH = re.compile(
    rf"(?:CUDA|HIP) out of memory\. Tried to allocate {_N} (GiB|MiB)"
    rf"(?:.{{0,40}} has a total capacity of {_N} GiB of which {_N} (GiB|MiB) is free)?"
)
_PARTS = r"PRO|Super|SUPER|Ti|[A-Z]?\d[\w.-]{0,15}|NVL|PCIe|HBM3e?|Blackwell|Server|Workstation|Edition|Ada|Generation|Max-Q"
_CARDS = re.compile(
    rf"(NVIDIA[ _](?:GeForce[ _]|Tesla[ _]|TITAN[ _])?[A-Z][\w.-]{{1,20}}(?:[ _](?:{_PARTS})){{0,7}}|"
    r"Tesla[ _][A-Z]\d[\w.-]{1,20}|AMD[ _]Instinct[ _]MI\d{2,3}[A-Z]?|Apple M\d(?: (?:Pro|Max|Ultra))?|"
    r"GeForce RTX \d{4}(?: Ti| SUPER)?)"
)


def read_boots(name: str) -> tuple[list[Boot], list[str]]:
    """Every boot of a log, `-` being standard input, and what is to be said of the reading.

    Raises UserError for what is no text file, and for a log in which no engine that is known starts.
    """
    data, cut = _bytes(name)
    where = "standard input" if name == "-" else name
    if not data.strip():
        raise UserError("is empty", where)
    coded = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8"  # what a Windows shell redirects
    if (
        data[:4] in (b"\x7fELF", b"PK\x03\x04", b"\x89PNG", b"GGUF")
        or data[:2] == b"\x1f\x8b"
        or (coded == "utf-8" and b"\0" in data[:4096])
    ):
        raise UserError("is not a log in text", where)
    boots = _boots(data.decode(coded, errors="replace"))
    if not boots:
        there = f" in its first {MOST_BYTES >> 20} MiB, which alone are read" if cut else ""
        hint = "Cut the start-up out of it" if cut else "Give the log from its first line on"
        raise UserError(f"holds no start-up of vLLM, SGLang or llama.cpp{there}", where, hint)
    remarks = [f"{where}: only the first {MOST_BYTES >> 20} MiB are read"] if cut else []
    if len(boots) > MOST_BOOTS:
        remarks.append(f"{where}: the last {MOST_BOOTS} of {len(boots)} boots")
    return boots[-MOST_BOOTS:], remarks


def _bytes(name: str) -> tuple[bytes, bool]:
    """At most MOST_BYTES of a regular file, or of standard input, and whether there are more."""
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
            raise UserError(f"cannot be read: {(error.strerror or 'error').lower()}", name) from None
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
            found = next(((engine, module) for engine, mark, module in _MARKS if mark in line), None)
            if found is None:
                before.append(line)
                continue
            boot, reader = _new(found[0], at), found[1]
            boots.append(boot)
            for earlier in before:
                reader.begins(boot, earlier)
                _take(boot, reader, earlier)
        other = next((engine for engine, mark in _STARTS if engine != boot.engine and mark in line), "")
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
        one.memory = max(0, one.memory)  # a GPU's is never below 0, whatever a line says
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
    """torch's own words where an allocation fails."""
    unit = {"GiB": GIB, "MiB": MIB}
    figures = {"tried": round(float(match[1]) * unit[match[2]])}
    if match[3]:
        figures |= {"total": round(float(match[3]) * GIB), "free": round(float(match[4]) * unit[match[5]])}
        boot.memory = boot.memory or figures["total"]
    if boot.failure is None:
        boot.failure = Failure("out_of_memory", match[0], figures)


def _card(line: str) -> str:
    """The GPU that a line names, ''."""
    if not any(word in line for word in ("NVIDIA", "GeForce", "Tesla", "Instinct", "Apple M")):
        return ""
    match = _CARDS.search(line)
    return match[1].replace("_", " ") if match else ""
