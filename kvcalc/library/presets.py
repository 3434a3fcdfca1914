"""Find presets by name, in the user's folders before the shipped folder, and check them.

The module works for presets of any type.
"""

import os
import re
from collections.abc import Iterable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args

import msgspec

from kvcalc.errors import UserError, nearest
from kvcalc.library.files import MAX_YAML_BYTES, KeyPath, Lines, read_text
from kvcalc.records import JsonObject

Spec = TypeVar("Spec", bound=msgspec.Struct)
_ALIASES = re.compile(r"^aliases:\s*\[([^\]]*)\]", re.MULTILINE)
_COUNT_FIRST = re.compile(r"(?P<count>\d{1,3})\s*[x×*\s]\s*(?P<gpu>.+)")  # 8xh100
_COUNT_LAST = re.compile(r"(?P<gpu>.+?)\s*[x×*:\s]\s*(?P<count>\d{1,4})")
_NO_PRESET = re.compile(
    r"(?P<cpu>(?:.*\W)?(?:cpu|epyc|xeon|threadripper|ryzen(?!.*max)|core|i[3579]-\d))|"
    r"(?P<mtp>mtp$)|(?P<all>all$)|(?P<eagle>eagle)|(?P<layers>layers=)|(?P<number>\d+$)|"
    r"(?P<ollama>ollama)|(?P<speech>whisper|wav2vec|seamless|parakeet)|"
    r"(?P<secret>gpt-?(?:[45]|3\.5))|(?P<file>.*\.gguf$)",
    re.IGNORECASE,
)
OWN_GPU_HINT = "A GPU without a preset is a file like `kvcalc gpus rtx-3060`: --gpu my-gpu.yaml"
_NO_PRESET_HINTS = {
    "cpu": "CPUs have no presets: save a file with the keys name, vendor, memory_bytes, "
    "bandwidth_bytes_per_s, flops_per_s: {} and source: [], and give --gpu my-cpu.yaml",
    "all": "Name several models as a,b; `kvcalc models` lists them",
    "mtp": "Write --mtp instead of --draft mtp",
    "eagle": "Name its folder or Hub name, as in --draft yuhuili/EAGLE3-LLaMA3.1-Instruct-8B; "
    "`kvcalc latency` and `kvcalc serve` also take a draft of one layer: --draft layers=1",
    "layers": "`kvcalc latency` and `kvcalc serve` take --draft layers=N",
    "number": "A switch such as --mtp takes no number",
    "file": "There is no such file. Give its path, or a model with a llama.cpp format: "
    "-m qwen3-8b-q4_k_m.gguf",
    "ollama": "Ollama runs llama.cpp; write `kvcalc fit MODEL -q q4_k_m --engine llama.cpp`",
    "speech": "kvcalc does not cover speech models",
    "secret": "Its dimensions are not public; `kvcalc size --layers N --kv-heads N --head-dim N` "
    "takes your estimates",
}
_NO_SEPARATORS = str.maketrans("", "", " \t_-:")
_NO_DOTS = str.maketrans("", "", " \t_-:.")
_SIZE = re.compile(r"(?<![a-z\d.])\d+(?:\.\d+)?[bm](?![a-z\d])")  # 7b of qwen2.5-7b-instruct
_PATH = re.compile(r"\[(\d+|\.\.\.)\]|\.?([^.\[\]]+)")


PathsByName = dict[str, Path]
_file_in = cache(Path.joinpath)  # a lookup by name makes the paths of all presets


@cache
def key(name: str, dots: bool = False) -> str:
    """Return a preset name in the form in which names are compared, so that spellings match.

    The form is in lower case, without `_`, `-`, `:`, `.` and blanks: `Llama-3.1_8B` becomes
    `llama318b`.

    Args:
        name: The name, such as the name of a preset or one that a user typed.
        dots: Whether to keep `.` in the result: `Llama-3.1_8B` then becomes `llama3.18b`.
    """
    return name.lower().translate(_NO_SEPARATORS if dots else _NO_DOTS)


def user_folders() -> list[Path]:
    """Return the folders in which users store their own presets, the most important first.

    They are the folders in the environment variable KVCALC_PRESETS, then the folder `kvcalc` in the
    platform's config folder.
    """
    from typer import get_app_dir

    named_folders = [p for p in os.environ.get("KVCALC_PRESETS", "").split(os.pathsep) if p]
    # unlike Path.expanduser, it never raises
    folders = map(os.path.expanduser, [*named_folders, get_app_dir("kvcalc")])
    return [Path(folder) for folder in folders if not folder.startswith("~")]


def new_path(*names: str) -> Path:
    """Return the path for a new preset in the first of `user_folders`.

    `new_path("models", "my-model")` gives `models/my-model.yaml` in this folder.

    Args:
        names: Folder (`models` or `gpus`) and name of the preset.

    Raises:
        UserError: A name cannot be used in a path, or there is no user folder.
    """
    for name in names:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name):
            raise UserError(
                f"{name!r} is not a usable file name", "Use letters, digits, - _ . only"
            )
    folders = user_folders()
    if not folders:
        raise UserError("there is no folder for your presets", "Set $KVCALC_PRESETS to one")
    return folders[0].joinpath(*names[:-1], f"{names[-1]}.yaml")


@cache
def shipped_folder() -> Path:
    """Return the folder of the presets that kvcalc contains.

    It is in the installed package, or next to the package in a checkout.
    """
    package = Path(__file__).parent.parent
    checkout = package.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / "presets/models").is_dir():
        return checkout / "presets"
    return package / "presets"


def preset_files(kind: str) -> PathsByName:
    """Return the YAML file of each preset of a kind, by file name without `.yaml`.

    A user's preset replaces a shipped preset of the same name.

    Args:
        kind: `models` or `gpus`.
    """
    results: PathsByName = {}
    for folder in *user_folders(), shipped_folder():
        try:
            names = sorted(os.listdir(folder / kind))  # noqa: PTH208 (faster)
        except OSError:
            continue
        for name in names:
            if name.endswith(".yaml") and name[0] != ".":
                results.setdefault(name.removesuffix(".yaml"), _file_in(folder, kind, name))
    return results


def find(name: str, kind: str) -> Path:
    """Return the file of the preset with this name or alias.

    A file name has priority over an alias, and a user's preset over a shipped preset. A name with
    the same dots has priority over a name with other dots.

    Args:
        name: Name or alias in any case.
        kind: `models` or `gpus`.

    Raises:
        UserError: No preset matches. The message names near matches.
    """
    files = preset_files(kind)
    if result := _matching(name, files, kind):
        return result
    aliases: PathsByName = {}
    for path in files.values():
        for alias in _aliases(path):
            aliases.setdefault(alias, path)
    if result := _matching(name, aliases, kind):
        return result
    raise _unknown(name, kind, files, aliases)


def _unknown(name: str, kind: str, files: PathsByName, aliases: PathsByName) -> UserError:
    """Return the error about a name without a preset, with the text to type instead."""
    paths = aliases | files
    counted = _COUNT_FIRST.fullmatch(name) or _COUNT_LAST.fullmatch(name)
    path = _matching(counted["gpu"], paths, kind) if counted and kind == "gpus" else None
    if counted and path:
        hint = f"Give one or more counts with --tp: --gpu {path.stem} --tp {counted['count']}"
    elif (match := _NO_PRESET.match(name)) and (kind == "gpus") == (match.lastgroup == "cpu"):
        hint = _NO_PRESET_HINTS[match.lastgroup or ""]
    else:
        # an alias of another family is printed itself
        stems = {n: p.stem for n, p in aliases.items() if kind == "gpus" or n[:3] == p.stem[:3]}
        names = [*files, *aliases]
        if kind == "models":
            names = similar_models(name, names)
        hint = (
            f"{nearest(name, names, printed_names=stems)} {OWN_GPU_HINT * (kind == 'gpus')}"
        ).strip()
    if not hint:
        hint = "Use its Hugging Face name, such as OWNER/NAME, or a config.json; "
        hint += "`kvcalc models` lists the presets"
    return UserError(f"unknown {kind[:-1]} {name!r}", hint)


def similar_models(name: str, names: Iterable[str]) -> list[str]:
    """Return the names of models that have the family and the size of an unknown model.

    The family is the name up to the first character that is not a letter. `qwen2.5-9b` is similar
    to `qwen3.5-9b`, but not to `qwen2.5-7b` and not to `yi-9b`. Names that begin with the unknown
    name come alone: `phi3` is similar to `phi-3-mini`, and then not to `phi-4`. If no family is
    similar, the result has the names that contain the unknown name.

    Args:
        name: The unknown name. Its family may have a typing error. Without a size, models of all
            sizes are similar.
        names: Names of all models.
    """
    from difflib import get_close_matches

    low = name.lower().rpartition("/")[2]
    families = {re.split("[^a-z]", other)[0] for other in names}
    family = tuple(get_close_matches(re.split("[^a-z]", low)[0], families, 1, 0.8))
    sizes = {*_SIZE.findall(low)}
    similar = [n for n in names if n.startswith(family) and sizes <= {*_SIZE.findall(n)}]
    beginning = [n for n in similar if key(n).startswith(key(low))]
    return beginning or similar or [n for n in names if key(low) in key(n)]


def _matching(name: str, paths: PathsByName, kind: str) -> Path | None:
    plain_key, dotted = key(name), key(name, dots=True)
    close = [other for other in paths if key(other) == plain_key]
    exact = [other for other in close if key(other, dots=True) == dotted]
    # opt13.b: opt-13b or opt-1.3b?
    if not exact and len({key(other, dots=True) for other in close}) > 1:
        raise UserError(
            f"{name!r} may be more than one {kind[:-1]}", "Write " + " or ".join(sorted(close))
        )
    return next((paths[other] for other in exact or close), None)


@cache
def _aliases(path: Path) -> list[str]:
    try:
        match = _ALIASES.search(read_text(path, MAX_YAML_BYTES))
    except UserError:
        return []
    return [a.strip(" \"'") for a in match[1].split(",") if a.strip()] if match else []


def build(
    data: JsonObject, spec: type[Spec], file_name: str, lines: Lines | None = None
) -> Spec:
    """Return the content of a preset's file as a `Model`, a `Gpu` or another class, after checks.

    Args:
        data: The mapping in the file.
        spec: The class of the result, such as `Model` or `Gpu`.
        file_name: Name of the file in error messages.
        lines: Path of a key (keys and list indices that lead to it) → its line number; None if
            unknown.

    Raises:
        UserError: The data are invalid. The message names the file, the line if known, the key and
            the expected type.
    """
    try:
        return msgspec.convert(data, spec)
    except msgspec.ValidationError as error:
        text, _, tail = str(error).partition(" - at `$")
        path = _concrete(data, spec, str(error), split_path(tail.rstrip("`")))
    hint = ""
    if text.startswith("Object missing") and not path:
        fields = msgspec.structs.fields(spec)
        missing = [f"{f.name!r}" for f in fields if f.required and f.name not in data]
        text = f"is missing the key{'s' * (len(missing) > 1)} {', '.join(missing)}"
    if unknown := re.search(r"unknown field `([^`]*)`", text):
        known_keys = _known_keys(spec, lookup(data, path))
        path = (*path, unknown[1])
        text = f"unknown key {unknown[1]!r}"
        hint = nearest(unknown[1], known_keys)
    elif text.startswith("Invalid value"):
        configs = [struct.__struct_config__ for struct in _structs(spec)]
        tags = [str(config.tag) for config in configs if config.tag_field == path[-1]]
        hint = nearest(str(lookup(data, path)), tags)
    raise located(text, path, file_name, lines or {}, hint)


def located(
    text: str, path: KeyPath, file_name: str, lines: Lines, hint: str = ""
) -> UserError:
    """Return, without raising it, a UserError about one key of a preset's file, with file and line.

    Args:
        text: The problem.
        path: Keys and list indices that lead to the key, such as ("kinds", "full", "parts", 0).
        file_name: Name of the file.
        lines: Path of a key → its line number. If it lacks the key, the line of the nearest
            enclosing key is used.
        hint: What the user can do.
    """
    line = next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), 0)
    dotted = ".".join(str(p) for p in path)
    text = text.replace("Object missing required field", "is missing the key").replace("`", "'")
    return UserError(
        f"{dotted}: {text}" if dotted else text,
        hint,
        f"{file_name}, line {line}" if line else file_name,
    )


def split_path(text: str) -> KeyPath:
    """Return the keys and list indices of a path that is written as text.

    `kinds.full.parts[0]` gives ("kinds", "full", "parts", 0). The library msgspec writes paths in
    this way in its error messages.

    Args:
        text: Path of a value in a preset's file.
    """
    return tuple(
        int(m[1]) if m[1] and m[1] != "..." else m[1] or m[2] for m in _PATH.finditer(text)
    )


def _concrete(
    data: Any, spec: type[Any], message: str, path: KeyPath, start: int = 0
) -> KeyPath:
    """Return `path` with `...`, which means any key of a mapping, replaced by a key of the data.

    It is the first key whose value gives the error `message`. The keys before `start` are the
    data's own.
    """
    if "..." not in path[start:]:
        return path
    index = path.index("...", start)
    for name, value in lookup(data, path[:index]).items():
        trial = deepcopy(data)
        lookup(trial, path[: index - 1])[path[index - 1]] = {name: value}
        try:
            msgspec.convert(trial, spec)
        except msgspec.ValidationError as error:
            if str(error) == message:
                path = (*path[:index], name, *path[index + 1 :])
                return _concrete(trial, spec, message, path, index + 1)
    return path[:index]


def lookup(data: Any, path: KeyPath) -> Any:
    """Return the value at a path in nested mappings and lists; None if there is no such value.

    Args:
        data: The outermost mapping or list.
        path: Keys and list indices, from the outside to the inside.
    """
    for step in path:
        if isinstance(data, dict):
            data = data.get(step)
        else:
            data = data[step] if isinstance(data, list) and isinstance(step, int) else None
    return data


def mapping(value: Any) -> JsonObject:
    """Return `value` if it is a mapping, otherwise {}.

    Args:
        value: Value from a JSON or YAML file, of any type.
    """
    return value if isinstance(value, dict) else {}


def _known_keys(spec: type[Any], value: Any) -> list[str]:
    """Return the keys of the struct that a mapping describes, found by its tag or by its other
    keys.

    If several structs are equally likely, return the keys of all these structs.
    """

    def likeness(struct: Any) -> tuple[bool, int]:
        config = struct.__struct_config__
        has_tag = bool(config.tag) and value.get(config.tag_field) == config.tag
        return has_tag, len(value.keys() & {*struct.__struct_encode_fields__})

    structs = _structs(spec)
    best = max(map(likeness, structs))
    likely = [struct for struct in structs if likeness(struct) == best]
    return [key for struct in likely for key in struct.__struct_encode_fields__]


def _structs(kind: Any) -> list[Any]:
    """Return the structs that a value of this type may contain, with `kind` itself first."""
    is_struct = hasattr(kind, "__struct_fields__")
    inner = [f.type for f in msgspec.structs.fields(kind)] if is_struct else get_args(kind)
    structs = [kind] if is_struct else []
    for inner_kind in inner:
        structs += _structs(inner_kind)
    return structs
