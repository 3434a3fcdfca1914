"""Read and write the command lines of engines.

`dialects` lists the flags of each engine. The rules here are for flags that depend on more than
their own value. A deployment that is written and read again is the same deployment. Options of
`fit` that no flag expresses, such as the engine's version, are written separately. No command is
run.
"""

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from kvcalc.capacity.dialects import DIALECTS, MAPPINGS, Dialect
from kvcalc.capacity.fit_options import FitOptions
from kvcalc.capacity.memory_budget import GIB
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
from kvcalc.storage.quantization import load_weight_format
from kvcalc.timing.deployment import TimedDeployment

FORMS = (
    "Write vllm serve MODEL …, python -m sglang.launch_server …, llama-server … or "
    "trtllm-serve MODEL …"
)
# Names of --quantization that load a checkpoint as published, and do not imply a format.
AS_PUBLISHED = """
    compressed-tensors modelopt modelopt_fp4 modelopt_mixed fbgemm_fp8 gguf auto-round auto_round
    quark mxfp4 inc torchao ptpc_fp8 w8a8_fp8 w8a8_int8 petit_nvfp4 qoq humming gpt_oss_mxfp4 none
"""
QUANTIZATION_FORMATS = {
    "fp8": "fp8",
    "bitsandbytes": "nf4",
    "awq_marlin": "awq",
    "gptq_marlin": "gptq",
    "moe_wna16": "int4",
    "marlin": "gptq",
}


class Command(NamedTuple):
    """An engine's command line after reading.

    Attributes:
        named: The model's name in the command line.
        given: Values by the names of `FitOptions`, `Precision` and `Parallelism`.
        ignored: Flags that are not modelled, as written in the command line.
        remarks: Notes for the user.
    """

    engine: str
    named: str
    model: Model
    given: Settings
    ignored: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def deployment(self, gpu: Gpu) -> TimedDeployment:
        """Return the deployment of the command line on a GPU."""
        precision, ranks = self._settings(Precision), self._settings(Parallelism)
        return TimedDeployment(self.model, gpu, precision, ranks)

    @property
    def options(self) -> FitOptions:
        options: FitOptions = self._settings(FitOptions, engine=self.engine)
        return options

    def _settings(self, kind: Any, **others: str) -> Any:
        """Return the fields of a struct that the command line sets."""
        names = set(kind.__struct_fields__) & set(self.given)
        return kind(**others, **{name: self.given[name] for name in names})


def split(words: Sequence[str]) -> list[str]:
    """Return the words of a command line. A single word with blanks is split as by a shell."""
    if len(words) != 1 or " " not in words[0].strip():
        return [word for word in words if word.strip() and word != "\\"]
    try:
        return shlex.split(words[0].replace("\\\n", " "))
    except ValueError:
        raise UserError("the command line has a quotation mark without its partner") from None


def find_engine(words: Sequence[str]) -> tuple[Dialect, list[str], str] | None:
    """Return the engine, the words after its start, and the version in an image's tag, or ""."""
    starts = [(start, dialect) for dialect in DIALECTS.values() for start in dialect.starts]
    starts.sort(key=lambda pair: -len(pair[0]))
    programs = [*map(_program, words[:100])]
    for index in range(len(programs)):
        for start, dialect in starts:
            end = index + len(start)
            if tuple(programs[index:end]) == start:
                tag = re.search(r"openai:v?(\d+\.\d+(?:\.\d+)?)", words[index])
                return dialect, list(words[end:]), tag[1] if tag else ""
    return None


def _program(word: str) -> str:
    """Return a program without its folder, or the program that an image starts."""
    if image := re.search(r"(?:^|/)(vllm-openai|llama\.cpp:server)[^/]*$", word):
        return "llama-server" if ":" in image[1] else "vllm/vllm-openai"
    name = PurePath(word).name if "/" in word else word
    return "python" if re.fullmatch(r"python[0-9.]*", name) else name.removesuffix(".exe")


def is_command(words: Sequence[str]) -> bool:
    """Return whether words are an engine's command line, and not names of models."""
    words = split(words)
    return words[:1] == ["vllm"] or find_engine(words) is not None


def read_command(words: Sequence[str], changes: list[str] | None = None) -> Command:
    """Parse an engine's command line.

    Args:
        words: Words of the line, or the complete line as one word.
        changes: Changes of the model, as `load_model` takes them.

    Raises:
        UserError: No known engine is started, no model is named, or a flag has a wrong value.
    """
    words = split(words)
    start = find_engine(words)
    if start is None:
        raise UserError(f"{shlex.join(words)[:100]!r} starts no engine that is known", FORMS)
    dialect, flag_words, version = start
    values, ignored, others = parse_flags(dialect, flag_words)
    # else the value of an unknown flag that looks like a path
    names = [values.get("model", ""), *(word for word in others if word != "serve")]
    names += [value for flag in ignored if "/" in (value := flag.partition(" ")[2])]
    name = next(filter(None, names), "")
    if not name:
        raise UserError(f"that {dialect.engine} command line names no model", FORMS)
    command = interpret_flags(dialect, name, values, changes)
    release = {"engine_version": version} if version else {}
    return command._replace(ignored=tuple(ignored), given=command.given | release)


def parse_flags(
    dialect: Dialect, words: Sequence[str]
) -> tuple[Settings, list[str], list[str]]:
    """Return values of flags by name, flags that are not modelled, and words that belong to no
    flag."""
    values: Settings = {}
    mappings: dict[str, Settings] = defaultdict(dict)
    ignored, others = [], []
    flags = {spelling: flag for flag in dialect.flags for spelling in flag.spellings}
    waiting = list(reversed(words))
    while waiting:
        word = waiting.pop()
        if not _is_flag(word):
            others.append(word)
            continue
        option, has_value, text = word.partition("=")
        option, _, keys = option.partition(".")
        spelling = option
        if option.startswith("--"):  # engines treat - and _ as equal
            old, new = "-_" if dialect.engine == "trtllm" else "_-"
            spelling = "--" + option[2:].replace(old, new)
        flag = flags.get(spelling)
        has_next = not has_value and bool(waiting) and not _is_flag(waiting[-1])
        if not flag or (keys and (flag.name not in MAPPINGS or keys.count(".") > 1)):
            if has_next and spelling not in dialect.switches:
                word = f"{word} {waiting.pop()}"
            ignored.append(word)
        elif flag.is_switch:
            if has_next and waiting[-1].lower() in ("true", "false"):
                text = waiting.pop()
            values[flag.name] = text.lower() not in ("false", "0")
        elif not (has_value or has_next):
            raise UserError(f"{option} has no value")
        else:
            text = text if has_value else waiting.pop()
            try:
                value = _json_value(text) if keys else flag.read(text)
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


def _json_value(text: str) -> Any:
    """Return a number or truth value; another text as it is."""
    try:
        return msgspec.json.decode(text.lower())
    except msgspec.MsgspecError:
        return text


def interpret_flags(
    dialect: Dialect,
    named: str,
    values: Mapping[str, Any],
    changes: list[str] | None = None,
) -> Command:
    """Return the `Command` for a model's name and the values of an engine's flags."""
    source = checkpoint(named)
    model = load_model(source.name, changes)
    settings: Settings = {}
    for name, value in values.items():
        if value and name.startswith("not_"):
            settings[name.removeprefix("not_")] = False
        elif name != "model" and (value or name in ("n_cpu_moe", "n_gpu_layers")):
            settings[name] = value
    remarks = [source.remark] if source.remark else []
    model = _read_formats(source, model, settings, remarks)
    if dialect.engine in _RULES:
        _RULES[dialect.engine][0](settings, remarks)
    _read_draft(settings, remarks)
    if "mtp" in settings and not model.mtp:
        del settings["mtp"]
        settings.pop("num_speculative_tokens", None)
        remarks.append(f"prediction layers are left out: none are known of {model.name}")
    if settings.pop("lora", False):
        settings.setdefault("max_loras", 1)
    else:
        settings.pop("max_loras", None)
    return Command(dialect.engine, named, model, settings, (), tuple(remarks))


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
        if method in AS_PUBLISHED.split():
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
    """The fields of vLLM's --speculative-config that affect the memory."""

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
        draft_name = config.model if config.model is not None else draft_name
        if config.num_speculative_tokens:
            settings["num_speculative_tokens"] = config.num_speculative_tokens
        if method.endswith("mtp"):
            settings["mtp"] = True
            draft_name = ""
        elif method in ("ngram", "suffix") or draft_name == "[ngram]":
            draft_name = ""
        elif config.use_heterogeneous_vocab:
            remarks.append(
                f"the draft {draft_name} is left out: the memory of use_heterogeneous_vocab "
                "is not known"
            )
            draft_name = ""
    if draft_name:
        try:
            settings["draft"] = load_model(checkpoint(draft_name).name)
        except UserError as error:
            remarks.append(f"the draft is left out: {error}")


def _read_vllm(settings: Settings, remarks: list[str]) -> None:
    tp, pp, dp = (settings.get(name, 1) for name in ("tp", "pp", "dp"))
    if settings.pop("all_experts", False):
        settings["ep"] = tp * dp
    if "max_num_seqs" in settings:
        settings["max_num_seqs"] *= dp
    if settings.pop("text_only", False):
        settings["limit_mm_per_prompt"] = '{"image": 0, "video": 0}'
    one_flight, two_flights = (
        settings.pop("one_in_flight", False),
        settings.pop("two_in_flight", False),
    )
    if one_flight:
        settings["max_in_flight_batches"] = pp
    elif two_flights and pp == 1:
        settings["max_in_flight_batches"] = 2
    if size := settings.pop("kv_offloading_size", 0):
        settings["kv_offloading_bytes"] = int(size * GIB) // (tp * pp)


def _read_sglang(settings: Settings, remarks: list[str]) -> None:
    tp, dp = settings.get("tp", 1), settings.get("dp", 1)
    if settings.pop("shared_attention", False):
        if tp % dp:
            raise UserError(
                f"SGLang's --dp-size {dp} with --enable-dp-attention does not divide --tp-size {tp}"
            )
        settings["tp"] = tp // dp
    elif "max_num_seqs" in settings:
        settings["max_num_seqs"] *= dp
    if settings.get("max_num_batched_tokens", 0) < 0:
        settings.pop("max_num_batched_tokens")
        remarks.append("prefill is not chunked: the engine's own chunk is counted")
    algorithm = settings.pop("prediction", "")
    if "draft_name" not in settings and algorithm in ("nextn", "eagle", "mtp"):
        settings["mtp"] = True
    branches, steps, verified = (
        settings.pop(name, 0)
        for name in ("drafted_branches", "drafting_steps", "verified_tokens")
    )
    if verified and (branches > 1 or not steps):
        steps = verified - 1
    if algorithm and (steps or verified):
        settings["num_speculative_tokens"] = steps


def _read_llama_cpp(settings: Settings, remarks: list[str]) -> None:
    settings.pop("batch", None)
    slots = settings.pop("max_num_seqs", 0)
    if slots < 1:
        slots = 1
        settings.setdefault("kv_unified", True)
    settings["max_num_seqs"] = slots
    if cells := settings.pop("cells", 0):
        settings["max_model_len"] = max(1, cells // slots)
    key_type, value_type = (
        settings.get(name, "fp16") for name in ("cache_type_k", "cache_type_v")
    )
    if key_type == value_type:
        settings["kv_cache_dtype"] = key_type
        settings.pop("cache_type_k", None)
        settings.pop("cache_type_v", None)
    mode, shares = settings.pop("split_mode", "layer"), settings.pop("tensor_split", "")
    gpus = sum(share.strip() not in ("", "0") for share in re.split("[/,]", shares))
    if gpus > 1 and mode != "none":
        settings["pp" if mode == "layer" else "tp"] = gpus
        if len(set(shares.split(","))) > 1:
            remarks.append(f"--tensor-split {shares} is counted as equal parts")


class EngineCommand(NamedTuple):
    """An engine's command line in parts.

    Attributes:
        start: Words before the model's name.
        model: The model's name.
        words: Words of each flag, by the flag's name.
        options: Options of `fit` that no flag expresses.
    """

    start: tuple[str, ...]
    model: str
    words: dict[str, list[str]]
    options: tuple[str, ...]

    @property
    def line(self) -> str:
        flag_words = (word for words in self.words.values() for word in words)
        return shlex.join([*self.start, self.model, *flag_words])


def command_of(
    deployment: TimedDeployment, options: FitOptions, named: str = ""
) -> EngineCommand | None:
    """Return the engine's command line of a deployment; None if no command line can start it.

    Args:
        named: The model's name in the request. The command line uses this name if the engine
            understands it.
    """
    dialect = DIALECTS.get(options.engine)
    ranks = _write_ranks(dialect, deployment) if dialect else None
    if dialect is None or ranks is None:
        return None
    settings = ranks | _changed_options(dialect, options)
    if "shared_attention" not in settings and (count := settings.pop("max_num_seqs", 0)):
        # the engine counts one dp rank
        count_per_rank, remainder = divmod(count, deployment.parallelism.dp)
        if remainder:
            settings["fit_max_num_seqs"] = count
        else:
            settings["max_num_seqs"] = count_per_rank
    cache_dtype = canonical(deployment.precision.kv_cache_dtype)
    if cache_dtype != "auto" and dialect.engine != "llama.cpp":
        settings["kv_cache_dtype"] = cache_dtype
    if dialect.engine in _RULES:
        _RULES[dialect.engine][1](settings, deployment)
    if "max_loras" in settings:
        settings["lora"] = True
    model = _write_weights(dialect, deployment, named, settings)
    words = {}
    for flag in dialect.flags:
        name = flag.name.removeprefix("not_")
        value = settings.get(name)
        is_off = value is None or value is False
        if value is False if name != flag.name else not is_off:
            words[flag.name] = flag.words(value)
            del settings[name]
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
    if dialect.max_num_seqs_is_cap and options.max_num_seqs:
        # a command line requires only one sequence
        users = options.users or options.max_num_seqs
        options = replace(options, users=users if users > 1 else 0)
    defaults = FitOptions(engine=options.engine)
    changed = {}
    for name in options.__struct_fields__:
        value = getattr(options, name)
        if name != "from_log" and value != getattr(defaults, name):  # a file's name is unknown
            changed[name] = value
    return changed


def _hub_name(model: Model) -> str:
    return model.huggingface_id or model.name


def _write_ranks(dialect: Dialect, deployment: TimedDeployment) -> Settings | None:
    """Return the flags for the parallelism; None if the engine has no flags for it."""
    ranks = deployment.parallelism
    sizes = {name: getattr(ranks, name) for name in ("tp", "pp", "dp", "dcp", "ep")}
    values: Settings = {name: size for name, size in sizes.items() if size > 1}
    if dialect.engine == "vllm" and ranks.ep == ranks.tp * ranks.dp and values.pop("ep", 0):
        values["all_experts"] = True
    if dialect.engine == "llama.cpp" and len(values) == 1 and ranks.dp == 1:
        mode = "layer" if ranks.pp > 1 else "tensor"
        return {"split_mode": mode, "tensor_split": ",".join("1" * ranks.gpus)}
    has_experts = any(weight.expert for _, weight, _ in deployment.model.walk())
    if dialect.engine == "sglang" and ranks.dp > 1 and has_experts:
        values |= {"tp": ranks.tp * ranks.dp, "shared_attention": True}
    return None if any(dialect.flag(name) is None for name in values) else values


def _write_vllm(settings: Settings, deployment: TimedDeployment) -> None:
    ranks = deployment.parallelism
    if settings.get("max_in_flight_batches") in (1, 2) and ranks.pp == 1:
        is_one = settings.pop("max_in_flight_batches") == 1
        settings["one_in_flight" if is_one else "two_in_flight"] = True
    if size := settings.pop("kv_offloading_bytes", 0):
        settings["kv_offloading_size"] = size * ranks.tp * ranks.pp / GIB
    tokens = settings.pop("num_speculative_tokens", 0)
    drafter = {"method": "ngram"} if tokens else {}
    if settings.pop("mtp", False):
        drafter = {"method": "mtp"}
    elif "draft" in settings:
        drafter = {"model": _hub_name(settings.pop("draft"))}
    if drafter:
        settings["speculation"] = json.dumps({**drafter, "num_speculative_tokens": tokens or 1})


def _write_sglang(settings: Settings, deployment: TimedDeployment) -> None:
    if "draft" in settings:
        settings["prediction"] = "STANDALONE"
        settings["draft_name"] = _hub_name(settings.pop("draft"))
    elif settings.pop("mtp", False):
        settings["prediction"] = "EAGLE"
    tokens = settings.pop("num_speculative_tokens", 0)
    if tokens and "prediction" in settings:
        settings |= {
            "drafting_steps": tokens,
            "drafted_branches": 1,
            "verified_tokens": tokens + 1,
        }


def _write_llama_cpp(settings: Settings, deployment: TimedDeployment) -> None:
    """Add llama.cpp's flags: the context as cells of all sequences, and the types of keys and
    values."""
    slots = settings.setdefault("max_num_seqs", 1)
    length = settings.pop("max_model_len", 0) or deployment.model.max_context or 4096
    settings["cells"] = slots * length
    for name in ("cache_type_k", "cache_type_v"):
        requested = settings.pop(name, "") or deployment.precision.kv_cache_dtype
        dtype = canonical(requested)
        if dtype not in ("auto", "fp16"):
            settings[name] = dtype
    if "draft" in settings:
        settings["draft_name"] = f"./{settings.pop('draft').name}.gguf"


Reader = Callable[[Settings, list[str]], None]
Writer = Callable[[Settings, TimedDeployment], None]
_RULES: dict[str, tuple[Reader, Writer]] = {
    "vllm": (_read_vllm, _write_vllm),
    "sglang": (_read_sglang, _write_sglang),
    "llama.cpp": (_read_llama_cpp, _write_llama_cpp),
}


def option_words(name: str, value: Any) -> list[str]:
    """Return an option of `fit` as words of a command line."""
    if name == "hybrid":
        return ["--disable-hybrid-kv-cache-manager"]
    option = "--" + spelled(name.removeprefix("fit_"))
    if value is True:
        return [option]
    return [option, _hub_name(value) if isinstance(value, Model) else str(value)]


def _write_weights(
    dialect: Dialect, deployment: TimedDeployment, named: str, settings: Settings
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
    source = known_checkpoint(named)
    preset = known_checkpoint(model.huggingface_id or "") or known_checkpoint(model.name)
    if model.file or not preset or (source and "/" in source.name):
        # a file, or an unknown name on the Hub
        formats = {"fit_dtype": dtype, "fit_quantization": format_}
        settings |= {name: value for name, value in formats.items() if value}
        return model.file or _hub_name(model)
    takes_dtype = dialect.flag("dtype") and (format_ or not model.quantization)
    # the engine accepts a checkpoint's name, not a preset's
    is_llama_cpp = dialect.engine == "llama.cpp"
    is_checkpoint = named.lower().endswith(".gguf") if is_llama_cpp else "/" in named
    if (
        source
        and is_checkpoint
        and (source.name, source.quantization) == (preset.name, format_)
    ):
        if source.dtype == dtype:
            return named.removeprefix("hf:")
        if not source.dtype and takes_dtype:
            settings["dtype"] = dtype
            return named.removeprefix("hf:")
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
    if is_llama_cpp:
        return f"./{name}.gguf"
    return f"./{name}" if endings else _hub_name(model)
