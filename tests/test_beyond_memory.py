"""A batch that does not fit in the memory is marked in every record, table and picture."""

import re
from typing import Any

import pytest
from conftest import Run

from kvcalc.report.charts import drawing
from kvcalc.report.charts.chart import Chart, Series

LINES = {  # sequences and tokens of each
    "latency": ("--batch-size {} --isl {} --osl 1", 1),
    "compare": ("--variants none --batch-size {} --context {}", 0),
    "roofline": ("--batch-size {} --context {}", 0),
    "roofline --phase prefill": ("--batch-size {} --context {}", 0),
}
DEPLOYED = [
    "llama-3.1-8b --gpu h100", "gemma-3-27b --gpu h100 --engine sglang", "qwen3-next-80b-a3b --gpu h200 --tp 2",
    "mixtral-8x7b --gpu a100-80gb --tp 2 --dp 2 --engine none",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("command", LINES)
@pytest.mark.parametrize("deployed", DEPLOYED)
def test_a_batch_is_marked_from_the_first_sequence_that_does_not_fit(kvcalc: Run, command: str, deployed: str) -> None:
    words, more = LINES[command]
    context = 6000
    users = kvcalc(f"fit {deployed} --context {context} --format json").records[0]["max_num_seqs"]
    for count in (1, users, users + 1, 2 * users + 7):
        line = f"{command} {deployed} {words.format(count, context - more)}"
        record = kvcalc(f"{line} --format json").records[-1]
        fitted = kvcalc(f"fit {deployed} --context {context} --users {count} --format json").records[0]
        assert record["fits"] == fitted["fits"] == (count <= users), count
        assert (record["kv_needed_bytes"] > record["kv_budget_bytes"]) == (count > users)
        out = kvcalc(line).out
        message = "No row fits" if command == "compare" else "Does not fit: "
        assert (message in " ".join(out.split())) == (count > users)
        assert bool(re.search(r"^fits no$|\bfits\b", out, re.MULTILINE)) == (count > users and command in ("latency", "compare"))


def drawn(kvcalc: Run, monkeypatch: pytest.MonkeyPatch, line: str) -> list[Chart]:
    pictures: list[list[Chart]] = []
    monkeypatch.setattr(drawing, "save", lambda charts, *_: pictures.append(charts))
    found = kvcalc(f"{line} --plot picture.png")
    assert found.code == 0, found.err
    return pictures[0]


def lines_of(chart: Chart) -> list[Series]:
    return [series for series in chart.series if series.kind in ("line", "dashed")]


@pytest.mark.parametrize("deployed", DEPLOYED)
def test_a_curve_over_the_batch_ends_with_the_memory(kvcalc: Run, monkeypatch: pytest.MonkeyPatch, deployed: str) -> None:
    users = kvcalc(f"fit {deployed} --context 6000 --format json").records[0]["max_num_seqs"]
    for chart in drawn(kvcalc, monkeypatch, f"latency {deployed} --isl 5990 --osl 10 --batch-size 1,256"):
        (curve,) = lines_of(chart)
        assert curve.kind == "line" and curve.xs[-1] == min(users, 256)


def test_speculation_ends_with_the_memory_of_model_and_draft(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "llama-3.1-70b --gpu h200 --tp 2 --draft llama-3.2-1b --num-speculative-tokens 1"
    (gain,) = drawn(kvcalc, monkeypatch, f"latency {line} --isl 16k --osl 10")
    users = kvcalc(f"fit {line} --context 16394 --format json").records[0]["max_num_seqs"]
    assert [s.kind for s in gain.series if s.kind != "limit"] == ["line"]
    (gain,) = drawn(kvcalc, monkeypatch, f"latency {line} --isl 16k --osl 10 --batch-size {users + 1}")
    assert [s.kind for s in gain.series if s.kind != "limit"] == ["dashed"]
    line = "qwen3-next-80b-a3b --gpu h200 --tp 2 --draft qwen3-0.6b"  # a recurrent state for each draft token
    users = kvcalc(f"fit {line} --num-speculative-tokens 8 --context 16394 --format json").records[0]["max_num_seqs"]
    more = f"--isl 16k --osl 10 --batch-size {users + 1} --num-speculative-tokens 1,8"
    (gain,) = drawn(kvcalc, monkeypatch, f"latency {line} {more}")
    assert [s.kind for s in gain.series if s.kind != "limit"] == ["line", "dashed"]


def test_pictures_of_passes_and_variants_name_what_does_not_fit(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (swept,) = drawn(kvcalc, monkeypatch, "roofline llama-3.1-8b --batch-size 1,64 --context 32k")
    assert "beyond the memory: 64 × 32,768 tokens" in swept.subtitle
    compared = drawn(kvcalc, monkeypatch, "compare llama-3.1-8b --variants mha,mqa --batch-size 64 --context 16k")
    step = next(chart for chart in compared if chart.title.startswith("Decode step"))
    assert step.categories == ["mha: does not fit", "mqa"]
    several = drawn(kvcalc, monkeypatch, "compare llama-3.1-8b --variants mha,mqa --gpu h100,h200 --batch-size 64 --context 16k")
    steps = [chart.categories for chart in several if chart.title.startswith("Decode step")]
    assert steps == 2 * [["mha: does not fit", "mqa"]]


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp", "none"])
def test_a_server_stays_within_its_budget(kvcalc: Run, engine: str) -> None:
    """12 requests of 14,000 tokens at the same time, on a GPU that stores fewer of them."""
    line = f"serve llama-3.2-3b --gpu l4 --engine {engine} --num-prompts 12 --rate inf --isl 14000 --osl 40 --max-num-seqs 12"
    record: dict[str, Any] = kvcalc(f"{line} --format json").records[0]
    users = kvcalc(f"fit llama-3.2-3b --gpu l4 --engine {engine} --context 14040 --format json").records[0]["max_num_seqs"]
    assert 0 < record["kv_peak_bytes"] <= record["kv_budget_bytes"]
    assert record["completed"] == 12 and record["mean_batch_size"] <= users < 12
