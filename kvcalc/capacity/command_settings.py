"""What flags of a command line mean together, and which flags settings come to: rules of each engine, in both directions."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from kvcalc.capacity.dialects import GIB, Dialect
from kvcalc.capacity.options import FitOptions
from kvcalc.errors import UserError
from kvcalc.layers.ranks import Parallelism
from kvcalc.library.checkpoints import Checkpoint, checkpoint
from kvcalc.library.words import spelled
from kvcalc.model.spec import Model
from kvcalc.storage.dtypes import canonical
from kvcalc.storage.quantization import load_weight_format
from kvcalc.timing.deployment import Deployment

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
    _speculation(given, remarks)
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
        if given.get("ep", 1) == 1 and dp > 1:
            given["ep"] = tp
            remarks.append("experts under --enable-dp-attention are counted as spread over all GPUs")
    elif "max_num_seqs" in given:
        given["max_num_seqs"] *= dp
    if given.get("max_num_batched_tokens", 0) < 0:
        given.pop("max_num_batched_tokens")
        remarks.append("prefill is not chunked: the engine's own chunk is counted")
    algorithm = given.pop("prediction", "")
    if algorithm and "draft_name" not in given and algorithm in ("nextn", "eagle", "mtp"):
        given["mtp"] = True
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


def _speculation(given: dict[str, Any], remarks: list[str]) -> None:
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
            given["mtp"], named = True, ""
        elif method in ("ngram", "suffix") or named == "[ngram]":
            named = ""
    if named:
        try:
            given["draft"] = checkpoint(named).load()
        except UserError as error:
            remarks.append(f"the draft is left out: {error}")


class Asked(NamedTuple):
    """The values of flags by name, and the options of `fit` that no flag tells, as words."""

    values: dict[str, Any]
    beside: tuple[str, ...]


def asked_by(dialect: Dialect, deployment: Deployment, options: FitOptions) -> Asked | None:
    """What a deployment comes to in an engine's flags; None where the engine has no such split."""
    values = _split(dialect, deployment.parallelism)
    if values is None:
        return None
    defaults = FitOptions(engine=options.engine)
    names = [f for f in options.__struct_fields__ if f != "from_log"]  # a file, which whoever typed its name knows
    own = {f: getattr(options, f) for f in names if getattr(options, f) != getattr(defaults, f)}
    _sequences(own, deployment.parallelism, values)
    _ASKED[dialect.engine](own, deployment, values)
    if "max_loras" in own:
        values["lora"] = True
    kept = canonical(deployment.precision.kv_cache_dtype)
    if kept != "auto" and dialect.engine != "llama.cpp":
        own["kv_cache_dtype"] = kept
    told = {name for name in own if dialect.flag(name)}
    values |= {name: own[name] for name in told}
    beside = [word for name, value in own.items() if name not in told for word in _beside(name, value)]
    return Asked(values, tuple(beside))


def _split(dialect: Dialect, ranks: Parallelism) -> dict[str, Any] | None:
    """The flags of a split; None where the engine has none for it."""
    tp, pp, dp, ep, dcp = ranks.tp, ranks.pp, ranks.dp, ranks.ep, ranks.dcp
    found = {name: size for name, size in (("tp", tp), ("pp", pp), ("dp", dp), ("dcp", dcp)) if size > 1}
    if dialect.engine == "vllm":
        return (found | ({"all_experts": True} if ep > 1 else {})) if ep in (1, tp * dp) else None
    if dcp > 1:
        return None
    if dialect.engine == "sglang":
        if ep > 1 and dp > 1:
            return found | {"tp": tp * dp, "ep": ep, "shared_attention": True}
        return found | ({"ep": ep} if ep > 1 else {})
    if dp > 1:
        return None
    if dialect.engine == "trtllm":
        return found | ({"ep": ep} if ep > 1 else {})
    count = max(tp, pp)
    if ep > 1 or tp * pp > count:
        return None
    return {"split_mode": "layer" if pp > 1 else "tensor", "tensor_split": ",".join("1" * count)} if count > 1 else {}


def _sequences(own: dict[str, Any], ranks: Parallelism, values: dict[str, Any]) -> None:
    """max_num_seqs of one dp rank, where the engine counts them so; of all, beside, where the ranks cannot share it evenly."""
    if own.get("max_num_seqs") and not values.get("shared_attention"):
        count = own.pop("max_num_seqs")
        if count % ranks.dp:
            own["uneven_max_num_seqs"] = count
        else:
            values["max_num_seqs"] = count // ranks.dp


def _ask_vllm(own: dict[str, Any], deployment: Deployment, values: dict[str, Any]) -> None:
    """Windows kept, passes in flight, the host's memory in GiB of all ranks, and what is drafted with."""
    ranks = deployment.parallelism
    if not own.pop("hybrid", True):
        values["windows_kept"] = True
    flights = own.get("max_in_flight_batches")
    if flights in (1, 2) and ranks.pp == 1:
        values["one_in_flight" if flights == 1 else "two_in_flight"] = bool(own.pop("max_in_flight_batches"))
    if size := own.pop("kv_offloading_bytes", 0):
        values["kv_offloading_size"] = size * ranks.tp * ranks.pp / GIB
    draft = None if own.get("mtp") else own.pop("draft", None)
    tokens = own.pop("num_speculative_tokens", 0)
    drafter = {"method": "mtp"} if own.pop("mtp", False) else {"method": "ngram"} if tokens else {}
    drafter = {"model": draft.huggingface_id or draft.name} if draft is not None else drafter
    if drafter:
        values["speculation"] = json.dumps({**drafter, "num_speculative_tokens": tokens or 1})


def _ask_sglang(own: dict[str, Any], deployment: Deployment, values: dict[str, Any]) -> None:
    if not own.pop("hybrid", True):
        values["windows_kept"] = True
    draft = own.pop("draft", None)
    if draft is not None:
        values |= {"prediction": "STANDALONE", "draft_name": draft.huggingface_id or draft.name}
    elif own.pop("mtp", False):
        values["prediction"] = "EAGLE"


def _ask_llama_cpp(own: dict[str, Any], deployment: Deployment, values: dict[str, Any]) -> None:
    """The context as the cells of all sequences, and the types of keys and of values."""
    slots = values.setdefault("max_num_seqs", 1)
    values["cells"] = slots * (own.pop("max_model_len", 0) or deployment.model.max_context or 4096)
    kept = canonical(deployment.precision.kv_cache_dtype)
    for name in ("cache_type_k", "cache_type_v"):
        used = canonical(own.pop(name, "")) or kept
        if used not in ("auto", "fp16"):
            values[name] = used
    draft = own.pop("draft", None)
    if draft is not None:
        values["draft_name"] = f"./{draft.name}.gguf"


_ASKED: dict[str, Callable[[dict[str, Any], Deployment, dict[str, Any]], None]] = {
    "vllm": _ask_vllm, "sglang": _ask_sglang, "llama.cpp": _ask_llama_cpp, "trtllm": lambda own, deployment, values: None,
}  # fmt: skip


def _beside(name: str, value: Any) -> list[str]:
    """An option as `fit` takes it."""
    if name == "hybrid":
        return ["--disable-hybrid-kv-cache-manager"]
    option = "--" + spelled(name.removeprefix("uneven_"))
    if value is True:
        return [option]
    if isinstance(value, Model):
        return [option, value.huggingface_id or value.name]
    return [option, repr(value) if isinstance(value, float) else str(value)]
