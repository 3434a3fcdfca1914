"""Fitting a calibration to measured rows: laws per family and kind of data, with errors on rows held out.

Held-out errors come from FOLDS fits, each of which leaves out the rows that a hash of their shape puts into its fold, so
that every row is predicted once by a fit that never saw it. The law that is kept is fitted on all rows.
"""

import datetime
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.timing.calibration import Calibration, Entry, gpu_named
from kvcalc.timing.experts import NOTES
from kvcalc.timing.families import FAMILIES, AnyLaw, Candidates, Family
from kvcalc.timing.figures import Figures, figures_of
from kvcalc.timing.fitting import STARTS, fit
from kvcalc.timing.law import Array, Law
from kvcalc.timing.rows import SERVING, MeasuredRow, Table
from kvcalc.timing.serving import steps_validated

FOLDS, FOLD_STARTS = 4, 2
LEAST_ROWS = 12  # of a family and kind: fewer make no fit
LEAST_BESIDE, OWN_ROWS = 5, 20  # of a kernel beside the usual one: what makes a fit, and one that is not held to the usual law


class FittedLaw(NamedTuple):
    """What became of one family and kind: its entry (None: too few rows, or no law), and each row predicted held out."""

    family: str
    kind: str
    rows: int
    entry: Entry | None
    measured: Array
    predicted: Array
    why: str = ""
    members: Sequence[MeasuredRow] = ()


def calibrate(
    rows: Sequence[MeasuredRow], gpu: Gpu, stack: str, progress: Callable[[str], None] = lambda text: None
) -> list[FittedLaw]:
    """Fits of every family and kind among `rows`, all of one GPU and stack. Raises UserError where the GPU lacks figures."""
    figures = figures_of(gpu)
    cells: dict[tuple[str, str], list[MeasuredRow]] = {}
    for row in rows:
        family = FAMILIES.get(row.op)
        if row.op not in SERVING and not row.odd:
            cells.setdefault((row.op, family.kind(row.dtype, row.kernel) if family else row.dtype), []).append(row)
    found: dict[tuple[str, str], FittedLaw] = {}
    for (op, kind), members in sorted(cells.items()):
        progress(f"{op} {kind}: {len(members)} rows")
        usual = found.get((op, kind.rpartition("/")[0]))
        found[op, kind] = _fit(op, kind, members, figures, stack, gpu, usual.entry if usual else None)
    return list(found.values())


def _fit(
    op: str, kind: str, rows: list[MeasuredRow], figures: Figures, stack: str, gpu: Gpu, usual: Entry | None = None
) -> FittedLaw:
    """usual: what the stack takes for such data as a rule, where these rows are of a kernel beside it."""
    import numpy as np

    family = FAMILIES.get(op)
    laws = family.laws(kind, stack, gpu) if family else ()
    measured = np.array([row.time_us for row in rows])
    if family is None or not laws:
        return FittedLaw(op, kind, len(rows), None, measured, measured * np.nan, "no law for it")
    like = usual.law if usual and len(rows) < OWN_ROWS else None
    least = LEAST_BESIDE if like else LEAST_ROWS
    if len(rows) < least:
        return FittedLaw(op, kind, len(rows), None, measured, measured * np.nan, f"fewer than {least} rows")
    shape = tuple(np.array(column) for column in zip(*(row.shape for row in rows), strict=True))
    predicted = _held_out(laws, family, figures, shape, measured, rows, like)
    best = _best(laws, family, figures, shape, measured, STARTS, like)
    held, fitted = errors(predicted, measured), errors(best.us(figures, *shape), measured)
    entry = Entry(
        law=cast("AnyLaw", best), rows=len(rows), median_abs_error=held[0], p90_abs_error=held[1],
        fitted_median_abs_error=fitted[0], fitted_p90_abs_error=fitted[1], note=NOTES.get((stack, kind), ""),
    )  # fmt: skip
    return FittedLaw(op, kind, len(rows), entry, measured, predicted, members=rows)


def _best(
    laws: Candidates,
    family: Family,
    figures: Figures,
    shape: tuple[Array, ...],
    measured: Array,
    starts: int,
    like: Law | None = None,
) -> Law:
    """Of the laws that these rows could follow, fitted, the one that comes nearest."""
    weight = family.weight(*shape) if family.weight else None
    if like is not None:
        return fit(type(like), figures, shape, measured, weight, starts, like, **laws[0][1]).law
    ends = [fit(law, figures, shape, measured, weight, starts, **fixed) for law, fixed in laws]
    return min(ends, key=lambda end: end.loss).law


def _held_out(
    laws: Candidates,
    family: Family,
    figures: Figures,
    shape: tuple[Array, ...],
    measured: Array,
    rows: list[MeasuredRow],
    like: Law | None,
) -> Array:
    import numpy as np

    folds = np.array([_fold(row) for row in rows])
    predicted = np.empty_like(measured)
    for held in range(FOLDS):
        out = folds == held
        if not out.any() or out.all():
            out = np.arange(len(rows)) % FOLDS == held
        kept, left = tuple(a[~out] for a in shape), tuple(a[out] for a in shape)
        predicted[out] = _best(laws, family, figures, kept, measured[~out], FOLD_STARTS, like).us(figures, *left)
    return predicted


def _fold(row: MeasuredRow) -> int:
    return int(hashlib.sha256(f"{row.op}|{row.dtype}|{row.shape}".encode()).hexdigest()[:8], 16) % FOLDS


def errors(predicted: Array, measured: Array) -> tuple[float, float]:
    """Median and 90th percentile of exp(|ln(predicted/measured)|) − 1, to four digits."""
    import numpy as np

    found = np.exp(np.abs(np.log(predicted / measured))) - 1
    return round(float(np.median(found)), 4), round(float(np.quantile(found, 0.9)), 4)


def chosen_rows(tables: Sequence[Table], gpu: Gpu, stack: str, note: Callable[[str], None]) -> list[MeasuredRow]:
    """The rows of `gpu` and `stack` among the tables; what is left out is noted. Rows that name no GPU or framework count.

    All-reduces depend on the links alone, so those of GPUs with the same links count too.

    Where no row names the stack but all name one framework, that framework's rows are meant. Raises UserError where the
    framework is in doubt, or no row is left.
    """
    rows = [row for table in tables for row in table.rows]
    for table in tables:
        if table.broken:
            named = "; ".join(f"line {b.line}: {b.why}" for b in table.broken[:3])
            note(f"{table.path}: {len(table.broken):,} rows cannot be read ({named}{' …' if len(table.broken) > 3 else ''})")
    meant = {name: _named(name) if name else gpu for name in {row.gpu for row in rows}}
    same = {name: found is not None and found.name == gpu.name for name, found in meant.items()}
    linked = {name for name, found in meant.items() if not same[name] and found and _same_links(found, gpu)}
    here = [row for row in rows if same[row.gpu] or (row.op == "allreduce" and row.gpu in linked)]
    if any(not same[row.gpu] for row in here):
        note(f"all-reduces of {', '.join(sorted(linked))} count too: the links are the same")
    others = len(rows) - len(here)
    if others:
        note(f"{others:,} rows of other GPUs are left out: {', '.join(sorted(n for n, is_it in same.items() if not is_it))}")
    frameworks = {row.framework for row in here} - {""}
    wanted = stack if stack in frameworks or len(frameworks) != 1 else next(iter(frameworks))
    if frameworks and wanted not in frameworks:
        hint = f"Name one of them: {', '.join(sorted(frameworks))}"
        raise UserError(f"the rows are of several frameworks, none of them {stack!r}", hint=hint)
    used = [row for row in here if row.framework in ("", wanted)]
    if not used:
        raise UserError(f"no row of {gpu.name} can be used", ", ".join(table.path for table in tables))
    if len(used) < len(here):
        note(f"{len(here) - len(used):,} rows of other frameworks are left out")
    return used


def _named(name: str) -> Gpu | None:
    try:
        return gpu_named(name)
    except UserError:
        return None


def _same_links(a: Gpu, b: Gpu) -> bool:
    return bool(a.link_bytes_per_s) and (a.link_bytes_per_s, a.link_domain) == (b.link_bytes_per_s, b.link_domain)


def summed(fits: Sequence[FittedLaw], gpu: Gpu, stack: str, rows: Sequence[MeasuredRow], about: dict[str, str]) -> Calibration:
    """The calibration that the fits make, and its errors on whole steps where rows of measured servers are among `rows`."""
    laws: dict[str, dict[str, Entry]] = {}
    for found in fits:
        if found.entry:
            laws.setdefault(found.family, {})[found.kind] = found.entry
    used = sum(found.rows for found in fits if found.entry)
    date = about.get("date") or datetime.date.today().isoformat()
    texts = {key: about.get(key, "") for key in ("origin", "commit", "license")}
    made = Calibration(**texts, date=date, gpu=gpu.name, stack=stack, version=_versions(rows), laws=laws, rows=used)  # type: ignore[arg-type]
    return msgspec.structs.replace(made, validation=steps_validated(made, gpu, rows))


def _versions(rows: Sequence[MeasuredRow]) -> str:
    return ", ".join(sorted({row.version for row in rows if row.op not in SERVING} - {""}))[:200]


def fit_records(fits: Sequence[FittedLaw]) -> list[dict[str, Any]]:
    """One flat record a family and kind, its parameters nested."""
    return [_record(found) for found in fits]


def _record(found: FittedLaw) -> dict[str, Any]:
    entry = found.entry
    names = ("median_abs_error", "p90_abs_error", "fitted_median_abs_error", "fitted_p90_abs_error")
    return {
        "family": found.family,
        "kind": found.kind,
        "form": str(entry.law.__struct_config__.tag) if entry else None,
        "rows": found.rows,
        **{name: getattr(entry, name) if entry else None for name in names},
        "parameters": {name: getattr(entry.law, name) for name in entry.law.ranges()} if entry else {},
        "why": found.why,
    }
