"""The GPU of a log: by the name that a driver or a kernel's file gives it, else by its memory."""

import re
from collections.abc import Sequence

import msgspec

from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.library import catalog
from kvcalc.library.load import load_gpu

_LEFT_OUT = re.compile(r"\b(nvidia|amd|geforce|tesla|instinct|graphics|edition|generation|gpu)\b")
SAME = 0.012  # of the memory, by which the totals of one card differ between drivers
ALIKE = 0.12  # by which a card of that name may
MACHINES = (8, 16, 18, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)  # GiB of unified memory that machines are sold with
# Where memory alone is known, in the order in which servers have them.
USUAL = (
    "h100-sxm", "a100-80gb", "h200", "b200", "l40s", "a100-40gb-sxm", "rtx-4090", "rtx-3090", "l4", "t4", "a10", "rtx-5090",
    "mi300x", "h20", "v100-16gb", "v100", "gh200", "b300", "mi325x", "mi355x", "rtx-pro-6000-blackwell",
)  # fmt: skip


def card_of(name: str, memory: int) -> tuple[Gpu | None, str]:
    """The preset of a GPU with the memory that the log gives it, and a remark where that alone tells it; None: unknown.

    Raises UserError naming all that it could be, where the memory is that of several.
    """
    found = _named(name)
    if found and memory and abs(found.memory_bytes / memory - 1) > ALIKE:
        found = None
    if found:
        return _with(found, memory), ""
    if not memory:
        return None, ""
    near = [g for g in map(load_gpu, USUAL) if abs(g.memory_bytes / memory - 1) <= SAME]
    if not near:
        return None, ""
    check_alone(near, f"{memory / 2**30:.2f} GiB")
    (best,) = near
    return _with(best, memory), f"the log names no GPU: {memory / 2**30:.2f} GiB are taken for {best.name}'s; --gpu says which"


def machine_of(gpu: Gpu, free: int) -> int:
    """Bytes of the smallest machine of that kind whose system lets the GPU hold what was free at the start."""
    sizes = (round(gib * 2**30) for gib in MACHINES)
    fitting = (size for size in sizes if _with(gpu, size).usable_bytes >= free)
    return min(next(fitting, gpu.memory_bytes), gpu.memory_bytes)


def check_alone(near: Sequence[Gpu], told: str) -> None:
    """Raises UserError where what is told of a GPU is true of several."""
    if len(near) > 1:
        names = [gpu.name for gpu in near]
        raise UserError(
            f"the log names no GPU, and {told} can be {', '.join(names[:-1])} or {names[-1]}", hint="Give it with --gpu"
        )


def _named(name: str) -> Gpu | None:
    words = re.split(r"[\s_-]+", _LEFT_OUT.sub(" ", name.lower().replace("_", " ")).strip())
    for count in range(len(words), 0, -1):
        try:
            return load_gpu(catalog.find("-".join(words[:count]), "gpus").stem)
        except UserError:
            continue
    return None


def _with(gpu: Gpu, memory: int) -> Gpu:
    return msgspec.structs.replace(gpu, memory_bytes=memory) if memory else gpu
