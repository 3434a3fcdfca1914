"""The question of `plan`, from options by name: of a command line, a notebook or a YAML file."""

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from kvcalc.capacity import FitOptions
from kvcalc.errors import UserError, nearest
from kvcalc.gpu.gpu import Gpu
from kvcalc.library.choices import engine_choices, from_words, spelled
from kvcalc.library.files import MOST_YAML, read_text
from kvcalc.library.load import all_gpus, load_gpu, with_rate_between
from kvcalc.library.yaml_text import parse_yaml
from kvcalc.model.model import Model
from kvcalc.model.precision import Precision
from kvcalc.planning.search_space import (
    Requirement,
    SearchSpace,
    Speculation,
    parse_number,
)
from kvcalc.records import Settings
from kvcalc.serving.speculation import ACCEPTANCE, expected_tokens
from kvcalc.units import parse_tokens

MAX_REQUIREMENTS = 1000
# lists: each combination is a requirement
LOADS = ("users", "context", "input_len", "output_len", "rate")
TARGETS = ("max_ttft", "max_tpot", "min_throughput", "prefix_hit_rate")
SIZES = ("tp", "pp", "dp", "ep")
FORMATS = ("dtype", "quantization", "kv_cache_dtype")
ENGINE = ("engine_version", "gpu_memory_utilization", "max_num_batched_tokens")
# options of which a plan takes one value, and a command that takes lists
SINGLE = {"engine": "fit", "calibration": "latency", "stack": "latency"}
DRAFTS = ("draft", "num_speculative_tokens", "acceptance_rate")
KEYS = (
    *DRAFTS, "disaggregate", *LOADS, *TARGETS, *SIZES, *FORMATS,
    "engine", *ENGINE, "enforce_eager", "bounds", "calibration", "calibration_from", "stack",
    "mixed", "gpu", "max_gpus", "nodes", "inter_node_bandwidth", "price_per_hour",
)  # fmt: skip


class PlanQuestion(NamedTuple):
    """The requirements and search space of a plan.

    Attributes:
        prices: Price per hour of each GPU model, by name.
    """

    needs: list[Requirement]
    space: SearchSpace
    prices: dict[str, float]


def question_of(models: Sequence[Model], options: Mapping[str, Any]) -> PlanQuestion:
    """Return the question that options describe.

    Args:
        options: Texts, numbers or lists of them; None and '' leave the default.

    Raises:
        UserError: An option is unknown or has a wrong value.
    """
    words = dict.fromkeys(KEYS, "")
    for name, value in options.items():
        if name not in KEYS:
            raise UserError(f"unknown option {name!r}", hint=nearest(name, KEYS))
        words[name] = _joined(value)
    for name, command in SINGLE.items():
        if "," in words[name]:
            raise UserError(
                f"a plan takes one {spelled(name)}, not {words[name]}",
                hint=f"`kvcalc {command}` takes a list",
            )
    bandwidth = words["inter_node_bandwidth"]
    gpus = [with_rate_between(gpu, bandwidth) for gpu in chosen_gpus(words["gpu"] or "all")]
    (choice,) = engine_choices(
        engine=words["engine"] or "vllm",
        calibration=words["calibration"],
        bounds=_is_on(words, "bounds"),
        stack=words["stack"],
    )
    engine_options: Settings = {name: words[name] for name in ENGINE}
    engine_options["engine"] = choice.engine
    engine_options["enforce_eager"] = _is_on(words, "enforce_eager")
    disaggregates = _is_on(words, "disaggregate")
    sizes = {
        name: tuple(_gpu_count(word, name) for word in _list(words[name])) for name in SIZES
    }
    space = SearchSpace(
        models=tuple(models),
        gpus=tuple(gpus),
        max_gpus=_gpu_count(words["max_gpus"] or "16", "max-gpus", 0),
        nodes=_gpu_count(words["nodes"] or "0", "nodes", 0),
        precisions=tuple(_precisions(words)),
        options=from_words(FitOptions, engine_options),
        calibration=choice.calibration,
        calibration_from=words["calibration_from"],
        drafts=tuple(_drafts(words)),
        disaggregate=(False, True) if disaggregates else (False,),
        **sizes,
    )
    needs = _requirements(words)
    if disaggregates and not all(need.output_len > 1 for need in needs):
        raise UserError(
            "disaggregated prefill needs answers of 2 tokens or more",
            hint="Give --input-len and --output-len",
        )
    return PlanQuestion(needs, space, prices_of(words["price_per_hour"], gpus))


def _joined(value: Any) -> str:
    """Return a value as it would be typed."""
    if value is None or value is False:
        return ""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _list(text: str) -> list[str]:
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(words):
        raise UserError(f"list {text!r} has an empty item")
    return words


def _gpu_count(word: str, name: str, minimum: int = 1) -> int:
    if not (word.isascii() and word.isdigit() and int(word[:9]) >= minimum):
        raise UserError(
            f"{spelled(name)} {word!r} is not a number of GPUs",
            hint=f"Give a whole number from {minimum} up",
        )
    return int(word[:9])


def _is_on(words: Mapping[str, str], name: str) -> bool:
    text = words[name].lower()
    if text not in ("", "true", "false"):
        raise UserError(f"{spelled(name)} {text!r} is neither true nor false")
    return text == "true"


def _requirements(words: Mapping[str, str]) -> list[Requirement]:
    """Return a requirement for each combination of the lists, the first slowest."""
    targets = {name: words[name] for name in TARGETS}
    lists = [_list(words[name]) or [""] for name in LOADS]
    if prod(map(len, lists)) > MAX_REQUIREMENTS:
        raise UserError(f"more than {MAX_REQUIREMENTS:,} requirements")
    return [
        from_words(Requirement, dict(zip(LOADS, loads, strict=True)) | targets)
        for loads in product(*lists)
    ]


def _drafts(words: Mapping[str, str]) -> list[Speculation | None]:
    """Return every combination of drafts, draft tokens and acceptance rates. `none` is no draft."""
    names, tokens, rates = (_list(words[name]) for name in DRAFTS)
    if not names:
        if tokens or rates:
            raise UserError("num-speculative-tokens and acceptance-rate need a draft")
        return [None]
    counts = [parse_tokens(word, "num-speculative-tokens") for word in tokens]
    acceptances = [parse_number(word, "acceptance-rate") for word in rates] or [ACCEPTANCE]
    models = [name for name in names if name != "none"]
    if models and not counts:
        raise UserError(
            "a draft needs num-speculative-tokens",
            hint="`kvcalc latency --draft` finds the best",
        )
    for rate in acceptances:
        expected_tokens(rate, 1)
    drafts = [Speculation(*values) for values in product(models, counts, acceptances)]
    return [None, *drafts] if "none" in names else [*drafts]


def _precisions(words: Mapping[str, str]) -> list[Precision]:
    dtypes, quantizations, caches = (_list(words[name]) for name in FORMATS)
    return [
        Precision(
            dtype,
            cache,
            "" if quantization.lower() in ("auto", "none") else quantization,
        )
        for dtype, quantization, cache in product(
            dtypes or ["auto"], quantizations or ["none"], caches or ["auto"]
        )
    ]


def chosen_gpus(names: str) -> list[Gpu]:
    """Return the GPUs of a list, each once. `all` is every preset."""
    gpus: dict[str, Gpu] = {}
    for name in dict.fromkeys(_list(names)):
        for gpu in all_gpus() if name.lower() == "all" else [load_gpu(name)]:
            gpus[gpu.name] = gpu
    return [*gpus.values()]


def prices_of(text: str, gpus: Sequence[Gpu]) -> dict[str, float]:
    """Return the price per hour of each GPU model.

    Args:
        text: `h100=2.5,h200=3`, one number for one GPU model, or a YAML file.

    Raises:
        UserError: A GPU is unknown, a price is wrong, or one number is for several GPU models.
    """
    hint = "Write h100=2.5,h200=3.1, or a YAML file of such lines"
    lines: dict[tuple[str | int, ...], int] = {}
    if text.lower().endswith((".yaml", ".yml")):
        data, lines = parse_yaml(read_text(Path(text), MOST_YAML), text)
        pairs = [(name, str(price)) for name, price in data.items()]
    elif "=" in text or not text:
        pairs = [(word.partition("=")[0], word.partition("=")[2]) for word in _list(text)]
    elif ":" in text:
        raise UserError(f"price-per-hour {text!r} is not a price", hint=hint)
    elif len(gpus) != 1:
        raise UserError(
            f"price-per-hour {text!r} is one price for {len(gpus)} GPU models",
            hint=hint,
        )
    else:
        pairs = [(gpus[0].name, text)]
    known = {gpu.name: gpu for gpu in gpus}
    prices = {}
    for name, word in pairs:
        try:
            gpu = known.get(name.strip()) or load_gpu(name)
            price = parse_number(word, f"price of {gpu.name}")
            if not price:
                raise UserError(f"price of {gpu.name} {word!r} is not above 0")
        except UserError as error:
            if not lines or error.where:
                raise
            raise UserError(error.what, f"{text}, line {lines[name,]}", error.hint) from None
        prices[gpu.name] = price
    return prices


def file_options(path: str) -> Settings:
    """Return the options of a YAML file, named as on the command line, with - or _.

    Raises:
        UserError: The file is wrong; the message names file and line.
    """
    data, lines = parse_yaml(read_text(Path(path), MOST_YAML), path)
    options = {}
    for key, value in data.items():
        name = key.replace("-", "_")
        if name not in KEYS:
            where = f"{path}, line {lines.get((key,), 1)}"
            raise UserError(f"unknown option {key!r}", where, nearest(name, KEYS))
        if isinstance(value, dict):
            value = [f"{k}={v}" for k, v in value.items()]
        options[name] = value
    return options
