"""How long passes of one model take on one replica: the one place that serving asks."""

from typing import Any

import msgspec

from kvcalc.batch import ONE_GPU, PUBLISHED, Batch, Parallelism, Precision
from kvcalc.cost import Cost, Operator
from kvcalc.forward import forward, total
from kvcalc.gpu import Gpu
from kvcalc.model import Model
from kvcalc.roofline import roofline, total_seconds
from kvcalc.timing.calibration import Calibration
from kvcalc.timing.steps import error_bar, pass_seconds


class Clock(msgspec.Struct, frozen=True):
    """Times passes of `model` on a replica of `gpu`s: the sum of the pipeline's stages, each its operators one by one.

    With a calibration the time is what its laws predict, glue included, else the datasheet bound of each operator.
    """

    model: Model
    gpu: Gpu
    precision: Precision = PUBLISHED
    parallelism: Parallelism = ONE_GPU
    mla_form: str = "auto"
    all_positions: bool = False
    calibration: Calibration | None = None

    @property
    def basis(self) -> str:
        """What the times rest on."""
        return f"{self.calibration.stack} calibration" if self.calibration else "datasheet"

    def p90_error(self, batch: Batch) -> float | None:
        """The widest held-out error of the laws that time a pass; None for datasheet bounds."""
        return error_bar(self.operators(batch), self.calibration) if self.calibration else None

    def operators(self, batch: Batch, all_positions: bool | None = None) -> list[Operator]:
        """The operators of a pass, of all stages."""
        positions = self.all_positions if all_positions is None else all_positions
        stages = range(self.parallelism.pp) if self.parallelism.pp > 1 else (None,)
        passes = [forward(self.model, batch, self.precision, self.parallelism, self.mla_form, positions, s) for s in stages]
        return [operator for stage in passes for operator in stage]

    def seconds(self, batch: Batch, all_positions: bool | None = None) -> Any:
        """Seconds of a pass over `batch`; an array where the batch holds arrays."""
        operators = self.operators(batch, all_positions)
        if self.calibration:
            return pass_seconds(operators, self.gpu, self.calibration)
        return total_seconds(roofline(operators, self.gpu))

    def cost(self, batch: Batch) -> Cost:
        """FLOPs and bytes of a pass on one GPU of each stage."""
        return total(self.operators(batch))
