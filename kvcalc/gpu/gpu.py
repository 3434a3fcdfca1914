"""GPU presets and roofline bounds: datasheet figures, never multiplied by an efficiency."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import ceil
from typing import Annotated, Any, NamedTuple, cast

import msgspec

from kvcalc.arithmetic import maximum
from kvcalc.errors import UserError, shown_briefly
from kvcalc.layers.cost import Cost, Operator
from kvcalc.model.model import Source
from kvcalc.units import format_bytes, format_si

Rate = Annotated[float, msgspec.Meta(gt=0, le=1e21)]
Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 60)]
# Units that can run products of a dtype after a conversion: fp8 weights in bf16, for example. 4-bit
# weights become bf16 on GPUs without an fp4 unit (vLLM, kernels/linear/nvfp4/marlin.py), never fp8.
_WIDER = {
    "fp4": ("bf16", "fp16", "fp32"),
    "fp8": ("bf16", "fp16", "fp32"),
    "int8": ("bf16", "fp16", "fp32"),
    "bf16": ("fp16", "tf32", "fp32"),
    "fp16": ("bf16", "tf32", "fp32"),
    "tf32": ("fp32",),
}
_PAGE = 16384  # bytes, to which macOS rounds the GPU's share up
PEAKS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp6", "fp4")


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A documented or measured machine with `gpus` GPUs. Other machines have other memories and
    disks.

    Attributes:
        memory_bytes: Memory of the whole machine.
        disk_bytes: Size of all its disks.
        disk_bytes_per_s: Read rate of all its disks together.
        link_bytes_per_s: Measured rate of the link between the host's memory and one GPU.
    """

    name: str
    gpus: Annotated[int, msgspec.Meta(ge=1, le=100_000)]
    memory_bytes: Bytes | None = None
    disk_bytes: Bytes | None = None
    disk_bytes_per_s: Rate | None = None
    link_bytes_per_s: Rate | None = None


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One GPU or accelerator. The fields are the keys of a preset.

    Attributes:
        memory_bytes: Memory that the driver reports; for unified memory, the memory of the machine.
        usable_share: Pairs (GiB, share): the GPU of a machine with at least `GiB` of memory may use
            this share. Empty if the GPU may use all memory.
        bandwidth_bytes_per_s: Memory bandwidth in bytes per second.
        flops_per_s: Dense matrix peaks in FLOP/s by dtype with fp32 accumulators; a dtype without a
            unit is absent.
        fp16_accumulate_flops_per_s: Dense matrix peaks with fp16 accumulators, if they are faster.
        vector_flops_per_s: Peaks of the vector units in FLOP/s by dtype.
        link_bytes_per_s: Bytes per second to other GPUs in one direction.
        link_domain: Number of GPUs that the link connects.
        inter_node_bytes_per_s: Bytes per second of one GPU to GPUs on other nodes in one direction.
        host_link_bytes_per_s: Bytes per second to CPU memory in one direction.
        register_bytes_per_sm, shared_memory_bytes_per_sm: Bytes of one multiprocessor (compute
            unit, core).
        shared_memory_bytes_per_s, l2_bytes_per_s: Bytes per second of all multiprocessors together;
            None if no source gives the rate.
        host: A machine with such GPUs.
        per: Unit that one preset describes: card, die, chip or SoC.
    """

    name: str
    vendor: str
    memory_bytes: Bytes
    bandwidth_bytes_per_s: Rate
    flops_per_s: dict[str, Rate]
    source: tuple[Source, ...]
    architecture: str = ""
    aliases: tuple[str, ...] = ()
    usable_share: tuple[tuple[int, Annotated[float, msgspec.Meta(gt=0, le=1)]], ...] = ()
    memory_type: str = ""
    fp16_accumulate_flops_per_s: dict[str, Rate] = {}
    vector_flops_per_s: dict[str, Rate] = {}
    sms: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    register_bytes_per_sm: Bytes | None = None
    shared_memory_bytes_per_sm: Bytes | None = None
    shared_memory_bytes_per_s: Rate | None = None
    l2_bytes: Bytes | None = None
    l2_bytes_per_s: Rate | None = None
    link_bytes_per_s: Rate | None = None
    link_domain: Annotated[int, msgspec.Meta(ge=1, le=100_000)] | None = None
    inter_node_bytes_per_s: Rate | None = None
    host_link_bytes_per_s: Rate | None = None
    host: Host | None = None
    power_w: Rate | None = None
    per: str = "card"

    def __str__(self) -> str:
        peaks = [
            f"{name} {format_si(self.flops_per_s[name], 'FLOP/s')}"
            for name in ("bf16", "fp8")
            if name in self.flops_per_s
        ]
        rate = format_si(self.bandwidth_bytes_per_s, "B/s")
        memory = f"{format_bytes(self.memory_bytes)} at {rate}"
        return f"{self.name}: {', '.join([memory, *peaks])}"

    _repr_pretty_ = shown_briefly

    def __hash__(self) -> int:  # equal figures have equal names; dicts have no hash
        return hash(self.name)

    def peak(self, dtype: str) -> tuple[float, str]:
        """Return the dense matrix FLOP/s that products of a dtype can reach at most, and the dtype
        whose unit they need.

        The unit is the unit of the dtype, else the next wider unit. The rate is the fastest
        documented rate with either accumulator, or the rate of a wider unit if it is higher,
        because engines may convert. So a time at this rate is a bound.

        Examples: bf16 on rtx-4080 gives 194.9e12 (fp16 accumulators; 97.5e12 with fp32 ones). int8
        on b300, whose int8 unit is slow, gives the 2,250e12 of bf16. `fp4/int8` on rtx-4090 gives
        int8, as the GPU has no fp4 unit.

        Raises:
            UserError: The preset gives no peak of this dtype or a wider one.
        """
        units = self._units(dtype)
        if units:
            faster = self.fp16_accumulate_flops_per_s
            return max(faster.get(unit, self.flops_per_s[unit]) for unit in units), units[0]
        dtypes = ", ".join(self.flops_per_s) or "none"
        hint = f"Its preset gives: {dtypes}. Only decode steps have a bound without one"
        raise UserError(f"{self.name} has no matrix peak for {dtype}", hint)

    def computes(self, dtype: str) -> bool:
        """Return whether the GPU has a matrix peak for products in a dtype or a wider one."""
        return bool(self._units(dtype))

    def _units(self, dtype: str) -> list[str]:
        """Return the dtypes whose matrix units can run products of a dtype: the narrowest first."""
        names = dtype.split("/")
        return [
            unit for unit in (*names, *_WIDER.get(names[-1], ())) if unit in self.flops_per_s
        ]

    @property
    def usable_bytes(self) -> int:
        """Return the memory that the GPU may use: all of it, or the share that its system grants,
        in whole pages."""
        if not self.usable_share:
            return self.memory_bytes
        reached = [step for step in self.usable_share if step[0] << 30 <= self.memory_bytes]
        return (
            ceil(self.memory_bytes * max(reached, default=min(self.usable_share))[1] / _PAGE)
            * _PAGE
        )

    @property
    def link(self) -> float | None:
        """Return the bytes per second to another GPU in one direction; None if the preset does not
        give it."""
        return self.link_bytes_per_s or self.host_link_bytes_per_s

    def host_rate(self, measured: bool) -> float | None:
        """Return the bytes per second of the link to the host's memory; None if nothing gives a
        rate.

        Args:
            measured: Whether to prefer the measured rate of `host`, for a prediction. A bound takes
                the documented rate.
        """
        reached = self.host.link_bytes_per_s if self.host else None
        return (reached if measured else None) or self.host_link_bytes_per_s

    @property
    def is_bridged(self) -> bool:
        """Return whether a bridge joins cards in pairs. Other cards are then reached over the host
        link."""
        return self.link_domain == 2 and bool(self.host_link_bytes_per_s)

    @property
    def inter_domain_rate(self) -> float | None:
        """Return the bytes per second in one direction to a GPU outside the link domain; None if
        unknown."""
        return self.inter_node_bytes_per_s or (
            self.host_link_bytes_per_s if self.is_bridged else None
        )

    @property
    def vector_peak(self) -> float | None:
        """Return the fp32 FLOP/s of the vector units; None if the vendor does not publish it."""
        return self.vector_flops_per_s.get("fp32")

    @property
    def knee(self) -> float | None:
        """Return the ridge point in bf16 (or fp16), in FLOP per byte. Products above it are
        compute-bound."""
        peak = self.flops_per_s.get("bf16") or self.flops_per_s.get("fp16")
        return peak / self.bandwidth_bytes_per_s if peak else None

    def ridge_point_for(self, dtype: str) -> float:
        """Return the ridge point of products in a dtype. Raises UserError if there is no peak."""
        return self.peak(dtype)[0] / self.bandwidth_bytes_per_s

    def problem(self) -> tuple[str, str]:
        """Return (key, problem) of the first invalid field, or ('', '')."""
        for key in ("name", "vendor", "architecture"):
            if not getattr(self, key).isprintable():
                return key, "has characters that a terminal does not print"
        if not self.name or self.name.startswith(".") or set(self.name) & set("/\\"):
            return (
                "name",
                f"{self.name!r} is empty or a path; calibrations are looked up in a folder of "
                "that name",
            )
        for key in ("flops_per_s", "fp16_accumulate_flops_per_s", "vector_flops_per_s"):
            for dtype in getattr(self, key):
                if dtype not in PEAKS:
                    return (
                        f"{key}.{dtype}",
                        f"unknown dtype {dtype!r} (known: {', '.join(PEAKS)})",
                    )
        for dtype in self.fp16_accumulate_flops_per_s:
            if dtype not in self.flops_per_s:
                return (
                    f"fp16_accumulate_flops_per_s.{dtype}",
                    f"flops_per_s gives no {dtype}",
                )
        return "", ""


class CostBound(NamedTuple):
    """The bound of one cost.

    Attributes:
        seconds: Minimum seconds, a float or an array.
        bound: Limiting resource: compute, memory or network; '' for arrays, because their elements
            may have different resources.
        computed_in: dtype of the matrix products; '' without products.
    """

    seconds: Any
    bound: str
    computed_in: str


def cost_bound(
    cost: Cost, dtype: str, gpu: "Gpu | GpuRates", memory_only: bool = False
) -> CostBound:
    """Return the bound of a cost on `gpu` with products in `dtype` ('' for none).

    Raises UserError if the GPU has no peak for the dtype or a wider one. If `memory_only` is set,
    products without a peak take no time instead, and the memory time is still a bound. Vector and
    network work take no time if the GPU gives no rate.
    """
    computed_in, peak = "", None
    slowest: Any = cost.bytes / gpu.bandwidth_bytes_per_s
    bound = "memory"
    if dtype and (not memory_only or gpu.computes(dtype)):
        peak, computed_in = gpu.peak(dtype)
    limits: tuple[tuple[str, Any, Any], ...] = (
        ("compute", cost.vector_flops, gpu.vector_peak),
        ("network", cost.network_bytes, gpu.link),
        ("network", cost.inter_node_bytes, gpu.inter_domain_rate),
        ("compute", cost.flops, peak),
    )
    for name, amount, rate in limits:
        if rate is not None and (not isinstance(amount, int | float) or amount):
            seconds = amount / rate
            if isinstance(seconds, float) and isinstance(slowest, float):
                slowest, bound = (seconds, name) if seconds > slowest else (slowest, bound)
            else:
                slowest, bound = maximum(cast("Any", seconds), slowest), ""
    return CostBound(slowest, bound, computed_in)


class BoundedOperator(NamedTuple):
    """An operator with its bound on a GPU. `CostBound` explains the other fields.

    Attributes:
        seconds: Minimum seconds of all runs together.
        fallback: Dtype of the matrix unit that replaces a missing unit, or ''.
    """

    operator: Operator
    seconds: Any
    bound: str
    fallback: str

    @property
    def intensity(self) -> Any:
        """Return the matrix FLOPs per byte of memory traffic; None without traffic."""
        moved = self.operator.cost.bytes
        if isinstance(moved, int | float) and not moved:
            return None
        return self.operator.cost.flops / moved


def roofline(
    operators: Sequence[Operator], gpu: Gpu, memory_only: bool = False
) -> list[BoundedOperator]:
    """Return each operator with its bound on `gpu`. Raises UserError if the GPU lacks a peak."""
    results = []
    for operator in operators:
        seconds, bound, computed_in = cost_bound(
            operator.cost, operator.dtype, gpu, memory_only
        )
        fallback = "" if computed_in in operator.dtype.split("/") else computed_in
        results.append(BoundedOperator(operator, seconds * operator.count, bound, fallback))
    return results


def total_seconds(bounds: Sequence[BoundedOperator]) -> Any:
    """Return the bound of a pass, the sum of its operators, as a float or an array."""
    return sum((p.seconds for p in bounds), 0.0)


class GpuRates:
    """Rates of several GPU models as arrays [gpus]. A rate that a GPU does not give is infinite."""

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self.gpus = gpus
        self.bandwidth_bytes_per_s = _rates([gpu.bandwidth_bytes_per_s for gpu in gpus])
        self.vector_peak = _rates([gpu.vector_peak for gpu in gpus])
        self.link = _rates([gpu.link for gpu in gpus])
        self.inter_domain_rate = _rates([gpu.inter_domain_rate for gpu in gpus])

    def computes(self, dtype: str) -> Any:
        """Return an array [gpus] that is true for GPUs with a matrix peak for products in a
        dtype."""
        import numpy as np

        return np.array([gpu.computes(dtype) for gpu in self.gpus])

    def peak(self, dtype: str) -> tuple[Any, str]:
        """Return the matrix FLOP/s of each GPU for products in a dtype; infinite if there is
        none."""
        return _rates(
            [gpu.peak(dtype)[0] if gpu.computes(dtype) else None for gpu in self.gpus]
        ), ""

    def seconds(self, operator: Operator, decodes: bool) -> Any:
        """Return the bounds of an operator [*points, gpus] in seconds, as in `roofline`.

        A GPU without a required matrix peak gets NaN, except in decode, where the memory time is a
        bound.
        """
        import numpy as np

        figures = [
            figure if isinstance(figure, int | float) else figure[..., None]
            for figure in operator.cost
        ]
        seconds = cost_bound(Cost(*figures), operator.dtype, self).seconds
        if operator.dtype and not decodes:
            seconds = np.where(self.computes(operator.dtype), seconds, np.nan)
        return seconds * operator.count


def _rates(rates: Sequence[float | None]) -> Any:
    import numpy as np

    return np.array([rate or np.inf for rate in rates])


def total_bound(bounds: Sequence[BoundedOperator]) -> str:
    """Return the resource that limits most of the time of a pass: compute, memory or network."""
    by_bound: dict[str, float] = {}
    for p in bounds:
        by_bound[p.bound] = by_bound.get(p.bound, 0.0) + p.seconds
    return max(by_bound, key=lambda b: by_bound[b])


def fallback_sentence(bounds: Sequence[BoundedOperator], gpu: Gpu) -> str:
    """Return a sentence about dtypes without a matrix unit on the GPU; '' if it has all required
    units.
    """
    missing: dict[str, dict[str, None]] = {}
    for p in bounds:
        if p.fallback:
            missing.setdefault(p.fallback, {})[p.operator.dtype] = None
    words = [
        f"computed in {used}: {gpu.name} has no {', '.join(requested)} unit"
        for used, requested in missing.items()
    ]
    dtypes = dict.fromkeys(p.operator.dtype for p in bounds)
    if without := [dtype for dtype in dtypes if dtype and not gpu.computes(dtype)]:
        names = ", ".join(without)
        has_none = (
            "memory-bound: no" if words else f"bound by memory only: {gpu.name} has no matrix"
        )
        words.append(f"{has_none} peak for {names}")
    return "; ".join(words)


def mla_form(bounds: Sequence[BoundedOperator]) -> str | None:
    """Return the form of MLA: absorbed, expanded, mixed (differs between groups), or None without
    MLA."""
    forms = dict.fromkeys(p.operator.form for p in bounds if p.operator.form)
    return "mixed" if len(forms) > 1 else next(iter(forms), None)


MAX_BATCH = 1 << 20


def compute_bound_batch_size(
    pass_bounds: Callable[[int], Sequence[BoundedOperator]],
    is_selected: Callable[[Operator], bool],
) -> int | None:
    """Return the smallest batch size at which the selected operators together are compute-bound.

    Args:
        pass_bounds: Function that returns the operators of a pass with a batch size, with bounds.
        is_selected: Function that selects the operators.

    Returns:
        None if they are not compute-bound up to MAX_BATCH.
    """

    def is_compute_bound(batch_size: int) -> bool:
        operators = [p for p in pass_bounds(batch_size) if is_selected(p.operator)]
        return bool(operators) and total_bound(operators) == "compute"

    if not is_compute_bound(MAX_BATCH):
        return None
    return bisect_left(range(MAX_BATCH), True, lo=1, key=is_compute_bound)
