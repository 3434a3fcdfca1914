"""What flags of a command line mean together: rules of each engine. The way back is in `command_flags`."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvcalc.capacity.dialects import GIB, Dialect
from kvcalc.errors import UserError
from kvcalc.library.checkpoints import Checkpoint, checkpoint
from kvcalc.model.spec import Model
from kvcalc.storage.quantization import load_weight_format

# Names of --quantization that load a checkpoint as it was published, and say nothing of its bytes.
AS_PUBLISHED = (
    "compressed-tensors", "modelopt", "modelopt_fp4", "modelopt_mixed", "fbgemm_fp8", "gguf", "auto-round", "auto_round", "quark",
    "mxfp4", "inc", "torchao", "ptpc_fp8", "w8a8_fp8", "w8a8_int8", "petit_nvfp4", "qoq", "humming", "gpt_oss_mxfp4", "none",
)  # fmt: skip
_MADE = {"fp8": "fp8", "bitsandbytes": "nf4", "awq_marlin": "awq", "gptq_marlin": "gptq", "moe_wna16": "int4", "marlin": "gptq"}


def settled(
    dialect: Dialect, found: Checkpoint, model: Model, told: Mapping[str, Any]
) -> tuple[dict[str, Any], Model, list[str]]:
    """(options by name, the model, remarks) of flags that were read, for a checkpoint."""
    given = {n: v for n, v in told.items() if v or n in ("n_cpu_moe", "n_gpu_layers")}
    remarks: list[str] = []
    model = _storage(found, model, given, remarks)
    _SETTLE[dialect.engine](given, remarks)
    if given.pop("mtp", False):
        _predict(model, given, remarks)
    _speculation(model, given, remarks)
    if given.pop("lora", False):
        given.setdefault("max_loras", 1)
    elif "max_loras" in given or "max_lora_rank" in given:
        given.pop("max_loras", None)
    return given, model, remarks


def _storage(found: Checkpoint, model: Model, given: dict[str, Any], remarks: list[str]) -> Model:
    """The formats of the weights: of the checkpoint's name, of --quantization where that makes them, of --dtype."""
    asked = given.pop("quantization", "")
    format_ = found.quantization
    if asked and not format_ and not model.quantization:
        if asked in AS_PUBLISHED:
            remarks.append(f"--quantization {asked} loads what the checkpoint holds, which its name does not tell")
        else:
            format_ = _MADE.get(asked) or load_weight_format(asked).name
    if format_:
        given["quantization"] = format_
    dtype = given.pop("dtype", "auto")
    if model.quantization and not format_ and dtype not in ("auto", model.dtype):
        model, dtype = msgspec.structs.replace(model, dtype=dtype), "auto"
    elif model.quantization and not format_:
        dtype = "auto"
    dtype = found.dtype or dtype
    if dtype != "auto":
        given["dtype"] = dtype
    return model


def _ranks(given: Mapping[str, Any]) -> tuple[int, int, int]:
    return given.get("tp", 1), given.get("pp", 1), given.get("dp", 1)


def _vllm(given: dict[str, Any], remarks: list[str]) -> None:
    tp, pp, dp = _ranks(given)
    if given.pop("all_experts", False):
        given["ep"] = tp * dp
    if "max_num_seqs" in given:
        given["max_num_seqs"] *= dp
    if given.pop("text_only", False):
        given["limit_mm_per_prompt"] = '{"image": 0, "video": 0}'
    if given.pop("windows_kept", False):
        given["hybrid"] = False
    one, two = given.pop("one_in_flight", None), given.pop("two_in_flight", None)
    if one:
        given["max_in_flight_batches"] = max(1, pp)
    elif two and pp == 1:
        given["max_in_flight_batches"] = 2
    if size := given.pop("kv_offloading_size", 0):
        given["kv_offloading_bytes"] = int(size * GIB) // (tp * pp)


def _sglang(given: dict[str, Any], remarks: list[str]) -> None:
    tp, _, dp = _ranks(given)
    if given.pop("shared_attention", False):
        if tp % dp:
            raise UserError(f"SGLang's --dp-size {dp} with --enable-dp-attention does not divide --tp-size {tp}")
        given["tp"] = tp // dp
    elif "max_num_seqs" in given:
        given["max_num_seqs"] *= dp
    if given.get("max_num_batched_tokens", 0) < 0:
        given.pop("max_num_batched_tokens")
        remarks.append("prefill is not chunked: the engine's own chunk is counted")
    algorithm = given.pop("prediction", "")
    if algorithm and "draft_name" not in given and algorithm in ("nextn", "eagle", "mtp"):
        given["mtp"] = True
    branches, steps, verified = (given.pop(n, 0) for n in ("drafted_branches", "drafting_steps", "verified_tokens"))
    if algorithm and (steps or verified):
        given["num_speculative_tokens"] = verified - 1 if verified and branches > 1 else steps or verified - 1
    if given.pop("windows_kept", False):
        given["hybrid"] = False


def _llama_cpp(given: dict[str, Any], remarks: list[str]) -> None:
    given.pop("batch", None)
    slots = given.pop("max_num_seqs", 0)
    if slots < 1:
        slots, given["kv_unified"] = 1, True
    given["max_num_seqs"] = slots
    if given.pop("kv_apart", False):
        given["kv_unified"] = False
    if cells := given.pop("cells", 0):
        given["max_model_len"] = max(1, cells // slots)
    kinds = given.get("cache_type_k", "fp16"), given.get("cache_type_v", "fp16")
    if kinds[0] == kinds[1]:
        given["kv_cache_dtype"] = kinds[0]
        given.pop("cache_type_k", None)
        given.pop("cache_type_v", None)
    mode, split = given.pop("split_mode", "layer"), given.pop("tensor_split", "")
    parts = sum(part.strip() not in ("", "0") for part in split.replace("/", ",").split(","))
    if parts > 1 and mode != "none":
        given["pp" if mode == "layer" else "tp"] = parts
        if len({*split.split(",")}) > 1:
            remarks.append(f"--tensor-split {split} is counted as equal parts")


def _trtllm(given: dict[str, Any], remarks: list[str]) -> None:
    if "max_num_seqs" in given:
        given["max_num_seqs"] *= given.get("dp", 1)


_SETTLE: dict[str, Callable[[dict[str, Any], list[str]], None]] = {
    "vllm": _vllm, "sglang": _sglang, "llama.cpp": _llama_cpp, "trtllm": _trtllm,
}  # fmt: skip


def _predict(model: Model, given: dict[str, Any], remarks: list[str]) -> None:
    """Prediction layers as asked; left out where none are known of the model."""
    if model.mtp:
        given["mtp"] = True
    else:
        given.pop("num_speculative_tokens", None)
        remarks.append(f"prediction layers are left out: none are known of {model.name}")


def _speculation(model: Model, given: dict[str, Any], remarks: list[str]) -> None:
    """A draft model, or the model's own prediction layers."""
    text, named = given.pop("speculation", ""), given.pop("draft_name", "")
    if text:
        try:
            config = json.loads(text)
            method, named = str(config.get("method", "")).lower(), str(config.get("model", named) or "")
            if tokens := int(config.get("num_speculative_tokens") or 0):
                given["num_speculative_tokens"] = tokens
        except (ValueError, AttributeError, TypeError):
            raise UserError("--speculative-config is not a mapping in JSON") from None
        if method.endswith("mtp"):
            _predict(model, given, remarks)
            named = ""
        elif method in ("ngram", "suffix") or named == "[ngram]":
            named = ""
        elif config.get("use_heterogeneous_vocab"):
            remarks.append(f"the draft {named} is left out: what use_heterogeneous_vocab takes is not known")
            named = ""
    if named:
        try:
            given["draft"] = checkpoint(named).load()
        except UserError as error:
            remarks.append(f"the draft is left out: {error}")
