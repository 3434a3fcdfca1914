"""SGLang's start-up log: `model_executor/model_runner.py`, `mem_cache/memory_pool.py`, `managers/scheduler.py`.

Its "GB" are GiB.
"""

import re

from kvcalc.planning.startup.boot import GIB, Boot, Failure
from kvcalc.planning.startup.words import N, Take, arguments_of, number, rules, tell, unquoted

_NAMES = re.compile(r"\b([a-z_0-9]{1,60})=('[^']{0,400}'|\"[^\"]{0,400}\"|[\w.+-]{1,80})")
_OURS = arguments_of("sglang")


def begins(boot: Boot, line: str) -> bool:
    """Whether a line starts another boot than the one that is read."""
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


def _figure(name: str, least: bool = False) -> Take:
    return lambda boot, match: boot.keep(name, number(match[1]) * GIB, least)


def _pool(boot: Boot, match: re.Match[str]) -> None:
    """Tokens, and keys and values together; several pools are added up by their kind."""
    if match[1]:
        boot.count("tokens", int(number(match[1])), least=True)
    boot.keep("cache", sum(number(t) for t in match.groups()[1:] if t) * GIB)


def _windows(boot: Boot, match: re.Match[str]) -> None:
    """The pools with and without windows together; tokens are those of the pool without."""
    boot.keep("pools", number(match[1]) * GIB)
    boot.count("without windows", int(number(match[2])), least=True)


def _states(boot: Boot, match: re.Match[str]) -> None:
    boot.keep("states", (number(match[1]) + number(match[2])) * GIB)


def _limits(boot: Boot, match: re.Match[str]) -> None:
    boot.count("tokens", int(number(match[1])), least=True)
    for name, pattern in (
        ("max_num_batched_tokens", r"chunked_prefill_size=(\d{1,12})"), ("max_model_len", r"context_len=(\d{1,12})"),
    ):  # fmt: skip
        if found := re.search(pattern, match[0]):
            boot.tell(name, int(found[1]))
    if found := re.search(rf"available_gpu_mem={N} GB", match[0]):
        boot.keep("left", number(found[1]) * GIB, least=True)
    boot.started = True


def _failed(boot: Boot, match: re.Match[str]) -> None:
    boot.failure = Failure("no_blocks", match[0])


RULES = rules(
    ("server_args=ServerArgs(", r"server_args=ServerArgs\((.*)", _arguments),
    ("Load weight begin", rf"Load weight begin\. avail mem={N} GB", _figure("free", least=True)),
    ("Load weight end", rf"Load weight end\..{{0,300}}mem usage={N} GB", _figure("weights")),
    (
        "KV Cache is allocated",
        rf"KV Cache is allocated\.(?: dtype: \S+,)? #tokens: {N}, (?:K size: {N} GB, V size: {N} GB|KV size: {N} GB)",
        _pool,
    ),
    ("SWAKVPool mem usage", rf"SWAKVPool mem usage: {N} GB, swa size: \d{{1,12}}, full size: {N}", _windows),
    (
        "Mamba Cache is allocated",
        rf"Mamba Cache is allocated\..{{0,120}}conv_state size: {N} ?GB, ssm_state size: {N} ?GB",
        _states,
    ),
    ("uda graph end", rf"[Cc]apture (?:\w+ )?cuda graph end\..{{0,80}}mem usage={N} GB", _figure("graphs")),
    ("CUDA graph end", rf"CUDA graph end\..{{0,80}}mem usage={N} GB", _figure("graphs")),
    ("max_total_num_tokens=", rf"max_total_num_tokens={N}.*", _limits),
    ("mem-fraction-static", r"Not enough memory\. Please try to increase --mem-fraction-static", _failed),
)


def finished(boot: Boot) -> None:
    """Pools of windows and of all tokens are one cache; states lie beside keys and values in the same budget."""
    if "pools" in boot.figures:
        boot.figures["cache"], boot.counts["tokens"] = boot.figures.pop("pools"), boot.counts.pop("without windows")
    if "states" in boot.figures and "cache" in boot.figures:
        boot.figures["cache"] += boot.figures["states"]
