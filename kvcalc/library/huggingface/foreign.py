"""Files that hold a model's sizes and are no config that is read here: told by their keys, and refused by what they are.

Sources: Meta's llama (`llama/model.py`, ModelArgs), mistral-inference (`src/mistral_inference/args.py`), DeepSeek-V3
(`inference/model.py`, ModelArgs), flash-linear-attention (`fla/models/*/configuration_*.py`).
"""

from collections.abc import Mapping
from typing import Any

from kvcalc.errors import UserError, printable

_TYPED = ("model_type", "architectures", "ssm_cfg")
_SIZED = {"dim", "n_layers"}
# Keys that one of these files alone has beside _SIZED, what the file is, and a word that finds presets of its kind.
_OWN = (
    (("inter_dim", "n_dense_layers"), "a config of DeepSeek's own inference code", "deepseek"),
    (("multiple_of", "ffn_dim_multiplier"), "the params.json of a Llama checkpoint as Meta released it", "llama"),
    (("hidden_dim",), "the params.json of a checkpoint in Mistral's own form", "mistral"),
)
_NAMES = (
    "abc comba delta_net deltaformer forgetting_transformer gated_deltanet gated_deltaproduct gla gsa hgrn hgrn2 kda lightnet "
    "linear_attn log_linear_mamba2 mesa_net moba mom nsa path_attn retnet rodimus rwkv6 samba"
)
_FLA = frozenset(_NAMES.split())
_FLA_KEYS = ("expand_k", "expand_v", "hidden_ratio")  # of its layers' keys and values, and of an FFN without a size
# The type of layer here that a type's layers are, or are most like.
_NEAREST = {"gated_deltanet": "gated_delta_net", "delta_net": "gated_delta_net", "kda": "kda", "retnet": "lightning"}


def check(data: Mapping[str, Any], where: str) -> None:
    """Raises UserError on a file of sizes in another program's own form."""
    if any(data.get(key) for key in _TYPED) or not data.keys() >= _SIZED:
        return
    for keys, what, word in _OWN:
        if any(key in data for key in keys):
            hint = f"Read is the config.json of the same weights as transformers has them, or a preset (`kvcalc models {word}`)"
            raise UserError(f"is {what}, not a config.json", where, hint)


def check_unknown(name: str, inner: Mapping[str, Any], where: str) -> None:
    """Raises UserError on a type without an entry whose layers are flash-linear-attention's, which no general rule counts.

    Its plain `transformer` is read by them where it gives the FFN's size.
    """
    sized = name == "transformer" and inner.get("intermediate_size")
    if sized or not (name in _FLA or any(key in inner for key in _FLA_KEYS)):
        return
    kinds = _NEAREST.get(name, "mamba2, gated_delta_net, kda, lightning and rwkv7, none of them its own,")
    hint = f"Layers of type {kinds} can stand in a model file of your own (docs/presets.md)"
    if name == "transformer":
        hint = "Its plain transformer is read where the file gives intermediate_size"
    said = f"model_type {printable(name, 60)!r} is one" if name else "its keys are those"
    raise UserError(f"{said} of flash-linear-attention's, which are not read", where, hint)
