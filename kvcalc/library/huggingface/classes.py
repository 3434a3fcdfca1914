"""Choose the model type of a file by the class in `architectures`, before its `model_type`.

The class that wrote a checkpoint determines the layout of its weights. A class belongs to a type
if they share a name, with any head (`Qwen3MoeForCausalLM`: qwen3_moe). A class of another type is
read as that type. A draft head is read as a draft or refused. An unknown class is read by the
rules of its type, and the result is marked as uncertain. Sources of names: transformers' auto
mappings (models/auto/modeling_auto.py), vLLM's registry (model_executor/models/registry.py),
SGLang's (srt/models), and the released configs of types with remote code.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from kvcalc.errors import UserError, nearest, printable
from kvcalc.library.huggingface.config import show
from kvcalc.library.huggingface.source import facts
from kvcalc.library.huggingface.types import TYPES

_HEAD = re.compile(
    r"(?:For(?!CausalLM\w)[A-Z]\w*|CausalLM|(?:With)?LMHead\w*|Model(?:WithLMHead)?|ModelLM|(?:Text|Chat|MT)Model|Decoder|Encoder)$"
)
_PART = re.compile(r"(?:text|text_model|_model|_decoder|_thinker|_mm_model|_chat|_generation)$")
_SPEAKS = re.compile(r"(?:LM|LMHeadModel|LMHead|ForConditionalGeneration|ForPreTraining|MTModel|Decoder)$")
_OTHER_HEAD = re.compile(r"For(?:Sequence|Token)Classification|QuestionAnswering|MultipleChoice|MaskedLM|Reward")
_DRAFT = re.compile(
    r"Eagle(?!\d?_?\d?_?(?:VL|Chat))|Draft|DFlash|DSpark|Domino|Medusa|Hydra|NextN|MTP|Specul|Assistant|XPress|LiLiCorr|LookAhead",
    re.IGNORECASE,
)
# Types with remote code and older names, with the type here that reads them exactly.
SAME_AS = {
    "kimi_k2": "deepseek_v3",
    "joyai_llm_flash": "deepseek_v3",
    "deepseek_ref": "deepseek_v4",
    "minimax_text_01": "minimax",
    "minimax_m1": "minimax",
    "minimax_m3": "minimax_m3_vl_text",
    "mixtral_moe": "mixtral",
    "Yi": "llama",
    "youtu_llm": "youtu",
    "qwen3_asr_text": "qwen3",
    "dots_ocr": "qwen2",
    "phi3_v": "phi3",
    "phi4mm": "phi3",
    "Keye": "qwen3",
    "KeyeVL1_5": "qwen3",
    "deepseek_vl_v2": "deepseek_v2",
    "mimo_v2": "mimo_v2_flash",
    "llava_llama": "llama",
    "llava_mistral": "mistral",
    "llava_qwen": "qwen2",
    "llava_qwen2": "qwen2",
    "videollama3_qwen2": "qwen2",
    "mineru2_qwen": "qwen2",
    "kimi_k3": "kimi_linear",
    "RefinedWebModel": "falcon",
    "RefinedWeb": "falcon",
    "mixformer-sequential": "phi-msft",
}  # fmt: skip
# Names that do not follow from the type's, by the class without its head and in small letters; and what is a type's own too.
_CLASSES = {
    "hunyuandensev1": "hunyuan_v1_dense",
    "hunyuanmoev1": "hunyuan_v1_moe",
    "rw": "falcon",
    "minimaxm3sparse": "minimax_m3_vl_text",
    "minimaxm3": "minimax_m3_vl_text",
    "grok1": "grok",
    "grok1model": "grok",
    "stablelmepoch": "stablelm_epoch",
    "bailingmoev25": "bailing_moe_v2_5",
    "bailingmoev3": "bailing_hybrid",
    "kimik3linear": "kimi_linear",
    "llavallama": "llama",
    "llavamistral": "mistral",
    "llavaqwen": "qwen2",
    "decilm": "nemotron-nas",
    "phi3v": "phi3",
    "dotsocr": "qwen2",
    "deepseekocr": "deepseek_v2",
    "mimov2": "mimo_v2_flash",
    "llava": "llama",
}  # fmt: skip
_ALSO = {
    ("gpt2", "gpt-sw3"), ("phi", "phi-msft"), ("llama", "internlm3"), ("llama", "iquestcoder"), ("olmo", "hf_olmo"),
    ("decilm", "deci"),
}  # fmt: skip
# EAGLE-3 as its authors released it, under the class of an ordinary decoder.
_WITH_HEADS = {"llama": "eagle3", "qwen3": "eagle3_qwen3"}
_NOT_CACHED = "no inference server caches it"
_REFUSED = dict.fromkeys(
    ("biogpt", "cpmant", "ctrl", "prophetnet", "reformer", "rwkv", "transfo-xl", "xlm", "xlnet", "xlstm"), _NOT_CACHED
) | {"blt": "three stacks of different widths, of which one runs once a patch, and how long a patch is hangs on the text"}


class Named(NamedTuple):
    """A type by name, whether it has an entry, a note on the choice, and whether it is doubtful."""

    name: str
    known: bool
    notes: tuple[str, ...] = ()
    exact: bool = True


def resolve(outer: Mapping[str, Any], inner: Mapping[str, Any], where: str) -> Named:
    """Return the type that reads the text part of a file.

    Raises:
        UserError: The type is known and is not supported here.
    """
    found = inner.get("model_type", outer.get("model_type"))
    if found is not None and not isinstance(found, str):
        raise UserError(f"model_type: should be a text, not {show(found)}", where)
    around = outer.get("model_type")
    if isinstance(around, str) and around.endswith("_assistant") and around in facts():
        raise UserError(f"model_type {around!r} is not supported: it drafts on the cache of another model", where)
    for part in (outer, inner):
        if _DRAFT.search(_class(part, where)):
            return _draft(_class(part, where), inner is outer, where)
    written = _class(inner, where)
    if inner is outer and inner.get("draft_vocab_size") and found in _WITH_HEADS:
        return Named(_WITH_HEADS[found], True, (f"a draft, for it has a draft_vocab_size: {_lent()}",))
    name = _type(found or "")
    if not written or _own(written, found or "") or _own(written, name):
        return _without_encoder(_bare(_known(name, where), written if inner is outer else ""), inner, written)
    if other := by_class(written):
        _known(other, where)
        said = f"model_type {printable(found, 60)!r} is not its own" if found else "the file gives no model_type"
        return Named(other, True, (f"read as {other}, after its class {printable(written, 60)}: {said}",))
    return _doubtful(_known(name, where), written)


def by_class(written: str) -> str:
    """Return the type that this class belongs to, or '' if it belongs to none."""
    stem = _stem(written)
    return _CLASSES.get(stem) or _types_by_stem().get(stem, "")


def _class(part: Mapping[str, Any], where: str) -> str:
    """Return the first of a part's `architectures`, or '' if it has none."""
    given = part.get("architectures") or ""
    first = given[0] if isinstance(given, list) else given
    if not isinstance(first, str):
        raise UserError(f"architectures: should be a list of class names, not {show(given)}", where)
    return first


def _stem(written: str) -> str:
    """Return a class name without its head, as lower-case letters and digits only.

    Example: `Qwen3_5MoeForCausalLM` → `qwen35moe`.
    """
    while (shorter := _HEAD.sub("", written)) not in ("", written):
        written = shorter
    return _plain(written)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@cache
def _stems(name: str) -> frozenset[str]:
    """Return the class stems of a type: its name, with and without the suffix of a text part."""
    return frozenset({_plain(name), _plain(_PART.sub("", name))})


@cache
def _types_by_stem() -> dict[str, str]:
    """Return all types read here, and the types around them, by class stem."""
    whole = {name: said["text"] for name, said in facts().items() if said.get("text") in TYPES}
    pairs = [(name, _type(name)) for name in (*TYPES, *SAME_AS, *_REFUSED)] + list(whole.items())
    return {stem: name for given, name in reversed(pairs) for stem in sorted(_stems(given))}


def _own(written: str, name: str) -> bool:
    stem = _stem(written)
    return bool(name) and (stem in _stems(name) or _CLASSES.get(stem) == name or (stem, name) in _ALSO)


def _type(found: str) -> str:
    """Return the type that reads a model_type: itself, an equivalent type, or its text part's type."""
    name = SAME_AS.get(found, found)
    return name if name in TYPES else str(facts().get(name, {}).get("text", name))


def _known(name: str, where: str) -> Named:
    if name in _REFUSED:
        raise UserError(f"model_type {name!r} is not supported: {_REFUSED[name]}", where)
    if name not in TYPES and (name in facts() or name in facts().get("*", {}).get("others", ())):
        raise UserError(f"model_type {name!r} is not supported", where, nearest(name, TYPES, 3))
    return Named(name, name in TYPES)


def _bare(named: Named, written: str) -> Named:
    """Return the reading of a class with no LM head or another head, as the causal language model."""
    silent = not _SPEAKS.search(written) if named.name in facts() else _OTHER_HEAD.search(written)
    if not written or not named.known or not silent:
        return named
    said = f"class {printable(written, 60)} has no language-model head: counted with one, as the causal model of its type"
    return named._replace(notes=(said,), exact=False)


def _without_encoder(named: Named, inner: Mapping[str, Any], written: str) -> Named:
    """Return the reading of an encoder-decoder model: its decoder, as the causal model of its type."""
    if not named.known or inner.get("is_encoder_decoder") is not True or written.endswith(("CausalLM", "Decoder")):
        return named
    said = "its decoder alone is counted, without the encoder and the cache of cross-attention"
    return named._replace(notes=(*named.notes, said), exact=named.exact and not written)


def _doubtful(named: Named, written: str) -> Named:
    """Return the reading of an unknown class by its type."""
    if not named.known:
        return named
    said = f"class {printable(written, 60)} is not one of {named.name}'s: counted as {named.name}, which may not be what it holds"
    return named._replace(notes=(said,), exact=False)


def _draft(written: str, flat: bool, where: str) -> Named:
    """Return the type of a draft.

    Raises:
        UserError: The weights of this draft are not known here.
    """
    from kvcalc.library.huggingface.types.drafts import DRAFTS

    name = DRAFTS.get(written, "")
    if not name or not flat:
        raise UserError(
            f"class {printable(written, 60)} is a draft that is not read",
            where,
            "Read are EAGLE, EAGLE-3, P-EAGLE, DFlash, DSpark and Domino; `--draft layers=N` stands in for another",
        )
    return Named(name, True, (f"a draft ({printable(written, 60)}): {_lent()}",))


def _lent() -> str:
    from kvcalc.library.huggingface.types.drafts import LENT

    return LENT
