"""What the time laws know of a GPU: its datasheet figures, per microsecond."""

from typing import NamedTuple

from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu


class Figures(NamedTuple):
    """Datasheet figures of one GPU in the laws' units.

    memory, link: bytes per µs (memory; to other GPUs, in one direction). bf16, fp8, fp4: dense matrix FLOP per µs, of the
    next wider unit where there is none. sms: streaming multiprocessors. l2: bytes of second-level cache.
    """

    memory: float
    bf16: float
    fp8: float
    sms: int
    l2: float
    link: float
    fp4: float = 0.0

    def peak(self, element_bytes: float) -> float:
        """Matrix FLOP per µs for operands of so many bytes: fp4's below one, fp8's for one, else bf16's."""
        return self.fp4 if element_bytes < 1 else self.fp8 if element_bytes == 1 else self.bf16


def figures_of(gpu: Gpu) -> Figures:
    """The figures of `gpu`. Raises UserError where its preset lacks one that the laws need: they fit GPUs with SMs alone."""
    if not gpu.sms or not gpu.l2_bytes:
        missing = "sms" if not gpu.sms else "l2_bytes"
        raise UserError(f"{gpu.name} gives no {missing}, which the time laws need", hint="Only the datasheet bound applies")
    return Figures(
        memory=gpu.bandwidth_bytes_per_s / 1e6,
        bf16=_peak(gpu, "bf16"),
        fp8=_peak(gpu, "fp8"),
        sms=gpu.sms,
        l2=float(gpu.l2_bytes),
        link=(gpu.link or gpu.bandwidth_bytes_per_s) / 1e6,
        fp4=_peak(gpu, "fp4"),
    )


def _peak(gpu: Gpu, dtype: str) -> float:
    """Return the matrix FLOP per µs of the unit that a dtype needs, with fp32 accumulators: measured kernels use those."""
    return gpu.flops_per_s[gpu.peak(dtype)[1]] / 1e6
