"""Make the tables and pictures of docs/reference/accuracy-*.md from measured rows.

    python benchmarks/accuracy.py ROWS.csv...             prints the tables; fits the folds of each calibration again, minutes
    python benchmarks/accuracy.py ROWS.csv... --write     writes the tables into the pages, and the pictures
    python benchmarks/accuracy.py ROWS.csv... --pictures  draws only the pictures, without fitting folds

Without rows, only two tables are made: the errors in the calibrations, and the decode steps by operator. With
rows of servers, the table of servers is made too. Other tables stay unchanged.

Only rows with the shapes of real models are used:

- matrix products with n and k from 1,024 to 32,768
- attention with head_dim 128, 4 to 16 query heads per KV head and no window; decode from 512 tokens, prefill
  from 128 tokens
- experts, except artefacts of the measurement
- all rows of other operations
"""

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvcalc import Batch, Deployment, Parallelism, load_gpu, load_model
from kvcalc.question.serving_options import INFERENCEX
from kvcalc.report.charts.comparison_plot import predicted_against_measured
from kvcalc.report.charts.drawing import save
from kvcalc.serving.validation import Validation, validate
from kvcalc.timing.calibration import find_calibration, stacks_of
from kvcalc.timing.fitting import calibrate, select_rows
from kvcalc.timing.rows import SERVING, MeasuredRow, MeasurementFile, read_rows
from kvcalc.timing.steps import engine_seconds, operator_seconds

HOPPER, BLACKWELL = ("h100-sxm", "h200"), ("b200", "b300", "gb200", "gb300")
OTHERS = ("rtx-pro-6000-blackwell", "l40s", "a100-80gb")
GPUS = HOPPER + BLACKWELL + OTHERS
DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted((DOCS / "reference").glob("accuracy-*.md"))
# stem: title, families
PICTURES = {
    "gemm": ("Matrix products", ("gemm bf16", "gemm fp8")),
    "attention": (
        "Attention and all-reduce",
        ("decode attention bf16", "decode attention fp8", "prefill attention", "allreduce"),
    ),
    "latent": ("Latent and sparse attention", ("mla decode bf16", "mla decode fp8", "mla prefill", "dsa decode module")),
    "experts": ("Experts", ("moe triton", "moe flashinfer", "moe cutlass", "moe marlin", "moe oai")),
    "steps": ("Steps of served models", ("step of a dense model", "step of a mixture")),
}
# model, GPU, stack, ranks, batch, context
STEPS = (
    ("deepseek-v3", "h200", "sglang", Parallelism(tp=8), 64, 4096),
    ("qwen3-235b-a22b", "h100-sxm", "vllm", Parallelism(tp=8), 64, 4096),
    ("gpt-oss-120b", "h100-sxm", "vllm", Parallelism(), 16, 4096),
)
# block of a page, its GPUs, and columns of borrowed parameters: heading, GPU with the parameters, GPUs of the rows
TABLES = (
    ("rows", HOPPER, (("H200 from H100", "h100", ("h200",)),)),
    ("blackwell", BLACKWELL, (("from H200", "h200", BLACKWELL), ("others from B200", "b200", BLACKWELL[1:]))),
    ("others", OTHERS, (("from H200", "h200", OTHERS),)),
)
# rows of the table of servers
SERVERS: dict[str, Callable[[MeasuredRow], bool]] = {
    "dense": lambda row: row.op == "e2e_dense",
    "dense, InferenceX client": lambda row: row.op == "e2e_dense" and row.client == INFERENCEX,
    "dense, without TensorRT-LLM 1.0rc3 and 8B on SGLang": lambda row: row.op == "e2e_dense" and not queues_outside(row),
    "mixtures without DeepSeek": lambda row: row.op == "e2e_moe" and "deepseek" not in row.model.lower(),
    "all mixtures": lambda row: row.op == "e2e_moe",
}
Pairs = dict[str, list[tuple[float, float, float]]]


def scope(row: MeasuredRow) -> str:
    """Return the family in whose errors a row counts; '' if the row is out of scope."""
    if row.is_excluded:
        return ""
    if row.op == "gemm":
        _, n, k = row.shape
        inside = min(n, k) >= 1024 and max(n, k) <= 32768
        return "gemm " + {"bfloat16": "bf16", "nvfp4": "nvfp4"}.get(row.dtype, "fp8") if inside else ""
    if row.op in ("decode_attention", "prefill_attention"):
        _, heads, groups, head_dim, length, window = row.shape
        least = 512 if row.op == "decode_attention" else 128
        inside = head_dim == 128 and 4 <= heads / groups <= 16 and not window and length >= least
        kind = "" if row.op == "prefill_attention" else " bf16" if row.dtype == "bfloat16" else " fp8"
        return row.op.replace("_", " ") + kind if inside else ""
    if row.op in SERVING:
        return "step of a dense model" if row.op == "e2e_dense" else "step of a mixture"
    if row.op == "moe":
        return "moe " + next(k for k in ("triton", "flashinfer", "cutlass", "marlin", "oai") if k in row.kernel)
    kind = {"bfloat16": " bf16", "fp8": " fp8"}.get(row.dtype, "") if row.op == "mla_decode" else ""
    return row.op.replace("_", " ") + kind


def judged(validations: Sequence[Validation], gpus: Sequence[str]) -> Pairs:
    """Return (measured, bound, predicted) microseconds of the rows of some GPUs, by family. NaN means that there
    is no prediction."""
    found: Pairs = {}
    for v in validations:
        for row, gpu, bound, timed in zip(v.table.rows, v.gpus, v.bound.tolist(), v.calibrated.tolist(), strict=True):
            if gpu in gpus and (family := scope(row)):
                found.setdefault(family, []).append((row.time_us, bound, timed))
    return found


def held_out(tables: Sequence[MeasurementFile], gpus: Sequence[str]) -> Pairs:
    """Return (measured, NaN, predicted) microseconds by family. Each prediction is from a fit without this row."""
    found: Pairs = {}
    for name in gpus:
        gpu = load_gpu(name)
        for stack in stacks_of(gpu):
            fits = calibrate(select_rows(tables, gpu, stack, lambda text: None), gpu, stack)
            for fit in (f for f in fits if f.entry):  # kinds with a kernel model
                for row, time, predicted in zip(fit.members, fit.measured.tolist(), fit.predicted.tolist(), strict=True):
                    if family := scope(row):
                        found.setdefault(family, []).append((time, math.nan, predicted))
    return found


def written(pairs: Sequence[tuple[float, float]]) -> str:
    """Return `median / 90th percentile` of the errors of (measured, predicted) pairs, in percent."""
    errors = sorted(math.exp(abs(math.log(predicted / time))) - 1 for time, predicted in pairs if predicted > 0)
    if not errors:
        return "–"
    return " / ".join(f"{100 * errors[min(len(errors) - 1, int(q * len(errors)))]:,.1f}" for q in (0.5, 0.9))


def table_row(*cells: str) -> str:
    """Return a line of a Markdown table."""
    return f"|{'|'.join(cells)}|"


def separator(words: int, numbers: int) -> str:
    """Return the line below a table's head: columns of words, then columns of numbers."""
    return table_row(*["---"] * words, *["---:"] * numbers)


def family_table(here: Pairs, kept: Pairs, borrowed: dict[str, Pairs]) -> Iterator[str]:
    """Yield a table of errors by kernel; `borrowed` has predictions with another GPU's parameters by column heading."""
    yield table_row("kernel", "rows", "held out", "fitted", "datasheet bound", *borrowed)
    yield separator(1, 4 + len(borrowed))
    for family, rows in sorted(here.items()):
        if family.startswith("step"):
            continue
        columns = [[(m, t) for m, _, t in kept.get(family, [])], [(m, t) for m, _, t in rows], [(m, b) for m, b, _ in rows]]
        columns += [[(m, t) for m, _, t in pairs.get(family, [])] for pairs in borrowed.values()]
        yield table_row(family, f"{len(rows):,}", *map(written, columns))


def queues_outside(row: MeasuredRow) -> bool:
    """Return whether requests of a run wait before they reach the engine."""
    return row.version.startswith("1.0.0rc3") or (row.framework == "sglang" and "8B" in row.model)


def server_table(validations: Sequence[Validation]) -> Iterator[str]:
    yield table_row("servers", "runs", "TPOT", "TTFT, mean", "tokens/s")
    yield separator(1, 4)
    runs = [(row, v.served[at]) for v in validations for at, row in enumerate(v.table.rows) if at in v.served]
    for title, counts in SERVERS.items():
        chosen = [(row, times) for row, times in runs if counts(row)]
        columns = (
            [(row.time_us, times.tpot_us) for row, times in chosen],
            [(row.ttft_us, times.ttft_us) for row, times in chosen],
            [(row.served.tokens_per_s, times.tokens_per_s) for row, times in chosen],
        )
        yield table_row(title, str(len(chosen)), *map(written, columns))


def step_table() -> Iterator[str]:
    yield table_row("GPU", "engine", "kernels of", "model", "runs", "TPOT", "TTFT, mean", "tokens/s")
    yield separator(4, 4)
    for name in HOPPER:
        for stack in stacks_of(load_gpu(name)):
            found = find_calibration(load_gpu(name), stack)
            assert found is not None
            known = found.validation
            for kind in ("dense", "mixture"):
                each = [known.get(f"{kind}{tail}") for tail in ("", "_ttft", "_throughput")]  # type: ignore[call-overload]
                if each[0]:
                    errors = [f"{100 * e.median_abs_error:.0f} / {100 * e.p90_abs_error:.0f}" if e else "–" for e in each]
                    yield table_row(name, stack, found.version, kind, str(each[0].rows), *errors)


def terms(name: str, gpu: str, stack: str, ranks: Parallelism, batch: int, context: int) -> Iterator[str]:
    """Yield the rows of a table of one decode step by operator: kernel model, time, share and the model's
    held-out error."""
    deployed = Deployment(load_model(name), load_gpu(gpu), parallelism=ranks).with_calibration(stack)
    laws, operators = deployed.calibration, deployed.operators(Batch.decode(context, batch))
    assert laws is not None
    each = list(zip(operators, operator_seconds(operators, deployed.gpu, laws), strict=True))
    kernels = sum(t.seconds for _, t in each)
    glue = engine_seconds(operators, laws, kernels)
    whole = glue + kernels
    rows: dict[str, tuple[float, str, str]] = {}
    for operator, timed in each:
        form = str(timed.entry.law.__struct_config__.tag) if timed.entry else "elementwise" if timed.basis != "bound" else "bound"
        error = f"{100 * timed.entry.median_abs_error:.0f} / {100 * timed.entry.p90_abs_error:.0f}" if timed.entry else "–"
        seconds = rows.get(operator.name, (0.0, "", ""))[0] + timed.seconds
        rows[operator.name] = (seconds, form, error)
    title = f"{name} on {ranks.gpus}× {gpu} under {deployed.basis.removesuffix(' calibration')}"
    yield f"**{title}**, {batch} sequences at {context:,} tokens: {1e3 * whole:.2f} ms"
    yield ""
    yield table_row("operator", "kernel model", "time, ms", "share", "held-out error, %")
    yield separator(2, 3)
    small = [n for n, (s, *_) in rows.items() if s < 0.01 * whole]
    for term, (seconds, form, error) in sorted(rows.items(), key=lambda item: -item[1][0]):
        if term not in small:
            yield table_row(term, form, f"{1e3 * seconds:.3f}", f"{seconds / whole:.0%}", error)
    rest = sum(rows[n][0] for n in small)
    yield table_row("engine overhead", "fitted to servers", f"{1e3 * glue:.3f}", f"{glue / whole:.0%}", "–")
    yield table_row(f"{len(small)} operators below 1 % each", "", f"{1e3 * rest:.3f}", f"{rest / whole:.0%}", "")
    yield ""


def all_terms() -> Iterator[str]:
    for step in STEPS:
        yield from terms(*step)


def write_blocks(blocks: dict[str, list[str]]) -> None:
    """Replace the lines between the markers of each block, in the page that has them."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for name, lines in blocks.items():
            block = f"<!-- {name} -->\n" + "\n".join(lines) + f"\n<!-- end {name} -->"
            text = re.sub(f"<!-- {name} -->.*?<!-- end {name} -->", lambda _, block=block: block, text, flags=re.DOTALL)
        page.write_text(text, encoding="utf-8")


def draw(stem: str, title: str, series: list[tuple[str, list[float], list[float]]]) -> None:
    if series:
        rows = sum(len(measured) for _, measured, _ in series)
        told = f"{rows:,} rows of all stacks, predicted by the calibrations, which were fitted to them"
        charts = predicted_against_measured(series, f"{title}, {told}")
        save(charts, str(DOCS / "images" / f"accuracy-{stem}.png"))


def pictures(validations: Sequence[Validation]) -> None:
    """Yield every picture for whose families there are rows."""
    here, there = judged(validations, HOPPER), judged(validations, BLACKWELL)
    shown = sorted(f for f in there if f.startswith(("gemm", "decode", "prefill")))
    for stem, title, families, found in [*((s, *p, here) for s, p in PICTURES.items()), ("blackwell", "Blackwell", shown, there)]:
        draw(stem, title, [(f, [m for m, *_ in found[f]], [t for *_, t in found[f]]) for f in families if f in found])
    first: dict[str, tuple[list[float], list[float]]] = {}
    for v in validations:
        for at, times in v.served.items():
            row = v.table.rows[at]
            if family := scope(row):
                measured, predicted = first.setdefault(family.replace("step", "first token"), ([], []))
                measured.append(row.ttft_us)
                predicted.append(times.ttft_us)
    draw("first-token", "Time to the first token", [(name, *both) for name, both in first.items()])


def main(words: list[str]) -> int:
    paths = [Path(w) for w in words if not w.startswith("-")]
    if "--pictures" in words:
        pictures(list(validate(map(read_rows, paths))))
        return 0
    blocks = {"steps": list(step_table()), "terms": list(all_terms())}
    if paths:
        validations = list(validate(map(read_rows, paths)))
        tables = [read_rows(p) for p in paths if p.stem not in SERVING]
        if any(p.stem in SERVING for p in paths):
            blocks["servers"] = list(server_table(validations))
        for name, gpus, columns in TABLES if tables else ():
            borrowed = {
                title: judged(list(validate(map(read_rows, paths), source=load_gpu(source))), on) for title, source, on in columns
            }
            blocks[name] = list(family_table(judged(validations, gpus), held_out(tables, gpus), borrowed))
    print("\n\n".join("\n".join(lines) for lines in blocks.values()))
    if "--write" in words:
        write_blocks(blocks)
        if paths:
            pictures(validations)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
