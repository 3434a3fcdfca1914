"""Formats of bytes: binary, decimal or exact, in every table and sentence; and the cache compared with the weights."""

import re

import pytest
from conftest import Run

from kvcalc import load_model
from kvcalc.model.memory import size_record
from kvcalc.units import bytes_shown_in, format_bytes

# Llama-2-13B at 4096 tokens: 3,355,443,200 B; its 13,015,864,320 parameters of 2 bytes.
CACHE, WEIGHTS = 3_355_443_200, 26_031_728_640


@pytest.mark.parametrize(
    ("units", "cache", "weights", "meant"),
    [
        ("gib", "3.12 GiB", "24.24 GiB", "1 GiB = 2^30 bytes"),
        ("si", "3.36 GB", "26.03 GB", "1 GB = 10^9 bytes"),
        ("bytes", "3,355,443,200 B", "26,031,728,640 B", "exact bytes;"),
    ],
)
def test_one_option_says_how_bytes_are_written(kvcalc: Run, units: str, cache: str, weights: str, meant: str) -> None:
    out = kvcalc(f"size llama-2-13b --context 4k --units {units} -v").out
    title = " ".join(out.split())
    assert title.startswith(f"llama-2-13b needs {cache} of KV cache for 4,096 tokens, ")
    assert f", and {weights} for weights" in title
    assert meant in out
    assert re.search(rf"^llama-2-13b +{cache} ", out, re.MULTILINE)
    others = {"gib": "iB", "si": "GB", "bytes": ",200 B"}
    assert not any(word in out.replace(meant, "") for name, word in others.items() if name != units)


@pytest.mark.parametrize("line", ["fit llama-2-13b --max-model-len 4k", "compare llama-2-13b --context 4k", "gpus"])
def test_other_tables_follow(kvcalc: Run, line: str) -> None:
    assert re.search(r"\d GB\b", kvcalc(f"{line} --units si").out) and "GiB" not in kvcalc(f"{line} --units si").out
    assert "GiB" in kvcalc(line).out  # and the next command writes as ever
    if line.startswith("fit"):
        assert re.search(r"\d{2},\d{3},\d{3},\d{3} B", kvcalc(f"{line} --units bytes").out)


def test_records_are_exact_whatever_the_units(kvcalc: Run) -> None:
    for units in ("gib", "si", "bytes"):
        (record,) = kvcalc(f"size llama-2-13b --context 4k --format json --units {units}").records
        assert (record["kv_cache_bytes"], record["weight_bytes"]) == (CACHE, WEIGHTS)


@pytest.mark.parametrize(("size", "said"), [(999, "999 B"), (1000, "1.00 kB"), (999_995_000, "1.00 GB"), (2**30, "1.07 GB")])
def test_decimal_bytes(size: int, said: str) -> None:
    with bytes_shown_in("si"):
        assert format_bytes(size) == said
    with bytes_shown_in("bytes"):
        assert format_bytes(size) == f"{size:,} B"
    assert format_bytes(2**30) == "1.00 GiB"


# ---- the cache against the weights


def test_the_cache_as_a_share_of_the_weights(kvcalc: Run) -> None:
    """819,200 bytes per token: 3,355,443,200 ÷ 26,031,728,640 = 12.9 %; 26,031,728,640 ÷ 819,200 = 31,777.01 tokens."""
    (record,) = kvcalc("size llama-2-13b --context 4k --format json").records
    assert record["cache_share_of_weights"] == CACHE / WEIGHTS
    assert record["equal_weights_context"] == 31_778
    assert 31_777 * 819_200 < WEIGHTS <= 31_778 * 819_200
    for line, turn in (("", 31_778), ("--batch-size 10", 3_178), ("--set max_context=32k", 31_778), ("--context 4k,32k", 31_778)):
        assert f"KV cache and weights are equal at {turn:,} tokens" in kvcalc(f"size llama-2-13b {line}").joined
    assert "weights are equal at" not in kvcalc("size llama-2-13b --batch-size 1,10 -v").joined


def test_more_sequences_reach_it_sooner() -> None:
    record = size_record(load_model("llama-2-13b"), 4096, batch_size=8)
    assert record["cache_share_of_weights"] == 8 * CACHE / WEIGHTS
    assert record["equal_weights_context"] == 3_973  # 31,777.01 / 8 = 3972.1
