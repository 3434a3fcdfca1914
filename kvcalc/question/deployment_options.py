"""Options that several commands share: data types, parallelism, GPUs and engines."""

import re
from typing import Annotated, NamedTuple

from kvcalc.errors import UserError
from kvcalc.question.options import Question

ENGINE_NAMES = ("vllm", "sglang", "trtllm", "llama.cpp", "none")
DATASHEET = "datasheet"  # no calibration: times are datasheet bounds
AUTO = 0  # `--tp auto`


def gpu_count(text: str, name: str) -> int:
    """Parse a number of GPUs, such as "4", from an option's text.

    Args:
        text: The text.
        name: Name of the option, for the error message.

    Raises:
        UserError: The text is not a whole number of at least 1.
    """
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:10]) < 10**9):
        raise UserError(
            f"{name} {text!r} is not a number of GPUs", "Give a whole number from 1 up"
        )
    return int(text)


def engine_name(text: str, name: str) -> str:
    """Return an engine's name in lower case and without surrounding spaces.

    Unknown names are not refused here.

    Args:
        text: The text.
        name: Name of the option, for the error message.

    Raises:
        UserError: The text has a version too, such as `vllm==0.14`.
    """
    engine = text.strip().lower()
    if match := re.fullmatch(r"([a-z.]+)[=:@ -]+v?(\d[\d.]*)", engine):
        hint = "Write --engine {} --engine-version {}".format(*match.groups())
        raise UserError(f"{name} {text!r} has a version", hint)
    return engine


EngineName = Annotated[str, engine_name]


class ShardingOptions(Question, frozen=True):
    """How a model is stored, and how it is split over GPUs.

    On the command line, data types, `quantization` and `tp` may be comma-separated lists.

    Attributes:
        dtype: Data type of weights and compute; `auto` for the type of the published checkpoint.
        kv_cache_dtype: Data type of the KV cache; `auto` for the engine's or model's own.
        quantization: Format of quantized weights, such as `awq`; '' (the text `auto`) for none, or
            for the format of the published checkpoint.
        set_: Changes of the model's fields, such as `layers=40`.
        tp: GPUs for tensor parallelism; 0 (the text `auto`) tries 1, 2, 4 and 8.
        pp: Pipeline stages (pipeline parallelism).
        dp: Data-parallel groups, which serve different sequences.
        ep: GPUs over which the experts are spread (expert parallelism).
        enable_expert_parallel: Whether the experts are spread over all tp · dp GPUs.
        dcp: GPUs that divide the cached tokens (decode-context parallelism). It must divide tp.
    """

    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: Annotated[str, lambda text, name: text * (text.lower() != "auto")] = ""
    set_: list[str] = []
    tp: Annotated[
        int, lambda text, name: AUTO if text.lower() == "auto" else gpu_count(text, name)
    ] = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    enable_expert_parallel: bool = False
    dcp: int = 1


class PlacementOptions(ShardingOptions, frozen=True):
    """The GPUs on which a model is placed, with the options of `ShardingOptions`.

    Attributes:
        gpu: Comma-separated GPU presets or files; `all` for every preset, or `auto` for this
            machine.
        memory: Usable memory of a GPU, such as `36GiB`; '' for the preset's.
        nodes: Number of nodes; 0 for as few as the interconnect allows.
        inter_node_bandwidth: Bandwidth per GPU between nodes, such as `50GB/s`; '' for the
            preset's.
    """

    gpu: str = "h100"
    memory: str = ""
    nodes: int = 0
    inter_node_bandwidth: str = ""


class EngineChoice(NamedTuple):
    """An engine, and the calibration that predicts its times.

    A calibration has time models that were fitted to measurements. Datasheet bounds are the times
    at the GPU's peak rates, which no engine reaches.

    Attributes:
        engine: `vllm`, `sglang`, `trtllm`, `llama.cpp` or `none`. With `none`, only the cache's
            content is counted, without an engine's memory rules, and times are datasheet bounds.
        calibration: Name or file of a calibration. '' means the engine's own, `datasheet` means
            datasheet bounds.
    """

    engine: str
    calibration: str


class DeploymentOptions(PlacementOptions, frozen=True):
    """How a model is deployed, and how its times are predicted.

    A calibration has time models that were fitted to measurements. Datasheet bounds are the times
    at the GPU's peak rates, which no engine reaches.

    Attributes:
        engine: `vllm`, `sglang`, `trtllm`, `llama.cpp` or `none` (without an engine's rules).
        engine_version: Version of the engine; '' for the latest.
        bounds: Whether times are datasheet bounds instead of predictions.
        mfu: Share of the GPU's compute peak that matrix products reach, for bounds with this share;
            0 for all of it.
        calibration: Name or file of a calibration; '' for the engine's own.
        calibration_from: GPU model whose calibration is scaled to this GPU; '' for none.
        mixed: Has no effect. Old scripts may use it.
        stack: Former option for engine or calibration; see `engine_choice`.
        mla_form: Form of latent attention (MLA): absorbed, expanded, or auto for the form with
            fewer FLOPs.
    """

    engine: EngineName = "vllm"
    engine_version: str = ""
    bounds: bool = False
    mfu: float = 0.0
    calibration: str = ""
    calibration_from: str = ""
    mixed: bool = False
    stack: str = ""
    mla_form: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.choice

    @property
    def choice(self) -> EngineChoice:
        """Return the engine, and the calibration (fitted time models) that predicts its times.

        They follow from the options `engine`, `calibration`, `bounds`, `mfu` and `stack`.
        """
        return engine_choice(
            self.engine, self.calibration, self.bounds or self.mfu > 0, self.stack
        )


def engine_choice(engine: str, calibration: str, bounds: bool, stack: str) -> EngineChoice:
    """Return the engine and the calibration that options name.

    A calibration has time models that were fitted to measurements. Datasheet bounds are the times
    at the GPU's peak rates.

    Args:
        engine: Value of `--engine`.
        calibration: Value of `--calibration`: a name or a file; '' for the engine's own.
        bounds: Whether `--bounds` is given, so that times are datasheet bounds.
        stack: Value of the former option `--stack`; '' if not given. `datasheet` means `--bounds`,
            an engine's name means `--engine`, any other value means `--calibration`.

    Raises:
        UserError: `--bounds` and `--calibration` are both given.
    """
    if bounds and calibration:
        raise UserError("--bounds and --calibration cannot be combined", "Remove one of them")
    calibration = DATASHEET if bounds else calibration
    if stack in ENGINE_NAMES:
        return EngineChoice(stack, calibration)
    return EngineChoice(engine, stack or calibration)
