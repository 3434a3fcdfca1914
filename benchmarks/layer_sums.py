"""Print the errors of sums of kernels that resemble one decode layer of a dense model. Predictions are held out.

    python benchmarks/layer_sums.py allreduce.csv decode_attention.csv gemm.csv

There are no measured rows of complete layers. So LAYERS layers are composed from rows of each GPU, stack and
format, always the same for a fixed seed. A layer has four products with similar numbers of rows (at most
MOST), an attention with a similar number of sequences, and two all-reduces of less than LONGEST µs. Measured
and predicted times are summed separately.

The script prints the errors of each GPU, stack and format, of all sums, and of the kernels in them, as
`median / 90th percentile` in percent.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from accuracy import HOPPER, scope, written

from kvcalc import load_gpu
from kvcalc.timing.calibration import stacks_of
from kvcalc.timing.fitting import calibrate, select_rows
from kvcalc.timing.rows import MeasurementFile, read_rows

LAYERS, MOST, LONGEST = 400, 512, 200.0
LEAST = 20  # minimum number of matrix products of a format
FORMATS = ("bfloat16", "fp8", "fp8_block")


class Kernel(NamedTuple):
    """A measured kernel.

    Attributes:
        size: Rows of a matrix product, sequences of an attention, or bytes of an all-reduce.
        measured: Measured microseconds.
        predicted: Held-out prediction in microseconds.
    """

    size: float
    measured: float
    predicted: float


def kernels(tables: list[MeasurementFile], name: str, stack: str) -> dict[tuple[str, str], list[Kernel]]:
    """Return the kernels in the scope of `accuracy.py`, by family and kind of data."""
    gpu = load_gpu(name)
    fits = calibrate(select_rows(tables, gpu, stack, lambda text: None), gpu, stack)
    found: dict[tuple[str, str], list[Kernel]] = {}
    for fit in (f for f in fits if f.entry):
        for row, time, predicted in zip(fit.members, fit.measured.tolist(), fit.predicted.tolist(), strict=True):
            if scope(row):
                found.setdefault((fit.family, fit.kind), []).append(Kernel(row.shape[0], time, predicted))
    return found


def near(kernels: list[Kernel], size: float, factor: float) -> list[Kernel]:
    """Return the kernels whose size is within a factor of `size`; all kernels if there are none."""
    return [k for k in kernels if size / factor <= k.size <= size * factor] or kernels


def layers(found: dict[tuple[str, str], list[Kernel]], kind: str) -> Iterator[list[Kernel]]:
    """Yield the kernels of each layer that is composed from rows of one GPU and stack."""
    products = [k for k in found.get(("gemm", kind), []) if k.size <= MOST]
    attention = found.get(("decode_attention", "bfloat16"), [])
    reduces = [k for k in found.get(("allreduce", "bytes"), []) if k.measured < LONGEST]
    if len(products) < LEAST or not attention or not reduces:
        return
    draw = np.random.default_rng(0).integers
    for _ in range(LAYERS):
        size = products[draw(len(products))].size
        alike, at = near(products, size, 2), near(attention, size, 4)
        reduce = reduces[draw(len(reduces))]
        yield [*(alike[i] for i in draw(len(alike), size=4)), at[draw(len(at))], reduce, reduce]


def main(paths: list[str]) -> None:
    tables = [read_rows(Path(path)) for path in paths]
    whole: list[tuple[float, float]] = []
    parts: list[tuple[float, float]] = []
    for name in HOPPER:
        for stack in (s for s in stacks_of(load_gpu(name)) if s != "nccl"):
            found = kernels(tables, name, stack)
            for kind in FORMATS:
                each = list(layers(found, kind))
                sums = [(sum(k.measured for k in layer), sum(k.predicted for k in layer)) for layer in each]
                if sums:
                    print(f"{name} {stack} {kind}: {written(sums)}")
                whole += sums
                parts += [(k.measured, k.predicted) for layer in each for k in layer]
    print(f"layers {written(whole)}, their kernels {written(parts)}")


if __name__ == "__main__":
    main(sys.argv[1:])
