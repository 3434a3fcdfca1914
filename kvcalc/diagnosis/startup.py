"""Describe one engine start as its log states it, and find its GPU.

The GPU follows from the name in the log, else from its memory.
"""

import re

import msgspec

from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.library import presets
from kvcalc.library.load import load_gpu
from kvcalc.records import Settings

# The smallest of these figures among several ranks counts, but the largest of all others.
SMALLEST_FIGURES = ("cache", "free", "left")
MEMORY_TOLERANCE = 0.012  # relative difference of a GPU's total memory between drivers
NAMED_TOLERANCE = 0.12  # relative difference allowed for a GPU with the logged name
MACHINE_GIB = (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)  # unified memory
# GPUs to compare if only the memory is known, most frequent first
USUAL_GPUS = """
    h100-sxm a100-80gb h200 b200 l40s a100-40gb-sxm rtx-4090 rtx-3090 l4 t4 a10 rtx-5090 mi300x
    h20 v100-16gb v100 gh200 b300 mi325x mi355x rtx-pro-6000-blackwell
"""
_GENERIC_WORDS = re.compile(
    r"\b(nvidia|amd|geforce|tesla|instinct|graphics|edition|generation|gpu)\b"
)


class Boot(msgspec.Struct):
    """One engine start in a log.

    Attributes:
        lines: First and last line.
        model: The model's name.
        title: The model's title in a GGUF file.
        file_type: The format of the weights in a GGUF file, in words.
        gpu: The GPU's name.
        memory: Bytes of the GPU; 0 if unknown.
        flags: Values of the engine's flags, by the names of `dialects`.
        figures: Bytes of one GPU by memory item.
        buffers: Bytes of llama.cpp's buffers by memory item and device.
        counts: Tokens, cells and devices.
        failure: Why the start failed: no_blocks (no memory left for the cache), too_long (one
            sequence of the maximum length does not fit), occupied (less memory is free than the
            share), out_of_memory or weights. '' if the log states no failure.
        has_started: Whether the engine served.
        is_v0: Whether vLLM ran its V0 engine.
        has_draft: Whether llama.cpp loaded a second model, as a draft.
        start_lines: The kinds of lines at the beginning of a start that were read.
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
    figures: dict[str, float] = {}
    buffers: dict[tuple[str, str], int] = {}
    counts: dict[str, int] = {}
    failure: str = ""
    has_started: bool = False
    is_v0: bool = False
    has_draft: bool = False
    start_lines: set[str] = set()

    def add_figure(self, name: str, size_bytes: float) -> None:
        """Record the bytes of a rank."""
        select = min if name in SMALLEST_FIGURES else max
        self.figures[name] = select(size_bytes, self.figures.get(name, size_bytes))

    def size(self, name: str) -> int | None:
        """Return the bytes of a memory item; None if the log has none."""
        return round(self.figures[name]) if name in self.figures else None


def find_gpu(name: str, memory: int) -> tuple[Gpu | None, str]:
    """Return the GPU with the memory that the log states, and a remark if the log has no name.

    Args:
        name: The name in the log; '' if there is none.
        memory: Bytes of memory in the log; 0 if unknown.

    Returns:
        None instead of a GPU if no preset matches.

    Raises:
        UserError: Several GPUs have this memory.
    """
    preset = _preset(name)
    if preset and memory and abs(preset.memory_bytes / memory - 1) > NAMED_TOLERANCE:
        preset = None
    if preset:
        return with_memory(preset, memory), ""
    gpus = [
        gpu
        for gpu in map(load_gpu, USUAL_GPUS.split())
        if memory and abs(gpu.memory_bytes / memory - 1) <= MEMORY_TOLERANCE
    ]
    if not gpus:
        return None, ""
    size = f"{memory / 2**30:.2f} GiB"
    if len(gpus) > 1:
        *others, last = [gpu.name for gpu in gpus]
        problem = f"the log names no GPU, and {size} can be {', '.join(others)} or {last}"
        raise UserError(problem, hint="Give it with --gpu")
    remark = f"the log names no GPU: {size} match {gpus[0].name}; --gpu overrides it"
    return with_memory(gpus[0], memory), remark


def unified_memory(gpu: Gpu, free_bytes: float) -> int:
    """Return the memory in bytes of the smallest machine whose GPU may use `free_bytes`."""
    sizes = (round(gib * 2**30) for gib in MACHINE_GIB)
    fitting = (size for size in sizes if with_memory(gpu, size).usable_bytes >= free_bytes)
    return min(next(fitting, gpu.memory_bytes), gpu.memory_bytes)


def with_memory(gpu: Gpu, memory: int) -> Gpu:
    """Return a GPU with another memory in bytes; 0 leaves it unchanged."""
    return msgspec.structs.replace(gpu, memory_bytes=memory) if memory else gpu


def _preset(name: str) -> Gpu | None:
    """Return the preset with the longest part of a name. Example: "NVIDIA H100 80GB HBM3" is
    h100-80gb."""
    known_words = _GENERIC_WORDS.sub(" ", name.lower().replace("_", " "))
    words = re.split(r"[\s-]+", known_words.strip())
    for count in range(len(words), 0, -1):
        try:
            return load_gpu(presets.find("-".join(words[:count]), "gpus").stem)
        except UserError:
            continue
    return None
