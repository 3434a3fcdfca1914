"""What a `quantization_config` calls a storage format, in kvcalc's names.

Formats follow the tools that write them: fp8 (per tensor, per channel or in blocks), GPTQ, AWQ and AutoRound, bitsandbytes,
mxfp4, compressed-tensors and ModelOpt here, the others in `tools`. A name that is not known stands for itself: no size in
that format can be given.
"""

from kvcalc.library.huggingface.config import Config, show
from kvcalc.library.huggingface.tools import TOOLS

_ALGORITHMS = {
    "fp8": "fp8", "nvfp4": "nvfp4", "w4a16_nvfp4": "nvfp4_weight_only", "mxfp8": "mxfp8", "mxfp4": "mxfp4",
    "w4a8_mxfp4_fp8": "mxfp4", "fp8_pb_wo": "fp8_block128", "fp8_per_channel_per_token": "fp8_per_channel",
}  # fmt: skip
_METHODS = {"mxfp4": "mxfp4", "mxfp8": "mxfp8", "fbgemm_fp8": "fp8_per_channel", "eetq": "int8_weight_only"}
_NOT_LOADED = ("higgs", "metal", "quanto", "spqr", "vptq")
INTEGERS = ("gptq", "awq", "auto-round", "auto_round", "gptqmodel", "intel/auto-round")
_CACHES = {"8float": "fp8", "8int": "int8", "4float": "nvfp4", "fp8": "fp8", "int8": "int8", "nvfp4": "nvfp4"}
_UNPACKED = ("dense", "marlin-24")  # weights as they were beside their scales; two of four in an order of its own
_4BIT = ("load_in_4bit", "_load_in_4bit")


def by_method(q: Config, method: str, model_type: str) -> str:
    """The format of a checkpoint by its `quant_method`; for bitsandbytes, by what its flags say."""
    if method in INTEGERS:
        return _packed(q, method)
    if method == "bitsandbytes" or (not method and q.in_file("load_in_4bit")):
        if not any(q.flag(key) for key in _4BIT):
            return "int8"
        kind = "nf4" if q.word("bnb_4bit_quant_type", "fp4") == "nf4" else "fp4"
        return kind + ("_double" if q.flag("bnb_4bit_use_double_quant") else "")
    if method == "fp8":
        return fp8(q, model_type)
    if method in TOOLS:
        return TOOLS[method](q)
    if method in _NOT_LOADED:
        return f"{method} (which no inference server loads)"
    return _METHODS.get(method, method or "unnamed")


def _packed(q: Config, method: str) -> str:
    """GPTQ, AWQ and AutoRound: packed integers. What packs them otherwise is not known by its bytes."""
    layout = q.word("checkpoint_format") or q.word("version").lower()
    if (method == "awq" and layout in ("gemv", "gemv_fast")) or layout == "marlin" or q.flag("is_marlin_format"):
        return f"{method} ({layout or 'marlin'})"
    if (kind := q.word("data_type", "int")) != "int":
        return f"{method} ({kind[:40]})"
    packed = method != "awq" or q.flag("zero_point", True)
    return integers(q, "_zp" if packed else "") + ("_index" if q.flag("desc_act") else "")


def by_algorithm(q: Config, name: str) -> str:
    """The format of ModelOpt's `quant_algo`.

    Which of the scales that AWQ and SmoothQuant put before a matrix stay beside it hangs on the version and the model
    (modelopt/torch/export/quant_utils.py, fuse_prequant_to_linear): those are not known by their bytes.
    """
    return _ALGORITHMS.get(name, f"modelopt ({name})")


def fp8(q: Config, model_type: str) -> str:
    """fp8 with a scale per tensor, or for every block of `weight_block_size`: fp32, in the files of Qwen3 and later bf16.

    As headers of Qwen3-1.7B-FP8 (github.com/modular/modular/issues/7142) and Qwen3.8-27B-FP8 (lablup/mlxcel/issues/1361) say.
    """
    if not q.has("weight_block_size"):
        return "fp8"
    return _block(q, "weight_block_size") + ("_scale16" if model_type.startswith("qwen3") else "")


def integers(q: Config, zeros: str) -> str:
    """Whole numbers in groups along the inputs, each with an fp16 scale and perhaps a packed zero point."""
    bits = q.size("bits" if q.in_file("bits") else "w_bit", 4)
    group = q.size("group_size" if q.in_file("group_size") else "q_group_size", 128, least=-1)
    if not 2 <= bits <= 8:
        raise q.fail("bits", f"{bits} is outside 2 to 8")
    return f"int{bits}_g{max(group, 0)}{zeros}"


def by_group(group: Config, q: Config, wide: bool) -> str:
    """The format of a compressed-tensors group, from its weights' bits, type and strategy, and how the file packs them.

    Scales have the dtype that the weights had, 16 bits unless they were `wide` (quantization/lifecycle/initialize.py);
    `int-quantized` and `naive-quantized` give each value a byte, whatever its bits, and each zero point one
    (compressors/naive_quantized/base.py); an activation order by `group` is an int32 for each input.
    """
    w = group.nested("weights")
    if not w.file:
        raise group.fail("weights", "is missing")
    sparse = q.nested("sparsity_config").word("format", "dense")
    packing = group.word("format") or (q.word("format") if sparse == "dense" else sparse)
    if packing in _UNPACKED or packing.startswith("sparse"):
        return f"compressed-tensors ({packing[:40]})"
    bits, kind = w.size("num_bits"), w.word("type", "int")
    size = max(w.size("group_size", 0, least=-1), 0)
    strategy = w.word("strategy") or ("group" if size else "channel" if w.get("group_size") == -1 else "tensor")
    if kind == "float" and bits == 4:
        computes = "" if group.table("input_activations") else "_weight_only"
        name = {16: "nvfp4", 32: "mxfp4"}.get(size)
        return name + computes if name else f"compressed-tensors (fp4 in groups of {size})"
    if kind == "float" and bits == 8:
        return _float8(w, strategy, size, packing, "" if wide else "_scale16")
    if kind != "int" or not 2 <= bits <= 8:
        raise w.fail("num_bits", f"{bits} of type {show(kind)} is no known format")
    return _whole(group, q, packing, strategy, size, wide)


def _whole(group: Config, q: Config, packing: str, strategy: str, size: int, wide: bool) -> str:
    """Integers of a compressed-tensors group. Widths that do not divide 32 were padded up to release 0.17 (pack_quantized)."""
    w = group.nested("weights")
    bits, zeros = w.size("num_bits"), "" if w.flag("symmetric", True) else "_zp"
    apart = packing in ("int-quantized", "naive-quantized")
    if bits == 8 and strategy == "channel" and group.table("input_activations") and not (wide and zeros):
        return "int8" if wide else f"int8_scale16{zeros}"
    if strategy not in ("channel", "group") or wide:
        return f"compressed-tensors (int{bits} by {strategy[:20]}{', scales of fp32' if wide else ''})"
    if not apart and 32 % bits and _release(q) < (0, 17):
        return f"compressed-tensors (int{bits} packed before 0.17)"
    index = "_index" if size and w.get("actorder") in (True, "group", "dynamic") else ""
    return f"int{8 if apart else bits}_g{size}{zeros}{index}"


def _release(q: Config) -> tuple[int, ...]:
    """The release of compressed-tensors that wrote the file; zeros where it does not say."""
    numbers = q.word("version").split(".")[:2]
    return tuple(int(n) for n in numbers) if len(numbers) == 2 and all(n.isascii() and n.isdigit() for n in numbers) else (0, 0)


def _float8(w: Config, strategy: str, size: int, packing: str, scales: str) -> str:
    """fp8 of a compressed-tensors group; scales in groups of 32 are a byte where the file says `mxfp8`."""
    if strategy == "block":
        return _block(w, "block_structure") + scales
    if strategy == "channel":
        return "fp8_per_channel" + scales
    if size == 32 and (packing.startswith("mxfp8") or str(w.get("scale_dtype")) == "torch.uint8"):
        return "mxfp8"
    return (f"fp8_{size}x1" if size else "fp8") + scales


def cache_dtype(q: Config) -> tuple[str | None, tuple[str, ...]]:
    """(the dtype that the checkpoint declares for the cache, or None; a note that says so)."""
    scheme = q.get("kv_cache_scheme") or q.get("kv_cache_quant_algo")
    if not scheme:
        return None, ()
    name = f"{scheme.get('num_bits')}{scheme.get('type')}" if isinstance(scheme, dict) else show(scheme).strip("'").lower()
    known = _CACHES.get(name[:40])
    if known is None:
        return None, (f"KV-cache scheme {show(scheme)} is not known: `auto` takes the model's dtype",)
    return known, (f"the checkpoint brings scales for a cache in {known}, which `--kv-cache-dtype auto` therefore takes",)


def cache_scales(q: Config, wide: bool) -> tuple[int, int]:
    """Scales that the checkpoint holds for the keys of a layer, and as many for its values: 1, or 0 where it has none.

    A scheme that scales as it goes has none, one per head as many as there are heads (−1). And bytes of one: compressed-
    tensors gives it the dtype that the weights had.
    """
    held = 2 if q.word("quant_method") == "compressed-tensors" and not wide else 4
    scheme = q.get("kv_cache_scheme") or q.get("kv_cache_quant_algo")
    if not isinstance(scheme, dict):
        return int(bool(scheme)), held
    return 0 if scheme.get("dynamic") else -1 if scheme.get("strategy") == "attn_head" else 1, held


def _block(q: Config, key: str) -> str:
    block = q.sizes(key)
    if len(block) != 2 or not all(1 <= n <= 65_536 for n in block):
        raise q.fail(key, f"should be two whole numbers, not {show(q.raw(key))}")
    return "fp8_block128" if block == [128, 128] else f"fp8_{block[1]}x{block[0]}"  # given as outputs × inputs
