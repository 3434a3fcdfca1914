"""Declare options once, and read their values from the command line or from Python.

A question is a frozen struct whose fields are options. The parameters of a command's function are
options too. The annotation of an option contains the function that reads its text:

    think_time: Annotated[float, seconds_or_none] = 0.0

`options.json` has the help, the names and the limits of each option. The command line, help,
completion, suggestions, the Python API and the reference page use these declarations. The module
imports no slow modules, because `--help` imports it.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin

import msgspec

from kvcalc.errors import UserError, nearest
from kvcalc.units import check_whole, parse_bytes, parse_seconds, parse_tokens, plain

PANELS = (
    "Common options",
    "Workload",
    "Targets",
    "Search space",
    "Server",
    "Engine",
    "Memory",
    "Parallelism",
    "Data types",
    "Speculative decoding",
    "Model",
    "Model dimensions",
    "Measurement",
    "Allocator studies",
    "Overrides",
    "Other options",
    "Output",
)
MAX_QUESTIONS = 250_000  # combinations of lists
MIN_HOST_BYTES = 1 << 20  # a smaller number is probably GiB without the unit
Tokens = Annotated[int, parse_tokens]


class Option(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry of `options.json` about an option or an argument.

    Attributes:
        help: One phrase of at most 70 characters that needs no other line to be understood.
        names: Names, separated by blanks, the longest first. If empty, the name follows from the
            field. `--on/--off` is a flag that can be switched off. `/--off` can only switch off.
        takes: Placeholder of the value in help. If empty, it follows from the type.
        panel: The group in `--help-all`, one of PANELS.
        is_common: Whether `--help` shows the option.
        choices: All valid values.
        words: Values that completion offers, or the name of a list that completion knows.
        called: Names that other tools give the option, without dashes, for suggestions.
        list_order: Above 0, a list makes one question for each item. With several lists, the list
            with the smallest number changes fastest.
        min, max: Smallest and largest number, if there is a `max`.
        is_output: Whether the value is a file to write.
        is_hidden: Whether help and completion leave the option out.
    """

    help: str = ""
    names: str = ""
    takes: str = ""
    panel: str = "Other options"
    is_common: bool = False
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] | str = ()
    called: str = ""
    list_order: int = 0
    min: int | float = 0
    max: int = 0
    is_output: bool = False
    is_hidden: bool = False


class Question(msgspec.Struct, frozen=True):
    """Base class of questions: options that belong together. Raises UserError for a value outside
    its limits."""

    def __post_init__(self) -> None:
        for parameter in parameters_in(type(self)):
            if parameter.option.max or parameter.option.choices:
                parameter.check(getattr(self, parameter.name))


class Parameter(NamedTuple):
    """An option or argument of a question or a command.

    Attributes:
        parse: Function of a text and the option's name that returns the value or raises UserError.
            Without it, the text is converted to the type of the field.
        is_argument: Whether it is a word without a name, such as MODEL.
    """

    name: str
    type: Any
    default: Any
    option: Option
    parse: Callable[[str, str], Any] | None = None
    is_argument: bool = False

    @property
    def is_required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def is_flag(self) -> bool:
        return self.type is bool

    @property
    def is_list(self) -> bool:
        """Return whether the option can be repeated, or the argument takes several words."""
        return get_origin(self.type) is list

    @property
    def is_tuple(self) -> bool:
        """Return whether a comma-separated list is one value."""
        return get_origin(self.type) is tuple

    @property
    def is_text(self) -> bool:
        """Return whether the command line leaves the value as a text."""
        return bool(self.parse or self.option.list_order or self.is_tuple)

    @property
    def declarations(self) -> list[str]:
        """Return the names as the parser takes them: `--on/--off` is one declaration."""
        usual = "--" + self.name.strip("_").replace("_", "-")
        names = [] if self.is_argument else (self.option.names or usual).split()
        return [f" {name}" if name.startswith("/") else name for name in names]

    @property
    def names(self) -> list[str]:
        names = [name for names in self.declarations for name in names.split("/")]
        return [name.strip() for name in names if name.strip()]

    @property
    def placeholder(self) -> str:
        """Return the placeholder of the value in help, such as TOKENS or N."""
        kind = (get_args(self.type) or (self.type,))[0]
        numbers = {int: "N", float: "X"}
        return self.option.takes or numbers.get(kind, "WORD")

    def check(self, value: Any) -> None:
        """Raise UserError if the value is outside the option's limits."""
        if self.is_tuple and isinstance(value, tuple):
            for item in value:
                self.check(item)
            return
        option, text = self.option, f"{spelled(self.name)} {value!r}"
        if value == self.default:
            return
        if option.choices and value not in option.choices:
            raise UserError(f"unknown {text}", nearest(str(value), option.choices))
        is_int = self.type in (int, int | None)
        is_number = isinstance(value, int if is_int else int | float)
        is_number = is_number and not isinstance(value, bool)
        if option.max and not (is_number and option.min <= value <= option.max):
            number = "whole number" if is_int else "number"
            raise UserError(f"{text} is not a {number} from {option.min} to {option.max:,}")

    def is_default(self, value: Any) -> bool:
        """Return whether a value leaves the option at its default.

        The values are None, and "" if the default is empty (0, "" or None).
        """
        return value is None or (isinstance(value, str) and not value and not self.default)

    def read(self, value: Any) -> Any:
        """Return the value of an option from a text or a Python value.

        Raises:
            UserError: The value has an invalid form, or is a list although the option takes one
                value.
        """
        if self.is_tuple:
            return tuple(map(self.read_item, items_of(value, spelled(self.name))))
        if self.is_list:
            return list(value)
        if hasattr(plain(value), "__iter__") and not isinstance(value, str):
            hint = "Call once for each value"
            raise UserError(f"{spelled(self.name)} {value!r:.80} is a list", hint)
        return self.read_item(value)

    def read_item(self, value: Any) -> Any:
        """Return the value of one item of a list, in the type of the option."""
        name, value = spelled(self.name), plain(value)
        if isinstance(value, msgspec.Struct):
            return value
        if self.parse:
            return self.parse(str(value), name)
        kind = get_args(self.type)[0] if self.is_tuple else self.type
        try:
            return msgspec.convert(value, kind, strict=False)
        except msgspec.ValidationError as error:
            if kind in (int, int | None):
                raise UserError(f"{name} {value!r} is not a whole number") from None
            if kind in (float, float | None):
                raise UserError(f"{name} {value!r} is not a number") from None
            raise UserError(f"{name} {value!r}: {error}") from None


@cache
def _entries() -> dict[str, dict[str, Any]]:
    entries = Path(__file__).with_name("options.json").read_bytes()
    return msgspec.json.decode(entries, type=dict[str, dict[str, Any]])


def option_of(owner: Any, name: str) -> Option:
    """Return the entry of an option.

    The entry `NAME` applies to all owners. The entry `OWNER.NAME` replaces parts of it for one
    question or one module of a command.
    """
    if isinstance(owner, type):
        owners = [base.__name__ for base in reversed(owner.__mro__)]
    else:
        owners = [owner.__module__.rpartition(".")[2]]
    keys = [name, *(f"{owner_name}.{name}" for owner_name in owners)]
    merged: dict[str, Any] = {}
    for key in keys:
        merged |= _entries().get(key, {})
    return msgspec.convert(merged, Option)


@cache
def parameters_in(run: Callable[..., Any]) -> list[Parameter]:
    """Return the options of a command or a question. A question is replaced by its options.

    Parameters of a command that are not keyword-only are arguments.
    """
    parameters: list[Parameter] = []
    for parameter in inspect.signature(run).parameters.values():
        annotation, default = parameter.annotation, parameter.default
        if spec := question_in(annotation):
            parameters += parameters_in(spec)
        else:
            option = option_of(run, parameter.name)
            is_annotated = get_origin(annotation) is Annotated
            kind, parse = get_args(annotation) if is_annotated else (annotation, None)
            if get_origin(kind) is list and default is not inspect.Parameter.empty:
                default = []  # a struct shows its factory
            is_argument = (
                not isinstance(run, type) and parameter.kind is not parameter.KEYWORD_ONLY
            )
            parameters.append(
                Parameter(parameter.name, kind, default, option, parse, is_argument)
            )
    return parameters


def question_in(annotation: Any) -> type[Question] | None:
    """Return the question class in an annotation: `Q`, `list[Q]` or `Annotated[dict, Q]`."""
    spec = get_args(annotation)[-1] if get_args(annotation) else annotation
    return spec if isinstance(spec, type) and issubclass(spec, Question) else None


def arguments_for(run: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of `run` from the typed values of its options.

    A parameter `Q` is one question, `list[Q]` has a question for each combination of lists, and
    `Annotated[dict, Q]` has the values as they were typed.
    """
    arguments = {}
    own = {parameter.name: parameter for parameter in parameters_in(run)}
    for name, parameter in inspect.signature(run).parameters.items():
        kind = parameter.annotation
        if spec := question_in(kind):
            typed = {p.name: values[p.name] for p in parameters_in(spec) if p.name in values}
            if kind is spec:
                arguments[name] = read_question(spec, typed)
            elif get_origin(kind) is list:
                arguments[name] = read_questions(spec, typed)
            else:
                arguments[name] = typed
        elif name in values:
            value = values[name]
            arguments[name] = own[name].read(value) if own[name].is_text else value
            own[name].check(arguments[name])
    return arguments


Spec = TypeVar("Spec", bound=Question)


def read_question(spec: type[Spec], values: Mapping[str, Any]) -> Spec:
    """Return a question from values by option name. The value None keeps the default.

    Raises:
        UserError: A value is invalid, or is a list.
    """
    typed = _typed_parameters(spec, values)
    return spec(**{p.name: p.read(values[p.name]) for p in typed})


def read_questions(spec: type[Spec], values: Mapping[str, Any]) -> list[Spec]:
    """Return a question for each combination of the lists, `list_order` 1 fastest.

    Example: context 1k,2k and batch_size 1,8 give (1024, 1), (2048, 1), (1024, 8), (2048, 8).
    """
    lists = {}
    for p in sorted(_typed_parameters(spec, values), key=lambda p: -p.option.list_order):
        value = values[p.name]
        if p.option.list_order and not p.is_tuple:
            lists[p.name] = [*map(p.read_item, items_of(value, spelled(p.name)))]
        else:
            lists[p.name] = [p.read(value)]
    check_number("rows", MAX_QUESTIONS, *lists.values())
    return [spec(**dict(zip(lists, point, strict=True))) for point in product(*lists.values())]


def _typed_parameters(spec: type[Question], values: Mapping[str, Any]) -> list[Parameter]:
    return [p for p in parameters_in(spec) if not p.is_default(values.get(p.name))]


def items_of(value: Any, name: str = "list") -> list[Any]:
    """Return the items of a comma-separated text or a Python list. A number is one item.

    Raises:
        UserError: The list is empty, has an empty item, or is one number with thousands separators
            such as 8,000.
    """
    if isinstance(value, str):
        value = [word.strip() for word in value.split(",")]
        if len(value) > 1 and not all(value):
            raise UserError(f"{name} {','.join(value)!r} has an empty item")
    value = plain(value)
    items = list(value) if hasattr(value, "__iter__") else [value]
    if not items:
        raise UserError(f"{name}: the list is empty", "Write 4096, 4k or 1k,8k")
    if str(items[0]).isdigit():
        check_whole([str(item) for item in items], name)
    return items


def check_number(name: str, limit: int, *lists: Sequence[Any]) -> None:
    """Raise UserError if lists of options have more than `limit` combinations."""
    combinations = prod(map(len, lists))
    if combinations > limit:
        raise UserError(f"{combinations:,} {name}; the maximum is {limit:,}", "Shorten a list")


def check_known(names: Iterable[str], names_of_options: Iterable[str]) -> None:
    """Raise UserError, with the nearest names, if a name is not a known option."""
    options = list(names_of_options)
    for name in names:
        if name not in options:
            raise UserError(f"unknown option {name!r}", nearest(name, options))


def spelled(name: str) -> str:
    """Return an option's name as it is written in messages."""
    return name.strip("_").replace("_", "-")


def tokens_or_none(text: str, name: str) -> int:
    """Return a token count of at least 0 from a text."""
    return parse_tokens(text, name, minimum=0)


def bytes_or_none(text: str, name: str) -> int:
    """Return a number of bytes of at least 0 from a text."""
    return 0 if text.strip() == "0" else parse_bytes(text, name)


def host_bytes(text: str, name: str) -> int:
    """Return a number of bytes in host memory from a text. Raises UserError for a small number
    without a unit."""
    size = bytes_or_none(text, name)
    if 0 < size < MIN_HOST_BYTES and text.strip().isdigit():
        raise UserError(f"{name} {text!r} is {size:,} bytes", f"Write {text.strip()}GiB")
    return size


def seconds_or_none(text: str, name: str) -> float:
    """Return seconds from a text such as `50ms`; 0 is allowed and means no time."""
    return 0.0 if text.strip() in ("0", "0.0") else parse_seconds(text, name)


def memory_share(text: str, name: str) -> float:
    """Return a share of the memory from a text. Raises UserError unless it is above 0."""
    value = number_or_nan(text)
    if not 0 < value <= 1:
        raise UserError(f"{name} {text} is not above 0 and at most 1", "Write 0.9 for 90%")
    return value


def parse_number(text: str, name: str) -> float:
    """Return a finite number of at least 0 from a text. Raises UserError if the text is not such a
    number."""
    value = number_or_nan(text)
    if not 0 <= value < 1e15:
        raise UserError(f"{name} {text!r} is not a number from 0 up")
    return value


def number_or_nan(text: str) -> float:
    """Return the number in a text; NaN if there is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
