"""Load models by name, and translate the names of checkpoints into a model and its storage format.
`Qwen/Qwen3-14B-AWQ` is the preset qwen3-14b in awq. `llama-3.1-8b-q4_k_m.gguf` is the preset
llama-3.1-8b in the format of that file type.
"""

import re
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

from kvcalc.errors import UserError, nearest
from kvcalc.library import presets
from kvcalc.library.load import (
    hub_name,
    is_hub_name,
    load_model,
    locate,
    published,
    read_preset,
)
from kvcalc.model.model import Model
from kvcalc.storage.formats import canonical, first_words
from kvcalc.storage.ggml import mix_of
from kvcalc.storage.quantization import find_format


def load_named(name: str, changes: list[str] | None = None) -> Model:
    """Return the model that a name means: a preset, a file, or a model on the Hugging Face Hub.

    It works as `load_model`, except for two errors. If a file is missing or the Hub does not
    provide the model, the message suggests the equivalent preset, else presets with similar names.
    A name without a preset may have endings such as `-instruct` or `-q4_k_m`.

    Args:
        name: Name of a preset, path of a file or folder, or a name such as `org/name`.
        changes: The `KEY=VALUE` changes of `--set`; None for none. Only changes that settle unclear
            keys in a config.json of an unknown type are applied, and removed from this list.

    Raises:
        UserError: Nothing has this name, or a file or change is invalid. `read_as` has the
            equivalent preset of a name that is not a file's.
    """
    try:
        return load_model(name, changes)
    except UserError as error:
        if not re.search(" Hub|no such file|unknown model", error.what):
            raise
        stem = re.sub(r"\.(json|ya?ml)$", "", hub_name(name))
        start = error.hint + "." * (error.hint[-1:] not in "?")
        same = known_checkpoint(stem)
        if same and "/" not in same.name:
            options = f" with --dtype {same.dtype}" * bool(same.dtype)
            if same.quantization:
                options = f" with --quantization {same.quantization}"
            hint = f"It is the preset {same.name}{options}"
            if "unknown" not in error.what:
                source = "network" if " Hub" in error.what else "file"
                hint = f"{start} The preset {same.name}{options} needs no {source}"
            elif not options:
                return load_model(same.name, changes)
        else:
            similar_names = presets.similar_models(stem, presets.preset_files("models"))
            near = nearest(stem.rpartition("/")[2], similar_names, 3)
            hint = f"{start} {near}" if near and " Hub" in error.what else error.hint or near
            same = None
        failure = UserError(error.what, hint.strip(), error.where)
        if same and "no such file" not in error.what:
            failure.read_as = name, same
        raise failure from None


# A weight format, and the endings of names that imply it; then endings that imply no format.
_ENDINGS = first_words("""
    nf4                      unsloth-bnb-4bit bnb-4bit
    awq                      awq-4bit awq-int4 awq
    gptq                     gptq-int4 gptq-4bit gptq
    int4                     int4-autoround autoround quantized.w4a16 w4a16 int4
    int8                     int8
    fp8                      fp8-static-pertensor fp8
    nvfp4                    nvfp4 fp4
    mxfp4                    mxfp4
    int8_scale16             quantized.w8a8 w8a8
    fp8_per_channel_scale16  fp8-dynamic
    fp8_block128_scale16     fp8-block
    nvfp4_weight_only        nvfp4a16
    mxfp4_weight_only        mxfp4a16
""")
_PLAIN_ENDINGS = "gguf instruct it chat hf base preview latest thinking-2507"
_ENDINGS |= dict.fromkeys(_PLAIN_ENDINGS.split(), "")
_ENDING = re.compile(rf"(.*?)[-_.]({'|'.join(map(re.escape, _ENDINGS))})", re.IGNORECASE)
_DATE = re.compile(r"[-_.](\d{4}|\d{6}|\d{8})$")
# Publishers whose "FP8" does not have one scale per matrix.
# Source: their model cards and configs (quantization_config).
_FP8_OF = first_words("""
    fp8_block128_scale16  qwen
    fp8_block128          deepseek-ai unsloth
    fp8_per_channel       meta-llama
""")


class Checkpoint(NamedTuple):
    """A model and the storage formats that the name of a checkpoint implies.

    Attributes:
        name: The model, as `load_model` accepts it.
        dtype: dtype of the weights; '' means as published.
        quantization: Weight format such as `awq`; '' means as published.
        remark: Sentence for the user about how the name was read; '' for none.
    """

    name: str
    dtype: str = ""
    quantization: str = ""
    remark: str = ""


@lru_cache(64)
def checkpoint(name: str) -> Checkpoint:
    """Return the model and the storage formats that the name of a checkpoint implies.

    No weights are read. Example: `Qwen/Qwen3-14B-AWQ` is the preset qwen3-14b in the weight format
    awq. A name `org/name` without a matching preset is the result unchanged, without formats.

    Args:
        name: An existing file or folder, a preset, a preset's name on the Hub, or an unknown name
            on the Hub. Names of presets may have an ending for the storage format, such as `-AWQ`.

    Raises:
        UserError: The name is none of these. The message names near matches.
    """
    plain = name.strip().removeprefix("hf:")
    if _readable(plain) or plain.lower().endswith((".yaml", ".yml", ".json")):
        return Checkpoint(plain)
    if result := published().get(plain.lower()):
        return Checkpoint(result)
    org, _, base = plain.rstrip("/").rpartition("/")
    derived = _derived(org.rpartition("/")[2].lower(), base.partition("@")[0])
    if derived and presets.key(derived.name) != presets.key(base):
        stored = derived.quantization or derived.dtype
        format_ = f" in {stored}" if stored else ""
        return derived._replace(remark=f"{plain} read as {derived.name}{format_}")
    if derived:
        return derived
    if is_hub_name(plain):
        return Checkpoint(plain)
    return Checkpoint(presets.find(base or plain, "models").stem)  # raises UserError


def known_checkpoint(name: str) -> Checkpoint | None:
    """Return the model and storage formats that a name implies, or None instead of an error.

    The result is None if the name is empty, or if nothing has this name. Example:
    `Qwen/Qwen3-14B-AWQ` is the preset qwen3-14b in the weight format awq.

    Args:
        name: Name of a preset or checkpoint, or a path.
    """
    try:
        return checkpoint(name) if name else None
    except UserError:
        return None


def _readable(name: str) -> bool:
    """Return whether the name is a readable model: a file, or a folder with a config.json."""
    try:
        path = locate(name, "models").path
    except UserError:
        return False
    return path.is_file() or (path / "config.json").is_file()


def _derived(org: str, base: str) -> Checkpoint | None:
    """Return the preset whose name remains after the format endings are removed, with the formats
    of the endings."""
    stem = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", base, flags=re.IGNORECASE)
    stem = stem.replace(":", "-")
    dtype = format_ = ""
    for _ in range(8):
        with suppress(UserError):
            model = read_preset(presets.find(stem, "models"), stem)
            if format_ == "fp8":
                publisher = org or (model.huggingface_id or "").lower().partition("/")[0]
                format_ = _FP8_OF.get(publisher, format_)
            return Checkpoint(model.name, dtype, format_)
        shorter, stated, stated_dtype = _shortened(stem)
        if shorter == stem:
            return None
        stem, format_, dtype = shorter, format_ or stated, dtype or stated_dtype
    return None


def _shortened(name: str) -> tuple[str, str, str]:
    """Return a name without its last ending, and the weight format and dtype of that ending.

    A name without a known ending is returned unchanged.
    """
    if match := _ENDING.fullmatch(name):
        return match[1], _ENDINGS[match[2].lower()], ""
    if match := _DATE.search(name):
        return name[: match.start()], "", ""
    for mark in ("-", "."):
        head, _, tail = name.lower().rpartition(mark)
        dtype = canonical(tail)
        if head and dtype in ("bf16", "fp16", "fp32"):
            return name[: len(head)], "", dtype
        if head and (mix_of(tail) or find_format(dtype)):
            return name[: len(head)], tail, ""
    return name, "", ""
