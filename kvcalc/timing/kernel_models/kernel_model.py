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
from kvcalc.storage.formats import table_rows


class GpuParameters(NamedTuple):
    """Datasheet rates and sizes of one GPU, per microsecond, as time models of kernels use them.

    Attributes:
        memory: Memory bandwidth [bytes/µs].
        bf16, fp8, fp4: Dense matrix peaks [FLOP/µs]. If the GPU has no unit for a dtype, this is
            the peak of the next wider dtype.
        sms: Number of streaming multiprocessors.
        l2: Size of the L2 cache [bytes].
        link: Rate from one GPU to other GPUs of its node, in one direction [bytes/µs].
    """

    memory: float
    bf16: float
    fp8: float
    sms: int
    l2: float
    link: float
    fp4: float = 0.0

    def peak(self, element_bytes: float) -> float:
        """Return the dense matrix peak in FLOP/µs for operands with the given bytes per element.

        Below 1 byte it is the peak of fp4, at 1 byte of fp8, otherwise of bf16.

        Args:
            element_bytes: Bytes of one operand element, without scales.
        """
        return self.fp4 if element_bytes < 1 else self.fp8 if element_bytes == 1 else self.bf16


def figures_of(gpu: Gpu) -> GpuParameters:
    """Return the datasheet rates of a GPU in bytes/µs and FLOP/µs, for time models of kernels.

    Args:
        gpu: GPU preset.

    Raises:
        UserError: The preset lacks the number of SMs, the size of the L2 or a matrix peak.
    """
    if not gpu.sms or not gpu.l2_bytes:
        raise UserError(
            f"{gpu.name} gives no {'l2_bytes' if gpu.sms else 'sms'}, which the time laws need",
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
LAUNCH_US = 1.5
STREAMING_SHARE = 0.8

Array = Any  # a number, or a NumPy array of numbers
Arrays = tuple[Array, ...]


class Range(NamedTuple):
    """Limits of one parameter of a time model in a fit, in the parameter's unit.

    All three numbers are positive.

    Attributes:
        minimum: Smallest value that a fit may give.
        maximum: Largest value that a fit may give.
        typical: Default value of the parameter, near which the fit starts.
    """

    minimum: float
    maximum: float
    typical: float


class KernelModel(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="form"
):
    """Base class of time models of GPU kernels, such as GEMMs and attention.

    An object is a model of one kernel on one GPU model. Its fields are parameters. Those with a
    line in `RANGES` are fitted to measured times. The others select a form of the model or state a
    size.

    Attributes:
        RANGES: A line for each fitted parameter: its name, and its minimum and maximum in a fit. A
            subclass inherits the lines of its base class. A parameter with the default value 0 is
            not fitted.
        CHOICES: Forms of the model that a fit tries, each as a dict with values of fields that are
            not fitted.
        SOFTNESS: Relative error of a measured row above which a fit counts it linearly instead of
            quadratically, so that outliers count less.
        PRIOR_DEVIATION: Scale, in natural logarithms, of a fit's penalty for a parameter's distance
            from its default value; 0 for no penalty. At this distance, it counts about as much as
            an error of SOFTNESS in one row.
    """

    RANGES: ClassVar[str] = ""
    CHOICES: ClassVar[tuple[Settings, ...]] = ({},)
    SOFTNESS: ClassVar[float] = 0.04
    PRIOR_DEVIATION: ClassVar[float] = 0.0

    def us(self, machine: GpuParameters, *shape: Array) -> Array:
        """Return the predicted microseconds of one call of the kernel on one GPU.

        Args:
            machine: Datasheet rates and sizes of the GPU.
            shape: Sizes of the call, as numbers or arrays of equal shape, which the result has too.
                The docstring of each subclass gives their order, such as m, n and k for GEMMs.
        """
        raise NotImplementedError

    @classmethod
    @cache
    def ranges(cls) -> dict[str, Range]:
        """Return the minimum, maximum and typical value of each fitted parameter, by its name.

        The parameters are in the order of the fields.
        """
        limits = {}
        for base in reversed(cls.__mro__):
            for name, low, high in table_rows(vars(base).get("RANGES", "")):
                limits[name] = float(low), float(high)
        defaults = {field.name: field.default for field in msgspec.structs.fields(cls)}
        return {
            name: Range(*limits[name], typical)
            for name, typical in defaults.items()
            if name in limits and typical
        }


def attended_tokens(length: Array, window: Array) -> Array:
    """Return the number of cached tokens that a query attends to: at most those of the window.

    Args:
        length: Cached tokens of the sequence.
        window: Tokens of the sliding window; 0 for no window.
    """
    return where(window > 0, minimum(length, maximum(window, 1)), length)


def missed_share(read: Array, cap: float, l2: float, is_cold: bool) -> Array:
    """Return the share of a kernel's bytes, from 0 to 1, that is not in the L2 cache.

    This share must be read from memory. Measurements repeat a call, so part of its bytes may still
    be in the L2. The share is 1 / (1 + (cap·l2/read)^6), or 1 if the L2 is cold. Example: it is ½
    if `read` is cap·l2.

    Args:
        read: Bytes that one call reads.
        cap: Fitted part of the L2 that repeated calls can use. 1 is the whole L2.
        l2: Size of the L2 in bytes.
        is_cold: Whether the L2 has none of the bytes, as in serving, where other kernels run
            between two calls.
    """
    return 1.0 if is_cold else 1 / (1 + (cap * l2 / read) ** 6)


def width_factor(head_dim: Array, at_64: float, at_256: float) -> Array:
    """Return the factor on a kernel's read rate for head widths other than 128.

    The rate was fitted at head width 128. The factor is at_64 for widths up to 64, 1 up to 128,
    √at_256 up to 192, and at_256 above 192.

    Args:
        head_dim: Head width in elements.
        at_64: Fitted factor at head_dim 64.
        at_256: Fitted factor at head_dim 256.
    """
    widths = head_dim <= 64, head_dim <= 128, head_dim <= 192
    return select(widths, (at_64, 1.0, at_256**0.5), at_256)


def pnorm(p: float, a: Array, b: Array) -> Array:
    """Return (a^p + b^p)^(1/p), the time of two activities that partly overlap.

    With p = 1 they run one after the other, which gives a + b. With growing p the result approaches
    max(a, b), a perfect overlap.

    Args:
        p: Exponent of the overlap, at least 1; without a unit.
        a: Time of one activity, such as compute.
        b: Time of the other activity, such as memory traffic, in the unit of `a`. The result has
            this unit too.
    """
    high = maximum(a, b)
    low = minimum(a, b)
    return high * power(1.0 + power(low / maximum(high, 1e-300), p), 1.0 / p)
