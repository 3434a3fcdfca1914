"""`kvcalc measure` on the command line: records, files, and one sentence for requests that are impossible."""

import builtins
import csv
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from twins import torch

from kvcalc.measure import ceilings, run

QUICK = "measure --device cpu --threads 1 --seconds 0.001 --context 40 --batch-size 2"
KEYS = {
    "variant", "phase", "batch_size", "context", "predicted_s", "bound_s", "measured_s", "ratio", "predicted_bytes",
    "allocated_bytes", "allocator_bytes", "bandwidth_bytes_per_s", "flops_per_s",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small_and_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    flops = dict.fromkeys(("fp64", "fp32", "bf16", "fp16"), 100000000000.0)
    found = ceilings.Ceilings(10e9, 20e9, flops, 1e-6)
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda *_: found)
    monkeypatch.setitem(run.HEADS, "cpu", 2)  # narrow layers
    monkeypatch.setattr(ceilings, "_cache_bytes", lambda: 1 << 20)  # few copies to rotate over


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_one_record_for_each_layer_and_phase(kvcalc: Run) -> None:
    records = kvcalc(f"{QUICK} --format json").records
    names = ["mha", "gqa", "mqa", "mla", "dsa", "window", "cla", "recurrent"]
    assert [(r["variant"], r["phase"]) for r in records] == [(n, p) for n in names for p in ("decode", "prefill")]
    for record in records:
        assert record.keys() >= KEYS
        assert record["predicted_bytes"] == record["allocated_bytes"] <= record["allocator_bytes"]
        assert (record["batch_size"], record["context"]) == (2, 40)


def test_a_table_ends_with_its_assumptions(kvcalc: Run) -> None:
    found = kvcalc(f"{QUICK} --variant mha,mla -v")
    assert found.code == 0
    assert "ceilings of this machine" in found.out
    assert re.match(
        r"Decode attention takes [\d.]+× its prediction, prefill attention takes [\d.]+× its prediction, the median",
        " ".join(found.out.split()),
    )
    assert "predicted = in the tensors' storage in every row" in found.out
    assert f"torch {torch.__version__.partition('+')[0]}" in found.joined


def test_a_model_s_own_layers_and_others_in_their_place(kvcalc: Run) -> None:
    line = "measure gpt2 --device cpu --threads 1 --seconds 0.001 --context 16 --phase decode --format json"
    assert [r["attention"] for r in kvcalc(line).records] == ["MHA"]
    assert [r["attention"] for r in kvcalc(line + " --variant gqa:4 --variant window:8").records] == ["GQA-4", "MHA window 8"]


def test_files(kvcalc: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCALC_PRESETS", str(tmp_path))
    rows, plot = tmp_path / "rows.csv", tmp_path / "points.svg"
    found = kvcalc(f"{QUICK} --variant mha,recurrent --output {rows} --plot {plot} --save-gpu mine --format json")
    assert len(found.records) == 4
    with rows.open(newline="") as file:
        assert [r["op"] for r in csv.DictReader(file)] == ["decode_attention", "prefill_attention"]
    assert "measured ceilings" in plot.read_text(encoding="utf-8")
    assert kvcalc("gpus mine --format json").code == 0
    assert kvcalc(f"{QUICK} --variant mha --save-gpu mine").code == 2


def test_generation(kvcalc: Run, tmp_path: Path) -> None:
    plot = tmp_path / "curve.svg"
    line = "measure gpt2 --set layers=1 --set vocab_size=100 --device cpu --threads 1 --generate 6 --prompt-len 4"
    found = kvcalc(f"{line} --plot {plot} --format json")
    assert [r["mode"] for r in found.records] == ["cached", "uncached", "uncached"]
    assert all(r["same_tokens"] and r["tokens_per_s"] > 0 for r in found.records)
    assert "time per token" in plot.read_text(encoding="utf-8")
    assert [r["head"] for r in found.records] == ["last", "last", "all"]
    assert re.match(r"gpt2 makes 6 tokens in .*s with the cache and .*s without, .*× faster, predicted .*×", kvcalc(line).out)


def test_generation_takes_variants_and_lists(kvcalc: Run) -> None:
    line = "measure gpt2 --set layers=2 --set vocab_size=100 --device cpu --threads 1 --generate 3 --prompt-len 4,6"
    records = kvcalc(f"{line} --variant mqa --variant window:3 --batch-size 2 --format json").records
    assert [(r["variant"], r["prompt_len"]) for r in records[::3]] == [(v, p) for v in ("mqa", "window:3") for p in (4, 6)]
    assert all(r["predicted_bytes"] == r["allocated_bytes"] and r["same_tokens"] for r in records)
    assert [r["attention"] for r in records][:1] == ["MQA"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--device cuda", "no CUDA GPU"),
        ("--device tpu", "unknown device"),
        ("--phase both,decode", "unknown phase"),
        ("--variant mah", "unknown variant"),
        ("--variant mha --context 0", "outside"),
        ("--variant mha --context 1T", "not a whole number"),
        ("--variant mha --context 100G --batch-size 1000", "no case fits"),
        ("--dtype int4", "does not compute"),
        ("--threads 60000", "far more"),
        ("--seconds nan", "nan"),
        ("--output rows.txt", "should end in .csv"),
        ("--output /no/such/folder/rows.csv", "no such folder"),
        ("--plot picture.gif", "should end in"),
        ("--style neon --plot x.svg", "unknown style"),
        ("--save-gpu h100", "already"),
        ("--generate 5 --output rows.csv", "measures none"),
        ("--generate 2000", "positions"),
        ("--generate 5 --variant mah", "unknown variant"),
        ("--generate 5 --context 4k", "Use --prompt-len"),
        ("nemotron-h-8b --generate 5", "no Mamba-2 layer"),
        ("nemotron-h-8b", "no Mamba-2 layer"),
        ("nosuchmodel", "unknown model"),
    ],
)
def test_one_sentence_for_what_cannot_be_done(kvcalc: Run, monkeypatch: pytest.MonkeyPatch, options: str, message: str) -> None:
    monkeypatch.setattr(run, "measure", None)  # the command refuses before it measures
    if "cuda" in options and torch.cuda.is_available():
        return
    found = kvcalc(f"measure --seconds 0.001 {options}" if "seconds" not in options else f"measure {options}")
    assert found.code == 2
    assert message in found.err
    assert "Traceback" not in found.err
    assert found.out == ""


def test_without_torch_one_sentence_names_the_extra(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("kvcalc.measure.find_spec", lambda name: None if name == "torch" else real(name))

    def refuse(name: str, *args: Any, **more: Any) -> Any:
        assert name != "torch", "torch was imported"
        return imported(name, *args, **more)

    imported = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    found = kvcalc("measure")
    assert found.code == 2
    assert found.err.strip().splitlines() == [
        "kvcalc: `kvcalc measure` runs torch, which is not installed. Run pip install 'kvcalc[measure]'"
    ]


def test_an_interruption_keeps_what_was_measured(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = run.measure, []

    def twice(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(run, "measure", twice)
    found = kvcalc(f"{QUICK} --format json")
    assert found.code == 130
    assert found.out.count('"variant"') == 2
    assert "2 records were measured and are kept" in found.err
