"""Fitting a calibration to measured rows: laws per family and kind of data, with errors on rows held out.

Held-out errors come from FOLDS fits, each of which leaves out the rows that a hash of their shape puts into its fold, so
that every row is predicted once by a fit that never saw it. The law that is kept is fitted on all rows.
"""

import datetime
import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from kvcalc.gpu.spec import Gpu
from kvcalc.timing.applied import mla_kernels_us
from kvcalc.timing.calibration import Calibration, Entry, Refused, Validated
from kvcalc.timing.experts import NOTES
from kvcalc.timing.families import FAMILIES, AnyLaw, Candidates, Family
from kvcalc.timing.figures import Figures, figures_of
from kvcalc.timing.fitting import STARTS, fit
from kvcalc.timing.law import Array, Law
from kvcalc.timing.refusals import cause, known_reason
from kvcalc.timing.rows import SERVING, MeasuredRow

FOLDS, FOLD_STARTS = 4, 2
Validator = Callable[[Calibration, Gpu, Sequence[MeasuredRow]], dict[Any, Validated]]
LEAST_ROWS, LEAST_PULLED = 12, 8  # of a family and kind: fewer make no fit; of laws whose parameters are held to typical ones
WORST, USUAL = 1.0, 0.5  # the held-out p90 beyond which the bound says more than a law, of rows with at least that weight
LEAST_BESIDE, OWN_ROWS = 5, 20  # of a kernel beside the usual one: what makes a fit, and one that is not held to the usual law


class FittedLaw(NamedTuple):
    """What became of one family and kind: its entry (None: too few rows, or no law), and each row predicted held out.

    refused: where a law was fitted and does not do; why says it in words.
    """

    family: str
    kind: str
    rows: int
    entry: Entry | None
    measured: Array
    predicted: Array
    why: str = ""
    members: Sequence[MeasuredRow] = ()
    refused: Refused | None = None


def calibrate(
    rows: Sequence[MeasuredRow], gpu: Gpu, stack: str, progress: Callable[[str], None] = lambda text: None
) -> list[FittedLaw]:
    """Fits of every family and kind among `rows`, all of one GPU and stack. Raises UserError where the GPU lacks figures."""
    import numpy as np

    figures = figures_of(gpu)
    cells: dict[tuple[str, str], list[MeasuredRow]] = {}
    for row in rows:
        family = FAMILIES.get(row.op)
        if row.op not in (*SERVING, "layer") and not row.odd:
            cells.setdefault((row.op, family.kind(row.dtype, row.kernel) if family else row.dtype), []).append(row)
    found: dict[tuple[str, str], FittedLaw] = {}
    for (op, kind), members in sorted(cells.items()):
        progress(f"{op} {kind}: {len(members)} rows")
        if op == "mla_decode_module":  # its kernels' families come before it
            kernels = _kernels_us(kind, members, figures, gpu, stack, list(found.values()))
            if kernels is None:
                times = np.array([row.time_us for row in members])
                found[op, kind] = FittedLaw(op, kind, len(members), None, times, times * np.nan, "no law of its kernels")
                continue
            members = [row._replace(shape=(*row.shape, us)) for row, us in zip(members, kernels, strict=True)]
        usual = found.get((op, kind.rpartition("/")[0]))
        found[op, kind] = _fit(op, kind, members, figures, stack, gpu, usual.entry if usual else None)
    return list(found.values())


def _kernels_us(
    kind: str, rows: list[MeasuredRow], figures: Figures, gpu: Gpu, stack: str, fits: Sequence[FittedLaw]
) -> list[float] | None:
    """Return the microseconds of the kernels in measured MLA modules; None if the kernels have no law."""
    import numpy as np

    laws: dict[str, dict[str, Entry]] = {}
    refused: dict[str, dict[str, Refused]] = {}
    _collect(fits, laws, refused)
    shape = [np.array(column) for column in zip(*(row.shape for row in rows), strict=True)]
    kernels = mla_kernels_us(kind, shape, figures, Calibration(gpu=gpu.name, stack=stack, laws=laws, refused=refused))
    return None if kernels is None else kernels.tolist()


def _collect(fits: Sequence[FittedLaw], laws: dict[str, dict[str, Entry]], refused: dict[str, dict[str, Refused]]) -> None:
    """Add entries and refusals by family and kind."""
    for found in fits:
        if found.entry:
            laws.setdefault(found.family, {})[found.kind] = found.entry
        if found.refused:
            refused.setdefault(found.family, {})[found.kind] = found.refused


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
    pulled = bool(laws) and all(law.PULL for law, _ in laws)
    least = LEAST_BESIDE if like else LEAST_PULLED if pulled else LEAST_ROWS
    if len(rows) < least:
        return FittedLaw(op, kind, len(rows), None, measured, measured * np.nan, f"fewer than {least} rows")
    shape = tuple(np.array(column) for column in zip(*(row.shape for row in rows), strict=True))
    predicted = _held_out(laws, family, figures, shape, measured, rows, like)
    best = _best(laws, family, figures, shape, measured, STARTS, like)
    held, fitted = errors(predicted, measured), errors(best.us(figures, *shape), measured)
    judged = predicted if len(rows) >= LEAST_ROWS else best.us(figures, *shape)  # fewer rows say too little when held out
    reason = known_reason(gpu.name, stack, op) or _too_far(family, shape, judged, measured)
    if reason:
        reason = "; ".join(part for part in (reason, cause(gpu.name, op)) if part)
        refused = Refused(rows=len(rows), median_abs_error=held[0], p90_abs_error=held[1], why=reason)
        return FittedLaw(op, kind, len(rows), None, measured, predicted, reason, rows, refused)
    entry = Entry(
        law=cast("AnyLaw", best), rows=len(rows), median_abs_error=held[0], p90_abs_error=held[1],
        fitted_median_abs_error=fitted[0], fitted_p90_abs_error=fitted[1], note=NOTES.get((stack, kind), ""),
    )  # fmt: skip
    return FittedLaw(op, kind, len(rows), entry, measured, predicted, members=rows)


def _too_far(family: Family, shape: tuple[Array, ...], predicted: Array, measured: Array) -> str:
    """Why a law does not do: more than a tenth of its usual rows, held out, are missed by more than WORST; '' where it does."""
    import numpy as np

    usual = family.weight(*shape) >= USUAL if family.weight else np.ones(len(measured), bool)
    if not usual.any():
        usual = ~usual
    p90 = errors(predicted[usual], measured[usual])[1]
    return f"a tenth of its usual rows are missed by {p90:.0%} or more" if p90 > WORST else ""


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


def summed(
    fits: Sequence[FittedLaw], gpu: Gpu, stack: str, rows: Sequence[MeasuredRow], about: dict[str, str],
    validated: Validator | None = None,
) -> Calibration:  # fmt: skip
    """The calibration that the fits make; `validated` says its errors on measured servers, where any are among `rows`."""
    laws: dict[str, dict[str, Entry]] = {}
    refused: dict[str, dict[str, Refused]] = {}
    _collect(fits, laws, refused)
    used = sum(found.rows for found in fits if found.entry)
    date = about.get("date") or datetime.date.today().isoformat()
    texts = {key: about.get(key, "") for key in ("origin", "commit", "license")}
    named = {"date": date, "gpu": gpu.name, "stack": stack, "version": _versions(rows)}
    made = Calibration(**texts, **named, laws=laws, refused=refused, rows=used)  # type: ignore[arg-type]
    return msgspec.structs.replace(made, validation=validated(made, gpu, rows)) if validated else made


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
