"""Without a load, `serve` tries rates up to saturation: the sustained rate, waiting times, and comparisons of servers."""

from pathlib import Path

import pytest
from conftest import Run

LINE = "serve llama-3.1-8b --num-prompts 100 --input-len 400 --output-len 60 --format json"


def test_the_sustained_rate_comes_first_and_then_every_rate_that_was_tried(kvcalc: Run) -> None:
    """Each record equals a separate run at its rate, and the sustained rate is one of the tried rates."""
    first, *tried = kvcalc(LINE).records
    rates = [r["rate"] for r in tried]
    assert rates == sorted(set(rates)) and len(rates) >= 5
    assert first["found_rate"] == first["rate"] < first["capacity_requests_per_s"]
    same = next(r for r in tried if r["rate"] == first["rate"])
    assert same == first | {"found_rate": None}
    assert [r["diverges"] for r in tried] == [r["rate"] > r["capacity_requests_per_s"] for r in tried]
    assert tried[-1]["diverges"] and not first["diverges"]
    for r in (tried[0], same, tried[-1]):
        assert kvcalc(f"{LINE} --rate {r['rate']}").records == [r]


def test_what_is_sustained_does_not_depend_on_the_number_of_requests(kvcalc: Run) -> None:
    found = {kvcalc(f"{LINE} --num-prompts {count}").records[0]["found_rate"] for count in (30, 300)}
    assert len(found) == 1


@pytest.mark.parametrize("goals", ["--slo-ttft 60ms", "--max-ttft 90ms --max-tpot 12ms", "--slo-ttft 1000s"])
def test_find_rate_finds_the_rate_of_the_sweep(kvcalc: Run, goals: str) -> None:
    """99 of 100 requests meet the goals, but not at the next higher rate. Otherwise the server is close to saturation."""
    first, *tried = kvcalc(f"{LINE} {goals}").records
    assert kvcalc(f"{LINE} {goals} --find-rate").records == [first]
    assert first["slo_attainment"] >= 0.99
    above = next(r for r in tried if r["rate"] > first["rate"])
    assert above["slo_attainment"] < 0.99 or first["rate"] == float(f"{0.95 * first['capacity_requests_per_s']:.3g}")
    assert above["rate"] < 1.03 * first["rate"] or "1000s" in goals


def test_goals_that_no_rate_meets(kvcalc: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *tried = kvcalc(f"{LINE} --slo-ttft 1ms").records
    assert (first["found_rate"], first["rate"]) == (0, None)
    assert all(r["slo_attainment"] == 0 for r in tried)
    monkeypatch.setenv("COLUMNS", "80")
    out = kvcalc(f"{LINE} --slo-ttft 1ms --format table -v").out
    assert "misses TTFT within 1 ms" in out and "within SLO  queue" in out and "\n: " not in out


@pytest.mark.slow
@pytest.mark.usefixtures("full_backlog")
def test_each_server_of_a_list_has_its_own_sweep(kvcalc: Run) -> None:
    """Static batches of equal answers saturate slightly later, within the accuracy of the rates. The waiting time decides."""
    line = "serve llama-3.1-8b --policy static,continuous --num-prompts 300 --isl 1000 --osl 200"
    records = kvcalc(f"{line} --format json").records
    static, continuous = (r for r in records if r["found_rate"])
    assert (static["policy"], continuous["policy"]) == ("static", "continuous")
    assert [r["policy"] for r in records] == sorted((r["policy"] for r in records), reverse=True)
    assert 1 < static["found_rate"] / continuous["found_rate"] < 1.1
    assert static["ttft_p50_s"] > 20 * continuous["ttft_p50_s"]
    assert kvcalc(f"{line.replace('static,', '')} --format json").records == records[records.index(continuous) :]


def test_a_load_is_no_sweep(kvcalc: Run, tmp_path: Path) -> None:
    trace, timeline = tmp_path / "trace.csv", tmp_path / "line.csv"
    trace.write_text("arrival_s,input_len,output_len\n0,10,5\n1,10,5\n")
    for load in ("--rate inf", "--rate 3", "--max-concurrency 3", f"--requests {trace}"):
        assert len(kvcalc(f"{LINE} {load}").records) == 1
    assert len(kvcalc(f"{LINE} --timeline {timeline}").records) > 5
    assert timeline.read_text().startswith("rank,start_s,")
