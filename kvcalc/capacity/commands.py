"""Command lines of engines: what one says, and the one that makes a deployment. `dialects` lists each engine's flags.

`read_command` and `command_of` are each other's inverse: a line that is written, read again, is the same deployment. What no
flag of an engine tells (which release it is, what is asked of the answer) stands beside the line, as options of `fit`.
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvcalc.capacity.command_flags import asked_by
from kvcalc.capacity.command_settings import settled
from kvcalc.capacity.command_words import parsed, split, started
from kvcalc.capacity.dialects import DIALECTS, Dialect
from kvcalc.capacity.options import FitOptions
from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.ranks import Parallelism
from kvcalc.library.checkpoints import Checkpoint, checkpoint
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.storage.dtypes import canonical
from kvcalc.timing.deployment import Deployment

_FORMS = "Write vllm serve MODEL …, python -m sglang.launch_server …, llama-server … or trtllm-serve MODEL …"


class Command(NamedTuple):
    """A command line, read.

    named: the model as the line has it. model: that it stands for. given: what the line says, by the names of `FitOptions`, of
    `Precision` and of `Parallelism`. ignored: flags that are not counted here, as they were typed. remarks: what was taken for
    what.
    """

    engine: str
    named: str
    model: Model
    given: dict[str, Any]
    ignored: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def parallelism(self) -> Parallelism:
        return Parallelism(**{n: self.given[n] for n in Parallelism.__struct_fields__ if n in self.given})

    @property
    def precision(self) -> Precision:
        return Precision(**{n: self.given[n] for n in Precision.__struct_fields__ if n in self.given})

    @property
    def options(self) -> FitOptions:
        named = {n: v for n, v in self.given.items() if n in FitOptions.__struct_fields__}
        return FitOptions(engine=self.engine, **named)


class Written(NamedTuple):
    """A command line of an engine, and the options of `fit` that it cannot tell."""

    line: str
    beside: tuple[str, ...]


def is_command(words: Sequence[str]) -> bool:
    """Whether words are an engine's command line, or begin as one, rather than models' names."""
    whole = split(words)
    return started(whole) is not None or whole[:1] == ["vllm"]


def read_command(words: Sequence[str], changes: list[str] | None = None) -> Command:
    """What a command line says; one word with blanks is split as a shell would. Nothing is run.

    Raises UserError where no engine is started, no model named, or a flag that matters has no usable value.
    """
    whole = split(words)
    found_start = started(whole)
    if found_start is None:
        raise UserError(f"{shlex.join(whole)[:100]!r} starts no engine that is known", hint=_FORMS)
    dialect, rest, tag = found_start
    told, ignored, free = parsed(dialect, rest)
    named = told.pop("model", "") or next((w for w in free if w != "serve"), "")
    if not named:
        named = next((word.partition(" ")[2] for word in ignored if "/" in word.partition(" ")[2]), "")
    if not named:
        raise UserError(f"that {dialect.engine} command line names no model", hint=_FORMS)
    found = settled_command(dialect, named, told, changes)
    release = {"engine_version": tag} if tag else {}
    return found._replace(ignored=tuple(ignored), given=found.given | release)


def settled_command(dialect: Dialect, named: str, told: Mapping[str, Any], changes: list[str] | None = None) -> Command:
    """The command of a model and flags that are read: what they mean together."""
    found = checkpoint(named)
    model = found.load(changes)
    given, model, remarks = settled(dialect, found, model, told)
    return Command(dialect.engine, named, model, given, (), (*filter(None, [found.remark]), *remarks))


class Flags(NamedTuple):
    """A command line in parts.

    Attributes:
        model: Word that names the model.
        words: Words of each flag, by the flag's name.
        beside: Options of `fit` that no flag tells.
    """

    model: str
    words: dict[str, list[str]]
    beside: tuple[str, ...]


def flags_of(deployment: Deployment, options: FitOptions, named: str = "") -> Flags | None:
    """Return a deployment as flags of its engine; None if it has no engine, or the engine cannot be started so."""
    dialect = DIALECTS.get(options.engine)
    asked = asked_by(dialect, deployment, options) if dialect else None
    if dialect is None or asked is None:
        return None
    model, flags, more = _weights(dialect, deployment, named)
    values = asked.values | flags
    words: dict[str, list[str]] = {}
    for flag in dialect.flags:
        value = values.get(flag.name)
        if value is not None and value is not False:
            words[flag.name] = [flag.spellings[0]] if flag.alone else [flag.spellings[0], flag.write(value)]
    return Flags(model, words, (*asked.beside, *more))


def command_of(deployment: Deployment, options: FitOptions, named: str = "") -> Written | None:
    """The engine's command line of a deployment; None where it has no engine, or the engine cannot be started so.

    named: the model as it was given, which stays where it tells the same: a checkpoint's name, a path, a name on the Hub.
    """
    found = flags_of(deployment, options, named)
    if found is None:
        return None
    dialect = DIALECTS[options.engine]
    longer = options.max_model_len > (deployment.model.max_context or options.max_model_len)
    variable = options.rules.long_context_variable if longer else ""
    words = [f"{variable}=1"] if variable else []
    words += [*dialect.starts[0], *dialect.model[:1], found.model, *(word for flag in found.words.values() for word in flag)]
    return Written(shlex.join(words), found.beside)


def _weights(dialect: Dialect, deployment: Deployment, named: str) -> tuple[str, dict[str, str], list[str]]:
    """(the model's word, the flags of its weights, options beside).

    A format that the engine makes as it loads is a flag; another is a checkpoint, whose name ends in it.
    """
    model, precision = deployment.model, deployment.precision
    dtype, format_ = canonical(precision.dtype), precision.quantization.lower()
    if dtype == "fp8":
        dtype, format_ = "auto", format_ or "fp8"
    dtype = "" if dtype == "auto" else dtype
    given = _known(named)
    preset = _known(model.huggingface_id or "") or _known(model.name)
    if model.file or not preset or (given and "/" in given.name):  # a file, or a name on the Hub of which nothing is known
        words = [["--dtype", dtype] if dtype else [], ["--quantization", format_] if format_ else []]
        return named or model.file or model.huggingface_id or model.name, {}, [word for pair in words for word in pair]
    flags: dict[str, str] = {}
    if given and given[:1] + given[2:3] == (preset.name, format_) and given.dtype in ("", dtype) and _tells(dialect, named):
        if dtype and not given.dtype:
            flags = {"dtype": dtype}
        if not flags or (dialect.flag("dtype") and (format_ or not model.quantization)):
            return named.removeprefix("hf:"), flags, []
    flags, ending = {}, format_
    if format_ in dialect.formats and not model.quantization:
        flags["quantization"], ending = dialect.formats[format_], ""
    if dtype and dialect.flag("dtype") and (format_ or not model.quantization):
        flags["dtype"] = dtype
    elif dtype:
        ending = "-".join(filter(None, (dtype, ending)))
    ending = f"-{ending}" if ending else ""
    if dialect.engine == "llama.cpp":
        return f"./{preset.name}{ending}.gguf", flags, []
    return f"./{preset.name}{ending}" if ending else model.huggingface_id or model.name, flags, []


def _tells(dialect: Dialect, named: str) -> bool:
    """Whether a name as it was given is one that the engine takes: a checkpoint's, not a preset's."""
    return named.lower().endswith(".gguf") if dialect.engine == "llama.cpp" else "/" in named


def _known(name: str) -> Checkpoint | None:
    """What a name stands for; None for one that stands for nothing that is here."""
    try:
        return checkpoint(name) if name else None
    except UserError:
        return None


def deployment_of(command: Command, gpu: Gpu) -> Deployment:
    """The deployment that a command line is, on a GPU."""
    return Deployment(command.model, gpu, command.precision, command.parallelism)
