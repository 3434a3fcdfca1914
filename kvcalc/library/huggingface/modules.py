"""Modules of a checkpoint by name: which weights of which layer a list of names, wildcards and patterns means.

Tools name modules as the modelling code does (`model.layers.3.self_attn.q_proj`), which differs between model types, so
each weight of a spec answers to every usual name of its module. A name means all that stands under it.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from time import process_time

from kvcalc.errors import UserError
from kvcalc.layers.part import Part
from kvcalc.layers.weights import WeightKind

MOST_PATTERNS, MOST_REPEATS, MOST_SECONDS = 500, 5, 0.3
_MIXERS = ("self_attn", "attn", "attention", "self_attention", "linear_attn", "mixer", "mamba", "temporal_block", "conv")
_NETWORKS = ("mlp", "ffn", "feed_forward", "block_sparse_moe", "moe", "mixer")
_QKV = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "W_pack")
_LEAVES = {
    "q": ("q_proj", "wq", *_QKV), "k": ("k_proj", "wk", *_QKV), "v": ("v_proj", "wv", *_QKV),
    "o": ("o_proj", "wo", "dense", "out_proj", "c_proj"),
    "gate": ("gate_proj", "gate_up_proj", "w1"), "up": ("up_proj", "gate_up_proj", "w3", "c_fc", "fc1", "dense_h_to_4h"),
    "down": ("down_proj", "w2", "c_proj", "fc2", "dense_4h_to_h"),
    "q_down": ("q_a_proj", "wq_a", "fused_qkv_a_proj_with_mqa"), "q_up": ("q_b_proj", "wq_b"),
    "kv_down": ("kv_a_proj_with_mqa", "wkv_a", "fused_qkv_a_proj_with_mqa"), "kv_up": ("kv_b_proj", "wkv_b"),
    "index_q": ("indexer.wq_b",), "index_k": ("indexer.wk",), "index_weights": ("indexer.weights_proj",),
    "router": ("gate", "router"), "shared.weight": ("shared_expert_gate",),
    "qk": ("in_proj_qkvz", "in_proj_qkv"), "v_gate": ("in_proj_qkvz", "in_proj_qkv", "in_proj_z"),
    "step_decay": ("in_proj_ba", "in_proj_b", "in_proj_a"),
    "in": ("in_proj",), "in_bc": ("in_proj",), "out": ("out_proj", "o_proj"), "x": ("x_proj",), "dt": ("dt_proj",),
}  # fmt: skip
_GROUPS = {"experts": ("experts", "experts.0"), "shared": ("shared_experts", "shared_expert")}
_LAYER = re.compile(r"(?:^|[.*])(?:layers|h|blocks)\.(\d{1,6})(?!\d)(.*)", re.DOTALL)
_EXPERT = re.compile(r"\.experts\.\d+(?=\.|\n|$)")
_DIGITS = re.compile(r"[0-9{^]|\\[dDwW]")
_ALL = ("Linear", "*", "re:.*")  # as the targets of a scheme: every matrix


@lru_cache(1024)
def module_names(is_mixer: bool, name: str) -> tuple[str, ...]:
    """The usual names, below the layer, of the module that holds weight `name`: `self_attn.q_proj`, `attn.c_attn` …"""
    group, _, leaf = name.rpartition(".")
    if name in _LEAVES:
        group, leaf = "", name
    leaves, groups = _LEAVES.get(leaf, (leaf,)), _GROUPS.get(group, (group,))
    tails = [f"{g}.{leaf}" if g else leaf for g in groups for leaf in leaves]
    return tuple(f"{block}.{tail}" for block in (_MIXERS if is_mixer else _NETWORKS) for tail in tails)


def matrices(parts: Iterable[Part], hidden_size: int) -> list[tuple[str, tuple[str, ...]]]:
    """(name of the weight, names of its module) for every matrix of these parts."""
    found = [(bool(part.label), w) for part in parts for w in part.weights(hidden_size) if w.kind is WeightKind.MATRIX]
    return [(w.name, module_names(mixer, w.name)) for mixer, w in found]


class Rules:
    """Names of modules, shell wildcards and `re:` patterns, as quantisation tools list them.

    Experts are taken together: a list that names one expert of a layer means them all. Raises UserError, through `fail`,
    on what is no name, and on patterns that could take long to match.
    """

    def __init__(self, names: list[str], layers: int, fail: Callable[[str], UserError]) -> None:
        self.plain: set[str] = set()
        self.patterns: list[re.Pattern[str]] = []
        self.numbered: list[re.Pattern[str]] = []  # patterns that tell one layer from another
        self.by_layer: dict[int, set[str]] = {}
        self.layer_patterns: dict[int, list[re.Pattern[str]]] = {}
        self.everything = False
        self._known: dict[tuple[str, ...], bool] = {}
        self._compiled: dict[str, re.Pattern[str]] = {}
        self._layers, self._fail, self._seconds = layers, fail, 0.0
        for name in dict.fromkeys(_EXPERT.sub(".experts.0", "\n".join(names)).split("\n")):
            self._add(name.removesuffix(".weight"))

    def _add(self, name: str) -> None:
        if name in _ALL:
            self.everything = True
        elif name.startswith("re:"):
            self._pattern(self.numbered if _DIGITS.search(name) else self.patterns, name[3:])
        elif match := _LAYER.search(name):
            self._add_to_layer(match[1], match[2])
        elif "*" in name or "?" in name:
            self._pattern(self.patterns, r"(?:.*\.)?" + _wildcard(name))
        elif name:
            self.plain.add(name)

    def _add_to_layer(self, number: str, rest: str) -> None:
        open_end = rest.startswith("*")  # `layers.1*` means layers 10 to 19 too
        for layer in [n for n in range(self._layers) if str(n).startswith(number)] if open_end else [int(number)]:
            if "*" in rest or "?" in rest:
                self._pattern(self.layer_patterns.setdefault(layer, []), _wildcard(rest.lstrip(".")))
            else:
                self.by_layer.setdefault(layer, set()).add(rest.strip("."))

    def _pattern(self, found: list[re.Pattern[str]], source: str) -> None:
        if source not in self._compiled:
            self._compiled[source] = self._compile(source)
        if self._compiled[source] not in found:
            found.append(self._compiled[source])

    def _compile(self, source: str) -> re.Pattern[str]:
        plain = re.sub(r"(?:\.\*)+", ".*", source)
        bare = re.sub(r"\\.", "", plain)
        nested = re.search(r"\)[*+{]", bare) or len(re.findall(r"[*+{]", bare)) > MOST_REPEATS
        if nested or len(self._compiled) >= MOST_PATTERNS or len(source) > 1000:
            raise self._fail(f"holds too long a pattern, or too many: {source[:60]!r}")
        try:
            return re.compile(plain)
        except (re.error, RecursionError, OverflowError):
            raise self._fail(f"holds {source[:60]!r}, which is no regular expression") from None

    def match(self, layer: int, modules: tuple[str, ...]) -> bool:
        """Whether one of the names of a module of this layer is meant."""
        if modules not in self._known:
            self._known[modules] = self._anywhere(modules)
        if self.everything or self._known[modules]:
            return True
        own = self.by_layer.get(layer, ())
        if own and any(run in own for name in modules for run in ("", *_starts(name))):
            return True
        patterns = self.layer_patterns.get(layer, ())
        return self._search(patterns, "", modules) or self._search(self.numbered, f"model.layers.{layer}.", modules)

    def _anywhere(self, modules: tuple[str, ...]) -> bool:
        named = bool(self.plain) and any(run in self.plain for name in modules for run in _runs(name))
        return named or self._search(self.patterns, "model.layers.0.", modules)

    def _search(self, patterns: Sequence[re.Pattern[str]], prefix: str, modules: tuple[str, ...]) -> bool:
        for pattern in patterns:
            start = process_time()
            if any(pattern.match(prefix + name) for name in modules):
                return True
            self._seconds += process_time() - start
            if self._seconds > MOST_SECONDS:
                raise self._fail("holds patterns that take too long to match")
        return False


def _wildcard(name: str) -> str:
    """The regular expression of a shell wildcard, and of all that stands under what it names."""
    return re.escape(name).replace(r"\*", ".*").replace(r"\?", ".") + r"(?:\.|$)"


def _starts(name: str) -> list[str]:
    words = name.split(".")
    return [".".join(words[:n]) for n in range(1, len(words) + 1)]


@lru_cache(4096)
def _runs(name: str) -> tuple[str, ...]:
    words = name.split(".")
    return tuple(".".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1))
