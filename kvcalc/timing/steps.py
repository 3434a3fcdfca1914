"""Whole passes in calibrated time: every operator through its law, caches cold, and what a layer costs beside them.

    pass = Σ operators, one after the other, + what the engine adds (`timing.engine.Terms`)

Matrix products, attention, experts and all-reduces follow their laws. Sparse-attention modules were also measured whole: what
they take beyond their operators is an overhead of its own, so that an operator takes as long in them as in an MLA module.
Elementwise chains move their bytes at the rate that streaming kernels commonly reach, and are scaled: no rows are of them, and
their launches are in the engine's glue per layer, or fused into others. Operators without a law (recurrences, all-to-all,
experts spread beyond a node) take their datasheet bound and a launch, and say so; so does what collectives send between nodes,
after their part within one. Products in a dtype, and attention over a cache in a format, of which there are no rows (int8,
int4, nvfp4 …) are scaled: they take the law of the nearest of which there are. No law goes below the bound, and no overlap
between operators is assumed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvcalc.gpu.roof import least_time
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.cost import AttentionShape, CollectiveShape, Cost, GemmShape, Operator, Role
from kvcalc.timing.applied import by_law, cache_rows, computes_as_measured, decodes, module_overhead, plain, products
from kvcalc.timing.calibration import BOUND, CALIBRATED, SCALED, Calibration, Entry
from kvcalc.timing.elementwise import Elementwise
from kvcalc.timing.families import MOST_DECODE_TOKENS
from kvcalc.timing.figures import Figures, figures_of
from kvcalc.timing.nodes import latency_us
from kvcalc.timing.routing import BALANCED, Routing
from kvcalc.units import at_least, maximum

_VECTOR = Elementwise()


class _Run(NamedTuple):
    """µs of one run of an operator, what they rest on, and the cell behind them."""

    us: Any
    basis: str
    entry: Entry | None = None


class Timed(NamedTuple):
    """Seconds of all the times an operator runs (a float or an array), and what they rest on: calibrated, bound, or scaled.

    entry: the cell of the calibration behind it, where there is one. overhead: of the last operator of a sparse-attention
    module, what the module takes beyond the kernels of its operators; it is not part of `seconds`.
    """

    seconds: Any
    basis: str
    entry: Entry | None = None
    overhead: "Timed | None" = None

    @property
    def both(self) -> "tuple[Timed, ...]":
        """The time of the operator, and the overhead of the module that ends with it."""
        return (self, self.overhead) if self.overhead else (self,)


def operator_seconds(
    operators: Sequence[Operator], gpu: Gpu, calibration: Calibration, routing: Routing = BALANCED
) -> list[Timed]:
    """The time of each operator under a calibration, never below its roof; 0 where it has nothing to do.

    Raises UserError where the GPU lacks a figure that laws need.
    """
    figures = figures_of(gpu)
    gemms = products(operators, figures, calibration)
    least = [least_time(o.cost, o.dtype, gpu).seconds for o in operators]
    runs = []
    for at, operator in enumerate(operators):
        found = gemms.get(at) or by_law(operator, figures, calibration, routing, gpu.link_domain)
        late = latency_us(operator)
        other = _Run(least[at] * 1e6 + _VECTOR.t0 + late, BOUND)
        if operator.kind == "vector":
            other = _Run(operator.cost.bytes / (_VECTOR.em * figures.memory), SCALED)
        if found is None or _unknown(found.us):
            runs.append(_Run(_known(found.us, other.us), other.basis) if found else other)
            continue
        if late and gpu.outer_link:
            runs.append(_Run(found.us + late + operator.cost.inter_node_bytes / gpu.outer_link * 1e6, BOUND))
            continue
        basis = CALIBRATED if found.measured and computes_as_measured(operator, calibration) else SCALED
        runs.append(_Run(found.us, basis, found.entry))
    timed = []
    for operator, floor, run in zip(operators, least, runs, strict=True):
        seconds = _larger(run.us * operator.count / 1e6, floor * operator.count)
        timed.append(Timed(_where_busy(operator.cost, seconds), run.basis, run.entry))
    return _add_modules(operators, timed, figures, calibration)


def _add_modules(operators: Sequence[Operator], timed: list[Timed], figures: Figures, calibration: Calibration) -> list[Timed]:
    """Return the same times, the last operator of each sparse-attention module with the overhead of the module."""
    members: dict[str, list[int]] = {}
    for place, operator in enumerate(operators):
        if operator.module:
            members.setdefault(operator.layer, []).append(place)
    for places in members.values():
        last = operators[places[-1]]
        kernels = sum((timed[place].seconds for place in places), 0.0) / last.count * 1e6
        found = module_overhead(last.module, kernels, figures, calibration) if last.module else None
        if found is not None:
            overhead = Timed(found.us * last.count / 1e6, CALIBRATED if found.measured else SCALED, found.entry)
            timed[places[-1]] = timed[places[-1]]._replace(overhead=overhead)
    return timed


def _unknown(us: Any) -> bool:
    """Whether any point is NaN."""
    return bool((us != us).any()) if hasattr(us, "any") else bool(us != us)


def _known(us: Any, other: Any) -> Any:
    """`us` where it is known, else `other`."""
    if not hasattr(us, "shape"):
        return us if us == us else other
    import numpy as np

    return np.where(np.isnan(us), other, us)


class PassTime(NamedTuple):
    """A pass in seconds, the share of them that rests on operators without a law of their own, and those of the engine."""

    seconds: Any
    uncalibrated_share: Any
    engine: Any


def pass_time(operators: Sequence[Operator], gpu: Gpu, calibration: Calibration, routing: Routing = BALANCED) -> PassTime:
    """The time of the whole pass: its operators and what the engine adds."""
    return summed_time(operators, operator_seconds(operators, gpu, calibration, routing), calibration)


def summed_time(operators: Sequence[Operator], timed: Sequence[Timed], calibration: Calibration) -> PassTime:
    """Operators, timed, and what the engine adds."""
    each = [one for t in timed for one in t.both]
    kernels = sum((t.seconds for t in each), 0.0)
    engine = engine_seconds(operators, calibration, kernels)
    whole = kernels + engine
    return PassTime(whole, sum((t.seconds for t in each if t.basis != CALIBRATED), 0.0) / whole, engine)


def pass_seconds(operators: Sequence[Operator], gpu: Gpu, calibration: Calibration, routing: Routing = BALANCED) -> Any:
    """The seconds of `pass_time`."""
    kernels = kernel_seconds(operators, gpu, calibration, routing)
    return kernels + engine_seconds(operators, calibration, kernels)


def kernel_seconds(
    operators: Sequence[Operator], gpu: Gpu, calibration: Calibration, routing: Routing = BALANCED, before: Any = 0.0
) -> Any:
    """Seconds of operators, one after the other, added to what those `before` them take."""
    timed = operator_seconds(operators, gpu, calibration, routing)
    return sum((one.seconds for t in timed for one in t.both), before)


class Host(NamedTuple):
    """What an engine adds to passes of a model: seconds of each, of each sequence in it, times that kernels take with prompts,
    and their least seconds then.
    """

    fixed: float
    sequence: float
    prompts: float
    launches: float

    def with_prompts(self, kernels: Any) -> Any:
        """Seconds of kernels in a pass with prompts."""
        return _larger(self.prompts * kernels, self.launches) if self.launches else self.prompts * kernels


def host_of(operators: Sequence[Operator], calibration: Calibration) -> Host:
    """The engine's terms for passes like this one: its layers, the ranks that it reduces over, whether it mixes experts."""
    layers, ranks = layers_and_ranks(operators)
    terms = calibration.terms(mixes(operators))
    return Host(terms.fixed_s(layers, ranks), terms.sequence_us / 1e6, terms.prompts, layers * terms.launch_us / 1e6)


def layers_and_ranks(operators: Sequence[Operator]) -> tuple[int, int]:
    """Return the number of layers of a pass, and the number of ranks that an all-reduce of it spans."""
    counts: dict[str, int] = {}
    ranks = 1
    for operator in operators:
        if operator.layer:
            counts[operator.layer] = min(operator.count, counts.get(operator.layer, operator.count))
        if isinstance(operator.shape, CollectiveShape):
            ranks = max(ranks, operator.shape.ranks)
    return sum(counts.values()), ranks


def mixes(operators: Sequence[Operator]) -> bool:
    """Whether this is a pass of a mixture of experts; an expected number of them is a float or an array."""
    return any(not isinstance(o.experts, int) for o in operators)


def engine_seconds(operators: Sequence[Operator], calibration: Calibration, kernels: Any) -> Any:
    """What the engine adds to a pass whose operators take `kernels` seconds."""
    fixed, of_sequences, of_prompts = engine_parts(operators, calibration, kernels)
    return fixed + of_sequences + of_prompts


def engine_parts(operators: Sequence[Operator], calibration: Calibration, kernels: Any) -> tuple[Any, Any, Any]:
    """Return the seconds of `engine_seconds`: of layers and the pass, of its sequences, and beyond kernels with prompts."""
    host = host_of(operators, calibration)
    positions: Any = 0
    prompts: Any = 0
    for operator in operators:
        if operator.role is Role.HEAD and isinstance(operator.shape, GemmShape):
            positions = operator.shape.m
        if isinstance(operator.shape, AttentionShape) and (host.prompts != 1 or host.launches):
            for count, new, *_ in operator.shape.groups:
                prompts = maximum(prompts, at_least(new, MOST_DECODE_TOKENS + 1) * at_least(count, 1))
    return host.fixed, host.sequence * positions, prompts * (host.with_prompts(kernels) - kernels)


def step_error(operators: Sequence[Operator], gpu: Gpu, calibration: Calibration) -> float | None:
    """The 90th percentile of the error of such a pass against measured servers: a decode step of a dense model or a mixture.

    None where none is known: for prompts, for a calibration scaled from another GPU, for stacks without measured servers, for
    ranks on several nodes, for products or caches in a format of which there are no rows, for sparse attention, of which
    there are too few measured servers.
    """
    shapes = [o.shape for o in operators if isinstance(o.shape, AttentionShape)]
    if (
        calibration.basis_on(gpu) != CALIBRATED
        or not shapes
        or any(operator.module or latency_us(operator) for operator in operators)
        or not all(decodes(new) for s in shapes for _, new, _, _ in s.groups)
        or not all(cache_rows(s.cached)[1] for s in shapes)
        or not all(computes_as_measured(operator, calibration) for operator in operators)
    ):
        return None
    known = calibration.validation.get("mixture" if mixes(operators) else "dense")
    return known.p90_abs_error if known else None


def _where_busy(cost: Cost, seconds: Any) -> Any:
    """0 at the points of an array where an operator has nothing to do: latent attention in the form that others take."""
    work = cost.flops + cost.vector_flops + cost.bytes + cost.network_bytes
    return seconds if isinstance(work, int | float) else plain(seconds * (work > 0))


def _larger(a: Any, b: Any) -> Any:
    """The larger of two floats or arrays; a float for two floats."""
    if isinstance(a, float) and isinstance(b, float):
        return max(a, b)
    import numpy as np

    return np.maximum(a, b)
