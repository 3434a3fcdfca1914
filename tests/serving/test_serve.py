"""`kvcalc serve`: keys, files, errors, and equal output for an equal seed."""

import csv
import io
from pathlib import Path

import pytest
from conftest import Run

KEYS = {
    "throughput_tokens_per_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tpot_p50_s", "tpot_p90_s", "tpot_p99_s",
    "padding_waste", "kv_waste", "kv_peak", "preemptions", "cost_per_million_tokens", "queueing_mean_s", "diverges", "basis",
    "completed", "rejected", "goodput_requests_per_s", "model", "gpu", "policy", "cache",
}  # fmt: skip
LINE = "serve llama-3.1-8b --num-prompts 40 --input-len 200 --output-len 20"


@pytest.mark.parametrize("policy", ["static", "continuous"])
@pytest.mark.parametrize("cache", ["paged", "contiguous"])
def test_the_summary_has_the_contracts_keys(kvcalc: Run, policy: str, cache: str) -> None:
    line = f"{LINE} --rate 50 --policy {policy} --cache {cache} --max-model-len 1k --format json"
    found = kvcalc(line)
    (record,) = found.records
    assert set(record) >= KEYS
    assert not any(isinstance(v, list | dict) for v in record.values())
    assert (record["policy"], record["cache"], record["completed"]) == (policy, cache, 40)
    assert kvcalc(line).out == found.out != kvcalc(f"{line} --seed 1").out


def test_times_follow_the_stack(kvcalc: Run) -> None:
    """Bounds are faster than any calibration. A single request has the times of `latency` with each of them."""
    tpot = {}
    for stack in ("vllm", "sglang", "datasheet"):
        options = f"--input-len 300 --output-len 20 --format json --stack {stack}"
        (record,) = kvcalc(f"serve llama-3.1-8b --rate 0.01 --num-prompts 2 {options}").records
        (alone,) = kvcalc(f"latency llama-3.1-8b {options}").records
        assert record["basis"] == alone["basis"]
        assert (record["ttft_mean_s"], record["tpot_mean_s"]) == (pytest.approx(alone["ttft_s"]), pytest.approx(alone["tpot_s"]))
        tpot[stack] = record["tpot_mean_s"]
    assert tpot["datasheet"] < min(tpot["vllm"], tpot["sglang"])


def test_cost_is_the_bill_over_the_tokens(kvcalc: Run) -> None:
    (record,) = kvcalc(f"{LINE} --rate inf --price-per-hour 2.5 --tp 2 --format json").records
    assert record["cost_per_million_tokens"] == pytest.approx(2.5 * 2 * record["duration_s"] / 3600 / (40 * 20) * 1e6)


def test_a_trace_its_limit_and_its_timeline(kvcalc: Run, tmp_path: Path) -> None:
    """4 decodes and a prompt of 500 share a pass of 504 tokens, and the timeline shows it."""
    trace, line = tmp_path / "trace.csv", tmp_path / "line.csv"
    trace.write_text("arrival_s,input_len,output_len\n" + "0,10,50\n" * 4 + "0.02,500,1\n1,1,1\n")
    (record,) = kvcalc(f"serve llama-3.1-8b --requests {trace} --num-prompts 5 --timeline {line} --format json").records
    assert (record["requests"], record["output_tokens"], record["rate"]) == (5, 201, None)
    rows = list(csv.DictReader(io.StringIO(line.read_text())))
    mixed = next(r for r in rows if r["tokens"] == "504")
    assert (mixed["prefill_tokens"], mixed["sequences"], mixed["passes"]) == ("500", "5", "1")
    assert sum(float(r["duration_s"]) for r in rows) == pytest.approx(record["duration_s"])


def test_nothing_served_is_nothing_to_draw(kvcalc: Run, tmp_path: Path) -> None:
    trace, line = tmp_path / "trace.csv", tmp_path / "line.csv"
    trace.write_text("arrival_s,input_len,output_len\n0,5000,5\n")
    for options in ("--timeline " + str(line), "--policy static,continuous"):
        command = f"serve llama-3.1-8b --requests {trace} --max-model-len 1k {options}"
        assert kvcalc(command).code == 0
        found = kvcalc(f"{command} --plot {tmp_path / 'p.png'}")
        assert found.code == 2
        assert "no request was served" in found.err.splitlines()[-1]
    assert line.read_text().startswith("rank,start_s,")


def test_rejections_and_overload_are_remarked(kvcalc: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_len,output_len\n0,100,5\n0,5000,5\n")
    found = kvcalc(f"serve llama-3.1-8b --requests {trace} --max-model-len 1k --format json")
    assert found.records[0]["rejected"] == 1 and "1 requests can never fit and are rejected" in found.err
    trace.write_text("arrival_s,input_len,output_len\n" + "".join(f"{n / 5},100,5\n" for n in range(300)))
    assert "keeps up with 5.014 requests/s, TTFT" in kvcalc(f"serve llama-3.1-8b --requests {trace}").joined
    over = kvcalc("serve llama-3.1-8b --rate 500 --num-prompts 60 --isl 100 --osl 20 --max-num-seqs 4 --format json")
    assert "keeps up with 2 requests/s, TTFT" in kvcalc("serve llama-3.1-8b --rate 2 --isl 100 --osl 20 --num-prompts 50").joined
    limits = kvcalc(
        "serve llama-3.1-8b --rate inf --num-prompts 60 --isl 100 --osl 20 --max-num-seqs 4,8 --max-num-batched-tokens 2k,8k"
    )
    assert "with max-num-seqs 8, max-num-batched-tokens" in limits.joined and ", TTFT p50" not in limits.joined
    assert over.records[0]["diverges"] is True and "the queue keeps growing" in over.err
    assert "1,024" in kvcalc("serve gpt2 --isl 2k --num-prompts 1 --osl 2").err


REFUSED = {
    "--rate 0": "rate 0.0 is not",
    "--rate fast": "rate 'fast' is not",
    "--max-num-batched-tokens 100 --max-num-seqs 256": "fewer than 256 sequences",
    "--kv-cache-memory-bytes 1000 --cache contiguous": "one contiguous reservation",
    "--input-len 0": "input length",
    "--output-len lognormal:5": "distribution",
    "--policy dynamic": "unknown policy 'dynamic'",
    "--cache pages": "unknown cache 'pages'",
    "--requests none.csv": "none.csv",
    "--timeline nowhere/at/all.csv": "no such folder",
    "--timeline t.csv --rate 1,2": "--timeline is of one run",
    "--gpu t4": "leaves no memory",
}


@pytest.mark.parametrize("options", REFUSED)
def test_what_cannot_be_met_is_one_line(kvcalc: Run, options: str) -> None:
    found = kvcalc(f"{LINE} {options}")
    assert found.code == 2
    assert found.out == ""
    assert found.err.startswith("kvcalc: ")
    assert found.err.count("\n") == 1
    assert REFUSED[options] in found.err


def test_a_trace_has_its_own_times(kvcalc: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,input_len,output_len\n0,1,1\n")
    assert "exclude each other" in kvcalc(f"serve gpt2 --requests {trace} --rate 5").err
    trace.write_text("arrival_s,input_len,output_len\n0,1,1\n3,1,1\n2,1,1\n")
    found = kvcalc(f"serve gpt2 --requests {trace}")
    assert (found.code, found.err.count("\n")) == (2, 1)
    assert f"{trace}, line 4" in found.err


def test_prompts_of_5_3_and_4_padded_to_5_waste_3_of_15(kvcalc: Run, tmp_path: Path) -> None:
    """With four requests, there is no verdict on whether the queue grows without end."""
    rows = tmp_path / "three.csv"
    rows.write_text("arrival_s,input_len,output_len\n0,5,1\n0,3,1\n0,4,1\n")
    line = f"serve gpt2 --gpu h100 --requests {rows}"
    (record,) = kvcalc(f"{line} --policy static --format json").records
    assert (record["padded_slots"], record["token_slots"], record["padding_waste"]) == (3, 15, 0.2)
    rows.write_text("arrival_s,input_len,output_len\n" + "".join(f"0.00{n},500,500\n" for n in range(4)))
    for policy in ("static", "continuous"):
        (record,) = kvcalc(f"{line} --policy {policy} --format json").records
        assert record["diverges"] is None


def test_lengths_vary_by_default_so_static_batching_pads(kvcalc: Run) -> None:
    """Azure's trace has 1,154.7 prompt and 211.1 output tokens per request. Published mixes waste 50 to 70 % of slots."""
    line = "serve llama-3.1-8b --rate inf --policy static"
    (record,) = kvcalc(f"{line} --format json").records
    assert record["input_tokens"] / 1000 == pytest.approx(1154.7, rel=0.05)
    assert record["output_tokens"] / 1000 == pytest.approx(211.1, rel=0.05)
    assert 0.5 < record["padding_waste"] < 0.8
    out = kvcalc(line).out
    assert "Equal lengths" not in out and f"Padding takes up to {record['padding_waste']:.0%}" in out
    assert "Equal lengths: static loses nothing" in kvcalc(f"{line} --num-prompts 9 --isl 10 --osl 3").out
    assert "Equal lengths" not in kvcalc("serve gpt2 --rate inf --num-prompts 9 --isl 10 --osl 3").out


def test_a_list_of_rates_says_what_each_says_alone(kvcalc: Run) -> None:
    """Tables of passes are computed once for all rows of a deployment. Prompts that are timed as whole passes are separate
    for each run."""
    line = "serve llama-3.1-8b --num-prompts 150 --input-len lognormal:300,2000 --output-len uniform:5,20 --format json --rate"
    together = kvcalc(f"{line} 5,40,5").records
    assert together == [kvcalc(f"{line} {rate}").records[0] for rate in (5, 40)] + together[:1]
