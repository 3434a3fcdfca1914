"""What `--help` shows: three examples, the options that one needs first, the rest by panel; 80 columns, no name cut."""

import shutil
from collections.abc import Iterable, Sequence
from typing import Any

from kvcalc.cli.commands import COMMANDS, parameters_of
from kvcalc.report.layout import wrapped

ABOUT = "How big is the KV cache, what does it cost to read, and what will this GPU do with it?"
EXIT_STATUS = "Exit status: 0 done; 1 the answer is no, or a check failed; 2 the request is wrong."
FIRST_STEPS = {
    "kvcalc size llama-3.1-8b --context 128k": "how big is the cache",
    "kvcalc fit llama-3.1-70b --gpu h100 --tp 4": "how many users fit",
    "kvcalc compare llama-7b --variants mha,gqa:8": "what other attention saves",
    "kvcalc latency llama-3.1-8b --gpu h100": "how long one request takes",
    "kvcalc models llama": "what models there are",
}
EXAMPLES = {
    "size": (
        "kvcalc size llama-3.1-8b --context 8k,128k",
        "kvcalc size deepseek-v3.2 gpt-oss-120b --context 128k --batch-size 16",
        "kvcalc size llama-3.1-70b --tp 8 --kv-cache-dtype bf16,fp8",
    ),
    "compare": (
        "kvcalc compare llama-7b --variants mha,gqa:8,mqa,mla:512+64",
        "kvcalc compare --layers 32 --heads 32 --kv-heads 8 --head-dim 128",
        "kvcalc compare gemma-3-27b --variants none,mqa,cla:2 --context 64k",
    ),
    "roofline": (
        "kvcalc roofline llama-3.1-8b --gpu h100 --batch-size 8",
        "kvcalc roofline deepseek-v3.2 --gpu h200 --tp 8 --phase prefill",
        "kvcalc roofline llama-3.1-8b --gpu h100,h200 --explain",
    ),
    "latency": (
        "kvcalc latency llama-3.1-8b --gpu h100 --input-len 2k --output-len 500",
        "kvcalc latency llama-3.1-70b --gpu h100,h200 --tp 4 --batch-size 1,64",
        "kvcalc latency llama-3.1-70b --tp 4 --draft llama-3.2-1b",
    ),
    "serve": (
        "kvcalc serve llama-3.1-8b --gpu h100",
        "kvcalc serve llama-3.1-8b --rate 2,8 --policy static,continuous",
        "kvcalc serve llama-3.1-8b --rate 20 --price-per-hour 2.5 --plot -",
    ),
    "fit": (
        "kvcalc fit llama-3.1-70b --gpu h100 --tp 4 --max-model-len 32k",
        "kvcalc fit llama-3.1-70b --gpu h100,h200,mi300x --tp 2,4,8 --require 16",
        "kvcalc fit --gpu h200 -- vllm serve Qwen/Qwen3-32B -tp 2",
    ),
    "diagnose": (
        "kvcalc diagnose server.log",
        "kvcalc diagnose server.log --gpu l4 --users 8 --context 16k",
        "kvcalc diagnose --metrics http://localhost:8000/metrics --gpu h100",
    ),
    "plan": (
        "kvcalc plan llama-3.1-70b --users 64 --context 16k --max-tpot 50ms",
        "kvcalc plan deepseek-v3 --users 64 --context 32k --gpu h200 --max-gpus 16",
        "kvcalc plan llama-3.1-8b --rate 5 --isl 2k --osl 200 --gpu h100",
    ),
    "measure": (
        "kvcalc measure",
        "kvcalc measure llama-3.2-1b --context 4k --output rows.csv",
        "kvcalc measure --device cuda --save-gpu mine",
    ),
    "calibrate": (
        "kvcalc calibrate rows.csv --gpu h100 --stack mine",
        "kvcalc calibrate gemm.csv attention.csv --gpu mine.yaml --stack vllm",
        "kvcalc calibrate rows.csv --gpu h100 --stack mine -o mine.yaml",
    ),
    "validate": (
        "kvcalc validate rows.csv",
        "kvcalc validate rows.csv --by op,dtype --predictions out.csv",
        "kvcalc validate rows.csv --stack datasheet --fail-above 50",
    ),
    "plot": (
        "kvcalc plot cache-vs-context",
        "kvcalc plot roofline --plot roofline.svg --style slides",
        "kvcalc plot memory llama-3.1-8b qwen3-8b --gpu h100 --context 32k",
    ),
    "report": (
        "kvcalc report llama-3.1-70b --gpu h100 --tp 4 -o llama.html",
        "kvcalc report deepseek-v3.2 --gpu h200 --tp 8 --context 64k --users 32",
        "kvcalc report gpt-oss-20b --gpu rtx-4090 --engine llama.cpp",
    ),
    "models": ("kvcalc models llama", "kvcalc models --attention mla", "kvcalc models deepseek-v3.2"),
    "gpus": ("kvcalc gpus", "kvcalc gpus h100", "kvcalc gpus --vendor amd"),
}
# The options that one needs first, by the names of parameters; commands with no more than these many show all alike.
_DEPLOYED = "gpu tp dtype kv_cache_dtype quantization"
FIRST = {
    "size": "context batch_size kv_cache_dtype dtype quantization tp set_ explain plot form",
    "compare": "variants gpu context batch_size tp dtype kv_cache_dtype plot wide form",
    "roofline": "gpu phase batch_size context tp dtype kv_cache_dtype explain plot form",
    "latency": "gpu input_len output_len batch_size tp dtype kv_cache_dtype quantization draft form",
    "serve": "gpu rate num_prompts input_len output_len max_num_seqs tp policy price_per_hour form",
    "fit": "gpu tp max_model_len max_num_seqs engine require dtype kv_cache_dtype quantization explain",
    "report": "gpu context users engine tp dtype kv_cache_dtype quantization bounds memory",
    "plan": "users context max_tpot max_ttft gpu max_gpus price_per_hour quantization plot form",
    "measure": "variant phase batch_size context dtype device rows generate plot form",
}
PANELS = {
    "How it is stored": "dtype kv_cache_dtype quantization block_size set_ mla_form",
    "Speculation": "draft num_speculative_tokens acceptance_rate",
    "Output": "output plot style form wide explain",
}
# What an option takes, by the names of parameters: N, X, WORD and a choice are told by their types.
TAKEN = {
    "MODEL…": "models", "MODEL": "model draft", "GPUS": "gpu", "GPU": "calibration_from", "NAME": "name save_gpu engine stack",
    "NAME|FILE": "calibration",
    "FIGURE": "kind", "LOG…": "logs", "LIST": "variants", "SIDE": "sides", "KEY=VALUE": "set_", "DTYPE": "dtype kv_cache_dtype",
    "FORMAT": "quantization", "MONEY": "price_per_hour", "R": "rate", "TIME": "max_ttft max_tpot slo_ttft slo_tpot think_time",
    "TOKENS": "context input_len output_len max_model_len prefix_len shared_prefix sliding_window prompt_len prefill_context "
              "max_num_batched_tokens generate",
    "FILE": "plot rows requests timeline file points from_log save out output predictions input_ import_ allocations lengths "
            "metrics",
    "N": "tp pp dp ep batch_size max_num_seqs users num_speculative_tokens threads seed",
    "X": "acceptance_rate prefix_hit_rate gpu_memory_utilization min_throughput",
    "SIZE": "memory kv_cache_memory_bytes kv_offloading_bytes weight_bytes activation_bytes overhead_bytes",
    "RATE": "inter_node_bandwidth disk_bandwidth", "VERSION": "engine_version", "PASS": "batch",
    "TYPE": "cache_type_k cache_type_v",
}  # fmt: skip
METAVARS = {name: word for word, names in TAKEN.items() for name in names.split()}
LEFT = 27  # where descriptions begin


def first_steps() -> str:
    """What `kvcalc` alone shows: what to try first."""
    lines = [f"{line:<48}{text}" for line, text in FIRST_STEPS.items()]
    return "\n".join([*lines, f"{'kvcalc --help':<48}all commands"]) + "\n"


def help_of(command: str = "") -> str:
    """The help of a command, or of all."""
    width = max(40, min(shutil.get_terminal_size((80, 24)).columns, 100))
    lines = _command(command, width) if command else _all(width)
    return "\n".join([*lines, "", *wrapped(EXIT_STATUS, width)]) + "\n"


def _all(width: int) -> list[str]:
    lines = ["kvcalc COMMAND …", "", *wrapped(ABOUT, width), "", "Try first:", *(f"  {line}" for line in FIRST_STEPS)]
    lines += ["", "Commands (kvcalc COMMAND --help shows examples and options):"]
    for name, text in COMMANDS.items():
        lines += _row(name, text, width, 14)
    lines += ["", "Options:"]
    for name, text in (
        ("--install-completion [SHELL]", "Complete words in bash, zsh or fish; by default in this one."),
        ("--show-completion [SHELL]", "Print the script that does."),
        ("--version", "Print the version."),
        ("-h, --help", "Show this message."),
    ):
        lines += _row(name, text, width, LEFT + 4)
    return lines


def _command(name: str, width: int) -> list[str]:
    arguments = [p for p in parameters_of(name) if p.param_type_name == "argument"]
    options = {p.name: p for p in parameters_of(name) if p.param_type_name == "option"}
    words = " ".join(word_of(p) if p.required else f"[{word_of(p)}]" for p in arguments)
    lines = [f"kvcalc {name} {words} [options]".replace("  ", " "), "", *wrapped(COMMANDS[name], width), "", "Examples:"]
    lines += [f"  {line}" for line in EXAMPLES[name]] + [""]
    for argument in arguments:
        lines += _row(word_of(argument), argument.help or "", width, LEFT)
    first = [options.pop(key) for key in FIRST.get(name, "").split()]
    lines += ["", "First of all:" if first else "Options:", *_rows(first or list(options.values()), width)]
    for panel, members in panels(list(options.values()) if first else []).items():
        lines += ["", f"{panel}:", *_rows(members, width)]
    return lines


def panels(options: Iterable[Any]) -> dict[str, list[Any]]:
    """Options by the panel they name, else by that which names them, else the further ones."""
    homes = {key: panel for panel, keys in PANELS.items() for key in keys.split()}
    found: dict[str, list[Any]] = {"Further": []}
    for option in options:
        panel = getattr(option, "rich_help_panel", None) or homes.get(option.name, "Further")
        found.setdefault(panel, []).append(option)
    return {panel: members for panel, members in found.items() if members}


def _rows(options: Sequence[Any], width: int) -> list[str]:
    return [line for option in options for line in _row(names_of(option), meaning_of(option), width, LEFT)]


def _row(name: str, text: str, width: int, left: int) -> list[str]:
    """A name with what it means beside it, or below it where the name is long."""
    lines = [" " * left + line for line in wrapped(text, width - left)]
    if len(name) + 4 > left:
        return [f"  {name}", *lines]
    return [f"  {name}".ljust(left) + lines[0][left:], *lines[1:]]


def names_of(option: Any) -> str:
    """All names, the longest first, and what it takes."""
    names = [*sorted(option.opts, key=len, reverse=True), *option.secondary_opts]
    return ", ".join(names) + ("" if option.is_flag else f" {word_of(option)}")


def word_of(parameter: Any) -> str:
    choices = getattr(parameter.type, "choices", None)
    if parameter.name in METAVARS:
        return METAVARS[parameter.name] + ("…" if parameter.name == "rows" and parameter.nargs < 0 else "")
    if choices:
        return "|".join(str(getattr(c, "value", c)) for c in choices)
    return {"integer": "N", "int": "N", "float": "X"}.get(parameter.type.name, "WORD")


def meaning_of(option: Any) -> str:
    default = getattr(option.default, "value", option.default)
    shown = option.show_default and not option.is_flag and default not in (None, "", 0, []) and default == default
    meaning = option.help or ""
    return f"{meaning} [{default}]" if shown and default != float("inf") else meaning
