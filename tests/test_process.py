"""The real program as a process: closed or full streams, unusual environments, Ctrl-C at any moment."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="a system with /dev/full and signals")
SIZE = ("size", "gpt2", "--context", "2k")
NOTE = "note: gpt2: context 2,048 is beyond the model's own maximum of 1,024\n"
BATCHES = ",".join(map(str, range(1, 600)))  # more than a buffer holds


def run(*words: str, shell: str = "", cwd: Path | None = None, **environment: str | None) -> "subprocess.CompletedProcess[str]":
    """Run `kvcalc` with these words. `shell` is the text after them in a shell, and an environment variable of None is unset."""
    for_child: dict[str, str] = os.environ | {k: v for k, v in environment.items() if v is not None}
    for name in (k for k, v in environment.items() if v is None):
        for_child.pop(name, None)
    line = ["bash", "-c", f'"$@" {shell}', "bash", sys.executable, "-m", "kvcalc", *words]
    encoding = for_child.get("PYTHONIOENCODING", "utf-8")
    return subprocess.run(line, capture_output=True, encoding=encoding, timeout=60, cwd=cwd, env=for_child)


@pytest.mark.parametrize("words", [SIZE, (*SIZE, "--bs", BATCHES, "--format", "json"), ("--help",), ("--version",)], ids=len)
def test_output_that_is_lost_is_said(words: tuple[str, ...]) -> None:
    full = run(*words, shell="> /dev/full")
    assert full.returncode == 2
    assert full.stderr.removeprefix(NOTE) == "kvcalc: standard output: no space left on device\n"


def test_a_reader_that_goes_away_is_no_failure() -> None:
    for words in (("--help",), (*SIZE, "--bs", BATCHES)):
        done = run(*words, shell="| true; exit ${PIPESTATUS[0]}")
        assert (done.returncode, done.stderr.removeprefix(NOTE)) == (0, "")
    both = run(*SIZE, shell="2>&1 | true; exit ${PIPESTATUS[0]}")
    assert (both.returncode, both.stderr) == (0, "")


ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "a home of nobody": {"KVCALC_PRESETS": "~nosuchuser/presets:/proc/1/root"},
    "no home": {"HOME": None, "XDG_CONFIG_HOME": None},
    "a home that is not there": {"HOME": "/nonexistent", "XDG_CONFIG_HOME": "~nosuchuser"},
    "ASCII": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
}


@pytest.mark.parametrize("case", ENVIRONMENTS)
def test_odd_environments_change_nothing(case: str) -> None:
    done = run(*SIZE, **ENVIRONMENTS[case])
    assert (done.returncode, done.stderr) == (0, NOTE)
    assert ["gpt2", "72.00"] in [line.split()[:2] for line in done.stdout.splitlines()]


def test_sketches_are_ascii_under_lc_all_c() -> None:
    """Python writes UTF-8 in this case. The × of a title becomes an x."""
    plain = run("plot", "dsa-vs-mla", LC_ALL="C", PYTHONUTF8=None, PYTHONIOENCODING=None)
    assert plain.stdout.isascii() and "reads 4.2x fewer bytes" in plain.stdout and "  o deepseek-v3, MLA" in plain.stdout
    assert not run("plot", "dsa-vs-mla", LC_ALL="C.UTF-8").stdout.isascii()


def test_what_an_encoding_lacks_is_written_out(tmp_path: Path) -> None:
    ascii_only = run("size", "gpt2", "--context", "100", "--explain", PYTHONIOENCODING="ascii")
    marked = run("size", "gpt2", "--context", "100", "--explain", PYTHONIOENCODING="utf-8")
    assert marked.stdout.isascii() is False
    assert ascii_only.stdout.isascii() and "?" not in ascii_only.stdout
    assert ascii_only.stdout == marked.stdout.translate(
        str.maketrans({"×": "x", "·": "*", "÷": "/", "−": "-", "⌈": "ceil(", "⌉": ")", "Σ": "sum ", "…": "..."})
    )
    (tmp_path / "modèle 🐫.yaml").write_text(
        'name: "modèle 🐫"\nhidden_size: 64\nvocab_size: 100\nlayers: 1\n'
        "kinds: {full: {parts: [{type: grouped, num_attention_heads: 1, num_key_value_heads: 1, head_dim: 64}]}}\n"
    )
    for encoding in ("ascii", "latin-1"):
        done = run("size", "modèle 🐫.yaml", "--format", "json", cwd=tmp_path, PYTHONIOENCODING=encoding, PYTHONUTF8="1")
        assert json.loads(done.stdout)[0]["model"] == "modèle 🐫", encoding


def finder(moment: str, at: str) -> str:
    """Return code in which `moment` happens when the module `at` is first imported."""
    return (
        "import os, signal, sys, pathlib\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {at!r}:\n"
        "            sys.meta_path.remove(self)\n"
        f"            {moment}\n"
        "sys.meta_path.insert(0, Finder())\n"
    )


def interrupted(moment: str, *words: str, at: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run the program so that `moment` happens when the module `at` is first imported."""
    code = f"{finder(moment, at)}import runpy\nsys.argv[1:] = {list(words)!r}\n"
    code += "runpy.run_module('kvcalc', run_name='__main__', alter_sys=True)\n"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=cwd)


TYPED = "os.kill(os.getpid(), signal.SIGINT)"


@pytest.mark.parametrize("at", ["kvcalc.cli.app", "typer.main", "kvcalc.answers.size", "kvcalc.library.files", "yaml"])
def test_an_interrupt_is_one_line_while_modules_are_imported(at: str) -> None:
    done = interrupted(TYPED, *SIZE, at=at)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kvcalc: interrupted\n")


def test_an_interrupt_while_a_file_is_written_leaves_none(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("op,gpu,framework,dtype,m,n,k,time_us\ngemm,h100,vllm,bfloat16,8,8,8,9\n")
    moment = f"pathlib.Path.replace = lambda self, target: {TYPED}"
    done = interrupted(moment, "validate", "rows.csv", "--predictions", "out.csv", at="kvcalc.answers.calibrate", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kvcalc: interrupted\n")
    assert [p.name for p in tmp_path.iterdir()] == ["rows.csv"]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_that_ends_the_program_leaves_no_file_that_was_begun(name: str, tmp_path: Path) -> None:
    asked = ("plan", "gpt2", "--users", "1", "--context", "9", "--gpu", "h100", "--points", "out.csv")
    moment = f"print(os.listdir(), flush=True); os.kill(os.getpid(), signal.{name})"
    done = interrupted(moment, *asked, at="numpy", cwd=tmp_path)
    assert (done.returncode, done.stderr, ".part']" in done.stdout) == (128 + getattr(signal, name), "", True)
    assert not list(tmp_path.iterdir())
