"""Whether the language model in a larger file has a head of its own, where the file and its text part differ on it.

transformers 4 asks the text part, or else that part's class (4.57's `PreTrainedModel.tie_weights`, by `get_text_config`);
transformers 5 asks the whole file, or else its class (5.23's `get_expanded_tied_weights_keys`), and some of its classes tie
where either says so. A file that either wrote, and that says nothing where the other looks, was saved as its own has it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvcalc.library.huggingface.source import TEXT_KEYS, facts
from kvcalc.library.huggingface.types.entry import Type

KEY = "tie_word_embeddings"
# Types of larger files that transformers 4 has. Idefics and SmolVLM are not among them: by release, they asked either.
_NAMES = (
    "aria aya_vision cohere2_vision deepseek_vl deepseek_vl_hybrid emu3 fuyu gemma3 gemma3n got_ocr2 "
    "granite_speech internvl janus lfm2_vl llama4 llava llava_next llava_next_video llava_onevision mistral3 ovis2 "
    "paligemma perception_lm qwen2_5_vl qwen2_audio qwen2_vl video_llava vipllava voxtral"
)
_FOUR = frozenset(_NAMES.split())


class Tie(NamedTuple):
    """Whether the head is tied, None where the usual reading holds; and what to say where that is in doubt."""

    tied: bool | None = None
    doubt: str = ""


def settle(data: Mapping[str, Any], inner: Mapping[str, Any], name: str, entry: Type) -> Tie:
    """What holds of the head of a file's text part, which is read as the type of that name, with that entry.

    An entry that asks the whole file itself keeps its value; one that is always or never tied is in no doubt.
    """
    around = data.get("model_type") if data is not inner else None
    whole = facts().get(around, {}) if isinstance(around, str) else {}
    ruled, either = entry.model.get(KEY), whole.get("either", False)
    if "tied" not in whole or isinstance(ruled, bool):
        return Tie()
    outer, part = data.get(KEY), inner.get(KEY) if _inside(data) else None
    own = None if ruled and not either else facts().get(name, {}).get("defaults", {}).get(KEY)
    older = own if part is None else part
    newer = whole["tied"] if outer is None else outer
    newer = newer or (either and older is True)
    if not isinstance(older, bool) or not isinstance(newer, bool):
        return Tie()
    major = _major(data)
    if older == newer or (outer is None and not ruled and around in _FOUR and major == 4):
        return Tie(older)
    if part is None and outer is not None and major == 5:
        return Tie(newer)
    tied = newer if part is None else older
    return Tie(None if ruled else tied, _doubt(outer, part))


def _inside(data: Mapping[str, Any]) -> bool:
    """Whether the text part gives the key itself."""
    parts = [data[key] for key in TEXT_KEYS if isinstance(data.get(key), dict)]
    return any(KEY in part or _inside(part) for part in parts)


def _major(data: Mapping[str, Any]) -> int:
    """The major version of transformers that wrote a file; 0 where it does not say."""
    major = str(data.get("transformers_version")).partition(".")[0]
    return int(major) if major in ("4", "5") else 0


def _doubt(outer: object, part: object) -> str:
    """What a file says, and who goes by which of it."""
    whole, text = (str(value).lower() if isinstance(value, bool) else "not given" for value in (outer, part))
    return (
        f"parameters are ≈: {KEY} is {whole} in the file and {text} in its text part: transformers 5 goes by the file and its "
        "class, 4 by the part and its own"
    )
