"""Describe one engine start as its log states it, and find its GPU.

The GPU follows from the name in the log, else from its memory. The readers of logs share the rules
of lines below.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvcalc.capacity.dialects import DIALECTS, Flag
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.library import presets
from kvcalc.library.load import load_gpu
from kvcalc.records import Settings

GIB, MIB = 1 << 30, 1 << 20


class Failure(msgspec.Struct, frozen=True):
    """The reason why a start failed.

    Attributes:
        kind: no_blocks (no memory left for the cache), too_long (one sequence of the maximum length
            does not fit), occupied (less is free than the share), out_of_memory, weights.
        said: The engine's message.
        figures: Bytes or tokens in the message: needed, available, longest, free, total, tried.
    """

    kind: str
    said: str
    figures: dict[str, int] = {}


class Boot(msgspec.Struct):
    """One engine start in a log.

    Attributes:
        lines: First and last line.
        named: The model's name in the log.
        gpu: The GPU's name in the log.
        memory: Bytes of the GPU; 0 if unknown.
        told: The engine's flags, by the names of `dialects`.
        figures: Bytes of one GPU by memory item.
        counts: Tokens, blocks, cells, GPUs and devices.
        words: Other texts of the log.
        started: Whether the engine served.
    """

    engine: str
    lines: tuple[int, int] = (0, 0)
    version: str = ""
    named: str = ""
    gpu: str = ""
    memory: int = 0
    told: Settings = {}
    figures: dict[str, int] = {}
    counts: dict[str, int] = {}
    words: dict[str, str] = {}
    failure: Failure | None = None
    started: bool = False

    def keep(self, name: str, size: float, least: bool = False) -> None:
        """Record the bytes of a rank; the largest of all ranks counts, or the smallest."""
        value = round(size)
        old = self.figures.get(name)
        self.figures[name] = (
            value if old is None else min(old, value) if least else max(old, value)
        )

    def count(self, name: str, value: int, least: bool = False) -> None:
        """Record a count in the same way. Negative counts are ignored."""
        if value < 0:
            return
        old = self.counts.get(name)
        self.counts[name] = (
            value if old is None else min(old, value) if least else max(old, value)
        )

    def tell(self, name: str, value: Any) -> None:
        """Record a flag. The first value counts."""
        if value is not None and value != "":
            self.told.setdefault(name, value)

    @property
    def says_anything(self) -> bool:
        return bool(self.named or self.figures or self.counts or self.failure)


_LEFT_OUT = re.compile(
    r"\b(nvidia|amd|geforce|tesla|instinct|graphics|edition|generation|gpu)\b"
)
MEMORY_TOLERANCE = 0.012  # relative difference of one card's total between drivers
NAMED_TOLERANCE = 0.12  # relative difference allowed for a card with this name
# GiB of unified memory of machines
MACHINES = (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)
# Candidates if only the memory is known, most frequent first.
USUAL = (
    "h100-sxm",
    "a100-80gb",
    "h200",
    "b200",
    "l40s",
    "a100-40gb-sxm",
    "rtx-4090",
    "rtx-3090",
    "l4",
    "t4",
    "a10",
    "rtx-5090",
    "mi300x",
    "h20",
    "v100-16gb",
    "v100",
    "gh200",
    "b300",
    "mi325x",
    "mi355x",
    "rtx-pro-6000-blackwell",
)


def card_of(name: str, memory: int) -> tuple[Gpu | None, str]:
    """Return the GPU of a log with its memory, or None, and a remark if only its memory is known.

    Raises UserError with all candidates if several GPUs have this memory.
    """
    result = _named(name)
    if result and memory and abs(result.memory_bytes / memory - 1) > NAMED_TOLERANCE:
        result = None
    if result:
        return _with(result, memory), ""
    if not memory:
        return None, ""
    near = [
        g for g in map(load_gpu, USUAL) if abs(g.memory_bytes / memory - 1) <= MEMORY_TOLERANCE
    ]
    if not near:
        return None, ""
    check_alone(near, f"{memory / 2**30:.2f} GiB")
    (best,) = near
    return (
        _with(best, memory),
        f"the log names no GPU: {memory / 2**30:.2f} GiB match {best.name}; --gpu overrides it",
    )


def machine_of(gpu: Gpu, free: int) -> int:
    """Return the memory of the smallest machine of this kind whose GPU may use `free` bytes."""
    sizes = (round(gib * 2**30) for gib in MACHINES)
    fitting = (size for size in sizes if _with(gpu, size).usable_bytes >= free)
    return min(next(fitting, gpu.memory_bytes), gpu.memory_bytes)


def check_alone(near: Sequence[Gpu], told: str) -> None:
    """Raise UserError if several GPUs match what the log states."""
    if len(near) > 1:
        names = [gpu.name for gpu in near]
        raise UserError(
            f"the log names no GPU, and {told} can be {', '.join(names[:-1])} or {names[-1]}",
            hint="Give it with --gpu",
        )


def _named(name: str) -> Gpu | None:
    words = re.split(r"[\s_-]+", _LEFT_OUT.sub(" ", name.lower().replace("_", " ")).strip())
    for count in range(len(words), 0, -1):
        try:
            return load_gpu(presets.find("-".join(words[:count]), "gpus").stem)
        except UserError:
            continue
    return None


def _with(gpu: Gpu, memory: int) -> Gpu:
    return msgspec.structs.replace(gpu, memory_bytes=memory) if memory else gpu


NUMBER = r"-?\d[\d,]{0,14}(?:\.\d{1,12})?"
N = rf"({NUMBER})(?!\d)"
Take = Callable[[Boot, re.Match[str]], None]
# A text that matching lines contain, the pattern, and the function that reads the match.
Rule = tuple[str, re.Pattern[str], Take]
# Of several ranks the smallest value counts: figures in bytes, and counts.
MIN_FIGURES = {"cache", "free", "left"}
COUNTS = {"tokens", "blocks", "without windows"}


def number(text: str) -> float:
    return float(text.replace(",", ""))


def read_fields(boot: Boot, match: re.Match[str]) -> None:
    """Record each named group by its name: a flag, a count, or a figure in GiB."""
    for name, text in match.groupdict().items():
        if text is None:
            continue
        value = number(text)
        if name == "memory":
            boot.memory = round(value * GIB)
        elif name == "gpu_memory_utilization":  # repeated later with its final value
            boot.told[name] = value
        elif name in COUNTS:
            boot.count(name, int(value), least=True)
        elif name.startswith(("max_", "num_")):
            boot.tell(name, int(value))
        else:
            boot.keep(name, value * GIB, least=name in MIN_FIGURES)


def rules(*rows: tuple[str, str] | tuple[str, str, Take]) -> list[Rule]:
    """Compile rules. `<name>` in a pattern is a number, which `read_fields` records by default."""
    compiled = []
    for anchor, pattern, *take in rows:
        pattern = re.sub(
            r"(?<!P)<(\w+)>", lambda field: f"(?P{field[0]}{NUMBER})(?!\\d)", pattern
        )
        compiled.append((anchor, re.compile(pattern), take[0] if take else read_fields))
    return compiled


def arguments_of(engine: str) -> dict[str, Flag]:
    """Return the engine's flags by the names in its own code."""
    flags = (flag for flag in DIALECTS[engine].flags if flag.name != "model")
    spelled = ((spelling, flag) for flag in flags for spelling in flag.spellings)
    return {
        spelling.lstrip("-").replace("-", "_"): flag
        for spelling, flag in spelled
        if spelling.startswith("--")
    }


def unquoted(text: str) -> Any:
    """Return the value of a Python literal: a string, None, True, False, or the text itself."""
    if text[:1] in "'\"":
        return text[1:-1]
    return {"None": None, "True": True, "False": False}.get(text, text)


def tell(boot: Boot, flag: Flag | None, value: Any) -> None:
    """Record an argument if it is a known flag and its value is valid."""
    if flag is None or value in (None, "") or flag.is_switch != isinstance(value, bool):
        return
    try:
        boot.tell(flag.name, value if flag.is_switch else flag.read(value))
    except UserError:
        return
