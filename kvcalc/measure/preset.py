"""`--save-gpu`: the measured ceilings as a GPU preset of the user's own."""

import re
from pathlib import Path

import msgspec

from kvcalc.errors import UserError
from kvcalc.gpu.spec import Gpu
from kvcalc.library import catalog
from kvcalc.library.writing import make_folder, write_text


def preset_path(name: str) -> Path:
    """Where the preset `name` will be written: the first of the user's own folders. Raises UserError on a name in use."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,60}", name):
        raise UserError(f"{name!r} is no preset name", hint="Use lower-case letters, digits, . _ and -")
    try:
        taken = catalog.find(name, "gpus")
    except UserError:
        folders = catalog.user_folders()
        if not folders:
            raise UserError("there is no folder for presets of your own", hint="Name one in $KVCALC_PRESETS") from None
        return folders[0] / "gpus" / f"{name}.yaml"
    raise UserError(f"{name!r} is the name of a preset already", str(taken), "Take another name, or remove that file")


def save(gpu: Gpu, path: Path) -> None:
    """Write the preset, with its folder. Raises UserError where that cannot be done."""
    import yaml

    defaults = {f.name: f.default for f in msgspec.structs.fields(Gpu)}
    data = {key: value for key, value in msgspec.to_builtins(gpu).items() if value not in (defaults[key], {}, [], None)}
    make_folder(path.parent)
    write_text(path, yaml.safe_dump(data, sort_keys=False, allow_unicode=True))
