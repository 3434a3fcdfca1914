"""Parse options as users type them: `32k` tokens, `40GiB`. Each field's annotation has a parser."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from kvcalc.errors import UserError, nearest
from kvcalc.units import parse_bytes, parse_tokens, plain

LEAST = 1 << 20  # bytes of host memory; a smaller number is probably GiB without the unit

Spec = TypeVar("Spec", bound=msgspec.Struct)


def _tokens_or_none(text: str, what: str) -> int:
    return parse_tokens(text, what, least=0)


def _bytes_or_none(text: str, what: str) -> int:
    return 0 if text.strip() == "0" else parse_bytes(text, what)


def _host_bytes(text: str, what: str) -> int:
    size = _bytes_or_none(text, what)
    if 0 < size < LEAST and text.strip().isdigit():
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


def from_words(spec: type[Spec], given: Mapping[str, Any]) -> Spec:
    """Return `spec` built from the given values. None and '' keep the default.

    The parser of a field is the callable in its annotation: (text, option name) → value. Numbers
    are parsed in the same way as texts.

    Raises:
        UserError: The parser refuses the text, or the value has another type than the field.
    """
    wanted = {name: value for name, value in given.items() if value is not None and not (isinstance(value, str) and not value)}
    return spec(**{f.name: _read(f, wanted[f.name]) for f in msgspec.structs.fields(spec) if f.name in wanted})


def _read(field: Any, value: Any) -> Any:
    read = next((m for m in getattr(field.type, "__metadata__", ()) if callable(m)), None)
    if not isinstance(value, str | msgspec.Struct) and getattr(value, "ndim", 1) != 0 and hasattr(value, "__iter__"):
        raise UserError(f"{spelled(field.name)} {value!r:.80} is a list", hint="Ask once for each of its values")
    value = plain(value)
    if read:
        return value if isinstance(value, msgspec.Struct) else read(str(value), spelled(field.name))
    try:
        return msgspec.convert(value, field.type)
    except msgspec.ValidationError as error:
        raise UserError(f"{spelled(field.name)} {value!r}: {error}") from None


def spelled(name: str) -> str:
    """Return an option's name as messages write it."""
    return name.replace("_", "-")


def check_known(given: Iterable[str], *specs: type[msgspec.Struct], also: Iterable[str] = ()) -> None:
    """Raise UserError, with the nearest names, if a name is not a field of `specs` nor in `also`."""
    known = [*also, *(name for spec in specs for name in spec.__struct_fields__)]
    for name in given:
        if name not in known:
            raise UserError(f"unknown option {name!r}", hint=nearest(name, known))
