"""A plan's question as people write it: options by name, from a command line, a notebook or a YAML file."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from kvcalc.capacity import FitOptions
from kvcalc.errors import UserError, nearest
from kvcalc.gpu.spec import Gpu
from kvcalc.library.engine_choice import engine_choices
from kvcalc.library.files import MOST_YAML, read_text
from kvcalc.library.listing import all_gpus
from kvcalc.library.load import load_gpu, with_rate_between
from kvcalc.library.words import from_words, spelled
from kvcalc.library.yaml_text import parse_yaml
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.planning.need import Need
from kvcalc.planning.space import Space, Speculated
from kvcalc.serving.speculation import ACCEPTANCE, expected_tokens
from kvcalc.units import parse_tokens

MOST_NEEDS = 1000
NEEDS = ("users", "context", "input_len", "output_len", "rate")  # lists, whose items each make a need
LIMITS = ("max_ttft", "max_tpot", "min_throughput", "prefix_hit_rate")
SIZES = ("tp", "pp", "dp", "ep")
FORMATS = ("dtype", "quantization", "kv_cache_dtype")
ENGINE = ("engine", "engine_version", "gpu_memory_utilization", "max_num_batched_tokens", "enforce_eager")
TIMES = ("bounds", "calibration", "calibration_from", "stack", "mixed")
OTHERS = ("gpu", "max_gpus", "nodes", "inter_node_bandwidth", "price_per_hour")
ALONE = {"engine": "fit", "calibration": "latency", "stack": "latency"}  # of which a plan takes one; commands that take lists
DRAFTS = ("draft", "num_speculative_tokens", "acceptance_rate")
KEYS = (*DRAFTS, "disaggregate", *NEEDS, *LIMITS, *SIZES, *FORMATS, *ENGINE, *TIMES, *OTHERS)


class Question(NamedTuple):
    """What is asked. prices: of an hour of a GPU, by its name."""

    needs: list[Need]
    space: Space
    prices: dict[str, float]


def question_of(models: Sequence[Model], given: Mapping[str, Any]) -> Question:
    """The question that options come to. Raises UserError on an option that there is not, or a value that it cannot have.

    Values are words, numbers, or lists of them; None and '' leave the default.
    """
    words = {name: _joined(value) for name, value in given.items()}
    for name in words:
        if name not in KEYS:
            raise UserError(f"unknown option {name!r}", hint=nearest(name, KEYS))
    for name, command in ALONE.items():
        if "," in words.get(name, ""):
            raise UserError(f"a plan takes one {spelled(name)}, not {words[name]}", hint=f"`kvcalc {command}` takes a list")
    between = words.get("inter_node_bandwidth", "")
    gpus = [with_rate_between(gpu, between) for gpu in chosen_gpus(words.get("gpu", "") or "all")]
    options = {name: words[name] for name in ENGINE if words.get(name)}
    (choice,) = engine_choices(
        words.get("engine", "") or "vllm",
        words.get("calibration", ""),
        bool(_switch(words, "bounds")),
        words.get("stack", ""),
    )
    options["engine"] = choice.engine
    space = Space(
        models=tuple(models),
        gpus=tuple(gpus),
        max_gpus=_whole(words.get("max_gpus", "") or "16", "max-gpus", 0),
        nodes=_whole(words.get("nodes", "") or "0", "nodes", 0),
        precisions=tuple(_precisions(words)),
        options=from_words(FitOptions, options | _switch(words, "enforce_eager")),
        calibration=choice.calibration,
        calibration_from=words.get("calibration_from", ""),
        drafts=tuple(_drafts(words)),
        disaggregate=(False, True) if _switch(words, "disaggregate") else (False,),
        **{name: tuple(_whole(word, name) for word in _list(words.get(name, ""))) for name in SIZES},
    )
    needs = _needs(words)
    if True in space.disaggregate and not all(need.output_len > 1 for need in needs):
        raise UserError("prompts apart from decodes take answers of 2 tokens or more", hint="Give --input-len and --output-len")
    return Question(needs, space, prices_of(words.get("price_per_hour", ""), gpus))


def _joined(value: Any) -> str:
    """A value as it would be typed: items of a list between commas."""
    if value is None or value is False:
        return ""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _list(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(words):
        raise UserError(f"list {text!r} has an empty place")
    return words


def _whole(word: str, name: str, least: int = 1) -> int:
    if not (word.isascii() and word.isdigit() and int(word[:9]) >= least):
        raise UserError(f"{spelled(name)} {word!r} is not a number of GPUs", hint=f"Give a whole number from {least} up")
    return int(word[:9])


def _switch(words: Mapping[str, str], name: str) -> dict[str, bool]:
    """{name: True} where a switch is on."""
    text = words.get(name, "").lower()
    if text not in ("", "true", "false"):
        raise UserError(f"{spelled(name)} {text!r} is neither true nor false")
    return {name: True} if text == "true" else {}


def _needs(words: Mapping[str, str]) -> list[Need]:
    """A need for each combination of the lists, the first slowest."""
    limits = {name: words[name] for name in LIMITS if words.get(name)}
    lists = [_list(words.get(name, "")) or [""] for name in NEEDS]
    if prod(map(len, lists)) > MOST_NEEDS:
        raise UserError(f"more than {MOST_NEEDS:,} needs asked for")
    every = product(*lists)
    return [from_words(Need, dict(zip(NEEDS, one, strict=True)) | limits | _numbers(one, limits)) for one in every]


def _numbers(chosen: Sequence[str], limits: Mapping[str, str]) -> dict[str, float]:
    """The values that are plain numbers."""
    named = {"rate": chosen[NEEDS.index("rate")], **{n: limits.get(n, "") for n in ("min_throughput", "prefix_hit_rate")}}
    return {name: number(text, spelled(name)) for name, text in named.items() if text}


def number(text: str, what: str) -> float:
    """A finite number that is not below 0. Raises UserError naming what it is of."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e15:
        raise UserError(f"{what} {text!r} is not a number from 0 up")
    return value


def _drafts(words: Mapping[str, str]) -> list[Speculated | None]:
    """Every combination of drafts, tokens drafted and acceptance rates; `none` among the drafts for none."""
    names = _list(words.get("draft", ""))
    if not names:
        if words.get("num_speculative_tokens") or words.get("acceptance_rate"):
            raise UserError("num-speculative-tokens and acceptance-rate are of a draft, and there is none")
        return [None]
    tokens = [parse_tokens(word, "num-speculative-tokens") for word in _list(words.get("num_speculative_tokens", ""))]
    rates = [number(word, "acceptance-rate") for word in _list(words.get("acceptance_rate", ""))] or [ACCEPTANCE]
    if any(name != "none" for name in names) and not tokens:
        raise UserError("a draft needs num-speculative-tokens", hint="`kvcalc latency --draft` finds the best")
    for rate in rates:
        expected_tokens(rate, 1)
    found = [Speculated(*one) for one in product((name for name in names if name != "none"), tokens, rates)]
    return [*([None] if "none" in names else []), *found]


def _precisions(words: Mapping[str, str]) -> Iterable[Precision]:
    lists = [_list(words.get(name, "")) or [default] for name, default in zip(FORMATS, ("auto", "", "auto"), strict=True)]
    for dtype, quantization, cache in product(*lists):
        yield Precision(dtype, cache, "" if quantization.lower() in ("auto", "none") else quantization)


def chosen_gpus(names: str) -> list[Gpu]:
    """The GPUs of a list, each once; `all` is every preset."""
    each = dict.fromkeys(_list(names))
    found = [gpu for name in each for gpu in (all_gpus() if name.lower() == "all" else [load_gpu(name)])]
    return list({gpu.name: gpu for gpu in found}.values())


def prices_of(text: str, gpus: Sequence[Gpu]) -> dict[str, float]:
    """Prices of an hour: `h100=2.5,h200=3`, one number for a single kind of GPU, or a YAML file of them. None is made up.

    Raises UserError on a GPU that there is not, a price that is none, or one number for several kinds.
    """
    if not text:
        return {}
    lines: dict[tuple[str | int, ...], int] = {}
    where = text if text.lower().endswith((".yaml", ".yml")) else ""
    if where:
        data, lines = parse_yaml(read_text(Path(text), MOST_YAML), text)
        pairs = [(name, str(price)) for name, price in data.items()]
    elif "=" not in text:
        hint = "Write h100=2.5,h200=3.1, or a YAML file of such lines"
        if ":" in text:
            raise UserError(f"price-per-hour {text!r} is no price", hint=hint)
        if len(gpus) != 1:
            raise UserError(f"price-per-hour {text!r} is one price for {len(gpus)} kinds of GPU", hint=hint)
        pairs = [(gpus[0].name, text)]
    else:
        pairs = [(name, price) for name, _, price in (word.partition("=") for word in _list(text))]
    found = {}
    for name, price in pairs:
        try:
            gpu = next((gpu for gpu in gpus if gpu.name == name.strip()), None) or load_gpu(name)
            found[gpu.name] = number(price, f"price of {gpu.name}")
            if not found[gpu.name]:
                raise UserError(f"price of {gpu.name} {price!r} is not above 0")
        except UserError as error:
            if not where or error.where:
                raise
            raise UserError(error.what, f"{where}, line {lines[name,]}", error.hint) from None
    return found


def file_options(path: str) -> dict[str, Any]:
    """The options in a YAML file, by the names of the command line, with - or _. Raises UserError naming file and line."""
    data, lines = parse_yaml(read_text(Path(path), MOST_YAML), path)
    found = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name not in KEYS:
            raise UserError(f"unknown option {key!r}", f"{path}, line {lines.get((key,), 1)}", nearest(name, KEYS))
        if isinstance(value, dict):
            value = [f"{k}={v}" for k, v in value.items()]
        found[name] = value
    return found
