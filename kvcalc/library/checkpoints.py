"""Names of checkpoints, as engines are given them, to a model and the storage that the name tells of: no network is asked.

`Qwen/Qwen3-14B-AWQ` is the preset qwen3-14b in awq; `llama-3.1-8b-q4_k_m.gguf` llama-3.1-8b as that file type has it.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from kvcalc.errors import UserError
from kvcalc.library import catalog
from kvcalc.library.load import is_hub_name, load_model, locate
from kvcalc.model.spec import Model
from kvcalc.storage.gguf import mix_of
from kvcalc.storage.quantization import load_weight_format

_ID = re.compile(r"^huggingface_id:\s*['\"]?([^\s'\"#]+)", re.MULTILINE)
# Endings of names, longest first: what each says of the weights; '' says nothing of them.
_ENDINGS: dict[str, str] = {
    "unsloth-bnb-4bit": "nf4", "bnb-4bit": "nf4", "awq-4bit": "awq", "awq-int4": "awq", "gptq-int4": "gptq", "gptq-4bit": "gptq",
    "int4-autoround": "int4", "autoround": "int4", "awq": "awq", "gptq": "gptq", "quantized.w4a16": "int4", "w4a16": "int4",
    "quantized.w8a8": "int8_scale16", "w8a8": "int8_scale16", "fp8-dynamic": "fp8_per_channel_scale16",
    "fp8-block": "fp8_block128_scale16",
    "fp8-static-pertensor": "fp8", "fp8": "fp8", "nvfp4": "nvfp4", "fp4": "nvfp4", "nvfp4a16": "nvfp4_weight_only",
    "mxfp4": "mxfp4", "mxfp4a16": "mxfp4_weight_only", "int4": "int4",
    "int8": "int8", "gguf": "", "instruct": "", "it": "", "chat": "", "hf": "", "base": "", "preview": "", "latest": "",
    "thinking-2507": "", "gguf:latest": "",
}  # fmt: skip
_DATE = re.compile(r"[-_.](\d{4}|\d{6}|\d{8})$")
# Publishers whose "FP8" has other scales than one a matrix: their own model cards and configs (quantization_config).
_FP8_OF = {
    "qwen": "fp8_block128_scale16",
    "deepseek-ai": "fp8_block128",
    "unsloth": "fp8_block128",
    "meta-llama": "fp8_per_channel",
}
# Checkpoints that have a preset's layers under another name, by how the name begins.
_SAME_SHAPE = {
    "deepseek-r1-distill-qwen-1.5b": "qwen2.5-1.5b", "deepseek-r1-distill-qwen-7b": "qwen2.5-7b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b", "deepseek-r1-distill-qwen-32b": "qwen2.5-32b",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b", "deepseek-r1-distill-llama-70b": "llama-3.3-70b",
    "qwen2-0.5b": "qwen2.5-0.5b", "qwen2-1.5b": "qwen2.5-1.5b", "qwen2-7b": "qwen2.5-7b", "qwen2-72b": "qwen2.5-72b",
    "qwen2.5-coder-": "qwen2.5-", "qwen2.5-math-": "qwen2.5-", "meta-llama-": "llama-",
}  # fmt: skip
_WHOLE = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


class Checkpoint(NamedTuple):
    """A model as `load_model` takes it; the dtype and the weight format that the name tells of, '' as published; a remark."""

    name: str
    dtype: str = ""
    quantization: str = ""
    remark: str = ""

    def load(self, changes: list[str] | None = None) -> Model:
        return load_model(self.name, changes)


@lru_cache(64)
def checkpoint(name: str) -> Checkpoint:
    """What a checkpoint's name stands for: a file or folder that is there, a preset, its name on the Hub, one with an ending
    that tells of its storage, or a name on the Hub that nothing is known of.

    Raises UserError naming near matches where it is none of them.
    """
    plain = name.strip().removeprefix("hf:")
    if _readable(plain) or plain.lower().endswith((".yaml", ".yml", ".json")):
        return Checkpoint(plain)
    if found := published().get(plain.lower()):
        return Checkpoint(found)
    org, _, base = plain.rstrip("/").rpartition("/")
    known = _derived(org.rpartition("/")[2].lower(), base.partition("@")[0])
    if known:
        same = catalog.key(known.name) == catalog.key(base)
        return known if same else known._replace(remark=f"{plain} read as {_told(known)}")
    if is_hub_name(plain):
        return Checkpoint(plain)
    return Checkpoint(locate(base or plain, "models").path.stem)  # which raises, naming near matches


def _told(found: Checkpoint) -> str:
    return " in ".join(filter(None, (found.name, found.quantization or found.dtype)))


def _readable(name: str) -> bool:
    """Whether a model can be read there: a file, or a folder with a config.json."""
    try:
        path = locate(name, "models").path
    except UserError:
        return False
    return path.is_file() or (path / "config.json").is_file()


@lru_cache(1)
def published() -> dict[str, str]:
    """The preset of each name on the Hub, in lower case."""
    found: dict[str, str] = {}
    for stem, path in catalog.preset_files("models").items():
        if match := _ID.search(path.read_text(encoding="utf-8", errors="replace")):
            found.setdefault(match[1].lower(), stem)
    return found


def _derived(org: str, base: str) -> Checkpoint | None:
    """The preset that is left when endings are taken off one after the other, and what they told."""
    left = re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", base, flags=re.IGNORECASE)
    left = left.partition(":")[0] if ":" in left else left
    dtype = format_ = ""
    for _ in range(8):
        if preset := _preset(left):
            return Checkpoint(preset, dtype, format_)
        shorter, told, whole = _shortened(left)
        if shorter == left:
            return None
        if told == "fp8" and not format_:
            told = _FP8_OF.get(org, "fp8")
        left, format_, dtype = shorter, format_ or told, dtype or whole
    return None


def _shortened(name: str) -> tuple[str, str, str]:
    """A name without its last ending, the weight format and the dtype that this told of; the name itself if it has none."""
    low = name.lower()
    for ending, told in _ENDINGS.items():
        if low.endswith(ending) and low[-len(ending) - 1 : -len(ending)] in ("-", "_", "."):
            return name[: -len(ending) - 1], told, ""
    if match := _DATE.search(name):
        return name[: match.start()], "", ""
    for mark in ("-", "."):
        head, _, tail = low.rpartition(mark)
        if head and tail in _WHOLE:
            return name[: len(head)], "", _WHOLE[tail]
        if head and (mix_of(tail) or _format(tail)):
            return name[: len(head)], tail, ""
    return name, "", ""


def _format(name: str) -> bool:
    try:
        load_weight_format(name)
    except UserError:
        return False
    return True


def _preset(name: str) -> str:
    """The preset of that name or of the same shape; '' if there is none."""
    low = name.lower()
    shapes = [low]
    shapes += [preset + low[len(begin) :] for begin, preset in _SAME_SHAPE.items() if begin[-1] == "-" and low.startswith(begin)]
    shapes += [preset for begin, preset in _SAME_SHAPE.items() if low == begin]
    for shape in shapes:
        try:
            return catalog.find(shape, "models").stem
        except UserError:
            continue
    return ""
