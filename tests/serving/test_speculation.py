"""Speculative decoding: the formula compared with random draws, and its times with the passes of a step."""

import msgspec
import pytest
from conftest import Run

from kvcalc import Batch, UserError, load_gpu, load_model
from kvcalc.planning.sweeps import speculation_curves
from kvcalc.question.serving_options import LatencyOptions
from kvcalc.report.charts.chart import Series
from kvcalc.report.charts.load_plot import speculation_chart
from kvcalc.serving.speculation import (
    MAX_BEST_DRAFTED,
    best_drafted,
    break_even_batch,
    draft_model,
    expected_tokens,
    step_times,
    verification,
)
from kvcalc.timing.deployment import TimedDeployment


def clocks(
    target: str = "llama-3.1-70b", draft: str = "llama-3.2-1b", gpu: str = "b200"
) -> tuple[TimedDeployment, TimedDeployment]:
    first = TimedDeployment(load_model(target), load_gpu(gpu))
    return first, msgspec.structs.replace(first, model=draft_model(first.model, draft))


def test_expected_tokens_by_hand() -> None:
    """1 + 0.8 + 0.64 + 0.512 + 0.4096 = 3.3616."""
    assert expected_tokens(0.8, 4) == pytest.approx(3.3616, abs=1e-12)
    assert [expected_tokens(a, k) for a, k in ((0.0, 4), (1.0, 4), (0.5, 0))] == [1, 5, 1]
    assert expected_tokens(1 - 1e-12, 4) == pytest.approx(5)


@pytest.mark.parametrize("acceptance", [-0.1, 65, float("nan")])
def test_acceptance_is_a_probability(acceptance: float) -> None:
    with pytest.raises(UserError, match="is not a number from 0 to 64"):
        LatencyOptions(draft="llama-3.2-1b", acceptance_rate=acceptance)


def test_a_step_is_k_drafts_and_one_verification() -> None:
    target, draft = clocks()
    times = step_times(target, draft, 2000, 3, 4)
    tpot_s, speedup = times.per_token(0.8), times.speedup(0.8)
    drafting = 4 * draft.seconds(Batch.decode(2000, 3))
    verifying = target.seconds(verification(3, 4, 2000), all_positions=True)
    group = verification(3, 4, 2000).groups[0]
    assert (group.count, group.new, group.past) == (3, 5, 1999)
    assert tpot_s == pytest.approx((drafting + verifying) / 3.3616)
    assert speedup == pytest.approx(target.seconds(Batch.decode(2000, 3)) / tpot_s)
    assert 1 < speedup < 3.3616


def test_a_speedup_below_one_is_reported() -> None:
    """A draft that is almost never right, and a draft as large as the target, cost more than they save."""
    target, draft = clocks()
    assert step_times(target, draft, 2000, 1, 4).speedup(0.0) < 1
    assert step_times(target, target, 2000, 1, 4).speedup(0.8) == pytest.approx(3.3616 / 5, rel=0.02)


def test_the_best_number_is_the_best_of_all() -> None:
    target, draft = clocks()
    for acceptance in (0.1, 0.6, 0.9):
        found = best_drafted(target, draft, 2000, 1, acceptance)
        tried = [step_times(target, draft, 2000, 1, k).per_token(acceptance) for k in range(1, MAX_BEST_DRAFTED + 1)]
        assert found.per_token(acceptance) == min(tried)
    assert best_drafted(target, draft, 2000, 1, 0.9).drafted > best_drafted(target, draft, 2000, 1, 0.5).drafted


def test_it_stops_paying_where_verification_turns_compute_bound() -> None:
    """Five queries per sequence reach the ridge point at a fifth of the batch. With long contexts, decode is memory-bound up
    to larger batches."""
    target, draft = clocks()
    batch = break_even_batch(target, draft, 500, 4, 0.6)
    assert batch is not None
    over, under = (step_times(target, draft, 500, n, 4).speedup(0.6) for n in (batch, batch // 2))
    assert over < 1 <= under
    assert break_even_batch(target, draft, 16_000, 4, 0.6) is None
    assert break_even_batch(target, draft, 500, 4, 0.0) == 1


def test_the_mtp_head_of_deepseek() -> None:
    """One further layer and a projection of 2·7168 × 7168, between the embedding and the LM head of the model."""
    target = load_model("deepseek-v3")
    head = draft_model(target, "mtp")
    assert head.layers == 1
    outer = {w.name: w.elements for w in target.outer_weights}
    assert head.parameters - sum(outer.values()) == pytest.approx(target.mtp_parameters, rel=1e-5)  # less its norms
    with pytest.raises(UserError, match="declares no multi-token-prediction layers"):
        draft_model(load_model("llama-3.1-8b"), "mtp")


def test_lists_make_a_row_for_each_rate_and_number(kvcalc: Run) -> None:
    """Expected tokens of k = 1, 4 at a = 0.3, 0.9: 1.3 and 1.9; Σ 0.3^i = 1.4251 and Σ 0.9^i = 4.0951 for i to 4. So 1.4251
    tokens of k = 4 are the rate 0.3."""
    line = "latency llama-3.1-70b --gpu b200 --stack datasheet --draft llama-3.2-1b --acceptance-rate 0.3,0.9 --input-len 500"
    records = kvcalc(f"{line} --num-speculative-tokens 1,4 --format json").records
    assert [(r["num_speculative_tokens"], r["acceptance_rate"]) for r in records] == [(1, 0.3), (1, 0.9), (4, 0.3), (4, 0.9)]
    assert [r["tokens_per_step"] for r in records] == pytest.approx([1.3, 1.9, 1.4251, 4.0951])
    assert all(r["speculative_tpot_s"] * r["tokens_per_step"] == r["draft_s"] + r["verify_s"] for r in records)
    line = "latency llama-3.1-8b --num-speculative-tokens 4 --acceptance-rate 1.4251 --format json --draft"
    eagle, layer = (kvcalc(f"{line} {draft}").records[0] for draft in ("eagle", "layers=1"))
    assert eagle == layer and eagle["acceptance_rate"] == pytest.approx(0.3, abs=1e-4)


def test_the_picture_is_the_formula_at_every_rate() -> None:
    """The time of plain decoding divided by the time per token: the expected tokens divided by a constant."""
    target, draft = clocks()
    asked = [LatencyOptions(input_len=500, output_len=100, draft="llama-3.2-1b", num_speculative_tokens=k) for k in (1, 4)]
    chart = speculation_chart(speculation_curves([target], asked), asked[0])
    for series, drafted in zip(chart.series[:2], (1, 4), strict=True):
        times = step_times(target, draft, 550, 1, drafted)
        gain = times.plain_s / (times.draft_s + times.verify_s)
        assert series.xs[0] == 0 and series.xs[-1] == 1 and len(series.xs) == 51
        assert series.ys == pytest.approx([gain * sum(a**i for i in range(drafted + 1)) for a in series.xs])
    assert chart.series[2] == Series("plain decode", (), [1.0], "limit")
