"""Printed output of the commands: formats, `--set`, explanations and notes, in pipes and on narrow terminals."""

import json
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import Run

import kvcalc as package

KEYS = [
    "model", "attention", "context", "batch_size", "kv_cache_dtype", "kv_cache_bytes", "kv_cache_read_bytes",
    "kv_cache_allocated_bytes", "bytes_per_token", "fixed_bytes", "mha_ratio", "parameters", "active_parameters", "weight_bytes",
]  # fmt: skip


def test_version(kvcalc: Run) -> None:
    assert kvcalc("--version") == (0, f"kvcalc {package.__version__}\n", "")


def test_json_is_one_array_of_flat_records_in_order(kvcalc: Run) -> None:
    records = kvcalc("size gpt2 llama-7b --context 1k,2k --batch-size 1,2 --format json").records
    assert [(r["model"], r["batch_size"], r["context"]) for r in records] == [
        (m, b, s) for m in ("gpt2", "llama-7b") for b in (1, 2) for s in (1024, 2048)
    ]  # fmt: skip
    for record in records:
        assert set(KEYS) <= set(record)
        assert not any(isinstance(v, list | dict) for v in record.values())
        assert all(isinstance(v, int) for k, v in record.items() if k.endswith(("_bytes", "parameters")))


def test_markdown_is_the_table(kvcalc: Run) -> None:
    """It has the title, columns, cells and notes of the table."""
    for line in ("size llama-7b deepseek-v3 --context 4k,8k", "compare gpt2 --gpu l40s", "size gpt2 llama-7b --wide"):
        table, shown = kvcalc(line), kvcalc(f"{line} --format markdown").out
        rows = [row.strip("| ").split(" | ") for row in shown.splitlines() if row.startswith("| ")]
        assert set(rows[1]) == {"---:", "---"}
        plain = [re.split(r"\s{2,}", row.strip()) for row in table.out.splitlines()]
        start = next(at for at, cells in enumerate(plain) if cells == rows[0])
        assert plain[start + 1 : start + len(rows) - 1] == rows[2:]
        title, *_, last = (text.strip("* ") for text in shown.splitlines() if text.strip())
        assert table.joined.startswith(title + " ") and table.joined.endswith(last)


SETS = [
    ("--set layers=24", "llama-3.1-8b", 2 * 24 * 8 * 128 * 2 * 4096),
    ("--set num_key_value_heads=32", "llama-3.1-8b", 2 * 32 * 32 * 128 * 2 * 4096),
    ("--set full.num_key_value_heads=1", "llama-3.1-8b", 2 * 32 * 1 * 128 * 2 * 4096),
    ("--set sliding_window=1k", "llama-3.1-8b", 2 * 32 * 8 * 128 * 2 * 1024),
    ("--set sliding_window=1k --set layers=1", "llama-3.1-8b", 2 * 1 * 8 * 128 * 2 * 1024),
    ("--set sliding_window=null", "mistral-7b-v0.1", 2 * 32 * 8 * 128 * 2 * 8192),
    ("--set local.sliding_window=null", "gemma-3-27b", 2 * 62 * 16 * 128 * 2 * 8192),
    ("--set full.sliding_window=2k", "gemma-3-27b", 2 * 16 * 128 * 2 * (52 * 1024 + 10 * 2048)),
    ("--set kv_lora_rank=256", "deepseek-v3", 61 * (256 + 64) * 2 * 4096),
    ("--set shares_cache=true", "llama-3.1-8b", 0),
]


@pytest.mark.parametrize(("changes", "model", "worked"), SETS)
def test_set(kvcalc: Run, changes: str, model: str, worked: int) -> None:
    context = "8k" if model in ("mistral-7b-v0.1", "gemma-3-27b") else "4k"
    assert kvcalc(f"size {model} {changes} --context {context} --format json").records[0]["kv_cache_bytes"] == worked


def test_explain_puts_the_numbers_into_every_formula(kvcalc: Run) -> None:
    for line in (
        "llama-3.1-8b --context 100 --batch-size 3",
        "gemma-3-27b --context 4k",
        "deepseek-v3.2 --context 8k",
        "deepseek-v3 --tp 8",
    ):
        text = kvcalc(f"size {line} --explain").out
        (record,) = kvcalc(f"size {line} --format json").records
        for name in (
            "kv_cache_bytes",
            "kv_cache_read_bytes",
            "kv_cache_allocated_bytes",
            "bytes_per_token",
            "fixed_bytes",
            "weight_bytes",
        ):
            assert re.search(rf"\b{name} = .*\b{record[name]:,}\b", text), name
        assert f"{record['parameters']:,}" in text
        sums = re.findall(r"([\d,]+) layers × ([\d,]+) rows .*?× ([\d,]+) B.* = ([\d,]+)$", text, re.MULTILINE)
        assert sums
        for numbers in sums:
            layers, rows, row_bytes, total = (int(n.replace(",", "")) for n in numbers)
            assert layers * rows * row_bytes == total
        stored = text.partition("Stored")[2].partition("Read by")[0]
        each = [int(n.replace(",", "")) for n in re.findall(r"layers ×.* = ([\d,]+)$", stored, re.MULTILINE)]
        assert sum(each) * record["batch_size"] == record["kv_cache_bytes"]


def test_user_presets_come_before_ours(kvcalc: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "kvcalc"]
    for folder, layers in zip(folders, (3, 5), strict=True):
        (folder / "models").mkdir(parents=True)
        text = (
            f"name: gpt2\naliases: [tiny-{layers}]\nhidden_size: 64\nvocab_size: 100\nlayers: {layers}\n"
            "kinds: {full: {parts: [{type: grouped, num_attention_heads: 1, num_key_value_heads: 1, head_dim: 64}]}}\n"
        )
        (folder / "models" / "gpt2.yaml").write_text(text)
    ours = kvcalc("size gpt2 --format json").records[0]["kv_cache_bytes"]
    monkeypatch.setenv("KVCALC_PRESETS", os.pathsep.join(map(str, folders)))
    assert kvcalc("size GPT_2 --format json").records[0]["kv_cache_bytes"] == 3 * 2 * 64 * 2 * 4096 != ours
    assert kvcalc("size tiny-3 --format json").records[0]["model"] == "gpt2"
    assert kvcalc("size gpt2-xl --format json").code == 0
    monkeypatch.delenv("KVCALC_PRESETS")
    if sys.platform.startswith("linux"):
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
        assert kvcalc("size gpt2 --format json").records[0]["kv_cache_bytes"] == 5 * 2 * 64 * 2 * 4096


def test_import_writes_a_preset_that_reads_back(kvcalc: Run, tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 128, "dtype": "bfloat16"}))
    (tmp_path / "again.yaml").write_text(kvcalc("models --import", str(tmp_path)).out)
    one, two = kvcalc("size", str(tmp_path), str(tmp_path / "again.yaml"), "--format", "json").records
    assert one | {"model": ""} == two | {"model": ""}


def command(*words: str, **environment: str) -> list[str]:
    return ["env", *(f"{k}={v}" for k, v in environment.items()), sys.executable, "-m", "kvcalc", *words]


def test_reader_that_leaves_early_ends_it_quietly() -> None:
    batches = ",".join(map(str, range(1, 1500)))  # far more than a pipe holds
    for form in ("table", "json", "csv", "markdown"):
        words = command("size", "gpt2", "--context", "64", "--batch-size", batches, "--format", form)
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout and process.stderr
            process.stdout.read(10)
            process.stdout.close()
            assert (process.stderr.read(), process.wait(30)) == (b"", 0), form


def piped(**environment: str) -> str:
    words = command("size", "llama-3.1-8b", "gemma-3-27b", TERM="xterm-256color", **environment)
    return subprocess.run(words, capture_output=True, check=True, text=True).stdout


def test_a_pipe_gets_plain_text_of_a_hundred_characters() -> None:
    head = next(line for line in piped().splitlines() if line.startswith("model  "))
    assert "\x1b" not in piped() and 60 < len(head) <= 100


def test_columns_and_colours_of_a_pipe_follow_the_environment() -> None:
    assert max(map(len, piped(COLUMNS="60").splitlines())) <= 60
    assert "\x1b[1m" in piped(FORCE_COLOR="1")
    assert "\x1b[3" not in piped(FORCE_COLOR="1", NO_COLOR="1")


def terminal(columns: int, *words: str, **environment: str) -> str:
    """Return the output on a terminal with this number of columns."""
    pty = pytest.importorskip("pty")
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command(*words, COLUMNS=str(columns), TERM="xterm-256color", **environment),
        stdout=follower,
        stderr=follower,
        stdin=follower,
    )
    os.close(follower)
    shown, until = b"", time.monotonic() + 30
    while time.monotonic() < until:
        if select.select([leader], [], [], 0.1)[0]:
            try:
                chunk = os.read(leader, 65536)
            except OSError:  # how Linux says that the other end has closed
                break
            shown += chunk
            if not chunk:
                break
    os.close(leader)
    assert process.wait(30) == 0
    return shown.decode().replace("\r\n", "\n")


def test_forty_columns_stay_readable() -> None:
    shown = terminal(40, "size", "llama-3.1-8b", "deepseek-v3.2", "--context", "128k", NO_COLOR="1")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    lines = plain.splitlines()
    assert max(map(len, lines)) <= 40
    assert ["llama-3.1-8b", "16.00 GiB", "16.00 GiB"] in [re.split(r"\s{2,}", line) for line in lines]
    assert not [line for line in lines if line.startswith("model: ")]
