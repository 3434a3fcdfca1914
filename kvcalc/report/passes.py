"""What `roofline` shows: the operators of one pass, their parts, and what the figures rest on."""

from collections.abc import Sequence
from typing import Any

from kvcalc.gpu.roof import turning_batch
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Operator, Role
from kvcalc.report.layout import Table
from kvcalc.report.tables import ROOFLINE_COLUMNS, error_bar, fallback_notes, seconds
from kvcalc.timing.deployment import Deployment

KINDS_OF_BYTES = (("weights", "weight_bytes"), ("cache", "cache_bytes"), ("activations", "activation_bytes"))
NOT_OF_PARTS = ("count", "weight_bytes", "cache_bytes", "activation_bytes")


def pass_table(deployment: Deployment, records: Sequence[dict[str, Any]]) -> Table:
    """The records of one pass: each operator with its share of the time, its parts below it, and last the total."""
    whole = records[-1]
    phase, batch, context = whole["phase"], whole["batch_size"], whole["context"]
    shown = []
    for record in records:
        shown.append(record | {"share": record["roofline_s"] / whole["roofline_s"], "shape": shape(record)})
        shown += [_part(part) for part in record.get("parts", [])]
    split = ", ".join(f"{name} {whole[key] / whole['bytes']:.1%}" for name, key in KINDS_OF_BYTES)
    notes = ["", f"bytes moved: {split}", *(_turning(deployment, context) if phase == "decode" else [])]
    notes += [_assumptions(deployment), *fallback_notes(records[-1:]), times(deployment, records[-1:]), ""]
    what = {"decode": "a decode step", "prefill": "a prefill"}.get(phase, "a mixed pass")
    asked = f"{what} of {deployment.model.name} on {deployment.gpu.name}, batch {batch:,}, context {context:,}"
    least, predicted = seconds(whole["roofline_s"]), whole["time_s"]
    took = f"{seconds(predicted)} for {asked} (at least {least})" if predicted else f"At least {least} for {asked}"
    title = f"{took}, bound by {whole['bound']} at {whole['intensity']:.3g} FLOP/B" if whole["intensity"] else took
    return Table(shown, ROOFLINE_COLUMNS, title, notes)


def shape(record: dict[str, Any]) -> str | None:
    """m × k × n of a product, heads × queries × keys × width of an attention; None for what is neither."""
    m, k, n, heads = (_size(record.get(key)) for key in ("m", "k", "n", "heads"))
    if not m:
        return None
    return f"{heads} × {m} × {n} × {k}" if heads else f"{m} × {k} × {n}"


def _size(value: Any) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _part(part: dict[str, Any]) -> dict[str, Any]:
    blank = dict.fromkeys(NOT_OF_PARTS)
    work = {"flops": part["flops"] or None, "vector_flops": part.get("vector_flops")}
    return blank | {"operator": f"  {part['operator']}", "layer": "on the chip", **work, "bound": ""}


def _turning(deployment: Deployment, context: int) -> list[str]:
    """From which batch on the FFN and attention are bound by compute."""
    found = []
    for name, role in (("FFN", Role.FFN), ("attention", Role.CORE)):

        def chosen(operator: Operator, role: Role = role) -> bool:
            return operator.role is role

        batch = turning_batch(lambda n: deployment.placed(Batch.decode(context, n)), chosen)
        turns = f"turns compute-bound at batch {batch:,}" if batch else "never turns compute-bound, whatever the batch"
        found.append(f"{name} {turns}")
    return ["; ".join(found)]


def _assumptions(deployment: Deployment) -> str:
    formats, gpu = deployment.formats, deployment.gpu
    knees = [f"{gpu.knee_of(dtype):.1f} FLOP/B in {dtype}" for dtype in formats.product_dtypes]
    knee = f"knee {', '.join(knees)}"
    vector = "" if gpu.vector_peak else "; no vector peak in the preset, so vector work is not timed"
    return (
        f"weights {formats.weights_label}{formats.computed}, cache {formats.kv_cache_dtype}; {gpu.name} {knee}{vector}; "
        "'at least' is the datasheet bound: full overlap, no launches"
    )


def times(deployment: Deployment, records: Sequence[dict[str, Any]]) -> str:
    """What predicted times rest on, and their error."""
    found, source = deployment.calibration, deployment.calibrated_on
    if not found:
        return f"{deployment.gpu.name}: no calibration in use, so no predicted times"
    scaled = f", scaled from {source} by datasheet figures" if source else ""
    return f"predicted: {found.stack} {found.version} calibration{scaled}".replace("  ", " ") + error_bar(records)
