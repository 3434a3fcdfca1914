"""Errors of sums of kernels like those of one decode layer of a dense model, each kernel predicted by a fit that had not seen it.

    python benchmarks/layer_sums.py allreduce.csv decode_attention.csv gemm.csv

Rows of whole layers are not among the measured ones. So LAYERS times for each GPU, stack and format, and the same every time, a
layer is put together from rows: four products of about as many rows, at most MOST, an attention of about as many sequences, and
an all-reduce under LONGEST µs twice. Measured and predicted times are summed apart. Prints the errors of each cell, of all sums,
and of the kernels in them, median / p90 in per cent.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from accuracy import HOPPER, scope, written

from kvcalc import load_gpu
from kvcalc.timing.calibration import stacks_of
from kvcalc.timing.fitting import calibrate, chosen_rows
from kvcalc.timing.rows import MeasurementFile, read_rows

LAYERS, MOST, LONGEST = 400, 512, 200.0
LEAST = 20  # products of a format, for layers of it
FORMATS = ("bfloat16", "fp8", "fp8_block")


class Kernel(NamedTuple):
    """A measured kernel. size: rows of a product, sequences of an attention; µs measured, and predicted held out."""

    size: float
    measured: float
    predicted: float


def kernels(tables: list[MeasurementFile], name: str, stack: str) -> dict[tuple[str, str], list[Kernel]]:
    """By family and kind of data, in the scopes of `accuracy.py`."""
    gpu = load_gpu(name)
    fits = calibrate(chosen_rows(tables, gpu, stack, lambda text: None), gpu, stack)
    found: dict[tuple[str, str], list[Kernel]] = {}
    for fit in (f for f in fits if f.entry):
        for row, time, predicted in zip(fit.members, fit.measured.tolist(), fit.predicted.tolist(), strict=True):
            if scope(row):
                found.setdefault((fit.family, fit.kind), []).append(Kernel(row.shape[0], time, predicted))
    return found


def near(kernels: list[Kernel], size: float, factor: float) -> list[Kernel]:
    """Those of about a size; all where there is none."""
    return [k for k in kernels if size / factor <= k.size <= size * factor] or kernels


def layers(found: dict[tuple[str, str], list[Kernel]], kind: str) -> Iterator[list[Kernel]]:
    """The kernels of each layer that is put together from rows of one GPU and stack."""
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
