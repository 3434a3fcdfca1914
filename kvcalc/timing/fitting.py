"""Fit calibrations to measured rows: one kernel model per family and kind of data.

Errors are measured on held-out rows: FOLDS fits each leave out a fold, which a hash of the shape
selects. So each row is predicted by a fit without it. The final kernel model is fitted on all rows.

A calibration is fitted on rows of one GPU and one stack. `calibrated_stacks` fits all GPUs and
stacks of the rows on all cores. Each file depends only on its own rows, so its bytes do not depend
on the number of cores.
"""

import datetime
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple, cast

import msgspec

from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.records import Record
from kvcalc.timing.calibration import (
    Calibration,
    Entry,
    Refused,
    Validated,
    gpu_named,
    to_yaml,
)
from kvcalc.timing.kernel_models.families import FAMILIES, AnyLaw, Candidates, Family
from kvcalc.timing.kernel_models.fused_moe import NOTES
from kvcalc.timing.kernel_models.kernel_model import (
    Array,
    GpuParameters,
    KernelModel,
    figures_of,
)
from kvcalc.timing.kernel_times import mla_kernels_us
from kvcalc.timing.robust_fit import STARTS, fit
from kvcalc.timing.rows import SERVING, MeasuredRow, MeasurementFile

# Rows that are not the speed of their kernel, by (GPU, stack, family), with the reason.
KNOWN = {
    (
        "a100-80gb",
        "trtllm",
        "decode_attention",
    ): "rows of TensorRT-LLM 1.0.0 read caches far beyond the L2 at up to 170 % of "
    "the memory's bandwidth",
}


# GPUs without an own kernel for latent attention, by family.
FALLBACKS = {
    ("a100-80gb", "mla_decode"),
    ("a100-80gb", "mla_prefill"),
    ("l40s", "mla_decode"),
    ("l40s", "mla_prefill"),
    ("rtx-pro-6000-blackwell", "mla_decode"),
    ("rtx-pro-6000-blackwell", "mla_prefill"),
}
# GPUs that all-reduce over PCIe.
BUSES = ("l40s", "rtx-pro-6000-blackwell")


def cause(gpu: str, family: str) -> str:
    """Return the probable reason of a poor fit, or ''."""
    if (gpu, family) in FALLBACKS:
        return "presumably a fallback kernel: the GPU has none of its own for latent attention"
    return (
        "all-reduces cross PCIe, whose rate depends on the host"
        if family == "allreduce" and gpu in BUSES
        else ""
    )


def known_reason(gpu: str, stack: str, family: str) -> str:
    """Return the reason not to trust rows of a family, or ''."""
    return KNOWN.get((gpu, stack, family), "")


FOLDS, FOLD_STARTS = 4, 2
Validator = Callable[[Calibration, Gpu, Sequence[MeasuredRow]], dict[Any, Validated]]
# Minimum rows of a fit; minimum rows of a kernel model with a pull to typical parameters.
LEAST_ROWS, LEAST_PULLED = 12, 8
# Held-out p90 error above which a bound is better than a kernel model, and the weight of the rows
# that count.
WORST, USUAL = 1.0, 0.5
# For a stack's second kernel: minimum rows of a fit, and rows of a fit without `like`.
LEAST_BESIDE, OWN_ROWS = 5, 20


class FittedKernelModel(NamedTuple):
    """The result of one family and kind.

    Attributes:
        entry: The fitted kernel model; None if there are too few rows or no kernel model.
        measured: Microseconds [rows].
        predicted: Held-out predictions [rows].
        why: The reason why there is no entry.
        refused: Set if a kernel model was fitted and its error is too large.
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
    rows: Sequence[MeasuredRow],
    gpu: Gpu,
    stack: str,
    progress: Callable[[str], None] = lambda text: None,
) -> list[FittedKernelModel]:
    """Return a fit for each family and kind of the rows, which are of one GPU and stack.

    Raises UserError if the GPU lacks a figure that kernel models need.
    """
    import numpy as np

    figures = figures_of(gpu)
    cells: dict[tuple[str, str], list[MeasuredRow]] = {}
    for row in rows:
        family = FAMILIES.get(row.op)
        if row.op not in (*SERVING, "layer") and not row.odd:
            cells.setdefault(
                (row.op, family.kind(row.dtype, row.kernel) if family else row.dtype),
                [],
            ).append(row)
    results: dict[tuple[str, str], FittedKernelModel] = {}
    for (op, kind), members in sorted(cells.items()):
        progress(f"{op} {kind}: {len(members)} rows")
        if op == "mla_decode_module":  # its kernels' families come before it
            kernels = _kernels_us(kind, members, figures, gpu, stack, list(results.values()))
            if kernels is None:
                times = np.array([row.time_us for row in members])
                results[op, kind] = FittedKernelModel(
                    op,
                    kind,
                    len(members),
                    None,
                    times,
                    times * np.nan,
                    "no law of its kernels",
                )
                continue
            members = [
                row._replace(shape=(*row.shape, us))
                for row, us in zip(members, kernels, strict=True)
            ]
        usual = results.get((op, kind.rpartition("/")[0]))
        results[op, kind] = _fit(
            op, kind, members, figures, stack, gpu, usual.entry if usual else None
        )
    return list(results.values())


def _kernels_us(
    kind: str,
    rows: list[MeasuredRow],
    figures: GpuParameters,
    gpu: Gpu,
    stack: str,
    fits: Sequence[FittedKernelModel],
) -> list[float] | None:
    """Return the microseconds of the kernels in measured MLA modules, or None without their
    models."""
    import numpy as np

    laws: dict[str, dict[str, Entry]] = {}
    refused: dict[str, dict[str, Refused]] = {}
    _collect(fits, laws, refused)
    shape = [np.array(column) for column in zip(*(row.shape for row in rows), strict=True)]
    kernels = mla_kernels_us(
        kind,
        shape,
        figures,
        Calibration(gpu=gpu.name, stack=stack, laws=laws, refused=refused),
    )
    return None if kernels is None else kernels.tolist()


def _collect(
    fits: Sequence[FittedKernelModel],
    laws: dict[str, dict[str, Entry]],
    refused: dict[str, dict[str, Refused]],
) -> None:
    """Add entries and refusals by family and kind."""
    for result in fits:
        if result.entry:
            laws.setdefault(result.family, {})[result.kind] = result.entry
        if result.refused:
            refused.setdefault(result.family, {})[result.kind] = result.refused


def _fit(
    op: str,
    kind: str,
    rows: list[MeasuredRow],
    figures: GpuParameters,
    stack: str,
    gpu: Gpu,
    usual: Entry | None = None,
) -> FittedKernelModel:
    """Return the fit of one family and kind.

    Args:
        usual: The stack's usual kernel model for such data, if the rows are of a second kernel.
    """
    import numpy as np

    family = FAMILIES.get(op)
    laws = family.laws(kind, stack, gpu) if family else ()
    measured = np.array([row.time_us for row in rows])
    if family is None or not laws:
        return FittedKernelModel(
            op, kind, len(rows), None, measured, measured * np.nan, "no law for it"
        )
    like = usual.law if usual and len(rows) < OWN_ROWS else None
    pulled = bool(laws) and all(law.PULL for law, _ in laws)
    least = LEAST_BESIDE if like else LEAST_PULLED if pulled else LEAST_ROWS
    if len(rows) < least:
        return FittedKernelModel(
            op,
            kind,
            len(rows),
            None,
            measured,
            measured * np.nan,
            f"fewer than {least} rows",
        )
    shape = tuple(np.array(column) for column in zip(*(row.shape for row in rows), strict=True))
    predicted = _held_out(laws, family, figures, shape, measured, rows, like)
    best = _best(laws, family, figures, shape, measured, STARTS, like)
    stored, fitted = (
        errors(predicted, measured),
        errors(best.us(figures, *shape), measured),
    )
    # With fewer rows, held-out errors are not reliable.
    judged = predicted if len(rows) >= LEAST_ROWS else best.us(figures, *shape)
    reason = known_reason(gpu.name, stack, op) or _too_far(family, shape, judged, measured)
    if reason:
        reason = "; ".join(part for part in (reason, cause(gpu.name, op)) if part)
        refused = Refused(
            rows=len(rows),
            median_abs_error=stored[0],
            p90_abs_error=stored[1],
            why=reason,
        )
        return FittedKernelModel(
            op, kind, len(rows), None, measured, predicted, reason, rows, refused
        )
    entry = Entry(
        law=cast("AnyLaw", best),
        rows=len(rows),
        median_abs_error=stored[0],
        p90_abs_error=stored[1],
        fitted_median_abs_error=fitted[0],
        fitted_p90_abs_error=fitted[1],
        note=NOTES.get((stack, kind), ""),
    )
    return FittedKernelModel(op, kind, len(rows), entry, measured, predicted, members=rows)


def _too_far(
    family: Family, shape: tuple[Array, ...], predicted: Array, measured: Array
) -> str:
    """Return a sentence if the 90th percentile of the error of usual rows exceeds WORST, else
    ''."""
    import numpy as np

    usual = family.weight(*shape) >= USUAL if family.weight else np.ones(len(measured), bool)
    if not usual.any():
        usual = ~usual
    p90 = errors(predicted[usual], measured[usual])[1]
    return f"a tenth of its usual rows are missed by {p90:.0%} or more" if p90 > WORST else ""


def _best(
    laws: Candidates,
    family: Family,
    figures: GpuParameters,
    shape: tuple[Array, ...],
    measured: Array,
    starts: int,
    like: KernelModel | None = None,
) -> KernelModel:
    """Return the best of the candidate kernel models after their fits."""
    weight = family.weight(*shape) if family.weight else None
    if like is not None:
        return fit(type(like), figures, shape, measured, weight, starts, like, **laws[0][1]).law
    ends = [fit(law, figures, shape, measured, weight, starts, **fixed) for law, fixed in laws]
    return min(ends, key=lambda end: end.loss).law


def _held_out(
    laws: Candidates,
    family: Family,
    figures: GpuParameters,
    shape: tuple[Array, ...],
    measured: Array,
    rows: list[MeasuredRow],
    like: KernelModel | None,
) -> Array:
    import numpy as np

    folds = np.array([_fold(row) for row in rows])
    predicted = np.empty_like(measured)
    for stored in range(FOLDS):
        out = folds == stored
        if not out.any() or out.all():
            out = np.arange(len(rows)) % FOLDS == stored
        kept, left = tuple(a[~out] for a in shape), tuple(a[out] for a in shape)
        predicted[out] = _best(
            laws, family, figures, kept, measured[~out], FOLD_STARTS, like
        ).us(figures, *left)
    return predicted


def _fold(row: MeasuredRow) -> int:
    return (
        int(
            hashlib.sha256(f"{row.op}|{row.dtype}|{row.shape}".encode()).hexdigest()[:8],
            16,
        )
        % FOLDS
    )


def errors(predicted: Array, measured: Array) -> tuple[float, float]:
    """Return median and 90th percentile of exp(|ln(predicted/measured)|) − 1, to four digits."""
    import numpy as np

    result = np.exp(np.abs(np.log(predicted / measured))) - 1
    return round(float(np.median(result)), 4), round(float(np.quantile(result, 0.9)), 4)


def summed(
    fits: Sequence[FittedKernelModel],
    gpu: Gpu,
    stack: str,
    rows: Sequence[MeasuredRow],
    about: dict[str, str],
    validated: Validator | None = None,
) -> Calibration:
    """Return the calibration of the fits. `validated` computes its errors on measured servers."""
    laws: dict[str, dict[str, Entry]] = {}
    refused: dict[str, dict[str, Refused]] = {}
    _collect(fits, laws, refused)
    used = sum(result.rows for result in fits if result.entry)
    date = about.get("date") or datetime.date.today().isoformat()
    texts = {key: about.get(key, "") for key in ("origin", "commit", "license")}
    named = {"date": date, "gpu": gpu.name, "stack": stack, "version": _versions(rows)}
    figures: Any = {**texts, **named, "rows": used}
    made = Calibration(laws=laws, refused=refused, **figures)
    return (
        msgspec.structs.replace(made, validation=validated(made, gpu, rows))
        if validated
        else made
    )


def _versions(rows: Sequence[MeasuredRow]) -> str:
    return ", ".join(sorted({row.version for row in rows if row.op not in SERVING} - {""}))[
        :200
    ]


def fit_records(fits: Sequence[FittedKernelModel]) -> list[Record]:
    """Return one record for each family and kind, with nested parameters."""
    return [_record(fitted) for fitted in fits]


def _record(fitted: FittedKernelModel) -> Record:
    entry = fitted.entry
    names = (
        "median_abs_error",
        "p90_abs_error",
        "fitted_median_abs_error",
        "fitted_p90_abs_error",
    )
    return {
        "family": fitted.family,
        "kind": fitted.kind,
        "form": str(entry.law.__struct_config__.tag) if entry else None,
        "rows": fitted.rows,
        **{name: getattr(entry, name) if entry else None for name in names},
        "parameters": {name: getattr(entry.law, name) for name in entry.law.ranges()}
        if entry
        else {},
        "why": fitted.why,
    }


# Kernels of latent attention that vLLM 0.24 shares with other stacks: (stack, kernel, cache) of
# their rows. On Hopper FlashAttention-3 and FlashMLA, on Blackwell TensorRT-LLM's kernels in
# FlashInfer.
SHARED_LATENT_KERNELS = {
    "Hopper": (("sglang", "flash_attention", "bfloat16"), ("trtllm", "default", "fp8")),
    "Blackwell": (
        ("sglang", "trtllm_mla", "bfloat16"),
        ("sglang", "trtllm_mla", "fp8"),
    ),
}


def stacks_among(tables: Sequence[MeasurementFile]) -> list[tuple[Gpu, str]]:
    """Return each known GPU with each framework of its rows, in order of their names."""
    named = {
        (row.gpu, row.framework)
        for table in tables
        for row in table.rows
        if row.gpu and row.framework
    }
    results = {(gpu.name, stack): gpu for name, stack in named if (gpu := _named(name))}
    return [
        (gpu, stack) for (_, stack), gpu in sorted(results.items(), key=lambda item: item[0])
    ]


def chosen_rows(
    tables: Sequence[MeasurementFile], gpu: Gpu, stack: str, note: Callable[[str], None]
) -> list[MeasuredRow]:
    """Return the rows of a GPU and a stack. Rows without GPU or framework count.

    All-reduces of GPUs with the same links count too. So do rows of latent attention of another
    stack with the same kernel, if the stack has none. If all rows name one other framework, its
    rows are used.

    Args:
        note: Receives a sentence for rows that are left out.

    Raises:
        UserError: The rows are of several other frameworks, or no row is left.
    """
    rows = [row for table in tables for row in table.rows]
    for table in tables:
        if table.broken:
            named = "; ".join(f"line {b.line}: {b.why}" for b in table.broken[:3])
            note(
                f"{table.path}: {len(table.broken):,} rows cannot be read"
                f" ({named}{' …' if len(table.broken) > 3 else ''})"
            )
    meant = {name: _named(name) if name else gpu for name in {row.gpu for row in rows}}
    same = {
        name: result is not None and result.name == gpu.name for name, result in meant.items()
    }
    linked = {
        name
        for name, result in meant.items()
        if not same[name] and result and _same_links(result, gpu)
    }
    here = [
        row for row in rows if same[row.gpu] or (row.op == "allreduce" and row.gpu in linked)
    ]
    if any(not same[row.gpu] for row in here):
        note(f"all-reduces of {', '.join(sorted(linked))} count too: the links are the same")
    others = len(rows) - len(here)
    if others:
        note(
            f"{others:,} rows of other GPUs are left out: "
            f"{', '.join(sorted(name for name, is_same in same.items() if not is_same))}"
        )
    frameworks = {row.framework for row in here} - {""}
    wanted = stack if stack in frameworks or len(frameworks) != 1 else next(iter(frameworks))
    if frameworks and wanted not in frameworks:
        hint = f"Name one of them: {', '.join(sorted(frameworks))}"
        raise UserError(
            f"the rows are of several frameworks, none of them {stack!r}", hint=hint
        )
    used = [row for row in here if row.framework in ("", wanted)]
    if not used:
        raise UserError(
            f"no row of {gpu.name} can be used",
            ", ".join(table.path for table in tables),
        )
    shared = (
        [] if any(row.op == "mla_decode" for row in used) else _latent_rows(here, gpu, wanted)
    )
    if shared:
        names = ", ".join(sorted({row.framework for row in shared}))
        note(f"{len(shared):,} rows of latent attention of {names} count too: same kernels")
    if len(used) + len(shared) < len(here):
        note(f"{len(here) - len(used) - len(shared):,} rows of other frameworks are left out")
    return [*used, *(row._replace(version="") for row in shared)]


def _latent_rows(rows: Sequence[MeasuredRow], gpu: Gpu, stack: str) -> list[MeasuredRow]:
    """Return other stacks' rows of latent attention with this stack's decode kernels."""
    architecture = next(
        (name for name in SHARED_LATENT_KERNELS if gpu.architecture.startswith(name)),
        "",
    )
    shared = SHARED_LATENT_KERNELS.get(architecture, ()) if stack == "vllm" else ()
    return [
        row
        for row in rows
        if row.op == "mla_decode" and (row.framework, row.kernel, row.dtype) in shared
    ]


def _named(name: str) -> Gpu | None:
    try:
        return gpu_named(name)
    except UserError:
        return None


def _same_links(a: Gpu, b: Gpu) -> bool:
    return bool(a.link_bytes_per_s) and (a.link_bytes_per_s, a.link_domain) == (
        b.link_bytes_per_s,
        b.link_domain,
    )


class MadeCalibration(NamedTuple):
    """The calibration file of a GPU and a stack, and a record of each family and kind."""

    gpu: Gpu
    stack: str
    text: str
    fits: list[Record]


def calibrated_stacks(
    tables: Sequence[MeasurementFile],
    about: dict[str, str],
    validated: Validator | None = None,
) -> Iterator[MadeCalibration]:
    """Yield the calibration of each GPU and stack of the rows, if a family could be fitted."""
    jobs = [
        (gpu, stack, chosen_rows(tables, gpu, stack, lambda text: None))
        for gpu, stack in stacks_among(tables)
    ]
    with ProcessPoolExecutor() as pool:
        for made in pool.map(partial(_made, about=about, validated=validated), jobs):
            if made.text:
                yield made


def _made(
    job: tuple[Gpu, str, list[MeasuredRow]],
    about: dict[str, str],
    validated: Validator | None,
) -> MadeCalibration:
    gpu, stack, rows = job
    fits = calibrate(rows, gpu, stack)
    some = any(fit.entry or fit.refused for fit in fits)
    text = to_yaml(summed(fits, gpu, stack, rows, about, validated)) if some else ""
    return MadeCalibration(gpu, stack, text, fit_records(fits))
