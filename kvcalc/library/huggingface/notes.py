"""What a reader owes its user: which keys nothing asked for, which came from defaults, and what was assumed."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvcalc.errors import UserError, nearest, printable
from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.types import TYPES

# Keys that say nothing about sizes; any other key that no reader asked for is listed in the model's notes.
_SILENT = re.compile(
    r"_id$|_ids$|_token|dropout|eps$|epsilon|activation|hidden_act|init|rope|rotary|theta|scal|multiplier|temperature"
    r"|pdrop|jitter|softcap|^output_|^return_|use_cache|^torch|^dtype|version|architectures|auto_map|^model_type|_name"
    r"|gradient|aux|loss|coef|^is_|generation|top_p|penalty|beam|length$|^max_length|min_length|label|task_|problem"
    r"|norm_topk|scoring|topk_method|n_group|topk_group|pretraining|ep_size|seq_aux|prefix|transformers|_std|pruned"
    r"|cross_attention|chunk_size_feed|^do_|early|^finetuning|_impl$|summary|^use_mem|kernels|alibi|partial|qkv_fused"
)
_CACHE_WORDS = re.compile(
    r"window|latent|lora|index|state|conv|ssm|share|chunk|compress|kv|linear|recurr|mamba|cross|sparse|cache|evict|pool"
)
_HARMLESS = re.compile(r"^use_cache$|^chunk_size_feed_forward$|^output_hidden_states$|cross_attention|token_index$|^auto_map$")
_OTHER_PARTS = re.compile(r"^(quantization|compression|text|vision|audio|vit|projector|rope\w*|auto_map)(_config|_parameters|$)")


def notes(c: Config, model_type: str, known: bool) -> tuple[str, ...]:
    """What was read by general rules, what was taken from defaults, and which keys nothing asked for.

    Raises UserError where the type is not known and an unread key looks as if it changed the cache.
    """
    found = [] if known else _general(c, model_type)
    shown = {k: v for k, v in c.defaulted.items() if not isinstance(v, list | dict) and k not in c.read}
    if shown:
        found.append("not in the file, so transformers' defaults: " + ", ".join(f"{k}={v}" for k, v in sorted(shown.items())))
    unread = [k for k in _unread(c) if not _SILENT.search(k) and not _OTHER_PARTS.search(k)]
    if unread:
        found.append("keys not read: " + ", ".join(printable(k, 60) for k in unread[:40]) + (" …" if len(unread) > 40 else ""))
    return tuple(found)


def _unread(c: Config) -> list[str]:
    """Keys that nothing asked for, of those that are set to something."""
    return [k for k, v in c.file.items() if k not in c.read and v not in (None, False, 0, "", [], {})]


def _general(c: Config, model_type: str) -> list[str]:
    """What to say of a type that is not known. Raises UserError where general rules would be a guess."""
    suspicious = [k for k in _inner_keys(c) if _CACHE_WORDS.search(k) and not _HARMLESS.search(k)]
    shown = printable(model_type or "none", 60)
    if c.file.get("is_encoder_decoder") is True:
        raise UserError(f"model_type {shown!r} is not known, and is no decoder alone (is_encoder_decoder)", c.where)
    if suspicious:
        raise UserError(
            f"model_type {shown!r} is not known, and keys that may change its cache are not understood: "
            + ", ".join(printable(k, 60) for k in suspicious[:12]),
            c.where,
            nearest(model_type, TYPES) if model_type else "",
        )
    assumed = [f"{key} as {word}" for key, word in _ASSUMED.items() if not c.in_file(key)]
    text = f"model_type {shown!r} is not known: read by the general rules for decoders"
    return [text + (f", taking {', '.join(assumed)}" if assumed else "")]


_ASSUMED = {"num_key_value_heads": "one per head", "head_dim": "hidden_size / heads", "tie_word_embeddings": "false"}


def _inner_keys(c: Config) -> Iterator[str]:
    """Unread keys, and those inside unread mappings, whatever they are called."""
    waiting: list[tuple[str, Mapping[str, Any]]] = [("", {k: c.file[k] for k in _unread(c) if not _OTHER_PARTS.search(k)})]
    while waiting:
        path, inside = waiting.pop()
        for key, value in inside.items():
            yield path + key
            if isinstance(value, dict):
                waiting.append((f"{path}{key}.", value))
