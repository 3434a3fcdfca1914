"""`quantization_config` → which matrices of which layer are stored in which format, and what the cache is stored in."""

from collections.abc import Mapping
from typing import Any

from kvcalc.errors import UserError
from kvcalc.layers.part import Part
from kvcalc.library.huggingface.config import Config, show
from kvcalc.library.huggingface.formats import by_algorithm, by_group, by_method, cache_dtype, fp8
from kvcalc.library.huggingface.modules import Rules, matrices
from kvcalc.storage.quantization import Quantization, load_weight_format

EXCLUDED_KEYS = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "exclude", "llm_int8_skip_modules")
MOST_MODULES, MOST_GROUPS = 1_000_000, 32
_KEYS = ("quantization_config", "compression_config")
_EVERYTHING, _EXPERTS = ("*",), ("*.experts.*",)

Stored = tuple[tuple[str, str], ...]  # (matrix, format) of one layer, where one format does not fit all


class Storage:
    """How a checkpoint stores its weights. Raises UserError on a part of `quantization_config` that does not fit.

    formats: (format, matrices that it covers), the first that covers a matrix counts. groups: (format, modules) instead,
    where a file says it module by module. cache: the dtype that the checkpoint declares for the cache, or None.
    """

    def __init__(self, outer: Mapping[str, Any], c: Config) -> None:
        self.q = Config(_section(outer, c), {}, f"{c.where}: quantization_config", {})
        self.layers = c.layers
        self.formats: list[tuple[str, tuple[str, ...]]] = []
        self.groups: list[tuple[str, Rules]] = []
        self.ignored: Rules | None = None
        self.cache, self.notes = cache_dtype(self.q)
        if self.q.file:
            self._read(c.get("expert_dtype") == "fp4")
            self.notes += tuple(map(_unknown, filter(_unknown, [name for name, _ in (*self.formats, *self.groups)])))

    def kept(self, layer: int, parts: tuple[Part, ...], hidden_size: int) -> tuple[str, ...]:
        """The matrices of this layer that stay in the model's dtype."""
        rules = self.ignored
        if rules is None:
            return ()
        return tuple(dict.fromkeys(n for n, modules in matrices(parts, hidden_size) if rules.match(layer, modules)))

    def stored(self, layer: int, parts: tuple[Part, ...], hidden_size: int) -> Stored:
        """(matrix, format) of this layer, where the file gives formats module by module."""
        if not self.groups:
            return ()
        chosen = {}
        for name, modules in matrices(parts, hidden_size):
            if found := next((f for f, rules in self.groups if rules.match(layer, modules)), None):
                chosen[name] = found
        return tuple(chosen.items())

    def schemes(self, kinds: Mapping[str, Stored]) -> tuple[Quantization, ...]:
        """The schemes of the model, given what each of its kinds of layer stores in which format."""
        if not self.groups:
            return tuple(Quantization(name, covers=covers) for name, covers in self.formats)
        covers: dict[str, list[str]] = {}
        for kind, pairs in kinds.items():
            for name, stored in pairs:
                covers.setdefault(stored, []).append(f"{kind}.{name}")
        return tuple(Quantization(name, covers=tuple(found)) for name, found in covers.items())

    def _read(self, fp4_experts: bool) -> None:
        q = self.q
        method, algorithm, experts = (q.word(k).lower()[:60] for k in ("quant_method", "quant_algo", "moe_quant_algo"))
        if method == "fp8" and fp4_experts:
            experts = "mxfp4"  # DeepSeek-V4: blocks of 32 with one ue8m0 scale
        if experts:  # the list of modules left out belongs to the experts' format alone
            rest = [(fp8(q), _EVERYTHING)] if method == "fp8" else []
            self.formats = [(by_algorithm(q, experts), _EXPERTS), *rest]
            return
        if algorithm == "mixed_precision" and q.table("quantized_layers"):
            self._by_module()
        elif algorithm and algorithm != "mixed_precision":
            self.formats = [(by_algorithm(q, algorithm), _EVERYTHING)]
        elif q.table("config_groups"):
            self._by_group()
        else:
            self.formats = [(by_method(q, method), _EXPERTS if method == "mxfp4" else _EVERYTHING)]
        left_out = next((found for key in EXCLUDED_KEYS if (found := q.items(key, MOST_MODULES)) is not None), [])
        self.ignored = self._rules([*left_out, *(f"re:{k[2:]}" for k in q.table("dynamic") if k.startswith("-:"))])

    def _by_group(self) -> None:
        """compressed-tensors' groups: one for all matrices, or several that each name their targets."""
        groups = self.q.nested("config_groups")
        if len(groups.file) > MOST_GROUPS:
            raise self.q.fail("config_groups", f"has {len(groups.file):,} entries; more than {MOST_GROUPS} are not read")
        for key in groups.file:
            group = groups.nested(key)
            targets = group.items("targets")
            if targets is None and len(groups.file) > 1:
                raise group.fail("targets", "is missing")
            self.groups.append((by_group(group), self._rules(["*"] if targets is None else targets)))
        if len(self.groups) == 1 and self.groups[0][1].everything:
            self.formats, self.groups = [(self.groups[0][0], _EVERYTHING)], []

    def _by_module(self) -> None:
        """ModelOpt's list of modules, each with an algorithm of its own."""
        layers = self.q.nested("quantized_layers")
        alike: dict[str, list[str]] = {}  # modules by how they are stored
        for module, how in layers.file.items():
            if not isinstance(how, dict) or not isinstance(how.get("quant_algo"), str):
                raise layers.fail(show(module), "names no quant_algo")
            alike.setdefault(str([how["quant_algo"][:60], show(how.get("group_size"))]), []).append(module)
        if len(alike) > MOST_GROUPS:
            raise self.q.fail("quantized_layers", f"names {len(alike):,} formats; more than {MOST_GROUPS} are not read")
        for modules in alike.values():
            how = layers.nested(modules[0])
            self.groups.append((by_algorithm(how, how.word("quant_algo").lower()[:60]), self._rules(modules)))

    def _rules(self, names: list[Any]) -> Rules:
        for name in names:
            if not isinstance(name, str) or len(name) > 1000:
                raise UserError(f"lists {show(name)}, which is no module's name", self.q.where)
        return Rules(names, self.layers, lambda text: UserError(text, self.q.where))


def _section(outer: Mapping[str, Any], c: Config) -> dict[str, Any]:
    """The quantization_config of the file or of its text part; empty where there is none."""
    found: Any = next((part[key] for key in _KEYS for part in (c.file, outer) if part.get(key)), {})
    if not isinstance(found, dict):
        raise c.fail("quantization_config", f"should be a mapping, not {show(found)}")
    inner = found.get("quantization")  # as in hf_quant_config.json
    return {**found, **inner} if isinstance(inner, dict) else found


def _unknown(name: str) -> str:
    """A note about a format that kvcalc does not know; '' for one that it does."""
    try:
        load_weight_format(name)
    except UserError:
        return f"quantization_config: {name!r} is not known, so weight bytes need `--dtype` or `--quantization`"
    return ""
