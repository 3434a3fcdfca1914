"""How sure served figures are of runs that the engines' terms were not fitted to: docs/reference/accuracy-servers.md.

    python benchmarks/held_out.py e2e_dense.csv e2e_moe.csv [--write]

Each run is predicted by terms fitted as engine_terms.py fits them, once without a fifth of the runs (by a hash of the model, the
GPU and the shape), once without any run of its model and GPU on its engine; where an engine has but one of those, again without
a fifth. The least time of a layer with prompts is that of the engine's file. Figures are nearly linear in the terms, and are
taken as such: tokens per second are clients · output / (TTFT + (output − 1) · TPOT), as measured ones are. Runs that are not for
fitting are predicted all the same.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from accuracy import SERVERS, separator, table_row, write_blocks
from engine_terms import Run, errors, fitted, group_of, runs_of

from kvcalc.library.load import load_gpu
from kvcalc.timing.calibration import engine_of
from kvcalc.timing.rows import MeasuredRow, read_rows

FOLDS = 5


def for_fitting(row: MeasuredRow) -> bool:
    """As engine_terms.py takes them."""
    return not row.odd and "deepseek" not in row.model.lower()


def fifth(row: MeasuredRow) -> str:
    return str(blake2b(repr((row.model, row.gpu, row.shape)).encode(), digest_size=4).digest()[-1] % FOLDS)


def model_and_gpu(row: MeasuredRow) -> str:
    return f"{row.model} {row.gpu}"


def left_out(runs: Sequence[Run], part: Callable[[MeasuredRow], str]) -> Any:
    """Logarithms [runs, 2] of predicted over measured, each run under terms fitted without its part."""
    fit = [run for run in runs if for_fitting(run.row)]
    if len({part(run.row) for run in fit}) < 2:
        part = fifth
    found = np.empty((len(runs), 2))
    for name in {part(run.row) for run in runs}:
        inside = [i for i, run in enumerate(runs) if part(run.row) == name]
        found[inside] = errors(fitted([run for run in fit if part(run.row) != name]), [runs[i] for i in inside])
    return found


def rates(runs: Sequence[Run], off: Any) -> Any:
    """Of tokens per second."""
    measured = np.exp([run.measured for run in runs])
    tpot, ttft = (measured * np.exp(off)).T
    more = np.array([run.row.shape[1] - 1 for run in runs])
    return np.log((measured[:, 1] + more * measured[:, 0]) / (ttft + more * tpot))


def simulated(rows: Sequence[MeasuredRow]) -> Iterator[list[Run]]:
    """The runs of each engine, kind of model and age."""
    groups: dict[tuple[str, str, str], list[MeasuredRow]] = {}
    for row in rows:
        groups.setdefault(group_of(row), []).append(row)
    for (stack, kind, age), members in sorted(groups.items()):
        engine = engine_of(stack)
        assert engine is not None
        whose = engine.former if age == "former" and engine.former else engine
        launch = (whose.mixture if kind == "mixture" else whose.dense).launch_us
        runs = []
        for name in sorted({row.gpu for row in members}):
            runs += runs_of([row for row in members if row.gpu == name], load_gpu(name), stack, launch)
        yield runs


def table(groups: Sequence[list[Run]]) -> Iterator[str]:
    yield table_row("runs left out", "runs", "fifth: TPOT", "TTFT", "tokens/s", "model and GPU: TPOT", "TTFT", "tokens/s")
    yield separator(1, 7)
    runs = [run for group in groups for run in group]
    columns = []
    for part in (fifth, model_and_gpu):
        off = np.concatenate([left_out(group, part) for group in groups])
        columns += [off[:, 0], off[:, 1], rates(runs, off)]
    for title, counts in SERVERS.items():
        chosen = np.array([counts(run.row) for run in runs])
        each = [100 * np.expm1(np.quantile(np.abs(column[chosen]), (0.5, 0.9))) for column in columns]
        yield table_row(title, str(chosen.sum()), *(f"{median:.1f} / {p90:.1f}" for median, p90 in each))


def main(words: list[str]) -> None:
    rows = [row for word in words if not word.startswith("-") for row in read_rows(Path(word)).rows if engine_of(row.framework)]
    lines = list(table(list(simulated(rows))))
    print("\n".join(lines))
    if "--write" in words:
        write_blocks({"held-out": lines})


if __name__ == "__main__":
    main(sys.argv[1:])
