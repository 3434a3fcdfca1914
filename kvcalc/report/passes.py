"""What `roofline` shows: the operators of one pass, their parts, and what the figures rest on."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from kvcalc.gpu.roof import turning_batch
from kvcalc.layers.batch import Batch
from kvcalc.layers.cost import Operator, Role
from kvcalc.report.layout import Column, Table
from kvcalc.report.memory_text import memory_notes, memory_sentences
from kvcalc.report.tables import ROOFLINE_COLUMNS, fallback_notes, kernel_seconds, node_notes, time_note
from kvcalc.timing.deployment import Deployment
from kvcalc.timing.records import ENGINE_OVERHEAD, MODULE_OVERHEAD

_PRINTED = {ENGINE_OVERHEAD: "engine overhead", MODULE_OVERHEAD: "module overhead"}
KINDS_OF_BYTES = (("weights", "weight_bytes"), ("cache", "cache_bytes"), ("activations", "activation_bytes"))
NOT_OF_PARTS = ("count", "weight_bytes", "cache_bytes", "activation_bytes")


def pass_tables(passes: Sequence[tuple[Deployment, Sequence[dict[str, Any]]]]) -> Iterator[Table]:
    """A table of each pass, deployments with their records; what turns compute-bound where is worked out once by context."""
    known: dict[tuple[int, int], list[str]] = {}
    near: dict[int, dict[str, int | None]] = {}
    for deployment, records in passes:
        asked = id(deployment), records[-1]["context"]
        if records[-1]["phase"] == "decode" and asked not in known:
            known[asked] = _turning(deployment, records[-1]["context"], near.setdefault(id(deployment), {}))
        yield pass_table(deployment, records, known.get(asked, []))


def pass_table(deployment: Deployment, records: Sequence[dict[str, Any]], turning: Sequence[str] | None = None) -> Table:
    """The records of one pass: each operator with its share of the time, its parts below it, and last the total.

    turning: what is said below of where it turns compute-bound, worked out unless it is given.
    """
    whole = records[-1]
    phase, batch, context = whole["phase"], whole["batch_size"], whole["context"]
    shown = []
    for record in records:
        name = _PRINTED.get(record["operator"], record["operator"])
        shown.append(record | {"operator": name, "shape": shape(record)})
        shown += [_part(part) for part in record.get("parts", [])]
    split = ", ".join(f"{name} {whole[key] / whole['bytes']:.1%}" for name, key in KINDS_OF_BYTES)
    if turning is None:
        turning = _turning(deployment, context, {}) if phase == "decode" else []
    notes = ["", *turning, f"bytes moved: {split}"]
    notes += [_assumptions(deployment), *node_notes(records[-1:]), *fallback_notes(records[-1:])]
    notes += [time_note(records[-1:], deployment.basis), ""]
    what = {"decode": "a decode step", "prefill": "a prefill"}.get(phase, "a mixed pass")
    if deployment.parallelism.pp > 1:
        what = f"the slowest of {deployment.parallelism.pp} pipeline stages in {what}"
    asked = f"{what} of {deployment.model.name} on {deployment.gpu.name}, batch {batch:,}, context {context:,}"
    least, predicted = kernel_seconds(whole["roofline_s"]), whole["time_s"]
    took = f"{kernel_seconds(predicted)} for {asked} (at least {least})" if predicted else f"At least {least} for {asked}"
    title = f"{took}, bound by {whole['bound']} at {whole['intensity']:.3g} FLOP/B" if whole["intensity"] else took
    title = "\n".join([*memory_sentences(records[-1:]), title])
    return Table(shown, _columns(records), title, [*notes, *memory_notes(records[-1:])])


def _columns(records: Sequence[dict[str, Any]]) -> list[Column]:
    """Return the columns, the share behind the time that it is of; without the kind of layer if there is but one."""
    kinds = {r["layer"] for r in records} - {""}
    columns = [c for c in ROOFLINE_COLUMNS if c.key != "layer" or len(kinds) > 1]
    share = next(c for c in columns if c.key == "share")
    columns.remove(share)
    timed = "roofline_s" if records[-1]["time_s"] is None else "time_s"
    columns.insert(1 + [c.key for c in columns].index(timed), share)
    return columns


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
    return blank | {"operator": f"  {part['operator']}", "layer": "in it", **work, "bound": ""}


def _turning(deployment: Deployment, context: int, near: dict[str, int | None]) -> list[str]:
    """From which batch on the FFN and attention are bound by compute; nothing where the GPU gives no peak to say so.

    near: what it was at the context asked for before, which is tried first and replaced.
    """
    if not all(deployment.gpu.computes(dtype) for dtype in deployment.formats.product_dtypes):
        return []
    found, placed = [], cache(lambda n: deployment.placed(Batch.decode(context, n)))
    for name, role in (("FFN", Role.FFN), ("attention", Role.CORE)):

        def chosen(operator: Operator, role: Role = role) -> bool:
            return operator.role is role

        batch = near[name] = turning_batch(placed, chosen, near.get(name))
        turns = f"turns compute-bound at batch {batch:,}" if batch else "never turns compute-bound, whatever the batch"
        found.append(f"{name} {turns}")
    return ["; ".join(found)]


def _assumptions(deployment: Deployment) -> str:
    formats, gpu = deployment.formats, deployment.gpu
    knees = [f"{gpu.knee_of(dtype):.1f} FLOP/B in {dtype}" for dtype in formats.product_dtypes if gpu.computes(dtype)]
    knee = f"knee {', '.join(knees)}" if knees else "gives no matrix peak, and so no knee"
    vector = "" if gpu.vector_peak else "; no vector peak in the preset, so vector work is not timed"
    return f"weights {formats.weights_label}{formats.computed}, cache {formats.kv_cache_dtype}; {gpu.name} {knee}{vector}"
