"""config.json → Model: find the text model in the file, look up its type, read every layer, and say what was not read."""

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from kvcalc.errors import UserError, printable
from kvcalc.library.huggingface.classes import resolve
from kvcalc.library.huggingface.config import MOST, Config, show
from kvcalc.library.huggingface.fields import filled, value_of
from kvcalc.library.huggingface.foreign import check, check_unknown, neighbour
from kvcalc.library.huggingface.naming import kind_names, runs
from kvcalc.library.huggingface.notes import assess
from kvcalc.library.huggingface.quantized import SECTIONS, Storage, in_force
from kvcalc.library.huggingface.rope import rope_factors
from kvcalc.library.huggingface.source import defaults_of, facts, of_state_spaces, read_json, text_part
from kvcalc.library.huggingface.tying import KEY, settle
from kvcalc.library.huggingface.types import TYPES, Type
from kvcalc.library.huggingface.types.general import GENERAL
from kvcalc.library.huggingface.unknown import settle as settle_by
from kvcalc.library.huggingface.vision import tower
from kvcalc.model.spec import Layer, Model, Mtp
from kvcalc.storage.dtypes import canonical

MOST_LAYERS, MOST_KEYS = 2_000, 10_000
# Files beside a config.json that say how it is stored, a key that each has, and the tool that it does not name.
_BESIDE = (
    ("hf_quant_config.json", "quantization", ""),
    ("quantize_config.json", "bits", "gptq"),
    ("quant_config.json", "w_bit", "awq"),
)
# Spellings of the standard keys in older and remote-code configs.
_SPELLINGS = {
    "hidden_size": ("n_embd", "d_model", "dim", "model_dim", "embed_dim", "n_embed"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("n_head_kv", "num_kv_heads", "n_kv_heads", "multi_query_group_num"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "n_routed_experts": ("num_routed_experts",),
    "n_shared_experts": ("num_shared_experts",),
    "max_position_embeddings": ("n_positions", "max_seq_len", "max_sequence_length", "seq_length", "model_max_length", "n_ctx"),
}  # fmt: skip


def read_config(path: Path, changes: list[str] | None = None) -> Model:
    """The model of a config.json, or of the folder that holds one. Raises UserError naming the file and the key.

    changes: of `--set`; those that settle what a file of an unknown type leaves open are taken out.
    A checkpoint whose config says nothing of its storage may have a file beside it that does (`_beside`).
    """
    file = path / "config.json" if os.path.isdir(path) else path  # noqa: PTH112 (Path.is_dir raises where it may not look)
    data = read_json(file)
    if file.name == "config.json" and not any(data.get(key) for key in SECTIONS):
        data |= _beside(file)
    name = path.name if path.is_dir() else path.stem if path.stem != "config" else path.resolve().parent.name
    return model_from(data, str(file), name or "config", changes)


def _beside(file: Path) -> dict[str, Any]:
    """What ModelOpt, AutoGPTQ and AutoAWQ write beside a config.json that they leave as it was, as its quantization_config."""
    for name, key, method in _BESIDE:
        other = file.with_name(name)
        found = read_json(other) if other.is_file() else {}
        if key in found:
            return {"quantization_config": {"quant_method": method, **found} if method else found}
    return {}


def model_from(data: Mapping[str, Any], where: str, name: str, changes: list[str] | None = None) -> Model:
    """The model that a config's mapping describes. Raises UserError naming `where` and the key that does not fit."""
    check(data, where)
    data = of_state_spaces(data, where)
    inner = text_part(data, where)
    if max(len(data), len(inner)) > MOST_KEYS:
        raise UserError(f"has more than {MOST_KEYS:,} keys", where)
    named = resolve(data, inner, where)
    if not named.known:
        check_unknown(named.name, data, inner, where)
    entry = TYPES[named.name] if named.known else GENERAL
    defaults = {**entry.defaults, **defaults_of(named.name, data, inner)} if named.known else {}
    tie = settle(data, inner, named.name, entry)
    if tie.tied is not None:
        defaults[KEY] = tie.tied
        inner = {**inner, KEY: tie.tied} if KEY in inner else inner
    c = Config(inner, defaults, where, _aliases(named.name, entry))
    c.outer = data
    c.layers = _depth(c, entry)
    if changes and not named.known:
        settle_by(c, changes)
    storage = Storage(data, c, _dtype(c)[0] == "fp32")
    kinds, pattern, quantization = _layers(c, entry, storage)
    called = {"name": printable(name, 80), "family": named.name, "model_type": named.name}
    fields = called | {"kinds": kinds, "pattern": pattern}
    model = _model(c, entry, fields | {"quantization": quantization, "kv_cache_dtype": storage.cache})
    model = in_force(model, storage.scales) if quantization else model
    said = assess(c, named, entry)
    vision, unseen = tower(data, where, model.hidden_size)
    notes = (*model.notes, *storage.notes, *said.notes, *([tie.doubt] if tie.doubt else ()), *unseen)
    return msgspec.structs.replace(model, notes=notes, parameters_exact=said.exact and not tie.doubt, vision=vision)


def _aliases(model_type: str, entry: Type) -> dict[str, tuple[str, ...]]:
    """Other names of a key: transformers' for the type, the entry's, and the common ones."""
    own = {key: (name,) for key, name in facts().get(model_type, {}).get("aliases", {}).items()}
    own |= {key: (*names, *(n for name in names for n in _SPELLINGS.get(name, ()))) for key, names in own.items()}
    tables = (own, entry.spellings, _SPELLINGS)
    return {key: tuple(name for table in tables for name in table.get(key, ())) for table in tables for key in table}


def _depth(c: Config, entry: Type) -> int:
    """How many layers there are. Width and depth have no honest default: a file that gives none describes no model.

    Only a part of a larger file may leave them to its class, as wrappers around a language model write it.
    """
    key, given = entry.layers_key, c.in_file if c.outer is c.file else c.has
    layers = c.size(key) if key and given(key) else value_of(entry.depth, c)
    for missing in ([] if given("hidden_size") else ["hidden_size"]) + ([] if layers else [key or "num_hidden_layers"]):
        if found := neighbour(c.outer, c.where):
            raise found
        spellings = ", ".join((missing, *_SPELLINGS.get(missing, ())))
        raise UserError(f"is no language model's config: it gives no {missing}", c.where, f"Looked for {spellings}")
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers <= MOST_LAYERS:
        raise c.fail(key or "layers", f"should be a whole number from 1 to {MOST_LAYERS:,}, not {show(layers)}")
    return layers


def _layers(c: Config, entry: Type, storage: Storage) -> tuple[dict[str, Layer], tuple[str, ...], Any]:
    """The distinct kinds of layer, the pattern in runs, and how the kinds are stored."""
    found: dict[bytes, tuple[Layer, Any]] = {}
    keys = []
    order = entry.order(c)
    for c.layer, c.layer_type in enumerate(order):
        parts = (*entry.mixer(c), *entry.ffn(c))
        width = c.size("hidden_size")
        fields = entry.layer_fields(c) | {"unquantized": storage.kept(c.layer, parts, width)}
        layer = _whole_layer(c, parts, fields)
        stored = storage.stored(c.layer, parts, width)
        keys.append(msgspec.json.encode((layer, stored)))
        found.setdefault(keys[-1], (layer, stored))
    c.layer = 0
    names = dict(zip(found, kind_names([layer for layer, _ in found.values()]), strict=True))
    pattern = runs([names[key] for key in keys]) if len(found) > 1 else ()
    schemes = storage.schemes({names[key]: stored for key, (_, stored) in found.items()})
    return {names[key]: layer for key, (layer, _) in found.items()}, pattern, schemes


def _whole_layer(c: Config, parts: tuple[Any, ...], fields: dict[str, Any]) -> Layer:
    layer = Layer(parts=parts, **_checked(c, Layer, fields))
    same = layer.norms == msgspec.structs.replace(layer, norms=None).norm_count
    return msgspec.structs.replace(layer, norms=None) if same else layer


def _model(c: Config, entry: Type, given: dict[str, Any]) -> Model:
    dtype, why = _dtype(c)
    fields: dict[str, Any] = {
        "hidden_size": c.size("hidden_size"),
        "vocab_size": None if "vocab_size" in entry.model else c.size("vocab_size"),
        "layers": c.layers,
        "dtype": dtype,
        "max_context": c.size("max_position_embeddings", 0, least=0) or None,
        "mtp": _mtp(c, given["kinds"], given["pattern"]) if entry.mtp else None,
        "tie_word_embeddings": c.flag("tie_word_embeddings"),
        "norm": value_of(entry.norm, c),
        "rope_factors": rope_factors(c),
        "notes": why if entry.mtp else (*why, *_left_out(c)),
    }
    model = Model(**given, **_checked(c, Model, fields | filled(entry.model, c)))
    key, problem = model.problem()
    if problem:
        raise c.fail(key, problem)
    if model.parameters > MOST**2:
        raise UserError("describes a model of absurd size", c.where)
    return model


def _checked(c: Config, spec: type[Layer | Model], fields: dict[str, Any]) -> dict[str, Any]:
    """Fields as their spec wants them. Raises UserError naming the one that does not fit."""
    types = _types(spec.__name__)
    for name, value in fields.items():
        try:
            msgspec.convert(value, types[name])
        except msgspec.ValidationError as error:
            raise c.fail(name, str(error).replace("`", "'")) from None
    return fields


@cache
def _types(name: str) -> dict[str, Any]:
    """The type of every field of a layer or a model."""
    return {field.name: field.type for field in msgspec.structs.fields(Layer if name == "Layer" else Model)}


def _mtp(c: Config, kinds: dict[str, Layer], pattern: tuple[str, ...]) -> Mtp | None:
    """The multi-token-prediction layers that the file declares; each is like the last layer of the stack.

    Where its parts are others in prediction, a kind of the stack that has those, else a kind of its own.
    """
    key = next((key for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers") if c.in_file(key)), "")
    layers = c.size(key, 0, least=0) if key else 0
    if layers > MOST_LAYERS:
        raise c.fail(key, f"should be at most {MOST_LAYERS:,}")
    last = pattern[-1].rpartition(" ")[2] if pattern else next(iter(kinds))
    if not layers:
        return None
    layer = kinds[last]
    predicts = msgspec.structs.replace(layer, parts=tuple(part.predicting() for part in layer.parts))
    kind = last if predicts == layer else next((name for name, one in kinds.items() if one == predicts), "mtp")
    kinds.setdefault(kind, predicts)
    return Mtp(kind=kind, layers=layers)


def _left_out(c: Config) -> tuple[str, ...]:
    """What is said of multi-token-prediction layers of a kind that is not known here."""
    layers = c.size("num_nextn_predict_layers", 0, least=0)
    what = f"{layers:,} layers of multi-token prediction are" if layers > 1 else "its layer of multi-token prediction is"
    return (f"{what} of another kind, and left out",) if layers else ()


def _dtype(c: Config) -> tuple[str, tuple[str, ...]]:
    """The dtype that the file declares; bf16, with a note, where it declares none."""
    declared = [source[key] for source in (c.file, c.outer) for key in ("dtype", "torch_dtype") if source.get(key)]
    for value in declared:
        if isinstance(value, str) and canonical(value[:40]) in ("bf16", "fp16", "fp32"):
            return canonical(value), ()
    said = f"declares {show(declared[0])}, which is no format of its weights" if declared else "declares none"
    return "bf16", (f"dtype: the file {said}; taken as bf16",)
