"""Attention of every variant on the roofline of a GPU, without a model: one layer of 128 heads of 128."""

import re

import pytest
from conftest import Run

from kvcalc import load_gpu
from kvcalc.planning.comparison import POINTS, attention_records

KNEE = 989.0e12 / 3.35e12  # of an H100 SXM in bf16


def at(context: int) -> dict[str, dict[str, object]]:
    return {r["attention"]: r for r in attention_records(load_gpu("h100"), [context], [1])}


def test_flops_and_bytes_by_hand() -> None:
    """Scores and values need 2 · 2 · 128 heads · 128 · S FLOPs. The rows of S tokens have 2 · G · 128 · 2 bytes each, read
    or written. The token's q, k, v and o add their bytes."""
    found = at(32768)
    for name, groups in (("MHA", 128), ("GQA-8", 8), ("GQA-4", 4), ("MQA", 1)):
        assert found[name]["flops"] == 4 * 128 * 128 * 32768
        assert found[name]["bytes"] == 2 * groups * 128 * 2 * (32768 + 1) + 2 * 128 * 128 * 2
    assert found["GQA-8 window 1024"]["flops"] == 4 * 128 * 128 * 1024
    assert found["MLA absorbed"]["flops"] == 2 * 128 * (576 + 512) * 32768
    assert found["MHA prefill"]["flops"] == 4 * 128 * 128 * (32768 * 32769 // 2)


@pytest.mark.parametrize("context", [4096, 131072])
def test_the_bound_turns_at_the_knee(context: int) -> None:
    for name, record in at(context).items():
        intensity, needed = record["intensity"], record["to_knee"]
        assert isinstance(intensity, float) and isinstance(needed, float)
        assert record["knee"] == KNEE and intensity * needed == pytest.approx(KNEE, rel=1e-12)
        assert record["bound"] == ("compute" if intensity > KNEE else "memory"), name


def test_each_gpu_load_and_variant_has_a_record(kvcalc: Run) -> None:
    records = kvcalc("roofline --gpu h100,h200 --context 4k,32k --batch-size 1,8 --format json").records
    assert [(r["batch_size"], r["context"]) for r in records[:4]] == [(1, 4096), (1, 32768), (8, 4096), (8, 32768)]
    assert {r["attention"] for r in records[:4]} == {"MHA"} and len(records) == len(POINTS) * 2 * 2 * 2
    assert kvcalc("roofline --gpu t4 --format json").records[0]["computed_in"] == "fp16"


def test_the_sentence_names_the_smallest_gap(kvcalc: Run) -> None:
    out = kvcalc("roofline --gpu a100,h100").joined  # |log 0.89| of DSA is below |log 0.67| of MLA
    assert "5 of 7 variants of bf16 decode attention are memory-bound on a100-80gb, and DSA top" in out


def test_the_picture_holds_every_variant(kvcalc: Run, tmp_path: object) -> None:
    assert kvcalc(f"roofline --gpu h100,b200 --context 32k --plot {tmp_path}/a.svg").code == 0
    svg = (tmp_path / "a.svg").read_text(encoding="utf-8")  # type: ignore[operator]
    text = " ".join(re.sub(r"<[^>]*>", " ", svg).split())  # labels may break into lines
    assert all(p.label.split()[0] in text for p in POINTS if p.phase == "decode") and "6,360" in text
    assert "ridge point 295.2<" in svg.replace("\n", "")
