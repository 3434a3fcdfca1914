"""Read and write the command lines of engines.

`engine_flags` has the flags of each engine. A deployment that is written and read again is the same
deployment. Options of `fit` that no flag expresses, such as the engine's version, are written
separately. No command is run.
"""

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from kvcalc.capacity.engine_flags import (
    DIALECTS,
    MAPPINGS,
    REPEATED_FLAGS,
    Dialect,
    hub_name,
    json_value,
)
from kvcalc.capacity.fit_options import FitOptions
from kvcalc.errors import UserError
from kvcalc.gpu.gpu import Gpu
from kvcalc.layers.batch import Parallelism
from kvcalc.library.checkpoints import Checkpoint, checkpoint, known_checkpoint
from kvcalc.library.load import is_hub_name, load_model
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision
from kvcalc.question.options import spelled
from kvcalc.records import Settings
from kvcalc.storage.formats import canonical
from kvcalc.storage.ggml import mix_of
from kvcalc.storage.quantization import load_weight_format
from kvcalc.timing.deployment import TimedDeployment

Struct = TypeVar("Struct", bound=msgspec.Struct)

COMMAND_FORMS = (
    "Write vllm serve MODEL …, python -m sglang.launch_server …, llama-server … or "
    "trtllm-serve MODEL …"
)
# Names of --quantization that load a checkpoint as published, and do not imply a format.
PUBLISHED_QUANTIZATIONS = """
    compressed-tensors modelopt modelopt_fp4 modelopt_mixed fbgemm_fp8 gguf auto-round auto_round
    quark mxfp4 inc torchao ptpc_fp8 w8a8_fp8 w8a8_int8 petit_nvfp4 qoq humming gpt_oss_mxfp4 none
"""
QUANTIZATION_FORMATS = {"moe_wna16": "int4", "marlin": "gptq"}
RANK_OPTIONS = ("tp", "pp", "dp", "dcp", "ep")


class Command(NamedTuple):
    """An engine's command line after reading, such as `vllm serve MODEL --max-num-seqs 8`.

    Attributes:
        engine: Name of the engine, such as "vllm".
        model_words: The model's name as written in the command line.
        model: The loaded model.
        settings: Values of the flags, by the name of the field of `FitOptions`, `Precision` or
            `Parallelism` that they set, such as {"tp": 2}.
        ignored: Flags that the prediction ignores, as written in the command line: they are unknown
            to kvcalc, or do not change the memory.
        remarks: Sentences for the user, such as the reason why a draft model is not counted.
    """

    engine: str
    model_words: str
    model: Model
    settings: Settings
    ignored: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def deployment(self, gpu: Gpu) -> TimedDeployment:
        """Return the deployment that the command line describes, on the GPU model `gpu`.

        It has the model, precision and parallelism of the command line.
        """
        precision = with_values(Precision(), self.settings)
        return TimedDeployment(
            self.model, gpu, precision, with_values(Parallelism(), self.settings)
        )

    @property
    def options(self) -> FitOptions:
        """Return the options of `fit` that the flags set."""
        return with_values(FitOptions(engine=self.engine), self.settings)


def with_values(struct: Struct, values: Settings) -> Struct:
    """Return a copy of a struct with new field values. Names that are not its fields are ignored.

    Args:
        struct: The struct to copy.
        values: Field values by name.
    """
    names = struct.__struct_fields__
    return replace(struct, **{name: values[name] for name in names if name in values})


def split(words: Sequence[str]) -> list[str]:
    """Return the words of a command line that the user typed as words or as one quoted text.

    A list of one text with blanks is a complete line, which is split as a shell does. Example:
    `["vllm serve m --tp 2"]` gives `["vllm", "serve", "m", "--tp", "2"]`.

    Raises:
        UserError: A quotation mark has no partner.
    """
    if len(words) != 1 or " " not in words[0].strip():
        return [word for word in words if word.strip() and word != "\\"]
    try:
        return shlex.split(words[0].replace("\\\n", " "))
    except ValueError:
        raise UserError("the command line has a quotation mark without its partner") from None


def find_engine(words: Sequence[str]) -> tuple[Dialect, list[str]] | None:
    """Return the engine that a command line starts, and the words after the start; None if unknown.

    The engine is returned as its command-line syntax (`Dialect`). Words before the start, such as
    `docker run`, are skipped.

    Example: `["vllm", "serve", "qwen3-8b"]` gives vLLM's `Dialect` and `["qwen3-8b"]`.
    """
    starts = [(start, dialect) for dialect in DIALECTS.values() for start in dialect.starts]
    programs = tuple(map(_program, words[:100]))
    for index in range(len(programs)):
        matches = [pair for pair in starts if programs[index : index + len(pair[0])] == pair[0]]
        if matches:
            start, dialect = max(matches, key=lambda pair: len(pair[0]))
            return dialect, list(words[index + len(start) :])
    return None


def _program(word: str) -> str:
    """Return a program without its folder, or the program that an image starts."""
    if image := re.search(r"(?:^|/)(vllm-openai|llama\.cpp:server)[^/]*$", word):
        return "llama-server" if ":" in image[1] else "vllm/vllm-openai"
    name = PurePath(word).name if "/" in word else word
    return "python" if re.fullmatch(r"python[0-9.]*", name) else name.removesuffix(".exe")


def image_version(text: str) -> str:
    """Return the engine's version in the tag of an image of vLLM or SGLang; "" if there is none.

    Example: `vllm/vllm-openai:v0.11.0` gives "0.11.0".

    Args:
        text: Image name, or a command line that contains one.
    """
    tag = re.search(r"(?:openai|sglang):v?(\d+\.\d+(?:\.\d+)?)", text)
    return tag[1] if tag else ""


def is_command(words: Sequence[str]) -> bool:
    """Return whether the words are an engine's command line, such as `vllm serve MODEL`.

    `kvcalc fit` takes either an engine's command line or names of models as its arguments.
    """
    words = split(words)
    return words[:1] == ["vllm"] or find_engine(words) is not None


def read_command(words: Sequence[str], changes: list[str] | None = None) -> Command:
    """Parse an engine's command line into its model and the kvcalc options that its flags set.

    Args:
        words: Words of the line, or the complete line as one word.
        changes: Changes of the loaded model's fields, in the form of `--set`, such as
            ["layers=16"]; None for none.

    Raises:
        UserError: No known engine is started, no model is named, or a flag has a wrong value.
    """
    words = split(words)
    start = find_engine(words)
    if start is None:
        raise UserError(
            f"{shlex.join(words)[:100]!r} starts no engine that is known", COMMAND_FORMS
        )
    dialect, flag_words = start
    values, ignored, others = _parse_flags(dialect, flag_words)
    # MODEL before the line wins; an unknown flag's value that looks like a path comes last
    names = [*filter(known_checkpoint, words[:1]), values.get("model", "")]
    names += [word for word in others if word != "serve"]
    names += [value for flag in ignored if "/" in (value := flag.partition(" ")[2])]
    name = next(filter(None, names), "")
    if not name:
        raise UserError(f"that {dialect.engine} command line names no model", COMMAND_FORMS)
    command = interpret_flags(dialect, name, values, changes)
    if version := image_version(" ".join(words[: len(words) - len(flag_words)])):
        command.settings["engine_version"] = version
    thousands = re.findall(r"[ =](\d+)k\b", " ".join(words)) * (dialect.engine == "vllm")
    notes = [
        f"vLLM reads {n}k as {int(n) * 1000:,}; {n}K is {int(n) * 1024:,}" for n in thousands
    ]
    return command._replace(
        ignored=tuple(flag.removesuffix(f" {name}") for flag in ignored),
        remarks=(*command.remarks, *notes),
    )


def _parse_flags(
    dialect: Dialect, words: Sequence[str]
) -> tuple[Settings, list[str], list[str]]:
    """Return values of flags by name, flags that are not modelled, and words that belong to no
    flag."""
    values = {}
    mappings: dict[str, Settings] = defaultdict(dict)
    ignored, others = [], []
    flags = {name.replace("_", "-"): flag for flag in dialect.flags for name in flag.spellings}
    waiting = list(reversed(words))
    while waiting:
        word = waiting.pop()
        if not _is_flag(word):
            others.append(word)
            continue
        option, has_value, text = word.partition("=")
        option, _, keys = option.partition(".")
        name = option.replace("_", "-")  # engines treat - and _ as equal
        if name == "--gpu":
            example = " ".join(dialect.starts[0])
            raise UserError(
                f"{example} has no --gpu",
                f"Write it before --: `kvcalc fit --gpu h100 -- {example} …`",
            )
        flag = flags.get(name)
        # argparse accepts the start of one flag's name
        if not flag and name.startswith("--") and dialect.engine in ("vllm", "sglang"):
            longer = {flags[text] for text in flags if text.startswith(name)}
            flag = longer.pop() if len(longer) == 1 else None
        if flag and keys and (flag.name not in MAPPINGS or keys.count(".") > 1):
            flag = None
        is_switch = flag is not None and flag.is_switch
        next_word = waiting[-1] if waiting and not has_value else "-none"
        can_take = not is_switch or next_word.lower() in ("true", "false")
        if can_take and not _is_flag(next_word):
            text = waiting.pop()
        if flag is None or flag.name == "-":
            flag_words = [word] if has_value or not text else [word, text]
            while waiting and waiting[-1].isdigit():  # a list, such as 1 2 4
                flag_words.append(waiting.pop())
            ignored.append(shlex.join(flag_words))
        elif is_switch:
            if text.lower() not in ("false", "0"):
                values[flag.name] = flag.setting
        elif not (has_value or text or flag.kind == "toggle"):
            raise UserError(f"{option} has no value")
        else:
            try:
                value = json_value(text) if keys else flag.read(text)
            except UserError as error:
                raise UserError(f"{option}: {error.what}", error.hint) from None
            key, _, inner_key = keys.partition(".")
            if keys:
                mappings[flag.name][key] = {inner_key: value} if inner_key else value
            else:
                values[flag.name] = value
    values |= {name: json.dumps(mapping) for name, mapping in mappings.items()}
    return values, ignored, others


def _is_flag(word: str) -> bool:
    return bool(re.match("--?[A-Za-z]", word))


def interpret_flags(
    dialect: Dialect,
    model_words: str,
    values: Settings,
    changes: list[str] | None = None,
) -> Command:
    """Return the `Command` for the parsed flags of an engine: its model and kvcalc options.

    Args:
        dialect: The engine's command-line syntax.
        model_words: The model's name as written in the command line.
        values: Parsed value of each flag, by the kvcalc option that it sets (`Flag.name`).
        changes: Changes of the loaded model's fields, in the form of `--set`, such as
            ["layers=16"]; None for none.

    Raises:
        UserError: The model is unknown, or a flag has a wrong value.
    """
    source = checkpoint(model_words)
    model = load_model(source.name, changes)
    settings = {
        name: value
        for name, value in values.items()
        # 0 and "" leave a choice to the engine
        if name != "model" and (value or value is False or name == "n_gpu_layers")
    }
    remarks = [source.remark] if source.remark else []
    if remarks and model.max_context and "max_model_len" not in settings:
        remarks[0] += f", with a maximum of {model.max_context:,} tokens"
    model = _read_formats(source, model, settings, remarks)
    dialect.read(settings, remarks)
    if not settings.pop("shared_attention", False) and "max_num_seqs" in settings:
        settings["max_num_seqs"] *= settings.get("dp", 1)  # the engine counts one dp rank
    _read_draft(settings, remarks)
    if typed := [(name, values[name]) for name in REPEATED_FLAGS.split() if name in values]:
        settings["typed_flags"] = tuple(typed)
    if "mtp" in settings and not model.mtp:
        del settings["mtp"]
        settings.pop("num_speculative_tokens", None)
        remarks.append(f"prediction layers are left out: none are known of {model.name}")
    if settings.pop("lora", False):
        settings.setdefault("max_loras", 1)
    else:
        settings.pop("max_loras", None)
    return Command(dialect.engine, model_words, model, settings, (), tuple(remarks))


def _read_formats(
    source: Checkpoint, model: Model, settings: Settings, remarks: list[str]
) -> Model:
    """Set the formats of the weights in `settings`. The checkpoint's name wins over --quantization
    and --dtype.

    Returns:
        The model, with its dtype replaced if the checkpoint is quantized and --dtype differs.
    """
    method = settings.pop("quantization", "")
    format_ = source.quantization
    if method and not format_ and not model.quantization:
        if method in PUBLISHED_QUANTIZATIONS.split():
            remarks.append(
                f"--quantization {method} loads the checkpoint's own format, which its name "
                "does not state"
            )
        else:
            format_ = QUANTIZATION_FORMATS.get(method) or load_weight_format(method).name
    if format_:
        settings["quantization"] = format_
    dtype = settings.pop("dtype", "auto")
    if model.quantization and not format_:
        if dtype not in ("auto", model.dtype):
            model = replace(model, dtype=dtype)
        dtype = "auto"
    dtype = source.dtype or dtype
    if dtype != "auto":
        settings["dtype"] = dtype
    return model


class SpeculativeConfig(msgspec.Struct):
    """The fields of vLLM's --speculative-config (a JSON text) that affect the memory.

    Attributes:
        method: Drafting method, such as "mtp", "ngram" or "eagle"; None if not given.
        model: Name of the draft model; "[ngram]" for drafts without a model; None if not given.
        num_speculative_tokens: Draft tokens that the target model verifies in one pass; None if not
            given.
        use_heterogeneous_vocab: Whether draft and target may have different vocabularies.
    """

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    use_heterogeneous_vocab: bool | None = False


def _read_draft(settings: Settings, remarks: list[str]) -> None:
    """Set a draft model or the model's own prediction layers in `settings`."""
    text, draft_name = settings.pop("speculation", ""), settings.pop("draft_name", "")
    if text:
        try:
            config = msgspec.json.decode(text, type=SpeculativeConfig, strict=False)
        except msgspec.MsgspecError:
            raise UserError("--speculative-config is not a mapping in JSON") from None
        method = (config.method or "").lower()
        draft_name = config.model or draft_name
        if config.num_speculative_tokens:
            settings["num_speculative_tokens"] = config.num_speculative_tokens
        if method.endswith("mtp"):
            settings["mtp"] = True
        if method.endswith(("mtp", "ngram", "suffix")) or draft_name == "[ngram]":
            draft_name = ""
        elif config.use_heterogeneous_vocab:
            remarks.append(
                f"the draft {draft_name} is not counted: the memory of "
                "use_heterogeneous_vocab is not known"
            )
            draft_name = ""
    if draft_name:
        try:
            settings["draft"] = load_model(checkpoint(draft_name).name)
        except UserError as error:
            remarks.append(f"the memory of the draft is not counted: {error}")


class EngineCommand(NamedTuple):
    """An engine's command line that kvcalc has written, in parts.

    Attributes:
        start: Words before the model's name, such as ("vllm", "serve").
        model: The model's name.
        words: Words of each flag, such as ["--max-num-seqs", "8"], by the kvcalc option that the
            flag sets.
        options: Words of kvcalc options that no flag of the engine expresses, such as "--users" and
            "8". They belong to the `kvcalc fit` command around the engine's command line.
    """

    start: tuple[str, ...]
    model: str
    words: dict[str, list[str]]
    options: tuple[str, ...]

    @property
    def line(self) -> str:
        """Return the complete command line as one text, quoted for a shell."""
        flag_words = (word for words in self.words.values() for word in words)
        return shlex.join([*self.start, self.model, *flag_words])


def command_of(
    deployment: TimedDeployment, options: FitOptions, model_words: str = ""
) -> EngineCommand | None:
    """Return the engine's command line that starts a deployment; None if no command line can.

    None means that kvcalc knows no command line of the engine, or that no flag of the engine sets a
    number of parallel ranks that the deployment needs.

    Args:
        deployment: The deployment.
        options: The options of `fit`, which name the engine. Options with other values than their
            defaults become flags.
        model_words: The user's word for the model; "" if unknown. The command line uses it if the
            engine understands it, otherwise the model's name on the Hugging Face Hub or a file's
            path.
    """
    dialect, ranks = DIALECTS.get(options.engine), deployment.parallelism
    if dialect is None:
        return None
    settings = _changed_options(dialect, options)
    settings |= {
        name: getattr(ranks, name) for name in RANK_OPTIONS if getattr(ranks, name) > 1
    }
    cache_dtype = canonical(deployment.precision.kv_cache_dtype)
    if cache_dtype != "auto":
        settings["kv_cache_dtype"] = cache_dtype
    if "max_loras" in settings:
        settings["lora"] = True
    dialect.write(settings, deployment)
    for name, value in options.typed_flags:
        if dialect.flag(name) and (name != "kv_cache_dtype" or canonical(value) == cache_dtype):
            settings[name] = value
    if "shared_attention" not in settings and (count := settings.pop("max_num_seqs", 0)):
        # the engine counts one dp rank
        count_per_rank, remainder = divmod(count, ranks.dp)
        if remainder:
            settings["fit_max_num_seqs"] = count
        else:
            settings["max_num_seqs"] = count_per_rank
    model = _write_weights(dialect, deployment, model_words, settings)
    words = {}
    for flag in dialect.flags:
        if flag.can_write(settings):
            words[flag.name] = flag.words(settings.pop(flag.name))
    if not settings.keys().isdisjoint(RANK_OPTIONS):
        return None
    extra = [word for name, value in settings.items() for word in option_words(name, value)]
    start = dialect.starts[0]
    max_context, variable = deployment.model.max_context, options.rules.long_context_variable
    if max_context and options.max_model_len > max_context and variable:
        start = (f"{variable}=1", *start)
    if dialect.writes_model_flag:
        has_repository = dialect.engine == "llama.cpp" and is_hub_name(model)
        start = (*start, "-hf" if has_repository else dialect.flags[0].spellings[0])
    return EngineCommand(start, model, words, tuple(extra))


def _changed_options(dialect: Dialect, options: FitOptions) -> Settings:
    """Return the options that differ from their defaults."""
    if not dialect.max_slots and options.max_num_seqs:
        # a command line requires only one sequence
        users = options.users or options.max_num_seqs
        options = replace(options, users=users if users > 1 else 0)
    defaults = FitOptions(engine=options.engine)
    return {
        name: value
        for name, value in msgspec.structs.asdict(options).items()
        # the name of a log is unknown
        if name not in ("from_log", "typed_flags") and value != getattr(defaults, name)
    }


def option_words(name: str, value: Any) -> list[str]:
    """Return an option of `fit` as words of a kvcalc command line.

    Example: `("max_model_len", 4096)` gives `["--max-model-len", "4096"]`.

    Args:
        name: Name of the option. A prefix `fit_`, which marks options that no flag of the engine
            expresses, is removed.
        value: Value of the option, different from its default. True gives only the option's name,
            a draft model its name on the Hugging Face Hub.
    """
    if name == "hybrid":
        return ["--disable-hybrid-kv-cache-manager"]
    option = "--" + spelled(name.removeprefix("fit_"))
    if value is True:
        return [option]
    return [option, hub_name(value) if isinstance(value, Model) else str(value)]


def _write_weights(
    dialect: Dialect, deployment: TimedDeployment, model_words: str, settings: Settings
) -> str:
    """Add flags for the weight format, or options of `fit` instead, and return the model's name.

    A format that the engine makes when it loads weights is a flag. Another format is a checkpoint,
    and its name ends in the format.
    """
    model, precision = deployment.model, deployment.precision
    dtype, format_ = canonical(precision.dtype), precision.quantization.lower()
    if dtype == "fp8":
        dtype, format_ = "auto", format_ or "fp8"
    dtype = "" if dtype == "auto" else dtype
    source = known_checkpoint(model_words)
    preset = known_checkpoint(model.name) or known_checkpoint(model.huggingface_id or "")
    if model.file or not preset or (source and "/" in source.name):
        # a file, or an unknown name on the Hub
        formats = {"fit_dtype": dtype, "fit_quantization": format_}
        settings |= {name: value for name, value in formats.items() if value}
        path = PurePath(model.file)
        # engines take the folder
        return str(path.parent) if path.name == "config.json" else model.file or hub_name(model)
    takes_dtype = dialect.flag("dtype") and (format_ or not model.quantization)
    # the engine accepts a checkpoint's name, not a preset's
    is_llama_cpp = dialect.engine == "llama.cpp"
    is_checkpoint = "gguf" in model_words.lower() if is_llama_cpp else "/" in model_words
    if (
        source
        and is_checkpoint
        and (source.name, source.quantization) == (preset.name, format_)
        and (source.dtype == dtype or (takes_dtype and not source.dtype))
    ):
        if source.dtype != dtype:
            settings["dtype"] = dtype
        return model_words.removeprefix("hf:")
    endings = []
    if dtype and takes_dtype:
        settings["dtype"] = dtype
    elif dtype:
        endings.append(dtype)
    if format_ in dialect.formats and not model.quantization:
        settings["quantization"] = dialect.formats[format_]
    elif format_:
        endings.append(format_)
    name = "-".join([preset.name, *endings])
    if is_llama_cpp or mix_of(format_):
        return f"./{name}.gguf"
    return f"./{name}" if endings else hub_name(model)
