"""What is said where a command does not know an option: what it calls the same, which command has it, or what is near."""

import sys
from collections.abc import Iterable
from typing import Any

from kvcalc.cli.commands import COMMANDS, parameters_of
from kvcalc.cli.help import EXAMPLES
from kvcalc.errors import printable

# Words that people bring from other tools, and what they may be called here: of these a command has one or more.
CALLED = {
    "trace dataset dataset-path dataset-name requests-file file": "requests",
    "context ctx ctx-size context-len context-length num-ctx n-ctx seq-len seqlen max-seq-len length tokens max-model-len":
        "context max-model-len input-len",
    "prompt prompt-len prompt-tokens input input-tokens random-input-len": "input-len context",
    "output-tokens max-tokens gen-len generation-len num-predict random-output-len": "output-len",
    "users concurrency num-users batch max-batch-size n-seqs num-seqs parallel": "users max-num-seqs max-concurrency batch-size",
    "gpus num-gpus n-gpus ngpus devices num-devices tensor-parallel": "tensor-parallel-size",
    "card device hardware accelerator": "gpu",
    "vram gpu-memory ram": "memory",
    "bits quant weights weight-dtype weight-quant precision q": "quantization dtype",
    "kv cache-dtype kv-dtype kv-cache kv-quant kv-bits cache-type": "kv-cache-dtype",
    "theme dark color colour": "style",
    "save picture figure image chart svg png": "plot output",
    "json csv markdown md": "format",
    "price cost cost-per-hour": "price-per-hour",
    "qps request-rate rps": "rate",
    "ttft": "max-ttft",
    "tpot itl": "max-tpot",
    "slo goodput": "max-tpot max-ttft",
    "speculative-model draft-model speculate spec": "draft",
    "prefix prefix-cache prefix-caching enable-prefix-caching": "prefix-hit-rate prefix-len shared-prefix",
    "offload kv-offload cpu-offload swap-space": "kv-offloading-bytes cpu-offload-gb",
    "disaggregated disaggregation prefill-decode pd": "disaggregate",
    "attention variant": "variants",
    "num-layers n-layers num-hidden-layers hidden-layers": "layers",
    "num-key-value-heads n-kv-heads num-kv-heads": "kv-heads",
    "num-attention-heads n-heads num-heads": "heads",
    "backend framework": "engine stack",
    "verbose details all": "wide explain",
}  # fmt: skip
SAID = {
    "energy power watts joules j-per-token": "`kvcalc latency` and `kvcalc plan` have J/token with --wide",
    "window attention-window": "--set sliding_window=4096 gives a model a window",
}
NEAR = 0.7  # of the letters alike: less is another word


FIT_FIRST = sorted(COMMANDS, key=lambda command: command != "fit")  # of many commands that have an option, what most people mean
ONE_MODEL = ("compare", "report")
VERSION = ("version", "-v", "-V")
NUMBERS = {"is not a valid int.": "is not a whole number.", "is not a valid float.": "is not a number."}


def said_of(error: Any, command: str) -> str:
    """A refusal of `command`'s parser in one line, with what to type instead; `error` is typer's own."""
    text = printable(error.format_message(), 600)
    for theirs, ours in NUMBERS.items():
        text = text.replace(theirs, ours)
    if command in VERSION:
        return "its version is in `kvcalc --version` (see `kvcalc --help`)"
    if command not in COMMANDS:
        known = not command or command.startswith("-") or "Did you mean" in text
        hint = "" if known else f" A model comes behind a command: `kvcalc size {printable(command, 100)}`"
        return f"{text}{hint} (see `kvcalc --help`)"
    name = printable(getattr(error, "option_name", "") or "", 100)
    if type(error).__name__ == "NoSuchOption":
        whole = name if name.startswith("--") else _typed(command, name)
        return f"{command} has no {whole}. {_instead(command, whole.lstrip('-').partition('=')[0])}"
    if type(error).__name__ == "MissingParameter" and (word := text.removeprefix("Missing argument '").rstrip("'.")) != text:
        return f"{command} takes {word}, as `{EXAMPLES[command][0]}` does (see `kvcalc {command} --help`)"
    further = text.removeprefix("Got unexpected extra argument(s) (").removesuffix(")")
    if further != text:
        hint = "`kvcalc size A B` and `kvcalc latency A B` take several models" if command in ONE_MODEL else "A list is a,b"
        return f"{command} takes no further word: {further}. {hint} (see `kvcalc {command} --help`)"
    return f"{text} (see `kvcalc {command} --help`)"


def _typed(command: str, letter: str) -> str:
    """The word of the command line of which the parser knows no first letter: `-dtype` of `-d`."""
    known = {name for p in parameters_of(command) for name in p.opts}
    return next((printable(w, 100) for w in sys.argv if w.startswith(letter) and w.partition("=")[0] not in known), letter)


def _instead(command: str, word: str) -> str:
    own, help_ = _options(command), f"`kvcalc {command} --help` lists its options"
    if word in own:
        return f"Did you mean --{word}? {help_}"
    if told := next((told for words, told in SAID.items() if word in words.split()), ""):
        return f"{told}; {help_}"
    called = next((called.split() for words, called in CALLED.items() if word in words.split()), [])
    if here := [f"--{name}" for name in called if name in own]:
        return f"Did you mean {' or '.join(here)}? {help_}"
    wanted = [word, *called]
    for name in wanted:
        if homes := [f"`kvcalc {other}`" for other in FIT_FIRST if other != command and name in _options(other)]:
            return f"{_listed(homes[:3])} ha{'s' if len(homes) == 1 else 've'} --{name}; {help_}"
    from difflib import get_close_matches

    near = [f"--{name}" for name in get_close_matches(word, own, n=3, cutoff=NEAR)]
    return f"Did you mean {' or '.join(near)}? {help_}" if near else help_


def _options(command: str) -> list[str]:
    """The names of a command's options, without dashes."""
    options = (p for p in parameters_of(command) if p.param_type_name == "option")
    return [name[2:] for option in options for name in option.opts if name.startswith("--")]


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
