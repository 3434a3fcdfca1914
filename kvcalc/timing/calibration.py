"""Read calibrations (presets/calibrations/<gpu>/<stack>.yaml) and engine overheads
(presets/engines/*.yaml).

A calibration has the fitted kernel models of one GPU with one software stack. Each kernel model has
its number of measured rows and its error on rows held out of the fit. Whole steps have a separate
error if servers were measured.

Host work hardly depends on the GPU. So the engine's overheads are fitted once, to measured servers,
and apply to every GPU with kernel models.
"""

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from kvcalc.errors import UserError, nearest
from kvcalc.gpu.gpu import Gpu
from kvcalc.library import presets as catalog
from kvcalc.library.files import Lines, parse_yaml, read_text
from kvcalc.library.load import read
from kvcalc.question.deployment_options import DATASHEET
from kvcalc.timing.kernel_models.families import FAMILIES, NEAREST, AnyKernelModel
from kvcalc.timing.kernel_models.kernel_model import KernelModel

MAX_FILE_BYTES = 1 << 20
CALIBRATED, SCALED, BOUND = "calibrated", "scaled", "bound"  # values of `time_basis`
Error = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Us = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class CalibrationStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base class of the objects in files of calibrations and engines. Unknown keys are errors."""


class HostOverheads(CalibrationStruct, frozen=True):
    """Time that an inference engine adds to the GPU kernels of a forward pass.

    Values are in microseconds, except the factor `prompts`. They were fitted to measured servers.

    Attributes:
        glue_us: Microseconds per layer for launches, small kernels and gaps between kernels.
        skew_us: Microseconds that the ranks wait for the slowest one, per layer and per doubling of
            the ranks of the largest all-reduce. With 8 ranks, each layer waits 3 · skew_us.
        step_us: Microseconds per forward pass, independent of its size.
        sequence_us: Microseconds per sequence in a pass for scheduling, sampling, detokenising and
            sending.
        prompts: Factor on the kernel time of a pass that contains prompts, because the GPU then
            runs at sustained power, which is slower. 1 adds nothing.
        launch_us: Minimum microseconds of kernel time per layer of a pass that contains prompts.
            Such a pass has no CUDA graph, so the CPU launches each kernel.
    """

    glue_us: Us = 0.0
    skew_us: Us = 0.0
    step_us: Us = 0.0
    sequence_us: Us = 0.0
    prompts: Annotated[float, msgspec.Meta(ge=1, le=10)] = 1.0
    launch_us: Us = 0.0


class FormerOverheads(CalibrationStruct, frozen=True):
    """Overheads of older releases of an engine, whose scheduling and launching took other times.

    Attributes:
        versions: Beginnings of the version strings of these releases, such as `0.11.0` or `1.0`.
        dense: Overheads per forward pass of dense models.
        mixture: Overheads per forward pass of mixtures of experts.
    """

    versions: tuple[str, ...]
    dense: HostOverheads
    mixture: HostOverheads


class EngineOverheads(CalibrationStruct, frozen=True):
    """Overheads and scheduling of one inference engine, read from its preset file.

    The file is `presets/engines/<stack>.yaml`.

    Attributes:
        stack: Name of the engine, such as `vllm`.
        dense: Overheads per forward pass of dense models, in the latest release.
        mixture: Overheads per forward pass of mixtures of experts, in the latest release.
        origin: Source of the measurements of servers, as text.
        runs: Number of measured servers to which the overheads were fitted.
        decodes_wait: Whether decode steps wait until all waiting prompts are processed. Otherwise a
            pass may contain prompts and decodes.
        whole: Whether a pass processes only whole prompts. Otherwise it may process chunks of
            prompts.
        reserve: Share of its output tokens, from 0 to 1, for which a request reserves KV cache when
            it is admitted. 0 reserves nothing, 1 reserves cache for the complete answer.
        path_us: Microseconds per request that front end and network add to the time to first token.
        path_token_us: Microseconds per prompt token that front end and network add to the time to
            first token.
        former: Overheads of older releases; None if older releases do not differ.
    """

    stack: str
    dense: HostOverheads
    mixture: HostOverheads
    origin: str = ""
    runs: int = 0
    decodes_wait: bool = False
    whole: bool = False
    reserve: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    path_us: Us = 0.0
    path_token_us: Us = 0.0
    former: FormerOverheads | None = None

    def for_version(self, version: str) -> "EngineOverheads":
        """Return this engine with the overheads per forward pass of a given release.

        `dense` and `mixture` are replaced by those in `former` if `version` begins with a string in
        `former.versions`. Otherwise the engine is returned unchanged.

        Args:
            version: Version of the engine, such as `0.11.0`; '' for the latest.
        """
        if self.former and version and version.startswith(self.former.versions):
            return replace(self, dense=self.former.dense, mixture=self.former.mixture)
        return self


def find_engine_overheads(stack: str) -> EngineOverheads | None:
    """Load the overheads and scheduling of an engine from its preset file; None without a file.

    Args:
        stack: Name of the engine, such as `vllm`.

    Raises:
        UserError: The engine's file is invalid.
    """
    path = catalog.preset_files("engines").get(stack)
    return _read_engine(path, path.stat().st_mtime_ns) if path else None


@cache
def _read_engine(path: Path, modified_ns: int) -> EngineOverheads:
    data, lines = parse_yaml(read_text(path, MAX_FILE_BYTES), str(path))
    return catalog.build(data, EngineOverheads, str(path), lines)


ServedFigure = Literal[
    "dense", "mixture", "dense_ttft", "mixture_ttft", "dense_throughput", "mixture_throughput"
]


class KernelModelEntry(CalibrationStruct, frozen=True):
    """A time model fitted to measured kernels, with its errors.

    A row is one measurement of a kernel. The error of a row is exp(|ln(predicted/measured)|) − 1,
    so 0.05 is 5%.

    Attributes:
        law: The time model of the kernel, with its fitted parameters.
        rows: Number of measured rows of the fit.
        median_abs_error: Median error of rows that were left out of the fit.
        p90_abs_error: 90th percentile of the errors of rows that were left out of the fit.
        fitted_median_abs_error: Median error of the rows of the fit.
        fitted_p90_abs_error: 90th percentile of the errors of the rows of the fit.
    """

    law: AnyKernelModel
    rows: Count
    median_abs_error: Error
    p90_abs_error: Error
    fitted_median_abs_error: Error = 0.0
    fitted_p90_abs_error: Error = 0.0


class ErrorStatistics(CalibrationStruct, frozen=True):
    """Errors of predicted against measured values; 0.05 is 5%.

    In `Calibration.validation` the measurements are of whole servers. They were not used to fit the
    time models of kernels.

    Attributes:
        rows: Number of measurements.
        median_abs_error: Median of the relative errors, without their signs.
        p90_abs_error: 90th percentile of the relative errors, without their signs.
    """

    rows: Count
    median_abs_error: Error
    p90_abs_error: Error


class RefusedFit(ErrorStatistics, frozen=True):
    """Errors of a kernel's time model that was fitted but is not used, with the reason.

    It is not used if its held-out errors are too large or if the measured rows are not plausible.
    Held-out errors are errors of rows that were left out of the fit. An operator that needs this
    model then takes its datasheet bound at 80% of the bandwidth, plus one kernel launch. Only GEMMs
    and decode attention in fp8 take the time model of bf16 instead, if there is one.

    Attributes:
        rows: Number of measured rows of the fit.
        median_abs_error: Median error of held-out rows; 0.05 is 5%.
        p90_abs_error: 90th percentile of the errors of held-out rows.
        why: Reason for the refusal, as text.
    """

    why: str


class Calibration(CalibrationStruct, frozen=True):
    """Time models fitted to measured kernels of one GPU model with one software stack.

    The fields are the keys of a YAML file. A stack is an engine or a kernel library, such as
    `vllm`. `laws` and `refused` are indexed first by kernel family, such as `gemm` or
    `decode_attention`, then by kind of data. A kind of data names the data types of the operands,
    such as `bfloat16` or `bfloat16/fp8`.

    Attributes:
        gpu: Preset name of the GPU.
        stack: Name of the software stack.
        laws: Fitted time models of kernels with their errors, by kernel family and kind of data.
        version: Versions of the stack that were measured, as text.
        origin: Source of the measured rows, as text.
        commit: Commit of the source's repository.
        license: License of the source.
        date: Date of the fit or of the source.
        rows: Number of measured rows to which all time models together were fitted.
        glue_us: Microseconds that the stack adds per layer of a forward pass. It is used only if
            the stack is not a known engine.
        engine: Overheads to use instead of the overheads of the engine that `stack` names; None for
            the engine's own.
        validation: Errors of predictions against measured servers. `dense` and `mixture` (of
            experts) have those of the time per output token. With the suffix `_ttft` they are of
            the mean time to first token, with `_throughput` of tokens per second.
        refused: Fits that are not used, with their errors and the reason, by kernel family and kind
            of data.
    """

    gpu: str
    stack: str
    laws: dict[str, dict[str, KernelModelEntry]]
    version: str = ""
    origin: str = ""
    commit: str = ""
    license: str = ""
    date: str = ""
    rows: int = 0
    glue_us: Annotated[float, msgspec.Meta(ge=0, le=10_000)] = 8.0
    engine: EngineOverheads | None = None
    validation: dict[ServedFigure, ErrorStatistics] = {}
    refused: dict[str, dict[str, RefusedFit]] = {}

    def host_overheads(self, mixture: bool) -> HostOverheads:
        """Return the time that the calibrated engine adds to the kernels of a forward pass.

        If the stack is not a known engine, only `glue_us` per layer adds time.

        Args:
            mixture: Whether the model is a mixture of experts; otherwise it is dense.
        """
        engine = self.engine or find_engine_overheads(self.stack)
        if not engine:
            return HostOverheads(glue_us=self.glue_us)
        return engine.mixture if mixture else engine.dense

    def kernel_model(self, family: str, kind: str) -> KernelModel | None:
        """Return the time model of a kernel family for a kind of data; None if there is none.

        A kind of data names the data types of a kernel's operands. If this kind was not measured,
        the nearest measured kind is used. The result is None if no near kind was measured, or if
        the fit of this kind is not used because of its errors.

        Args:
            family: Kernel family, such as `gemm`, `decode_attention` or `moe`.
            kind: Kind of data, such as `bfloat16`, or with the name of the kernel
                `fp8_block/triton`.
        """
        entry = self.find_entry(family, kind)
        return entry.law if entry else None

    def find_entry(self, family: str, kind: str) -> KernelModelEntry | None:
        """Return the time model of a kernel family for a kind of data, with its errors, or None.

        A kind of data names the data types of a kernel's operands. If this kind was not measured,
        the nearest measured kind is used. If it was measured with several kernels, the kernel with
        the most measured rows is used. The result is None if no near kind was measured, or if its
        fit is not used because of its errors.

        Args:
            family: Kernel family, such as `gemm`, `decode_attention` or `moe`.
            kind: Kind of data, such as `bfloat16`, or with the name of the kernel
                `fp8_block/triton`.
        """
        if kind in self.refused.get(family, {}):
            return None
        kinds = self.laws.get(family, {})
        for name in (kind, *NEAREST.get(kind, ()), kind.rpartition("/")[0]):
            if name in kinds:
                return kinds[name]
            kernels = [kinds[key] for key in kinds if name and key.startswith(f"{name}/")]
            if kernels:
                return max(kernels, key=lambda entry: entry.rows)
        return None

    def basis_on(self, gpu: Gpu) -> str:
        """Return `calibrated` if this GPU model was measured for the calibration, else `scaled`.

        Records print this word next to predicted times. Times on another GPU model are scaled by
        datasheet rates.

        Args:
            gpu: The GPU for which times are predicted.
        """
        return CALIBRATED if self.gpu == gpu.name else SCALED

    def check(self, path: str, lines: Lines) -> None:
        """Check that each time model suits its kernel family and has parameters in their ranges.

        Args:
            path: Path of the calibration file, for the error message.
            lines: Line numbers of the file's keys, for the error message.

        Raises:
            UserError: An entry is invalid. The message names file, line and key.
        """
        for family, kinds in self.laws.items():
            for kind, entry in kinds.items():
                form = str(entry.law.__struct_config__.tag)
                is_variant = form.startswith(family) and form not in FAMILIES
                if form != family and not is_variant:
                    text = f"holds a kernel model of form {form!r}"
                    raise catalog.located(text, ("laws", family, kind), path, lines)
                for name, limits in entry.law.ranges().items():
                    if not limits.minimum <= getattr(entry.law, name) <= limits.maximum:
                        text = f"is not from {limits.minimum:g} to {limits.maximum:g}"
                        place = "laws", family, kind, "law", name
                        raise catalog.located(text, place, path, lines)


def stacks_of(gpu: Gpu) -> list[str]:
    """Return the sorted names of the software stacks for which a GPU model has calibrations.

    A stack is an engine or a kernel library, such as `vllm`. A calibration is a file with time
    models fitted to measured kernels.

    Args:
        gpu: The GPU model.
    """
    return sorted(catalog.preset_files(f"calibrations/{gpu.name}"))


def find_calibration(gpu: Gpu, stack: str) -> Calibration | None:
    """Load the calibration file of a GPU model with a software stack; None if there is no file.

    A calibration has time models fitted to measured kernels.

    Args:
        gpu: The GPU model.
        stack: Name of the engine or kernel library, such as `vllm`.

    Raises:
        UserError: The file is invalid.
    """
    path = catalog.preset_files(f"calibrations/{gpu.name}").get(stack)
    return _read_calibration(path, path.stat().st_mtime_ns) if path else None


def load_calibration(
    gpu: Gpu, stack: str = "", source: Gpu | None = None, engine: str = "vllm"
) -> Calibration | None:
    """Load the calibration (fitted time models) with which times on a GPU model are predicted.

    None means that times are lower bounds from the datasheet.

    Args:
        gpu: The GPU model.
        stack: Name or YAML file of a calibration, or `datasheet` for None. A file is used for any
            GPU model. '' looks for a calibration with the engine's name.
        source: Another GPU model, whose calibration called `stack` is used. Times are then scaled
            by the ratio of the two GPU models' datasheet rates. None uses that of `gpu`.
        engine: Name of the engine. If `stack` is '' and this engine has no calibration, the result
            is None.

    Raises:
        UserError: There is no calibration called `stack`, or its file is invalid.
    """
    if stack == DATASHEET:
        return None
    if stack.lower().endswith((".yaml", ".yml")):
        return read_calibration(Path(stack))
    source = source or gpu
    calibration = find_calibration(source, stack or engine)
    if calibration is None and stack:
        stacks = [*stacks_of(source), DATASHEET]
        hint = nearest(stack, stacks) or f"Known: {', '.join(stacks)}"
        raise UserError(f"no calibration of {source.name} called {stack!r}", hint)
    return calibration


@cache
def _read_calibration(path: Path, modified_ns: int) -> Calibration:
    return read_calibration(path)


def read_calibration(path: Path) -> Calibration:
    """Load a calibration (time models fitted to measured kernels) from a YAML file and check it.

    Args:
        path: Path of the calibration file.

    Raises:
        UserError: An entry is invalid. The message names file, line and key.
    """
    data, lines = parse_yaml(read_text(path, MAX_FILE_BYTES), str(path))
    calibration = catalog.build(data, Calibration, str(path), lines)
    calibration.check(str(path), lines)
    return calibration


def to_yaml(calibration: Calibration) -> str:
    """Return a calibration as YAML text, in the format that `read_calibration` reads."""
    import yaml

    data = msgspec.to_builtins(calibration)
    laws, refused = data.pop("laws"), data.pop("refused")
    filled = {key: value for key, value in data.items() if value not in ({}, None)}
    more = {"refused": refused} if refused else {}
    return yaml.safe_dump(
        {**filled, "laws": laws, **more},
        sort_keys=False,
        allow_unicode=True,
        width=10_000,
        default_flow_style=None,  # one line for each kernel model
    )


def preset_path(gpu: Gpu, stack: str) -> Path:
    """Return the path of the file in which a user's own calibration is saved.

    Args:
        gpu: The calibrated GPU.
        stack: Name of the calibrated software stack, such as `vllm`.

    Raises:
        UserError: The name of the stack cannot be used, such as `datasheet`.
    """
    if stack == DATASHEET:
        raise UserError("stack 'datasheet' is the name of bounds", "Use another name")
    return catalog.new_path("calibrations", gpu.name, stack)


def all_stacks() -> list[str]:
    """Return the sorted names of the software stacks with a calibration of any GPU model."""
    folders = [*catalog.user_folders(), catalog.shipped_folder()]
    return sorted(
        {path.stem for folder in folders for path in (folder / "calibrations").glob("*/*.yaml")}
    )


def find_gpu(name: str) -> Gpu | None:
    """Load the GPU preset that matches a GPU name in a measurement file; None if none matches.

    Args:
        name: Name or alias of a preset in any case, as written in the file; '' gives None.
    """
    with suppress(UserError):
        return read(catalog.find(name, "gpus"), Gpu) if name else None
    return None
