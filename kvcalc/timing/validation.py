"""The model against measured rows: the datasheet bound and the calibrated time of every row, and their errors by group.

The error of a row is exp(|ln(predicted/measured)|) − 1: twice too fast and twice too slow are both 100 %. Rows that no law
times count in their group as rows and not as predicted rows; rows that cannot be read, and GPUs that are unknown, are
counted and named by line. Nothing is dropped silently.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvcalc.errors import UserError, nearest
from kvcalc.gpu.roof import least_time
from kvcalc.gpu.spec import Gpu
from kvcalc.library.engine_choice import DATASHEET
from kvcalc.timing.applied import mla_kernels_us
from kvcalc.timing.calibration import Calibration, all_stacks, find_calibration, gpu_named, stacks_of
from kvcalc.timing.costs import cost_of
from kvcalc.timing.families import FAMILIES
from kvcalc.timing.figures import Figures, figures_of
from kvcalc.timing.law import Array
from kvcalc.timing.layers import layer_us
from kvcalc.timing.mla_module import MlaModule
from kvcalc.timing.rows import SERVING, MeasuredRow, ServedTimes, Table, read_blocks, read_rows
from kvcalc.timing.serving import bound_us

Served = Callable[[Sequence[MeasuredRow], Gpu, Calibration | None], list[ServedTimes]]
Cell = tuple[str, str, str, str]  # GPU, framework, operation and kind of data


class Validation(NamedTuple):
    """Rows with both predictions for each, NaN where there is none.

    gpus: the preset that each row's GPU stands for, '' where it is unknown. unknown: by (GPU, framework, operation, kind) the
    lines of the rows whose GPU is. served: of each serving row that was simulated, by its place, all its figures.
    """

    table: Table
    bound: Array
    calibrated: Array
    gpus: list[str]
    unknown: dict[Cell, list[int]]
    served: dict[int, ServedTimes]


def validate(paths: Sequence[Path], stack: str = "", source: Gpu | None = None, served: Served | None = None) -> list[Validation]:
    """Each file against the laws. stack: instead of each row's framework; source: whose calibration all GPUs take.

    served: what simulates servers; without it their rows have bounds alone.

    Raises UserError where a file cannot be read as measured rows at all.
    """
    _check(paths, stack, source)
    return [_validated(read_rows(path), stack, source, served) for path in paths]


def validated_blocks(
    paths: Sequence[Path], stack: str = "", source: Gpu | None = None, served: Served | None = None
) -> Iterator[Validation]:
    """The same for files of any length: some rows at a time, in their order."""
    _check(paths, stack, source)
    for path in paths:
        for table in read_blocks(path):
            yield _validated(table, stack, source, served)


def _check(paths: Sequence[Path], stack: str, source: Gpu | None) -> None:
    if not paths:
        raise UserError("no file of measured rows is named")
    if stack and stack not in (known := [*all_stacks(), DATASHEET]):
        raise UserError(f"no GPU has a calibration for stack {stack!r}", hint=nearest(stack, known))
    if source and not stacks_of(source):
        raise UserError(f"{source.name} has no calibration to take", hint="`kvcalc calibrate` makes one from measured rows")


def _validated(table: Table, stack: str, source: Gpu | None, served: Served | None) -> Validation:
    import numpy as np

    count, times = len(table.rows), dict[int, ServedTimes]()
    bound, calibrated = np.full(count, np.nan), np.full(count, np.nan)
    cells: dict[Cell, list[int]] = {}
    for i, row in enumerate(table.rows):
        cells.setdefault((row.gpu, stack or row.framework, row.op, kind_of(row)), []).append(i)
    names: dict[str, Gpu | None] = {gpu: _gpu(gpu) for gpu in {row.gpu for row in table.rows}}
    unknown: dict[Cell, list[int]] = {}
    for cell, members in cells.items():
        name, framework, op, kind = cell
        gpu = names[name]
        if gpu is None:
            unknown[cell] = [table.lines[table.rows[i].at] for i in members]
            continue
        if op in SERVING:
            bound[members] = [bound_us(table.rows[i], gpu) for i in members]
            calibration = None if framework == DATASHEET else find_calibration(source or gpu, framework)
            if served and calibration:
                times |= zip(members, served([table.rows[i] for i in members], gpu, calibration), strict=True)
                calibrated[members] = [times[i].tpot_us for i in members]
            continue
        if op == "layer":
            calibration = None if framework == DATASHEET else find_calibration(source or gpu, framework)
            for i in members:
                bound[i], calibrated[i] = layer_us(table.rows[i], gpu, calibration)
            continue
        _predict(table.rows, members, gpu, framework, op, kind, source, bound, calibrated)
    known = {name: gpu.name if gpu else "" for name, gpu in names.items()}
    return Validation(table, bound, calibrated, [known[row.gpu] for row in table.rows], unknown, times)


def _predict(
    rows: list[MeasuredRow],
    members: list[int],
    gpu: Gpu,
    stack: str,
    op: str,
    kind: str,
    source: Gpu | None,
    bound: Array,
    timed: Array,
) -> None:
    import numpy as np

    shape = tuple(np.array(column) for column in zip(*(rows[i].shape for i in members), strict=True))
    least = cost_of(op, kind, shape)
    with suppress(UserError):  # a GPU without a peak for these products has no bound
        if least is not None:
            bound[members] = least_time(*least, gpu).seconds * 1e6
    calibration = None if stack == DATASHEET else find_calibration(source or gpu, stack)
    law = calibration.law(op, kind) if calibration else None
    figures = _machine(gpu) if law is not None else None
    if calibration and figures and isinstance(law, MlaModule):
        kernels = mla_kernels_us(kind, shape, figures, calibration)
        if kernels is None:
            return
        shape = (*shape, kernels)
    if figures is not None:
        timed[members] = distinct(law, figures, shape)  # warm, as rows are measured: a cache in the L2 beats the bound


def distinct(law: Any, figures: Figures, shape: tuple[Array, ...]) -> Array:
    """A law over shapes of which many may be equal: each distinct one is evaluated once."""
    import numpy as np

    table = np.stack(shape, axis=1)
    each, back = np.unique(table, axis=0, return_inverse=True)
    found: Array = law.us(figures, *each.T)[back.reshape(-1)]
    return found


def kind_of(row: MeasuredRow) -> str:
    """The kind of data by which the laws and costs of a row's operation differ."""
    family = FAMILIES.get(row.op)
    return family.kind(row.dtype, row.kernel) if family else row.dtype


def _machine(gpu: Gpu) -> Figures | None:
    try:
        return figures_of(gpu)
    except UserError:
        return None


def _gpu(name: str) -> Gpu | None:
    try:
        return gpu_named(name) if name else None
    except UserError:
        return None
