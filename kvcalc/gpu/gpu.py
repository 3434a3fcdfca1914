"""GPU presets: datasheet figures, never multiplied by an efficiency."""

from math import ceil
from typing import Annotated

import msgspec

from kvcalc.errors import UserError, shown_briefly
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
    """A machine with `gpus` GPUs, documented or measured. Other machines have other memories and
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
        usable_share: (GiB, share) pairs: from this many GiB on, the system lets the GPU use this
            share. Empty if the GPU may use all memory.
        bandwidth_bytes_per_s: Memory bandwidth, decimal.
        flops_per_s: Dense matrix peaks by dtype with fp32 accumulators; a dtype without a unit is
            absent.
        fp16_accumulate_flops_per_s: Dense matrix peaks with fp16 accumulators, if they are faster.
        vector_flops_per_s: Peaks of the vector units.
        link_bytes_per_s: Rate to other GPUs in one direction.
        link_domain: Number of GPUs that the link connects.
        inter_node_bytes_per_s: Rate of one GPU to GPUs on other nodes in one direction.
        host_link_bytes_per_s: Rate to CPU memory in one direction.
        register_bytes_per_sm, shared_memory_bytes_per_sm: Bytes of one multiprocessor (compute
        unit, core).
            Their rates and the rate of the L2 are totals; they are absent if no source gives them.
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
        raise UserError(f"{self.name} has no matrix peak for {dtype}", hint=hint)

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
        """Bytes per second to another GPU in one direction; None if the preset does not give it."""
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
    def bridged(self) -> bool:
        """Whether a bridge joins pairs of cards, and further cards are reached over the host
        link."""
        return self.link_domain == 2 and bool(self.host_link_bytes_per_s)

    @property
    def outer_link(self) -> float | None:
        """Bytes per second in one direction to a GPU outside the link domain; None if unknown."""
        return self.inter_node_bytes_per_s or (
            self.host_link_bytes_per_s if self.bridged else None
        )

    @property
    def vector_peak(self) -> float | None:
        """fp32 FLOP/s of the vector units; None if the vendor does not publish it."""
        return self.vector_flops_per_s.get("fp32")

    @property
    def knee(self) -> float | None:
        """Ridge point in bf16 (or fp16): the FLOP per byte above which products are
        compute-bound."""
        peak = self.flops_per_s.get("bf16") or self.flops_per_s.get("fp16")
        return peak / self.bandwidth_bytes_per_s if peak else None

    def knee_of(self, dtype: str) -> float:
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
