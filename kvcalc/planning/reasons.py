"""Why a point does not meet a need, in words."""

from typing import Any, NamedTuple

from kvcalc.planning.block import GPUS, MEETS, MEMORY, THROUGHPUT, TPOT, TTFT, UNKNOWN, Block
from kvcalc.timing.deployment import Deployment
from kvcalc.units import format_bytes, format_seconds


class Point(NamedTuple):
    """One point of a block."""

    block: Block
    at: int

    @property
    def deployment(self) -> Deployment:
        return self.block.deployments[int(self.block.which[self.at])]

    @property
    def gpu(self) -> str:
        return self.deployment.gpu.name

    @property
    def setting(self) -> tuple[Any, ...]:
        """What tells it from every other point under its need."""
        block, at = self.block, self.at
        return self.deployment, block.speculated, int(block.counts[at]), int(block.replicas[at]), int(block.prefill[at])

    @property
    def gpus(self) -> int:
        """GPUs of all its replicas."""
        return int(self.block.gpus[self.at])

    @property
    def meets(self) -> bool:
        return bool(self.block.failing[self.at] == MEETS)

    @property
    def excess(self) -> float:
        return float(self.block.excess[self.at])

    @property
    def tpot(self) -> float | None:
        return known(self.block.tpot[self.at])

    @property
    def e2e(self) -> float | None:
        return None if self.block.e2e is None else known(self.block.e2e[self.at])


def points_of(block: Block) -> list[Point]:
    """Every point of a block."""
    return [Point(block, at) for at in range(len(block.counts))]


def known(value: Any) -> float | None:
    """A figure as a float; None where there is none."""
    return float(value) if value == value and abs(value) != float("inf") else None


def reason(point: Point) -> str | None:
    """What does not hold first, with both figures; None where all does."""
    block, at, need = point.block, point.at, point.block.need
    about = {"bound": "at least ", "scaled": "about "}.get(point.deployment.time_basis, "")
    limit = int(block.failing[at])
    if limit == MEMORY:
        return _memory(point)
    if limit == UNKNOWN:
        return f"{point.gpu} gives no matrix peak, so that the time of a prompt is not known"
    if limit == TTFT:
        return f"{about}{format_seconds(float(block.ttft[at]))} to the first token, more than {format_seconds(need.max_ttft)}"
    if limit == TPOT:
        return f"{about}{format_seconds(float(block.tpot[at]))} a token, more than {format_seconds(need.max_tpot)}"
    if limit == THROUGHPUT:
        return f"{block.total[at]:,.0f} tokens/s, fewer than {need.min_throughput:,.0f}"
    return f"the load takes {point.gpus:,} GPUs" if limit == GPUS else None


def _memory(point: Point) -> str:
    block, at = point.block, point.at
    left, wanted, holds = int(block.left[at]), int(block.counts[at]), int(block.capacity[at])
    if left < 0:
        return f"weights and what an engine needs beside them are {format_bytes(-left)} over a GPU's memory"
    return f"{holds:,} of {wanted:,} sequences of {block.need.lengths.context:,} tokens fit"
