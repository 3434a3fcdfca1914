"""The packages in import order: each module imports, also lazily or for types, only its own package or earlier ones."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import kvcalc

ROOT = Path(kvcalc.__file__).parent
# A room is a module or a package with all that is in it, in the order in which data flows.
ORDER = (
    "errors records arithmetic units storage question layers model gpu library timing capacity serving planning "
    "diagnosis report answers kvcalc "
    "measure cli __main__"
)
ROOMS = ORDER.split()
# Distributions that cost start-up time or are optional: the only modules that may import them, and how.
GUESTS = {
    "torch": ("measure",),
    "matplotlib": ("report.charts", "answers.answer"),
    "rich": ("report", "cli"),
    "typer": ("cli", "library.presets"),
    "huggingface_hub": ("library.huggingface.hub",),
    "pydantic": (),
}
LAZY = ("numpy", "matplotlib", "yaml", "huggingface_hub", "torch")  # never at the top of a module outside `measure`
MODULES = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in ROOT.rglob("*.py")}
each_module = pytest.mark.parametrize("module", sorted(MODULES))


def room(module: str) -> str:
    return "kvcalc" if module == "__init__" else module.partition(".")[0]


def imports(module: str, lazy: bool = True, types: bool = True) -> Iterator[str]:
    """Return the names that a module imports; imports in functions only if `lazy`, for type checking only if `types`."""
    waiting: list[ast.AST] = [ast.parse(MODULES[module].read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not (lazy and types):
            waiting += node.orelse
            continue
        if isinstance(node, ast.FunctionDef) and not lazy:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def own_imports(module: str) -> set[str]:
    """Return the modules of kvcalc that a module imports; `__init__` if it imports the package itself."""
    found = set()
    for name in imports(module):
        head, _, tail = name.partition(".")
        if head == "kvcalc":
            found.add(next((m for m in (tail, tail.rpartition(".")[0]) if m in MODULES), "__init__"))
    return found


MAX_FILE_LINES = 700


@each_module
def test_module_imports_from_rooms_before_its_own(module: str) -> None:
    assert room(module) in ROOMS, "every room has its place in the order"
    for name in own_imports(module):
        assert ROOMS.index(room(name)) <= ROOMS.index(room(module)), f"{module} imports {name}"


def test_no_module_imports_itself_in_a_circle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " → ".join((*path, module))
        if module not in done:
            for name in own_imports(module) - {module}:
                visit(name, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


@each_module
def test_guests_stay_in_their_rooms(module: str) -> None:
    for name in imports(module):
        homes = GUESTS.get(name.partition(".")[0])
        assert homes is None or any(module == h or module.startswith(h + ".") for h in homes), f"{module} imports {name}"


@each_module
def test_heavy_modules_are_imported_where_they_are_needed(module: str) -> None:
    if room(module) != "measure":
        heavy = {name for name in imports(module, lazy=False) if name.partition(".")[0] in LAZY}
        if room(module) == "serving" or module == "timing.fitting":  # simulations and fits compute with arrays
            heavy -= {"numpy"}
        assert not heavy or module in ("report.charts.drawing", "library.huggingface.notes"), heavy


@each_module
def test_pictures_are_drawn_from_records(module: str) -> None:
    if module.startswith("report.charts."):
        rooms = {name.split(".")[1] for name in imports(module, types=False) if name.startswith("kvcalc.")}
        assert not rooms & {"timing", "capacity", "serving", "planning", "model", "layers"}


@each_module
def test_files_are_short(module: str) -> None:
    text = MODULES[module].read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES


def test_public_names_are_listed_alike() -> None:
    """The names for type checkers and for lazy imports are equal."""
    tree, stub = (ast.parse(MODULES["__init__"].with_suffix(end).read_text(encoding="utf-8")) for end in (".py", ".pyi"))
    seen = {f"{n.module}.{a.name}" for n in stub.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert seen == {f"kvcalc.{home}.{name}" for name, home in kvcalc._HOME_OF.items()}
    assert sorted(n.value for n in ast.walk(stub) if isinstance(n, ast.Constant) and n.value in kvcalc._HOME_OF) == kvcalc.__all__
    assert not [n for n in tree.body if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("kvcalc")], "loaded lazily"


def test_no_exported_name_is_a_module() -> None:
    """Otherwise the order of imports would decide whether a package has the module or the name."""
    for module, path in MODULES.items():
        if path.name == "__init__.py" and room(module) != "measure":
            package = "" if module == "__init__" else f"{module}."
            exported = getattr(import_module(f"kvcalc.{package}".rstrip(".")), "__all__", ())
            assert not [name for name in exported if f"{package}{name}" in MODULES], module
