"""`quantization_config` → which matrices of which layer are stored in which format, and what the cache is stored in."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kvcalc.errors import UserError
from kvcalc.layers.part import Part
from kvcalc.library.huggingface.config import Config, show
from kvcalc.library.huggingface.formats import INTEGERS, by_algorithm, by_group, by_method, cache_dtype, cache_scales, fp8
from kvcalc.library.huggingface.modules import Rules, matrices
from kvcalc.library.huggingface.tools import mlx, own_bits
from kvcalc.model.spec import Model
from kvcalc.storage.quantization import Quantization, stored_format

EXCLUDED_KEYS = (
    "modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "exclude", "llm_int8_skip_modules", "skip_modules",
    "linear_weights_not_to_quantize",
)  # fmt: skip
MOST_MODULES, MOST_GROUPS = 1_000_000, 32
SECTIONS = ("quantization_config", "compression_config", "quantization")
_LEFT_OUT: tuple[str, ...] = ("embedding", "lm_head", "*.router")
_EVERYTHING, _EXPERTS = ("*",), ("*.experts.*",)
# Of DeepSeek-V4, whatever the file says: compressors stay in bf16, what mixes the streams in fp32 (vLLM 0.33,
# models/deepseek_v4; with them the published checkpoint has its 148.66 GiB). V4.1 keeps all of its indexer in bf16, and its
# tables of n-grams in fp8 with a scale for 32 columns.
_COMPRESSORS, _STREAMS = ("*.compress_*", "*.index_kv", "*.index_gate", "*.index_weights"), ("*_streams", "stream_head")
_INDEXERS, _NGRAMS = ("*.index_q", "*.row_index_k"), ("*.engram_table",)
_TABLES = {
    "embedding": ("language_model.model.embed_tokens", "transformer.wte", "model.word_embeddings"),
    "lm_head": ("lm_head",),
}
# Types whose router is a layer of its own kind in mlx-lm, which quantises it like any other unless it is named.
_MLX_ROUTERS = {"mixtral", "olmoe", "phimoe", "phixtral", "qwen2_moe", "llama4", "llama4_text", "ernie4_5_moe", "dbrx", "hunyuan"}
_MODULE = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d{1,6})\.(.+)")

Stored = tuple[tuple[str, str], ...]  # (matrix, format) of one layer, where one format does not fit all


class Storage:
    """How a checkpoint stores its weights. Raises UserError on a part of `quantization_config` that does not fit.

    formats: (format, matrices that it covers), the first that covers a matrix counts. groups: (format, modules) instead,
    where a file says it module by module, and exact: (layer, module) → format where each has its own. mlx: the format of
    tables and of the LM head too, and that of everything which is not named. cache: the dtype that the checkpoint declares
    for the cache, or None. scales: of the keys of each layer that caches them, and as many of its values; bytes of one.
    wide: whether what is not quantised is in fp32.
    """

    def __init__(self, outer: Mapping[str, Any], c: Config, wide: bool) -> None:
        self.wide = wide
        self.q = Config(_section(outer, c), {}, f"{c.where}: quantization_config", {})
        self.layers, self.family = c.layers, str(c.file.get("model_type"))
        self.formats: list[tuple[str, tuple[str, ...]]] = []
        self.groups: list[tuple[str, Rules]] = []
        self.ignored: Rules | None = None
        self.mlx = ""
        self.cache, self.notes = cache_dtype(self.q)
        self.scales = cache_scales(self.q, wide)
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
        chosen = ((name, self._format(layer, name, modules)) for name, modules in matrices(parts, hidden_size))
        return tuple((name, found) for name, found in chosen if found)

    def _format(self, layer: int, name: str, modules: tuple[str, ...]) -> str | None:
        found = next(((f, rules) for f, rules in self.groups if rules.match(layer, modules)), None)
        if not found or (self.mlx and name == "router" and found[1].everything and self.family not in _MLX_ROUTERS):
            return None
        return found[0]

    def schemes(self, kinds: Mapping[str, Stored]) -> tuple[Quantization, ...]:
        """The schemes of the model, given what each of its kinds of layer stores in which format."""
        if not self.groups:
            head = self.q.get("lm_head") is True and self.q.word("quant_method") in INTEGERS
            kept = tuple(name for name in _LEFT_OUT if not (head and name == "lm_head"))
            mixed = self.family in ("deepseek_v4", "deepseek_v41_text") and bool(self.formats)
            shared = mixed and self.family == "deepseek_v41_text"
            kept += (*_COMPRESSORS, *_STREAMS, *(_INDEXERS if shared else ())) if mixed else ()
            found = tuple(Quantization(name, covers=covers, except_for=kept) for name, covers in self.formats)
            if shared:  # its scales are powers of two, a byte each
                found = tuple(msgspec.structs.replace(s, format=s.format.replace("fp8_32x32", "fp8_block32")) for s in found)
                found += (Quantization("mxfp8", covers=_NGRAMS, kinds=("table",)),)
            return (*found, Quantization("fp32", covers=_STREAMS)) if mixed else found
        covers: dict[str, list[str]] = {}
        for kind, pairs in kinds.items():
            for name, stored in pairs:
                covers.setdefault(stored, []).append(f"{kind}.{name}")
        kept = () if self.mlx else _LEFT_OUT
        return (*(Quantization(name, tuple(found), kept) for name, found in covers.items()), *self._outer())

    def _outer(self) -> Iterable[Quantization]:
        """MLX stores tables and the LM head like any matrix."""
        if not self.mlx:
            return
        for name, modules in _TABLES.items():
            left_out = self.ignored is not None and self.ignored.match(-1, modules)
            if not left_out:
                found = next((f for f, rules in self.groups if rules.match(-1, modules)), self.mlx)
                yield Quantization(found, (name,), (), ("matrix", "table"))
        yield Quantization(self.mlx, ("*",), ("embedding", "lm_head"), ("table",))

    def _read(self, fp4_experts: bool) -> None:
        q = self.q
        method, algorithm, experts = (q.word(k).lower()[:60] for k in ("quant_method", "quant_algo", "moe_quant_algo"))
        if method == "fp8" and fp4_experts:
            experts = "mxfp4"  # DeepSeek-V4: blocks of 32 with one ue8m0 scale
        if experts:  # the list of modules left out belongs to the experts' format alone
            rest = [(fp8(q, self.family), _EVERYTHING)] if method == "fp8" else []
            self.formats = [(by_algorithm(q, experts), _EXPERTS), *rest]
            return
        if not method and q.in_file("bits") and q.in_file("group_size"):
            self._by_path()
        elif algorithm == "mixed_precision" and q.table("quantized_layers"):
            self._by_module()
        elif algorithm and algorithm != "mixed_precision":
            self.formats = [(by_algorithm(q, algorithm), _EVERYTHING)]
        elif q.table("config_groups"):
            self._by_group()
        else:
            self.formats = [(by_method(q, method, self.family), _EXPERTS if method == "mxfp4" else _EVERYTHING)]
            self._overrides(method)
        if not self.mlx:
            left_out = next((found for key in EXCLUDED_KEYS if (found := q.items(key, MOST_MODULES)) is not None), [])
            self.ignored = self._rules([*left_out, *(f"re:{k[2:]}" for k in q.table("dynamic") if k.startswith("-:"))])

    def _overrides(self, method: str) -> None:
        """GPTQModel's and AutoRound's modules with bits of their own; 16 bits and more are left as they were."""
        given = {f"re:{k.removeprefix('+:')}": v for k, v in self.q.table("dynamic").items() if not k.startswith("-:")}
        given |= {f"re:{k}" if set(k) & set("^*$\\[(") else k: v for k, v in self.q.table("extra_config").items()}
        alike: dict[str, list[str]] = {}
        for name, how in given.items():
            if not isinstance(how, dict):
                raise self.q.fail(show(name), "should be a mapping")
            own = Config({**self.q.file, **how}, {}, self.q.where, {})
            stored = "bf16" if method in INTEGERS and own.size("bits", 4) >= 16 else by_method(own, method, self.family)
            alike.setdefault(stored, []).append(name)
        if alike:
            self.groups = [*((f, self._rules(names)) for f, names in alike.items()), (self.formats[0][0], self._rules(["*"]))]

    def _by_path(self) -> None:
        """MLX's settings of everything, and of single modules by their path; `false` leaves a module as it was."""
        self.mlx = mlx(self.q)
        alike: dict[str, list[str]] = {}
        for name, how in self.q.file.items():
            if isinstance(how, dict):
                alike.setdefault(mlx(self.q.nested(name)), []).append(name)
        if len(alike) > MOST_GROUPS:
            raise self.q.fail("bits", f"{len(alike):,} formats; more than {MOST_GROUPS} are not read")
        self.groups = [*((f, self._rules(names)) for f, names in alike.items()), (self.mlx, self._rules(["*"]))]
        self.ignored = self._rules([name for name, how in self.q.file.items() if how is False])

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
            self.groups.append((by_group(group, self.q, self.wide), self._rules(["*"] if targets is None else targets)))
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


def in_force(model: Model, scales: tuple[int, int]) -> Model:
    """The model with the schemes that cover any weight of it, and a note of one that covers none; scales of the cache."""
    of_keys, size = scales
    names = [(name, weight.kind) for name, weight, _ in model.walk() if name not in model.unquantized]
    idle = [s for s in model.quantization if "matrix" in s.kinds and not any(s.covering(name, kind) for name, kind in names)]
    held = tuple(s for s in model.quantization if s not in idle)
    notes = tuple(f"quantization_config: nothing in this model is stored as {s.format}" for s in idle if not held)
    keys = [(count, e) for k, count in model.counts.items() if not model.kinds[k].shares_cache for e in model.kinds[k].entries]
    each = sum(count * (e.heads if of_keys < 0 else of_keys) for count, e in keys if e.role == "k")
    return msgspec.structs.replace(model, quantization=held, notes=(*model.notes, *notes), buffers=size * 2 * each if held else 0)


def _section(outer: Mapping[str, Any], c: Config) -> dict[str, Any]:
    """The quantization_config of the file or of its text part; empty where there is none."""
    found: Any = next((part[key] for key in SECTIONS for part in (c.file, outer) if part.get(key)), None) or own_bits(c)
    if not isinstance(found, dict):
        raise c.fail("quantization_config", f"should be a mapping, not {show(found)}")
    inner = found.get("quantization")  # as in hf_quant_config.json
    return {**found, **inner} if isinstance(inner, dict) else found


def _unknown(name: str) -> str:
    """A note about a format whose bytes are not known; '' for one whose are."""
    try:
        stored_format(name)
    except UserError as error:
        return f"quantization_config: {error}"
    return ""
