"""Fit the engines' overheads (presets/engines) to measured servers, and print the errors of the fits.

    python benchmarks/engine_terms.py e2e_dense.csv e2e_moe.csv [--write]

The overheads of an engine are fitted separately for dense models and for mixtures of experts, and for
releases before a change of its host loop. Each group has at most five parameters, which a penalty keeps near
typical values. For mixtures, the minimum time of a layer with prompts is also selected, from LAUNCHES.

Times are nearly linear in the parameters. So each group is simulated once with base values, and once with a
change of each parameter.

Held-out errors: each model and GPU of a group is predicted by a fit to the other models and GPUs. A group
with few models and GPUs is divided into four parts instead. Runs that hit a prefix cache are left out. Runs
of DeepSeek are left out too, because some of them speculate without stating it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvcalc.gpu.gpu import Gpu
from kvcalc.library.load import load_gpu
from kvcalc.library.presets import shipped_folder
from kvcalc.serving.measured_servers import served_times
from kvcalc.timing.calibration import EngineOverheads, HostOverheads, find_calibration, find_engine_overheads
from kvcalc.timing.rows import MeasuredRow, read_rows

NAMES = ("glue_us", "skew_us", "step_us", "sequence_us", "prompts")
BASE = np.array([5.0, 1.0, 100.0, 10.0, 1.1])
MOVED = np.array([10.0, 3.0, 500.0, 25.0, 0.2])
TYPICAL, SPREAD = np.array([5.0, 0.0, 0.0, 0.0, 1.0]), np.array([15.0, 6.0, 1500.0, 40.0, 0.35])
PULL, FIRST, MOST = 0.02, 0.3, 1.0  # weights of penalty and TTFT, largest logarithm of an error
LAUNCHES = (0.0, 800.0, 1600.0, 2800.0)


class Run(NamedTuple):
    """A measured run.

    Attributes:
        row: The measured row.
        measured: Logarithms of the measured TPOT and TTFT in µs.
        base: TPOT and TTFT in µs, simulated with the parameters BASE.
        slopes: Change of the simulated TPOT and TTFT per unit of each parameter.
    """

    row: MeasuredRow
    measured: Any
    base: Any
    slopes: Any


def simulated(rows: Sequence[MeasuredRow], gpu: Gpu, stack: str, terms: Any, launch: float) -> Any:
    """Return the simulated TPOT and TTFT in µs as an array [rows, 2]."""
    calibration, engine = find_calibration(gpu, stack), find_engine_overheads(stack)
    assert calibration is not None and engine is not None
    added = HostOverheads(**dict(zip(NAMES, map(float, terms), strict=True)), launch_us=launch)
    engine = msgspec.structs.replace(engine, dense=added, mixture=added, former=None)
    found = served_times(rows, gpu, msgspec.structs.replace(calibration, engine=engine))
    return np.array([(one.tpot_us, one.ttft_us) for one in found])


def runs_of(rows: Sequence[MeasuredRow], gpu: Gpu, stack: str, launch: float) -> list[Run]:
    base = simulated(rows, gpu, stack, BASE, launch)
    moved = [simulated(rows, gpu, stack, BASE + np.eye(len(NAMES))[i] * MOVED, launch) - base for i in range(len(NAMES))]
    slopes = [m / step for m, step in zip(moved, MOVED, strict=True)]
    measured = np.log([(row.time_us, row.ttft_us) for row in rows])
    return [
        Run(row, measured[i], base[i], np.array([s[i] for s in slopes])) for i, row in enumerate(rows) if base[i, 0] == base[i, 0]
    ]


def errors(terms: Any, runs: Sequence[Run]) -> Any:
    """Return ln(predicted / measured) of TPOT and TTFT as an array [runs, 2]."""
    predicted = np.array([np.maximum(r.base + (terms - BASE) @ r.slopes, 0.3 * r.base) for r in runs])
    return np.log(predicted) - np.array([r.measured for r in runs])


def loss(terms: Any, runs: Sequence[Run]) -> float:
    """Return the loss that the fit minimises: mean errors, plus a penalty for atypical parameters."""
    off = np.minimum(np.abs(errors(terms, runs)), MOST)
    soft = np.sqrt(off**2 + 0.02**2) @ np.array([1.0, FIRST])
    return float(soft.mean() + PULL * (np.sqrt(1 + ((terms - TYPICAL) / SPREAD) ** 2) - 1).sum())


def fitted(runs: Sequence[Run]) -> Any:
    """Return the parameters with the smallest loss, found by steps along one parameter at a time."""
    terms, step = TYPICAL.copy(), 0.5 * SPREAD
    best = loss(terms, runs)
    least = np.array([0.0, 0.0, 0.0, 0.0, 1.0])  # the factor on kernels is at least 1
    while step[0] > 0.05:
        better = False
        for i in range(len(NAMES)):
            for sign in (1, -1):
                tried = terms.copy()
                tried[i] = max(least[i], tried[i] + sign * step[i])
                found = loss(tried, runs)
                if found < best - 1e-9:
                    terms, best, better = tried, found, True
        step = step if better else 0.6 * step
    return np.array([float(f"{value:.3g}") for value in terms])


def held_out(runs: Sequence[Run]) -> Any:
    """Return held-out errors as `errors` does: each part of the runs is predicted by a fit to the other parts."""
    parts = [f"{r.row.model} {r.row.gpu}" for r in runs]
    if len(set(parts)) < 3:
        parts = [str(i % 4) for i in range(len(runs))]
    found = np.empty((len(runs), 2))
    for part in set(parts):
        inside = np.array([p == part for p in parts])
        found[inside] = errors(
            fitted([r for r, out in zip(runs, inside, strict=True) if not out]),
            [r for r, out in zip(runs, inside, strict=True) if out],
        )
    return found


def said(off: Any) -> str:
    each = 100 * np.expm1(np.abs(off))
    return f"{np.median(each):.1f} / {np.quantile(each, 0.9):.1f}"


def group_of(row: MeasuredRow) -> tuple[str, str, str]:
    """Return the group of a row: the stack, `dense` or `mixture`, `former` or `current`."""
    engine = find_engine_overheads(row.framework)
    assert engine is not None
    former = engine.former and row.version.startswith(engine.former.versions) and bool(row.version)
    return row.framework, "mixture" if row.op == "e2e_moe" else "dense", "former" if former else "current"


def main() -> None:
    paths = [Path(a) for a in sys.argv[1:] if not a.startswith("--")]
    rows = [row for path in paths for row in read_rows(path).rows if not row.is_excluded and find_engine_overheads(row.framework)]
    groups: dict[tuple[str, str, str], list[MeasuredRow]] = {}
    for row in rows:
        if "deepseek" not in row.model.lower():
            groups.setdefault(group_of(row), []).append(row)
    engines: dict[str, dict[str, HostOverheads]] = {}
    for (stack, kind, age), members in sorted(groups.items()):
        tried = []
        for launch in LAUNCHES if kind == "mixture" else LAUNCHES[:1]:
            runs = []
            for name in sorted({row.gpu for row in members}):
                runs += runs_of([row for row in members if row.gpu == name], load_gpu(name), stack, launch)
            terms = fitted(runs)
            tried.append((loss(terms, runs), launch, terms, runs))
        _, launch, terms, runs = min(tried, key=lambda one: one[0])
        off, out = errors(terms, runs), held_out(runs)
        added = HostOverheads(**dict(zip(NAMES, terms.tolist(), strict=True)), launch_us=launch)
        print(f"{stack} {kind} {age}: {len(runs)} runs, {added}", flush=True)
        for name, i in (("TPOT", 0), ("TTFT", 1)):
            bias = np.exp(np.median(off[:, i]))
            print(f"    {name} fitted {said(off[:, i])}, held out {said(out[:, i])}, bias {bias:.2f}", flush=True)
        engines.setdefault(stack, {})[f"{kind} {age}"] = added
    if "--write" in sys.argv:
        for stack, found in engines.items():
            write(stack, found, sum(len(members) for key, members in groups.items() if key[0] == stack))


def write(stack: str, named: dict[str, HostOverheads], runs: int) -> None:
    """Replace the overheads in the engine's file by the fitted overheads."""
    import yaml

    engine = find_engine_overheads(stack)
    assert engine is not None
    former = engine.former
    if former:
        old = {kind: named.get(f"{kind} former", getattr(former, kind)) for kind in ("dense", "mixture")}
        former = msgspec.structs.replace(former, **old)
    own = {kind: named.get(f"{kind} current", getattr(engine, kind)) for kind in ("dense", "mixture")}
    made: EngineOverheads = msgspec.structs.replace(engine, **own, former=former, runs=runs)
    data = {k: v for k, v in msgspec.to_builtins(made).items() if v not in (None, "", False)}
    text = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=10_000, default_flow_style=None)
    (shipped_folder() / "engines" / f"{stack}.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
