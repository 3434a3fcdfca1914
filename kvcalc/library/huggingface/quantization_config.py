"""Read a `quantization_config`: which weights are stored in which format, and the cache's format.

Formats follow the tools that write them: fp8, GPTQ, AWQ, AutoRound, bitsandbytes, mxfp4,
compressed-tensors and ModelOpt here, further tools in `quantized_modules`. An unknown format keeps
its name, and kvcalc computes no sizes for it.
"""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from kvcalc.arithmetic import grouped
from kvcalc.errors import UserError
from kvcalc.layers.part import Sublayer
from kvcalc.library.huggingface.config import Config, show
from kvcalc.library.huggingface.quantized_modules import Rules, matrices, quark
from kvcalc.model.gguf_layout import MatrixFormats
from kvcalc.model.model import Model
from kvcalc.records import JsonObject
from kvcalc.storage.formats import first_words
from kvcalc.storage.quantization import Quantization, stored_format

# A format of weights, and its names as `quant_algo` of ModelOpt.
_ALGORITHMS = first_words("""
    fp8                fp8
    nvfp4              nvfp4
    nvfp4_weight_only  w4a16_nvfp4
    mxfp8              mxfp8
    mxfp4              mxfp4 w4a8_mxfp4_fp8
    fp8_block128       fp8_pb_wo
    fp8_per_channel    fp8_per_channel_per_token
""")
_METHODS = {
    "fbgemm_fp8": "fp8_per_channel",
    "eetq": "int8_weight_only",
    "": "mlx",  # MLX names no method, and no inference server loads its weights
}
_INTEGERS = ("gptq", "awq", "auto-round", "auto_round", "gptqmodel", "intel/auto-round")
# A format of the cache, and its names as a scheme.
_CACHES = first_words("""
    fp8    8float fp8
    int8   8int int8
    nvfp4  4float nvfp4
""")
_BYTE_PER_VALUE = ("int-quantized", "naive-quantized")  # packings of compressed-tensors
_EXCLUDED_KEYS = """
    modules_to_not_convert ignore ignored_layers exclude_modules exclude
    llm_int8_skip_modules skip_modules linear_weights_not_to_quantize
"""
MAX_MODULES = 1_000_000
SECTIONS = ("quantization_config", "compression_config", "quantization")
# DeepSeek-V4 stores compressors in bf16 and the mixing of streams in fp32, whether the file says so
# or not (vLLM 0.33, models/deepseek_v4; the published checkpoint then has its 148.66 GiB). V4.1
# stores its indexer in bf16, and its tables of n-grams in fp8 with a scale for 32 columns.
_COMPRESSORS = ("*.compress_*", "*.index_kv", "*.index_gate", "*.index_weights")
_STREAMS = ("*_streams", "stream_head")
_INDEXERS = ("*.index_q", "*.row_index_k")
_NGRAMS = ("*.engram_table",)


def _by_method(q: Config, method: str, model_type: str) -> str:
    """Return the format of a checkpoint by its `quant_method`."""
    if method in _INTEGERS:
        return _packed(q, method)
    if method == "bitsandbytes" or (not method and q.in_file("load_in_4bit")):
        if not (q.flag("load_in_4bit") or q.flag("_load_in_4bit")):
            return "int8"
        kind = "nf4" if q.word("bnb_4bit_quant_type", "fp4") == "nf4" else "fp4"
        return kind + ("_double" if q.flag("bnb_4bit_use_double_quant") else "")
    if method == "fp8":
        return _fp8(q, model_type)
    if method == "quark":
        return quark(q)
    return _METHODS.get(method, method)


def _packed(q: Config, method: str) -> str:
    """Return the format of GPTQ, AWQ or AutoRound: packed integers in groups along the inputs.

    Each group has an fp16 scale, and a packed zero point if the format has zero points.
    """
    kind = q.word("data_type", "int")
    if kind != "int":
        return f"{method} ({kind[:40]})"
    bits = q.size("bits", 4)
    group = q.size("group_size", 128, minimum=-1)
    if not 2 <= bits <= 8:
        raise q.fail("bits", f"{bits} is outside 2 to 8")
    has_zeros = method != "awq" or q.flag("zero_point", True)
    endings = ("_zp" if has_zeros else "") + ("_index" if q.flag("desc_act") else "")
    return f"int{bits}_g{max(group, 0)}{endings}"


def _by_algorithm(name: str) -> str:
    """Return the format of ModelOpt's `quant_algo`.

    The bytes of AWQ and SmoothQuant are unknown, because version and model decide which scales
    remain (modelopt/torch/export/quant_utils.py, fuse_prequant_to_linear).
    """
    name = name.lower()[:60]
    return _ALGORITHMS.get(name, f"modelopt ({name})")


def _fp8(q: Config, model_type: str) -> str:
    """Return fp8 with an fp32 scale per tensor, or for each block of `weight_block_size`.

    Files of Qwen3 and later have bf16 scales. Sources: headers of Qwen3-1.7B-FP8
    (github.com/modular/modular/issues/7142) and Qwen3.8-27B-FP8 (lablup/mlxcel/issues/1361).
    """
    if not q.has("weight_block_size"):
        return "fp8"
    return _block(q, "weight_block_size") + (
        "_scale16" if model_type.startswith("qwen3") else ""
    )


def _block(q: Config, key: str) -> str:
    """Return the name of fp8 in blocks. Example: [64, 128], outputs × inputs, gives fp8_128x64."""
    block = q.sizes(key)
    if len(block) != 2 or not all(1 <= n <= 65_536 for n in block):
        raise q.fail(key, f"should be two whole numbers, not {show(q.raw(key))}")
    return "fp8_block128" if block == [128, 128] else f"fp8_{block[1]}x{block[0]}"


def _by_group(group: Config, q: Config) -> str:
    """Return the format of a compressed-tensors group.

    Scales have the dtype of the original weights. 16 bits are assumed
    (quantization/lifecycle/initialize.py). `int-quantized` and `naive-quantized` store each value
    and each zero point in a byte (compressors/naive_quantized/base.py). An activation order by
    `group` is an int32 for each input.
    """
    w = group.nested("weights")
    if not w.file:
        raise group.fail("weights", "is missing")
    sparse = q.nested("sparsity_config").word("format", "dense")
    packing = group.word("format") or (q.word("format") if sparse == "dense" else sparse)
    if packing in ("dense", "marlin-24") or packing.startswith("sparse"):
        return f"compressed-tensors ({packing[:40]})"
    bits = w.size("num_bits")
    kind = w.word("type", "int")
    size = max(w.size("group_size", 0, minimum=-1), 0)
    default_strategy = "channel" if w.get("group_size") == -1 else "tensor"
    strategy = w.word("strategy") or ("group" if size else default_strategy)
    has_inputs = bool(group.table("input_activations"))
    if kind == "float" and bits == 4:
        name = {16: "nvfp4", 32: "mxfp4"}.get(size)
        ending = "" if has_inputs else "_weight_only"
        return name + ending if name else f"compressed-tensors (fp4 in groups of {size})"
    if kind == "float" and bits == 8:
        return _float8(w, strategy, size, packing)
    if kind != "int" or not 2 <= bits <= 8:
        raise w.fail("num_bits", f"{bits} of type {show(kind)} is no known format")

    zeros = "" if w.flag("symmetric", True) else "_zp"
    if bits == 8 and strategy == "channel" and has_inputs:
        return f"int8_scale16{zeros}"
    if strategy not in ("channel", "group"):
        return f"compressed-tensors (int{bits} by {strategy[:20]})"
    is_packed = packing not in _BYTE_PER_VALUE
    if is_packed and 32 % bits:  # its bytes depend on the release of the tool
        return f"compressed-tensors (int{bits} packed)"
    has_index = size and w.get("actorder") in (True, "group", "dynamic")
    return f"int{bits if is_packed else 8}_g{size}{zeros}{'_index' if has_index else ''}"


def _float8(w: Config, strategy: str, size: int, packing: str) -> str:
    """Return fp8 of a compressed-tensors group. mxfp8 has groups of 32 with one byte of scale."""
    if strategy == "block":
        return _block(w, "block_structure") + "_scale16"
    if strategy == "channel":
        return "fp8_per_channel_scale16"
    has_byte_scales = packing.startswith("mxfp8") or str(w.get("scale_dtype")) == "torch.uint8"
    if size == 32 and has_byte_scales:
        return "mxfp8"
    return f"fp8_{size}x1_scale16" if size else "fp8_scale16"


class Storage:
    """How a checkpoint stores its weights and its KV cache, read from `quantization_config`.

    A module is the layer object of the modelling code that has a matrix, such as
    `self_attn.q_proj`. A weight format is a name such as `fp8` or `int4_g128`.

    Attributes:
        formats: Weight format → shell wildcards of matrix names. The first format that covers a
            matrix applies.
        groups: (weight format, list of modules) pairs, used instead of `formats` if the file lists
            formats by module. A list of modules has names, shell wildcards and `re:` patterns.
        ignored: List of modules that are not quantised.
        cache: Format that the checkpoint declares for the KV cache; None if it declares none.
        notes: Sentences for the user about the cache and about unknown formats.

    Raises:
        UserError: A value in `quantization_config` is invalid.
    """

    def __init__(self, c: Config) -> None:
        self.q = q = Config(_section(c), f"{c.file_name}: quantization_config")
        self.layers = c.layers
        self.family = str(c.file.get("model_type"))
        self.formats: dict[str, tuple[str, ...]] = {}
        self.groups: list[tuple[str, Rules]] = []
        self.ignored = self._rules([])
        self.cache: str | None = None
        self.notes: tuple[str, ...] = ()
        self._read_cache(q.get("kv_cache_scheme") or q.get("kv_cache_quant_algo"))
        if q.file:
            self._read(has_fp4_experts=c.get("expert_dtype") == "fp4")
        for name in (*self.formats, *(name for name, _ in self.groups)):
            try:
                stored_format(name)
            except UserError as error:  # its bytes are not known
                self.notes = (*self.notes, f"quantization_config: {error}")

    def _fail(self, text: str) -> UserError:
        return UserError(text, where=self.q.file_name)

    def _read_cache(self, scheme: Any) -> None:
        """Set the dtype of the cache. Its scales, a few bytes per layer, are not counted."""
        if not scheme:
            return
        name = show(scheme).strip("'").lower()
        if isinstance(scheme, dict):
            name = f"{scheme.get('num_bits')}{scheme.get('type')}"
        self.cache = _CACHES.get(name[:40])
        text = f"the checkpoint declares {self.cache} for its cache: `auto` selects it"
        if self.cache is None:
            text = f"KV cache scheme {show(scheme)} is not known: `auto` is the model's dtype"
        self.notes = (text,)

    def of_layer(
        self, layer: int, parts: tuple[Sublayer, ...], hidden_size: int
    ) -> tuple[tuple[str, ...], MatrixFormats]:
        """Return how the checkpoint stores the matrices of one layer, as two tuples.

        Args:
            layer: Index of the layer.
            parts: Mixers and FFNs of the layer.
            hidden_size: Hidden size of the model.

        Returns:
            Names of the matrices that are not quantised, and (matrix name, weight format) pairs.
            The pairs are empty unless `groups` lists formats by module.
        """
        unquantized = {}
        formats = []
        for name, modules in matrices(parts, hidden_size) if self.q.file else ():
            if self.ignored.match(layer, modules):
                unquantized[name] = True
            group = next((g for g in self.groups if g[1].match(layer, modules)), None)
            if group:
                formats.append((name, group[0]))
        return tuple(unquantized), tuple(formats)

    def schemes(self, kinds: Mapping[str, MatrixFormats]) -> tuple[Quantization, ...]:
        """Return the quantisation schemes of the model, one for each weight format.

        A scheme has a weight format such as `fp8` and the names of the weights that it covers.

        Args:
            kinds: Name of a kind of layer → (matrix name, weight format) pairs, the second value
                of `of_layer`. They give the covered names if the file lists formats by module.
                Otherwise they have no effect, and `formats` gives the names.
        """
        exceptions = Quantization("").except_for
        covers = self.formats
        tables = []
        if self.groups:
            covers = {}
            for kind, pairs in kinds.items():
                for name, format_name in pairs:
                    covers[format_name] = (*covers.get(format_name, ()), f"{kind}.{name}")
        elif covers and self.family in ("deepseek_v4", "deepseek_v41_text"):
            exceptions += _COMPRESSORS + _STREAMS
            if self.family == "deepseek_v41_text":  # its scales are powers of two, a byte each
                exceptions += _INDEXERS
                tables.append(Quantization("mxfp8", covers=_NGRAMS, kinds=("table",)))
                covers = {f.replace("fp8_32x32", "fp8_block32"): c for f, c in covers.items()}
            tables.append(Quantization("fp32", covers=_STREAMS))
        return (*(Quantization(name, c, exceptions) for name, c in covers.items()), *tables)

    def _read(self, has_fp4_experts: bool) -> None:
        """Set the formats or groups, and the modules that are not quantised."""
        q = self.q
        keys = ("quant_method", "quant_algo", "moe_quant_algo")
        method, algorithm, experts = (q.word(key).lower()[:60] for key in keys)
        if method == "fp8" and has_fp4_experts:
            experts = "mxfp4"  # DeepSeek-V4: blocks of 32 with one ue8m0 scale
        if experts:  # the list of excluded modules is only about the experts' format
            self.formats[_by_algorithm(experts)] = ("*.experts.*",)
            if method == "fp8":
                self.formats[_fp8(q, self.family)] = ("*",)
            return
        if algorithm == "mixed_precision" and q.table("quantized_layers"):
            self._read_modules()
        elif algorithm and algorithm != "mixed_precision":
            self.formats = {_by_algorithm(algorithm): ("*",)}
        elif q.table("config_groups"):
            self._read_groups()
        else:
            name = _by_method(q, method, self.family)
            self.formats = {name: ("*.experts.*" if method == "mxfp4" else "*",)}
            self._read_overrides(method, name)
        lists = (q.items(key, MAX_MODULES) for key in _EXCLUDED_KEYS.split())
        excluded = next((modules for modules in lists if modules is not None), [])
        patterns = [f"re:{key[2:]}" for key in q.table("dynamic") if key.startswith("-:")]
        self.ignored = self._rules([*excluded, *patterns])

    def _read_overrides(self, method: str, default: str) -> None:
        """Read the modules to which GPTQModel or AutoRound give another number of bits; 16 bits are
        not quantised."""
        overrides = {
            f"re:{name.removeprefix('+:')}": settings
            for name, settings in self.q.table("dynamic").items()
            if not name.startswith("-:")
        }
        for name, settings in self.q.table("extra_config").items():
            overrides[f"re:{name}" if set(name) & set("^*$\\[(") else name] = settings
        formats = {}
        for name, settings in overrides.items():
            if not isinstance(settings, dict):
                raise self.q.fail(show(name), "should be a mapping")
            q = Config({**self.q.file, **settings}, self.q.file_name)
            is_plain = method in _INTEGERS and q.size("bits", 4) >= 16
            formats[name] = "bf16" if is_plain else _by_method(q, method, self.family)
        if formats:
            self._set_groups(formats, default)

    def _read_groups(self) -> None:
        """Read compressed-tensors' groups: one for all matrices, or several with targets."""
        groups = self.q.nested("config_groups")
        for key in groups.file:
            group = groups.nested(key)
            targets = group.items("targets")
            if targets is None and len(groups.file) > 1:
                raise group.fail("targets", "is missing")
            rules = self._rules(["*"] if targets is None else targets)
            self.groups.append((_by_group(group, self.q), rules))
        if len(self.groups) == 1 and self.groups[0][1].everything:
            self.formats, self.groups = {self.groups[0][0]: ("*",)}, []

    def _read_modules(self) -> None:
        """Read ModelOpt's list of modules, each with an algorithm."""
        layers = self.q.nested("quantized_layers")
        formats = {}
        for module, settings in layers.file.items():
            algorithm = settings.get("quant_algo") if isinstance(settings, dict) else None
            if not isinstance(algorithm, str):
                raise layers.fail(show(module), "names no quant_algo")
            formats[module] = _by_algorithm(algorithm)
        self._set_groups(formats)

    def _set_groups(self, formats: Mapping[str, str], default: str = "") -> None:
        """Set the groups: the modules of each format, and the default format for all other
        modules."""
        modules = grouped((name, module) for module, name in formats.items())
        self.groups = [(name, self._rules(names)) for name, names in modules.items()]
        if default:
            self.groups.append((default, self._rules(["*"])))

    def _rules(self, names: list[Any]) -> Rules:
        for name in names:
            if not isinstance(name, str) or len(name) > 1000:
                raise self._fail(f"lists {show(name)}, which is no module's name")
        return Rules(names, self.layers, self._fail)


def with_used_schemes(model: Model) -> Model:
    """Return the model without the quantisation schemes that cover none of its matrices.

    Schemes for only tables or vectors stay. If no scheme is left, a note to the user names the
    removed formats, because no weight is stored in them.

    Args:
        model: The model as read from config.json.
    """
    weights = [(name, w.kind) for name, w, _ in model.walk() if name not in model.unquantized]
    schemes = tuple(
        scheme
        for scheme in model.quantization
        if "matrix" not in scheme.kinds or any(scheme.covering(*weight) for weight in weights)
    )
    if schemes:
        return replace(model, quantization=schemes)
    text = "quantization_config: nothing in this model is stored as"
    notes = tuple(f"{text} {scheme.format}" for scheme in model.quantization)
    return replace(model, quantization=(), notes=(*model.notes, *notes))


def _section(c: Config) -> JsonObject:
    """Return the quantization_config of the file or of its text part; empty if it has none."""
    parts = (part[key] for key in SECTIONS for part in (c.file, c.outer) if part.get(key))
    section: Any = next(parts, {})
    if not isinstance(section, dict):
        raise c.fail("quantization_config", f"should be a mapping, not {show(section)}")
    inner = section.get("quantization")  # as in hf_quant_config.json
    return {**section, **inner} if isinstance(inner, dict) else section
