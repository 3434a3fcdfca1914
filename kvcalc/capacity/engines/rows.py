"""Cache dtypes as engines name them, and the bytes of a row as they store it."""

from kvcalc.errors import UserError
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model
from kvcalc.storage.dtypes import KEYS_AND_VALUES_ONLY, canonical

# What each engine's --kv-cache-dtype (llama.cpp: --cache-type-k, --cache-type-v) takes; None takes all.
DTYPES: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "vllm": (
        "bf16", "fp16", "fp32", "fp8", "fp8_ds_mla", "nvfp4", "nvfp4_ds_mla", "fp8_per_token_head", "int8_per_token_head",
        "int4_per_token_head",
    ),
    "sglang": ("bf16", "fp16", "fp32", "fp8", "fp8_ds_mla", "nvfp4"),
    "llama.cpp": ("fp32", "bf16", "fp16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"),
}  # fmt: skip
INDEX_GROUP, INDEX_SCALE = 128, 4


def is_sparse(model: Model) -> bool:
    """Whether any layer reads latents by an index (DSA)."""
    return any(e.role == "latent" and e.top for layer in model.kinds.values() for e in layer.entries)


def engine_precision(engine: str, model: Model, precision: Precision) -> tuple[Precision, str]:
    """The precision with the cache dtype that `engine` would store, and a note where that differs from the one asked for.

    vLLM and SGLang store an fp8 cache of DSA latents as packed rows of 656 bytes; llama.cpp's own default is fp16. vLLM
    casts float32 checkpoints to bf16.
    Raises UserError for a dtype that the engine has not.
    """
    known, note = DTYPES[engine], ""
    used = canonical(precision.kv_cache_dtype)
    if engine == "vllm" and used in KEYS_AND_VALUES_ONLY:
        raise UserError(f"vLLM's allocation under cache dtype {used!r} is not modelled", hint="Use --engine none")
    if known is not None and used not in known and used != "auto":
        raise UserError(f"{engine} has no cache dtype {precision.kv_cache_dtype!r}", hint=f"It has: auto, {', '.join(known)}")
    if engine == "llama.cpp" and used == "auto":
        used = "fp16"
    published = canonical(model.kv_cache_dtype or "") if canonical(precision.dtype) == "auto" else ""
    if engine in ("vllm", "sglang") and (used if used != "auto" else published) == "fp8" and is_sparse(model):
        used, note = "fp8_ds_mla", f"{engine} stores fp8 latents of sparse attention as packed rows (fp8_ds_mla)"
    dtype = precision.dtype
    if engine == "vllm" and canonical(dtype) == "auto" and model.dtype == "fp32":
        dtype, note = "bf16", "vLLM loads a float32 checkpoint as bf16 unless --dtype says otherwise"
    return Precision(dtype, used, precision.quantization), note


def index_row_bytes(width: int) -> int:
    """One key of the indexer as vLLM and SGLang store it, whatever the cache's dtype: fp8, one fp32 per 128 elements."""
    return width + -(-width // INDEX_GROUP) * INDEX_SCALE
