"""Traces, with an error at the line of each problem; random requests have the requested distributions."""

import math
from pathlib import Path

import numpy as np
import pytest

from kvcalc import UserError
from kvcalc.question.serving_options import Workload
from kvcalc.serving.requests import Requests, length_sampler, read_requests, sample_workload

HEAD = "arrival_s,input_len,output_len\n"


def read(path: Path, text: str | bytes) -> Requests:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_requests(path)


def columns(requests: Requests) -> list[list[float]]:
    return [requests.arrival_s.tolist(), requests.input_len.tolist(), requests.output_len.tolist()]


def test_a_trace_in_any_column_order(tmp_path: Path) -> None:
    found = read(tmp_path / "t.csv", "id,output_len,arrival_s,input_len\na,3,0,100\n\nb,4.0,0.5,2e2\n")
    assert columns(found) == [[0, 0.5], [100, 200], [3, 4]]
    assert len(read_requests(tmp_path / "t.csv", max_rows=1)) == 1


def test_clients_of_a_closed_loop_need_no_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("output_len,input_len\n3,100\n4,200\n")
    assert columns(sample_workload(Workload(requests=str(path), max_concurrency=1))) == [[0, 0], [100, 200], [3, 4]]
    with pytest.raises(UserError, match=r"lacks the column arrival_s.* give the concurrent requests"):
        sample_workload(Workload(requests=str(path)))
    path.write_text("output_len\n3\n")
    with pytest.raises(UserError, match="lacks the columns arrival_s, input_len"):
        sample_workload(Workload(requests=str(path), max_concurrency=1))
    path.write_text(HEAD + "0,100,3\n7,200,4\n")
    assert sample_workload(Workload(requests=str(path), max_concurrency=1)).arrival_s.tolist() == [0, 7]


def test_an_azure_trace_counts_from_its_first_row(tmp_path: Path) -> None:
    """Times have seven decimals as in the files of 2023, or a time zone as in the files of 2024."""
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    rows = "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n"
    found = read(tmp_path / "t.csv", head + rows)
    assert found.arrival_s.tolist() == pytest.approx([0, 0.052])
    assert found.input_len.tolist() == [4808, 3180]
    zoned = read(tmp_path / "t.csv", head + "2024-05-10 00:00:00.009930+00:00,1,2\n2024-05-10 00:01:00.009930+00:00,1,2\n")
    assert zoned.arrival_s.tolist() == [0, 60]
    with pytest.raises(UserError, match=r"line 3: TIMESTAMP .* is not a date and time like the others"):
        read(tmp_path / "t.csv", head + "2024-05-10 00:00:00,1,2\n2024-05-10 00:01:00+00:00,1,2\n")


BROKEN = {
    "unsorted": (HEAD + "0,1,1\n5,1,1\n4,1,1\n", "line 4: arrival 4 comes before the arrival of the request above"),
    "negative time": (HEAD + "-1,1,1\n", "line 2: arrival_s '-1' is not"),
    "NaN time": (HEAD + "0,1,1\nnan,1,1\n", "line 3: arrival_s 'nan' is not"),
    "infinite time": (HEAD + "inf,1,1\n", "line 2: arrival_s 'inf' is not"),
    "negative length": (HEAD + "0,1,1\n\n1,-5,1\n", "line 4: input_len '-5' is not"),
    "no answer": (HEAD + "0,1,0\n", "line 2: output_len '0' is not"),
    "half a token": (HEAD + "0,1.5,1\n", "line 2: input_len '1.5' is not"),
    "NaN length": (HEAD + "0,1,nan\n", "line 2: output_len 'nan' is not"),
    "absurd length": (HEAD + "0,1e300,1\n", "line 2: input_len '1e300' is not"),
    "no number": (HEAD + "0,many,1\n", "line 2: input_len 'many' is not"),
    "short row": (HEAD + "0,1\n", "line 2: has 2 cells, and the header names 3"),
    "missing columns": ("arrival_s,tokens\n0,1\n", "line 1: lacks the columns input_len, output_len"),
    "Azure without answers": ("TIMESTAMP,ContextTokens\n0,1\n", "line 1: lacks the column generatedtokens"),
    "a column twice": ("arrival_s,input_len,input_len,output_len\n0,1,1,1\n", "line 1: names the column input_len twice"),
    "no date": ("TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,1,1\n", "line 2: TIMESTAMP 'soon' is not a date"),
    "empty": ("", "is empty"),
    "header alone": (HEAD, "holds no requests"),
    "not UTF-8": (HEAD.encode() + b"0,\xff,1\n", "is not UTF-8 text"),
    "an open quote": (HEAD + '0,"1' + "x" * 200_000 + "\n", "is not CSV"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_traces_are_named_by_line(name: str, tmp_path: Path) -> None:
    text, message = BROKEN[name]
    with pytest.raises(UserError) as caught:
        read(tmp_path / "trace.csv", text)
    assert "trace.csv" in caught.value.where
    assert message in str(caught.value)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float, variation: float) -> None:
    """Gamma intervals of shape b: mean 1/rate, coefficient of variation 1/√b; Poisson at b = 1."""
    load = Workload(num_prompts=40_000, rate=5.0, burstiness=burstiness, seed=1)
    gaps = np.diff(sample_workload(load).arrival_s)
    assert gaps.mean() == pytest.approx(0.2, rel=4 * variation / 200)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_lengths_have_their_distributions() -> None:
    def drawn(text: str) -> np.ndarray:
        return sample_workload(Workload(num_prompts=40_000, input_len=text, seed=2)).input_len

    assert set(drawn("4k").tolist()) == {4096}
    uniform = drawn("uniform:3,6")
    assert set(uniform.tolist()) == {3, 4, 5, 6}
    assert uniform.mean() == pytest.approx(4.5, rel=0.01)
    skewed = drawn("lognormal:500,2k")
    assert skewed.mean() == pytest.approx(500, rel=0.02)
    assert np.percentile(skewed, 99) == pytest.approx(2048, rel=0.05)
    assert skewed.min() >= 1


def test_the_seed_decides_and_the_rate_leaves_lengths_alone() -> None:
    def drawn(rate: float, seed: int) -> Requests:
        return sample_workload(Workload("", rate, 1.0, 0, 100, "uniform:1,1000", "lognormal:100,400", seed))

    first, same, other, faster = drawn(1.0, 3), drawn(1.0, 3), drawn(1.0, 4), drawn(9.0, 3)
    assert columns(first) == columns(same)
    assert (first.arrival_s != other.arrival_s).all()
    assert (first.input_len == faster.input_len).all()
    assert first.arrival_s == pytest.approx(faster.arrival_s * 9)
    assert (drawn(math.inf, 3).arrival_s == 0).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("normal:5,6", "no distribution"),
        ("uniform:5", "no distribution"),
        ("uniform:6,5", "5 is below 6"),
        ("uniform:0,5", "outside 1"),
        ("lognormal:10,200", "no log-normal distribution"),
        ("-5", "not a whole number"),
        ("nan", "not a whole number"),
        ("1G", "more than the 1,048,576 tokens"),
    ],
)
def test_lengths_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        length_sampler(text, "input length")


@pytest.mark.parametrize(
    "change", [{"num_prompts": -1}, {"rate": 0.0}, {"rate": -1.0}, {"rate": math.nan}, {"burstiness": 0.0}, {"seed": -1}]
)
def test_draws_that_make_no_sense(change: dict[str, float]) -> None:
    with pytest.raises(UserError):
        sample_workload(Workload(**change))  # type: ignore[arg-type]
