"""GPU presets and roofline bounds: datasheet figures, never multiplied by an efficiency."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import ceil
from typing import Annotated, Any, NamedTuple, cast

import msgspec

from kvcalc.arithmetic import grouped, maximum
from kvcalc.errors import UserError, list_few, shown_briefly
from kvcalc.layers.cost import Cost, Operator, Role
from kvcalc.layers.part import Number, PresetStruct
from kvcalc.model.model import Source
from kvcalc.storage.formats import table_rows
from kvcalc.units import format_bytes, format_si

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Rate = Annotated[float, msgspec.Meta(gt=0, le=1e21)]
Bytes = Annotated[int, msgspec.Meta(ge=1, le=1 << 60)]
# Units that can run products of a dtype after a conversion: fp8 weights in bf16, for example. 4-bit
# weights become bf16 on GPUs without an fp4 unit (vLLM, kernels/linear/nvfp4/marlin.py), never fp8.
_WIDER_TABLE = """
    fp4   bf16 fp16 fp32
    fp8   bf16 fp16 fp32
    int8  bf16 fp16 fp32
    bf16  fp16 tf32 fp32
    fp16  bf16 tf32 fp32
    tf32  fp32
"""
_WIDER = {dtype: units for dtype, *units in table_rows(_WIDER_TABLE)}
_PAGE = 16384  # bytes, to which macOS rounds the GPU's share up
PEAKS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp6", "fp4")


class Host(PresetStruct, frozen=True):
    """A documented or measured machine (server or computer) that contains GPUs of one model.

    Other machines with this GPU may have other memories and disks. In each field, None means that
    no source gives the number.

    Attributes:
        name: Name of the machine.
        gpus: Number of GPUs in the machine.
        memory_bytes: CPU memory of the whole machine in bytes.
        disk_bytes: Bytes of all disks of the machine together.
        disk_bytes_per_s: Read rate of all disks together, in bytes per second.
        link_bytes_per_s: Measured rate in bytes per second of copies from CPU memory to one GPU.
    """

    name: str
    gpus: Number
    memory_bytes: Bytes | None = None
    disk_bytes: Bytes | None = None
    disk_bytes_per_s: Rate | None = None
    link_bytes_per_s: Rate | None = None


class Gpu(PresetStruct, frozen=True, kw_only=True):
    """The datasheet of one GPU or accelerator model. Each field is a key of its YAML preset file.

    None means that no source gives the number. Rates and sizes are for one GPU.

    Attributes:
        name: Name of the preset, such as `h100-sxm`.
        vendor: Name of the vendor.
        memory_bytes: Memory that the driver reports; for unified memory, the memory of the machine.
        bandwidth_bytes_per_s: Memory bandwidth in bytes per second.
        flops_per_s: Dense matrix peaks in FLOP/s by dtype, with fp32 accumulators. A dtype is
            absent if the GPU has no matrix unit for it.
        source: Documents from which the numbers are taken.
        architecture: Name of the architecture, such as `Hopper`.
        aliases: Further names of the preset.
        usable_share: Pairs (GiB, share): the GPU of a machine with at least `GiB` of memory may use
            this share of it. Empty if the GPU may use all memory.
        memory_type: Name of the memory technology, such as `HBM3`.
        fp16_accumulate_flops_per_s: Dense matrix peaks in FLOP/s by dtype with fp16 accumulators.
            Only dtypes that are faster with them are listed.
        vector_flops_per_s: Peaks of the vector units (not matrix units) in FLOP/s by dtype.
        sms: Number of streaming multiprocessors (compute units, cores).
        register_bytes_per_sm, shared_memory_bytes_per_sm: Bytes of registers and of shared memory
            of one streaming multiprocessor.
        shared_memory_bytes_per_s, l2_bytes_per_s: Rates of shared memory and of the L2 cache in
            bytes per second, for all multiprocessors together.
        l2_bytes: Size of the L2 cache in bytes.
        link_bytes_per_s: Bytes per second to other GPUs of the link domain, in one direction.
        link_domain: Number of GPUs that the link between GPUs, such as NVLink, connects.
        inter_node_bytes_per_s: Bytes per second from one GPU to GPUs on other nodes, in one
            direction.
        host_link_bytes_per_s: Documented bytes per second between CPU memory and the GPU, in one
            direction.
        host: A machine that contains such GPUs.
        power_w: Power limit in watts.
        per: Unit that one preset describes: card, die, chip or SoC.
        mfu: Share of the matrix peaks that products reach (model FLOPs utilization); at most 1.
    """

    name: str
    vendor: str
    memory_bytes: Bytes
    bandwidth_bytes_per_s: Rate
    flops_per_s: dict[str, Rate]
    source: tuple[Source, ...]
    architecture: str = ""
    aliases: tuple[str, ...] = ()
    usable_share: tuple[tuple[int, Share], ...] = ()
    memory_type: str = ""
    fp16_accumulate_flops_per_s: dict[str, Rate] = {}
    vector_flops_per_s: dict[str, Rate] = {}
    sms: Number | None = None
    register_bytes_per_sm: Bytes | None = None
    shared_memory_bytes_per_sm: Bytes | None = None
    shared_memory_bytes_per_s: Rate | None = None
    l2_bytes: Bytes | None = None
    l2_bytes_per_s: Rate | None = None
    link_bytes_per_s: Rate | None = None
    link_domain: Number | None = None
    inter_node_bytes_per_s: Rate | None = None
    host_link_bytes_per_s: Rate | None = None
    host: Host | None = None
    power_w: Rate | None = None
    per: str = "card"
    mfu: Share = 1.0

    def __str__(self) -> str:
        peaks = [
            f"{name} {format_si(self.flops_per_s[name], 'FLOP/s')}"
            for name in ("bf16", "fp8")
            if name in self.flops_per_s
        ]
        memory = (
            f"{format_bytes(self.memory_bytes)} at "
            f"{format_si(self.bandwidth_bytes_per_s, 'B/s')}"
        )
        return f"{self.name}: {', '.join([memory, *peaks])}"

    _repr_pretty_ = shown_briefly

    def __hash__(self) -> int:  # equal figures have equal names; dicts have no hash
        return hash(self.name)

    def peak(self, dtype: str) -> tuple[float, str]:
        """Return (highest dense matrix FLOP/s for products of a dtype, dtype of the matrix unit).

        The matrix unit is that of the dtype itself. If the GPU has none, it is the unit of the next
        wider dtype. The rate is the unit's fastest documented rate with either accumulator, or the
        rate of a wider unit with fp32 accumulators if it is higher, because engines may convert. So
        a time computed with this rate is a lower bound, if `mfu` is 1. Otherwise the rate is
        multiplied by `mfu`.

        Examples: on rtx-4080, fp16 gives 194.9e12 (fp16 accumulators; 97.5e12 with fp32 ones).
        Products of bf16 always have fp32 accumulators, so bf16 gives 97.5e12. int8 on b300, whose
        int8 unit is slow, gives the 2,250e12 of bf16. `fp4/int8` on rtx-4090 gives int8, as the GPU
        has no fp4 unit.

        Args:
            dtype: A dtype, such as `fp8`, or several separated by `/`. The first one for which the
                GPU has a unit is used.

        Raises:
            UserError: The preset gives no peak of this dtype or a wider one.
        """
        units = self._units(dtype)
        if units:
            rates = [self.flops_per_s[unit] for unit in units]
            faster = self.fp16_accumulate_flops_per_s.get(units[0], 0.0)
            return max(faster, *rates) * self.mfu, units[0]
        hint = (
            f"Its preset gives: {', '.join(self.flops_per_s) or 'none'}. "
            "Only decode steps have a bound without one"
        )
        raise UserError(f"{self.name} has no matrix peak for {dtype}", hint)

    def computes(self, dtype: str) -> bool:
        """Return whether the GPU has a matrix unit with a known peak for `dtype` or a wider dtype.

        Without one, `peak` raises an error, and only decode steps have a time bound: the time of
        their memory traffic.

        Args:
            dtype: A dtype, such as `bf16`, or several separated by `/`; one of them suffices.
        """
        return bool(self._units(dtype))

    def _units(self, dtype: str) -> list[str]:
        """Return the dtypes whose matrix units can run products of a dtype: the narrowest first."""
        names = dtype.split("/")
        return [
            unit for unit in (*names, *_WIDER.get(names[-1], ())) if unit in self.flops_per_s
        ]

    @property
    def usable_bytes(self) -> int:
        """Return the bytes of one GPU's memory that programs may use.

        For most GPUs this is `memory_bytes`. For unified memory, as on a Mac, it is the share in
        `usable_share` that the operating system grants, rounded up to pages of 16,384 bytes.
        """
        if not self.usable_share:
            return self.memory_bytes
        reached = [step for step in self.usable_share if step[0] << 30 <= self.memory_bytes]
        return (
            ceil(self.memory_bytes * max(reached, default=min(self.usable_share))[1] / _PAGE)
            * _PAGE
        )

    @property
    def link(self) -> float | None:
        """Return the bytes per second from one GPU to another GPU of its node, in one direction.

        If the GPU model has no link between GPUs, such as NVLink, this is the rate of its link to
        the CPU. The result is None if the preset gives no rate.
        """
        return self.link_bytes_per_s or self.host_link_bytes_per_s

    def host_rate(self, measured: bool) -> float | None:
        """Return the bytes per second from CPU memory to one GPU; None if no source gives a rate.

        Args:
            measured: Whether to prefer the measured rate in the field `host`, as predicted times
                do. If false or not measured, the documented rate is returned, which lower bounds
                use.
        """
        reached = self.host.link_bytes_per_s if self.host else None
        return (reached if measured else None) or self.host_link_bytes_per_s

    @property
    def is_bridged(self) -> bool:
        """Return whether a bridge, such as an NVLink bridge, joins cards of this model in pairs.

        A card reaches all cards outside its pair over the link to the CPU.
        """
        return self.link_domain == 2 and bool(self.host_link_bytes_per_s)

    @property
    def inter_domain_rate(self) -> float | None:
        """Return the bytes per second, one way, from one GPU to another outside its link domain.

        A link domain is the set of GPUs that one link, such as NVLink, connects. The result is the
        rate between nodes. If it is unknown, the result is None, but for cards that a bridge joins
        in pairs it is the rate of the link to the CPU.
        """
        return self.inter_node_bytes_per_s or (
            self.host_link_bytes_per_s if self.is_bridged else None
        )

    @property
    def vector_peak(self) -> float | None:
        """Return the fp32 FLOP/s of one GPU's vector units, not matrix units.

        The result is None if the vendor does not publish it.
        """
        return self.vector_flops_per_s.get("fp32")

    @property
    def knee(self) -> float | None:
        """Return the ridge point of bf16 (or fp16) products in FLOP per byte of memory traffic.

        It is the matrix peak divided by the memory bandwidth. None means that the GPU has no such
        peak. Work with more FLOP per byte is compute-bound, other work is memory-bound.
        """
        has_peak = "bf16" in self.flops_per_s or "fp16" in self.flops_per_s
        return self.ridge_point_for("bf16") if has_peak else None

    def ridge_point_for(self, dtype: str) -> float:
        """Return the ridge point of matrix products in a dtype, in FLOP per byte of memory traffic.

        The ridge point is the matrix peak divided by the memory bandwidth.

        Args:
            dtype: A dtype, such as `fp8`.

        Raises:
            UserError: The GPU has no matrix peak for this dtype or a wider one.
        """
        return self.peak(dtype)[0] / self.bandwidth_bytes_per_s

    def problem(self) -> tuple[str, str]:
        """Return the first error of the preset as (YAML key, message); ('', '') if there is none.

        Errors are, for example, a name that contains `/` or unprintable characters, and an unknown
        dtype.
        """
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
                return f"fp16_accumulate_flops_per_s.{dtype}", f"flops_per_s gives no {dtype}"
        return "", ""


class CostBound(NamedTuple):
    """The lower bound of the time of some FLOPs and bytes on a GPU, from datasheet peaks.

    Attributes:
        seconds: Minimum seconds, a float or an array.
        bound: Resource that limits the time: compute, memory or network; '' if `seconds` is an
            array, because its elements may be limited by different resources.
        computed_in: Dtype of the matrix unit that computes the products, which may be wider than
            the dtype of the products; '' without matrix products.
    """

    seconds: Any
    bound: str
    computed_in: str


def cost_bound(
    cost: Cost, dtype: str, gpu: "Gpu | GpuRates", memory_only: bool = False
) -> CostBound:
    """Return the minimum time of some FLOPs and bytes on one GPU, and the resource that limits it.

    The minimum time is the longest of the times for memory, matrix products, vector operations and
    network. Vector and network work take no time if the GPU preset gives no rate for them.

    Args:
        cost: FLOPs and bytes of one GPU: numbers, or arrays for several points such as batch sizes.
        dtype: Dtype of the matrix products, or several separated by `/`, of which the first with a
            matrix unit is used; '' without products.
        gpu: One GPU, or the rates of several GPU models as arrays.
        memory_only: Whether matrix products take no time if the GPU has no peak for them. This is
            for decode steps, whose memory time is then still a lower bound.

    Raises:
        UserError: The GPU has no peak for the dtype or a wider one, and `memory_only` is false.
    """
    computed_in, peak = "", None
    slowest = cost.bytes / gpu.bandwidth_bytes_per_s
    bound = "memory"
    if dtype and (not memory_only or gpu.computes(dtype)):
        peak, computed_in = gpu.peak(dtype)
    limits = (
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
    """An operator of a forward pass, such as a GEMM, with its minimum time on a GPU.

    Attributes:
        operator: The operator, with the cost of one run and the number of its runs.
        seconds: Minimum seconds of all runs of the operator in one pass together, a float or an
            array. An operator runs once for each layer that has it.
        bound: Resource that limits the time: compute, memory or network; '' if `seconds` is an
            array.
        fallback: Dtype of the wider matrix unit that is used because the GPU has no unit of the
            operator's dtype; '' if the GPU has such a unit.
    """

    operator: Operator
    seconds: Any
    bound: str
    fallback: str

    @property
    def intensity(self) -> Any:
        """Return the operator's matrix FLOPs per byte of memory traffic, a float or an array.

        The result is None if the operator moves no bytes.
        """
        moved = self.operator.cost.bytes
        if isinstance(moved, int | float) and not moved:
            return None
        return self.operator.cost.flops / moved


def roofline(
    operators: Sequence[Operator], gpu: Gpu, memory_only: bool = False
) -> list[BoundedOperator]:
    """Return each operator of a forward pass with its minimum time on `gpu`, from datasheet peaks.

    Args:
        operators: Operators of the pass on one GPU.
        gpu: The GPU on which the pass runs.
        memory_only: Whether matrix products take no time if the GPU has no peak for their dtype.
            This is for decode steps, whose memory time is then still a lower bound.

    Raises:
        UserError: The GPU lacks a required matrix peak, and `memory_only` is false.
    """
    results = []
    for operator in operators:
        seconds, bound, computed_in = cost_bound(
            operator.cost, operator.dtype, gpu, memory_only
        )
        fallback = "" if computed_in in operator.dtype.split("/") else computed_in
        results.append(BoundedOperator(operator, seconds * operator.count, bound, fallback))
    return results


def total_seconds(bounds: Sequence[BoundedOperator]) -> Any:
    """Return the minimum seconds of a forward pass: the sum over its operators, which run in turn.

    The result is a float, or an array if the operators have arrays.

    Args:
        bounds: Operators of the pass with their minimum times.
    """
    return sum((p.seconds for p in bounds), 0.0)


class GpuRates:
    """Datasheet rates of several GPU models as arrays [gpus], so that all are timed in one call.

    `cost_bound` takes it in place of one GPU. A rate that a GPU preset does not give is infinite,
    so that its work takes no time.

    Attributes:
        gpus: The GPU models.
        bandwidth_bytes_per_s: Memory bandwidth in bytes per second.
        vector_peak: fp32 FLOP/s of the vector units.
        link: Bytes per second to another GPU of the node, in one direction.
        inter_domain_rate: Bytes per second to a GPU outside the link domain, in one direction.
    """

    def __init__(self, gpus: Sequence[Gpu]) -> None:
        self.gpus = gpus
        self.bandwidth_bytes_per_s = _rates([gpu.bandwidth_bytes_per_s for gpu in gpus])
        self.vector_peak = _rates([gpu.vector_peak for gpu in gpus])
        self.link = _rates([gpu.link for gpu in gpus])
        self.inter_domain_rate = _rates([gpu.inter_domain_rate for gpu in gpus])

    def computes(self, dtype: str) -> Any:
        """Return a boolean array [gpus]: whether each GPU has a known matrix peak for `dtype`.

        A peak of a wider dtype counts too, because the GPU can convert the operands.

        Args:
            dtype: A dtype, such as `bf16`, or several separated by `/`; one of them suffices.
        """
        import numpy as np

        return np.array([gpu.computes(dtype) for gpu in self.gpus])

    def peak(self, dtype: str) -> tuple[Any, str]:
        """Return (array [gpus] of the matrix FLOP/s for products in `dtype`, '').

        A GPU without a peak gets infinity. `Gpu.peak` returns the dtype of the matrix unit as its
        second item. Here it is always '', because the GPUs may use different units.

        Args:
            dtype: A dtype, such as `bf16`, or several separated by `/`. For each GPU, the first
                dtype for which it has a unit is used.
        """
        return _rates(
            [gpu.peak(dtype)[0] if gpu.computes(dtype) else None for gpu in self.gpus]
        ), ""

    def seconds(self, operator: Operator, decodes: bool) -> Any:
        """Return the minimum seconds of an operator in a forward pass, as an array [*points, gpus].

        All runs of the operator in the pass count, usually one in each layer that has it.

        A GPU that lacks the matrix peak for the operator's dtype gets NaN. In a decode step it gets
        the time of the memory traffic, which is a lower bound.

        Args:
            operator: The operator. Its cost has numbers, or arrays [*points] with one element for
                each point, such as a batch size.
            decodes: Whether the operator belongs to a decode step.
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
    """Return the resource that limits most of the time of a forward pass: compute, memory, network.

    Each operator's time counts for the resource that limits this operator.

    Args:
        bounds: Operators of the pass with their minimum times, which must be floats.
    """
    by_bound: dict[str, float] = {}
    for p in bounds:
        by_bound[p.bound] = by_bound.get(p.bound, 0.0) + p.seconds
    return max(by_bound, key=lambda b: by_bound[b])


def fallback_sentence(bounds: Sequence[BoundedOperator], gpu: Gpu) -> str:
    """Return a note on the dtypes for which the GPU has no matrix unit; '' if it has all units.

    Example: "computed in bf16: rtx-3090 has no fp8 unit".

    Args:
        bounds: Operators of a forward pass with their minimum times on the GPU.
        gpu: The GPU.
    """
    missing = grouped((p.fallback, p.operator.dtype) for p in bounds if p.fallback)
    words = [
        f"computed in {used}: {gpu.name} has no {list_few(requested)} unit"
        for used, requested in missing.items()
    ]
    dtypes = [p.operator.dtype for p in bounds if p.operator.dtype]
    if without := list_few(dtype for dtype in dtypes if not gpu.computes(dtype)):
        words.append(f"memory-bound: no matrix peak for {without}")
    return "; ".join(words)


def mla_form(bounds: Sequence[BoundedOperator]) -> str | None:
    """Return the form of multi-head latent attention (MLA) in a forward pass.

    In the form `absorbed`, all heads read the cached latents directly. In the form `expanded`, each
    head has its own keys and values, computed from the latents. The result is `mixed` if each form
    is used for a part of the sequences, and None if the model has no MLA.

    Args:
        bounds: Operators of the pass with their minimum times.
    """
    forms = dict.fromkeys(p.operator.form for p in bounds if p.operator.form)
    return "mixed" if len(forms) > 1 else next(iter(forms), None)


MAX_BATCH = 1 << 20


def compute_bound_batch_size(
    pass_bounds: Callable[[int], Sequence[BoundedOperator]],
    role: Role,
) -> int | None:
    """Return the smallest batch size at which compute limits most of the selected operators' time.

    The batch size is a number of sequences. None means that there is no such batch size up to 2^20
    sequences.

    Args:
        pass_bounds: Function of a batch size. It returns the operators of a forward pass over this
            batch, with their minimum times.
        role: Kind of the selected operators, such as FFN.
    """

    def is_compute_bound(batch_size: int) -> bool:
        operators = [p for p in pass_bounds(batch_size) if p.operator.role is role]
        return bool(operators) and total_bound(operators) == "compute"

    if not is_compute_bound(MAX_BATCH):
        return None
    return bisect_left(range(MAX_BATCH), True, lo=1, key=is_compute_bound)
