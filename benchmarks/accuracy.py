"""The tables and pictures of docs/accuracy.md: errors of the shipped calibrations, and of predictions against measured rows.

    python benchmarks/accuracy.py ROWS.csv...                 prints the tables
    python benchmarks/accuracy.py ROWS.csv... --write         puts them into docs/accuracy.md, and the pictures beside

Without rows, only the held-out errors that the calibrations carry are given. Rows are judged in the scopes that real models
have: products with n and k from 1,024 to 32,768; attention with head_dim 128, 4 to 16 query heads per KV head and no window,
decode from 512 and prefill from 128 tokens; everything else whole.
"""

import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from kvcalc import load_gpu
from kvcalc.report.plots import save
from kvcalc.report.plots_timing import predicted_against_measured
from kvcalc.timing.calibration import find_calibration, stacks_of
from kvcalc.timing.rows import MeasuredRow
from kvcalc.timing.validation import Validation, validate

GPUS = ("h100-sxm", "h200")
DOCUMENT = Path(__file__).parent.parent / "docs" / "accuracy.md"
Errors = dict[str, list[tuple[MeasuredRow, float, float]]]


def scope(row: MeasuredRow) -> str:
    """The family under which a row is judged; '' where it is out of scope."""
    if row.op == "gemm":
        _, n, k = row.shape
        inside = min(n, k) >= 1024 and max(n, k) <= 32768
        return ("gemm bf16" if row.dtype == "bfloat16" else "gemm fp8") if inside else ""
    if row.op in ("decode_attention", "prefill_attention"):
        _, heads, groups, head_dim, length, window = row.shape
        least = 512 if row.op == "decode_attention" else 128
        inside = head_dim == 128 and 4 <= heads / groups <= 16 and not window and length >= least
        kind = "" if row.op == "prefill_attention" else " bf16" if row.dtype == "bfloat16" else " fp8"
        return row.op.replace("_", " ") + kind if inside else ""
    kind = {"bfloat16": " bf16", "fp8": " fp8"}.get(row.dtype, "") if row.op == "mla_decode" else ""
    return row.op.replace("_", " ") + kind


def judged(validations: list[Validation], only: Callable[[str], bool] = lambda gpu: True) -> Errors:
    """(row, bound, calibrated) by family, NaN where there is no prediction."""
    found: Errors = {}
    for v in validations:
        for row, gpu, bound, timed in zip(v.table.rows, v.gpus, v.bound.tolist(), v.calibrated.tolist(), strict=True):
            if gpu in GPUS and only(gpu) and (family := scope(row)):
                found.setdefault(family, []).append((row, bound, timed))
    return found


def written(values: list[float]) -> str:
    """Median / p90 in per cent."""
    if not values:
        return "–"
    ordered = sorted(values)
    return " / ".join(f"{100 * ordered[min(len(ordered) - 1, int(q * len(ordered)))]:,.1f}" for q in (0.5, 0.9))


def error(predicted: float, measured: float) -> float:
    return math.exp(abs(math.log(predicted / measured))) - 1


def family_table(here: Errors, borrowed: Errors) -> Iterator[str]:
    yield "| family | rows | predicted | calibrated | datasheet bound | H200 from H100's parameters |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for family, rows in sorted(here.items()):
        laws = [error(t, r.time_us) for r, _, t in rows if t > 0]
        roof = [error(b, r.time_us) for r, b, _ in rows if b > 0]
        moved = [error(t, r.time_us) for r, _, t in borrowed.get(family, []) if t > 0]
        yield f"| {family} | {len(rows):,} | {len(laws) / len(rows):.0%} | {written(laws)} | {written(roof)} | {written(moved)} |"


def held_out_table() -> Iterator[str]:
    yield "| GPU | stack | version | family | kind | rows | held out | fitted |"
    yield "| --- | --- | --- | --- | --- | ---: | ---: | ---: |"
    for name in GPUS:
        gpu = load_gpu(name)
        for stack in stacks_of(gpu):
            found = find_calibration(gpu, stack)
            assert found is not None
            for family, kinds in found.laws.items():
                for kind, e in kinds.items():
                    held = f"{100 * e.median_abs_error:.1f} / {100 * e.p90_abs_error:.1f}"
                    fitted = f"{100 * e.fitted_median_abs_error:.1f} / {100 * e.fitted_p90_abs_error:.1f}"
                    yield f"| {name} | {stack} | {found.version} | {family} | {kind} | {e.rows} | {held} | {fitted} |"


def put(text: str, name: str, lines: Iterator[str]) -> str:
    """`text` with the block between the markers of `name` replaced."""
    block = f"<!-- {name} -->\n" + "\n".join(lines) + f"\n<!-- end {name} -->"
    return re.sub(f"<!-- {name} -->.*?<!-- end {name} -->", lambda _: block, text, flags=re.DOTALL)


def pictures(here: Errors) -> None:
    for stem, families in (
        ("gemm", ("gemm bf16", "gemm fp8")),
        ("attention", ("decode attention bf16", "decode attention fp8", "prefill attention", "mla decode bf16")),
        ("allreduce", ("allreduce",)),
    ):
        series = [(f, [r.time_us for r, *_ in here[f]], [t for *_, t in here[f]]) for f in families if f in here]
        if series:
            target = DOCUMENT.parent / "images" / f"accuracy-{stem}.png"
            save(predicted_against_measured(series, "H100 and H200, all stacks"), str(target))


def main(words: list[str]) -> int:
    paths = [Path(w) for w in words if not w.startswith("-")]
    here, borrowed = {}, {}
    if paths:
        here = judged(validate(paths))
        borrowed = judged(validate(paths, source=load_gpu("h100")), lambda gpu: gpu == "h200")
        print("\n".join(family_table(here, borrowed)), end="\n\n")
    print("\n".join(held_out_table()))
    if "--write" in words:
        text = put(DOCUMENT.read_text(encoding="utf-8"), "held-out", held_out_table())
        if paths:
            text = put(text, "rows", family_table(here, borrowed))
            pictures(here)
        DOCUMENT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
