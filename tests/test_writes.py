"""Writing: a file is written completely or not at all, links are followed and modes kept; devices, pipes and stdout are
written directly."""

import csv
import io
import os
import stat
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest
from conftest import Run

from kvcalc import UserError
from kvcalc.library.files import OutputFile, destination, write_text

posix = pytest.mark.skipif(os.name != "posix", reason="links, modes and pipes of POSIX systems")
ROWS = "op,gpu,framework,dtype,m,n,k,time_us\ngemm,h100-sxm,vllm,bfloat16,128,4096,4096,20\n"


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_file_is_made_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.txt"
    write_text(path, "one ×\n")
    assert path.read_bytes() == "one ×\n".encode()
    write_text(str(path), b"two")
    assert (path.read_bytes(), names(tmp_path)) == (b"two", ["out.txt"])


@posix
def test_modes_are_those_of_the_umask_or_of_the_file_that_was_there(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "new", "x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
    for mode in (0o600, 0o755, 0o666):
        (tmp_path / "new").chmod(mode)
        write_text(tmp_path / "new", "y")
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == mode


@posix
def test_links_are_followed_and_stay(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "real").write_text("old")
    for link, goal in (("one", "deep/real"), ("two", "one"), ("open", "deep/not yet")):
        (tmp_path / link).symlink_to(goal)
        write_text(tmp_path / link, link)
        assert (tmp_path / link).is_symlink()
        assert (tmp_path / link).readlink() == Path(goal)
    assert ((tmp_path / "deep" / "real").read_text(), (tmp_path / "deep" / "not yet").read_text()) == ("two", "open")
    assert names(tmp_path / "deep") == ["not yet", "real"]
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(UserError, match=r"a: cannot be written: too many levels of symbolic links"):
        write_text(tmp_path / "a", "x")


@posix
def test_what_grows_keeps_modes_links_and_pipes(tmp_path: Path) -> None:
    (tmp_path / "old.csv").write_text("old")
    (tmp_path / "old.csv").chmod(0o604)
    (tmp_path / "link.csv").symlink_to("old.csv")
    (tmp_path / "null.csv").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "pipe.csv")
    before, read = names(tmp_path), []
    reader = Thread(target=lambda: read.append((tmp_path / "pipe.csv").read_text()))
    reader.start()
    for name in ("link.csv", "null.csv", "pipe.csv"):
        growing = OutputFile(str(tmp_path / name))
        growing.write("new")
        growing.close(keep=True)
    reader.join()
    assert (names(tmp_path), (tmp_path / "old.csv").read_text(), read) == (before, "new", ["new"])
    assert stat.S_IMODE((tmp_path / "old.csv").stat().st_mode) == 0o604
    assert (tmp_path / "link.csv").is_symlink() and (tmp_path / "null.csv").is_symlink() and (tmp_path / "pipe.csv").is_fifo()


def test_what_is_no_file_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")
    monkeypatch.chdir(tmp_path)
    refused = {
        "": "cannot be written: the file's name is empty",
        ".": r"\.: cannot be written: is a folder, not a file",
        "..": "is a folder",
        "/": "/: cannot be written: is a folder",
        "folder": "folder: cannot be written: is a folder",
        "new/": "new/: cannot be written: is a folder",
        "no/out.csv": "no/out.csv: cannot be written: no such folder",
        "file/out.csv": "file/out.csv: cannot be written: not a directory",
        "a\0b": "not a usable path",
    }
    for target, said in refused.items():
        for write in (lambda t: write_text(t, "x"), destination):
            with pytest.raises(UserError, match=said):
                write(target)
    assert (names(tmp_path), (tmp_path / "file").read_text(), names(tmp_path / "folder")) == (["file", "folder"], "old", [])


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "interrupted"])
def test_nothing_half_written_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException) -> None:
    (tmp_path / "out").write_text("old")

    def fail(self: Path, target: Path) -> None:
        assert self.read_text() == "new", "complete before it takes the place"
        raise failure

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises((UserError, KeyboardInterrupt)):
        write_text(tmp_path / "out", "new")
    assert (names(tmp_path), (tmp_path / "out").read_text()) == (["out"], "old")


def python(cwd: Path, *words: str, **more: object) -> "subprocess.CompletedProcess[str]":
    """Return the real program, in a folder."""
    line = [sys.executable, "-m", "kvcalc", *words]
    more = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more
    return subprocess.run(line, cwd=cwd, text=True, timeout=60, **more)  # type: ignore[call-overload, no-any-return]


SERVE = ("serve", "gpt2", "--num-prompts", "3", "--isl", "10", "--osl", "3")


@posix
def test_a_timeline_into_the_file_that_also_gets_the_table(tmp_path: Path) -> None:
    """The table follows the timeline in /dev/stdout. With `-`, the timeline replaces the table."""
    for target in ("/dev/stdout", "-"):
        with (tmp_path / "both").open("w") as out:
            done = python(tmp_path, *SERVE, "--timeline", target, stdout=out)
        assert done.returncode == 0, done.stderr
        shown = (tmp_path / "both").read_text()
        assert shown.startswith("rank,start_s,duration_s,passes,")
        assert ("TTFT" in shown) == (target != "-"), "in place of the table"
        assert [line for line in done.stderr.splitlines() if line.startswith("wrote ")] == [f"wrote {target}"] * (target != "-")
    assert names(tmp_path) == ["both"]


@posix
def test_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    import resource

    (tmp_path / "rows.csv").write_text(ROWS * 2)
    (tmp_path / "out.csv").write_text("old")
    limited = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))}  # bytes that a file may have
    done = python(tmp_path, "validate", "rows.csv", "--predictions", "out.csv", **limited)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvcalc: out.csv: cannot be written: file too large\n"
    assert ((tmp_path / "out.csv").read_text(), names(tmp_path)) == ("old", ["out.csv", "rows.csv"])


def test_predictions_on_standard_output_stand_alone(kvcalc: Run, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(ROWS)
    code, out, err = kvcalc("validate", str(tmp_path / "rows.csv"), "--predictions", "-")
    assert (code, err) == (0, "")
    (row,) = csv.DictReader(io.StringIO(out))
    assert float(row["roofline_us"]) > 0
    code, out, err = kvcalc("validate", str(tmp_path / "rows.csv"), "--predictions", str(tmp_path / "out.csv"))
    assert (code, err) == (0, f"wrote {tmp_path / 'out.csv'}\n")
    assert next(csv.DictReader((tmp_path / "out.csv").open())) == row


@pytest.mark.parametrize("target", [".", "/", "no/such/out.csv", "folder.csv"])
def test_commands_refuse_before_they_work(kvcalc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "rows.csv").write_text(ROWS)
    for line in (" ".join(SERVE) + " --timeline", "validate rows.csv --predictions"):
        code, out, err = kvcalc(line, target)
        assert (code, out) == (2, "")
        assert err.startswith(f"kvcalc: {target}: cannot be written: ") and err.count("\n") == 1, err
    assert names(tmp_path) == ["folder.csv", "rows.csv"]


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("validate rows.csv --predictions ./rows.csv", "rows.csv"),
        ("validate other.csv rows.csv --predictions=again.csv", "rows.csv"),
        ("calibrate rows.csv --gpu h100 --stack vllm -o rows.csv", "rows.csv"),
        ("plan gpt2 --users 1 --context 9 --gpu h100 --price-per-hour rows.csv --points rows.csv", "rows.csv"),
        ("report gpt2 --gpu h100,rows.csv -o rows.csv", "rows.csv"),
    ],
)
def test_what_is_read_is_not_written(kvcalc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, read: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rows.csv", "other.csv"):
        (tmp_path / name).write_text(ROWS)
    (tmp_path / "again.csv").hardlink_to(read)
    code, out, err = kvcalc(line)
    target = line.replace("=", " ").split()[-1]
    said = f"kvcalc: {target}: the command reads this file. Write to another file\n"
    assert (code, out, err, (tmp_path / read).read_text()) == (2, "", said, ROWS)
    (tmp_path / "vllm").write_text("old")
    assert "fewer than 12 rows" in kvcalc("calibrate rows.csv --gpu h100 --stack vllm -o vllm").err, "a stack's name is no file"
