"""Options that several commands share: data types, parallelism, GPUs and engines."""

from typing import Annotated, NamedTuple

from kvcalc.errors import UserError
from kvcalc.question.options import Question

ENGINE_NAMES = ("vllm", "sglang", "trtllm", "llama.cpp", "none")
DATASHEET = "datasheet"  # no calibration: times are datasheet bounds
AUTO = 0  # `--tp auto`


def gpu_count(text: str, name: str, low: int = 1) -> int:
    """Return a number of GPUs of at least `low`."""
    if not (text.isascii() and text.isdigit() and low <= int(text[:10]) < 10**9):
        hint = f"Give a whole number from {low} up"
        raise UserError(f"{name} {text!r} is not a number of GPUs", hint)
    return int(text)


def _tp(text: str, name: str) -> int:
    return AUTO if text.lower() == "auto" else gpu_count(text, name)


def lower(text: str, name: str) -> str:
    """Return a name in lower case."""
    return text.strip().lower()


class ShardingOptions(Question, frozen=True):
    """How a model is stored and split over GPUs. Data types and tensor parallelism are lists."""

    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str = ""
    set_: list[str] = []
    tp: Annotated[int, _tp] = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    enable_expert_parallel: bool = False
    dcp: int = 1


class PlacementOptions(ShardingOptions, frozen=True):
    """How a model is placed on GPUs."""

    gpu: str = "h100"
    memory: str = ""
    nodes: int = 0
    inter_node_bandwidth: str = ""


class EngineChoice(NamedTuple):
    """An engine, and the calibration of its times.

    Attributes:
        engine: One of ENGINE_NAMES. `none` counts content only and answers with bounds.
        calibration: A name or a file. '' means the engine's own calibration, `datasheet` means
            bounds.
    """

    engine: str
    calibration: str


class DeploymentOptions(PlacementOptions, frozen=True):
    """How a model is deployed, and how its times are predicted."""

    engine: Annotated[str, lower] = "vllm"
    engine_version: str = ""
    bounds: bool = False
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
        """Return the engine, and the calibration of its times."""
        return engine_choice(self.engine, self.calibration, self.bounds, self.stack)


def engine_choice(engine: str, calibration: str, bounds: bool, stack: str) -> EngineChoice:
    """Return the engine and the calibration that options name.

    Args:
        stack: Value of the former option `--stack`. `datasheet` means `--bounds`, an engine's name
            means `--engine`, any other value means `--calibration`.

    Raises:
        UserError: The engine is unknown, or the options exclude each other.
    """
    if bounds and calibration:
        raise UserError("--bounds and --calibration cannot be combined", "Remove one of them")
    calibration = DATASHEET if bounds else calibration
    if stack in ENGINE_NAMES:
        return EngineChoice(stack, calibration)
    return EngineChoice(engine, stack or calibration)
