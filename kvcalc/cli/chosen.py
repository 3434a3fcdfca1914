"""Models and GPUs by the words of a command line, and lists of words."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcalc.cli.common import MOST_NAMES, check_number, note

if TYPE_CHECKING:
    from kvcalc.gpu.spec import Gpu
    from kvcalc.model.spec import Model


def listed(text: str, what: str = "list") -> list[str]:
    """The words of a list, which may be one of nothing. Raises UserError on an empty place in a longer one."""
    from kvcalc.errors import UserError

    words = [word.strip() for word in text.split(",")]
    if len(words) > 1 and not all(words):
        raise UserError(f"{what} {text!r} has an empty place")
    if len(words) > 1 and words[0].isdigit():
        from kvcalc.units import check_whole

        check_whole(words, what)
    return words


def model_words(names: Sequence[str]) -> list[str]:
    """The names among words and lists of them; a file whose name holds a comma is one."""
    return [word for name in names for word in ([name] if os.path.exists(name) else listed(name))]  # noqa: PTH110


def chosen_models(names: Sequence[str], changes: list[str]) -> "list[Model]":
    """The models of words and of lists among them."""
    from kvcalc.errors import UserError

    words = model_words(names)
    check_number("models", MOST_NAMES, words)
    try:
        return _with_distinct_names([chosen_model(word, changes) for word in words], words)
    except UserError:
        if len(names) > 1 and (one := _in_one_word(names)):
            raise UserError(f"{' '.join(names)!r} are {len(names)} models", hint=f"Write {one} for one") from None
        raise


def _with_distinct_names(models: "list[Model]", words: list[str]) -> "list[Model]":
    """Return the models; different ones that share a name get the words that were typed.

    Example: `a/m.json` and `b/m.json` are both called `m`, and answers are listed by name.
    """
    from msgspec.structs import replace

    from kvcalc.errors import printable

    plain = [replace(model, file="", notes=()) for model in models]
    shared = [any(m.name == other.name and m != other for other in plain) for m in plain]
    return [
        replace(model, name=printable(word, 80)) if is_shared else model
        for model, word, is_shared in zip(models, words, shared, strict=True)
    ]


def _in_one_word(names: Sequence[str]) -> str:
    """The preset that blanks tore into several words, as `llama 3 8b`; '' of others."""
    from kvcalc.errors import UserError
    from kvcalc.library.load import locate

    try:
        found = locate("-".join(names), "models")
    except UserError:
        return ""
    return found.path.stem if found.preset else ""


def chosen_model(name: str, changes: list[str]) -> "Model":
    """The model called `name`, changed by `--set`."""
    from kvcalc.library.edit import edited
    from kvcalc.library.named import load_named

    left = list(changes)
    model = load_named(name, left)  # which takes out what settles a file of an unknown type
    return edited(model, left)


def chosen_gpu(name: str, memory: str = "") -> "Gpu":
    """One GPU, with the memory that `--memory` gives it."""
    from kvcalc.library.load import load_gpu, with_memory

    preset = load_gpu(name.strip())
    found = with_memory(preset, memory)
    if memory and preset.usable_share and found.memory_bytes % 2**30:
        note(f"memory {memory} is {found.memory_bytes / 2**30:.2f} GiB; such machines are sold by GiB")
    return found


def gpu_names(names: str) -> list[str]:
    """The words of a comma-separated list of GPUs; `all` is every preset."""
    from kvcalc.library.listing import all_gpus

    words = [name.strip() for name in names.split(",")]
    return [one for word in words for one in ([g.name for g in all_gpus()] if word.lower() == "all" else [word])]


def chosen_gpus(names: str, memory: str = "") -> "list[Gpu]":
    """The GPUs of a comma-separated list."""
    words = gpu_names(names)
    check_number("GPUs", MOST_NAMES, words)
    return [chosen_gpu(name, memory) for name in words]


def timed_gpus(names: str, memory: str = "") -> "list[Gpu]":
    """The same to be timed: of `all`, those with a matrix peak, since the others have no time of a prompt."""
    cards = chosen_gpus(names, memory)
    return [card for card in cards if card.knee] if names.strip().lower() == "all" else cards
