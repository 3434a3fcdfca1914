"""What one boot said."""

from typing import Any

import msgspec

GIB, MIB = 1 << 30, 1 << 20


class Failure(msgspec.Struct, frozen=True):
    """How a boot ended. kind: no_blocks (nothing left for the cache), too_long (not one sequence of the longest length),
    occupied (less is free than the share), out_of_memory, weights (they do not fit). said: the engine's words.

    figures: what the words hold, in bytes or tokens: needed, available, longest, free, total, tried.
    """

    kind: str
    said: str
    figures: dict[str, int] = {}


class Boot(msgspec.Struct):
    """One boot, as it is read.

    named: the model as the log has it. told: the engine's flags by the names of `dialects`. gpu: its name there. figures: bytes
    of one GPU by term, as the engine logs them; counts: tokens, blocks, cells, GPUs and devices.
    started: it got as far as serving.
    """

    engine: str
    lines: tuple[int, int] = (0, 0)
    version: str = ""
    named: str = ""
    gpu: str = ""
    memory: int = 0
    told: dict[str, Any] = {}
    figures: dict[str, int] = {}
    counts: dict[str, int] = {}
    words: dict[str, str] = {}
    failure: Failure | None = None
    started: bool = False

    def keep(self, name: str, size: float, least: bool = False) -> None:
        """A figure of a rank: the greatest of all ranks, or the least."""
        value = round(size)
        old = self.figures.get(name)
        self.figures[name] = value if old is None else min(old, value) if least else max(old, value)

    def count(self, name: str, value: int, least: bool = False) -> None:
        """A number, likewise; none is below 0."""
        if value < 0:
            return
        old = self.counts.get(name)
        self.counts[name] = value if old is None else min(old, value) if least else max(old, value)

    def tell(self, name: str, value: Any) -> None:
        """A flag; what was told first stays."""
        if value is not None and value != "":
            self.told.setdefault(name, value)

    @property
    def says_anything(self) -> bool:
        return bool(self.named or self.figures or self.counts or self.failure)
