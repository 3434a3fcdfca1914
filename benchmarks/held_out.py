"""Make the table of held-out errors of simulated servers in docs/reference/accuracy-servers.md.

    python benchmarks/held_out.py e2e_dense.csv e2e_moe.csv [--write]

Each run is predicted twice by overheads that engine_terms.py's method fits to other runs: once without a
fifth of the runs, which a hash of model, GPU and shape selects, and once without any run of its model and GPU
on its engine. If an engine has only one model and GPU, a fifth is left out both times.

The minimum time of a layer with prompts is taken from the engine's file. Times are treated as linear in the
overheads. Tokens per second are clients · output / (TTFT + (output − 1) · TPOT), predicted and measured. Runs
that are not used in fits are predicted too.
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
from kvcalc.timing.calibration import find_engine_overheads
from kvcalc.timing.rows import MeasuredRow, read_rows

FOLDS = 5


def for_fitting(row: MeasuredRow) -> bool:
    """Return whether engine_terms.py uses a row in its fits."""
    return not row.is_excluded and "deepseek" not in row.model.lower()


def fifth(row: MeasuredRow) -> str:
    return str(blake2b(repr((row.model, row.gpu, row.shape)).encode(), digest_size=4).digest()[-1] % FOLDS)


def model_and_gpu(row: MeasuredRow) -> str:
    return f"{row.model} {row.gpu}"


def left_out(runs: Sequence[Run], part: Callable[[MeasuredRow], str]) -> Any:
    """Return ln(predicted / measured) as an array [runs, 2]. Each run is predicted by overheads that were fitted
    without its part."""
    fit = [run for run in runs if for_fitting(run.row)]
    if len({part(run.row) for run in fit}) < 2:
        part = fifth
    found = np.empty((len(runs), 2))
    for name in {part(run.row) for run in runs}:
        inside = [i for i, run in enumerate(runs) if part(run.row) == name]
        found[inside] = errors(fitted([run for run in fit if part(run.row) != name]), [runs[i] for i in inside])
    return found


def rates(runs: Sequence[Run], off: Any) -> Any:
    """Return ln(predicted / measured) of the tokens per second of each run."""
    measured = np.exp([run.measured for run in runs])
    tpot, ttft = (measured * np.exp(off)).T
    more = np.array([run.row.shape[1] - 1 for run in runs])
    return np.log((measured[:, 1] + more * measured[:, 0]) / (ttft + more * tpot))


def simulated(rows: Sequence[MeasuredRow]) -> Iterator[list[Run]]:
    """Yield the simulated runs of each group: engine, dense or mixture, former or current release."""
    groups: dict[tuple[str, str, str], list[MeasuredRow]] = {}
    for row in rows:
        groups.setdefault(group_of(row), []).append(row)
    for (stack, kind, age), members in sorted(groups.items()):
        engine = find_engine_overheads(stack)
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
    rows = [
        row
        for word in words
        if not word.startswith("-")
        for row in read_rows(Path(word)).rows
        if find_engine_overheads(row.framework)
    ]
    lines = list(table(list(simulated(rows))))
    print("\n".join(lines))
    if "--write" in words:
        write_blocks({"held-out": lines})


if __name__ == "__main__":
    main(sys.argv[1:])
