"""config.json → Model: find the text model in the file, look up its type, read every layer, and say what was not read."""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from kvcalc.attention import Grouped, Sparse
from kvcalc.dtypes import canonical
from kvcalc.errors import UserError, nearest, printable
from kvcalc.ffn import Dense, Moe
from kvcalc.files import MOST_JSON, read_text
from kvcalc.huggingface.config import MOST, Config
from kvcalc.huggingface.fields import filled, value_of
from kvcalc.huggingface.quantized import Exclusions, config_of, read_quantization
from kvcalc.huggingface.types import TYPES, Type
from kvcalc.huggingface.types.general import GENERAL
from kvcalc.model import Layer, Model, Mtp

TEXT_KEYS = ("text_config", "llm_config", "language_config", "thinker_config", "language_model", "decoder")
MOST_LAYERS = 10_000
# Keys that say nothing about sizes; any other key that no reader asked for is listed in the model's notes.
_SILENT = re.compile(
    r"_id$|_ids$|_token|dropout|eps$|epsilon|activation|hidden_act|init|rope|rotary|theta|scal|multiplier|temperature"
    r"|pdrop|jitter|softcap|^output_|^return_|use_cache|^torch|^dtype|version|architectures|auto_map|^model_type|_name"
    r"|gradient|aux|loss|coef|^is_|generation|top_p|penalty|beam|length$|^max_length|min_length|label|task_|problem"
    r"|norm_topk|scoring|topk_method|n_group|topk_group|pretraining|ep_size|seq_aux|prefix|transformers|_std|pruned"
    r"|cross_attention|chunk_size_feed|^do_|early|^finetuning|_impl$|summary|^use_mem|kernels|alibi|partial|qkv_fused"
)
_CACHE_WORDS = re.compile(
    r"window|latent|lora|index|state|conv|ssm|share|chunk|compress|kv|linear|recurr|mamba|cross|sparse|cache"
)
_TENSOR_TYPES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}


def read_config(path: Path) -> Model:
    """The model of a config.json, or of the folder that holds one. Raises UserError naming the file and the key."""
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(read_text(file, MOST_JSON))  # transformers writes Infinity, which strict JSON has not
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not JSON: {error}", str(file)) from None
    if not isinstance(data, dict):
        raise UserError("holds no mapping of keys to values", str(file))
    name = path.name if path.is_dir() else path.stem if path.stem != "config" else path.resolve().parent.name
    return model_from(data, str(file), name or "config")


def model_from(data: Mapping[str, Any], where: str, name: str) -> Model:
    """The model that a config's mapping describes. Raises UserError naming `where` and the key that does not fit."""
    outer, inner = _text_part(data, where)
    model_type, entry, known = _entry(outer, inner, where)
    facts = _facts().get(model_type, {})
    c = Config(inner, facts.get("defaults", {}) if known else {}, where, _aliases(facts))
    c.outer = outer
    _refuse_skeleton(c, entry)
    c.layers = c.size(entry.layers_key) if c.has(entry.layers_key) else value_of(entry.depth, c)
    if isinstance(c.layers, bool) or not isinstance(c.layers, int) or not 1 <= c.layers <= MOST_LAYERS:
        raise c.fail("num_hidden_layers", f"should be a whole number from 1 to {MOST_LAYERS:,}, not {str(c.layers)[:40]}")
    kinds, pattern = _layers(c, entry, Exclusions(config_of(outer, c), where))
    model = _model(c, entry, outer, name, model_type, kinds, pattern)
    notes = _notes(c, model_type, known)
    return msgspec.structs.replace(model, notes=(*model.notes, *notes))


def _text_part(data: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The whole file, and the part of it that describes the language model."""
    inner: Mapping[str, Any] = data
    for _ in range(4):
        found = next((inner[k] for k in TEXT_KEYS if isinstance(inner.get(k), dict)), None)
        if found is None or "num_hidden_layers" in inner:
            return data, inner
        kept = {k: inner[k] for k in ("tie_word_embeddings",) if k in inner and k not in found}
        outer_type = inner.get("model_type")
        inner = {**found, **kept}
        if not isinstance(inner.get("model_type"), str) and isinstance(outer_type, str):
            inner["model_type"] = _facts().get(outer_type, {}).get("text", outer_type)
    raise UserError("nests one text_config in another too deeply", where)


def _entry(outer: Mapping[str, Any], inner: Mapping[str, Any], where: str) -> tuple[str, Type, bool]:
    """(model type, its entry, whether it is a known one)."""
    found = inner.get("model_type", outer.get("model_type"))
    if found is not None and not isinstance(found, str):
        raise UserError(f"model_type: should be a text, not {str(found)[:40]!r}", where)
    model_type = _SAME_AS.get(found or "", found or "")
    if model_type not in TYPES:  # a composite that keeps its text part's keys beside its own
        model_type = _facts().get(model_type, {}).get("text", model_type)
    if model_type in TYPES:
        return model_type, TYPES[model_type], True
    return model_type, GENERAL, False


# Types of remote code, and older names, that one of transformers' types reads exactly.
_SAME_AS = {
    "kimi_k2": "deepseek_v3",
    "deepseek_ref": "deepseek_v4",
    "minimax_text_01": "minimax",
    "minimax_m1": "minimax",
    "mixtral_moe": "mixtral",
    "Yi": "llama",
    "RefinedWebModel": "falcon",
    "RefinedWeb": "falcon",
}


@cache
def _facts() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = msgspec.json.decode((Path(__file__).parent / "defaults.json").read_bytes())
    return found


# Spellings of the standard keys in older and remote-code configs.
_SPELLINGS = {
    "hidden_size": ("n_embd", "d_model", "dim", "model_dim", "embed_dim", "n_embed"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("n_head_kv", "num_kv_heads", "n_kv_heads", "multi_query_group_num"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "max_sequence_length", "seq_length", "model_max_length", "n_ctx"),
}  # fmt: skip


def _aliases(facts: dict[str, Any]) -> dict[str, tuple[str, ...]]:
    own = facts.get("aliases", {})
    return {key: (*([own[key]] if key in own else []), *_SPELLINGS.get(key, ())) for key in {*own, *_SPELLINGS}}


def _refuse_skeleton(c: Config, entry: Type) -> None:
    """Width and depth have no honest default: without them there is no model to size."""
    for key in ("hidden_size", entry.layers_key):
        if not c.in_file(key) and not (key == entry.layers_key and value_of(entry.depth, c)):
            spellings = ", ".join((key, *_SPELLINGS.get(key, ())))
            raise UserError("is no language model's config: " + f"it gives no {key}", c.where, f"Looked for {spellings}")


def _layers(c: Config, entry: Type, exclusions: Exclusions) -> tuple[dict[str, Layer], tuple[str, ...]]:
    """The distinct kinds of layer, and the pattern in runs."""
    order = entry.order(c)
    kinds: list[Layer] = []
    indices = []
    for c.layer, c.layer_type in enumerate(order):
        parts = (*entry.mixer(c), *entry.ffn(c))
        kept = exclusions.kept(c.layer, parts, c.size("hidden_size"))
        layer = Layer(parts=parts, unquantized=kept, **entry.layer_fields(c))
        if layer.norms == msgspec.structs.replace(layer, norms=None).norm_count:
            layer = msgspec.structs.replace(layer, norms=None)
        if layer not in kinds:
            kinds.append(layer)
        indices.append(kinds.index(layer))
    c.layer = 0
    names = _kind_names(kinds)
    pattern = _runs([names[i] for i in indices]) if len(kinds) > 1 else ()
    return dict(zip(names, kinds, strict=True)), pattern


def _kind_names(kinds: list[Layer]) -> list[str]:
    """A short name for each kind, after what tells it from the others: its mixer, its FFN, or both."""
    mixers = [_mixer_word(layer) for layer in kinds]
    networks = ["_".join(str(p.__struct_config__.tag) for p in layer.parts if isinstance(p, Dense | Moe)) for layer in kinds]
    names: list[str] = []
    for layer, mixer, network in zip(kinds, mixers, networks, strict=True):
        words = [mixer] if len(set(mixers)) > 1 or len(set(networks)) == 1 else []
        words += [network] if len(set(networks)) > 1 else []
        base = "_".join(filter(None, [*words, "shared" if layer.shares_cache else ""])) or "layer"
        names.append(base if base not in names else f"{base}_{sum(n.startswith(base) for n in names) + 1}")
    return names


def _mixer_word(layer: Layer) -> str:
    words = []
    for part in layer.mixers:
        word = str(part.__struct_config__.tag)
        if isinstance(part, Grouped):
            word = "local" if part.sliding_window else "chunked" if part.attention_chunk_size else "full"
        words.append("sparse_reuse" if isinstance(part, Sparse) and not part.indexer else word)
    return "_".join(dict.fromkeys(words))


def _runs(order: list[str]) -> tuple[str, ...]:
    """`5 local` for five in a row; the shortest period if the order repeats exactly."""
    period = next(p for p in range(1, len(order) + 1) if all(order[i] == order[i - p] for i in range(p, len(order))))
    found: list[tuple[int, str]] = []
    for kind in order[:period]:
        if found and found[-1][1] == kind:
            found[-1] = (found[-1][0] + 1, kind)
        else:
            found.append((1, kind))
    return tuple(f"{count} {kind}" if count > 1 else kind for count, kind in found)


def _model(
    c: Config,
    entry: Type,
    outer: Mapping[str, Any],
    name: str,
    model_type: str,
    kinds: dict[str, Layer],
    pattern: tuple[str, ...],
) -> Model:
    dtype, why = _dtype(c, outer)
    quantization, kv_cache_dtype, notes = read_quantization(outer, c)
    fields: dict[str, Any] = {
        "name": printable(name, 80),
        "family": model_type,
        "hidden_size": c.size("hidden_size"),
        "vocab_size": c.size("vocab_size"),
        "layers": c.layers,
        "kinds": kinds,
        "pattern": pattern,
        "dtype": dtype,
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
        "max_context": c.size("max_position_embeddings", 0, least=0) or None,
        "mtp": _mtp(c, kinds, pattern),
        "tie_word_embeddings": c.flag("tie_word_embeddings"),
        "norm": value_of(entry.norm, c),
        "notes": (*why, *notes),
    }
    given = filled(entry.model, c)
    try:
        model = Model(**(fields | given))
    except TypeError as error:
        raise UserError(str(error), c.where) from None
    key, problem = model.problem()
    if problem:
        raise c.fail(key, problem)
    if model.parameters > MOST**2:
        raise UserError("describes a model of absurd size", c.where)
    return model


def _mtp(c: Config, kinds: dict[str, Layer], pattern: tuple[str, ...]) -> Mtp | None:
    """The multi-token-prediction layers that the file declares; each is like the last layer of the stack."""
    layers = c.size("num_nextn_predict_layers", 0, least=0) if c.in_file("num_nextn_predict_layers") else 0
    last = pattern[-1].rpartition(" ")[2] if pattern else next(iter(kinds))
    return Mtp(kind=last, layers=layers) if layers else None


def _dtype(c: Config, outer: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """The dtype that the file declares; bf16, with a note, where it declares none."""
    for source in (c.file, outer):
        for key in ("dtype", "torch_dtype"):
            value = source.get(key)
            if isinstance(value, str) and canonical(value) in _TENSOR_TYPES:
                return canonical(value), ()
    return "bf16", ("dtype: the file declares none; taken as bf16",)


def _notes(c: Config, model_type: str, known: bool) -> tuple[str, ...]:
    """What was read by general rules, what was taken from defaults, and which keys nothing asked for."""
    unread = [k for k in c.file if k not in c.read and not _SILENT.search(k) and c.file[k] not in (None, False, 0, [], {})]
    unread = [k for k in unread if k not in ("quantization_config", "text_config", "vision_config", "audio_config")]
    notes = []
    if not known:
        suspicious = [k for k in unread if _CACHE_WORDS.search(k)]
        if suspicious:
            raise UserError(
                f"model_type {model_type or 'none'!r} is not known, and keys that may change its cache are not understood: "
                + ", ".join(suspicious[:12]),
                c.where,
                nearest(model_type, TYPES) if model_type else "",
            )
        notes.append(f"model_type {printable(model_type or 'none', 60)!r} is not known: read by the general rules for decoders")
    shown = {k: v for k, v in c.defaulted.items() if not isinstance(v, list | dict) and k not in c.read}
    if shown:
        notes.append("not in the file, so transformers' defaults: " + ", ".join(f"{k}={v}" for k, v in sorted(shown.items())))
    if unread:
        notes.append("keys not read: " + ", ".join(printable(k, 60) for k in unread[:40]) + (" …" if len(unread) > 40 else ""))
    return tuple(notes)
