"""Predict the time of a pass: its operators one after the other, plus the engine's overhead.

    pass = Σ operators + overhead of the engine (`timing.calibration.HostOverheads`)

GEMMs, attention, experts and all-reduces have fitted kernel models. Other operators do not:

- Elementwise operators move their bytes at the usual rate of streaming kernels. Their launches are
  in the engine's overhead, or other kernels include them.
- An indexer of sparse attention takes at least its FLOPs at `INDEXER_SHARE` of the bf16 peak.
- Recurrences, all-to-alls and experts that span nodes take their datasheet bound and one launch.
- A collective between nodes takes the kernel model's time within a node, then the bound of the
  bytes between nodes.
- A dtype or cache format without measured rows (int8, nvfp4 …) uses the nearest kernel model.

All these times are marked as scaled. A time that is marked as a bound is equal to the datasheet
bound.

Sparse-attention modules were also measured as a whole. The time beyond their operators is the
module's overhead, so an operator takes the same time in a sparse module and in an MLA module. No
time is below the bound, and operators do not overlap.

All-reduces between nodes are rings, one per GPU of a node, each over that GPU's own link.
"""

from collections.abc import Sequence
from math import log2
from typing import Any, NamedTuple

from kvcalc.arithmetic import at_least, doublings, grouped, is_any, maximum, minimum, where
from kvcalc.gpu.gpu import Gpu, cost_bound
from kvcalc.layers.cost import AttentionShape, CollectiveShape, GemmShape, Operator, Role
from kvcalc.timing.calibration import CALIBRATED, SCALED, Calibration, KernelModelEntry
from kvcalc.timing.kernel_models.families import MAX_DECODE_TOKENS
from kvcalc.timing.kernel_models.kernel_model import LAUNCH_US, STREAMING_SHARE, figures_of
from kvcalc.timing.kernel_times import KernelTimer, cache_kind, computes_as_measured

# Microseconds of one message between nodes. A tree of n nodes sends 2·log2(n) messages. Source:
# NCCL, src/graph/tuning.cc, hwLat of the network under the tree with the low-latency protocol
# (github.com/NVIDIA/nccl, read 2026-11-22).
MESSAGE_US = 5.0
# Share of the bf16 peak that index scores of long prompts reach. DeepGEMM's fp8 kernels were
# measured at up to 0.93 on Hopper and 0.9 on Blackwell (AIConfigurator, commit 095f58a51c4c).
INDEXER_SHARE = 0.8
Operators = Sequence[Operator]


def latency_us(operator: Operator) -> float:
    """Return the latency in microseconds of the messages that an operator sends between nodes.

    It is the total of one run of the operator. The time to transfer the bytes is not included. The
    result is 0 if the operator sends nothing to other nodes.

    Args:
        operator: The operator of a forward pass, such as an all-reduce.
    """
    if not is_any(operator.cost.inter_node_bytes):
        return 0.0
    shape = operator.shape
    if isinstance(shape, CollectiveShape):
        return 2 * doublings(-(-shape.ranks // shape.near)) * MESSAGE_US
    return MESSAGE_US


class OperatorTime(NamedTuple):
    """The predicted time of all runs of an operator in one forward pass.

    Attributes:
        seconds: Seconds of all runs together, a float or an array. An operator runs once for each
            layer that has it.
        basis: `calibrated` if a time model was fitted to measured kernels of this type and these
            data types, otherwise `scaled`.
        entry: The fitted time model that predicts the time, with its errors. None if the time, or a
            part of it, is not from a fitted time model.
        overhead: Time that sparse attention takes in addition to its operators, in all layers that
            run this operator. It is set only on the last operator of the attention, otherwise it is
            None. `seconds` does not include this time.
    """

    seconds: Any
    basis: str
    entry: KernelModelEntry | None = None
    overhead: "OperatorTime | None" = None

    @property
    def parts(self) -> "tuple[OperatorTime, ...]":
        """Return this object, followed by its `overhead` if it is set, to sum over both."""
        return (self, self.overhead) if self.overhead else (self,)


def operator_seconds(
    operators: Operators, gpu: Gpu, calibration: Calibration
) -> list[OperatorTime]:
    """Return the predicted time of each operator of a forward pass, at least its datasheet bound.

    If costs are arrays, an operator takes 0 seconds at the elements at which it has no work.

    Args:
        operators: Operators of the pass, with the costs of one GPU.
        gpu, calibration: The GPU model, and time models measured on it or on another GPU model.

    Raises:
        UserError: The GPU preset lacks a rate or size that time models need.
    """
    timer = KernelTimer(figures_of(gpu), calibration, gpu.link_domain)
    times = []
    for operator in operators:
        cost = operator.cost
        kernel = timer.time(operator)
        bound_s = cost_bound(cost, operator.dtype, gpu).seconds
        message_us = latency_us(operator)
        entry, basis = None, SCALED
        us = cost.bytes / (STREAMING_SHARE * timer.parameters.memory)
        if operator.kind != "vector":
            us = maximum(us, bound_s * 1e6) + LAUNCH_US + message_us
        if operator.name == "indexer" and operator.dtype == "fp8":
            us = maximum(us, cost.flops / (INDEXER_SHARE * timer.parameters.bf16))
        if kernel and is_any(kernel.us != kernel.us):  # NaN: not measured there
            us = where(kernel.us == kernel.us, kernel.us, us)
        elif kernel and message_us and gpu.inter_domain_rate:
            us = kernel.us + message_us + cost.inter_node_bytes / gpu.inter_domain_rate * 1e6
        elif kernel:
            is_measured = kernel.is_measured and computes_as_measured(operator, calibration)
            us = kernel.us
            entry = kernel.entry
            basis = CALIBRATED if is_measured else SCALED
        seconds = maximum(us * operator.count / 1e6, bound_s * operator.count)
        work = cost.flops + cost.vector_flops + cost.bytes + cost.network_bytes
        if not isinstance(work, int | float):  # points without work, as MLA in the other form
            seconds = seconds * (work > 0)
        times.append(OperatorTime(seconds, basis, entry))

    # the overhead of a sparse-attention module is part of its last operator's time
    members = grouped((o.layer, index) for index, o in enumerate(operators) if o.module)
    for indices in members.values():
        last = operators[indices[-1]]
        kernels_us = sum((times[i].seconds for i in indices), 0.0) / last.count * 1e6
        module_time = last.module and timer.module_overhead(last.module, kernels_us)
        if module_time:
            basis = CALIBRATED if module_time.is_measured else SCALED
            overhead = OperatorTime(module_time.us * last.count / 1e6, basis, module_time.entry)
            times[indices[-1]] = times[indices[-1]]._replace(overhead=overhead)
    return times


class PassTime(NamedTuple):
    """The predicted time of one forward pass. Values are floats or arrays.

    Attributes:
        seconds: Seconds of the whole pass, including the engine's overhead.
        uncalibrated_share: Share of `seconds`, from 0 to 1, of operators without a time model
            fitted to their data types.
        engine: Part of `seconds` that the engine adds to the GPU kernels, such as scheduling.
    """

    seconds: Any
    uncalibrated_share: Any
    engine: Any


def pass_time(operators: Operators, gpu: Gpu, calibration: Calibration) -> PassTime:
    """Return the predicted time of one forward pass: its operators, plus the engine's overhead.

    Args:
        operators: Operators of the pass, with the costs of one GPU.
        gpu: The GPU model on which the pass runs.
        calibration: Fitted time models of kernels, and the overheads of the engine.
    """
    return summed_time(operators, operator_seconds(operators, gpu, calibration), calibration)


def summed_time(
    operators: Operators, times: Sequence[OperatorTime], calibration: Calibration
) -> PassTime:
    """Return the time of a forward pass from the predicted times of its operators.

    The engine's overhead is added. `pass_time` does the same, but predicts the operators first.

    Args:
        operators: Operators of the pass, with the costs of one GPU.
        times: Times that `operator_seconds` returned for these operators.
        calibration: Calibration that states the overheads of the engine.
    """
    parts = [part for time in times for part in time.parts]
    kernels = sum((part.seconds for part in parts), 0.0)
    engine = engine_seconds(operators, calibration, kernels)
    seconds = kernels + engine
    uncalibrated = sum((part.seconds for part in parts if part.basis != CALIBRATED), 0.0)
    return PassTime(seconds, uncalibrated / seconds, engine)


def kernel_seconds(operators: Operators, gpu: Gpu, calibration: Calibration) -> Any:
    """Return the predicted seconds of a forward pass without the engine's overhead.

    It is the sum over the operators, which run one after the other: a float or an array.

    Args:
        operators: Operators of the pass, with the costs of one GPU.
        gpu: The GPU model on which the pass runs.
        calibration: Fitted time models of kernels, measured on this GPU model or on another one.
    """
    times = operator_seconds(operators, gpu, calibration)
    return sum((part.seconds for time in times for part in time.parts), 0.0)


class HostTime(NamedTuple):
    """Time that an engine adds to the GPU kernels in each forward pass of one model.

    Attributes:
        fixed: Seconds added to each pass, for all its layers.
        sequence: Seconds added for each sequence in a pass.
        prompts: Factor on the kernel time of a pass that contains prompts; 1 adds nothing.
        launches: Minimum kernel time in seconds of a pass that contains prompts, because the CPU
            launches each kernel.
    """

    fixed: float
    sequence: float
    prompts: float
    launches: float

    def with_prompts(self, kernels: Any) -> Any:
        """Return the kernel time in seconds of a forward pass that contains prompts.

        It is `prompts` times `kernels`, but at least `launches` (see the class).

        Args:
            kernels: Seconds of the pass's GPU kernels, as their time models predict them: a float
                or an array.
        """
        return maximum(self.prompts * kernels, self.launches)


def host_time_of(operators: Operators, calibration: Calibration) -> HostTime:
    """Return the time that the engine adds to the GPU kernels in forward passes of a model.

    The result has seconds per pass, seconds per sequence, and a factor and a minimum for passes
    with prompts. They depend on the number of layers, the ranks of the largest all-reduce, and
    whether the model is a mixture of experts.

    Args:
        operators: Operators of any forward pass of the model.
        calibration: Calibration that states the overheads of the engine.
    """
    counts: dict[str, int] = {}
    ranks = 1
    for operator in operators:
        if operator.layer:
            count = counts.get(operator.layer, operator.count)
            counts[operator.layer] = min(operator.count, count)
        if isinstance(operator.shape, CollectiveShape):
            ranks = max(ranks, operator.shape.ranks)
    layers = sum(counts.values())
    overheads = calibration.host_overheads(is_mixture(operators))
    per_layer_us = overheads.glue_us + overheads.skew_us * log2(ranks)
    return HostTime(
        fixed=(layers * per_layer_us + overheads.step_us) / 1e6,
        sequence=overheads.sequence_us / 1e6,
        prompts=overheads.prompts,
        launches=layers * overheads.launch_us / 1e6,
    )


def is_mixture(operators: Operators) -> bool:
    """Return whether the operators of a forward pass are those of a mixture of experts.

    An engine has other overheads for mixtures than for dense models. An operator of experts states
    the expected number of experts that it reads, as a float or an array. Other operators state the
    int 0.

    Args:
        operators: Operators of the pass.
    """
    return any(not isinstance(operator.experts, int) for operator in operators)


def engine_seconds(operators: Operators, calibration: Calibration, kernels: Any) -> Any:
    """Return the seconds that the engine adds to the GPU kernels of one forward pass.

    It is the fixed overhead of the pass and its layers, plus the overhead of all sequences, plus
    the additional kernel time of a pass that contains prompts. The result is a float or an array.

    Args:
        operators: Operators of the pass.
        calibration: Calibration that states the overheads of the engine.
        kernels: Predicted seconds of all operators together, a float or an array.
    """
    return sum(engine_parts(operators, calibration, kernels))


def engine_parts(
    operators: Operators, calibration: Calibration, kernels: Any
) -> tuple[Any, Any, Any]:
    """Return the seconds that the engine adds to the kernels of one forward pass, in three parts.

    They are: the fixed overhead of the pass and its layers; the overhead of all its sequences; and
    the additional kernel time of a pass that contains prompts, which is 0 in a decode step. More
    than 16 new tokens of a sequence count as a prompt.

    If the LM head runs on all tokens of a prompt, the prompt still counts as one sequence.

    Args:
        operators: Operators of the pass.
        calibration: Calibration that states the overheads of the engine.
        kernels: Predicted seconds of all operators together, a float or an array.
    """
    host = host_time_of(operators, calibration)
    positions: Any = 0
    has_prompts = 0
    sampled: dict[str, Any] = {}  # positions by kind of layer
    for operator in operators:
        shape = operator.shape
        if operator.role is Role.HEAD and isinstance(shape, GemmShape):
            positions = shape.m
        if isinstance(shape, AttentionShape):
            for count, new, *_ in shape.groups:
                is_prompt = at_least(new, MAX_DECODE_TOKENS + 1) * at_least(count, 1)
                has_prompts = maximum(has_prompts, is_prompt)
                rows = count * (new + is_prompt * (1 - new))
                sampled[operator.layer] = sampled.get(operator.layer, 0) + rows
    positions = minimum(positions, next(iter(sampled.values()), positions))
    extra_s = has_prompts * (host.with_prompts(kernels) - kernels)
    return host.fixed, host.sequence * positions, extra_s


def step_error(operators: Operators, gpu: Gpu, calibration: Calibration) -> float | None:
    """Return how far predicted decode steps were off on measured servers: 0.05 is 5%.

    The result is the 90th percentile of the relative errors over measured servers, so 90% of them
    have a smaller error.

    The servers ran the calibration's engine, with models of the same type: dense or mixture of
    experts. The result is None if the error is unknown, which is so in these cases:

    - The pass contains prompts, or no attention.
    - The calibration is of another GPU model.
    - No servers of this engine were measured.
    - The ranks are on several nodes.
    - A dtype or cache format has no measured rows.
    - The model has sparse attention, because too few such servers were measured.

    Args:
        operators: Operators of the decode step.
        gpu: The GPU model on which the step runs.
        calibration: Calibration that states the errors against measured servers.
    """
    shapes = [o.shape for o in operators if isinstance(o.shape, AttentionShape)]
    if (
        calibration.basis_on(gpu) != CALIBRATED
        or not shapes
        or any(operator.module or latency_us(operator) for operator in operators)
        or any(is_any(g[1] > MAX_DECODE_TOKENS) for shape in shapes for g in shape.groups)
        or not all(cache_kind(shape.cached)[1] for shape in shapes)
        or not all(computes_as_measured(operator, calibration) for operator in operators)
    ):
        return None
    validated = calibration.validation.get("mixture" if is_mixture(operators) else "dense")
    return validated.p90_abs_error if validated else None
