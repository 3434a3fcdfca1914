"""SGLang's start-up log: `model_executor/model_runner.py`, `mem_cache/memory_pool.py`,
`managers/scheduler.py`.

Its "GB" are GiB.
"""

import re

from kvcalc.diagnosis.startup import (
    GIB,
    Boot,
    Failure,
    N,
    arguments_of,
    number,
    rules,
    tell,
    unquoted,
)

_NAMES = re.compile(r"\b([a-z_0-9]{1,60})=('[^']{0,400}'|\"[^\"]{0,400}\"|[\w.+-]{1,80})")
_OURS = arguments_of("sglang")


def begins(boot: Boot, line: str) -> bool:
    """Return whether a line begins another start."""
    if "server_args=ServerArgs(" not in line:
        return False
    again = "server_args" in boot.words
    boot.words["server_args"] = ""
    return again


def _arguments(boot: Boot, match: re.Match[str]) -> None:
    for name, text in _NAMES.findall(match[1]):
        value = unquoted(text)
        if name == "model_path" and value:
            boot.named = boot.named or value
        tell(boot, _OURS.get(name), value)


def _pool(boot: Boot, match: re.Match[str]) -> None:
    """Record the tokens and the bytes of keys plus values."""
    if match[1]:
        boot.count("tokens", int(number(match[1])), least=True)
    boot.keep("cache", sum(number(t) for t in match.groups()[1:] if t) * GIB)


def _windows(boot: Boot, match: re.Match[str]) -> None:
    """Record the bytes of the pools with and without windows. Tokens count in the latter."""
    boot.keep("pools", number(match[1]) * GIB)
    boot.count("without windows", int(number(match[2])), least=True)


def _states(boot: Boot, match: re.Match[str]) -> None:
    boot.keep("states", (number(match[1]) + number(match[2])) * GIB)


def _limits(boot: Boot, match: re.Match[str]) -> None:
    boot.count("tokens", int(number(match[1])), least=True)
    for name, pattern in (
        ("max_num_batched_tokens", r"chunked_prefill_size=(\d{1,12})"),
        ("max_model_len", r"context_len=(\d{1,12})"),
    ):
        if limits := re.search(pattern, match[0]):
            boot.tell(name, int(limits[1]))
    if limits := re.search(rf"available_gpu_mem={N} GB", match[0]):
        boot.keep("left", number(limits[1]) * GIB, least=True)
    boot.started = True


def _failed(boot: Boot, match: re.Match[str]) -> None:
    boot.failure = Failure("no_blocks", match[0])


RULES = rules(
    ("server_args=ServerArgs(", r"server_args=ServerArgs\((.*)", _arguments),
    ("Load weight begin", r"Load weight begin\. avail mem=<free> GB"),
    ("Load weight end", r"Load weight end\..{0,300}mem usage=<weights> GB"),
    (
        "KV Cache is allocated",
        rf"KV Cache is allocated\.(?: dtype: \S+,)? #tokens: {N}, (?:K size: {N} GB, V size: "
        rf"{N} GB|KV size: {N} GB)",
        _pool,
    ),
    (
        "SWAKVPool mem usage",
        rf"SWAKVPool mem usage: {N} GB, swa size: \d{{1,12}}, full size: {N}",
        _windows,
    ),
    (
        "Mamba Cache is allocated",
        rf"Mamba Cache is allocated\..{{0,120}}conv_state size: {N} ?GB, ssm_state size: {N} ?GB",
        _states,
    ),
    (
        "uda graph end",
        r"[Cc]apture (?:\w+ )?cuda graph end\..{0,80}mem usage=<graphs> GB",
    ),
    ("CUDA graph end", r"CUDA graph end\..{0,80}mem usage=<graphs> GB"),
    ("max_total_num_tokens=", rf"max_total_num_tokens={N}.*", _limits),
    (
        "mem-fraction-static",
        r"Not enough memory\. Please try to increase --mem-fraction-static",
        _failed,
    ),
)


def finished(boot: Boot) -> None:
    """Add the pools with and without windows, and the states, to one cache."""
    if "pools" in boot.figures:
        boot.figures["cache"], boot.counts["tokens"] = (
            boot.figures.pop("pools"),
            boot.counts.pop("without windows"),
        )
    if "states" in boot.figures and "cache" in boot.figures:
        boot.figures["cache"] += boot.figures["states"]
