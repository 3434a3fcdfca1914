"""Calibrations are data: presets/calibrations/<gpu>/<stack>.yaml, the laws of one GPU under one software stack.

Each law stands with the rows that it was fitted on and the error it showed on rows held out of the fit: the error bar of that
kernel's time. Whole steps have an error of their own, where measured servers are known.
"""

import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kvcalc.errors import UserError, nearest
from kvcalc.gpu.spec import Gpu
from kvcalc.library import catalog
from kvcalc.library.engine_choice import DATASHEET
from kvcalc.library.files import read_text
from kvcalc.library.load import load_gpu
from kvcalc.library.yaml_text import parse_yaml
from kvcalc.timing.engine import Engine, Terms, engine_of
from kvcalc.timing.families import NEAREST, AnyLaw
from kvcalc.timing.law import Law

CALIBRATED, SCALED, BOUND = "calibrated", "scaled", "bound"  # what a time is
MOST_BYTES = 1 << 20
Error = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Figure = Literal["dense", "mixture", "dense_ttft", "mixture_ttft", "dense_throughput", "mixture_throughput"]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fitted law. rows: used. Errors are exp(|ln(predicted/measured)|) − 1: held out, and on the rows of the fit.

    note: what is to be said beside a time that rests on it, where its rows are known not to be the stack's own speed.
    """

    law: AnyLaw
    rows: Annotated[int, msgspec.Meta(ge=0)]
    median_abs_error: Error
    p90_abs_error: Error
    fitted_median_abs_error: Error = 0.0
    fitted_p90_abs_error: Error = 0.0
    note: str = ""


class Refused(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A kind of data for which no law is kept, so that times rest on the bound: what the best one showed held out, and why."""

    rows: Annotated[int, msgspec.Meta(ge=0)]
    median_abs_error: Error
    p90_abs_error: Error
    why: str


class Validated(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The error of a kind of figure on `rows` measured ones that no law was fitted on."""

    rows: Annotated[int, msgspec.Meta(ge=0)]
    median_abs_error: Error
    p90_abs_error: Error


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The laws of one GPU and stack. The fields are the keys of the file; laws: by family, then by kind of data.

    glue_us [µs]: what a layer of a whole step takes beside its operators (launches, small kernels, gaps), where the stack is
    no engine whose terms are known. engine: instead of the engine that the stack names. refused: as laws, where none does.
    validation: what is known of whole figures: the time per output token of a `dense` model and of a `mixture` of experts
    behind a server, and of either the mean time to the first token (`_ttft`) and the tokens per second (`_throughput`).
    """

    gpu: str
    stack: str
    laws: dict[str, dict[str, Entry]]
    version: str = ""
    origin: str = ""
    commit: str = ""
    license: str = ""
    date: str = ""
    rows: int = 0
    glue_us: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 8.0
    engine: Engine | None = None
    validation: dict[Figure, Validated] = {}
    refused: dict[str, dict[str, Refused]] = {}

    def terms(self, mixture: bool) -> Terms:
        """What the engine adds to the kernels of such a model's passes."""
        engine = self.engine or engine_of(self.stack)
        return engine.terms(mixture) if engine else Terms(glue_us=self.glue_us)

    def law(self, family: str, kind: str) -> Law | None:
        """The law of a family for a kind of data, else that of the nearest kind; None where there is none."""
        found = self.entry(family, kind)
        return found.law if found else None

    def entry(self, family: str, kind: str) -> Entry | None:
        """As `law`, with its errors."""
        kinds = self.laws.get(family, {})
        if kind in self.refused.get(family, {}):
            return None
        found = kinds.get(kind) or self._kernel(kinds, kind)
        others = (*NEAREST.get(kind, ()), kind.rpartition("/")[0])
        return found or next((e for k in others if k and (e := kinds.get(k) or self._kernel(kinds, k))), None)

    @staticmethod
    def _kernel(kinds: dict[str, Entry], kind: str) -> Entry | None:
        """Of the kernels that a kind was measured with, where it has no law of its own, the one with the most rows."""
        return max((e for k, e in kinds.items() if k.startswith(f"{kind}/")), key=lambda e: e.rows, default=None)

    def basis_on(self, gpu: Gpu) -> str:
        """What its times on `gpu` are: calibrated on its own rows, or scaled from another GPU's by datasheet figures."""
        return CALIBRATED if self.gpu == gpu.name else SCALED

    @property
    def label(self) -> str:
        """The stack, with the version of it that the laws were fitted on."""
        return f"{self.stack} {self.version}".strip()

    @property
    def problem(self) -> tuple[str, str]:
        """(key, what is wrong), or ('', '')."""
        for family, kinds in self.laws.items():
            for kind, entry in kinds.items():
                if _family(entry.law) != family:
                    return f"laws.{family}.{kind}", f"holds a law of form {_tag(entry.law)!r}"
        return "", ""


def _tag(law: Law) -> str:
    return str(law.__struct_config__.tag)


def _family(law: Law) -> str:
    return next((family for family in ("gemm", "decode_attention") if _tag(law).startswith(family)), _tag(law))


def stacks_of(gpu: Gpu) -> list[str]:
    """The stacks that a GPU has calibrations for."""
    return sorted(catalog.preset_files(f"calibrations/{gpu.name}"))


def find_calibration(gpu: Gpu, stack: str) -> Calibration | None:
    """The calibration of a GPU under a stack; None where there is none. Raises UserError on a broken file."""
    path = catalog.preset_files(f"calibrations/{gpu.name}").get(stack)
    return _read(path, path.stat().st_mtime_ns) if path else None


def load_calibration(gpu: Gpu, stack: str = "", source: Gpu | None = None, engine: str = "vllm") -> Calibration | None:
    """Return the calibration of times on `gpu`, or None for datasheet bounds.

    Args:
        gpu: The GPU.
        stack: A calibration's name or YAML file, `datasheet` for none, '' for the engine's own.
        source: Another GPU. Its calibration is scaled by datasheet figures.
        engine: The engine. Without a calibration of its own on this GPU, times are bounds.

    Raises:
        UserError: There is no such calibration, or its file is broken.
    """
    if stack == DATASHEET:
        return None
    if stack.lower().endswith((".yaml", ".yml")):
        return read_calibration(Path(stack))
    found = find_calibration(source or gpu, stack or engine)
    if found is None and stack:
        known = [*stacks_of(source or gpu), DATASHEET]
        hint = nearest(stack, known) or f"Known: {', '.join(known)}"
        raise UserError(f"no calibration of {(source or gpu).name} called {stack!r}", hint=hint)
    return found


@cache
def _read(path: Path, changed: int) -> Calibration:
    return read_calibration(path)


def read_calibration(path: Path) -> Calibration:
    """The checked calibration in a YAML file. Raises UserError with the file, line and key of what is wrong."""
    data, lines = parse_yaml(read_text(path, MOST_BYTES), str(path))
    found = catalog.build(data, Calibration, str(path), lines)
    key, problem = found.problem
    if problem:
        raise catalog.located(problem, key, str(path), lines)
    return found


def to_yaml(calibration: Calibration) -> str:
    """The calibration as a preset file."""
    import yaml

    data: dict[str, Any] = {k: v for k, v in msgspec.to_builtins(calibration).items() if v not in ({}, None)}
    laws, refused = data.pop("laws", {}), data.pop("refused", {})

    def dump(values: dict[str, Any], flow: bool = False) -> list[str]:
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=10_000, default_flow_style=flow)
        return text.splitlines()

    lines = [*dump(data), "laws:" if laws else "laws: {}"]
    for family, kinds in laws.items():
        lines.append(f"  {family}:")
        for kind, entry in kinds.items():
            (law,) = dump(entry.pop("law"), flow=True)
            lines += [f"    {kind}:", f"      law: {law}"]
            lines += [f"      {line}" for line in dump({k: v for k, v in entry.items() if v != ""})]
    if refused:
        lines += dump({"refused": refused})
    return "\n".join(lines) + "\n"


def preset_path(gpu: Gpu, stack: str) -> Path:
    """Where a calibration of the user's own goes. Raises UserError on a stack's name that makes no file name."""
    for what, name in (("stack", stack), ("GPU", gpu.name)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name) or name == DATASHEET:
            raise UserError(f"{what} {name!r} is no usable name", hint="Letters, digits, - _ . only, and not 'datasheet'")
    folders = catalog.user_folders()
    if not folders:
        raise UserError("there is no folder for presets of your own", hint="Name the file")
    return folders[0] / "calibrations" / gpu.name / f"{stack}.yaml"


def all_stacks() -> list[str]:
    """Every stack that some GPU has a calibration for."""
    folders = [*catalog.user_folders(), catalog.shipped_folder()]
    return sorted({path.stem for folder in folders for path in (folder / "calibrations").glob("*/*.yaml")})


def gpu_named(name: str) -> Gpu:
    """The GPU preset that a measured row names. Raises UserError where there is none."""
    catalog.find(name, "gpus")
    return load_gpu(name)
