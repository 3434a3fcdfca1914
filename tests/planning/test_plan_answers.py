"""The answer of a plan: the first deployment, the notes on others, and the files and options of `plan`."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run

import kvcalc as library
from kvcalc import UserError, load_gpu, load_model
from kvcalc.planning.best_configs import CandidateRanking, candidate_record
from kvcalc.planning.grid import Candidate, SearchGrid, Target
from kvcalc.planning.search import CandidateFile
from kvcalc.planning.search_space import question_of
from kvcalc.question.plan_options import Requirement
from kvcalc.report.text.tables import seconds
from kvcalc.storage.quantization import loss_of

SMALL = {"gpu": "h100,l40s,a100-80gb", "tp": "1,2", "pp": "1", "max_gpus": "8"}
ASKED = "plan llama-3.1-8b --gpu h100,l40s,a100-80gb --tp 1,2 --pp 1 --max-gpus 8 --users 40 --context 16k"


def every(model: str, **options: Any) -> list[Candidate]:
    """Return every configuration of a question, one by one."""
    asked = question_of([load_model(model)], SMALL | options)
    return [one for batch in SearchGrid(asked.needs, asked.space).batches() for one in batch.candidates()]


def test_without_prices_each_kind_stands_by_its_fewest_gpus(kvcalc: Run) -> None:
    found = kvcalc(f"{ASKED} --max-tpot 40ms --format json").records
    kinds = list(dict.fromkeys(record["gpu"] for record in found))
    meeting = [p for p in every("llama-3.1-8b", users=40, context="16k", max_tpot="40ms") if p.meets]
    expected = {kind: min((p.gpus, p.tpot) for p in meeting if p.gpu == kind) for kind in {p.gpu for p in meeting}}
    assert {r["gpu"]: (r["total_gpus"], r["tpot_s"]) for r in reversed(found) if r["gpu"] in expected} == expected
    assert kinds == sorted(expected, key=lambda kind: expected[kind])
    assert len(found) <= 5
    assert all(r["meets"] and r["reason"] is None and r["cost_per_hour"] is None for r in found)


def test_with_prices_the_cheapest_comes_first(kvcalc: Run) -> None:
    prices = {"h100-sxm": 3.0, "l40s": 0.9, "a100-80gb": 1.7}
    words = ",".join(f"{name}={price}" for name, price in prices.items())
    found = kvcalc(f"{ASKED} --price-per-hour {words} --format json").records
    costs = [record["cost_per_hour"] for record in found]
    only_h100 = kvcalc(f"{ASKED} --price-per-hour h100=0.1025").joined
    assert only_h100.startswith("2× h100-sxm ") and ", at 0.205 per hour" in only_h100 and "l40s" not in only_h100
    meeting = [p for p in every("llama-3.1-8b", users=40, context="16k") if p.meets]
    assert costs == sorted(costs) and {record["gpu"] for record in found} == {*prices}
    assert costs[0] == min(prices[p.gpu] * p.gpus for p in meeting)
    first, per_second = found[0], found[0]["total_tokens_per_s"]
    assert first["cost_per_million_tokens"] == pytest.approx(first["cost_per_hour"] / 3600 / per_second * 1e6)
    assert per_second == pytest.approx(40 / first["tpot_s"])


def test_the_closest_smaller_deployment_lacks_memory_by_fit(kvcalc: Run) -> None:
    found = kvcalc("plan llama-3.1-8b --gpu h100 --tp 1 --pp 1 --users 64 --context 16k --verbose").joined
    assert found.startswith("3× h100-sxm in 3 replicas ")
    words = "fit llama-3.1-8b --gpu h100 --engine vllm --budget low --max-model-len 16k --max-num-seqs 32 --format json"
    fitting = kvcalc(words).records[0]["max_num_seqs"]
    assert f"2× h100-sxm in 2 replicas: {fitting} of 32 requests per replica fit" in found
    fewer = kvcalc("plan llama-3.1-8b --gpu h100 --tp 1 --pp 1 --users 40 --context 16k --verbose").joined
    assert fewer.startswith("2× h100-sxm in 2 replicas ") and f"1× h100-sxm: {fitting} of 40 requests fit" in fewer


def test_a_rate_that_no_time_meets_has_a_nearest_too(kvcalc: Run) -> None:
    """One sequence reads 16.06 GB of weights minus 1.05 GB of the token table, and 0.14 GB of cache, at 3.35 TB/s: 4.52 ms."""
    words = "plan llama-3.1-8b --rate 1 --input-len 1000 --output-len 100 --gpu h100 --max-gpus 1 --stack datasheet"
    shown = kvcalc(f"{words} --max-tpot 1ms")
    assert "the closest is 1× h100-sxm: TPOT at least 4.52 ms, target 1 ms." in shown.joined
    assert shown.joined.endswith("The targets are met with `--max-tpot 4.6ms`.")


def test_what_was_timed_comes_nearer_than_what_was_not(kvcalc: Run) -> None:
    """No H100 reads 70 billion weights in 1 ms. The closest miss has the most GPUs, not the best use of the memory."""
    words = "plan llama-3.1-70b --gpu h100 --max-gpus 16 --users 64 --context 16k --max-tpot 1ms"
    assert "with `--max-tpot " in kvcalc(words).out
    (record,) = kvcalc(f"{words} --format json").records
    assert record["tpot_s"] > 0.001 and record["capacity_sequences"] >= record["max_num_seqs"]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_points_hold_every_point_with_its_reason(kvcalc: Run, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"points{suffix}"
    found = kvcalc(f"{ASKED} --max-tpot 20ms --points {path}")
    expected = [candidate_record(p) for p in every("llama-3.1-8b", users=40, context="16k", max_tpot="20ms")]
    text = path.read_text()
    if suffix == ".jsonl":
        assert [json.loads(line) for line in text.splitlines()] == expected
    else:
        rows = list(csv.DictReader(io.StringIO(text)))
        assert [(r["gpu"], float(r["tpot_s"] or "nan"), r["reason"]) for r in rows if r["tpot_s"]] == [
            (e["gpu"], e["tpot_s"], e["reason"] or "") for e in expected if e["tpot_s"]
        ]
        assert len(rows) == len(expected)
    assert f"{len(expected):,} points in" in found.err
    assert not list(tmp_path.glob(".*"))


def test_ctrl_c_keeps_the_batches_that_were_done(tmp_path: Path) -> None:
    asked = question_of([load_model("llama-3.1-8b")], SMALL | {"users": 40, "context": "16k"})
    path = tmp_path / "points.jsonl"
    batch, *_ = SearchGrid(asked.needs, asked.space).batches()
    with pytest.raises(KeyboardInterrupt), CandidateFile(str(path), {}) as points:
        points.write(batch)
        raise KeyboardInterrupt
    assert len(path.read_text().splitlines()) == len(batch.index)
    path.write_text("of before")
    with pytest.raises(KeyboardInterrupt), CandidateFile(str(path), {}):
        raise KeyboardInterrupt
    assert path.read_text() == "of before"
    path.unlink()
    with pytest.raises(ZeroDivisionError), CandidateFile(str(path), {}):
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir()), "of an error nothing is left"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--context 4k", "a plan needs a load. "), ("--users 4", "a plan needs the tokens of a request. "),
        ("--users 4 --context 4k --isl 5 --osl 5", "context and input-len exclude each other. "),
        ("--users 4 --rate 2 --isl 5 --osl 5", "use either --users or --rate. "), ("--rate 2 --context 4k", "a load without --users needs the lengths of a request. "),
        ("--users 4 --context 4k --max-tpot fast", "max-tpot 'fast' is not a time above 0. "),
        ("--users 4 --context 4k --gpu h100 --price-per-hour h100=free", "price of h100-sxm 'free' is not a number from 0 up"),
        ("--users 4 --context 4k --gpu h100,l4 --price-per-hour 2", "price-per-hour '2' is one price for 2 GPU models. "),
        ("--users 4 --context 4k --max-gpus 0", "max-gpus "), ("--users 4 --context 4k --points x.txt", "points 'x.txt' should end in .csv or .jsonl"),
        (f"--users {','.join(map(str, range(1, 502)))} --context 1k,2k", "1,002 requirements; the maximum is 1,000. "),
        ("--users 4 --context 4k --gpu h100 --tp 3", "tensor-parallel size 3 does not divide "),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_in_one_line(kvcalc: Run, words: str, message: str) -> None:
    found = kvcalc(f"plan llama-3.1-8b {words}")
    assert (found.code, found.out, found.err.count("\n")) == (2, "", 1)
    assert found.err.startswith(f"kvcalc: {message}")


def test_a_model_that_the_engine_refuses_is_named_beside_the_answer_of_another(kvcalc: Run) -> None:
    found = kvcalc("plan gpt2 deepseek-v4-flash --gpu h100 --users 4 --context 1k --engine sglang --max-gpus 1")
    assert found.code == 0 and "gpt2, " in found.joined
    assert found.err.startswith(
        "note: no memory rules of SGLang are known for deepseek-v4-flash. Use --engine vllm or --engine none"
    )


def test_a_smaller_format_is_marked_and_a_published_one_is_not(kvcalc: Run) -> None:
    found = kvcalc(
        "plan llama-3.1-8b --gpu h100 --tp 1 --pp 1 --users 4 --context 4k -q none,fp8 --kv-cache-dtype auto,fp8 --format json"
    )
    noted = {(r["quantization"], r["kv_cache_dtype"]): r["quality"] for r in found.records}
    assert noted["fp8", "fp8"] == (
        f"weights in fp8, published in bf16: {loss_of('weights', 'fp8')}; "
        f"cache in fp8, published in bf16: {loss_of('cache', 'fp8')}"
    )
    assert noted[None, "bf16"] is None


@pytest.mark.parametrize(
    "words",
    [
        "--users 40 --context 16k --gpu h100 --tp 2 --pp 1 -q none,fp8",
        "--users 300 --context 16k --gpu a100-40gb-sxm --tp 4 --pp 1 --kv-cache-dtype int8_per_token_head",
        "--rate 4 --isl 2k --osl 50 --gpu h200,l40s --tp 1 --price-per-hour h200=3.5,l40s=1",
    ],
)
def test_what_explains_a_point_gives_its_figures(kvcalc: Run, words: str) -> None:
    """The named `fit` command gives the capacity, and the formulas end in the record's figures."""
    line = f"plan llama-3.1-8b {words}"
    point, told = kvcalc(f"{line} --format json").records[0], kvcalc(f"{line} --explain").out
    assert f" {words.split()[1]} {'requests/s' if 'rate' in words else 'users'} of " in told
    (command,) = [text.strip().removeprefix("kvcalc ") for text in told.splitlines() if "  kvcalc " in text]
    fits = kvcalc(command.replace("--explain", "--format json")).records[-1]
    assert fits["capacity_sequences"] == point["capacity_sequences"]
    assert f"tokens_per_s_per_gpu = {point['tokens_per_s']:,.6g} · {point['replicas']} / {point['total_gpus']} GPUs = " in told
    assert f"  tpot_s = {seconds(point['tpot_s'])}\n" in told and f", {point['time_basis']} times:" in told


def test_an_answer_of_one_token_is_explained(kvcalc: Run) -> None:
    """8 sequences generate one token each in the time of their prompts, so there is no TPOT."""
    line = "plan llama-3.1-8b --gpu h100 --users 8 --isl 1000 --osl 1 --tp 1 --pp 1"
    record = kvcalc(f"{line} --format json").records[0]
    assert record["tpot_s"] is None and record["tokens_per_s"] == pytest.approx(8 / record["e2e_s"])
    assert "tokens_per_s = 8 · 1 tokens / " in kvcalc(f"{line} --explain").out


def test_the_api_answers_as_the_command_does(kvcalc: Run) -> None:
    found = library.plan("llama-3.1-8b", **SMALL, users=40, context="16k", max_tpot=0.04)
    assert found.records() == kvcalc(f"{ASKED} --max-tpot 40ms --format json").records
    assert repr(found) == kvcalc(f"{ASKED} --max-tpot 40ms").out.rstrip("\n")
    with pytest.raises(UserError, match="unknown option 'user'"):
        library.plan("llama-3.1-8b", user=4)


def test_a_need_is_met_where_every_limit_holds() -> None:
    need = Requirement(users=8, context=4096, max_ttft=0.2, max_tpot=0.01, min_throughput=900)
    asked = question_of([load_model("llama-3.1-8b")], SMALL | {"users": 1, "context": 1})
    ranking = CandidateRanking(need, asked.space)
    for batch in SearchGrid([need], asked.space).batches():
        ranking.add(batch)
        figures = batch.figures
        expected = (figures["capacity"] >= figures["max_num_seqs"]) & (figures["ttft"] <= 0.2) & (figures["tpot"] <= 0.01)
        assert ((figures["violated_target"] == Target.NONE) == expected & (figures["total_tokens_per_s"] >= 900)).all()
    assert ranking.result().num_met
    assert load_gpu("h100").name in {p.gpu for p in ranking.result().best}
