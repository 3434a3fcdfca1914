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
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_origin

import msgspec

from kvcalc.errors import UserError, nearest
from kvcalc.units import parse_bytes, parse_seconds, parse_tokens, plain

PANELS = """\
Common options
Workload
Targets
Search space
Server
Engine
Memory
Parallelism
Data types
Speculative decoding
Model
Model dimensions
Measurement
Allocator studies
Overrides
Other options
Output
""".splitlines()
MAX_QUESTIONS = 250_000  # combinations of lists
MIN_HOST_BYTES = 1 << 20  # a smaller number is probably GiB without the unit
Tokens = Annotated[int, parse_tokens]


# `prices_of` reads the texts, because only it knows the GPUs
Prices = Annotated[tuple[str, ...], lambda text, name: text]


class Option(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one option or argument appears on the command line: an entry of `options.json`.

    Attributes:
        help: One phrase of at most 70 characters that needs no other line to be understood.
        names: Names, separated by blanks, the longest first. If empty, the name follows from the
            field. `--on/--off` is a flag that can be switched off. `/--off` can only switch off.
        takes: Placeholder of the value in help, such as TOKENS. If empty, it follows from the type.
        panel: Heading of the option in `--help-all`, such as "Memory".
        is_common: Whether `--help` shows the option.
        choices: All valid values; () if values are not limited to a list.
        hints: What to type instead of an invalid value, by value. Keys are in lower case.
        words: Values that shell completion offers, or the name of a list that completion fills in,
            such as "models".
        called: Names that other tools give the option, without dashes and separated by blanks, for
            suggestions.
        list_order: 0 if the option takes no list. Otherwise each item of a list makes a separate
            question. With several lists, the list with the smallest number changes fastest.
        min, max: Smallest and largest number. If `max` is 0, there are no limits.
        is_output: Whether the value is a file to write.
        is_hidden: Whether help and completion leave the option out.
    """

    help: str = ""
    names: str = ""
    takes: str = ""
    panel: str = "Other options"
    is_common: bool = False
    choices: tuple[str, ...] = ()
    hints: dict[str, str] = {}
    words: tuple[str, ...] | str = ()
    called: str = ""
    list_order: int = 0
    min: int | float = 0
    max: int = 0
    is_output: bool = False
    is_hidden: bool = False


class Question(msgspec.Struct, frozen=True):
    """Base class of groups of options that belong together, such as the options of `latency`.

    Each field of a subclass is one option. The constructor raises UserError if a value is outside
    the option's limits.
    """

    def __post_init__(self) -> None:
        for parameter in parameters_in(type(self)):
            if parameter.option.max or parameter.option.choices:
                parameter.check(getattr(self, parameter.name))


class Parameter(NamedTuple):
    """An option or argument of a command or of a question (a class with a group of options).

    Attributes:
        name: Name of the field or of the function's parameter.
        type: Type of the value.
        default: Default value; `inspect.Parameter.empty` if a value is required.
        option: Help text, names and limits of the option, from `options.json`.
        parse: Function of a text and the option's name that returns the value or raises UserError.
            If it is None, the text is converted to `type`.
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
        """Return whether the user must give a value."""
        return self.default is inspect.Parameter.empty

    @property
    def is_flag(self) -> bool:
        """Return whether the option takes no value, such as `--wide`."""
        return self.type is bool

    @property
    def is_list(self) -> bool:
        """Return whether the option can be repeated, or the argument takes several words."""
        return get_origin(self.type) is list

    @property
    def is_tuple(self) -> bool:
        """Return whether the value is a tuple, which the user types as a comma-separated list."""
        return get_origin(self.type) is tuple

    @property
    def is_text(self) -> bool:
        """Return whether the command line leaves the value as text, which `read` converts later.

        Otherwise typer (the command-line parser) converts the value.
        """
        return bool(self.parse or self.option.list_order or self.is_tuple)

    @property
    def declarations(self) -> list[str]:
        """Return the option's names in the form that typer takes; empty for an argument.

        Example: ["--tensor-parallel-size", "--tp"]. `--on/--off` is one item.
        """
        if self.is_argument:
            return []
        names = self.option.names or f"--{spelled(self.name)}"
        return [f" {name}" if name.startswith("/") else name for name in names.split()]

    @property
    def names(self) -> list[str]:
        """Return the option's names, such as `--wide`. `--on/--off` gives two names."""
        return " ".join(self.declarations).replace("/", " ").split()

    @property
    def placeholder(self) -> str:
        """Return the placeholder of the value in help, such as TOKENS or N."""
        kind = (get_args(self.type) or (self.type,))[0]
        return self.option.takes or {int: "N", float: "X"}.get(kind, "WORD")

    def check(self, value: Any) -> None:
        """Check that a value is one of the option's choices and within its limits.

        Args:
            value: The value, already in the option's type. The default is always valid.

        Raises:
            UserError: The value is invalid.
        """
        if self.is_tuple and isinstance(value, tuple):
            for item in value:
                self.check(item)
            return
        option, text = self.option, f"{spelled(self.name)} {value!r}"
        if value == self.default:
            return
        if option.choices and value not in option.choices:
            hint = option.hints.get(str(value).lower())
            raise UserError(f"unknown {text}", hint or nearest(str(value), option.choices))
        is_int = self.type in (int, int | None)
        kind = int if is_int else int | float
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if option.max and not (is_number and option.min <= value <= option.max):
            number = "whole number" if is_int else "number"
            raise UserError(f"{text} is not a {number} from {option.min} to {option.max:,}")

    def read(self, value: Any) -> Any:
        """Return a given value in the type of the option.

        Args:
            value: A text as on the command line, or a Python value. For a tuple, a comma-separated
                text or a list.

        Raises:
            UserError: The value has an invalid form, or is a list although the option takes one
                value.
        """
        if self.is_tuple:
            return tuple(map(self.read_item, items_of(value, spelled(self.name))))
        if self.is_list:
            return list(value)
        if hasattr(plain(value), "__iter__") and not isinstance(value, str):
            raise UserError(
                f"{spelled(self.name)} {value!r:.80} is a list", "Call once for each value"
            )
        return self.read_item(value)

    def read_item(self, value: Any) -> Any:
        """Return one value in the type of the option, or of its items if the option takes a list.

        Args:
            value: A text as on the command line, or a Python value. It is a single item.

        Raises:
            UserError: The value has an invalid form.
        """
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
                hint = "Write 0.8 for 80%" if "%" in str(value) else ""
                raise UserError(f"{name} {value!r} is not a number", hint) from None
            raise UserError(f"{name} {value!r}: {error}") from None


@cache
def _entries() -> dict[str, dict[str, Any]]:
    return msgspec.json.decode(
        Path(__file__).with_name("options.json").read_bytes(), type=dict[str, dict[str, Any]]
    )


def option_of(owner: Any, name: str) -> Option:
    """Return how an option appears on the command line: its entry of `options.json`.

    The entry `NAME` is for all questions and commands. An entry `OWNER.NAME` replaces those values
    that it states.

    Args:
        owner: Question class, or function of a command. OWNER is the name of the class or of one of
            its bases, or the name of the function's module.
        name: Name of the option.
    """
    owners = [owner.__module__.rpartition(".")[2]]
    if isinstance(owner, type):
        owners = [base.__name__ for base in reversed(owner.__mro__)]
    merged: dict[str, Any] = {}
    for key in (name, *(f"{owner_name}.{name}" for owner_name in owners)):
        merged |= _entries().get(key, {})
    return msgspec.convert(merged, Option)


@cache
def parameters_in(run: Callable[..., Any]) -> list[Parameter]:
    """Return the options and arguments of a command's function, or the options of a question class.

    A question is a class with a group of options. If a parameter of the function is a question, the
    list has the question's options instead. Parameters that are not keyword-only are arguments.

    Args:
        run: The function or the class.
    """
    parameters = []
    for parameter in inspect.signature(run).parameters.values():
        annotation, default = parameter.annotation, parameter.default
        if spec := question_in(annotation):
            parameters += parameters_in(spec)
        else:
            is_annotated = get_origin(annotation) is Annotated
            kind, parse = get_args(annotation) if is_annotated else (annotation, None)
            if get_origin(kind) is list and default is not parameter.empty:
                default = []  # a struct shows its factory
            is_argument = (
                not isinstance(run, type) and parameter.kind is not parameter.KEYWORD_ONLY
            )
            parameters.append(
                Parameter(
                    parameter.name,
                    kind,
                    default,
                    option_of(run, parameter.name),
                    parse,
                    is_argument,
                )
            )
    return parameters


def question_in(annotation: Any) -> type[Question] | None:
    """Return the question class (a group of options) in a type annotation; None if there is none.

    For a question class Q, annotations are `Q`, `list[Q]` or `Annotated[dict, Q]`.

    Args:
        annotation: Type annotation of a function's parameter.
    """
    spec = get_args(annotation)[-1] if get_args(annotation) else annotation
    return spec if isinstance(spec, type) and issubclass(spec, Question) else None


def arguments_for(run: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments with which to call a command's function.

    A question is a class with a group of options. If a parameter is annotated with a question class
    Q, the argument depends on the annotation:

    - `Q`: one question
    - `list[Q]`: a question for each combination of the lists in the values
    - `Annotated[dict, Q]`: the given values of the question's options, by name

    Args:
        run: Function of the command.
        values: Given values of the options, by name; texts of the user, or Python values.

    Raises:
        UserError: A value is invalid.
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
            option, value = own[name], values[name]
            arguments[name] = option.read(value) if option.is_text else value
            option.check(arguments[name])
    return arguments


Spec = TypeVar("Spec", bound=Question)


def read_question(spec: type[Spec], values: Mapping[str, Any]) -> Spec:
    """Return one question (a group of options) with the given values, and defaults for the rest.

    The value None keeps an option's default.

    Args:
        spec: Class of the question.
        values: Texts or Python values of the options, by name.

    Raises:
        UserError: A value is invalid, or is a list.
    """
    return spec(**{p.name: p.read(values[p.name]) for p in _typed_parameters(spec, values)})


def read_questions(spec: type[Spec], values: Mapping[str, Any]) -> list[Spec]:
    """Return a question (group of options) for each combination of the lists in the values.

    The option with `list_order` 1 changes fastest. Example: context 1k,2k and batch_size 1,8 give
    (1024, 1), (2048, 1), (1024, 8), (2048, 8).

    Args:
        spec: Class of the questions.
        values: Texts or Python values of the options, by name.

    Raises:
        UserError: A value is invalid, or there are more than 250,000 combinations.
    """
    lists = {}
    for p in sorted(_typed_parameters(spec, values), key=lambda p: -p.option.list_order):
        value = values[p.name]
        if p.option.list_order and not p.is_tuple:
            lists[p.name] = [*map(p.read_item, items_of(value, spelled(p.name)))]
        else:
            lists[p.name] = [p.read(value)]
    check_number("rows", MAX_QUESTIONS, *lists.values())
    return [spec(**dict(zip(lists, point))) for point in product(*lists.values())]


def _typed_parameters(spec: type[Question], values: Mapping[str, Any]) -> list[Parameter]:
    """Return the parameters with a value. The text "" is none if the default is 0, "" or None."""
    return [
        parameter
        for parameter in parameters_in(spec)
        if (value := values.get(parameter.name)) is not None
        and (not isinstance(value, str) or value or parameter.default)
    ]


def items_of(value: Any, name: str = "list") -> list[Any]:
    """Return the items of a comma-separated text, such as "1k,2k", or of a Python list.

    A number is one item. Items of a text stay texts.

    Args:
        value: The text, list or number.
        name: Name of the option, for error messages.

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
    words = [*map(str, items)]
    if words[0].isdigit() and any(re.fullmatch(r"0\d\d", word) for word in words[1:]):
        hint = f"Write {''.join(words)} for one number"
        raise UserError(f"{name} {','.join(words)!r} is a list", hint)
    return items


def check_number(name: str, limit: int, *lists: Sequence[Any]) -> None:
    """Check that lists of options do not have too many combinations.

    Example: lists of 3 and 4 items have 12 combinations.

    Args:
        name: Plural noun for the combinations in the error message, such as `rows`.
        limit: Maximum number of combinations.
        lists: The lists.

    Raises:
        UserError: There are more than `limit` combinations.
    """
    combinations = prod(map(len, lists))
    if combinations > limit:
        raise UserError(f"{combinations:,} {name}; the maximum is {limit:,}", "Shorten a list")


def check_known(names: Iterable[str], names_of_options: Iterable[str]) -> None:
    """Check that given names are names of options, or of another list.

    Args:
        names: The given names.
        names_of_options: All valid names.

    Raises:
        UserError: A name is unknown. The error suggests the nearest names, or the option with this
            name on the command line: `tp` for `tensor_parallel_size`.
    """
    options = list(names_of_options)
    for name in names:
        if name not in options:
            hint = nearest(name, options)
            for key, entry in _entries().items():
                option = key.rpartition(".")[2]
                if option in options and f"--{spelled(name)}" in entry.get("names", "").split():
                    hint = f"Did you mean {option}?"
            raise UserError(f"unknown option {name!r}", hint)


def spelled(name: str) -> str:
    """Return a field's name as messages write the option: `max_model_len` gives `max-model-len`."""
    return name.strip("_").replace("_", "-")


OptionalTokens = Annotated[int, partial(parse_tokens, minimum=0)]  # 0 means none


def bytes_or_none(text: str, name: str) -> int:
    """Parse a number of bytes from a text such as `4GiB`; 0 is allowed and means none.

    Args:
        text: The text.
        name: Name of the option, for the error message.

    Raises:
        UserError: The text is not a number of bytes.
    """
    return 0 if text.strip() == "0" else parse_bytes(text, name)


OptionalBytes = Annotated[int | None, bytes_or_none]


def host_bytes(text: str, name: str) -> int:
    """Parse bytes from a text such as `40GiB`, for options about a large memory.

    Args:
        text: The text; "0" is allowed.
        name: Name of the option, for the error message.

    Raises:
        UserError: The text is not a number of bytes. Or it has no unit and is below 1 MiB, as `40`
            is, because the user probably means GiB.
    """
    size = bytes_or_none(text, name)
    if 0 < size < MIN_HOST_BYTES and text.strip().isdigit():
        raise UserError(f"{name} {text!r} is {size:,} bytes", f"Write {text.strip()}GiB")
    return size


def seconds_or_none(text: str, name: str) -> float:
    """Parse seconds from a text such as `50ms` (0.05); 0 is allowed and means that no time is set.

    Args:
        text: The text.
        name: Name of the option, for the error message.

    Raises:
        UserError: The text is not a time.
    """
    return 0.0 if text.strip() in ("0", "0.0") else parse_seconds(text, name)


OptionalSeconds = Annotated[float, seconds_or_none]


def memory_share(text: str, name: str) -> float:
    """Parse a share of memory, such as 0.9.

    Args:
        text: The text.
        name: Name of the option, for the error message.

    Raises:
        UserError: The text is not a number above 0 and at most 1.
    """
    value = number_or_nan(text)
    if not 0 < value <= 1:
        raise UserError(f"{name} {text} is not above 0 and at most 1", "Write 0.9 for 90%")
    return value


MemoryShare = Annotated[float, memory_share]


def parse_number(text: str, name: str) -> float:
    """Parse a decimal number that is not negative, such as "2.5".

    Args:
        text: The text.
        name: Name of the option, for the error message.

    Raises:
        UserError: The text is not a number from 0 to below 10^15.
    """
    value = number_or_nan(text)
    if not 0 <= value < 1e15:
        raise UserError(f"{name} {text!r} is not a number from 0 up")
    return value


def number_or_nan(text: str) -> float:
    """Return the number in a text, or NaN if the text is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan
