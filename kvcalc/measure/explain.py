"""Why a measured time differs from its bound: the first of these that the numbers support.

launch-bound: launching the operations takes half of the time or more. cache-resident: the data fits the last-level cache,
or the step was faster than memory allows. unfused: plain torch writes out and reads back what the bound counts as fused,
and its operations' own bounds add up to half as much again. few-rows: the same at the rates that were measured for products of
so few rows. compute-bound and memory-bound: within 1.5 of the bound, whichever it is. kernel: none of these; the kernels do
not reach the ceilings.
"""

from typing import NamedTuple

from kvcalc.measure.traffic import Traffic
from kvcalc.units import format_bytes

CLOSE = 1.5


class Facts(NamedTuple):
    """Of one measurement: seconds predicted and measured, the bound, its bytes, and what torch really did."""

    predicted_s: float
    measured_s: float
    bound: str
    bytes: int
    resident: bool
    launch_s: float
    done: Traffic


def difference(facts: Facts) -> tuple[str, str]:
    """(the reason, a sentence with the numbers)."""
    ratio = facts.measured_s / facts.predicted_s
    launching = facts.done.launches * facts.launch_s
    if launching >= facts.measured_s / 2:
        share = min(1.0, launching / facts.measured_s)
        return "launch-bound", f"{facts.done.launches} operations to launch take about {share:.0%} of the time"
    if facts.resident:
        return "cache-resident", f"what is read, {format_bytes(facts.bytes)}, stays in the last-level cache"
    if ratio < 1 / CLOSE:
        return "cache-resident", f"faster than the bound ({ratio:.2f}×): part of the data was in the last-level cache"
    if ratio <= CLOSE:
        return f"{facts.bound}-bound", f"within {CLOSE}× of its {facts.bound} bound"
    alone, reached = facts.done.seconds / facts.predicted_s, facts.done.reached_s / facts.predicted_s
    few = f"{reached:.1f}× with products of few rows at the rates measured for them"
    if alone >= CLOSE:
        factor = facts.done.bytes / facts.bytes
        moves = f"plain torch moves {factor:.1f}× the bytes of one fused pass"
        return "unfused", f"{moves}; operation by operation its bound is {alone:.1f}×, {few}"
    if reached >= CLOSE:
        return "few-rows", f"operation by operation its bound is {alone:.1f}×, {few}"
    return "kernel", f"torch's kernels reach {1 / ratio:.0%} of the {facts.bound} ceiling here"
