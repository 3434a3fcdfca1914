"""The declaration of options, the options that several commands share, and printing.

An `Option` is declared once, in the annotation of a command's parameter or of a group's field.
The parser, help, completion, suggestions and the reference page read this declaration.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sized
from enum import StrEnum
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args, get_origin

import msgspec

from kvcalc.errors import UserError, printable, visible
from kvcalc.library.choices import DATASHEET
from kvcalc.units import parse_tokens

if TYPE_CHECKING:
    from kvcalc.model.model import Model
    from kvcalc.report.export import Record

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


class Option(msgspec.Struct, frozen=True):
    """An option of the command line. Its type and default are those of the annotated field.

    Attributes:
        help: One phrase of at most 70 characters that needs no other line to be understood.
        names: Names between blanks, the longest first; from the field's name if empty. A flag that
            can be switched off is `--on/--off`.
        takes: The placeholder of the value in help; from the type if empty.
        panel: The group in `--help-all`, one of PANELS.
        is_common: Whether `--help` shows the option.
        words: Values that completion offers, or a function that returns them.
        called: Names that other tools give the option, without dashes, for suggestions.
        min: Smallest number.
        max: Largest number.
        is_output: Whether the value is a file to write.
        is_hidden: Whether help and completion leave the option out.
    """

    help: str = ""
    names: str = ""
    takes: str = ""
    panel: str = "Other options"
    is_common: bool = False
    words: tuple[str, ...] | Callable[[], Iterable[str]] = ()
    called: str = ""
    min: int | None = None
    max: int | None = None
    is_output: bool = False
    is_hidden: bool = False


class Argument(Option, frozen=True):
    """A word without a name, such as MODEL."""


class OptionGroup(msgspec.Struct, frozen=True):
    """Options that belong together. A command takes a group as one parameter."""


class Parameter(NamedTuple):
    """An option or argument of a command."""

    name: str
    type: Any
    default: Any
    option: Option

    @property
    def is_argument(self) -> bool:
        return isinstance(self.option, Argument)

    @property
    def is_required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def is_flag(self) -> bool:
        return self.type is bool

    @property
    def is_list(self) -> bool:
        """Whether the option can be repeated, or the argument takes several words."""
        return get_origin(self.type) is list

    @property
    def declarations(self) -> list[str]:
        """Return the names as the parser takes them: `--on/--off` is one declaration."""
        usual = "--" + self.name.strip("_").replace("_", "-")
        return [] if self.is_argument else (self.option.names or usual).split()

    @property
    def names(self) -> list[str]:
        return [name for names in self.declarations for name in names.split("/")]

    @property
    def choices(self) -> list[str]:
        """Return the values of an enumeration; of other types an empty list."""
        kinds = get_args(self.type) or (self.type,)
        return [str(value) for value in kinds[0]] if issubclass(kinds[0], StrEnum) else []

    @property
    def placeholder(self) -> str:
        """Return what help shows for the value, such as TOKENS or N."""
        kind = (get_args(self.type) or (self.type,))[0]
        numbers = {int: "N", float: "X"}
        return self.option.takes or "|".join(self.choices) or numbers.get(kind, "WORD")


def parameters_in(run: Callable[..., Any] | type[OptionGroup]) -> Iterable[Parameter]:
    """Yield the options of a command or a group. Its groups are replaced by their options."""
    for parameter in inspect.signature(run).parameters.values():
        if is_group(parameter.annotation):
            yield from parameters_in(parameter.annotation)
        else:
            kind, option = get_args(parameter.annotation)
            default = parameter.default
            if get_origin(kind) is list and default is not inspect.Parameter.empty:
                default = []  # a struct shows its factory
            yield Parameter(parameter.name, kind, default, option)


def is_group(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, OptionGroup)


def arguments_for(run: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments of `run` from the values of its options, with its groups built."""
    arguments = {}
    for name, parameter in inspect.signature(run).parameters.items():
        kind = parameter.annotation
        arguments[name] = (
            kind(**arguments_for(kind, values)) if is_group(kind) else values[name]
        )
    return arguments


def model_names() -> Iterable[str]:
    from kvcalc.library.presets import preset_files

    return preset_files("models")


def gpu_names() -> Iterable[str]:
    from kvcalc.library.presets import preset_files

    return preset_files("gpus")


def stack_names() -> Iterable[str]:
    """Return the names of all calibrations, except that of the all-reduces."""
    from kvcalc.library.presets import preset_files

    names = [name for gpu in gpu_names() for name in preset_files(f"calibrations/{gpu}")]
    return [name for name in dict.fromkeys([*names, DATASHEET]) if name != "nccl"]


def _dtypes() -> Iterable[str]:
    from kvcalc.storage.formats import COMPUTE

    return ("auto", *COMPUTE)


def _cache_dtypes() -> Iterable[str]:
    from kvcalc.storage.formats import cache_dtypes

    return ("auto", *cache_dtypes())


def _quantizations() -> Iterable[str]:
    from kvcalc.storage.quantization import WEIGHT_FORMATS

    return WEIGHT_FORMATS


def _styles() -> Iterable[str]:
    from kvcalc.report.charts.series_styles import STYLES

    return STYLES


class OutputFormat(StrEnum):
    table = "table"
    json = "json"
    csv = "csv"
    markdown = "markdown"


class ByteUnits(StrEnum):
    gib = "gib"
    si = "si"
    bytes = "bytes"


MODEL_HELP = "Preset, GGUF, YAML, config.json, or Hugging Face name"
CONTEXT_WORDS = (
    "ctx ctx-size context context-len context-length num-ctx n-ctx seq-len seqlen max-seq-len "
    "length tokens max-model-len"
)
PROMPT_WORDS = "prompt prompt-len prompt-tokens input input-tokens random-input-len"
OUTPUT_WORDS = "output-tokens max-tokens gen-len generation-len num-predict random-output-len"
USER_WORDS = "users concurrency num-users batch max-batch-size n-seqs num-seqs parallel"
PREFIX_WORDS = "prefix prefix-cache prefix-caching enable-prefix-caching"
OFFLOAD_WORDS = "offload kv-offload cpu-offload swap-space"
DRAFT_WORDS = "speculative-model draft-model speculate spec"
RATE_WORDS = "qps request-rate rps"
TTFT_WORDS = "ttft slo goodput"
TPOT_WORDS = "tpot itl slo goodput"

Models = Annotated[list[str], Argument(MODEL_HELP, takes="MODEL…", words=model_names)]
OneModel = Annotated[str, Argument(MODEL_HELP, takes="MODEL", words=model_names)]
Gpus = Annotated[
    str,
    Option(
        "GPU presets or YAML files; a list, or all",
        takes="GPUS",
        is_common=True,
        words=lambda: ["all", *gpu_names()],
        called="card device hardware accelerator",
    ),
]
Memory = Annotated[
    str,
    Option(
        "Usable memory of the GPU or machine, if less than its preset: 36GiB",
        takes="SIZE",
        panel="Memory",
        called="vram gpu-memory ram",
    ),
]
BatchSizes = Annotated[
    str,
    Option(
        "Concurrent sequences; a list adds rows",
        "--batch-size --bs",
        takes="N",
        is_common=True,
        called=USER_WORDS,
    ),
]
Dtype = Annotated[
    str,
    Option(
        "Data type of weights and compute; auto is as published; a list",
        takes="DTYPE",
        panel="Data types",
        words=_dtypes,
        called="bits weight-dtype precision",
    ),
]
CacheDtype = Annotated[
    str,
    Option(
        "KV cache: auto, bf16, fp8, int4, nvfp4, q8_0; a list",
        takes="DTYPE",
        panel="Data types",
        is_common=True,
        words=_cache_dtypes,
        called="kv cache-dtype kv-dtype kv-cache kv-quant kv-bits cache-type",
    ),
]
Quantization = Annotated[
    str,
    Option(
        "Weight format: fp8, awq, gptq, nvfp4, mxfp4; a list",
        "--quantization -q",
        takes="FORMAT",
        panel="Data types",
        is_common=True,
        words=_quantizations,
        called="bits quant weights weight-dtype weight-quant precision q",
    ),
]
BlockSize = Annotated[int, Option("Tokens per KV cache block", panel="Memory")]
Settings = Annotated[
    list[str],
    Option(
        "Change a field of the model, as KEY=VALUE or KIND.KEY=VALUE",
        "--set",
        "KEY=VALUE",
        "Model",
    ),
]
Nodes = Annotated[
    int,
    Option("Number of nodes; 0 uses as few as the interconnect allows", panel="Parallelism"),
]
NodeBandwidth = Annotated[
    str,
    Option(
        "Bandwidth per GPU between nodes in one direction: 50GB/s",
        "--inter-node-bandwidth",
        "RATE",
        "Parallelism",
    ),
]
Explain = Annotated[
    bool,
    Option(
        "Print the formula of each figure with its numbers",
        panel="Output",
        is_common=True,
        called="details all",
    ),
]
Plot = Annotated[
    str,
    Option(
        "Write a picture (.png, .svg or .pdf); - draws it in the terminal",
        takes="FILE",
        panel="Output",
        called="save picture figure image chart svg png",
        is_output=True,
    ),
]
Style = Annotated[
    str,
    Option(
        "Style of the picture: light, dark or slides",
        panel="Output",
        words=_styles,
        called="theme dark color colour",
    ),
]
Price = Annotated[
    float,
    Option(
        "Price of one GPU per hour; adds the cost per million tokens",
        takes="MONEY",
        panel="Output",
        called="price cost cost-per-hour",
    ),
]
Draft = Annotated[
    str,
    Option(
        "Draft by a model, the first N layers (layers=N) or mtp",
        takes="MODEL",
        is_common=True,
        words=model_names,
        called=DRAFT_WORDS,
    ),
]

MAX_NAMES = 2000  # models, or GPUs, of one command
MAX_ROWS = 250_000  # records that are printed one by one
MAX_TABLE_ROWS = 20_000
MAX_PASSES = 500  # passes that are timed one by one
MAX_TABLES = 100


def check_number(what: str, limit: int, *lists: Sized) -> None:
    """Raise UserError if the lists have more than `limit` combinations."""
    combinations = prod(map(len, lists))
    if combinations > limit:
        raise UserError(
            f"{combinations:,} {what}; the maximum is {limit:,}", hint="Shorten a list"
        )


def lengths(text: str, what: str) -> list[int]:
    """Return token counts or batch sizes from a comma-separated list."""
    return [parse_tokens(part, what) for part in text.split(",")]


def say(text: str) -> None:
    """Print lines on stdout. A terminal gets lines of its width, a pipe gets whole lines."""
    shown = visible(text)
    if sys.stdout.isatty():
        lines = []
        for line in shown.split("\n"):
            indent = " " * (len(line) - len(line.lstrip()))
            lines += [indent + part for part in _wrapped(line, len(indent))]
        shown = "\n".join(lines)
    print(shown)


def _wrapped(line: str, indent: int = 0) -> list[str]:
    import shutil

    from kvcalc.report.text.table_layout import wrapped

    return wrapped(line, max(20, shutil.get_terminal_size().columns - indent), "  ")


def say_yaml(text: str) -> None:
    """Write YAML on stdout, folded on a terminal that is narrower."""
    if sys.stdout.isatty():
        import shutil

        from kvcalc.report.text.table_layout import folded

        text = folded(text, shutil.get_terminal_size().columns)
    sys.stdout.write(visible(text))


def note(text: str) -> None:
    """Print a note on stderr."""
    print_to_stderr(f"note: {printable(text, 1000)}")


def print_to_stderr(line: str) -> None:
    """Print a line on stderr, wrapped on a terminal."""
    print("\n".join(_wrapped(line)) if sys.stderr.isatty() else line, file=sys.stderr)


def save_text(target: str, content: "str | Iterable[str]") -> None:
    """Write a file and report it on stderr; `-` is stdout."""
    from kvcalc.library.files import write_text

    write_text(target, content)
    if target != "-":
        print(f"wrote {printable(target, 1000)}", file=sys.stderr)


def remarks(models: "Iterable[Model]", longest: int) -> None:
    """Print the notes of models on stderr, and a note if the longest context exceeds a maximum."""
    names_by_note: dict[str, list[str]] = {}
    for model in {m.name: m for m in models}.values():
        texts = list(model.notes)
        if model.max_context and longest > model.max_context:
            texts.append(
                f"context {longest:,} is beyond the model's own maximum of {model.max_context:,}"
            )
        for text in texts:
            names_by_note.setdefault(text, []).append(model.name)
    for text, names in names_by_note.items():
        note(f"{', '.join(names)}: {text}")


def emit(records: "Iterable[Record]", output: OutputFormat) -> bool:
    """Print records as JSON or CSV, each when it is made. Return False for a table or Markdown."""
    if output in (OutputFormat.table, OutputFormat.markdown):
        return False
    from kvcalc.report import export

    pieces = export.json_pieces if output is OutputFormat.json else export.csv_pieces
    sys.stdout.writelines(pieces(records))
    return True
