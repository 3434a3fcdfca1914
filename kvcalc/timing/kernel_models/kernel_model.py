"""Datasheet figures of a GPU per microsecond, and the base class of kernel models.

A kernel model has a few physical parameters, each with a unit, a meaning and a range, and a
vectorised formula. All formulas have the same form, in microseconds:

    t = t0 + min over launch plans of pnorm_p(compute time, memory time)

`pnorm_p(a, b) = (a^p + b^p)^(1/p)` is the softened maximum of two engines that overlap: p = ∞ is
the maximum of a roofline, p = 1 the plain sum.
"""

from functools import cache
from typing import Any, ClassVar, NamedTuple

import msgspec

from kvcalc.arithmetic import maximum, minimum, power, select, where
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.records import Settings


class GpuParameters(NamedTuple):
    """Datasheet figures of one GPU in the units of kernel models.

    Attributes:
        memory: Memory bandwidth [bytes/µs].
        bf16, fp8, fp4: Dense matrix peaks [FLOP/µs]. A missing unit has the rate of the next wider
            dtype.
        sms: Number of streaming multiprocessors.
        l2: Size of the L2 cache [bytes].
        link: Rate to other GPUs in one direction [bytes/µs].
    """

    memory: float
    bf16: float
    fp8: float
    sms: int
    l2: float
    link: float
    fp4: float = 0.0

    def peak(self, element_bytes: float) -> float:
        """Return the dense matrix peak in FLOP/µs for operands of a width.

        The peak is of fp4 below one byte, of fp8 for one byte, otherwise of bf16.

        Args:
            element_bytes: Bytes of one operand element, without scales.
        """
        return self.fp4 if element_bytes < 1 else self.fp8 if element_bytes == 1 else self.bf16


def figures_of(gpu: Gpu) -> GpuParameters:
    """Return the datasheet figures of `gpu`, in the units of kernel models (bytes/µs, FLOP/µs).

    Args:
        gpu: GPU preset.

    Raises:
        UserError: The preset lacks the number of SMs, the size of the L2 or a matrix peak.
    """
    if not gpu.sms or not gpu.l2_bytes:
        missing = "sms" if not gpu.sms else "l2_bytes"
        raise UserError(
            f"{gpu.name} gives no {missing}, which the time laws need",
            "Only the datasheet bound applies",
        )
    return GpuParameters(
        memory=gpu.bandwidth_bytes_per_s / 1e6,
        bf16=_peak(gpu, "bf16"),
        fp8=_peak(gpu, "fp8"),
        sms=gpu.sms,
        l2=float(gpu.l2_bytes),
        link=(gpu.link or gpu.bandwidth_bytes_per_s) / 1e6,
        fp4=_peak(gpu, "fp4"),
    )


def _peak(gpu: Gpu, dtype: str) -> float:
    """Return the matrix FLOP/µs of a dtype with fp32 accumulators, which measured kernels use."""
    return gpu.flops_per_s[gpu.peak(dtype)[1]] / 1e6


# A fused elementwise kernel (norm, RoPE, activation, residual sum) is not measured. Both figures
# are assumed, as calibrations state: a launch inside a CUDA graph, and the usual share of the
# bandwidth of streaming kernels.
LAUNCH_US, STREAMING_SHARE = 1.5, 0.8

Array = Any  # a number, or a NumPy array of numbers


class Range(NamedTuple):
    """Range of one fitted parameter, in the parameter's unit. All three numbers are positive.

    Attributes:
        minimum: Smallest value that a fit may give.
        maximum: Largest value that a fit may give.
        typical: Default value of the field, near which the fit starts.
    """

    minimum: float
    maximum: float
    typical: float


class KernelModel(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="form"
):
    """Base class of kernel models. Fields with a range are fitted; other fields select a form.

    Attributes:
        RANGES: A line per fitted parameter: its name, minimum and maximum. A subclass inherits the
            lines of its base class. A parameter with the default value 0 is not fitted.
        CHOICES: Alternative values of the fields that select a form, each as a dict. A fit tries
            each of them.
        SOFTNESS: Relative error of a row at which the loss of a fit changes from quadratic to
            linear.
        PRIOR_DEVIATION: Number of e-folds from its typical value at which a parameter costs as much
            as an error of SOFTNESS in one row; 0 for no cost.
    """

    RANGES: ClassVar[str] = ""
    CHOICES: ClassVar[tuple[Settings, ...]] = ({},)
    SOFTNESS: ClassVar[float] = 0.04
    PRIOR_DEVIATION: ClassVar[float] = 0.0

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        """Return the microseconds of one call on a GPU.

        Args:
            machine: Datasheet figures of the GPU.
            shape: Sizes of the call, as numbers or arrays of equal shape. The class docstring gives
                their order, such as m, n and k for GEMMs.
        """
        raise NotImplementedError

    @classmethod
    @cache
    def ranges(cls) -> dict[str, Range]:
        """Return the range of each fitted parameter by name, in the order of the fields."""
        limits: dict[str, tuple[float, float]] = {}
        for base in reversed(cls.__mro__):
            for line in vars(base).get("RANGES", "").strip().splitlines():
                name, low, high = line.split()
                limits[name] = float(low), float(high)
        defaults = {field.name: field.default for field in msgspec.structs.fields(cls)}
        return {
            name: Range(*limits[name], typical)
            for name, typical in defaults.items()
            if name in limits and typical
        }


def attended_tokens(length: Array, window: Array) -> Array:
    """Return the number of cached tokens that a query attends to: `length`, but at most `window`.

    Args:
        length: Cached tokens of the sequence.
        window: Tokens of the sliding window; 0 for no window.
    """
    return where(window > 0, minimum(length, maximum(window, 1)), length)


def missed_share(read: Array, cap: float, l2: float, is_cold: bool) -> Array:
    """Return the share of bytes, from 0 to 1, that must be read from memory and not from the L2.

    The call before this one read the same bytes, so part of them may still be in the L2. The share
    is 1 / (1 + (cap·l2/read)^6), or 1 if the L2 is cold. Example: it is ½ if `read` is cap·l2.

    Args:
        read: Bytes that the call reads.
        cap: Fitted part of the L2 that repeated calls can use. 1 is the whole L2.
        l2: Size of the L2 in bytes.
        is_cold: Whether the L2 has none of the bytes, as in serving.
    """
    return 1.0 if is_cold else 1 / (1 + (cap * l2 / read) ** 6)


def width_factor(head_dim: Array, at_64: float, at_256: float) -> Array:
    """Return the factor on a rate that was fitted at head_dim 128.

    The factor is at_64 for widths up to 64, 1 up to 128, √at_256 up to 192, and at_256 above 192.

    Args:
        head_dim: Head width in elements.
        at_64: Fitted factor at head_dim 64.
        at_256: Fitted factor at head_dim 256.
    """
    widths = head_dim <= 64, head_dim <= 128, head_dim <= 192
    return select(widths, (at_64, 1.0, at_256**0.5), at_256)


def pnorm(p: float, a: Array, b: Array) -> Array:
    """Return (a^p + b^p)^(1/p), the time of two overlapping activities, in the unit of `a`.

    With p = 1 they run one after the other, which gives a + b. With growing p the result approaches
    max(a, b), a perfect overlap.

    Args:
        p: Exponent of the overlap, at least 1.
        a: Time of one activity, such as compute.
        b: Time of the other activity, such as memory traffic, in the same unit.
    """
    high = maximum(a, b)
    low = minimum(a, b)
    return high * power(1.0 + power(low / maximum(high, 1e-300), p), 1.0 / p)
