"""What becomes of validated rows: errors by group, remarks on what could not be used, and a CSV with both predictions.

Rows may come in any number of tables, of which none is kept.
"""

import csv
import io
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvcalc.errors import UserError, printable
from kvcalc.timing.law import Array
from kvcalc.timing.rows import SERVING, Broken, ServedTimes, Table, header_of
from kvcalc.timing.validation import Cell, Validation

KEYS = ("op", "gpu", "framework", "dtype", "model", "client")
DEFAULT_KEYS = KEYS[:4]
NAMED = 5  # lines in a remark
OURS = ("roofline_us", "calibrated_us")
OF_SERVERS = ("calibrated_ttft_us", "calibrated_tokens_per_s")  # beside them, where a file holds rows of servers


class _Remarks(NamedTuple):
    """Of one file: how many rows are broken and what of the first, and the lines of unknown GPUs."""

    broken: list[Broken]
    unknown: dict[Cell, list[int]]
    counts: dict[Any, int]


class Tally:
    """Errors of rows by group. Raises UserError on a key that is none."""

    def __init__(self, by: Sequence[str] = DEFAULT_KEYS) -> None:
        unknown = [key for key in by if key not in KEYS]
        if unknown:
            raise UserError(f"cannot group by {unknown[0]!r}", hint=f"Known: {', '.join(KEYS)}")
        self._by = tuple(by)
        self._groups: dict[tuple[str, ...], tuple[array[float], ...]] = {}  # measured, bound, calibrated
        # of servers: microseconds to the first token and tokens per second, each measured and simulated
        self._servers: dict[tuple[str, ...], tuple[array[float], ...]] = {}
        self._files: dict[str, _Remarks] = {}

    def adding(self, validations: Iterable[Validation]) -> Iterator[Validation]:
        """The same validations, each counted as it passes."""
        for validation in validations:
            self._add(validation)
            yield validation

    def _add(self, v: Validation) -> None:
        rows = zip(v.table.rows, v.gpus, v.bound.tolist(), v.calibrated.tolist(), strict=True)
        for at, (row, gpu, bound, timed) in enumerate(rows):
            values = {"op": row.op, "gpu": gpu or row.gpu, "framework": row.framework, "dtype": row.dtype}
            values |= {"model": row.model, "client": row.client}
            key = tuple(values[name] for name in self._by)
            columns = self._groups.get(key)
            if columns is None:
                columns = self._groups[key] = array("d"), array("d"), array("d")
            for column, value in zip(columns, (row.time_us, bound, timed), strict=True):
                column.append(value)
            if row.op in SERVING:
                times = v.served.get(at, ServedTimes())
                pairs = self._servers.setdefault(key, (array("d"), array("d"), array("d"), array("d")))
                figures = (row.ttft_us, times.ttft_us, row.tokens_per_s, times.tokens_per_s)
                for column, value in zip(pairs, figures, strict=True):
                    column.append(value)
        said = self._files.setdefault(v.table.path, _Remarks([], {}, {"rows": 0, "broken": 0}))
        said.counts["rows"] += len(v.table.rows)
        said.counts["broken"] += len(v.table.broken)
        said.broken.extend(v.table.broken[: NAMED - len(said.broken)])
        for cell, lines in v.unknown.items():
            said.counts[cell] = said.counts.get(cell, 0) + len(lines)
            named = said.unknown.setdefault(cell, [])
            named.extend(lines[: NAMED - len(named)])

    @property
    def empty(self) -> list[str]:
        """Files of which no row could be read."""
        return [path for path, said in self._files.items() if not said.counts["rows"]]

    @property
    def remarks(self) -> list[str]:
        """What could not be used, by file: broken rows and unknown GPUs, counted, the first of them by line."""
        found = []
        for path, said in self._files.items():
            if count := said.counts["broken"]:
                named = "; ".join(f"line {b.line}: {b.why}" for b in said.broken)
                more = f"; and {count - NAMED:,} more" if count > NAMED else ""
                found.append(f"{path}: {count:,} row{'s' if count > 1 else ''} cannot be read ({named}{more})")
            for cell, lines in said.unknown.items():
                name, _, op, _ = cell
                about = f"{said.counts[cell]:,} rows of {op} (lines {', '.join(map(str, lines))} …)"
                found.append(f"{path}: unknown GPU {printable(name, 60)!r}: {about}")
        return found

    def records(self) -> list[dict[str, Any]]:
        """Errors by group, in the order of the groups' names."""
        import numpy as np

        found = []
        for names, columns in sorted(self._groups.items()):
            measured, bound, timed = (np.frombuffer(column) for column in columns)
            calibrated = bool(np.isfinite(timed).any())
            record: dict[str, Any] = dict(zip(self._by, names, strict=True))
            record |= {"rows": len(measured), **_figures(measured, timed if calibrated else bound)}
            record["basis"] = "calibrated" if calibrated else "roofline"
            first, ours, rate, simulated = (np.frombuffer(c) for c in self._servers.get(names, (array("d"),) * 4))
            for name, real, predicted in (("roofline", measured, bound), ("ttft", first, ours), ("throughput", rate, simulated)):
                errors = _figures(real, predicted)
                record |= {f"{name}_{key}": errors[key] for key in ("median_abs_error", "p90_abs_error")}
            found.append(record)
        return found


def _figures(measured: Array, predicted: Array) -> dict[str, Any]:
    import numpy as np

    known = np.isfinite(predicted) & (predicted > 0) & np.isfinite(measured)
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


def predictions_csv(paths: Sequence[Path], validations: Iterable[Validation]) -> Iterator[str]:
    """Every row of the files as it stood, with op, roofline_us and calibrated_us beside it; empty where there is none.

    Where a file holds rows of servers also their mean time to the first token and output tokens per second.
    """
    known = dict.fromkeys(name for path in paths for name in header_of(path))
    ours = (*OURS, *(OF_SERVERS if "silicon_tpot_ms" in known else ()))
    names = [name for name in known if name not in ours]
    header = ([] if "op" in names else ["op"]) + names
    yield _lines([[*header, *ours]])
    for v in validations:
        yield _lines(_repeated(v, v.table, header, len(ours)))


def _repeated(v: Validation, table: Table, header: list[str], width: int) -> Iterator[list[str]]:
    place = {name: i for i, name in reversed(list(enumerate(table.header)))}
    order = [place.get(name, -1) for name in header]
    figures = zip(v.bound.tolist(), v.calibrated.tolist(), strict=True)
    results = {
        row.at: (row.op, *both, *v.served.get(i, ServedTimes())[1:])
        for i, (row, both) in enumerate(zip(table.rows, figures, strict=True))
    }
    stem = Path(table.path).stem if "op" not in place else ""
    for at, cells in enumerate(table.cells):
        op, *values = results.get(at, (stem, *(float("nan"),) * 4))
        line = [cells[i] if 0 <= i < len(cells) else "" for i in order]
        if "op" not in place:
            line[header.index("op")] = op
        yield [*line, *map(_written, values[:width])]


def _lines(rows: Iterable[list[str]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue()


def _written(value: float) -> str:
    return f"{value:.6g}" if 0 < value < float("inf") else ""
