"""A deployment: a model on GPUs with its formats, ranks and time model, and the time of its passes.

Nodes: ranks are in order with tp innermost. A tp group stays on one node if it fits.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import msgspec

from kvcalc.arithmetic import maximum
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.gpu.roof import Placed, fallbacks, roofline, total_seconds
from kvcalc.layers.batch import ONE_GPU, Batch, Parallelism
from kvcalc.layers.cost import Cost, Operator
from kvcalc.layers.weights import Formats
from kvcalc.library.load import load_gpu
from kvcalc.model.forward_pass import between_stages, forward, through_layers, total
from kvcalc.model.memory import CacheSize, cache_size, weight_bytes
from kvcalc.model.model import Model
from kvcalc.model.precision import PUBLISHED, Precision, formats_of
from kvcalc.records import Record

if TYPE_CHECKING:  # kernel models are imported only for predictions
    from kvcalc.timing.calibration import Calibration

MAX_MEMO = 4  # passes whose operators a model remembers
ALL_EXPERTS = 10**9  # tokens of a pass that reach every expert
MAX_UNMEASURED = 0.01  # share of a pass up to which the error on measured servers holds


class TimedDeployment(msgspec.Struct, frozen=True):
    """A model on one replica of GPUs, and the time of its passes.

    With a calibration, times are predictions of its kernel models and include the engine's
    overhead. Otherwise they are datasheet bounds.

    Attributes:
        mla_form: Form of latent attention: auto, absorbed or expanded.
        calibration: Kernel models; None for datasheet bounds.
        calibrated_on: GPU whose calibration is scaled to this GPU; '' if it is this GPU's own.
        host_weights: Bytes of each GPU's weights in host memory. A pass reads its share of them
            over the host link: in parallel with other work in a bound, after it in a prediction.
        nodes: Number of nodes; 0 for as few as the GPU's link allows.
        engine: Engine whose memory rules and times hold.
        engine_version: Its version; '' for the latest.
        is_server: Whether a server runs the passes. In bounds, prompts are then divided
            into chunks, so that all pipeline stages work at the same time.
    """

    model: Model
    gpu: Gpu
    precision: Precision = PUBLISHED
    parallelism: Parallelism = ONE_GPU
    mla_form: str = "auto"
    calibration: "Calibration | None" = None
    calibrated_on: str = ""
    host_weights: int = 0
    nodes: int = 0
    engine: str = "vllm"
    engine_version: str = ""
    is_server: bool = False

    def under(self, calibration: str = "", calibrated_on: str = "") -> Self:
        """Return the deployment with a calibration.

        Args:
            calibration: A name or a file; '' for the engine's own, `datasheet` for none.
            calibrated_on: Another GPU, whose calibration is scaled by datasheet figures.

        Raises:
            UserError: As `load_calibration`.
        """
        from kvcalc.timing.calibration import load_calibration

        source = load_gpu(calibrated_on) if calibrated_on else None
        loaded = load_calibration(self.gpu, calibration, source, self.engine)
        if loaded and not calibrated_on and loaded.gpu != self.gpu.name:
            calibrated_on = loaded.gpu
        return msgspec.structs.replace(self, calibration=loaded, calibrated_on=calibrated_on)

    def as_server(self) -> Self:
        """Return the deployment as a server."""
        return msgspec.structs.replace(self, is_server=True)

    @property
    def formats(self) -> Formats:
        """The formats of weights and cache. Raises UserError for a format that the model cannot
        have."""
        return formats_of(self.model, self.precision)

    @property
    def ranks(self) -> Parallelism:
        """The parallelism, spread over nodes. Raises UserError if the rate between nodes is
        unknown."""
        return spread_over(self.parallelism, self.gpu, self.nodes)

    @property
    def basis(self) -> str:
        """The time model by name, with the engine version that was measured."""
        if not self.calibration:
            return "datasheet"
        source = f" of {self.calibration.gpu}" if self.calibrated_on else ""
        label = f"{self.calibration.stack} {self.calibration.version}".strip()
        return f"{label} calibration{source}"

    @property
    def time_basis(self) -> str:
        """calibrated, scaled (from another GPU's calibration) or bound."""
        return self.calibration.basis_on(self.gpu) if self.calibration else "bound"

    @property
    def named(self) -> Record:
        """The keys of a record that distinguish deployments of a list."""
        ranks, formats = self.parallelism, self.formats
        nodes = nodes_of(self.ranks, self.gpu, self.nodes)
        return {
            "model": self.model.name,
            "gpu": self.gpu.name,
            "gpus": ranks.gpus,
            "nodes": nodes,
            "inter_node_bytes_per_s": self.gpu.outer_link if nodes > 1 else None,
            "tensor_parallel_size": ranks.tp,
            "dtype": formats.weights_label,
            "kv_cache_dtype": formats.kv_cache_dtype,
            "engine": self.engine,
            "basis": self.basis,
            "calibration_from": self.calibration.gpu
            if self.calibration and self.calibrated_on
            else None,
        }

    def operators(self, batch: Batch, all_positions: bool = False) -> list[Operator]:
        """Return the operators of a pass through all stages. The model remembers the last
        passes."""
        ranks = self.ranks
        key = batch, self.precision, ranks, self.mla_form, all_positions
        memo = self.model.memo.setdefault("operators", {})
        if batch.exact and key in memo:
            return [*memo[key]]
        operators = through_layers(self.model, *key)
        operators += between_stages(self.model, batch, self.precision, ranks)
        if batch.exact:
            if len(memo) == MAX_MEMO:
                del memo[next(iter(memo))]
            memo[key] = [*operators]
        return operators

    def placed(self, batch: Batch) -> list[Placed]:
        """Return the operators of a pass on one GPU of the slowest pipeline stage, with their
        bounds."""
        stages = [
            forward(self.model, batch, self.precision, self.ranks, self.mla_form, stage=n)
            for n in range(self.parallelism.pp)
        ]
        bounds = [roofline(operators, self.gpu, batch.decodes) for operators in stages]
        return max(bounds, key=total_seconds)

    def timed(self, batch: Batch) -> bool:
        """Return whether a pass has a time. A decode step has a bound without matrix peaks; others
        need them."""
        return batch.decodes or all(
            self.gpu.computes(o.dtype) for o in self.operators(batch) if o.dtype
        )

    def seconds(self, batch: Batch, all_positions: bool = False) -> Any:
        """Return the seconds until all sequences of `batch` have passed all stages.

        With pipeline stages, these are the seconds of a micro-batch. An array if the batch has
        arrays.
        """
        timed = self.timed_batch(batch)
        operators = self.operators(timed, all_positions)
        if self.calibration:
            from kvcalc.timing.steps import pass_time

            predicted = pass_time(operators, self.gpu, self.calibration)
            return predicted.seconds + self.host_seconds(operators)
        bound = total_seconds(roofline(operators, self.gpu, timed.decodes))
        return maximum(bound, self.host_seconds(operators)) if self.host_weights else bound

    def timed_batch(self, batch: Batch) -> Batch:
        """Return the batch whose time is the pass's: with pipeline stages, a micro-batch.

        The stages work on different micro-batches at the same time. Bounds take the smallest
        micro-batch, predictions the largest. The timers of a server divide the batches of
        predictions themselves.
        """
        stages, is_bound = self.parallelism.pp, not self.calibration
        if stages == 1 or (self.is_server and not is_bound):
            return batch
        return batch.micro_batch(self.parallelism, self.is_server, rounds_up=not is_bound)

    def spent(self, batch: Batch, all_positions: bool = False) -> tuple[Cost, Any]:
        """Return FLOPs and bytes of a pass on one GPU of each stage, and its seconds."""
        cost = total(self.operators(batch, all_positions))
        return cost, self.seconds(batch, all_positions)

    def host_seconds(self, operators: Sequence[Operator], measured: bool | None = None) -> Any:
        """Return the seconds in which a pass reads weights from host memory over the host link.

        Only weights of layers are in host memory. A pass reads the experts that tokens reach.

        Args:
            operators: Operators of the pass, through all stages.
            measured: Whether to use the measured rate of the link; by default only in predictions.

        Raises:
            UserError: Weights are in host memory, and the GPU gives no rate.
        """
        if not self.host_weights:
            return 0.0
        rate = self.gpu.host_rate(
            self.calibration is not None if measured is None else measured
        )
        if not rate:
            raise UserError(
                f"{self.gpu.name} has no host_link_bytes_per_s, which weights in host memory need"
            )
        all_bytes = _layer_weights(self.operators(Batch.prefill(ALL_EXPERTS)))
        host_bytes = min(self.host_weights * self.parallelism.pp, all_bytes)
        return host_bytes * _layer_weights(operators) / all_bytes / rate

    def uncalibrated_share(self, batch: Batch) -> Any:
        """Return the share of a pass's time from operators without their own kernel model; 1 for
        bounds."""
        if not self.calibration:
            return 1.0
        from kvcalc.timing.steps import pass_time

        operators = self.operators(batch)
        return pass_time(operators, self.gpu, self.calibration).uncalibrated_share

    def p90_error(self, batch: Batch) -> float | None:
        """Return the error of such a pass on measured servers, or None if unknown.

        It is unknown if part of the time is a bound, or if weights are in host memory.
        """
        if not self.calibration or self.host_weights:
            return None
        if self.uncalibrated_share(batch) > MAX_UNMEASURED:
            return None
        from kvcalc.timing.steps import step_error

        return step_error(self.operators(batch), self.gpu, self.calibration)

    def fallback(self, *batches: Batch) -> str | None:
        """Return a sentence on dtypes for which the GPU has no unit, or None."""
        first: dict[str, Operator] = {}
        for operator in (operator for batch in batches for operator in self.operators(batch)):
            first.setdefault(operator.dtype, operator)
        return fallbacks(roofline([*first.values()], self.gpu, True), self.gpu) or None

    def cache_size(self, context: int, batch_size: int = 1, block_size: int = 16) -> CacheSize:
        """Return the cache on the fullest GPU."""
        return cache_size(
            self.model, context, batch_size, self.precision, block_size, self.parallelism
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on the fullest GPU."""
        return weight_bytes(self.model, self.precision, self.parallelism)

    def cost(self, batch: Batch) -> Cost:
        """Return FLOPs and bytes of a pass on one GPU of each stage."""
        return total(self.operators(batch))


def _layer_weights(operators: Sequence[Operator]) -> Any:
    """Return the bytes of weights that operators in layers read."""
    return sum(operator.total.weight_bytes for operator in operators if operator.layer)


def spread_over(ranks: Parallelism, gpu: Gpu, nodes: int = 0) -> Parallelism:
    """Return the ranks with `per_node` set to the GPUs that one link joins.

    If one link joins all ranks, they are returned unchanged.

    Args:
        nodes: Number of nodes; 0 for as few as possible.

    Raises:
        UserError: The ranks do not divide over the nodes, or they exceed the link and the GPU gives
            no rate between nodes.
    """
    domain, per_node = gpu.link_domain, ranks.gpus
    if nodes:
        if not 0 < nodes <= ranks.gpus or ranks.gpus % nodes:
            raise UserError(f"{ranks.gpus} GPUs do not divide over {nodes} nodes")
        per_node = ranks.gpus // nodes
        if domain and per_node > domain and not gpu.bridged:
            text = f"one link joins {domain} {gpu.name}, but a node has {per_node}"
            raise UserError(text, hint=f"Give --nodes {-(-ranks.gpus // domain)} or more")
    limit = min(domain or per_node, per_node)
    if ranks.gpus <= limit:
        return ranks
    if not (gpu.inter_node_bytes_per_s or (gpu.bridged and nodes <= 1)):
        text = (
            f"one link joins {limit} {gpu.name}, and the preset has no rate between nodes "
            f"for {ranks.gpus}"
        )
        raise UserError(text, hint="Give --inter-node-bandwidth of a GPU, as 50GB/s")
    tp = ranks.tp
    near = limit // tp * tp if tp <= limit else -(-tp // -(-tp // limit))
    return msgspec.structs.replace(ranks, per_node=near)


def nodes_of(ranks: Parallelism, gpu: Gpu, nodes: int = 0) -> int:
    """Return the number of nodes of spread ranks. GPUs that a bridge joins in pairs are one
    node."""
    if not ranks.per_node or (gpu.bridged and nodes <= 1):
        return 1
    return -(-ranks.gpus // ranks.per_node)
