"""The model against measured rows: the datasheet bound and the calibrated time of every row, and their errors by group.

The error of a row is exp(|ln(predicted/measured)|) − 1: twice too fast and twice too slow are both 100 %. Rows that no law
times count in their group as rows and not as predicted rows; rows that cannot be read, and GPUs that are unknown, are
counted and named by line. Nothing is dropped silently.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvcalc.errors import UserError, nearest, printable
from kvcalc.gpu.roof import least_time
from kvcalc.gpu.spec import Gpu
from kvcalc.timing.calibration import DATASHEET, Calibration, all_stacks, find_calibration, gpu_named, stacks_of
from kvcalc.timing.costs import cost_of
from kvcalc.timing.families import FAMILIES
from kvcalc.timing.figures import Figures, figures_of
from kvcalc.timing.law import Array
from kvcalc.timing.rows import SERVING, MeasuredRow, Table, read_rows

KEYS = ("op", "gpu", "framework", "dtype")


class Validation(NamedTuple):
    """A file with both predictions for each row, NaN where there is none; remarks name what could not be used.

    gpus: the preset that each row's GPU stands for, '' where it is unknown.
    """

    table: Table
    bound: Array
    calibrated: Array
    gpus: list[str]
    remarks: list[str]


def validate(paths: Sequence[Path], stack: str = "", source: Gpu | None = None) -> list[Validation]:
    """Each file against the laws. stack: instead of each row's framework; source: whose calibration all GPUs take.

    Raises UserError where a file cannot be read as measured rows at all.
    """
    if not paths:
        raise UserError("no file of measured rows is named")
    if stack and stack not in (known := [*all_stacks(), DATASHEET]):
        raise UserError(f"no GPU has a calibration for stack {stack!r}", hint=nearest(stack, known))
    if source and not stacks_of(source):
        raise UserError(f"{source.name} has no calibration to take", hint="`kvcalc calibrate` makes one from measured rows")
    return [_validated(read_rows(path), stack, source) for path in paths]


def _validated(table: Table, stack: str, source: Gpu | None) -> Validation:
    import numpy as np

    count = len(table.rows)
    bound, calibrated = np.full(count, np.nan), np.full(count, np.nan)
    cells: dict[tuple[str, str, str, str], list[int]] = {}
    for i, row in enumerate(table.rows):
        cells.setdefault((row.gpu, stack or row.framework, row.op, _kind(row)), []).append(i)
    names: dict[str, Gpu | None] = {gpu: _gpu(gpu) for gpu in {row.gpu for row in table.rows}}
    remarks = _broken_remarks(table)
    for (name, framework, op, kind), members in cells.items():
        gpu = names[name]
        if gpu is None:
            lines = ", ".join(str(table.lines[table.rows[i].at]) for i in members[:5])
            remarks.append(f"{table.path}: unknown GPU {printable(name, 60)!r}: {len(members)} rows of {op} (lines {lines} …)")
            continue
        _predict(table.rows, members, gpu, framework, op, kind, source, bound, calibrated)
    known = {name: gpu.name if gpu else "" for name, gpu in names.items()}
    return Validation(table, bound, calibrated, [known[row.gpu] for row in table.rows], remarks)


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

    if op in SERVING:
        from kvcalc.timing.serving import tpot_us

        calibration = None if stack == DATASHEET else find_calibration(source or gpu, stack)
        for i in members:
            bound[i], timed[i] = tpot_us(rows[i], gpu, calibration)
        return
    shape = tuple(np.array(column) for column in zip(*(rows[i].shape for i in members), strict=True))
    least = cost_of(op, kind, shape)
    with suppress(UserError):  # a GPU without a peak for these products has no bound
        if least is not None:
            bound[members] = least_time(*least, gpu).seconds * 1e6
    law = _law(gpu, stack, op, kind, source)
    figures = _machine(gpu) if law is not None else None
    if figures is not None:
        timed[members] = distinct(law, figures, shape)  # warm, as rows are measured: a cache in the L2 beats the bound


def distinct(law: Any, figures: Figures, shape: tuple[Array, ...]) -> Array:
    """A law over shapes of which many may be equal: each distinct one is evaluated once."""
    import numpy as np

    table = np.stack(shape, axis=1)
    each, back = np.unique(table, axis=0, return_inverse=True)
    found: Array = law.us(figures, *each.T)[back.reshape(-1)]
    return found


def _kind(row: MeasuredRow) -> str:
    family = FAMILIES.get(row.op)
    return family.kind(row.dtype, row.kernel) if family else row.dtype


def _law(gpu: Gpu, stack: str, op: str, kind: str, source: Gpu | None) -> Any:
    calibration: Calibration | None = None if stack == DATASHEET else find_calibration(source or gpu, stack)
    return calibration.law(op, kind) if calibration else None


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


def _broken_remarks(table: Table) -> list[str]:
    if not table.broken:
        return []
    named = "; ".join(f"line {b.line}: {b.why}" for b in table.broken[:5])
    more = f"; and {len(table.broken) - 5:,} more" if len(table.broken) > 5 else ""
    return [f"{table.path}: {len(table.broken):,} rows cannot be read ({named}{more})"]


def groups(validations: Iterable[Validation], by: Sequence[str] = KEYS) -> list[dict[str, Any]]:
    """Errors by group, in the order of the groups' names. Raises UserError on a key that is none."""
    import numpy as np

    unknown = [key for key in by if key not in KEYS]
    if unknown:
        raise UserError(f"cannot group by {unknown[0]!r}", hint=f"Known: {', '.join(KEYS)}")
    measured: dict[tuple[str, ...], list[tuple[float, float, float]]] = {}
    for v in validations:
        for row, gpu, bound, timed in zip(v.table.rows, v.gpus, v.bound.tolist(), v.calibrated.tolist(), strict=True):
            values = {"op": row.op, "gpu": gpu or row.gpu, "framework": row.framework, "dtype": row.dtype}
            measured.setdefault(tuple(values[key] for key in by), []).append((row.time_us, bound, timed))
    found = []
    for names, rows in sorted(measured.items()):
        table = np.array(rows)
        calibrated = bool(np.isfinite(table[:, 2]).any())
        record: dict[str, Any] = dict(zip(by, names, strict=True))
        record |= {"rows": len(rows), **_figures(table[:, 0], table[:, 2 if calibrated else 1])}
        record["basis"] = "calibrated" if calibrated else "roofline"
        roof = _figures(table[:, 0], table[:, 1])
        record |= {f"roofline_{key}": roof[key] for key in ("median_abs_error", "p90_abs_error")}
        found.append(record)
    return found


def _figures(measured: Array, predicted: Array) -> dict[str, Any]:
    import numpy as np

    known = np.isfinite(predicted) & (predicted > 0)
    if not known.any():
        return {"predicted_rows": 0, "median_abs_error": None, "p90_abs_error": None, "median_ratio": None}
    ratio = predicted[known] / measured[known]
    error = np.exp(np.abs(np.log(ratio))) - 1
    return {
        "predicted_rows": int(known.sum()),
        "median_abs_error": float(np.median(error)),
        "p90_abs_error": float(np.quantile(error, 0.9)),
        "median_ratio": float(np.median(ratio)),
    }


def predictions_csv(validations: Sequence[Validation]) -> str:
    """Every input row as it stood, with op, roofline_us and calibrated_us beside it; empty where there is none."""
    import csv
    import io

    ours = ("roofline_us", "calibrated_us")
    names = dict.fromkeys(name for v in validations for name in v.table.header if name not in ours)
    header = ([] if "op" in names else ["op"]) + [*names]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([*header, *ours])
    for v in validations:
        place = {name: i for i, name in reversed(list(enumerate(v.table.header)))}
        order = [place.get(name, -1) for name in header]
        figures = zip(v.bound.tolist(), v.calibrated.tolist(), strict=True)
        results = {row.at: (row.op, *both) for row, both in zip(v.table.rows, figures, strict=True)}
        stem = Path(v.table.path).stem if "op" not in place else ""
        for at, cells in enumerate(v.table.cells):
            op, bound, timed = results.get(at, (stem, float("nan"), float("nan")))
            line = [cells[i] if 0 <= i < len(cells) else "" for i in order]
            if "op" not in place:
                line[header.index("op")] = op
            writer.writerow([*line, _written(bound), _written(timed)])
    return out.getvalue()


def _written(value: float) -> str:
    return f"{value:.6g}" if 0 < value < float("inf") else ""
