"""Choose the model type of a file by the class in `architectures`, before its `model_type`.

The class that wrote a checkpoint determines the layout of its weights. A class belongs to a type if
they share a name, with any head (`Qwen3MoeForCausalLM`: qwen3_moe). If the class belongs to another
type than `model_type`, the class decides. A draft head is read as a draft or refused. An unknown
class is read by the rules of its type, and the result is marked as uncertain. Sources of names:
transformers' auto mappings (models/auto/modeling_auto.py), vLLM's registry
(model_executor/models/registry.py), SGLang's (srt/models), and the released configs of types with
remote code.
"""

import re
from functools import cache
from typing import NamedTuple

from kvcalc.errors import UserError, nearest, printable
from kvcalc.library.huggingface.config import facts, show
from kvcalc.library.huggingface.types.model_type import entry_texts, read_type, type_names
from kvcalc.records import JsonObject
from kvcalc.storage.formats import first_words

_HEAD = re.compile(
    r"(?:For(?!CausalLM\w)[A-Z]\w*|CausalLM|(?:With)?LMHead\w*|Model(?:WithLMHead)?|ModelLM|"
    r"(?:Text|Chat|MT)Model|Decoder|Encoder)$"
)
_PART = re.compile(r"(?:text|text_model|_model|_decoder|_thinker|_mm_model|_chat|_generation)$")
_SPEECH_CLASS = re.compile(
    r"(?:LM|LMHeadModel|LMHead|ForConditionalGeneration|ForPreTraining|MTModel|Decoder)$"
)
_OTHER_HEAD = re.compile(
    r"For(?:Sequence|Token)Classification|QuestionAnswering|MultipleChoice|MaskedLM|Reward"
)
# Classes that vLLM serves as pooling models (model_executor/models/registry.py).
_POOLING_CLASS = re.compile(r"(?:Model|ForSequenceClassification|ForMaskedLM)$")
_DRAFT = re.compile(
    r"Eagle(?!\d?_?\d?_?(?:VL|Chat))|Draft|DFlash|DSpark|Domino|Medusa|Hydra|NextN|MTP|Specul|"
    r"Assistant|XPress|LiLiCorr|LookAhead",
    re.IGNORECASE,
)
# A type here, and types with remote code or older names that it reads exactly.
TYPES_BY_ALIAS = first_words("""
    deepseek_v3 kimi_k2 joyai_llm_flash
    deepseek_v4 deepseek_ref
    minimax minimax_text_01 minimax_m1
    minimax_m3_vl_text minimax_m3
    mixtral mixtral_moe
    llama Yi llava_llama
    youtu youtu_llm
    qwen3 qwen3_asr_text Keye KeyeVL1_5
    qwen2 dots_ocr llava_qwen llava_qwen2 videollama3_qwen2 mineru2_qwen
    phi3 phi3_v phi4mm
    deepseek_v2 deepseek_vl_v2
    mimo_v2_flash mimo_v2
    mistral llava_mistral
    kimi_linear kimi_k3
    falcon RefinedWebModel RefinedWeb
    phi-msft mixformer-sequential
""")
# A type, and its classes with another name: without their heads, in lower case.
_CLASSES = first_words("""
    hunyuan_v1_dense hunyuandensev1
    hunyuan_v1_moe hunyuanmoev1
    falcon rw
    minimax_m3_vl_text minimaxm3sparse minimaxm3
    grok grok1 grok1model
    stablelm_epoch stablelmepoch
    bailing_moe_v2_5 bailingmoev25
    bailing_hybrid bailingmoev3
    kimi_linear kimik3linear
    llama llavallama llava
    mistral llavamistral
    qwen2 llavaqwen dotsocr
    nemotron-nas decilm
    phi3 phi3v
    deepseek_v2 deepseekocr
    mimo_v2_flash mimov2
""")
_DRAFT_NOTE = (
    "only its own weights are counted, without the embedding or head that its target shares"
)
# A type of draft, and its classes.
_DRAFT_CLASSES = first_words("""
    eagle LlamaForCausalLMEagle EagleLlamaForCausalLM
    eagle3 LlamaForCausalLMEagle3 Eagle3LlamaForCausalLM Eagle3MiniMaxM2ForCausalLM
    eagle3 Eagle3Qwen2_5vlForCausalLM Eagle3Qwen3vlForCausalLM
    eagle3_qwen3 Eagle3Qwen3ForCausalLM
    peagle PEagleDraftModel PeagleLlamaForCausalLM
    peagle_qwen3 PeagleQwen3ForCausalLM
    dflash DFlashDraftModel
    dspark DSparkDraftModel Qwen3DSparkModel
    domino DominoDraftModel
""")
# Classes, without their heads, that belong to a second type.
_SECOND_TYPES = "decilm:deci gpt2:gpt-sw3 llama:internlm3 llama:iquestcoder phi:phi-msft"
# EAGLE-3 as its authors released it, under the class of an ordinary decoder.
_WITH_HEADS = {"llama": "eagle3", "qwen3": "eagle3_qwen3"}
_RARELY_SERVED = """
    afm7 baichuan_m1 biogpt blt cpmant ctrl doge gpt_neox_japanese hf_olmo iquestloopcoder
    lille-130m longcat_flash_ngram nanbeige openelm prophetnet reformer roc_bert rwkv
    transfo-xl xlm xlnet xlstm xmod
"""
# Types of flash-linear-attention.
_FLA_NAMES = """
    abc comba delta_net deltaformer forgetting_transformer gated_deltanet gated_deltaproduct gla
    gsa hgrn hgrn2 kda lightnet linear_attn log_linear_mamba2 mesa_net moba mom nsa path_attn
    retnet rodimus rwkv6 samba
"""
_REFUSED = frozenset(_RARELY_SERVED.split() + _FLA_NAMES.split())


class ModelType(NamedTuple):
    """The model type that reads a config.json, and how it was chosen.

    Attributes:
        name: Name of the type, such as `llama`.
        has_entry: Whether the table of model types has an entry for it. If not, general rules for
            decoders read the file.
        notes: Sentences for the user about the choice.
        exact: False if the computed parameter count or cache size may be wrong.
        pooling: Name of the model's class if it embeds or ranks whole sequences and has no LM head;
            '' for a model that generates tokens.
    """

    name: str
    has_entry: bool
    notes: tuple[str, ...] = ()
    exact: bool = True
    pooling: str = ""


def resolve(outer: JsonObject, inner: JsonObject, file_name: str) -> ModelType:
    """Return the model type whose rules read the text part of a config.json.

    The class in `architectures` decides before the key `model_type`. A type that neither kvcalc nor
    transformers knows is returned with `has_entry` False; general rules then read the file.

    Args:
        outer: The content of the whole config.json.
        inner: The text part of this content, or the whole content if it has none.
        file_name: Name of the file in error messages.

    Raises:
        UserError: transformers has the type but kvcalc does not support it, or the file is a draft
            model whose weights kvcalc does not know.
    """
    model_type = inner.get("model_type", outer.get("model_type"))
    if model_type is not None and not isinstance(model_type, str):
        raise UserError(
            f"model_type: should be a text, not {show(model_type)}", where=file_name
        )
    outer_type = str(outer.get("model_type"))
    if outer_type.endswith("_assistant") and outer_type in facts():
        text = "is not supported: it drafts on the cache of another model"
        raise UserError(f"model_type {outer_type!r} {text}", where=file_name)
    for part in (outer, inner):
        if _DRAFT.search(_class(part, file_name)):
            return _draft(_class(part, file_name), inner is outer, file_name)

    class_name = _class(inner, file_name)
    if inner is outer and inner.get("draft_vocab_size") and model_type in _WITH_HEADS:
        note = f"a draft, for it has a draft_vocab_size: {_DRAFT_NOTE}"
        return ModelType(_WITH_HEADS[model_type], True, (note,))
    name = _type(model_type or "")
    if (
        not class_name
        or _is_class_of(model_type or "", class_name)
        or _is_class_of(name, class_name)
    ):
        resolved = _with_head(_supported(name, file_name), class_name if inner is outer else "")
        return _without_encoder(resolved, inner, class_name)
    stem = _stem(class_name)
    if other := _CLASSES.get(stem) or _types_by_stem().get(stem):
        _supported(other, file_name)
        reason = "the file gives no model_type"
        if model_type:
            reason = f"model_type {printable(model_type, 60)!r} is not its own"
        note = f"read as {other}, after its class {printable(class_name, 60)}: {reason}"
        return ModelType(other, True, (note,))
    resolved = _supported(name, file_name)
    if not resolved.has_entry:
        return resolved
    note = (
        f"class {printable(class_name, 60)} is not one of {name}'s: counted as {name}, which may "
        "be wrong"
    )
    return resolved._replace(notes=(note,), exact=False)


def _class(part: JsonObject, file_name: str) -> str:
    """Return the first of a part's `architectures`, or '' if it has none."""
    names = part.get("architectures") or ""
    first = names[0] if isinstance(names, list) else names
    if not isinstance(first, str):
        raise UserError(
            f"architectures: should be a list of class names, not {show(names)}",
            where=file_name,
        )
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
    """Return the stems of the classes of a type: its name with and without a suffix such as
    `_text`."""
    return frozenset({_plain(name), _plain(_PART.sub("", name))})


@cache
def _types_by_stem() -> dict[str, str]:
    """Return all supported types, and the multimodal types that contain them, by class stem."""
    types = {name: _type(name) for name in (*type_names(), *TYPES_BY_ALIAS, *_REFUSED)}
    for name, known_facts in facts().items():
        if known_facts.get("text") in entry_texts():
            types.setdefault(name, known_facts["text"])
    return {stem: types[name] for name in reversed(types) for stem in sorted(_stems(name))}


def _is_class_of(name: str, class_name: str) -> bool:
    """Return whether a class belongs to a type, by their names."""
    stem = _stem(class_name)
    is_listed = _CLASSES.get(stem) == name or f"{stem}:{name}" in _SECOND_TYPES.split()
    return bool(name) and (is_listed or stem in _stems(name))


def _type(model_type: str) -> str:
    """Return the type whose rules read a model_type: the type itself, an equivalent type, or the
    type of its text part."""
    name = TYPES_BY_ALIAS.get(model_type, model_type)
    return name if name in entry_texts() else str(facts().get(name, {}).get("text", name))


def _supported(name: str, file_name: str) -> ModelType:
    """Return the type with this name. Raises UserError if transformers knows the type but kvcalc
    has no entry."""
    if name in _REFUSED:
        raise UserError(
            f"model_type {name!r} is not supported: it is rarely served", where=file_name
        )
    is_known = name in facts() or name in facts().get("*", {}).get("others", ())
    if is_known and name not in entry_texts():
        hint = nearest(name, type_names(), 3)
        raise UserError(f"model_type {name!r} is not supported", hint, file_name)
    return ModelType(name, name in entry_texts())


def _with_head(resolved: ModelType, class_name: str) -> ModelType:
    """Return the type for a class without an LM head: an embedder, a reranker, or otherwise the
    causal model."""
    if not class_name or not resolved.has_entry:
        return resolved
    is_known = resolved.name in facts() or read_type(resolved.name).is_encoder
    lacks_head = (
        not _SPEECH_CLASS.search(class_name) if is_known else _OTHER_HEAD.search(class_name)
    )
    if not lacks_head:
        return resolved
    if _POOLING_CLASS.search(class_name):
        note = f"class {printable(class_name, 60)} has no LM head: an embedder or reranker"
        return resolved._replace(notes=(note,), pooling=class_name)
    note = (
        f"class {printable(class_name, 60)} has no language-model head: counted with one, as "
        "the causal model of its type"
    )
    return resolved._replace(notes=(note,), exact=False)


def _without_encoder(resolved: ModelType, inner: JsonObject, class_name: str) -> ModelType:
    """Return the type for an encoder-decoder model, whose decoder is read as a causal model."""
    has_encoder = inner.get("is_encoder_decoder") is True
    if not (resolved.has_entry and has_encoder) or class_name.endswith(("CausalLM", "Decoder")):
        return resolved
    note = "only its decoder is counted, without the encoder and the cache of cross-attention"
    exact = resolved.exact and not class_name
    return resolved._replace(notes=(*resolved.notes, note), exact=exact)


def _draft(written: str, flat: bool, file_name: str) -> ModelType:
    """Return the type of a draft.

    Raises:
        UserError: kvcalc does not know the weights of this draft.
    """
    name = _DRAFT_CLASSES.get(written, "")
    if not name or not flat:
        raise UserError(
            f"class {printable(written, 60)} is a draft that is not read",
            "Read are EAGLE, EAGLE-3, P-EAGLE, DFlash, DSpark and Domino; `--draft layers=N` "
            "replaces another",
            file_name,
        )
    return ModelType(name, True, (f"a draft ({printable(written, 60)}): {_DRAFT_NOTE}",))
