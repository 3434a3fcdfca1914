"""The keys of each command's records, for people, documents and checks."""

from functools import cache
from importlib import import_module

from kvcalc.errors import UserError, nearest
from kvcalc.records.figures import Figure, figures_of

# Module in `kvcalc.records` and class of each kind of records.
RECORD_CLASSES = {
    "size": ("size", "SizeRecord"),
    "compare": ("compare", "CompareRecord"),
    "roofline": ("roofline", "RooflineRecord"),
    "roofline (an operator)": ("roofline", "OperatorRecord"),
    "roofline (without a model)": ("roofline", "AttentionRecord"),
    "latency": ("serving", "LatencyRecord"),
    "latency --no-cache": ("serving", "NoCacheRecord"),
    "latency --draft": ("serving", "SpeculationRecord"),
    "serve": ("serving", "ServeRecord"),
    "serve --timeline (a file)": ("serving", "PassRecord"),
    "plan": ("plan", "PlanRecord"),
    "fit": ("fit", "FitRecord"),
    "fit --lengths": ("fit", "WasteRecord"),
    "fit --matrix": ("fit", "MatrixCellRecord"),
    "fit --allocations": ("fit", "AllocationRecord"),
    "diagnose": ("diagnose", "DiagnoseRecord"),
    "diagnose --metrics": ("diagnose", "RunningRecord"),
    "measure": ("measure", "MeasuredLayerRecord"),
    "measure --generate": ("measure", "GenerationRecord"),
    "measure --calibration": ("calibration", "KernelModelRecord"),
    "calibrate": ("calibration", "KernelModelRecord"),
    "validate": ("calibration", "ErrorRecord"),
    "models": ("presets", "ModelPresetRecord"),
    "gpus": ("presets", "GpuPresetRecord"),
}


def record_class(kind: str) -> type:
    """Return the class of a kind of records, such as `fit --matrix`."""
    module, name = RECORD_CLASSES[kind]
    record: type = getattr(import_module(f"kvcalc.records.{module}"), name)
    return record


@cache
def kinds() -> dict[str, dict[str, Figure]]:
    """Return the figures of each kind of records by key."""
    return {kind: figures_of(record_class(kind)) for kind in RECORD_CLASSES}


def figures_of_command(command: str) -> list[dict[str, Figure]]:
    """Return the figures of all kinds of records of a command.

    Raises:
        UserError: The command has no records.
    """
    matches = [
        figures
        for kind, figures in kinds().items()
        if command in (kind, kind.partition(" ")[0])
    ]
    if not matches:
        raise UserError(f"no records of {command!r}", hint=nearest(command, RECORD_CLASSES))
    return matches


def record_keys(command: str) -> dict[str, Figure]:
    """Return the keys of a command's records with their meanings, in the order of the records.

    Raises:
        UserError: The command has no records.
    """
    keys: dict[str, Figure] = {}
    for figures in figures_of_command(command):
        keys |= figures | keys
    return keys
