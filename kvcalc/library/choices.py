"""Look up engines by name, and select the engine and calibration from a command's options.

Parse options as users type them: `32k` tokens, `40GiB`. Each field's annotation has a parser.
"""

from collections.abc import Iterable, Mapping
from itertools import product
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from kvcalc.errors import UserError, nearest
from kvcalc.units import check_whole, parse_bytes, parse_tokens, plain

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


def engine_choices(
    engine: str = "vllm", calibration: str = "", bounds: bool = False, stack: str = ""
) -> list[EngineChoice]:
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
        raise UserError(
            "--bounds and --calibration cannot be combined", hint="Remove one of them"
        )
    calibrations = [DATASHEET] if bounds else listed(calibration, "calibration")
    choices = []
    for word, own, alias in product(
        listed(engine, "engine"), calibrations, listed(stack, "stack")
    ):
        name = word.lower()
        if name not in ENGINE_NAMES:
            raise UserError(f"unknown engine {word!r}", hint=nearest(word, ENGINE_NAMES))
        is_engine = alias in ENGINE_NAMES
        choices.append(
            EngineChoice(alias, own) if is_engine else EngineChoice(name, alias or own)
        )
    return list(dict.fromkeys(choices))


def listed(text: str, what: str = "list") -> list[str]:
    """Return the items of a comma-separated list. An empty text is one empty item.

    Raises:
        UserError: A longer list has an empty item, or 8,000 looks like a list.
    """
    words = [word.strip() for word in text.split(",")]
    if len(words) > 1:
        if not all(words):
            raise UserError(f"{what} {text!r} has an empty item")
        if words[0].isdigit():
            check_whole(words, what)
    return words


MIN_HOST_BYTES = 1 << 20  # a smaller number is probably GiB without the unit

Spec = TypeVar("Spec", bound=msgspec.Struct)


def _tokens_or_none(text: str, what: str) -> int:
    return parse_tokens(text, what, least=0)


def _bytes_or_none(text: str, what: str) -> int:
    return 0 if text.strip() == "0" else parse_bytes(text, what)


def _host_bytes(text: str, what: str) -> int:
    size = _bytes_or_none(text, what)
    if 0 < size < MIN_HOST_BYTES and text.strip().isdigit():
        raise UserError(f"{what} {text!r} is {size:,} bytes", hint=f"Write {text.strip()}GiB")
    return size


def share(text: str, what: str) -> float:
    """Return a share of the memory; an explicit 0 is refused."""
    try:
        value = float(text)
    except ValueError:
        raise UserError(f"{what} {text!r} is not a number") from None
    if not value:
        raise UserError(f"{what} 0 leaves no memory")
    return value


def tokens_called(what: str) -> Any:
    """Return a token parser whose messages use another name than the option's."""
    return lambda text, _: parse_tokens(text, what)


Tokens = Annotated[int, parse_tokens]  # from 1 up: an explicit 0 is refused
TokensOrNone = Annotated[int, _tokens_or_none]  # 0 is a value
HostBytes = Annotated[int, _host_bytes]  # a small number without a unit is refused
BytesInstead = Annotated[int | None, _bytes_or_none]  # replaces the computed value


def from_words(spec: type[Spec], values: Mapping[str, Any]) -> Spec:
    """Return `spec` built from values of its fields. None and '' keep the default.

    The parser of a field is the callable in its annotation: (text, option name) → value. Numbers
    are parsed in the same way as texts.

    Raises:
        UserError: The parser refuses the text, or the value has another type than the field.
    """
    arguments = {}
    for field in msgspec.structs.fields(spec):
        value = values.get(field.name)
        if value is not None and not (isinstance(value, str) and not value):
            arguments[field.name] = _parse(field, value)
    return spec(**arguments)


def _parse(field: Any, value: Any) -> Any:
    name = spelled(field.name)
    is_one = isinstance(value, str | msgspec.Struct) or getattr(value, "ndim", 1) == 0
    if not is_one and hasattr(value, "__iter__"):
        raise UserError(f"{name} {value!r:.80} is a list", hint="Call once for each value")
    value = plain(value)
    for parser in getattr(field.type, "__metadata__", ()):
        if callable(parser):
            return value if isinstance(value, msgspec.Struct) else parser(str(value), name)
    try:
        return msgspec.convert(value, field.type)
    except msgspec.ValidationError as error:
        raise UserError(f"{name} {value!r}: {error}") from None


def spelled(name: str) -> str:
    """Return an option's name as messages write it."""
    return name.replace("_", "-")


def check_known(
    names: Iterable[str], *specs: type[msgspec.Struct], also: Iterable[str] = ()
) -> None:
    """Raise UserError, with the nearest names, if a name is not a field of `specs` nor in
    `also`."""
    known = [*also, *(name for spec in specs for name in spec.__struct_fields__)]
    for name in names:
        if name not in known:
            raise UserError(f"unknown option {name!r}", hint=nearest(name, known))
