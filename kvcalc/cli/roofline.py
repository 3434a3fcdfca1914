"""`kvcalc roofline`."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcalc.cli import options as o
from kvcalc.cli.common import MOST_ROWS, basis, calibration, emit, lengths, parallelism, remarks
from kvcalc.model.precision import Precision

if TYPE_CHECKING:
    from kvcalc.gpu.spec import Gpu
    from kvcalc.layers.cost import Operator, Role
    from kvcalc.model.spec import Model
    from kvcalc.timing.calibration import Calibration


def run(
    model: Annotated[str, typer.Argument(help=o.MODELS_HELP + " Without one: the GPU's roof alone.", show_default=False)] = "",
    gpu: o.Gpus = "h100",
    phase: Annotated[str, typer.Option("--phase", help="decode or prefill.")] = "decode",
    context: o.Contexts = "4096",
    batch_size: o.Batches = "1",
    dtype: o.Dtype = "auto",
    kv_cache_dtype: o.CacheDtype = "auto",
    quantization: o.Quant = "",
    mla_form: o.MlaForm = "auto",
    stack: o.Stack = "",
    calibration_from: o.CalibrationFrom = "",
    set_: o.Sets = [],  # noqa: B006 (typer copies it)
    tp: o.Tp = 1,
    pp: o.Pp = 1,
    dp: o.Dp = 1,
    ep: o.Ep = 1,
    enable_expert_parallel: o.ExpertParallel = False,
    dcp: o.Dcp = 1,
    plot: o.Plot = "",
    style: o.Style = "light",
    output: o.Output = o.OutputFormat.table,
) -> None:
    """Where every operation lies."""
    from kvcalc.errors import UserError
    from kvcalc.layers.batch import Batch
    from kvcalc.library.edit import edited
    from kvcalc.library.load import load_gpu, load_model
    from kvcalc.timing.deployment import Deployment
    from kvcalc.timing.records import pass_records

    gpus = [load_gpu(name.strip()) for name in gpu.split(",")]
    if not model:
        _roofs_alone(gpus, plot, style, output)
        return
    chosen = edited(load_model(model), set_)
    precision = Precision(dtype, kv_cache_dtype, quantization)
    ranks = parallelism(tp, pp, dp, ep, enable_expert_parallel, dcp)
    contexts, batches = lengths(context, "context"), lengths(batch_size, "batch size")
    if len(gpus) * len(contexts) * len(batches) > MOST_ROWS // 50:
        raise UserError(f"more than {MOST_ROWS // 50:,} passes asked for")

    found = []
    laws = {g.name: calibration(g, stack, calibration_from) for g in gpus}
    deployments = {g.name: Deployment(chosen, g, precision, ranks, mla_form, laws[g.name], calibration_from) for g in gpus}
    for g in gpus:
        for b in batches:
            for s in contexts:
                common = {"model": chosen.name, "gpu": g.name, "phase": phase, "batch_size": b, "context": s}
                placed = deployments[g.name].placed(Batch.of_phase(phase, s, b))
                found.append((g, s, b, pass_records(placed, common, g, laws[g.name])))
    remarks(chosen, max(contexts))
    if plot:
        from kvcalc.report.plots import save
        from kvcalc.report.roof import roofline_chart

        save(roofline_chart([(f"{chosen.name} {phase}", r) for *_, r in found], gpus), plot, style)
    if emit([r for *_, rows in found for r in rows], output) or plot == "-":
        return
    for g, s, b, rows in found:
        turning = _turning(lambda n, d=deployments[g.name], s=s: d.placed(Batch.decode(s, n))) if phase == "decode" else []
        _table(
            chosen,
            g,
            s,
            b,
            phase,
            rows,
            [*turning, _assumptions(chosen, precision, g), _times(g, laws[g.name], calibration_from, rows)],
        )


def _table(
    model: "Model", gpu: "Gpu", context: int, batch: int, phase: str, rows: list[dict[str, Any]], notes: list[str]
) -> None:
    from kvcalc.report.tables import ROOFLINE_COLUMNS, show

    whole = rows[-1]
    shown = []
    for row in rows:
        shown.append(row | {"share": row["roofline_s"] / whole["roofline_s"]})
        blank = {"count": None, "weight_bytes": None, "cache_bytes": None, "activation_bytes": None}
        parts = [
            {**blank, "operator": f"  {p['operator']}", "layer": "", "flops": p["flops"], "bound": ""}
            for p in row.get("parts", [])
        ]
        shown += [p for p in parts if p["flops"]]
    moved = whole["bytes"]
    kinds = (("weights", "weight_bytes"), ("cache", "cache_bytes"), ("activations", "activation_bytes"))
    split = ", ".join(f"{name} {whole[key] / moved:.1%}" for name, key in kinds)
    title = f"{model.name} on {gpu.name}: {phase}, batch {batch:,}, context {context:,}"
    show(shown, ROOFLINE_COLUMNS, title=title, notes=["", f"bytes moved: {split}", *notes, ""])


def _turning(place: Any) -> list[str]:
    from kvcalc.gpu.roof import turning_batch
    from kvcalc.layers.cost import Role

    found = []
    for name, role in (("FFN", Role.FFN), ("attention", Role.CORE)):
        batch = turning_batch(place, partial(_has, role))
        found.append(
            f"{name} turns compute-bound at batch {batch:,}" if batch else f"{name} never turns compute-bound, whatever the batch"
        )
    return ["; ".join(found)]


def _has(role: "Role", operator: "Operator") -> bool:
    return operator.role is role


def _times(gpu: "Gpu", found: "Calibration | None", source: str, rows: list[dict[str, Any]]) -> str:
    from kvcalc.report.tables import error_bar

    return basis(gpu, found, source) + error_bar(rows[-1:])


def _assumptions(model: "Model", precision: Precision, gpu: "Gpu") -> str:
    from kvcalc.model.precision import formats_of

    formats = formats_of(model, precision)
    knee = f"knee {gpu.knee:.1f} FLOP/B in bf16" if gpu.knee else "no bf16 peak"
    vector = "" if gpu.vector_peak else "; no vector peak in the preset, so vector work is not timed"
    return (
        f"weights {formats.weights_label}{formats.computed}, cache {formats.kv_cache_dtype}; {gpu.name} {knee}{vector}; "
        "'at least' is the datasheet bound: full overlap, no launches"
    )


def _roofs_alone(gpus: "Sequence[Gpu]", plot: str, style: str, output: o.OutputFormat) -> None:
    from kvcalc.cli.gpus import record

    found = [record(g) for g in gpus]
    if plot:
        from kvcalc.report.plots import save
        from kvcalc.report.roof import roofline_chart

        save(roofline_chart([], gpus), plot, style)
    if not emit(found, output):
        from kvcalc.report.tables import GPU_COLUMNS, show

        show(found, GPU_COLUMNS, notes=["", "dense matrix peaks; knee: FLOP per byte where bf16 products turn compute-bound"])
