"""Command lines of engines: what one says, and the one that makes a deployment. `dialects` lists each engine's flags.

`read_command` and `command_of` are each other's inverse: a line that is written, read again, is the same deployment. What no
flag of an engine tells (which release it is, what is asked of the answer) stands beside the line, as options of `fit`.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from kvcalc.capacity.command_flags import asked_by
from kvcalc.capacity.command_settings import settled
from kvcalc.capacity.dialects import DIALECTS, Dialect, Flag
from kvcalc.capacity.options import FitOptions
from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.layers.ranks import Parallelism
from kvcalc.library.checkpoints import Checkpoint, checkpoint
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.storage.dtypes import canonical
from kvcalc.timing.deployment import Deployment

MOST_WORDS, MOST_LETTERS = 1000, 100_000
_ASSIGNED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_FORMS = "Write vllm serve MODEL …, python -m sglang.launch_server …, llama-server … or trtllm-serve MODEL …"


class Command(NamedTuple):
    """A command line, read.

    named: the model as the line has it. model: that it stands for. given: what the line says, by the names of `FitOptions`, of
    `Precision` and of `Parallelism`. ignored: flags that change nothing here, as they were typed. remarks: what was taken for
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
    """Whether words are an engine's command line, rather than a model's name."""
    return _started(_split(words)) is not None


def read_command(words: Sequence[str]) -> Command:
    """What a command line says; one word with blanks is split as a shell would. Nothing is run.

    Raises UserError where no engine is started, no model named, or a flag that matters has no usable value.
    """
    whole = _split(words)
    started = _started(whole)
    if started is None:
        raise UserError(f"{shlex.join(whole)[:100]!r} starts no engine that is known", hint=_FORMS)
    dialect, rest, tag = started
    told, ignored, free = _parsed(dialect, rest)
    named = told.pop("model", "") or next((w for w in free if w != "serve"), "")
    if not named:
        named = next((word.partition(" ")[2] for word in ignored if "/" in word.partition(" ")[2]), "")
    if not named:
        raise UserError(f"that {dialect.engine} command line names no model", hint=_FORMS)
    found = settled_command(dialect, named, told)
    release = {"engine_version": tag} if tag else {}
    return found._replace(ignored=tuple(ignored), given=found.given | release)


def settled_command(dialect: Dialect, named: str, told: Mapping[str, Any]) -> Command:
    """The command of a model and flags that are read: what they mean together."""
    found = checkpoint(named)
    model = found.load()
    given, model, remarks = settled(dialect, found, model, told)
    return Command(dialect.engine, named, model, given, (), (*filter(None, [found.remark]), *remarks))


def _split(words: Sequence[str]) -> list[str]:
    if sum(map(len, words)) > MOST_LETTERS or len(words) > MOST_WORDS:
        raise UserError(f"a command line of more than {MOST_LETTERS:,} letters is not read")
    if len(words) == 1 and " " in words[0].strip():
        try:
            return shlex.split(words[0].replace("\\\n", " "))
        except ValueError:
            raise UserError("the command line has a quotation mark without its partner") from None
    return [w for w in words if w.strip() and w != "\\"]


def _started(words: Sequence[str]) -> tuple[Dialect, list[str], str] | None:
    """The engine that is started, the words behind that, and the version that an image's tag names."""
    for at in range(min(len(words), 100)):
        for dialect in DIALECTS.values():
            for start in sorted(dialect.starts, key=len, reverse=True):
                here = [_program(w) for w in words[at : at + len(start)]]
                if here == [*start] and all(map(_passed, words[:at])) | (start[0] == "vllm/vllm-openai"):
                    tag = re.fullmatch(r".*:v?(\d+\.\d+(?:\.\d+)?).*", words[at]) if "/" in start[0] else None
                    return dialect, list(words[at + len(start) :]), tag[1] if tag else ""
    return None


def _passed(word: str) -> bool:
    """Whether a word may stand before the engine's own: an assignment, or a program that starts others."""
    starters = ("python", "uv", "run", "env", "sudo", "nohup", "exec", "time", "numactl", "$")
    return bool(_ASSIGNED.fullmatch(word)) or PurePath(word).name.rstrip("0123456789.") in starters


def _program(word: str) -> str:
    """A word as starts have it: programs without their folder, images without their registry's tag."""
    if word.startswith("vllm/vllm-openai"):
        return "vllm/vllm-openai"
    name = PurePath(word).name if "/" in word else word
    return "python" if re.fullmatch(r"python[0-9.]*", name) else name.removesuffix(".exe")


def _parsed(dialect: Dialect, words: list[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """(values by name, the model's among them; flags that are not read, with their values; words that belong to no flag)."""
    told: dict[str, Any] = {}
    ignored, free = [], []
    flags = {s: f for f in dialect.flags for s in f.spellings}
    waiting = list(reversed(words))
    while waiting:
        word = waiting.pop()
        if not re.match(r"--?[A-Za-z]", word):
            free.append(word)
            continue
        name, joined, value = word.partition("=")
        spelled = _spelled(dialect, name)
        flag = flags.get(spelled)
        if flag and flag.alone:
            told[flag.name] = value.lower() not in ("false", "0") if joined else True
            if not joined and waiting and waiting[-1].lower() in ("true", "false"):
                told[flag.name] = waiting.pop().lower() == "true"
        elif flag or spelled in (*dialect.model, *dialect.also):
            if not joined:
                value = _value(name, waiting)
            told["model" if flag is None else flag.name] = value if flag is None else _read(flag, name, value)
        elif joined or spelled in dialect.switches or not waiting or re.match(r"--?[A-Za-z]", waiting[-1]):
            ignored.append(word)
        else:
            ignored.append(f"{word} {waiting.pop()}")
    return told, ignored, free


def _spelled(dialect: Dialect, name: str) -> str:
    """A flag as the dialect lists it: vLLM takes - and _ alike."""
    if not name.startswith("--"):
        return name
    return "--" + name[2:].replace("-", "_") if dialect.engine == "trtllm" else "--" + name[2:].replace("_", "-")


def _value(name: str, waiting: list[str]) -> str:
    if not waiting or re.match(r"--[A-Za-z]", waiting[-1]):
        raise UserError(f"{name} has no value")
    return waiting.pop()


def _read(flag: Flag, name: str, value: str) -> Any:
    if flag.name == "max_model_len" and value.lower() in ("-1", "auto"):
        return 0
    if flag.name in ("max_num_batched_tokens", "n_gpu_layers", "max_num_seqs") and value == "-1":
        return -1
    try:
        return flag.read(value)
    except UserError as error:
        raise UserError(f"{name}: {error.what}", hint=error.hint) from None


def command_of(deployment: Deployment, options: FitOptions, named: str = "") -> Written | None:
    """The engine's command line of a deployment; None where it has no engine, or the engine cannot be started so.

    named: the model as it was given, which stays where it tells the same: a checkpoint's name, a path, a name on the Hub.
    """
    dialect = DIALECTS.get(options.engine)
    asked = asked_by(dialect, deployment, options) if dialect else None
    if dialect is None or asked is None:
        return None
    word, flags, more = _weights(dialect, deployment, named)
    values = asked.values | flags
    words = [*dialect.starts[0], *dialect.model[:1], word]
    for flag in dialect.flags:
        value = values.get(flag.name)
        if value is not None and value is not False:
            words += [flag.spellings[0]] if flag.alone else [flag.spellings[0], flag.write(value)]
    return Written(shlex.join(words), (*asked.beside, *more))


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
    if not preset or (given and "/" in given.name):  # a file, or a name on the Hub of which nothing is known
        words = [["--dtype", dtype] if dtype else [], ["--quantization", format_] if format_ else []]
        return named or model.huggingface_id or model.name, {}, [word for pair in words for word in pair]
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
