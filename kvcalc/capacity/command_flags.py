"""Which flags of an engine settings come to: rules of each engine. The way there is in `command_settings`."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from kvcalc.capacity.dialects import GIB, Dialect
from kvcalc.capacity.options import FitOptions
from kvcalc.layers.ranks import Parallelism
from kvcalc.library.words import spelled
from kvcalc.model.spec import Model
from kvcalc.storage.dtypes import canonical
from kvcalc.timing.deployment import Deployment


class Asked(NamedTuple):
    """The values of flags by name, and the options of `fit` that no flag tells, as words."""

    values: dict[str, Any]
    beside: tuple[str, ...]


def asked_by(dialect: Dialect, deployment: Deployment, options: FitOptions) -> Asked | None:
    """What a deployment comes to in an engine's flags; None where the engine has no such split."""
    values = _split(dialect, deployment)
    if values is None:
        return None
    defaults = FitOptions(engine=options.engine)
    names = [f for f in options.__struct_fields__ if f != "from_log"]  # a file, which whoever typed its name knows
    own = {f: getattr(options, f) for f in names if getattr(options, f) != getattr(defaults, f)}
    if dialect.max_num_seqs_is_cap and options.max_num_seqs:
        users = options.users or options.max_num_seqs  # a command line only requires one
        own = {f: own.get(f, users) for f in names if f in own or (f == "users" and users > 1)}
        if users == 1:
            own.pop("users", None)
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


def _split(dialect: Dialect, deployment: Deployment) -> dict[str, Any] | None:
    """The flags of a split; None where the engine has none for it."""
    ranks = deployment.parallelism
    tp, pp, dp, ep, dcp = ranks.tp, ranks.pp, ranks.dp, ranks.ep, ranks.dcp
    found = {name: size for name, size in (("tp", tp), ("pp", pp), ("dp", dp), ("dcp", dcp)) if size > 1}
    if dialect.engine == "vllm":
        return (found | ({"all_experts": True} if ep > 1 else {})) if ep in (1, tp * dp) else None
    if dcp > 1:
        return None
    if dialect.engine == "sglang":
        found |= {"ep": ep} if ep > 1 else {}
        experts = dp > 1 and any(weight.expert for _, weight, _ in deployment.model.walk())
        return found | ({"tp": tp * dp, "shared_attention": True} if experts else {})
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
    tokens = own.pop("num_speculative_tokens", 0)
    if tokens and "prediction" in values:
        values |= {"drafting_steps": tokens, "drafted_branches": 1, "verified_tokens": tokens + 1}


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
