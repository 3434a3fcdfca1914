"""An engine's command line as words: which engine it starts, and what its flags are given. Nothing is run."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from kvcalc.capacity.dialects import DIALECTS, Dialect, Flag
from kvcalc.errors import UserError

MOST_WORDS, MOST_LETTERS = 1000, 100_000
# Mappings whose keys can be flags: --speculative-config.method mtp
NESTED, MOST_KEYS = ("limit_mm_per_prompt", "speculation", "engram_config"), 8
_ASSIGNED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)


def split(words: Sequence[str]) -> list[str]:
    if sum(map(len, words)) > MOST_LETTERS or len(words) > MOST_WORDS:
        raise UserError(f"a command line of more than {MOST_LETTERS:,} letters is not read")
    if len(words) == 1 and " " in words[0].strip():
        try:
            return shlex.split(words[0].replace("\\\n", " "))
        except ValueError:
            raise UserError("the command line has a quotation mark without its partner") from None
    return [w for w in words if w.strip() and w != "\\"]


def started(words: Sequence[str]) -> tuple[Dialect, list[str], str] | None:
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


def parsed(dialect: Dialect, words: list[str]) -> tuple[dict[str, Any], list[str], list[str]]:
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
        name, _, keys = name.partition(".")
        spelled = _spelled(dialect, name)
        flag = flags.get(spelled)
        if keys and flag and flag.name in NESTED:
            _put(told, [flag.name, *keys.split(".")], value if joined else _value(name, waiting))
        elif flag and flag.alone and not keys:
            told[flag.name] = value.lower() not in ("false", "0") if joined else True
            if not joined and waiting and waiting[-1].lower() in ("true", "false"):
                told[flag.name] = waiting.pop().lower() == "true"
        elif not keys and (flag or spelled in (*dialect.model, *dialect.also)):
            if not joined:
                value = _value(name, waiting)
            told["model" if flag is None else flag.name] = value if flag is None else _read(flag, name, value)
        elif joined or spelled in dialect.switches or not waiting or re.match(r"--?[A-Za-z]", waiting[-1]):
            ignored.append(word)
        else:
            ignored.append(f"{word} {waiting.pop()}")
    written = {name: json.dumps(told[name]) for name in NESTED if isinstance(told.get(name), dict)}
    return told | written, ignored, free


def _put(told: dict[str, Any], path: Sequence[str], text: str) -> None:
    """A value, a number or a truth value where it is one, at the end of a path of mappings."""
    if len(path) > MOST_KEYS:
        raise UserError(f"--{path[0].replace('_', '-')} with more than {MOST_KEYS} keys inside each other is not read")
    for key in path[:-1]:
        inner = told.get(key)
        told[key] = told = inner if isinstance(inner, dict) else {}
    truth = {"true": True, "false": False}
    told[path[-1]] = int(text) if text.isdecimal() and len(text) < 19 else truth.get(text.lower(), text)


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
