"""Load models and GPUs from names and files."""

import os
import re
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.library import catalog
from kvcalc.library.files import MOST_YAML, read_text
from kvcalc.library.yaml_text import parse_yaml
from kvcalc.model.spec import Model
from kvcalc.units import parse_bytes, parse_rate

_ADDRESS = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+).*")
_SUFFIXES = (".yaml", ".yml", ".json", ".gguf")
LEAST_MEMORY = 1 << 20  # bytes; a smaller number is probably GiB without the unit
Checked = TypeVar("Checked", Model, Gpu)


def load_model(name: str, changes: list[str] | None = None) -> Model:
    """Return the model that `name` means.

    Args:
        name: A preset, a YAML or GGUF file, a config.json or its folder, `hf:org/name`, `org/name`,
            or the address of a page on the Hub.
        changes: The changes of `--set`. Changes that settle open questions of a file of an unknown
            type are removed from the list.

    Raises:
        UserError: Nothing matches (the message names near matches), or a file is invalid (the
            message names file, line and key).
    """
    if not name.strip():
        raise UserError("the model's name is empty")
    name = hub_name(name)
    if name.startswith("hf:") or is_hub_name(name):
        from kvcalc.library.huggingface.hub import load_from_hub

        return load_from_hub(name.removeprefix("hf:"), changes)
    place = locate(name, "models")
    if place.path.suffix.lower() in (".yaml", ".yml"):
        model = read(place.path, Model)
    elif place.path.suffix.lower() == ".gguf":
        from kvcalc.library.gguf_model import read_gguf

        model = read_gguf(place.path)
    else:
        from kvcalc.library.huggingface import read_config

        model = read_config(place.path, changes)
    notes = (*model.notes, place.remark) if place.remark else model.notes
    return msgspec.structs.replace(model, notes=notes, file="" if place.preset else name)


def load_gpu(name: str) -> Gpu:
    """Return the GPU that `name` means: a preset, an alias of a preset, or a YAML file.

    Raises:
        UserError: The name is unknown. The message names near matches.
    """
    if not name.strip():
        raise UserError("the GPU's name is empty")
    return read(locate(name, "gpus").path, Gpu)


def with_memory(gpu: Gpu, memory: str) -> Gpu:
    """Return `gpu` in a machine with this memory (`36GiB`); '' is the preset's figure.

    Raises:
        UserError: The memory is larger than the preset's.
    """
    if not memory:
        return gpu
    size = parse_bytes(memory, "memory")
    if size < LEAST_MEMORY:
        number = memory.strip()
        raise UserError(f"memory {memory!r} is {size:,} bytes", hint=f"Write {number if number.isdigit() else 24}GiB")
    if size > gpu.memory_bytes:
        most = f"{gpu.name} has {gpu.memory_bytes / 2**30:.2f} GiB"
        raise UserError(f"memory {memory!r}: {most}", hint="A GPU with more needs a YAML file of its own")
    return msgspec.structs.replace(gpu, memory_bytes=size)


def with_rate_between(gpu: Gpu, rate: str) -> Gpu:
    """Return `gpu` with this bandwidth to other nodes, as `50GB/s`; '' is the preset's figure."""
    return msgspec.structs.replace(gpu, inter_node_bytes_per_s=float(parse_rate(rate, "inter-node-bandwidth"))) if rate else gpu


class Place(NamedTuple):
    """The source of a name, whether it is a preset, and a remark if the name is ambiguous."""

    path: Path
    preset: bool = False
    remark: str = ""


def locate(name: str, kind: str) -> Place:
    """Return the source of the model or GPU (`kind`: models, gpus) with this name.

    A name that looks like a file name is a file. For other names, a folder with a config.json
    comes first, then a preset, then any file with this name.

    Raises:
        UserError: The name is unknown. The message names near matches.
    """
    path = Path(name)
    if re.search(r"[/\\]|^[.~]|\.(ya?ml|json|gguf)$", name, re.IGNORECASE):
        return Place(path)
    here = os.path.exists(path)  # noqa: PTH110 (Path's own question raises where it may not look)
    try:
        preset = catalog.find(name, kind)
    except UserError:
        if here:
            return Place(path)
        raise
    if kind == "models" and os.path.isfile(path / "config.json"):  # noqa: PTH113 (as above)
        return Place(path, remark="read from the folder of that name, which comes before the preset")
    return Place(preset, True, f"the preset; write ./{name} for what lies here" if here else "")


def read(path: Path, spec: type[Checked]) -> Checked:
    """Return the checked model or GPU of a YAML file.

    Raises:
        UserError: The file is invalid. The message names file, line, key and problem.
    """
    data, lines = parse_yaml(read_text(path, MOST_YAML), str(path))
    found = catalog.build(data, spec, str(path), lines)
    key, problem = found.problem()
    if problem:
        raise catalog.located(problem, key, str(path), lines)
    return found


def changed(model: Model, **fields: object) -> Model:
    """Return `model` with fields replaced, checked again."""
    found = msgspec.structs.replace(model, **fields)
    key, problem = found.problem()
    if problem:
        raise UserError(f"{key}: {problem}", model.name)
    return found


def hub_name(name: str) -> str:
    """Return the Hub name of the page at an address; any other name is returned unchanged."""
    page = _ADDRESS.fullmatch(name.strip())
    return f"hf:{page[1]}" if page else name


def is_hub_name(name: str) -> bool:
    parts = name.split("/")
    looks = len(parts) == 2 and all(p and not p.startswith((".", "~")) for p in parts)
    return looks and not name.lower().endswith(_SUFFIXES) and not os.path.lexists(name)
