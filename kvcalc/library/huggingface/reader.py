"""Read a config.json as a model: find its text part, look up its type, and read every layer."""

import os
import shlex
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from kvcalc.errors import UserError, printable
from kvcalc.layers.attention import Grouped, Sparse
from kvcalc.layers.feed_forward import Dense, Moe, Projections
from kvcalc.library import presets
from kvcalc.library.huggingface.architectures import ModelType, resolve
from kvcalc.library.huggingface.config import (
    MAX_SIZE,
    Config,
    defaults_of,
    facts,
    field_values,
    read_json,
    show,
    text_part,
    value_of,
)
from kvcalc.library.huggingface.notes import collect_notes
from kvcalc.library.huggingface.quantization_config import SECTIONS, Storage, with_used_schemes
from kvcalc.library.huggingface.types.general_rules import apply_settling_changes
from kvcalc.library.huggingface.types.model_type import Type, read_type
from kvcalc.library.huggingface.vision import tower
from kvcalc.model.model import Layer, Model, Mtp
from kvcalc.records import JsonObject
from kvcalc.storage.formats import canonical, table_rows

MAX_LAYERS = 2_000
MAX_KEYS = 10_000
# Spellings of the standard keys in older and remote-code configs.
_SPELLING_ROWS = """
    hidden_size             n_embd d_model dim model_dim embed_dim n_embed
    num_hidden_layers       n_layer n_layers num_layers
    num_attention_heads     n_head n_heads num_heads
    num_key_value_heads     n_head_kv num_kv_heads n_kv_heads multi_query_group_num
    intermediate_size       n_inner ffn_dim ffn_hidden_size d_ff
    n_routed_experts        num_routed_experts
    n_shared_experts        num_shared_experts
    max_position_embeddings n_positions max_seq_len max_sequence_length seq_length \
                            model_max_length n_ctx
"""
_SPELLINGS = {key: tuple(names) for key, *names in table_rows(_SPELLING_ROWS)}


def read_config(path: Path, changes: list[str] | None = None) -> Model:
    """Return the model of a config.json, or of the folder that contains one.

    If the config.json does not describe the quantisation, `hf_quant_config.json` next to it is
    read.

    Args:
        path: The file or folder.
        changes: `KEY=VALUE` changes of `--set`; None for none. If the model type is unknown, some
            keys may be unclear, such as which layers have a sliding window. Changes that settle
            such keys are applied here, and removed from this list. All others stay in it.

    Raises:
        UserError: The file cannot be read as a model. The message names the file and the key.
    """
    is_folder = os.path.isdir(path)  # noqa: PTH112 (Path.is_dir raises without permission)
    file = path / "config.json" if is_folder else path
    adapter = path / "adapter_config.json"
    if is_folder and adapter.is_file() and not file.is_file():
        file = adapter
    data = read_json(file)
    other = file.with_name("hf_quant_config.json")  # as ModelOpt writes it
    is_described = file.name != "config.json" or any(data.get(key) for key in SECTIONS)
    if not is_described and other.is_file():
        data["quantization_config"] = read_json(other)
    name = path.name if is_folder else path.stem
    if not is_folder and name == "config":
        name = path.resolve().parent.name
    return model_from(data, str(file), name or "config", changes)


def model_from(
    data: JsonObject, file_name: str, name: str, changes: list[str] | None = None
) -> Model:
    """Return the model that the content of a config.json describes.

    Args:
        data: The content of the whole config.json.
        file_name: Name of the file in error messages.
        name: Name of the resulting model.
        changes: `KEY=VALUE` changes of `--set`; None for none. If the model type is unknown, some
            keys may be unclear, such as which layers have a sliding window. Changes that settle
            such keys are applied here, and removed from this list. All others stay in it.

    Raises:
        UserError: The value of a key is invalid. The message names the file and the key.
    """
    is_named = data.get("model_type") or data.get("architectures")
    if not is_named and ("ssm_cfg" in data or data.keys() >= {"dim", "n_layers"}):
        raise UserError(
            "has another program's format, not the format of a config.json of transformers",
            "Give the config.json of the same weights for transformers, or a preset",
            file_name,
        )
    if data.get("peft_type") == "LORA":
        base = printable(data.get("base_model_name_or_path") or "MODEL", 200)
        rank = Config(data, file_name).size("r", 8)  # the default of PEFT's LoraConfig
        command = f"kvcalc fit {shlex.quote(base)} --max-loras 1 --max-lora-rank {rank}"
        problem = f"is a LoRA adapter of {base}, not a model"
        raise UserError(problem, f"Write `{command}`", file_name)
    if draft_keys := Config(data, file_name).table("dflash_config"):
        data = {**data, **draft_keys, "dflash_config": None}
    inner = text_part(data, file_name)
    if max(len(data), len(inner)) > MAX_KEYS:
        raise UserError(f"has more than {MAX_KEYS:,} keys", where=file_name)

    resolved = resolve(data, inner, file_name)
    if resolved.has_entry:
        entry = read_type(resolved.name)
        defaults = {**entry.defaults, **defaults_of(resolved.name, data, inner)}
    else:
        if any(part.get("is_encoder_decoder") is True for part in (data, inner)):
            label = printable(str(data.get("model_type") or resolved.name or "none"), 60)
            text = f"model_type {label!r} is not known"
            raise UserError(f"{text}, and has an encoder (is_encoder_decoder)", where=file_name)
        entry = read_type("$general")
        defaults = {}
    c = Config(inner, file_name, defaults, _aliases(resolved.name, entry))
    c.outer = data
    c.layers = _layer_count(c, entry)
    if changes and not resolved.has_entry:
        apply_settling_changes(c, changes)
    model, storage = _model(c, entry, printable(name, 80), resolved)
    notes, is_exact = collect_notes(c, resolved, entry)
    vision, vision_notes = tower(data, file_name, model.hidden_size)
    return replace(
        model,
        notes=(*model.notes, *storage.notes, *notes, *vision_notes),
        parameters_exact=is_exact,
        vision=vision,
    )


def _aliases(model_type: str, entry: Type) -> dict[str, tuple[str, ...]]:
    """Return other names of each key: from transformers' class, from the entry, and common
    names."""
    own = {
        key: (name, *_SPELLINGS.get(name, ()))
        for key, name in facts().get(model_type, {}).get("aliases", {}).items()
    }
    tables = (own, entry.spellings, _SPELLINGS)
    keys = {key for table in tables for key in table}
    return {key: tuple(name for table in tables for name in table.get(key, ())) for key in keys}


def _layer_count(c: Config, entry: Type) -> int:
    """Return the number of layers.

    A file without width or depth describes no model. Only a part of a larger file may leave them to
    the defaults of its class.
    """
    key = entry.layers_key
    is_given = c.in_file if c.outer is c.file else c.has
    layers = c.size(key) if key and is_given(key) else value_of(entry.depth, c)
    missing = "" if layers else key or "num_hidden_layers"
    missing = missing if is_given("hidden_size") else "hidden_size"
    if missing:
        raise UserError(
            f"is no language model's config.json: it gives no {missing}",
            f"Looked for {', '.join((missing, *_SPELLINGS.get(missing, ())))}",
            c.file_name,
        )
    if type(layers) is not int or not 1 <= layers <= MAX_LAYERS:
        text = f"should be a whole number from 1 to {MAX_LAYERS:,}, not {show(layers)}"
        raise c.fail(key or "layers", text)
    return layers


def _model(c: Config, entry: Type, name: str, resolved: ModelType) -> tuple[Model, Storage]:
    """Return the model with its storage formats."""
    family = resolved.name
    dtype, dtype_notes = _dtype(c)
    storage = Storage(c)
    kinds, pattern, quantization = _layers(c, entry, storage, bool(resolved.pooling))
    fields = {
        "name": name,
        "family": family,
        "model_type": family,
        "kinds": kinds,
        "pattern": pattern,
        "quantization": quantization,
        "kv_cache_dtype": storage.cache,
        "hidden_size": c.size("hidden_size"),
        "vocab_size": None if "vocab_size" in entry.model else c.size("vocab_size"),
        "layers": c.layers,
        "dtype": dtype,
        "max_context": c.size("max_position_embeddings", 0, minimum=0) or None,
        "mtp": _mtp(c, kinds, pattern) if entry.mtp else None,
        "tie_word_embeddings": c.flag("tie_word_embeddings"),
        "norm": value_of(entry.norm, c),
        "notes": dtype_notes,
    }
    fields |= field_values(entry.model, c)
    if resolved.pooling:
        fields |= _pooling_fields(c, entry, resolved.pooling)
    model = presets.build(fields, Model, c.file_name).checked(c.file_name)
    if model.parameters > MAX_SIZE**2:
        raise UserError("describes a model of absurd size", where=c.file_name)
    return with_used_schemes(model) if quantization else model, storage


def _pooling_fields(c: Config, entry: Type, class_name: str) -> JsonObject:
    """Return the fields of an embedder or reranker, including the classifier of a reranker.

    Source: transformers' modelling code. Encoders have a dense layer before the classifier. In
    ModernBERT, a norm with the same number of elements replaces the layer's bias.
    """
    width = c.size("hidden_size")
    ranks = class_name.endswith("Classification")
    labels = c.get("id2label", {})
    number = c.size("num_labels", len(labels) if isinstance(labels, dict) and labels else 2)
    matrices: dict[str, tuple[int, ...]] = {}
    if entry.is_encoder and (ranks or entry.has_pooler):
        matrices["pooler"] = (width, width, width)
    if ranks:
        matrices["score"] = (width, number, number) if entry.is_encoder else (width, number)
    return {
        "pooling": True,
        "lm_head": False,
        "lm_head_bias": False,
        "tie_word_embeddings": False,
        "extra": (Projections(matrices=matrices),) if matrices else (),
    }


def _layers(
    c: Config, entry: Type, storage: Storage, is_pooling: bool
) -> tuple[dict[str, Layer], tuple[str, ...], Any]:
    """Return the distinct kinds of layer, the pattern in runs, and the storage formats of the
    kinds."""
    distinct: dict[bytes, tuple[Layer, Any]] = {}
    keys = []
    order = value_of(entry.order, c)
    for c.layer, c.layer_type in enumerate(order):
        parts = (*entry.mixer(c), *entry.ffn(c))
        if is_pooling and (entry.is_encoder or c.get("use_bidirectional_attention", False)):
            parts = tuple(  # tokens also see later tokens, so that attention caches nothing
                replace(part, cached=False) if isinstance(part, Grouped) else part
                for part in parts
            )
        unquantized, format_names = storage.of_layer(c.layer, parts, c.size("hidden_size"))
        fields = {"parts": parts, "unquantized": unquantized}
        fields |= field_values({"norms": entry.norms} | entry.layer, c)
        layer = presets.build(fields, Layer, c.file_name)
        plain = replace(layer, norms=None)
        layer = plain if layer.norms == plain.norm_count else layer
        keys.append(msgspec.json.encode((layer, format_names)))
        distinct.setdefault(keys[-1], (layer, format_names))
    c.layer = 0
    names = dict(zip(distinct, kind_names([layer for layer, _ in distinct.values()])))
    pattern = runs([names[key] for key in keys]) if len(distinct) > 1 else ()
    schemes = storage.schemes(
        {names[key]: format_names for key, (_, format_names) in distinct.items()}
    )
    return {names[key]: layer for key, (layer, _) in distinct.items()}, pattern, schemes


def kind_names(kinds: list[Layer]) -> list[str]:
    """Return a name for each kind of layer in a model, in the same order.

    Layers with equal parts are one kind. A name has the words that distinguish the kinds: the mixer
    (`local` for a sliding window), the FFN (such as `moe`), or both. Layers that read another
    layer's cache also have `shared`. If names are equal, later ones get a number, such as
    `local_2`.

    Args:
        kinds: One layer of each kind.
    """
    mixers = [_mixer_word(layer) for layer in kinds]
    networks = [
        "_".join(
            str(p.__struct_config__.tag) for p in layer.parts if isinstance(p, Dense | Moe)
        )
        for layer in kinds
    ]
    has_networks = len(set(networks)) > 1
    has_mixers = len(set(mixers)) > 1 or not has_networks
    names = []
    uses: Counter[str] = Counter()
    for layer, mixer, network in zip(kinds, mixers, networks):
        words = mixer * has_mixers, network * has_networks, "shared" * layer.shares_cache
        base = "_".join(filter(None, words)) or "layer"
        uses[base] += 1
        names.append(base if uses[base] == 1 else f"{base}_{uses[base]}")
    return names


def _mixer_word(layer: Layer) -> str:
    """Return the name of the mixers of a layer, such as `local` for a sliding window."""
    words = []
    for part in layer.mixers:
        word = str(part.__struct_config__.tag)
        if isinstance(part, Grouped):
            word = "chunked" if part.attention_chunk_size else "full"
            word = "local" if part.sliding_window else word
        words.append("sparse_reuse" if isinstance(part, Sparse) and not part.indexer else word)
    return "_".join(dict.fromkeys(words))


def runs(order: list[str]) -> tuple[str, ...]:
    """Return the order of layer kinds in the short form of `Model.pattern`.

    Neighbouring equal kinds become a count and a name: five `local` and one `full` give ("5 local",
    "full"). If this order repeats, only its shortest period is returned. The last repetition may be
    incomplete.

    Args:
        order: Name of the kind of each layer.
    """
    lengths = range(1, len(order) + 1)  # a, b, a, b, a has the period 2
    period = next(n for n in lengths if order[n:] == order[: len(order) - n])
    counted = [(len(list(group)), kind) for kind, group in groupby(order[:period])]
    return tuple(f"{count} {kind}" if count > 1 else kind for count, kind in counted)


def _mtp(c: Config, kinds: dict[str, Layer], pattern: tuple[str, ...]) -> Mtp | None:
    """Return the layers of multi-token prediction; None if there are none.

    Each layer is like the last layer of the stack. If its parts differ in a prediction layer, the
    result uses a kind with these parts, and adds it to `kinds` if necessary.
    """
    keys = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
    key = next(filter(c.in_file, keys), "")
    layers = c.size(key, minimum=0) if key else 0
    if not layers:
        return None
    if layers > MAX_LAYERS:
        raise c.fail(key, f"should be at most {MAX_LAYERS:,}")
    last = pattern[-1].rpartition(" ")[2] if pattern else next(iter(kinds))
    layer = replace(kinds[last], parts=tuple(part.predicting() for part in kinds[last].parts))
    kind = next((name for name in (last, *kinds) if kinds[name] == layer), "mtp")
    kinds.setdefault(kind, layer)
    return Mtp(kind=kind, layers=layers)


def _dtype(c: Config) -> tuple[str, tuple[str, ...]]:
    """Return the dtype that the file declares; bf16, with a note, if it declares none."""
    values = (part.get(key) for part in (c.file, c.outer) for key in ("dtype", "torch_dtype"))
    declared = next(filter(None, values), None)
    if isinstance(declared, str) and canonical(declared[:40]) in ("bf16", "fp16", "fp32"):
        return canonical(declared), ()
    problem = f"{show(declared)} is no format of weights" if declared else "is missing"
    return "bf16", (f"dtype: {problem}; bf16 is assumed",)
