"""Look up engines by name, and select the engine and calibration from a command's options."""

from collections.abc import Iterable
from itertools import product
from typing import NamedTuple

from kvcalc.errors import UserError, nearest

ENGINE_NAMES = ("vllm", "sglang", "trtllm", "llama.cpp", "none")
DATASHEET = "datasheet"  # no calibration: times are datasheet bounds


class EngineChoice(NamedTuple):
    """An engine, and the calibration of its times.

    Attributes:
        engine: One of ENGINE_NAMES. `none` counts content only and answers with bounds.
        calibration: A name or a file. '' is the engine's own, `datasheet` is none.
    """

    engine: str
    calibration: str


def engine_choices(engine: str = "vllm", calibration: str = "", bounds: bool = False, stack: str = "") -> list[EngineChoice]:
    """Return each engine with each calibration that the options list.

    Args:
        engine: `--engine`, a list.
        calibration: `--calibration`, a list.
        bounds: `--bounds`.
        stack: The former `--stack`, a list. `datasheet` means `--bounds`, an engine's name means
            `--engine`, anything else means `--calibration`.

    Raises:
        UserError: The engine is unknown, or the options exclude each other.
    """
    if bounds and calibration:
        hint = "Leave one of them out"
        raise UserError("--bounds and --calibration exclude each other", hint=hint)
    engines = [_known_engine(word) for word in _words(engine, "engine")]
    calibrations = [DATASHEET] if bounds else _words(calibration, "calibration")
    choices = []
    for name, own, word in product(engines, calibrations, _words(stack, "stack")):
        if word in ENGINE_NAMES:
            choices.append(EngineChoice(word, own))
        else:
            choices.append(EngineChoice(name, word or own))
    return list(dict.fromkeys(choices))


def _known_engine(word: str) -> str:
    name = word.lower()
    if name not in ENGINE_NAMES:
        raise UserError(f"unknown engine {word!r}", hint=nearest(word, ENGINE_NAMES))
    return name


def _words(text: str, option: str) -> Iterable[str]:
    """Return the words of a list. An empty text is one empty word."""
    words = [word.strip() for word in text.split(",")]
    if len(words) > 1 and not all(words):
        raise UserError(f"{option} {text!r} has an empty place")
    return words
