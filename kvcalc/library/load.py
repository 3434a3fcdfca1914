"""Names and files to models and GPUs."""

from pathlib import Path
from typing import TypeVar

import msgspec

from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.library import catalog
from kvcalc.library.files import MOST_YAML, parse_yaml, read_text
from kvcalc.model.spec import Model

Checked = TypeVar("Checked", Model, Gpu)


def load_model(name: str) -> Model:
    """The model that `name` stands for: a preset, a YAML file, a config.json or its folder, `hf:org/name` or `org/name`.

    Raises UserError naming near matches, or the file, line and key that cannot be read.
    """
    if not name.strip():
        raise UserError("the model's name is empty")
    if name.startswith("hf:") or _is_hub_name(name):
        from kvcalc.library.huggingface.hub import load_from_hub

        return load_from_hub(name.removeprefix("hf:"))
    path = Path(name)
    if is_file_name(name):
        if path.suffix.lower() in (".yaml", ".yml"):
            return read(path, Model)
        from kvcalc.library.huggingface import read_config

        return read_config(path)
    return read(catalog.find(name, "models"), Model)


def load_gpu(name: str) -> Gpu:
    """The GPU that `name` stands for: a preset, an alias of one, or a YAML file. Raises UserError naming near matches."""
    if not name.strip():
        raise UserError("the GPU's name is empty")
    if is_file_name(name):
        return read(Path(name), Gpu)
    return read(catalog.find(name, "gpus"), Gpu)


def read(path: Path, spec: type[Checked]) -> Checked:
    """The checked model or GPU in a YAML file. Raises UserError with the file, line and key of what is wrong."""
    data, lines = parse_yaml(read_text(path, MOST_YAML), str(path))
    found = catalog.build(data, spec, str(path), lines)
    key, problem = found.problem()
    if problem:
        raise catalog.located(problem, key, str(path), lines)
    return found


def changed(model: Model, **fields: object) -> Model:
    """`model` with fields replaced, checked again."""
    found = msgspec.structs.replace(model, **fields)
    key, problem = found.problem()
    if problem:
        raise UserError(f"{key}: {problem}", model.name)
    return found


def _is_hub_name(name: str) -> bool:
    parts = name.split("/")
    looks = len(parts) == 2 and all(p and not p.startswith((".", "~")) for p in parts)
    return looks and not name.lower().endswith((".yaml", ".yml", ".json")) and not Path(name).exists()


def is_file_name(name: str) -> bool:
    """Whether a name stands for a file, not for a preset."""
    if "/" in name or "\\" in name or name.startswith((".", "~")):
        return True
    return name.lower().endswith((".yaml", ".yml", ".json")) or Path(name).exists()
