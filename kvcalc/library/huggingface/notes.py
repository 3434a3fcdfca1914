"""What a reader owes its user: which keys nothing asked for, which came from defaults, and what was assumed."""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from kvcalc.errors import printable
from kvcalc.library.huggingface.classes import Named
from kvcalc.library.huggingface.config import Config
from kvcalc.library.huggingface.source import facts
from kvcalc.library.huggingface.types import Type
from kvcalc.library.huggingface.unknown import OTHER_PARTS, SIGHT, check_settled

MOST_SHOWN = 40
# Keys that say nothing about sizes; any other key that no reader asked for is listed in the model's notes.
_SILENT = re.compile(
    r"_ids?$|_tokens?(_|$)|dropout|eps$|epsilon|activation|hidden_act|^act_|init(?!ial)|initializer|rope|rotary|theta|scal[ei]"
    r"|multiplier|temperature|pdrop|jitter|softcap|^output_|^return_|use_cache|^torch|dtype|version|architectures|auto_map"
    r"|model_type|_name|gradient|aux|loss|coef|^is_|generation|top_[pk]$|penalty|beam|length$|^max_length|min_length|label|task_"
    r"|problem|norm_topk|scoring|topk_method|n_group|topk_group|pretraining|ep_size|seq_aux|prefix|transformers|_std|pruned"
    r"|cross_attention|chunk_size_feed|^do_|early|^finetuning|_impl(ementation)?(_|$)|summary|^use_mem|kernels|alibi|partial"
    r"|qkv_fused|tokenizer|^bf16|^fp16|^fp32|flash|softmax|^mup_|_path$|residual_connection_post|fp32_residual|_autoset$"
    r"|router_(dtype|scaling|z_)|routed_scaling|score_func|num_return_sequences|typical_p|no_repeat|_commit|scale_attn|onnx"
    r"|_clip|clip_|template|select_|backbone_lora|llm_lora|^_|use_bfloat16|diversity|exponential_decay|remove_invalid|bias_dropout"
    r"|mtp|nextn|time_step_(?:min|max|floor|limit)|^swiglu_|num_logits|logn|dynamic_ntk|pos_emb$"
)
# Of the keys that nothing asked for, those that may carry weights, and what they are not.
_LENGTHS = re.compile(r"(chunk|window|block|batch|cache|padding)_size|group_size$|interval|frequency|_freq$|_lower_bound$")
_WEIGHTS = re.compile(
    r"size|dim|rank|lora|bias|residual|norm|head|expert|proj|gate(?!_level)|gating|conv|mlp|ffn|inner|embed|vocab|adapter|depth"
    r"|width|channel|layer|memory|engram|latent|ngram|share|sink"
)
_ALWAYS = re.compile(r"lora(?!_(?:alpha|dropout))|adapter|_rank$|layer_?scale|scale_norm")  # whatever else the name says
# What every type is said in: a type that is known and does not ask for one of these is not made with it.
_STANDARD = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
# A switch that is off, and the keys that say nothing then.
_SWITCHES = {
    "use_sliding_window": ("max_window_layers", "sliding_window", "sliding_window_pattern"),
    "use_cla": ("cla_share_factor",),
    "use_mla": ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
}


class Said(NamedTuple):
    """The notes of a file, and whether its parameters are exact."""

    notes: tuple[str, ...]
    exact: bool


def assess(c: Config, named: Named, entry: Type) -> Said:
    """What was read by general rules, what was taken from defaults, and which keys nothing asked for.

    Raises UserError where the type is not known and an unread key looks as if it changed the cache.
    """
    unread = list(_unread(c, {*entry.inert, *_declared(named), *_switched_off(c), *_respelled(c)}))
    found = [*named.notes, *([] if named.known else _general(c, named.name, unread))]
    shown = {k: v for k, v in c.defaulted.items() if not isinstance(v, list | dict) and k not in c.read}
    if shown:
        found.append("not in the file, so class defaults: " + ", ".join(f"{k}={v}" for k, v in sorted(shown.items())))
    told = [key for key in unread if _ALWAYS.search(key) or not any(_tells_nothing(part) for part in key.split("."))]
    heavy = [key for key in told if may_carry_weights(key.rpartition(".")[2])]
    heavy += [key for key in ("add_cross_attention",) if key in unread]  # a decoder with an attention that its type has not
    if heavy:
        found.append("parameters are ≈: keys that may carry weights and are not understood: " + _listed(heavy))
    if rest := [key for key in told if key not in heavy]:
        found.append("keys not read: " + _listed(rest))
    return Said(tuple(found), named.known and named.exact and not heavy)


def may_carry_weights(key: str) -> bool:
    """Whether a key that nobody knows may stand for parameters, by its name."""
    return bool(_ALWAYS.search(key) or (_WEIGHTS.search(key) and not (_LENGTHS.search(key) or _tells_nothing(key))))


def _listed(keys: list[str]) -> str:
    return ", ".join(printable(k, 60) for k in keys[:MOST_SHOWN]) + (" …" if len(keys) > MOST_SHOWN else "")


def _unread(c: Config, inert: set[str]) -> Iterator[str]:
    """Keys that are set to something, that nothing asked for and that are not inert; those inside a mapping behind its own."""
    for key, value in c.file.items():
        if key not in c.read and key not in inert:
            yield from _leaves(key, value, set())
        elif key in c.inside and isinstance(value, dict):
            yield from (name for k, v in value.items() if k not in c.inside[key] for name in _leaves(f"{key}.{k}", v, inert))


def _leaves(key: str, value: Any, inert: set[str]) -> Iterator[str]:
    """`linear_attn_config.use_full_rank_gate` and its like; a key that is off, empty or zero says nothing."""
    if isinstance(value, dict) and value:
        for inner, v in value.items():
            yield from _leaves(f"{key}.{inner}", v, inert)
    elif value not in (None, False, 0, "", [], {}) and key.rpartition(".")[2] not in inert:
        yield key


def _tells_nothing(key: str) -> bool:
    return bool(_SILENT.search(key) or SIGHT.search(key) or OTHER_PARTS.search(key))


def _declared(named: Named) -> Iterator[str]:
    """Keys that transformers' config class of this type has: its entry here was compared with the class's own models."""
    own = facts().get(named.name, {}) if named.known else {}
    yield from _STANDARD if named.known else ()
    for table in ("defaults", "aliases"):
        yield from own.get(table, {})
    yield from own.get("aliases", {}).values()
    yield from own.get("more", ())


def _switched_off(c: Config) -> Iterator[str]:
    for switch, keys in _SWITCHES.items():
        if c.file.get(switch, c.defaults.get(switch)) is False:
            yield from keys
    if c.file.get("sliding_window") is None:
        yield "max_window_layers"


def _respelled(c: Config) -> Iterator[str]:
    """Other spellings of a key that was read, where they say the same."""
    for key, names in c.aliases.items():
        values = [c.file[name] for name in (key, *names) if name in c.read and name in c.file]
        yield from (name for name in (key, *names) if c.file.get(name) in values)


def _general(c: Config, model_type: str, unread: list[str]) -> list[str]:
    """What to say of a type that is not known. Raises UserError where general rules would be a guess."""
    shown = printable(model_type or "none", 60)
    check_settled(c, shown, unread, _tells_nothing)
    assumed = [f"{key} as {word}" for key, word in _ASSUMED.items() if not c.in_file(key)]
    text = f"parameters are ≈: model_type {shown!r} is not known: read by the general rules for decoders"
    return [text + (f", taking {', '.join(assumed)}" if assumed else "")]


_ASSUMED = {"num_key_value_heads": "one per head", "head_dim": "hidden_size / heads", "tie_word_embeddings": "false"}
