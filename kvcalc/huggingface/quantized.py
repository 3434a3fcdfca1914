"""`quantization_config` → how the weights are stored, which modules are left out, and what the cache is stored in.

Formats follow the tools that write them: fp8 (per tensor or in blocks), GPTQ and AWQ, bitsandbytes, mxfp4, compressed-tensors
and ModelOpt (its `hf_quant_config` form too). Modules are left out by name, by wildcard, by `re:` pattern, or layer by layer.
"""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from kvcalc.errors import UserError
from kvcalc.huggingface.config import Config
from kvcalc.part import Part
from kvcalc.quantization import Quantization, load_weight_format
from kvcalc.weights import Kind

Schemes = list[tuple[str, tuple[str, ...]]]
EXCLUDED_KEYS = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "llm_int8_skip_modules")
_LAYER = re.compile(r"(?:^|[.*])(?:layers|h|blocks)\.(\d+)(.*)", re.DOTALL)
_BLOCKS = (
    (re.compile(r"\b(self_attn|attn|attention|linear_attn|self_attention|mixer|mamba)\b"), "attn"),
    (re.compile(r"\b(mlp|ffn|feed_forward|block_sparse_moe|moe)\b"), "mlp"),
    (re.compile(r"\bshared_experts?\b"), "shared"),
    (re.compile(r"\bmlp\.(gate|router)(?=$|[.*])"), "mlp.router"),
)  # fmt: skip
_LEAVES = {
    "q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj", "gate": "gate_proj", "up": "up_proj", "down": "down_proj",
    "q_down": "q_a_proj", "q_up": "q_b_proj", "kv_down": "kv_a_proj_with_mqa", "kv_up": "kv_b_proj",
    "index_q": "indexer.wq_b", "index_k": "indexer.wk", "index_weights": "indexer.weights_proj", "router": "router",
    "in": "in_proj", "in_bc": "in_proj", "out": "out_proj", "x": "x_proj", "dt": "dt_proj",
}  # fmt: skip


def read_quantization(outer: Mapping[str, Any], c: Config) -> tuple[tuple[Quantization, ...], str | None, tuple[str, ...]]:
    """(schemes, cache dtype that the checkpoint declares or None, notes). Raises UserError on a format that is unknown."""
    found = config_of(outer, c)
    if not found:
        return (), None, ()
    cache = _cache_dtype(found)
    formats = _formats(found, c)
    if not formats:
        return (), cache, ("quantization_config: stores no weights in another format",)
    schemes = tuple(Quantization(name, covers=covers) for name, covers in formats)
    for scheme in schemes:
        load_weight_format(scheme.format, f"format in {c.where}: quantization_config")
    return schemes, cache, ()


def config_of(outer: Mapping[str, Any], c: Config) -> Mapping[str, Any]:
    """The quantization_config of the file or of its text part; empty where there is none."""
    found = c.file.get("quantization_config") or outer.get("quantization_config") or {}
    if not isinstance(found, dict):
        raise c.fail("quantization_config", f"should be a mapping, not {str(found)[:40]!r}")
    inner = found.get("quantization")
    return {**found, **inner} if isinstance(inner, dict) else found


def _formats(found: Mapping[str, Any], c: Config) -> Schemes:
    """(format name, matrices that it covers), the first that covers a matrix counts."""
    method, algorithm = str(found.get("quant_method", "")).lower(), str(found.get("quant_algo", "")).lower()
    everything: tuple[str, ...] = ("*",)
    experts = str(found.get("moe_quant_algo") or "").lower()
    if method == "fp8" and c.get("expert_dtype") == "fp4":
        experts = "mxfp4"  # DeepSeek-V4: blocks of 32 with one ue8m0 scale
    if experts:
        rest: Schemes = [(_fp8(found), everything)] if method == "fp8" else []
        return [(_algorithm(experts, found, c), ("*.experts.*",)), *rest]
    if method == "mxfp4":
        return [("mxfp4", ("*.experts.*",))]
    if method in ("gptq", "awq", "auto-round", "gptqmodel"):
        return [(_integers(found, zeros="_zp"), everything)]
    if method == "bitsandbytes":
        return [("nf4" if found.get("load_in_4bit") else "int8", everything)]
    groups = found.get("config_groups")
    if algorithm and algorithm != "mixed_precision":
        return [(_algorithm(algorithm, found, c), everything)]
    if isinstance(groups, dict) and groups:
        return [(_group(g, c), everything) for g in groups.values()][:1]
    if method in ("fp8", "fbgemm_fp8"):
        return [("fp8_per_channel" if method == "fbgemm_fp8" else _fp8(found), everything)]
    raise c.fail(
        "quantization_config", f"quant_method {method or 'none'!r} is not known", "Use --dtype bf16 to size it unquantised"
    )


def _fp8(found: Mapping[str, Any]) -> str:
    return "fp8_block128" if found.get("weight_block_size") else "fp8"


def _integers(found: Mapping[str, Any], zeros: str) -> str:
    bits, group = found.get("bits", found.get("w_bit", 4)), found.get("group_size", found.get("q_group_size", 128))
    return f"int{bits}_g{group if isinstance(group, int) and group > 0 else 0}{zeros}"


def _algorithm(name: str, found: Mapping[str, Any], c: Config) -> str:
    known = {
        "fp8": "fp8",
        "nvfp4": "nvfp4",
        "w4a16_nvfp4": "nvfp4",
        "mxfp8": "mxfp8",
        "mxfp4": "mxfp4",
        "fp8_pb_wo": "fp8_block128",
    }
    known |= {"w4a16_awq": _integers(found, ""), "int4_awq": _integers(found, ""), "fp8_per_channel_per_token": "fp8_per_channel"}
    if name not in known:
        raise c.fail("quantization_config", f"quant_algo {name!r} is not known", f"Known: {', '.join(known)}")
    return known[name]


def _group(group: Any, c: Config) -> str:
    """The format of a compressed-tensors group, from its weights' bits, type and strategy."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise c.fail("quantization_config", "a config group has no weights")
    bits, kind, size = weights.get("num_bits"), weights.get("type"), weights.get("group_size")
    if kind == "float" and bits == 4:
        return "nvfp4" if size == 16 else "mxfp4"
    if kind == "float" and bits == 8:
        strategy = weights.get("strategy")
        return {"channel": "fp8_per_channel", "block": "fp8_block128"}.get(str(strategy), "fp8")
    if kind == "int" and bits == 8 and not size:
        return "int8"
    return f"int{bits}_g{size or 0}" + ("" if weights.get("symmetric", True) else "_zp")


def _cache_dtype(found: Mapping[str, Any]) -> str | None:
    """The cache dtype that the checkpoint declares, for which it ships scales."""
    scheme = found.get("kv_cache_scheme") or found.get("kv_cache_quant_algo")
    if isinstance(scheme, dict):
        known = {"8float": "fp8", "8int": "int8", "4float": "nvfp4"}
        scheme = known.get(f"{scheme.get('num_bits')}{scheme.get('type')}")
    name = str(scheme).lower() if scheme else ""
    return name if name in ("fp8", "int8", "nvfp4") else None


class Exclusions:
    """Which weights of which layer a quantised checkpoint leaves in its dtype."""

    def __init__(self, found: Mapping[str, Any], where: str) -> None:
        self.by_layer: dict[int, list[str]] = {}
        self.everywhere: list[str] = []
        self.patterns: list[re.Pattern[str]] = []
        if str(found.get("quant_algo", "")).lower() == "mixed_precision":
            return  # its list belongs to the experts' format alone
        names: list[Any] = next((found[k] for k in EXCLUDED_KEYS if isinstance(found.get(k), list)), [])
        for name in names:
            if not isinstance(name, str) or len(name) > 1000:
                raise UserError(f"quantization_config: lists {str(name)[:40]!r}, which is no module's name", where)
            self._add(name, where)

    def _add(self, name: str, where: str) -> None:
        if name.startswith("re:"):
            try:
                self.patterns.append(re.compile(_canonical(name[3:])))
            except re.error:
                raise UserError(f"quantization_config: {name[:60]!r} is no regular expression", where) from None
        elif match := _LAYER.search(name):
            self.by_layer.setdefault(int(match[1][:6]), []).append(_canonical(match[2]))
        else:
            self.everywhere.append(_canonical(name))

    def kept(self, layer: int, parts: tuple[Part, ...], hidden_size: int) -> tuple[str, ...]:
        """The names of the matrices of this layer that stay unquantised."""
        rules = self.by_layer.get(layer, [])
        if not rules and not self.everywhere and not self.patterns:
            return ()
        found = []
        for part in parts:
            block = "attn" if part.label else "mlp"
            for weight in part.weights(hidden_size):
                tail = f".{block}.{_leaf(weight.name)}"
                path = f"layers.{layer}{tail}"
                if weight.kind is Kind.MATRIX and (self._listed(tail, rules) or self._matches(path)):
                    found.append(weight.name)
        return tuple(dict.fromkeys(found))

    @staticmethod
    def _listed(tail: str, rules: list[str]) -> bool:
        return any(tail == r or tail.startswith(r + ".") or fnmatchcase(tail, r) or r in ("", ".") for r in rules)

    def _matches(self, path: str) -> bool:
        inside = any(fnmatchcase(path, r) or f".{r}." in f".{path}." or fnmatchcase(path, f"*{r}") for r in self.everywhere)
        return inside or any(p.match(path) for p in self.patterns)


def _canonical(name: str) -> str:
    for pattern, block in _BLOCKS:
        name = pattern.sub(block, name)
    return re.sub(r"\.weight$", "", name)


def _leaf(name: str) -> str:
    head, _, tail = name.rpartition(".")
    return f"{head}.{_LEAVES.get(tail, tail)}" if head else _LEAVES.get(tail, tail)
