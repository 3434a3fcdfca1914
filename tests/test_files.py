"""Errors in input files are reported in one line that names the file, the line and the key."""

import json
import os
import time
from pathlib import Path

import pytest
from conftest import Run

from kvcalc import cache_size, load_model
from kvcalc.library.files import MAX_DEPTH, parse_yaml, scalar

GOOD = """\
name: mine
hidden_size: 64
vocab_size: 1000
layers: 2
kinds:
  full:
    parts:
    - {type: grouped, num_attention_heads: 8, num_key_value_heads: 2, head_dim: 16}
    - {type: dense, intermediate_size: 128}
"""
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1000, "intermediate_size": 128,
}  # fmt: skip


def refused(kvcalc: Run, path: Path) -> str:
    """Return the one line on stderr for this file. The command takes seconds, has status 2 and prints nothing on stdout."""
    started = time.monotonic()
    code, out, err = kvcalc("size", str(path))
    assert time.monotonic() - started < 5
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert err.startswith("kvcalc: ")
    assert path.name in err
    assert "Traceback" not in err
    assert err.rstrip("\n").isprintable()
    return err


def test_a_good_file_is_read(tmp_path: Path, kvcalc: Run) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert cache_size(load_model(str(path)), 10).stored == 2 * 10 * 2 * 2 * 16 * 2
    assert (
        kvcalc("size", str(path), "--context", "10", "--format", "json").records[0]["kv_cache_bytes"] == 2 * 10 * 2 * 2 * 16 * 2
    )


# what replaces what in GOOD; the line that the error names; what it says
BAD = {
    "wrong type": ("head_dim: 16", "head_dim: wide", 8, "kinds.full.parts.0.head_dim: Expected 'int', got 'str'"),
    "zero": ("num_key_value_heads: 2", "num_key_value_heads: 0", 8, "num_key_value_heads: Expected 'int' >= 1"),
    "negative": ("hidden_size: 64", "hidden_size: -64", 2, "hidden_size: Expected 'int' >= 1"),
    "fraction": ("hidden_size: 64", "hidden_size: 64.5", 2, "hidden_size: Expected 'int', got 'float'"),
    "huge": ("hidden_size: 64", "hidden_size: 64000000000000000000000", 2, "hidden_size: Expected 'int' <= 100000000"),
    "NaN": ("hidden_size: 64", "hidden_size: .nan", 2, "hidden_size: Expected 'int', got 'str'"),
    "infinity": ("hidden_size: 64", "hidden_size: 1e999", 2, "'1e999' is not a usable number"),
    "5000 digits": ("hidden_size: 64", "hidden_size: " + "9" * 5000, 2, "is not a usable number"),
    "null": ("hidden_size: 64", "hidden_size:", 2, "hidden_size: Expected 'int', got 'null'"),
    "yes is no boolean": ("layers: 2", "layers: 2\ntie_word_embeddings: yes", 5, "tie_word_embeddings: Expected 'bool'"),
    "unknown key": ("hidden_size: 64", "hiden_size: 64", 2, "unknown key 'hiden_size'. Did you mean hidden_size"),
    "unknown key of a part": ("head_dim: 16", "head_dimm: 16", 8, "unknown key 'head_dimm'. Did you mean head_dim"),
    "missing key of a part": (", head_dim: 16", "", 8, "kinds.full.parts.0: is missing the key 'head_dim'"),
    "unknown type": ("type: grouped", "type: groupd", 8, "Invalid value 'groupd'. Did you mean grouped?"),
    "no type": ("type: grouped, ", "", 8, "is missing the key 'type'"),
    "heads": ("num_attention_heads: 8", "num_attention_heads: 9", 6, "num_attention_heads 9 is not a multiple of"),
    "duplicate key": ("layers: 2", "layers: 2\nhidden_size: 3", 5, "key 'hidden_size' occurs twice"),
    "unhashable key": ("layers: 2", "layers: 2\n? [a, b]\n: 3", 5, "a key must be a single word or number"),
    "mapping as key": ("layers: 2", "layers: 2\n? {a: b}\n: 3", 5, "a key must be a single word or number"),
    "alias": ("layers: 2", "layers: &n 2\nmax_context: *n", 4, "has an alias"),
    "open bracket": ("kinds:", "kinds: [", 7, "is not YAML"),
    "tab": ("layers: 2", "layers: 2\n\tx: 3", 5, "is not YAML"),
    "second document": ("layers: 2", "layers: 2\n---\nlayers: 2", 6, "holds a second document"),
    "terminal escape": ("name: mine", 'name: "\\e[31mred"', 1, "name: is empty, or has characters that a terminal"),
    "escape in a kind": ("  full:", '  "\\e[31mred":', 5, "does not print"),
    "dot in a kind": ("  full:", "  full.v2:", 5, "'full.v2' has a dot, which separates a kind"),
    "unknown kind": ("layers: 2", "layers: 2\npattern: [2 ful]", 5, "names an unknown kind 'ful' (kinds: full)"),
    "unknown kind of MTP": ("layers: 2", "layers: 2\nmtp: {kind: ful, layers: 1}", 5, "mtp.kind: names an unknown kind 'ful'"),
    "pattern count": ("layers: 2", "layers: 2\npattern: [-2 full]", 5, "item '-2 full' should read like '5 full'"),
    "unknown key of a layer": ("    parts:", "    part:", 7, "unknown key 'part'. Did you mean parts"),
    "key of another part": ("{type: dense, ", "{type: dense, sliding_window: 8, ", 9, "Known: bias, down_bias, gated, input"),
    "three dots for a key": ("kinds:", "tables: {...: x}\nkinds:", 5, "line 5: tables....: Expected 'array', got 'str'"),
    "no kinds": ("kinds:", "kinds: {}\nother:", 6, "unknown key 'other'"),
    "cache dtype": ("layers: 2", "layers: 2\nkv_cache_dtype: fp7", 5, "unknown KV-cache dtype 'fp7'. Did you mean fp8"),
    "enumeration": ("layers: 2", "layers: 2\ndtype: fp13", 5, "dtype: Invalid enum value 'fp13'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_yaml_is_refused_with_its_line(kvcalc: Run, tmp_path: Path, case: str) -> None:
    old, new, line, said = BAD[case]
    assert GOOD.count(old) == 1
    path = tmp_path / "bad.yaml"
    path.write_text(GOOD.replace(old, new))
    message = refused(kvcalc, path)
    assert f"bad.yaml, line {line}: " in message
    assert said in message


def test_missing_key_of_a_model_has_no_line(kvcalc: Run, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(GOOD.replace("hidden_size: 64\n", "").replace("name: ", "family: "))
    assert "bad.yaml: is missing the keys 'name', 'hidden_size'" in refused(kvcalc, path)


RAW = {
    "empty.yaml": (b"", "holds no mapping"),
    "list.yaml": (b"- a\n", "holds no mapping"),
    "bomb.yaml": (b"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]\n", "line 1: has an alias"),
    "deep.yaml": (b"a: " + b"[" * 5000 + b"]" * 5000, f"line 1: nests deeper than {MAX_DEPTH} levels"),
    "open.yaml": (b"[" * 5000, f"nests deeper than {MAX_DEPTH} levels"),
    "braces.yaml": (b"a: " + b"{a: " * 5000 + b"}" * 5000, f"nests deeper than {MAX_DEPTH} levels"),
    "latin.yaml": (b"name: caf\xe9", "is not UTF-8 text (byte 9)"),
    "utf16.yaml": (GOOD.encode("utf-16"), "is not UTF-8 text (byte 0)"),
    "zero.yaml": (b"name: a\x00b", "is not YAML"),
    "escape.yaml": (b"name: \x1b[31mred", "is not YAML"),
    "object.yaml": (b"!!python/object/apply:os.system [ls]", "holds no mapping"),
    "objects.json": (b'{"a":' * 5000 + b"1" + b"}" * 5000, "nests deeper than 32 levels"),
    "empty.json": (b"", "is not JSON"),
    "list.json": (b"[]", "contains no mapping"),
    "latin.json": (b'{"name": "caf\xe9"}', "is not UTF-8 text (byte 13)"),
    "digits.json": (json.dumps(CONFIG).replace("64", "9" * 5000).encode(), "is not JSON"),
}


@pytest.mark.parametrize("name", RAW)
def test_bad_bytes_are_refused(kvcalc: Run, tmp_path: Path, name: str) -> None:
    content, said = RAW[name]
    path = tmp_path / name
    path.write_bytes(content)
    assert said in refused(kvcalc, path)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 0, 1.5, 10**40, "64", [64], True, {"a": 1}], ids=str)
def test_bad_config_json_names_the_key(kvcalc: Run, tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG | {key: value}))
    assert key in refused(kvcalc, path)


def test_config_json_of_a_skeleton(kvcalc: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in CONFIG.items() if k != "hidden_size"}))
    assert "gives no hidden_size" in refused(kvcalc, path)


@pytest.mark.parametrize("name", ["big.yaml", "big.json"])
def test_sixty_megabytes_are_not_read(kvcalc: Run, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(60 << 20)
    assert "62,914,560 bytes" in refused(kvcalc, path)


def test_folders(kvcalc: Run, tmp_path: Path) -> None:
    for name, said in [("folder.yaml", "is a folder"), ("folder", "config.json: cannot be read: no such file")]:
        (tmp_path / name).mkdir()
        assert said in refused(kvcalc, tmp_path / name)
    (tmp_path / "folder" / "config.json").write_text(json.dumps(CONFIG))
    assert kvcalc("size", str(tmp_path / "folder"), "--format", "json").records[0]["model"] == "folder"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("name", ["pipe.yaml", "pipe.json"])
def test_named_pipes_are_not_waited_for(kvcalc: Run, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert "is not a regular file" in refused(kvcalc, tmp_path / name)


def test_missing_files_and_unusable_paths(kvcalc: Run, tmp_path: Path) -> None:
    assert "no such file" in refused(kvcalc, tmp_path / "none.yaml")
    assert "file name too long" in kvcalc("size", "x" * 5000 + ".yaml").err
    assert kvcalc("size", "a\x00b.yaml").code == 2


def test_scalars_follow_yaml_1_2() -> None:
    found = {
        text: scalar(text)
        for text in ("989e12", "3.35e12", "1_000", "-3", "+.5", "no", "on", "0x10", "0o7", "12:30", "~", "True")
    }
    assert found == {
        "989e12": 989e12, "3.35e12": 3.35e12, "1_000": 1000, "-3": -3, "+.5": 0.5, "no": "no", "on": "on",
        "0x10": "0x10", "0o7": "0o7", "12:30": "12:30", "~": None, "True": True,
    }  # fmt: skip
    assert all(type(found[t]) is type(v) for t, v in {"989e12": 1, "1_000": 1, "True": True}.items())  # 64e9 bytes


def test_quoted_numbers_stay_text() -> None:
    assert parse_yaml("a: '1'\nb: \"2\"\nc: 3\n", "x")[0] == {"a": "1", "b": "2", "c": 3}


def test_lines_of_keys() -> None:
    data, lines = parse_yaml("a: 1\nb:\n  - x\n  - {c: 2}\n", "x")
    assert data == {"a": 1, "b": ["x", {"c": 2}]}
    assert lines == {(): 1, ("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 1): 4, ("b", 1, "c"): 4}


def test_a_preset_comes_before_what_lies_here_under_its_name(
    kvcalc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with a config.json is an exception. `./gpt2` always means the local file."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "h100").mkdir()
    (tmp_path / "llama-7b").write_text("a file of something else")
    for name in ("gpt2", "llama-7b"):
        code, out, err = kvcalc(f"size {name} --context 16 --format csv")
        assert (code, err) == (0, f"note: {name}: the preset; write ./{name} for the file here\n")
        assert out.splitlines()[1].startswith(f"{name},")
        code, out, err = kvcalc(f"size ./{name}")
        assert (code, out) == (2, "")
        assert err.startswith(f"kvcalc: {name}")
    assert kvcalc("gpus h100").out == kvcalc("gpus H100").out != ""
    assert kvcalc("models gpt2").out == kvcalc("models GPT-2").out != ""
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(CONFIG))
    code, out, err = kvcalc("size gpt2 --context 10 --format csv")
    assert "note: gpt2: read from the folder of that name, which comes before the preset\n" in err
    assert f",{2 * 10 * 2 * 2 * 16 * 2}," in out


def test_a_cache_dtype_that_a_preset_declares(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for declared, each in (("fp8_e4m3", 1), ("auto", 2)):
        path.write_text(f"{GOOD}kv_cache_dtype: {declared}\n")
        assert cache_size(load_model(str(path)), 10).stored == 2 * 10 * 2 * 2 * 16 * each


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may look everywhere")
def test_a_folder_that_may_not_be_entered(kvcalc: Run, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    assert "permission denied" in refused(kvcalc, tmp_path / "closed" / "mine.yaml")
    assert "permission denied" in refused(kvcalc, tmp_path / "closed" / "mine")
