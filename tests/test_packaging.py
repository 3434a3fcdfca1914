"""The wheel contains the presets. They are found in an installation, a checkout and an editable installation. It starts fast."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kvcalc

PACKAGE = Path(kvcalc.__file__).parent
CHECKOUT = PACKAGE.parent
in_checkout = pytest.mark.skipif(
    not (CHECKOUT / "pyproject.toml").is_file(), reason="not a checkout: there is nothing to build from"
)
ASK = """
import json, kvcalc
from kvcalc.library.presets import shipped_folder
from kvcalc.library.huggingface.reader import model_from
config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 8}
print(json.dumps({
    "package": kvcalc.__file__, "presets": str(shipped_folder()),
    "bytes": kvcalc.cache_size(kvcalc.load_model("llama-3.1-8b"), 131072).stored, "knee": kvcalc.load_gpu("h100").knee,
    "vocabulary": model_from(config, "config.json", "x").vocab_size,
}))
"""


def ask(cwd: Path, *path: Path, isolated: bool = False) -> dict[str, object]:
    """Return the answer of a new interpreter in the folder `cwd`, with `path` before its packages."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "KVCALC_PRESETS")}
    code = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}{ASK}"
    words = [sys.executable, *(["-P"] if isolated else []), "-c", code]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    assert (found["bytes"], found["knee"]) == (2 * 32 * 8 * 128 * 2 * 131_072, 989e12 / 3.35e12)
    assert found["vocabulary"] == 32_000  # transformers' default for the type, out of defaults.json
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel, built offline from a copy of the files of a clone."""
    source, out = tmp_path_factory.mktemp("source") / "kvcalc", tmp_path_factory.mktemp("wheel")
    skipped = shutil.ignore_patterns(
        ".git", ".venv", "*cache*", "__pycache__", "*.egg-info", "build", "dist", "tests", "benchmarks"
    )
    for name in ("kvcalc", "presets"):
        keep = shutil.ignore_patterns("__pycache__", "presets") if name == "kvcalc" else skipped
        shutil.copytree(CHECKOUT / name, source / name, ignore=keep)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, source / name)
    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-q",
        "-w",
        str(out),
        str(source),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (found,) = out.glob("*.whl")
    return found


@in_checkout
def test_wheel_holds_presets_types_and_defaults(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {"kvcalc/py.typed", "kvcalc/library/huggingface/defaults.json"} <= held
    for kind in ("models", "gpus"):
        ours = {f"kvcalc/presets/{kind}/{p.name}" for p in (CHECKOUT / "presets" / kind).glob("*.yaml")}
        assert ours
        assert ours <= held
    assert {str(p.relative_to(CHECKOUT)) for p in PACKAGE.rglob("*.yaml")} <= held
    sources = {str(p.relative_to(CHECKOUT)) for p in PACKAGE.rglob("*.py")}
    assert {name for name in held if name.endswith(".py")} == sources


@in_checkout
def test_wheel_says_what_it_is(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    info = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA")).removesuffix("METADATA")
    metadata = archive.read(info + "METADATA").decode()
    assert f"Version: {kvcalc.__version__}\n" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata
    assert {"Provides-Extra: measure", "Provides-Extra: dev"} <= set(metadata.splitlines())
    scripts = archive.read(info + "entry_points.txt").decode().split()
    assert scripts == ["[console_scripts]", "kvcalc", "=", "kvcalc.__main__:main"]
    assert any(n.startswith(info) and n.endswith("LICENSE") for n in archive.namelist())


@in_checkout
def test_installed_wheel_finds_its_presets(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    found = ask(tmp_path, site)
    assert found["package"] == str(site / "kvcalc" / "__init__.py")
    assert found["presets"] == str(site / "kvcalc" / "presets")


@in_checkout
def test_plain_checkout_finds_the_presets_beside_it(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(PACKAGE, clone / "kvcalc", ignore=shutil.ignore_patterns("__pycache__", "presets"))
    shutil.copytree(CHECKOUT / "presets", clone / "presets")
    shutil.copy(CHECKOUT / "pyproject.toml", clone)
    found = ask(tmp_path, clone)
    assert (found["package"], found["presets"]) == (str(clone / "kvcalc" / "__init__.py"), str(clone / "presets"))
    assert ask(clone)["presets"] == str(clone / "presets")


@in_checkout
def test_checkout_prefers_its_own_presets_to_a_stale_copy(tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    shutil.copytree(PACKAGE, clone / "kvcalc", ignore=shutil.ignore_patterns("__pycache__", "presets"))
    shutil.copytree(CHECKOUT / "presets", clone / "presets")
    shutil.copy(CHECKOUT / "pyproject.toml", clone)
    (clone / "kvcalc" / "presets" / "models").mkdir(parents=True)
    assert ask(tmp_path, clone)["presets"] == str(clone / "presets")


def test_this_install_finds_its_presets_from_anywhere(tmp_path: Path) -> None:
    """The package under test, editable or not, is used from an unrelated folder."""
    (tmp_path / "presets" / "models").mkdir(parents=True)  # a decoy
    found = ask(tmp_path, isolated=True)
    assert Path(str(found["presets"])).parent in (PACKAGE, CHECKOUT)
    done = subprocess.run([sys.executable, "-m", "kvcalc", "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"kvcalc {kvcalc.__version__}\n"


HEAVY = ("matplotlib", "numpy", "torch", "pydantic", "huggingface_hub", "transformers", "asyncio", "http")


ONE_PASS = """size llama-3.1-8b
size deepseek-v3 --format json
gpus h100
fit qwen3-32b --gpu h100
compare deepseek-v3 --gpu h200 --tp 8 --variants none,mla,dsa
roofline gpt-oss-120b --gpu h100
roofline deepseek-v3.2 --gpu h200 --tp 8 --phase prefill
latency llama-3.1-8b --gpu h100
latency deepseek-v3.2 --gpu h200 --tp 8 --output-len 50 --max-num-batched-tokens 512"""


@pytest.mark.parametrize("words", [line.split() for line in ONE_PASS.splitlines()])
def test_starting_imports_nothing_heavy(words: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['kvcalc', *{words!r}]\nfrom kvcalc.cli.app import main\n"
        f"try:\n    main()\nexcept SystemExit:\n    pass\nprint([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout
    assert done.stderr.endswith("[]\n")
