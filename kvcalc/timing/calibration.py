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
from typing import Annotated, Any, Literal

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


class HostOverheads(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Time that an engine adds to the kernels of a pass, in microseconds except for `prompts`.

    Attributes:
        glue_us: Launches, small kernels and gaps, per layer.
        skew_us: Wait for the slowest rank, per layer and per doubling of the ranks of the largest
            all-reduce. With 8 ranks, each layer waits 3 · skew_us.
        step_us: Fixed overhead of each pass.
        sequence_us: Scheduling, sampling, detokenising and sending, per sequence of a pass.
        prompts: Factor on the kernel time of a pass that contains prompts, because the GPU then
            runs at sustained power. 1 adds nothing.
        launch_us: Minimum kernel time per layer of a pass that contains prompts. Such a pass has no
            CUDA graph, so the host launches each kernel.
    """

    glue_us: Us = 0.0
    skew_us: Us = 0.0
    step_us: Us = 0.0
    sequence_us: Us = 0.0
    prompts: Annotated[float, msgspec.Meta(ge=1, le=10)] = 1.0
    launch_us: Us = 0.0


class FormerOverheads(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Overheads of older engine releases, which had another host loop (scheduling and launches).

    Attributes:
        versions: Beginnings of these releases' version strings, such as `0.11.0` or `1.0`.
        dense: Overheads of dense models.
        mixture: Overheads of mixtures of experts.
    """

    versions: tuple[str, ...]
    dense: HostOverheads
    mixture: HostOverheads


class EngineOverheads(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Overheads and scheduling of one engine, read from `presets/engines/<stack>.yaml`.

    Attributes:
        stack: Name of the engine, such as `vllm`.
        dense: Overheads of dense models.
        mixture: Overheads of mixtures of experts.
        origin: Source of the measured servers, as text.
        runs: Number of measured servers to which the overheads were fitted.
        decodes_wait: Whether decode steps wait until all waiting prompts are processed.
        whole: Whether a pass takes only whole prompts, never chunks.
        reserve: Share of its output tokens for which a request reserves KV cache at its start. 0
            reserves nothing, 1 reserves cache for the complete answer.
        path_us: Microseconds that front end and network add to a request's first token.
        path_token_us: Microseconds that front end and network add per prompt token.
        former: Overheads of older releases; None if no older release differs.
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

    def host_overheads(self, mixture: bool) -> HostOverheads:
        """Return the overheads of the engine's latest release.

        Args:
            mixture: Whether the model is a mixture of experts; otherwise it is dense.
        """
        return self.mixture if mixture else self.dense

    def for_version(self, version: str) -> "EngineOverheads":
        """Return this engine with the overheads of one release.

        The result has the overheads in `former` if `version` begins with a string in
        `former.versions`. Otherwise it has the overheads of the latest release.

        Args:
            version: Version of the engine, such as `0.11.0`; '' for the latest.
        """
        if self.former and version and version.startswith(self.former.versions):
            return replace(self, dense=self.former.dense, mixture=self.former.mixture)
        return self


def find_engine_overheads(stack: str) -> EngineOverheads | None:
    """Return the overheads of an engine, or None if no file describes the engine.

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


class KernelModelEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fitted kernel model with its errors.

    The error of a row is exp(|ln(predicted/measured)|) − 1, so 0.05 is 5%.

    Attributes:
        law: The kernel model with its parameters.
        rows: Number of measured rows of the fit.
        median_abs_error: Median error of rows that were held out of the fit.
        p90_abs_error: 90th percentile of the errors of held-out rows.
        fitted_median_abs_error: Median error of the rows of the fit.
        fitted_p90_abs_error: 90th percentile of the errors of the rows of the fit.
        note: Warning that is printed with times of this model; '' for no warning. Example: its rows
            were measured without autotuning.
    """

    law: AnyKernelModel
    rows: Count
    median_abs_error: Error
    p90_abs_error: Error
    fitted_median_abs_error: Error = 0.0
    fitted_p90_abs_error: Error = 0.0
    note: str = ""


class ErrorStatistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Errors of predictions against measurements; 0.05 is 5%.

    In `Calibration.validation` the measurements are whole servers, to which no kernel model was
    fitted.

    Attributes:
        rows: Number of measurements.
        median_abs_error: Median error.
        p90_abs_error: 90th percentile of the errors.
    """

    rows: Count
    median_abs_error: Error
    p90_abs_error: Error


class RefusedFit(ErrorStatistics, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Held-out errors of a kernel model that was fitted but is not used.

    Held-out errors are errors of rows that were left out of the fit. They are too large, or the
    rows are not plausible. An operator that needs this kernel model takes its datasheet bound plus
    one launch.

    Attributes:
        rows: Number of measured rows of the fit.
        median_abs_error: Median error of held-out rows; 0.05 is 5%.
        p90_abs_error: 90th percentile of the errors of held-out rows.
        why: Reason for the refusal, as text.
    """

    why: str


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The kernel models of one GPU with one software stack. The fields are the keys of the YAML
    file.

    A stack is an engine or a kernel library, such as `vllm`. `laws` and `refused` are indexed first
    by kernel family, such as `gemm` or `decode_attention`, then by kind of data. A kind of data
    names the data types of the operands, such as `bfloat16` or `bfloat16/fp8`.

    Attributes:
        gpu: Preset name of the GPU.
        stack: Name of the software stack.
        laws: Fitted kernel models with their errors.
        version: Versions of the stack that were measured.
        origin: Source of the measured rows.
        commit: Commit of the source's repository.
        license: License of the source.
        date: Date of the fit or of the source.
        rows: Number of measured rows to which the kernel models were fitted, in total.
        glue_us: Overhead per layer in microseconds. It is used only if the stack is not a known
            engine.
        engine: Overheads to use instead of the overheads of the engine that `stack` names; None for
            the engine's own.
        validation: Errors against measured servers. `dense` and `mixture` (of experts) are errors
            of the time per output token. `_ttft` marks the mean time to first token, `_throughput`
            the tokens per second.
        refused: Fits that are not used, with their errors.
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
        """Return the overheads of the calibration's engine.

        For a stack that is not a known engine, only `glue_us` adds time.

        Args:
            mixture: Whether the model is a mixture of experts; otherwise it is dense.
        """
        engine = self.engine or find_engine_overheads(self.stack)
        return engine.host_overheads(mixture) if engine else HostOverheads(glue_us=self.glue_us)

    def kernel_model(self, family: str, kind: str) -> KernelModel | None:
        """Return the kernel model of a kernel family for a kind of data (data types of the
        operands).

        If this kind was not measured, the nearest measured kind is used. The result is None if no
        near kind was measured, or if the fit of this kind was refused.

        Args:
            family: Kernel family, such as `gemm`, `decode_attention` or `moe`.
            kind: Kind of data, such as `bfloat16` or `fp8_block/triton`.
        """
        entry = self.find_entry(family, kind)
        return entry.law if entry else None

    def find_entry(self, family: str, kind: str) -> KernelModelEntry | None:
        """Return the kernel model that `kernel_model` returns, together with its errors, or None.

        If a kind of data was measured with several kernels, the result is the kernel with the most
        rows.

        Args:
            family: Kernel family, such as `gemm`, `decode_attention` or `moe`.
            kind: Kind of data, such as `bfloat16` or `fp8_block/triton`.
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
        """Return whether times on `gpu` are `calibrated` or `scaled`.

        They are calibrated if the calibration was measured on this GPU model, and scaled if it was
        measured on another one.

        Args:
            gpu: The GPU for which times are predicted.
        """
        return CALIBRATED if self.gpu == gpu.name else SCALED

    def check(self, path: str, lines: Lines) -> None:
        """Check that each kernel model suits its family and that its parameters are within their
        ranges.

        Args:
            path: Path of the calibration file, for the message.
            lines: Line numbers of the file's keys, for the message.

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
    """Return the names of the software stacks, such as `vllm`, for which a GPU has calibrations,
    sorted.

    Args:
        gpu: The GPU.
    """
    return sorted(catalog.preset_files(f"calibrations/{gpu.name}"))


def find_calibration(gpu: Gpu, stack: str) -> Calibration | None:
    """Return the calibration of a GPU with a software stack, or None if there is no file.

    Args:
        gpu: The GPU.
        stack: Name of the stack, such as `vllm`.

    Raises:
        UserError: The file is invalid.
    """
    path = catalog.preset_files(f"calibrations/{gpu.name}").get(stack)
    return _read_calibration(path, path.stat().st_mtime_ns) if path else None


def load_calibration(
    gpu: Gpu, stack: str = "", source: Gpu | None = None, engine: str = "vllm"
) -> Calibration | None:
    """Return the calibration for times on `gpu`. None means that times are datasheet bounds.

    Args:
        gpu: The GPU.
        stack: Name or YAML file of a calibration, or `datasheet` for None. '' looks for a
            calibration with the engine's name.
        source: Another GPU, whose calibration is used. Times are then scaled by the ratio of the
            two GPUs' datasheet figures.
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
    """Return the calibration in a YAML file, after a check of all its entries.

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
    """Return the text of the YAML file of a calibration. `read_calibration` reads such a file."""
    import yaml

    data: dict[str, Any] = msgspec.to_builtins(calibration)
    laws, refused = data.pop("laws"), data.pop("refused")
    for kinds in laws.values():
        for entry in kinds.values():
            if not entry["note"]:
                del entry["note"]
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
    """Return the path at which a user's own calibration is saved.

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
    """Return the names of all stacks for which any GPU has a calibration, sorted."""
    folders = [*catalog.user_folders(), catalog.shipped_folder()]
    return sorted(
        {path.stem for folder in folders for path in (folder / "calibrations").glob("*/*.yaml")}
    )


def find_gpu(name: str) -> Gpu | None:
    """Return the GPU preset for a GPU name, or None if no preset matches.

    Args:
        name: GPU name in a row of a measurement file; '' gives None.
    """
    with suppress(UserError):
        return read(catalog.find(name, "gpus"), Gpu) if name else None
    return None
