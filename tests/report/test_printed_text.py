"""Formulas, notes, and records in other formats: every equation is correct and ends in the record's number."""

import csv
import io
import json
import re
from typing import Any

import pytest
from conftest import Run
from printed import holds

from kvcalc.report.charts.fit_plot import memory_chart
from kvcalc.report.export import json_pieces, to_csv

TOTAL = re.compile(r"  (\w+) = Σ × ([\d,]+) = ([\d,]+) \((.+)\)")
ROW = re.compile(
    r"  \w+: (\d+) layers × ([\d,]+) rows(?: \(.*?\))? × ([\d,]+) B(?: \((\d+) (\w+) elements(?: × (\d+) heads)?\))? = ([\d,]+)"
)
BITS = {"bf16": 2, "fp32": 4, "fp8": 1}


def number(text: str) -> int:
    return int(text.replace(",", ""))


def figures_of(text: str) -> dict[str, int]:
    """Return the figures `key = 1,234` at the beginning of lines."""
    found = re.findall(r"^(\w+) = ([\d,]+)(?= \(|;|$)", text, re.MULTILINE)
    return {key: number(value) for key, value in found}


SIZES = [
    "size llama-3.1-8b --batch-size 3 --context 100", "size deepseek-v4-flash --context 17",
    "size qwen3-next-80b-a3b --context 33k --kv-cache-dtype fp8", "size gemma-3-27b --context 32k --block-size 100 --pp 3",
    "size llama-3.1-70b --tp 4 --dp 2 --batch-size 5", "size llama-3.1-70b --tp 16 --context 1k",
    "size deepseek-v3 --tp 8 --dcp 8 --context 100 --batch-size 3",
    "size gpt-oss-120b --tp 16 --dcp 2 --context 999 --block-size 64", "size zamba2-7b --context 4096",
]  # fmt: skip


@pytest.mark.parametrize("line", SIZES)
def test_the_sums_of_a_size_add_up_to_its_record(kvcalc: Run, line: str) -> None:
    (record,) = kvcalc(f"{line} --format json").records
    text = kvcalc(f"{line} --explain").out
    waiting, seen = 0, []
    for row in text.splitlines():
        if match := ROW.fullmatch(row):
            layers, rows, each, width, dtype, heads, total = match.groups()
            assert number(layers) * number(rows) * number(each) == number(total)
            if dtype in BITS:
                assert number(each) == int(width) * BITS[dtype] * int(heads or 1)
            waiting += number(total)
        elif match := TOTAL.fullmatch(row):
            key, sequences, total, shown = match.groups()
            assert waiting * number(sequences) == number(total) == record[key], row
            assert holds(shown, record[key], "bytes")
            waiting, seen = 0, [*seen, key]
        else:
            assert "layers ×" not in row, row
    assert seen == ["kv_cache_bytes", "kv_cache_read_bytes", "kv_cache_allocated_bytes"]
    assert figures_of(text).items() <= record.items()
    assert {"bytes_per_token", "fixed_bytes", "parameters", "weight_bytes"} <= figures_of(text).keys()
    assert f"mha_ratio = {record['mha_ratio']:,.6g} " in text


FITS = [
    "fit gemma-3-27b --engine vllm --tp 2 --kv-offloading-bytes 100GiB --max-model-len 32k",
    "fit llama-3.1-8b --gpu l40s --max-num-seqs 3",
    "fit deepseek-v2-lite --engine llama.cpp --max-model-len 5000",
    "fit llama-3.1-8b --engine sglang --max-model-len 8k --activation-bytes 1GiB --overhead-bytes 0",
]


@pytest.mark.parametrize("line", FITS)
def test_the_sums_of_a_fit_add_up_to_its_record(kvcalc: Run, line: str) -> None:
    (record,) = kvcalc(f"{line} --format json").records
    text = kvcalc(f"{line} --explain").out
    differences = re.findall(r"^   ((?:[\d,]+ − )+[\d,]+) = ([\d,]+) B", text, re.MULTILINE)
    assert len(differences) == 1
    first, *less = map(number, differences[0][0].split(" − "))
    assert first == record["share_bytes"]
    assert first - sum(less) == number(differences[0][1]) == record["kv_budget_bytes"]
    assert less[0] == record["weight_bytes"]
    assert less[1:] in ([], [record["activation_bytes"], record["overhead_bytes"]])
    for left, right, quotient in re.findall(r"= ([\d,]+) B / ([\d,]+) B = ([\d,]+)", text):
        assert number(left) // number(right) == number(quotient) == record["num_blocks"]
    for count, each, total in re.findall(r"pages (\d+) × ([\d,]+) = ([\d,]+) B", text):
        assert number(count) * number(each) == number(total)
    needs = re.findall(r"([\d,]+) sequences? of [\d,]+ tokens needs? ([\d,]+) B, (within|over) ([\d,]+) B", text)
    assert [(word, number(need) <= number(pool)) for _, need, word, pool in needs] == [("within", True), ("over", False)]
    assert [number(n) for n, *_ in needs] == [record["max_num_seqs"], record["max_num_seqs"] + 1]
    assert f"max_concurrency = {record['max_concurrency']:,.6g}; kv_tokens = {record['kv_tokens']:,}" in text
    for exact, shown in re.findall(r"([\d,]+) B \(([\d.,]+ [KMGT]iB)\)", text):
        assert holds(shown, number(exact), "bytes")


@pytest.mark.parametrize(
    "line", ["size gpt2 gemma-3-27b --context 1k,2k", "fit gemma-3-27b --engine vllm", "gpus", "models --family gemma"]
)
def test_csv_holds_the_records_of_json(kvcalc: Run, line: str) -> None:
    records = kvcalc(f"{line} --format json").records

    def as_text(value: Any) -> str:
        return "" if value is None else json.dumps(value, ensure_ascii=False) if isinstance(value, list) else str(value)

    expected = [{key: as_text(value) for key, value in r.items()} for r in records]
    assert list(csv.DictReader(io.StringIO(kvcalc(f"{line} --format csv").out))) == expected


def test_records_that_no_format_may_break() -> None:
    """NaN and infinity, commas, quotes, bars and letters of any script, and a key that only the second record has."""
    records = [{"a": float("nan"), "b": 'x, "y" | z'}, {"a": 2**70, "b": "é", "c": [{"d": 1}]}]
    assert json.loads("".join(json_pieces(records))) == [{"a": None, "b": 'x, "y" | z'}, {"a": 2**70, "b": "é", "c": [{"d": 1}]}]
    assert list(csv.reader(io.StringIO(to_csv(records)))) == [
        ["a", "b", "c"], ["", 'x, "y" | z', ""], [str(2**70), "é", '[{"d": 1}]'],
    ]  # fmt: skip
    assert json.loads("".join(json_pieces([{"a": float("inf")}]))) == [{"a": None}]
    assert (list(json_pieces([])), "".join(json_pieces([{"a": 1}]))) == (["[]\n"], '[\n{"a": 1}\n]\n')


def budget(**more: Any) -> dict[str, Any]:
    """Return the part of a `fit` record that its bar needs: 100 bytes of memory."""
    plain = {
        "gpus": 1,
        "gpu": "toy",
        "dtype": "bf16",
        "kv_cache_dtype": "bf16",
        "model": "m",
        "engine": "none",
        "memory_bytes": 100,
    }
    parts = {"weight_bytes": 50, "activation_bytes": 5, "overhead_bytes": 3, "kv_budget_bytes": 30}
    asked = {"gpu_memory_utilization": 0.9, "utilization_of": "total", "requested_num_seqs": 1, "requested_model_len": 10}
    return plain | parts | asked | {"max_num_batched_tokens": 8, "weights_fit": True, "max_num_seqs": 3} | more


def test_the_bar_of_a_fit_is_its_record_and_what_is_left() -> None:
    chart = memory_chart([budget(), budget(gpus=2, kv_budget_bytes=42), budget(weight_bytes=200, memory_bytes=90)])
    bars = {s.label: s.ys for s in chart.series if s.kind == "bar"}
    assert bars == {
        "weights": [50, 50, 200], "activations": [5, 5, 5], "overhead": [3, 3, 3], "KV cache": [30, 42, 30],
        "unused": [12, 0, 0],  # nothing is unused of a memory that is full or exceeded
    }  # fmt: skip
    assert not [s for s in chart.series if s.kind == "limit"]  # of two sizes of memory, each is said where its bar ends
