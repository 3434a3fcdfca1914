"""The unit, type and meaning of each key of each command's records, for people and documents."""

from functools import cache
from importlib import import_module
from pathlib import Path

from kvcalc.errors import UserError, nearest
from kvcalc.library.yaml_text import parse_yaml
from kvcalc.records import JsonObject
from kvcalc.records.figures import UNITS, UNITS_OF_TYPES, Figure, figures_of, unit_of_key

# The classes of each kind of records, such as `fit` or `fit --matrix`, by file in `kvcalc.records`.
RECORD_CLASSES = {
    "size": ("size", "SizeRecord"),
    "compare": ("compare", "CompareRecord"),
    "latency": ("serving", "LatencyRecord"),
    "latency --no-cache": ("serving", "NoCacheRecord"),
    "latency --draft": ("serving", "SpeculationRecord"),
    "serve": ("serving", "ServeRecord"),
    "serve --timeline (a file)": ("serving", "PassRecord"),
    "roofline": ("roofline", "RooflineRecord"),
    "roofline (an operator)": ("roofline", "OperatorRecord"),
    "roofline (without a model)": ("roofline", "AttentionRecord"),
    "plan": ("plan", "PlanRecord"),
    "compare --deployments": ("fit", "FitRecord"),
    "fit": ("fit", "FitRecord"),
    "fit --lengths": ("fit", "WasteRecord"),
    "fit --matrix": ("fit", "MatrixCellRecord"),
    "fit --allocations": ("fit", "AllocationRecord"),
    "diagnose": ("diagnose", "DiagnoseRecord"),
    "diagnose --metrics": ("diagnose", "RunningRecord"),
    "models": ("presets", "ModelPresetRecord"),
    "gpus": ("presets", "GpuPresetRecord"),
    "measure": ("measure", "MeasuredLayerRecord"),
    "measure --generate": ("measure", "GenerationRecord"),
    "measure --calibration": ("calibration", "KernelModelRecord"),
    "calibrate": ("calibration", "KernelModelRecord"),
    "validate": ("calibration", "ErrorRecord"),
}
_TYPES = {
    **dict.fromkeys(("bytes", "FLOP", "tokens", "sequences"), "integer"),
    **{unit: json_type for json_type, unit in UNITS_OF_TYPES.items()},
}


def record_class(kind: str) -> type:
    """Return the class of a kind of records."""
    module, name = RECORD_CLASSES[kind]
    cls: type = getattr(import_module(f"kvcalc.records.{module}"), name)
    return cls


@cache
def kinds() -> dict[str, dict[str, Figure]]:
    """Return the figures of each kind of records, such as `fit` or `fit --matrix`, by key."""
    described = _read()
    kinds: dict[str, dict[str, Figure]] = {}
    for kind, parts in described["commands"].items():
        kinds[kind] = {}
        if kind in RECORD_CLASSES:
            kinds[kind] = figures_of(record_class(kind))
        for part in parts:
            for name, text in described["parts"][part].items():
                kinds[kind].setdefault(name, _figure(name, text))
    return kinds


@cache
def _read() -> JsonObject:
    path = Path(__file__).with_name("keys.yaml")
    return parse_yaml(path.read_text(encoding="utf-8"), path.name)[0]


def _figure(name: str, text: str) -> Figure:
    head, _, tail = text.partition("; ")
    unit, meaning = (head, tail) if head in UNITS else (unit_of_key(name), text)
    json_type = _TYPES.get(unit, "number")
    return Figure(
        heading="",
        meaning=meaning,
        unit=unit,
        name=name,
        type=json_type,
        nullable="null" in meaning,
    )


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
        raise UserError(f"no records of {command!r}", hint=nearest(command, kinds()))
    return matches


def record_keys(command: str) -> dict[str, Figure]:
    """Return the keys of a command's records with their meanings, in the order of the records.

    Raises:
        UserError: The command has no records.
    """
    keys: dict[str, Figure] = {}
    for figures in figures_of_command(command):
        for name, figure in figures.items():
            keys.setdefault(name, figure)
    return keys
