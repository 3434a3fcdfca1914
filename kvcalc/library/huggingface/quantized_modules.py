"""Storage formats of further quantisation tools, and the modules that their lists name.

A setting whose bytes are unknown gives the name of a format that does not exist.

Tools use the module names of the modelling code (`model.layers.3.self_attn.q_proj`), which differ
between model types. So each weight has all usual names of its module. A name in a list includes all
modules below it.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import combinations
from time import process_time

from kvcalc.errors import UserError
from kvcalc.layers.part import Sublayer
from kvcalc.layers.weights import WeightKind
from kvcalc.library.huggingface.config import Config
from kvcalc.storage.formats import table_rows


def quark(q: Config) -> str:
    """Return the weight format that Quark's `quantization_config` describes, such as `mxfp4`.

    Quark is AMD's quantisation tool. Known formats are OCP mxfp4, and fp8 with an fp32 scale per
    tensor or channel. For others the result is a text such as `quark (int4 per_group)`, which is no
    known format. Source: quark/torch/export/nn/modules/realquantizer.py.

    Args:
        q: The `quantization_config` of a config.json.
    """
    config = q.nested("global_quant_config")
    if q.get("layer_quant_config") or q.get("layer_type_quant_config"):
        return "quark (layers that differ)"
    weight = config.table("weight")
    keys = ("dtype", "qscheme", "scale_format", "group_size")
    dtype, scheme, scale, group = (str(weight.get(key))[:40] for key in keys)
    if dtype == "fp8_e4m3" and scheme in ("per_tensor", "per_channel"):
        return "fp8" if scheme == "per_tensor" else "fp8_per_channel"
    if (dtype, scheme, scale, group) == ("fp4", "per_group", "e8m0", "32"):
        return "mxfp4" if config.table("input_tensors") else "mxfp4_weight_only"
    return f"quark ({dtype} {scheme})"


MAX_PATTERNS = 500
MAX_REPEATS = 5
MAX_SECONDS = 2
EVERY_LAYER = -1
# A weight, and the usual names of its module; the blocks of mixers and FFNs.
_NAME_ROWS = """
  mixer         self_attn attn attention self_attention linear_attn mixer mamba temporal_block conv
  network       mlp ffn feed_forward block_sparse_moe moe mixer
  q             q_proj wq qkv_proj query_key_value c_attn Wqkv W_pack
  k             k_proj wk qkv_proj query_key_value c_attn Wqkv W_pack
  v             v_proj wv qkv_proj query_key_value c_attn Wqkv W_pack
  o             o_proj wo dense out_proj c_proj
  gate          gate_proj gate_up_proj w1
  up            up_proj gate_up_proj w3 c_fc fc1 dense_h_to_4h
  down          down_proj w2 c_proj fc2 dense_4h_to_h
  q_down        q_a_proj wq_a fused_qkv_a_proj_with_mqa
  q_up          q_b_proj wq_b
  kv_down       kv_a_proj_with_mqa wkv_a fused_qkv_a_proj_with_mqa
  kv_up         kv_b_proj wkv_b
  index_q       indexer.wq_b
  index_k       indexer.wk
  index_weights indexer.weights_proj
  router        gate router
  shared.weight shared_expert_gate
  qk            in_proj_qkvz in_proj_qkv
  v_gate        in_proj_qkvz in_proj_qkv in_proj_z
  step_decay    in_proj_ba in_proj_b in_proj_a
  in            in_proj
  in_bc         in_proj
  out           out_proj o_proj
  x             x_proj
  dt            dt_proj
"""
_NAMES = {name: words for name, *words in table_rows(_NAME_ROWS)}
_GROUPS = {"experts": ("experts", "experts.0"), "shared": ("shared_experts", "shared_expert")}
_LAYER = re.compile(r"(?:^|[.*])(?:layers|h|blocks)\.(\d{1,6})(?!\d)(.*)", re.DOTALL)
_EXPERT = re.compile(r"\.experts\.\d+(?=\.|\n|$)")
_ALL = ("Linear", "*", "re:.*")  # as the targets of a scheme: every matrix


ModuleNames = tuple[str, ...]  # the names that a matrix has in checkpoints


@lru_cache(1024)
def module_names(is_mixer: bool, name: str) -> ModuleNames:
    """Return the names that a checkpoint may use for the module with a weight.

    Quantisation configs list modules, so that these names tell whether a weight is quantised. A
    module is the layer object of the modelling code. Names have no `model.layers.N.` before them.
    The weight `q` gives `self_attn.q_proj`, `attn.c_attn` and others.

    Args:
        is_mixer: Whether the weight belongs to an attention or recurrent mixer, not to an FFN.
        name: Name of the weight in kvcalc, such as `q` or `experts.up`.
    """
    group, _, leaf = name.rpartition(".")
    if name in _NAMES:
        group = ""
        leaf = name
    prefixes = [f"{g}." if g else "" for g in _GROUPS.get(group, (group,))]
    tails = [prefix + tail for prefix in prefixes for tail in _NAMES.get(leaf, [leaf])]
    blocks = _NAMES["mixer" if is_mixer else "network"]
    return tuple(f"{block}.{tail}" for block in blocks for tail in tails)


def matrices(parts: Iterable[Sublayer], hidden_size: int) -> list[tuple[str, ModuleNames]]:
    """Return (weight name, possible names of its module) for every matrix of a layer.

    A module is the layer object of the modelling code, such as `self_attn.q_proj`. Vectors and
    lookup tables are left out, because quantisation does not cover them.

    Args:
        parts: Mixers and FFNs of the layer.
        hidden_size: Hidden size of the model.
    """
    return [
        (weight.name, module_names(bool(part.label), weight.name))
        for part in parts
        for weight in part.weights(hidden_size)
        if weight.kind is WeightKind.MATRIX
    ]


class Rules:
    """A list of modules in a quantisation config: names, shell wildcards and `re:` patterns.

    A module is the layer object of the modelling code, such as `self_attn.q_proj`. The list says
    which modules are quantised, or which are not. A list that names one expert of a layer means all
    experts of the layer.

    Attributes:
        everything: Whether the list names every matrix, such as by `*`.

    Raises:
        UserError: A name has an invalid form, or a pattern could take long to match.
    """

    def __init__(self, names: list[str], layers: int, fail: Callable[[str], UserError]) -> None:
        self.everything = False
        self._layers = layers
        self._fail = fail
        self._seconds = 0.0
        # Names and patterns by layer; EVERY_LAYER has names without a layer number.
        self._names: dict[int, set[str]] = defaultdict(set)
        self._patterns: dict[int, dict[str, re.Pattern[str]]] = {}
        self._compiled: dict[str, re.Pattern[str]] = {}
        for name in dict.fromkeys(_EXPERT.sub(".experts.0", "\n".join(names)).split("\n")):
            self._add(name.removesuffix(".weight"))

    def _add(self, name: str) -> None:
        """Add a name, wildcard or pattern to the rules of the layer that it names."""
        is_wildcard = "*" in name or "?" in name
        if name in _ALL:
            self.everything = True
        elif name.startswith("re:"):
            self._compile(EVERY_LAYER, name[3:])
        elif match := _LAYER.search(name):
            number = match[1]
            suffix = match[2]
            layers = [int(number)]
            if suffix.startswith("*"):  # `layers.1*` means layers 10 to 19 too
                layers = [n for n in range(self._layers) if str(n).startswith(number)]
            for layer in layers:
                if "*" in suffix or "?" in suffix:
                    self._compile(layer, _wildcard(suffix.lstrip(".")))
                else:
                    self._names[layer].add(suffix.strip("."))
        elif is_wildcard:
            self._compile(EVERY_LAYER, r"(?:.*\.)?" + _wildcard(name))
        elif name:
            self._names[EVERY_LAYER].add(name)

    def _compile(self, layer: int, source: str) -> None:
        """Add a pattern of a layer. Raises UserError if it could take long to match."""
        if source not in self._compiled:
            joined = re.sub(r"(?:\.\*)+", ".*", source)
            bare = re.sub(r"\\.", "", joined)
            is_slow = (
                re.search(r"\)[*+{]", bare) or len(re.findall(r"[*+{]", bare)) > MAX_REPEATS
            )
            if is_slow or len(self._compiled) >= MAX_PATTERNS or len(source) > 1000:
                raise self._fail(f"contains too long a pattern, or too many: {source[:60]!r}")
            try:
                self._compiled[source] = re.compile(joined)
            except (re.error, RecursionError, OverflowError):
                text = f"contains {source[:60]!r}, which is no regular expression"
                raise self._fail(text) from None
        self._patterns.setdefault(layer, {})[source] = self._compiled[source]

    def match(self, layer: int, modules: ModuleNames) -> bool:
        """Return whether the list of modules includes a module of a layer.

        It does if it contains one of the module's names, a module around it, or a pattern that
        matches.

        Args:
            layer: Index of the layer.
            modules: Possible names of the module, without `model.layers.N.` before them.

        Raises:
            UserError: The patterns take more than 2 s to match.
        """
        return (
            self.everything
            or not self._names[EVERY_LAYER].isdisjoint(_runs(modules))
            or not self._names[layer].isdisjoint(_starts(modules))
            or self._search(EVERY_LAYER, f"model.layers.{layer}.", modules)
            or self._search(layer, "", modules)
        )

    def _search(self, layer: int, prefix: str, modules: ModuleNames) -> bool:
        """Return whether a pattern matches one of the names. Raises UserError after 2 s."""
        for pattern in self._patterns.get(layer, {}).values():
            start = process_time()
            if any(pattern.match(prefix + name) for name in modules):
                return True
            self._seconds += process_time() - start
            if self._seconds > MAX_SECONDS:
                raise self._fail("contains patterns that take too long to match")
        return False


def _wildcard(name: str) -> str:
    """Return the regular expression of a shell wildcard, and of all modules under it."""
    return re.escape(name).replace(r"\*", ".*").replace(r"\?", ".") + r"(?:\.|$)"


@lru_cache(4096)
def _starts(modules: ModuleNames) -> frozenset[str]:
    """Return the first words of each name: `a.b` gives ``, `a` and `a.b`."""
    names = [name.split(".") for name in modules]
    return frozenset(".".join(words[:n]) for words in names for n in range(len(words) + 1))


@lru_cache(4096)
def _runs(modules: ModuleNames) -> frozenset[str]:
    """Return every run of words in each name: `a.b` gives `a`, `a.b` and `b`."""
    names = [name.split(".") for name in modules]
    return frozenset(
        ".".join(words[start:end])
        for words in names
        for start, end in combinations(range(len(words) + 1), 2)
    )
