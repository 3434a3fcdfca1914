"""A model on GPUs, as it is run: the noun that every reading takes. And how long its passes take."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import msgspec

from kvcalc.errors import UserError
from kvcalc.gpu.roof import Placed, fallbacks, roofline, total_seconds
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Cost, Operator
from kvcalc.layers.formats import Formats
from kvcalc.layers.ranks import ONE_GPU, Parallelism
from kvcalc.library.load import load_gpu
from kvcalc.model.memory import CacheSize, cache_size, weight_bytes
from kvcalc.model.operators import between_stages, forward, through_layers, total
from kvcalc.model.precision import PUBLISHED, Precision, formats_of
from kvcalc.model.spec import Model
from kvcalc.timing.nodes import nodes_of, spread_over
from kvcalc.timing.routing import BALANCED, Routing
from kvcalc.units import maximum

if TYPE_CHECKING:
    from kvcalc.timing.calibration import Calibration  # `fit` needs none, and starts 11 ms sooner without


KEPT = 4  # passes whose operators are kept by a model
ALL_EXPERTS = 10**9  # tokens of a pass that reach every expert
MAX_UNMEASURED = 0.01  # share of a pass up to which the error on measured servers holds


class Deployment(msgspec.Struct, frozen=True):
    """`model` on a replica of `gpu`s: its formats, its ranks, the form of latent attention, and what times rest on.

    With a calibration a time is what its laws predict, glue included, else the datasheet bound of each operator. routing: how
    a router loads experts, where laws time them.
    nodes: that the ranks stand on; 0 for the fewest that the GPU's link allows.
    calibrated_on: the GPU whose calibration is scaled to this one by datasheet figures; '' where it is this GPU's own.
    host_weights: bytes of each GPU's weights that stay in the host's memory; their share of what a pass reads crosses the
    host link in it, under a bound beside all else, in a prediction after it.
    engine: The engine whose memory rules and times hold. engine_version: Its version, '' for the latest.
    """

    model: Model
    gpu: Gpu
    precision: Precision = PUBLISHED
    parallelism: Parallelism = ONE_GPU
    mla_form: str = "auto"
    calibration: "Calibration | None" = None
    calibrated_on: str = ""
    routing: Routing = BALANCED
    host_weights: int = 0
    nodes: int = 0
    engine: str = "vllm"
    engine_version: str = ""

    def under(self, calibration: str = "", calibrated_on: str = "") -> Self:
        """Return the deployment with a calibration: a name or a file, '' the engine's own, `datasheet` none.

        calibrated_on: another GPU, whose calibration is scaled by datasheet figures. Raises UserError as `load_calibration`.
        """
        from kvcalc.timing.calibration import load_calibration

        source = load_gpu(calibrated_on) if calibrated_on else None
        found = load_calibration(self.gpu, calibration, source, self.engine)
        if found and not calibrated_on and found.gpu != self.gpu.name:
            calibrated_on = found.gpu
        return msgspec.structs.replace(self, calibration=found, calibrated_on=calibrated_on)

    @property
    def formats(self) -> Formats:
        """The formats of every weight and cache row. Raises UserError on a format that this model cannot have."""
        return formats_of(self.model, self.precision)

    @property
    def ranks(self) -> Parallelism:
        """The parallelism, over nodes. Raises UserError where the GPU gives no rate between them."""
        return spread_over(self.parallelism, self.gpu, self.nodes)

    @property
    def basis(self) -> str:
        """What the times rest on, with the version of the engine that was measured."""
        if not self.calibration:
            return "datasheet"
        return f"{self.calibration.label} calibration" + (f" of {self.calibration.gpu}" if self.calibrated_on else "")

    @property
    def time_basis(self) -> str:
        """What the times are: calibrated, scaled from another GPU's calibration, or a bound."""
        return self.calibration.basis_on(self.gpu) if self.calibration else "bound"

    @property
    def named(self) -> dict[str, Any]:
        """What tells deployments of a list apart, by the keys of their records."""
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
            "calibration_from": self.calibration.gpu if self.calibration and self.calibrated_on else None,
        }

    def stage_operators(self, batch: Batch, stage: int | None = None, all_positions: bool = False) -> tuple[Operator, ...]:
        """The operators of a pass on one pipeline stage; by default the fullest."""
        return forward(self.model, batch, self.precision, self.ranks, self.mla_form, all_positions, stage)

    def operators(self, batch: Batch, all_positions: bool = False) -> list[Operator]:
        """The operators of a pass through all stages; those of the last passes of whole numbers are kept, to be asked again."""
        asked = batch, self.precision, self.ranks, self.mla_form, all_positions
        if not batch.exact:
            return self._operators(*asked)
        kept = self.model.known.setdefault("operators", {})
        if asked not in kept:
            if len(kept) == KEPT:
                del kept[next(iter(kept))]
            kept[asked] = self._operators(*asked)
        return [*kept[asked]]

    def _operators(
        self, batch: Batch, precision: Precision, ranks: Parallelism, mla_form: str, all_positions: bool
    ) -> list[Operator]:
        passed = through_layers(self.model, batch, precision, ranks, mla_form, all_positions)
        return passed + between_stages(self.model, batch, precision, ranks)

    def placed(self, batch: Batch) -> list[Placed]:
        """One pass under the roof as one GPU sees it: of pipeline stages the slowest. For whole numbers, not arrays."""
        if self.parallelism.pp == 1:
            return roofline(self.stage_operators(batch), self.gpu, batch.decodes)
        stages = (self.stage_operators(batch, n) for n in range(self.parallelism.pp))
        return max((roofline(operators, self.gpu, batch.decodes) for operators in stages), key=total_seconds)

    def timed(self, batch: Batch) -> bool:
        """Whether a pass has a time: a decode step has a bound from the memory alone, any other needs matrix peaks."""
        return batch.decodes or all(self.gpu.computes(o.dtype) for o in self.operators(batch) if o.dtype)

    def seconds(self, batch: Batch, all_positions: bool = False) -> Any:
        """Seconds of a pass over `batch`, of all stages; an array where the batch holds arrays."""
        return self._seconds(self.operators(batch, all_positions), batch.decodes)

    def spent(self, batch: Batch, all_positions: bool = False) -> tuple[Cost, Any]:
        """FLOPs and bytes of a pass on one GPU of each stage, and its `seconds`."""
        operators = self.operators(batch, all_positions)
        return total(operators), self._seconds(operators, batch.decodes)

    def spent_with_share(self, batch: Batch) -> tuple[Cost, Any, Any]:
        """What `spent` and `uncalibrated_share` say of a pass, its operators timed once."""
        operators = self.operators(batch)
        if not self.calibration:
            return total(operators), self._seconds(operators, batch.decodes), 1.0
        from kvcalc.timing.steps import pass_time

        timed = pass_time(operators, self.gpu, self.calibration, self.routing)
        return total(operators), timed.seconds + self.host_seconds(operators), timed.uncalibrated_share

    def _seconds(self, operators: Sequence[Operator], decodes: bool) -> Any:
        if self.calibration:
            from kvcalc.timing.steps import pass_seconds

            return pass_seconds(operators, self.gpu, self.calibration, self.routing) + self.host_seconds(operators)
        bound = total_seconds(roofline(operators, self.gpu, decodes))
        return maximum(bound, self.host_seconds(operators)) if self.host_weights else bound

    def host_seconds(self, operators: Sequence[Operator], measured: bool | None = None) -> Any:
        """Return the seconds in which the host link carries the weights of a pass that are in the host's memory.

        They are weights of layers, as engines leave embedding and head on the GPU. Of experts those that tokens reach cross.

        Args:
            operators: Operators of the pass, through all stages.
            measured: Whether to take the measured rate of the link if known; by default for predictions, not for bounds.

        Raises:
            UserError: Weights are in the host's memory, and the GPU gives no rate.
        """
        if not self.host_weights:
            return 0.0
        rate = self.gpu.host_rate(self.calibration is not None if measured is None else measured)
        if not rate:
            raise UserError(f"{self.gpu.name} gives no host_link_bytes_per_s over which weights could come from the host")
        held = _layer_weights(self.operators(Batch.prefill(ALL_EXPERTS)))
        read = _layer_weights(operators)
        return min(self.host_weights * self.parallelism.pp, held) * read / held / rate

    def uncalibrated_share(self, batch: Batch) -> Any:
        """Of the seconds of a pass, the share that rests on operators without a law of their own; 1 for datasheet bounds."""
        if not self.calibration:
            return 1.0
        from kvcalc.timing.steps import pass_time

        return pass_time(self.operators(batch), self.gpu, self.calibration, self.routing).uncalibrated_share

    def p90_error(self, batch: Batch) -> float | None:
        """Return the error of such a pass on measured servers, as `step_error` knows it; None where none is known.

        No error is known of a pass that rests partly on bounds, or waits for weights in the host's memory.
        """
        if not self.calibration or self.host_weights or self.uncalibrated_share(batch) > MAX_UNMEASURED:
            return None
        from kvcalc.timing.steps import step_error

        return step_error(self.operators(batch), self.gpu, self.calibration)

    def fallback(self, *batches: Batch) -> str | None:
        """What products of these passes are computed in where the GPU has no unit for their dtype; None where it has all."""
        first: dict[str, Operator] = {}
        for operator in (operator for batch in batches for operator in self.operators(batch)):
            first.setdefault(operator.dtype, operator)
        return fallbacks(roofline([*first.values()], self.gpu, True), self.gpu) or None

    def cache_size(self, context: int, batch_size: int = 1, block_size: int = 16) -> CacheSize:
        """The cache on the GPU that holds the most weights and cache."""
        return cache_size(self.model, context, batch_size, self.precision, block_size, self.parallelism)

    @property
    def weight_bytes(self) -> int:
        """Weights on the fullest GPU."""
        return weight_bytes(self.model, self.precision, self.parallelism)

    def cost(self, batch: Batch) -> Cost:
        """FLOPs and bytes of a pass on one GPU of each stage."""
        return total(self.operators(batch))


def _layer_weights(operators: Sequence[Operator]) -> Any:
    """Return the bytes of weights that operators in layers read."""
    return sum(operator.total.weight_bytes for operator in operators if operator.layer)
